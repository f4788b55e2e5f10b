"""`optimize`: replaces parts of an array function with verified fused kernels in a CUDA graph."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from cukit.core.device import gpu_available
from cukit.core.scalars import check_flag, check_integer, check_number
from cukit.errors import ConfigError, CukitError
from cukit.fusion._match import Match, match, uncast
from cukit.fusion._patterns import Pattern, patterns
from cukit.fusion._program import Fusion, GraphedCall, Program, Recomputed
from cukit.fusion._trace import (
    CannotRepeatError,
    CannotTraceError,
    Node,
    Trace,
    is_node,
    is_same,
    trace,
)
from cukit.fusion._tree import arrays_of, is_array, leaves
from cukit.fusion.report import (
    TOLERANCES,
    WHOLE_TOLERANCE,
    FusionReport,
    call_arguments,
    table,
    time_cell,
)

_WARM_UP = 2
_FUSED = "fused"
_NOT_FASTER = "kept: not faster"
_FOR_GRAPH = "fused for the CUDA graph"
_CUBLAS = (
    ". CuPy cannot capture cuBLAS; cukit's linear replaces products of contiguous float16 or "
    "bfloat16 arrays with a weight of two axes, and can be captured"
)

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Optimized:
    """A function with fused ops, as :func:`optimize` returns it.

    Call it like the function. Calls whose shapes, dtypes, strides or non-array arguments differ
    from the sample's run the original. As a context manager it restores the original on exit.

    Attributes:
        function: the original.
        report: one FusionReport per candidate.
        error: difference of the function's outputs, as in FusionReport.
        before_us, after_us: median times of the whole function, None if not measured: without a
            GPU, and `after_us` in a dry run.
        note: what was not done, and why; "" if everything was.
    """

    def __init__(self, function: Callable[..., Any], note: str = "") -> None:
        self.function = function
        self.report: list[FusionReport] = []
        self.error = 0.0
        self.before_us: float | None = None
        self.after_us: float | None = None
        self.note = note
        self._program: Program | None = None
        self._graph: GraphedCall | None = None

    def restore(self) -> Callable[..., Any]:
        """Makes all later calls run the original, and returns it."""
        self._program = self._graph = None
        return self.function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result."""
        if self._graph is not None and self._graph.fits(args, kwargs):
            return self._graph(args, kwargs)
        if self._program is not None and self._program.fits(args, kwargs):
            return self._program(args, kwargs)
        return self.function(*args, **kwargs)

    def __enter__(self) -> Optimized:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.restore()

    def __str__(self) -> str:
        """A table with one line per candidate and one for the whole function."""
        rows = [("op", "operations", "result", "error", "before us", "after us", "outcome")]
        rows += [
            (row.op, str(row.operations), "x".join(map(str, row.shape)), f"{row.error:.1e}",
             time_cell(row.before_us), time_cell(row.after_us), row.outcome)
            for row in self.report
        ]  # fmt: skip
        whole = (f"{self.error:.1e}", time_cell(self.before_us), time_cell(self.after_us), "")
        rows.append(("whole function", "", "", *whole))
        return table(rows, self.note)


def optimize(
    function: Callable[..., Any],
    sample: Any,
    *,
    use_cuda_kernels: bool = True,
    tolerance: float | None = None,
    only_faster: bool = True,
    dry_run: bool | None = None,
    cuda_graph: bool | None = None,
    repeats: int = 10,
) -> Optimized:
    """Replaces sequences of operations on CuPy or NumPy arrays with fused kernels.

    The function runs a few times on `sample`, and its operations are recorded. Subgraphs equivalent
    to one of cukit's ops are candidates. Each op runs on the inputs of its subgraph; it is kept if
    the results agree and, on a GPU, if it is faster. This also compiles the kernels. On a GPU the
    function is then captured in a CUDA graph; calls with the sample's shapes replay the graph. CuPy
    cannot capture cuBLAS, so slower products of cukit replace it if the graph as a whole is faster.

    ===============  ============================================================================
    flash_attention  softmax(q k^T scale) v over [..., heads, positions, head_dim], with a boolean
                     mask (a constant triangular mask becomes causal=True) or an added bias
    rms_norm         x / sqrt(mean(x^2) + eps) * weight
    layer_norm       (x - mean) / sqrt(variance + eps) * weight + bias
    linear           x @ w or x @ w.T with a contiguous w of two axes, also with a bias and
                     followed by gelu, gelu_tanh, silu or relu
    gelu             exact (erf) or tanh approximation
    ===============  ============================================================================

    Casts between floating-point types are ignored, because the ops accumulate in float32.

    Args:
        function: takes arrays, nested in tuples, lists and dictionaries, and other values. Code for
            CuPy, NumPy or an array-API namespace can be traced. A function that reads values on the
            host, assigns to elements or modifies an array in place cannot; its operations are not
            replaced. Models of cukit already consist of fused ops and are only captured.
        sample: the input: an array, a tuple of arguments or a dict of keyword arguments.
        use_cuda_kernels: False: replace nothing.
        tolerance: largest accepted error of an op; None: by dtype, see TOLERANCES. Nothing is
            replaced if the error of the whole function exceeds four times the tolerance.
        only_faster: keep the original if the op is not faster.
        dry_run: only verify and report. None: True for NumPy arrays, where the ops would run
            NumPy references.
        cuda_graph: whether to capture a CUDA graph. None: on a GPU, if the function can be
            captured, writes to no array in place, computes the same in every call, and the graph is
            faster. The graph reads the arrays of the sample in place; once a call passes another
            array for an argument, calls copy that argument. Calls return copies of the graph's
            outputs; arrays that the function closes over must not be reallocated.
        repeats: calls per timing, which is their median.

    Returns:
        :class:`Optimized`: a callable with the report, which can restore the original.

    Raises:
        ConfigError: an invalid option.

    A trace is only valid for the shapes of the sample; other shapes run the original.
    Non-array values that the function closes over are frozen at the trace, arrays are kept by
    reference, and side effects such as printing are not repeated.

    >>> import numpy as np, cukit as ck
    >>> def norm(x, weight):
    ...     return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * weight
    >>> x = np.random.rand(4, 64).astype(np.float32)
    >>> [(row.op, row.outcome) for row in ck.optimize(norm, (x, x[0])).report]
    [('rms_norm', 'would fuse')]
    """
    op = "optimize"
    if not callable(function):
        raise ConfigError(f"{op}: function must be callable, got {type(function).__name__}")
    check_flag(op, "use_cuda_kernels", use_cuda_kernels)
    check_flag(op, "only_faster", only_faster)
    for name, flag in (("dry_run", dry_run), ("cuda_graph", cuda_graph)):
        if flag is not None:
            check_flag(op, name, flag)
    check_integer(op, "repeats", repeats, least=1)
    if tolerance is not None:
        check_number(op, "tolerance", tolerance, least=0)
    if not use_cuda_kernels:
        return Optimized(function, "use_cuda_kernels=False: nothing was replaced")
    args, kwargs = call_arguments(sample)
    on_gpu = any(not isinstance(array, np.ndarray) for array in arrays_of((args, kwargs)))
    if cuda_graph and not on_gpu:
        raise ConfigError(f"{op}: cuda_graph=True needs arrays on a GPU")
    dry = not on_gpu if dry_run is None else bool(dry_run)
    result = Optimized(function)
    before = function(*args, **kwargs)
    if on_gpu:
        result.before_us = _median_us(lambda: function(*args, **kwargs), repeats)
    notes = []
    if not on_gpu:
        here = "the arrays are on the CPU" if gpu_available() else "this machine has no GPU"
        notes.append(f"{here}: ops ran on cukit's references, nothing was timed")
    candidates = _Candidates((args, kwargs), before, tolerance)
    for_graph: tuple[Program, float] | None = None
    try:
        found = trace(function, args, kwargs)
        if not is_same(found, trace(function, args, kwargs)):
            raise CannotRepeatError("it computes with values that change from call to call")
    except CannotTraceError as reason:
        notes.append(f"nothing was replaced: {reason}")
        if isinstance(reason, CannotRepeatError):
            cuda_graph = bool(cuda_graph)
    except Exception as error:
        notes.append(f"nothing was replaced: the trace failed with {_summary(error)}")
    else:
        for fusion in _find(found):
            candidates.rows[fusion] = _judge(fusion, tolerance, only_faster, on_gpu, repeats)
        fused = candidates.having(_FUSED)
        result._program, result.error = candidates.verified(found, fused)
        if result._program is None:
            candidates.mark(fused, "kept: the function's result changed too much")
        products = candidates.slower_products()
        if products:
            program, whole = candidates.verified(found, [*candidates.having(_FUSED), *products])
            for_graph = None if program is None else (program, whole)
        found.free()
    if dry:
        candidates.mark(candidates.having(_FUSED), "would fuse")
        result.restore()
    elif on_gpu and cuda_graph is not False:
        note = _capture(result, for_graph, (args, kwargs), bool(cuda_graph), repeats)
        if note:
            notes.append(note)
        elif for_graph is not None:
            candidates.mark(candidates.slower_products(), _FOR_GRAPH)
    result.report = list(candidates.rows.values())
    if on_gpu and not dry:
        result.after_us = _median_us(lambda: result(*args, **kwargs), repeats)
    result.note = "; ".join(notes)
    return result


class _Candidates:
    """The candidates of a function, each with its report, and programs with some of them."""

    def __init__(self, call: Call, before: Any, tolerance: float | None) -> None:
        """before: the function's result for the call."""
        self.rows: dict[Fusion, FusionReport] = {}
        self._call = call
        self._before = before
        self._tolerance = tolerance

    def having(self, outcome: str) -> list[Fusion]:
        """The candidates with an outcome."""
        return [each for each, row in self.rows.items() if row.outcome == outcome]

    def slower_products(self) -> list[Fusion]:
        """Correct candidates that replace a matrix product and are not faster by themselves."""
        return [each for each in self.having(_NOT_FASTER) if each.multiplies]

    def mark(self, fusions: list[Fusion], outcome: str) -> None:
        """Changes the outcome of candidates."""
        for each in fusions:
            self.rows[each] = replace(self.rows[each], outcome=outcome)

    def verified(self, found: Trace, fusions: list[Fusion]) -> tuple[Program | None, float]:
        """The program with these candidates, and its error. None without candidates, and if the
        error is too large."""
        if not fusions:
            return None, 0.0
        program = Program(found, fusions, *self._call)
        error, allowed = _difference(self._before, program(*self._call), self._tolerance)
        return program if error <= WHOLE_TOLERANCE * allowed else None, error


def _capture(
    result: Optimized,
    for_graph: tuple[Program, float] | None,
    call: Call,
    required: bool,
    repeats: int,
) -> str:
    """Captures a CUDA graph, which is used if it is faster than calls without it, or if `required`.
    Returns the reason if no graph is used, else "".

    for_graph: the program in which slower products of cukit replace those of cuBLAS, which CuPy
        cannot capture, and its error. It is used with the graph only.
    """
    args, kwargs = call
    program = result._program if for_graph is None else for_graph[0]
    try:
        graph = GraphedCall(program or result.function, args, kwargs)
    except Exception as error:
        if required:
            raise
        place = f"{program.failed}: " if program is not None and program.failed else ""
        hint = _CUBLAS if "cuBLAS" in str(error) else ""
        return f"no CUDA graph: {place}{_summary(error)}{hint}"
    if not required:
        without_us = _median_us(lambda: result(*args, **kwargs), repeats)
        graph_us = _median_us(lambda: graph(args, kwargs), repeats)
        if graph_us >= without_us:
            return f"no CUDA graph: {graph_us:.1f} us with it, {without_us:.1f} us without"
    if for_graph is not None:
        result._program, result.error = for_graph
    result._graph = graph
    return ""


def _summary(error: Exception) -> str:
    """The type and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _find(found: Trace) -> list[Fusion]:
    """Disjoint candidates in execution order; patterns that are listed first take precedence."""
    nodes = found.nodes()
    users: dict[Node, set[Node]] = {}
    for node in nodes:
        for parent in node.parents():
            users.setdefault(parent, set()).add(node)
    outputs = set(leaves(found.result, is_node))
    taken: set[Node] = set()
    fusions = []
    for pattern, root, names in patterns():
        for node in reversed(nodes):
            matched = None if node in taken else match(root, names, node)
            if matched is None:
                continue
            inner = set(matched.inner)
            # Other users of a cast may recompute it, because it is cheap.
            replaced_ops = {each for each in inner if uncast(each) is None}
            used_elsewhere = any(
                each is not node and (each in outputs or users[each] - inner)
                for each in replaced_ops
            )
            if used_elsewhere or taken & replaced_ops:
                continue
            arguments = _arguments(pattern, matched)
            if arguments is not None:
                taken |= replaced_ops
                fusions.append(Fusion(pattern, matched, arguments, node.value.dtype))
    order = {node: number for number, node in enumerate(nodes)}
    return sorted(fusions, key=lambda fusion: order[fusion.match.root])


def _arguments(pattern: Pattern, matched: Match) -> dict[str, Any] | None:
    """The arguments of the fused op, None if it does not apply."""
    if pattern.arguments is None:
        return matched.inputs
    constants = {name: value for name, value in matched.inputs.items() if is_array(value)}
    return pattern.arguments(matched.inputs, constants)


def _judge(
    fusion: Fusion, tolerance: float | None, only_faster: bool, on_gpu: bool, repeats: int
) -> FusionReport:
    root, inner = fusion.match.root, fusion.match.inner
    facts = (fusion.pattern.op, len(inner), tuple(root.value.shape))

    def original() -> Any:
        values = Recomputed(set(inner))
        return values[root]

    def fused() -> Any:
        return fusion.run(lambda node: node.value)

    before_us = _median_us(original, repeats) if on_gpu else None
    try:
        after = fused()
    except CukitError as exception:
        reason = str(exception).splitlines()[0]
        return FusionReport(*facts, math.nan, math.nan, before_us, None, f"kept: {reason}")
    error, allowed = _difference(root.value, after, tolerance)
    after_us = _median_us(fused, repeats) if on_gpu else None
    outcome = _FUSED
    if not error <= allowed:
        outcome = f"kept: error above {allowed:.1e}"
    elif only_faster and before_us is not None and after_us is not None and after_us >= before_us:
        outcome = _NOT_FASTER
    return FusionReport(*facts, error, allowed, before_us, after_us, outcome)


def _difference(before: Any, after: Any, tolerance: float | None) -> tuple[float, float]:
    """Largest difference divided by the largest output, and the tolerance."""
    error = 0.0
    allowed = 0.0 if tolerance is None else tolerance
    befores, afters = arrays_of(before), arrays_of(after)
    if len(befores) != len(afters):
        return math.inf, allowed
    for one, other in zip(befores, afters, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return math.inf, allowed
        if tolerance is None:
            allowed = max(allowed, TOLERANCES.get(one.dtype.name, 0.0))
        if not one.size:
            continue
        exact, got = one.astype(np.float64), other.astype(np.float64)
        scale = max(float(abs(exact).max()), float(np.finfo(np.float32).tiny))
        difference = float(abs(exact - got).max()) / scale
        error = math.inf if math.isnan(difference) else max(error, difference)
    return error, allowed


def _median_us(call: Callable[[], Any], repeats: int) -> float:
    """Median time of a call between CUDA events, after two warm-up calls."""
    cupy = sys.modules["cupy"]
    for _ in range(_WARM_UP):
        call()
    times = []
    for _ in range(repeats):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(1e3 * float(cupy.cuda.get_elapsed_time(start, end)))
    return statistics.median(times)
