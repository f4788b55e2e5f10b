"""Times a training step by op."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from cukit.registry import ops

# The modules whose calls are timed: they call every op of a step.
CALLERS = (
    "cukit.models.transformer",
    "cukit.distill.training.distiller",
    "cukit.distill.training.terms",
    "cukit.distill.training.trainer",
)


@dataclass(frozen=True)
class OpTime:
    """The time of one op in a step."""

    name: str
    calls: float
    """Per step."""
    milliseconds: float
    """Per step: stream time on a GPU, else wall-clock time."""


def time_by_op(step: Callable[[], Any], xp: ModuleType, num_steps: int) -> list[OpTime]:
    """Run `step` once to warm up, then `num_steps` times with a timer around every op it calls.

    The last entry, "everything else", is the rest of the step. On a GPU the timers are CUDA events
    on the current stream, read only at the end, so kernels overlap with host work as in training.
    GPU idle time before a late launch counts towards its op.
    """
    step()
    clock: _Clock = _WallClock() if xp.__name__ == "numpy" else _EventClock(xp)
    with _timed_ops(clock):
        whole = clock.start()
        for _ in range(num_steps):
            step()
        clock.stop("whole", whole)
    totals = clock.totals()
    _, whole_ms = totals.pop("whole")
    rest = whole_ms - sum(ms for _, ms in totals.values())
    times = [
        OpTime(name, calls / num_steps, ms / num_steps) for name, (calls, ms) in totals.items()
    ]
    times.sort(key=lambda entry: -entry.milliseconds)
    return [*times, OpTime("everything else", 0, max(rest, 0.0) / num_steps)]


class _Clock:
    """Collects (name, duration) pairs."""

    def start(self) -> Any:
        raise NotImplementedError

    def stop(self, name: str, started: Any) -> None:
        raise NotImplementedError

    def totals(self) -> dict[str, tuple[int, float]]:
        """Calls and milliseconds by name."""
        raise NotImplementedError


class _WallClock(_Clock):
    def __init__(self) -> None:
        self._totals: dict[str, tuple[int, float]] = {}

    def start(self) -> float:
        return time.perf_counter()

    def stop(self, name: str, started: float) -> None:
        calls, ms = self._totals.get(name, (0, 0.0))
        self._totals[name] = (calls + 1, ms + (time.perf_counter() - started) * 1e3)

    def totals(self) -> dict[str, tuple[int, float]]:
        return self._totals


class _EventClock(_Clock):
    def __init__(self, cupy: ModuleType) -> None:
        self._cupy = cupy
        self._spans: list[tuple[str, Any, Any]] = []

    def start(self) -> Any:
        event = self._cupy.cuda.Event()
        event.record()
        return event

    def stop(self, name: str, started: Any) -> None:
        self._spans.append((name, started, self.start()))

    def totals(self) -> dict[str, tuple[int, float]]:
        self._cupy.cuda.get_current_stream().synchronize()
        totals: dict[str, tuple[int, float]] = {}
        for name, first, last in self._spans:
            calls, ms = totals.get(name, (0, 0.0))
            totals[name] = (calls + 1, ms + self._cupy.cuda.get_elapsed_time(first, last))
        return totals


@contextlib.contextmanager
def _timed_ops(clock: _Clock) -> Iterator[None]:
    """Within the block, `clock` times the ops that CALLERS call.

    Functions look ops up in their module's namespace at each call. Replacing an op there affects
    calls from that module only, and the training code needs no instrumentation.
    """
    functions = {op.function: op.name for op in ops()}
    replaced: list[tuple[ModuleType, str, Any]] = []
    try:
        for module in (sys.modules[name] for name in CALLERS if name in sys.modules):
            for attribute, value in list(vars(module).items()):
                if callable(value) and (name := _op_name(functions, value)) is not None:
                    replaced.append((module, attribute, value))
                    setattr(module, attribute, _timed(value, name, clock))
        yield
    finally:
        for module, attribute, value in replaced:
            setattr(module, attribute, value)


def _op_name(functions: dict[Any, str], value: Any) -> str | None:
    try:
        return functions.get(value)
    except TypeError:  # unhashable, so not a function
        return None


def _timed(function: Callable[..., Any], name: str, clock: _Clock) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        started = clock.start()
        try:
            return function(*args, **kwargs)
        finally:
            clock.stop(name, started)

    return run
