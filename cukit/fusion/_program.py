"""Runs a traced function with fused ops in it: step by step, or as a CUDA graph."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cukit.core.arrays import address_of
from cukit.fusion._match import Match, form
from cukit.fusion._patterns import Pattern
from cukit.fusion._trace import Node, Trace, is_node, replaced
from cukit.fusion._tree import arrays_of, is_array, leaves, signature, tree_map


@dataclass(eq=False)
class Fusion:
    """A candidate: the matched operations, and the arguments of the op that replaces them."""

    pattern: Pattern
    match: Match
    arguments: dict[str, Any]
    dtype: Any

    @property
    def multiplies(self) -> bool:
        """Whether it replaces a matrix product, which CuPy cannot capture in a CUDA graph."""
        forms = map(form, self.match.inner)
        return any(each is not None and each.name == "matmul" for each in forms)

    def run(self, value_of: Callable[[Node], Any]) -> Any:
        found = self.pattern.replace(**replaced(self.arguments, value_of))
        return found if found.dtype == self.dtype else found.astype(self.dtype)


class Recomputed(dict[Node, Any]):
    """Values of nodes: nodes in `inside` are recomputed, others keep their value on the sample."""

    def __init__(self, inside: set[Node]) -> None:
        super().__init__()
        self._inside = inside

    def __missing__(self, node: Node) -> Any:
        if node not in self._inside:
            return node.value
        args, kwargs = replaced((node.args, node.kwargs), self.__getitem__)
        self[node] = value = node.call(*args, **kwargs)
        return value


class Program:
    """Replays the recorded operations with the fused ops.

    Attributes:
        failed: the operation that raised an error, and the shapes of its arrays.
    """

    def __init__(
        self,
        found: Trace,
        fusions: list[Fusion],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._inputs = found.inputs
        self._result = found.result
        self._sample = signature((args, kwargs))
        by_root = {fusion.match.root: fusion for fusion in fusions}
        nodes = found.nodes()
        needed = set(leaves(found.result, is_node))
        for node in reversed(nodes):
            if node in needed:
                fusion = by_root.get(node)
                used = (node.args, node.kwargs) if fusion is None else fusion.arguments
                needed.update(leaves(used, is_node))
        self._steps = [(node, by_root.get(node)) for node in nodes if node in needed]
        self.failed = ""

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the arguments have the shapes, dtypes, strides and other values of the sample."""
        return bool(signature((args, kwargs)) == self._sample)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values: dict[Node, Any] = dict(zip(self._inputs, arrays_of((args, kwargs)), strict=True))
        for node, fusion in self._steps:
            try:
                if fusion is None:
                    own, named = replaced((node.args, node.kwargs), values.__getitem__)
                    values[node] = node.call(*own, **named)
                else:
                    values[node] = fusion.run(values.__getitem__)
            except Exception:
                used = [*map(values.get, node.parents()), *arrays_of((node.args, node.kwargs))]
                shapes = [f"{list(x.shape)} {x.dtype.name}" for x in used if is_array(x)]
                self.failed = f"{node.name} of {' and '.join(shapes)}"
                raise
        return replaced(self._result, values.__getitem__)


class GraphedCall:
    """A CUDA graph of a call.

    The graph reads the arrays of the sample in place, so that weights are not copied. The first
    call that passes another array in place of one of them captures the graph again; from then on
    the graph reads a copy of that argument, which every call updates. Results are copied out.
    """

    def __init__(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._cupy = sys.modules["cupy"]
        self._call = call
        self._sample = args, kwargs
        self._signature = signature(self._sample)
        self._copied: set[int] = set()
        self._capture(arrays_of(self._sample))

    def _capture(self, read: list[Any]) -> None:
        """Captures the call on these arrays."""
        cupy, inputs = self._cupy, iter(read)
        own, named = tree_map(self._sample, is_array, lambda _: next(inputs))

        def run() -> Any:
            call = self._call
            return call(own, named) if isinstance(call, Program) else call(*own, **named)

        # A replay writes to the memory of the captured intermediates again, so that memory must not
        # return to a pool from which other arrays are allocated.
        pool = cupy.cuda.MemoryPool()
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.wait_event(cupy.cuda.get_current_stream().record())
        with cupy.cuda.using_allocator(pool.malloc), stream:
            run()
            stream.synchronize()
            stream.begin_capture()
            try:
                output = run()
            except BaseException:
                with contextlib.suppress(Exception):  # fails again, as the capture is invalid
                    stream.end_capture()
                raise
            graph = stream.end_capture()
        stream.synchronize()
        self._pool, self._read, self._output, self._graph = pool, read, output, graph

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the arguments have the shapes, dtypes, strides and values of the capture."""
        return bool(signature((args, kwargs)) == self._signature)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = arrays_of((args, kwargs))
        pairs = zip(self._read, given, strict=True)
        other = {i for i, (own, array) in enumerate(pairs) if address_of(own) != address_of(array)}
        if not other <= self._copied:
            copied = self._copied | other
            self._capture(
                [
                    array.copy(order="K") if i in copied else array
                    for i, array in enumerate(self._read)
                ]
            )
            self._copied = copied
        for i in self._copied:
            self._read[i][...] = given[i]
        self._graph.launch(self._cupy.cuda.get_current_stream())
        return tree_map(self._output, is_array, lambda array: array.copy())
