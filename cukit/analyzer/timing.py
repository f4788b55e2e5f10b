"""Times calls on the device and on the host, and measures their peak memory.

One sample of the main timer, CUDA events with a cold L2: overwrite a buffer several times the size
of L2, keep the stream busy while the host enqueues the call, start event, the call, stop event. The
flush and the host's time are outside the timed window: the time of a call of twenty small kernels
includes the kernels and the gaps between them on the device, but not the Python code that launches
them. Implementations under comparison run interleaved, with a short pause before each, because a
GPU at its power limit lowers its clocks: without the pause an implementation would run at clocks
that depend on the previous one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from cukit.analyzer.statistics import is_noisy, split
from cukit.core.device import current_device, require_cupy
from cukit.core.kernel import KernelSpec, load_kernel
from cukit.errors import CukitError

Call = Callable[[], object]

FLUSH_FACTOR = 4
"""The flush writes this many times the size of L2: enough for any replacement policy."""

SPIN = KernelSpec("analyzer/spin.cu", "spin", defines=(), threads=1)

MAX_SPIN_US = 10_000.0
"""Longest spin. A call that keeps the host busy for longer is assumed to synchronise, which no spin
can hide."""


@dataclass(frozen=True)
class Timing:
    """Samples of one call, in microseconds."""

    samples_us: tuple[float, ...]
    round_sizes: tuple[int, ...] = ()
    """Number of samples in each round, in order; empty: one round."""

    @property
    def rounds(self) -> list[tuple[float, ...]]:
        """The samples by round."""
        return split(self.samples_us, self.round_sizes)

    @property
    def median_us(self) -> float:
        """The median."""
        return float(np.median(self.samples_us))

    @property
    def iqr_us(self) -> float:
        """The interquartile range, a spread that ignores outliers."""
        low, high = np.percentile(self.samples_us, (25, 75))
        return float(high - low)


Sampler = Callable[[], float]
"""Takes a sample, of one or several runs of a call; returns the microseconds of one run."""


class Timer(Protocol):
    """Takes samples of how long a call runs."""

    name: str
    """Its name in reports: "events", "graph replay", "wall", "host enqueue"."""

    def prepare(self, call: Call) -> Sampler:
        """Warms `call` up, and returns a function that takes one sample of it."""


class GpuTimer:
    """Times calls that enqueue work on CuPy's current stream, between two CUDA events.

    cold: overwrite L2 before each sample; otherwise the caches keep what the previous call left.
    """

    name = "events"

    def __init__(self, *, cold: bool = True) -> None:
        cupy = require_cupy("timing on a GPU")
        self._cold = cold
        self._cycles_per_us = cupy.cuda.Device().attributes["ClockRate"] / 1e3
        flush_bytes = FLUSH_FACTOR * current_device().l2_bytes if cold else 0
        self._flush = cupy.empty(flush_bytes, dtype=cupy.uint8)
        self._start = cupy.cuda.Event()
        self._stop = cupy.cuda.Event()
        self._elapsed_ms = cupy.cuda.get_elapsed_time
        self._synchronize = cupy.cuda.Device().synchronize
        self._spin = load_kernel(SPIN)

    def prepare(self, call: Call) -> Sampler:
        """Runs `call` three times to measure how long the host takes to enqueue it."""
        durations_us = []
        for _ in range(3):
            self._synchronize()
            begin = time.perf_counter()
            call()
            durations_us.append((time.perf_counter() - begin) * 1e6)
        self._synchronize()
        spin_us = min(20.0 + 2.0 * min(durations_us), MAX_SPIN_US)
        return partial(self._sample_us, call, np.int64(spin_us * self._cycles_per_us))

    def flush(self) -> None:
        """Enqueues an overwrite of L2: a memset, which does not appear in traces of kernels."""
        self._flush.data.memset_async(0, self._flush.nbytes)

    def _sample_us(self, call: Call, spin_cycles: np.int64) -> float:
        """Runs the call between two events; returns the time between the events in microseconds."""
        if self._cold:
            self.flush()
        self._spin((1,), (spin_cycles,))
        self._start.record()
        call()
        self._stop.record()
        self._stop.synchronize()
        return float(self._elapsed_ms(self._start, self._stop)) * 1e3


class GraphTimer:
    """Times replays of a CUDA graph that contains the call many times: the device alone, warm.

    There is no event, spin or host launch between calls, so this timer suits kernels of a few
    microseconds. The call must be capturable: no synchronisation, and no memory that the pool must
    first get from the driver. A call before each capture fills the pool.
    """

    name = "graph replay"
    TARGET_US = 2000.0
    """Intended length of one replay."""
    MAX_CALLS = 200

    def __init__(self) -> None:
        self._cupy = require_cupy("timing on a GPU")
        self._start = self._cupy.cuda.Event()
        self._stop = self._cupy.cuda.Event()

    def prepare(self, call: Call) -> Sampler:
        """Times a graph of one call, then captures a graph of about TARGET_US."""
        graph, calls = self._filled(call)
        return partial(self._replay_us, graph, calls)

    def replayer(self, call: Call) -> tuple[Call, int]:
        """Returns a function that enqueues a replay on the current stream, and its number of calls.

        Raises CukitError if the call cannot be captured.
        """
        try:
            graph, calls = self._filled(call)
        except Exception as error:  # anything that is not allowed during capture
            raise not_capturable(error) from error
        return (lambda: graph.launch(self._cupy.cuda.get_current_stream())), calls

    def _filled(self, call: Call) -> tuple[Any, int]:
        """A graph of about TARGET_US, and the calls in it.

        Memory that a captured call allocates returns to the pool, but replays still write to it:
        nothing else that must keep its values may be allocated before the last replay.
        """
        once = self._capture(call, 1)
        once_us = min(self._replay_us(once, 1) for _ in range(2))
        calls = max(1, min(self.MAX_CALLS, int(self.TARGET_US / max(once_us, 0.1))))
        return self._capture(call, calls), calls

    def _capture(self, call: Call, calls: int) -> Any:
        stream = self._cupy.cuda.Stream(non_blocking=True)
        with stream:
            call()
            stream.synchronize()
            stream.begin_capture()
            try:
                for _ in range(calls):
                    call()
            except BaseException:
                with suppress(Exception):  # reports the failed capture a second time
                    stream.end_capture()
                raise
            return stream.end_capture()

    def _replay_us(self, graph: Any, calls: int) -> float:
        stream = self._cupy.cuda.get_current_stream()
        graph.launch(stream)
        self._start.record(stream)
        graph.launch(stream)
        self._stop.record(stream)
        self._stop.synchronize()
        elapsed_ms = self._cupy.cuda.get_elapsed_time(self._start, self._stop)
        return float(elapsed_ms) * 1e3 / calls


def not_capturable(error: Exception) -> CukitError:
    """The error of a call that a CUDA graph cannot capture, from the error of the capture."""
    return CukitError(f"not capturable: {str(error).partition(chr(10))[0]}")


class HostTimer:
    """Times synchronous calls: NumPy, on a machine without a GPU."""

    name = "wall"

    def prepare(self, call: Call) -> Sampler:
        """Runs `call` once."""
        call()
        return partial(self._sample_us, call)

    def _sample_us(self, call: Call) -> float:
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6


class WallTimer:
    """Times a call until the device has finished: launch, kernels and synchronisation."""

    name = "wall"

    def __init__(self) -> None:
        self._synchronize = require_cupy("timing on a GPU").cuda.Device().synchronize

    def prepare(self, call: Call) -> Sampler:
        """Runs `call` once."""
        call()
        return partial(self._sample_us, call)

    def _sample_us(self, call: Call) -> float:
        self._synchronize()
        begin = time.perf_counter()
        call()
        self._synchronize()
        return (time.perf_counter() - begin) * 1e6


class EnqueueTimer:
    """Times a call on the host: the mean over a batch that is enqueued on an idle device and is
    short enough not to fill the launch queue."""

    name = "host enqueue"
    BATCH = 100

    def __init__(self) -> None:
        self._synchronize = require_cupy("timing on a GPU").cuda.Device().synchronize

    def prepare(self, call: Call) -> Sampler:
        """Runs `call` once."""
        call()
        return partial(self._sample_us, call)

    def _sample_us(self, call: Call) -> float:
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(self.BATCH):
            call()
        return (time.perf_counter() - begin) * 1e6 / self.BATCH


def measure(
    impls: Mapping[str, Call],
    timer: Timer,
    *,
    rounds: int = 2,
    max_rounds: int | None = None,
    budget_ms: float = 30.0,
    min_samples: int = 5,
    max_samples: int = 40,
    pause_s: float = 0.15,
) -> dict[str, Timing]:
    """Times all of `impls` (name -> call) in interleaved runs.

    In each of `rounds`, and for each call in turn: a pause of `pause_s`, a discarded sample, then
    from `min_samples` to `max_samples` samples, for about `budget_ms` of the call's own time.
    Rounds are added, up to `max_rounds`, as long as any call is noisy. Calls that are not noisy run
    in these rounds, too, so that all are measured under the same conditions.
    """
    samplers = {name: timer.prepare(call) for name, call in impls.items()}
    counts: dict[str, int] = {}
    for name, sample_us in samplers.items():
        once_ms = max(sample_us(), 0.1) / 1e3
        counts[name] = max(min_samples, min(max_samples, int(budget_ms / once_ms)))
    samples: dict[str, list[float]] = {name: [] for name in impls}
    taken = 0
    while taken < rounds or (
        taken < (max_rounds or rounds) and any(map(is_noisy, samples.values()))
    ):
        for name, sample_us in samplers.items():
            time.sleep(pause_s)
            sample_us()
            samples[name].extend(sample_us() for _ in range(counts[name]))
        taken += 1
    return {
        name: Timing(tuple(values), (counts[name],) * taken) for name, values in samples.items()
    }


class PeakMemory:
    """The sum of the peaks of CuPy's pool and of torch's allocator in a `with` block, in bytes.

    Memory in use on entry is not counted: the result is the memory that a call needs in addition to
    its inputs. torch is queried only if the process has imported it.
    """

    bytes: int = 0

    def __enter__(self) -> PeakMemory:
        self._torch: Any = sys.modules.get("torch")
        if self._torch is not None and self._torch.cuda.is_available():
            self._torch.cuda.synchronize()
            self._torch.cuda.reset_peak_memory_stats()
            self._torch_before = self._torch.cuda.memory_allocated()
        else:
            self._torch = None
        self._hook = _high_water_hook()
        require_cupy("measuring memory").cuda.Device().synchronize()
        self._hook.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.__exit__(*exception)
        self.bytes = int(self._hook.peak)
        if self._torch is not None:
            self._torch.cuda.synchronize()
            self.bytes += int(self._torch.cuda.max_memory_allocated()) - int(self._torch_before)


def _high_water_hook() -> Any:
    """A CuPy memory hook that tracks bytes in use. Defined here because CuPy is optional."""
    from cupy.cuda.memory_hook import MemoryHook

    class HighWater(MemoryHook):  # type: ignore[misc]
        name = "cukit high water"

        def __init__(self) -> None:
            self.in_use = 0
            self.peak = 0

        def malloc_postprocess(self, **event: Any) -> None:
            self.in_use += event["mem_size"]
            self.peak = max(self.peak, self.in_use)

        def free_postprocess(self, **event: Any) -> None:
            self.in_use -= event["mem_size"]

    return HighWater()
