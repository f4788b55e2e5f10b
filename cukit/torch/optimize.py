"""Swaps parts of a torch model for cukit's kernels, verified against the original, reversibly."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cukit.core.device import gpu_available
from cukit.core.scalars import check_flag, check_integer, check_number
from cukit.errors import ConfigError
from cukit.fusion.report import TOLERANCES, WHOLE_TOLERANCE, call_arguments, table, time_cell
from cukit.torch._swaps import CACHE_ARGUMENTS, KINDS, Swap, find_swaps


@dataclass(frozen=True)
class SwapReport:
    """The result of one swap.

    name: of the module. kind: a row of the table of :func:`optimize`. modules: number of modules
    it changes. error: largest difference of the outputs over the largest output; NaN if the swap
    could not run. before_us, after_us: median times of the module, None without a GPU.
    outcome: "swapped", "would swap", or why the original is kept.
    """

    name: str
    kind: str
    modules: int
    error: float
    tolerance: float
    before_us: float | None
    after_us: float | None
    outcome: str


class Optimized:
    """A model with swaps, as :func:`optimize` returns it.

    Call it like the model; with a CUDA graph, inputs of the sample's shapes replay the graph.
    As a context manager it restores the model on exit.

    Attributes:
        model: the model, changed in place.
        report: one SwapReport per candidate.
        error: difference of the model's outputs, as in SwapReport.
        before_us, after_us: median times of the model, None without a GPU.
        note: what was skipped, and why; "" if nothing was.
    """

    def __init__(self, model: nn.Module, note: str = "") -> None:
        self.model = model
        self.report: list[SwapReport] = []
        self.error = 0.0
        self.before_us: float | None = None
        self.after_us: float | None = None
        self.note = note
        self._swaps: list[Swap] = []
        self._graph: _GraphedForward | None = None

    def restore(self) -> nn.Module:
        """Undo every swap, in reverse order; may be called again. Returns the model."""
        self._graph = None
        while self._swaps:
            self._swaps.pop().disable()
        return self.model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        if self._graph is not None and self._graph.fits(args, kwargs):
            return self._graph(args, kwargs)
        return self.model(*args, **kwargs)

    def __enter__(self) -> Optimized:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()

    def __str__(self) -> str:
        """A table with one line per candidate and one for the model."""
        rows = [("module", "kind", "modules", "error", "before us", "after us", "outcome")]
        rows += [
            (row.name or "(model)", row.kind, str(row.modules), f"{row.error:.1e}",
             time_cell(row.before_us), time_cell(row.after_us), row.outcome)
            for row in self.report
        ]  # fmt: skip
        if self.report:
            rows.append(
                ("whole model", "", "", f"{self.error:.1e}", time_cell(self.before_us),
                 time_cell(self.after_us), "")
            )  # fmt: skip
        return table(rows, self.note)


def optimize(
    model: nn.Module,
    sample: Any,
    *,
    use_cuda_kernels: bool = True,
    kinds: Iterable[str] = KINDS,
    tolerance: float | None = None,
    only_faster: bool = True,
    dry_run: bool | None = None,
    cuda_graph: bool = False,
    repeats: int = 10,
) -> Optimized:
    """Swap parts of a model for cukit's kernels, each verified against the original.

    The model runs on `sample` in eval mode, with None in place of a KV cache argument. For every
    supported module, the swap runs on the inputs that the module receives; it is kept if the
    outputs agree and, on a GPU, if it is faster. Then the model runs again with all kept swaps.
    Parameters, names, hooks and state dicts are unchanged, and gradients work. A fused forward does
    not call the hooks of the submodules that it replaces.

    ==========  ===================================================================================
    attention   Hugging Face transformers: `attn_implementation="cukit"`
    rope        their `apply_rotary_pos_emb`, for all models of the same file while it is swapped
    projection  Llama's attention: q, k and v as one product, for calls of 4096 tokens or more
    norm        RMSNorm of any library, nn.LayerNorm
    mlp         `down_proj(act_fn(gate_proj(x)) * up_proj(x))`: gate and up in one kernel
    residual    Llama's decoder layer: the addition before its second norm as part of that norm
    activation  nn.Linear followed by ReLU, GELU or SiLU in an nn.Sequential; BERT's intermediate
    ==========  ===================================================================================

    Args:
        model: any module; changed in place.
        sample: the input: a tensor, a tuple of arguments or a dict of keyword arguments.
        use_cuda_kernels: False changes nothing.
        kinds: rows of the table to try.
        tolerance: largest accepted error of a module; None: by dtype, see TOLERANCES. The error of
            the whole model may be four times that; beyond, everything is restored.
        only_faster: keep the original if the swap is not faster.
        dry_run: only verify and report. None: True for a model on the CPU, where the swaps would
            run NumPy references.
        cuda_graph: also capture the model's forward, without gradients, for inputs of the sample's
            shapes. Needs a GPU.
        repeats: calls per timing, which is their median.

    Returns:
        :class:`Optimized`: a callable with the report, which can restore the model.

    Raises:
        ConfigError: an invalid option, an unknown kind, or cuda_graph for a model on the CPU.

    >>> import torch, cukit.torch as ckt
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    >>> [row.outcome for row in ckt.optimize(mlp, torch.zeros(2, 8)).report]
    ['would swap']
    """
    op = "optimize"
    chosen = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    for each in chosen:
        if each not in KINDS:
            raise ConfigError(f"{op}: kinds must be among {', '.join(KINDS)}, got {each!r}")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{op}: model must be an nn.Module, got {type(model).__name__}")
    check_flag(op, "use_cuda_kernels", use_cuda_kernels)
    check_integer(op, "repeats", repeats, least=1)
    if tolerance is not None:
        check_number(op, "tolerance", tolerance, least=0)
    if not use_cuda_kernels:
        return Optimized(model, "use_cuda_kernels=False: nothing was swapped")
    args, kwargs = call_arguments(sample)
    on_gpu = _is_on_gpu(model, args, kwargs)
    dry = not on_gpu if dry_run is None else dry_run
    if cuda_graph and not on_gpu:
        raise ConfigError(f"{op}: cuda_graph=True needs a model on a GPU")
    result = Optimized(model)
    if not on_gpu:
        here = "the model is on the CPU" if gpu_available() else "this machine has no GPU"
        result.note = f"{here}: swaps ran on cukit's references, nothing was timed" + (
            ", and the model is unchanged" if dry else ""
        )
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            _try_swaps(result, args, kwargs, chosen, tolerance, only_faster, dry, on_gpu, repeats)
            if cuda_graph and not dry:
                result._graph = _GraphedForward(model, args, kwargs)
    except BaseException:
        result.restore()
        raise
    finally:
        for module, mode in modes:
            module.training = mode
    if dry:
        result.restore()
    return result


def _try_swaps(
    result: Optimized,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kinds: tuple[str, ...],
    tolerance: float | None,
    only_faster: bool,
    dry: bool,
    on_gpu: bool,
    repeats: int,
) -> None:
    model = result.model
    places: dict[nn.Module, list[list[Swap]]] = {}
    for alternatives in find_swaps(model, kinds):
        places.setdefault(alternatives[0].module, []).append(alternatives)
    accepted: list[Swap] = []
    handles = []

    def try_here(
        module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], _: Any
    ) -> None:
        for alternatives in places.pop(module, ()):
            swap, row = _best(
                alternatives, inputs, options, tolerance, only_faster, on_gpu, repeats
            )
            if row.outcome == "swapped":
                accepted.append(swap)
                if dry:
                    row = SwapReport(**{**row.__dict__, "outcome": "would swap"})
            result.report.append(row)

    for module in list(places):
        handles.append(module.register_forward_hook(try_here, with_kwargs=True))
    try:
        before = model(*args, **_without_cache(kwargs))
    finally:
        for handle in handles:
            handle.remove()
    for alternatives in (each for rest in places.values() for each in rest):
        swap = alternatives[0]
        result.report.append(
            SwapReport(swap.name, swap.kind, max(1, len(swap.members)), math.nan, math.nan, None,
                       None, "kept: the sample does not reach it")
        )  # fmt: skip

    def run() -> Any:
        return model(*args, **_without_cache(kwargs))

    if on_gpu:
        result.before_us = _median_us(run, repeats)
    for swap in accepted:
        swap.enable()
        result._swaps.append(swap)
    after = run()
    result.error, allowed = _difference(before, after, tolerance)
    if on_gpu:
        result.after_us = _median_us(run, repeats)
    if not result.error <= WHOLE_TOLERANCE * allowed:
        result.restore()
        result.report = [
            SwapReport(**{**row.__dict__, "outcome": "kept: the model's output changed too much"})
            if row.outcome in ("swapped", "would swap") else row
            for row in result.report
        ]  # fmt: skip


def _best(
    alternatives: list[Swap],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tolerance: float | None,
    only_faster: bool,
    on_gpu: bool,
    repeats: int,
) -> tuple[Swap, SwapReport]:
    """The first alternative whose outputs agree, or the last, with its report."""
    kwargs = _without_cache(kwargs)
    forward = alternatives[0].module.forward
    before = forward(*args, **kwargs)
    before_us = _median_us(lambda: forward(*args, **kwargs), repeats) if on_gpu else None
    row = None
    for swap in alternatives:
        facts = (swap.name, swap.kind, max(1, len(swap.members)))
        swap.enable()
        try:
            trial = swap.trial or swap.module.forward
            after = trial(*args, **kwargs)
            error, allowed = _difference(before, after, tolerance)
            after_us = (
                _median_us(lambda: trial(*args, **kwargs), repeats)  # noqa: B023
                if on_gpu else None
            )  # fmt: skip
        except Exception as refusal:  # also for modules that only resemble a known one
            reason = (str(refusal) or type(refusal).__name__).splitlines()[0]
            row = SwapReport(*facts, math.nan, math.nan, before_us, None, f"kept: {reason}")
            continue
        finally:
            swap.disable()
        outcome = "swapped"
        if not error <= allowed:
            outcome = f"kept: error above {allowed:.1e}"
        elif only_faster and before_us is not None and after_us is not None:
            outcome = "kept: not faster" if after_us >= before_us else outcome
        row = SwapReport(*facts, error, allowed, before_us, after_us, outcome)
        if outcome == "swapped" or error <= allowed:
            return swap, row
    assert row is not None
    return alternatives[-1], row


def _is_on_gpu(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [*model.parameters(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
    return any(tensor.is_cuda for tensor in tensors)


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments without a KV cache, which would grow with every call."""
    return {name: None if name in CACHE_ARGUMENTS else value for name, value in kwargs.items()}


def _difference(before: Any, after: Any, tolerance: float | None) -> tuple[float, float]:
    """Largest difference over the largest output, and its tolerance."""
    error = 0.0
    allowed = 0.0 if tolerance is None else tolerance
    befores, afters = _tensors(before), _tensors(after)
    alike = pytree.tree_structure(before) == pytree.tree_structure(after)
    if not alike or len(befores) != len(afters):
        return math.inf, allowed
    for one, other in zip(befores, afters, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return math.inf, allowed
        if not one.is_floating_point():
            error = error if torch.equal(one, other) else math.inf
            continue
        if tolerance is None:
            allowed = max(allowed, TOLERANCES.get(str(one.dtype).removeprefix("torch."), 0.0))
        if not one.numel():
            continue
        exact, got = one.double(), other.double()
        scale = max(float(exact.abs().max()), torch.finfo(torch.float32).tiny)
        difference = float((exact - got).abs().max()) / scale
        error = math.inf if math.isnan(difference) else max(error, difference)
    return error, allowed


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _median_us(call: Callable[[], Any], repeats: int) -> float:
    """Median time of a call on the GPU, after two warm-up calls."""
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(1e3 * float(start.elapsed_time(end)))
    return statistics.median(times)


class _GraphedForward:
    """A captured forward. A call copies its inputs into the captured tensors, replays the graph and
    returns copies of the outputs."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._tree = pytree.tree_flatten((args, kwargs))
        self._inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(self._inputs, self._tree)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = model(*args, **kwargs)

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the inputs match those of the capture, and gradients are disabled."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        return not torch.is_grad_enabled() and tree == self._tree and all(
            isinstance(given, Tensor) and given.shape == own.shape and given.dtype == own.dtype
            and given.device == own.device
            if isinstance(own, Tensor) else given == own
            for given, own in zip(leaves, self._inputs, strict=True)
        )  # fmt: skip

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for given, own in zip(pytree.tree_leaves((args, kwargs)), self._inputs, strict=True):
            if isinstance(own, Tensor):
                own.copy_(given)
        self._graph.replay()
        return pytree.tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, self._output
        )
