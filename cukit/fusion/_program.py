"""Runs a traced function with fused ops in it: step by step, or as a CUDA graph."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cukit.fusion._match import Match
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
    """Replays the recorded operations with the fused ops."""

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
        for node in (*nodes, *found.inputs):
            node.value = None  # frees the arrays of the sample

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the arguments have the shapes, dtypes, strides and other values of the sample."""
        return bool(signature((args, kwargs)) == self._sample)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values: dict[Node, Any] = dict(zip(self._inputs, arrays_of((args, kwargs)), strict=True))
        for node, fusion in self._steps:
            if fusion is None:
                own, named = replaced((node.args, node.kwargs), values.__getitem__)
                values[node] = node.call(*own, **named)
            else:
                values[node] = fusion.run(values.__getitem__)
        return replaced(self._result, values.__getitem__)


class GraphedCall:
    """A CUDA graph of a call: copies the inputs into captured arrays and the results out."""

    def __init__(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        cupy = sys.modules["cupy"]
        self._sample = signature((args, kwargs))
        self._inputs = [array.copy() for array in arrays_of((args, kwargs))]
        copies = iter(self._inputs)
        own = tree_map((args, kwargs), is_array, lambda _: next(copies))

        def run() -> Any:
            return call(*own) if isinstance(call, Program) else call(*own[0], **own[1])

        # A replay writes to the memory of the captured intermediates again, so that memory must not
        # return to a pool from which other arrays are allocated.
        self._pool = cupy.cuda.MemoryPool()
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.wait_event(cupy.cuda.get_current_stream().record())
        with cupy.cuda.using_allocator(self._pool.malloc), stream:
            run()
            stream.synchronize()
            stream.begin_capture()
            try:
                self._output = run()
            except BaseException:
                with contextlib.suppress(Exception):  # fails again, as the capture is invalid
                    stream.end_capture()
                raise
            self._graph = stream.end_capture()
        stream.synchronize()
        self._cupy = cupy

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the arguments have the shapes, dtypes, strides and values of the capture."""
        return bool(signature((args, kwargs)) == self._sample)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for own, given in zip(self._inputs, arrays_of((args, kwargs)), strict=True):
            own[...] = given
        self._graph.launch(self._cupy.cuda.get_current_stream())
        return tree_map(self._output, is_array, lambda array: array.copy())
