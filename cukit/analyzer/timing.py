"""How long a call takes on the device, by several clocks, each of which says its name.

One sample of the first of them, CUDA events with a cold L2, is: overwrite a buffer several times
the size of L2, keep the stream busy while the host enqueues the call, start event, the call, stop
event. The flush and the host's own time are outside the timed window, so that a call of twenty
small kernels is charged for its kernels and the gaps between them on the device, not for the Python
that launched them. Implementations that are to be compared take turns, with a short rest before
each: a card at its power limit lowers its clocks, and nobody should inherit the heat of the arm
before.
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

LONGEST_SPIN_US = 10_000.0
"""A call that takes the host longer than this waits for the device itself; no spin hides that."""


@dataclass(frozen=True)
class Timing:
    """Samples of one call, in microseconds."""

    samples_us: tuple[float, ...]
    round_sizes: tuple[int, ...] = ()
    """How many of the samples each turn took, in order; empty: all of them were one turn."""

    @property
    def rounds(self) -> list[tuple[float, ...]]:
        """The samples, turn by turn."""
        return split(self.samples_us, self.round_sizes)

    @property
    def median_us(self) -> float:
        """The middle sample."""
        return float(np.median(self.samples_us))

    @property
    def iqr_us(self) -> float:
        """Distance between the first and the third quartile: the spread, deaf to outliers."""
        low, high = np.percentile(self.samples_us, (25, 75))
        return float(high - low)


Sampler = Callable[[], float]
"""Runs a call once and says how long it took, in microseconds."""


class Timer(Protocol):
    """A clock for the calls of one machine."""

    name: str
    """How reports call it: "events", "graph replay", "wall", "host enqueue"."""

    def prepare(self, call: Call) -> Sampler:
        """Warm `call` up, and return what takes a sample of it."""


class GpuTimer:
    """Times calls that enqueue work on CuPy's current stream, between two CUDA events.

    cold: overwrite L2 before each sample; else the call finds what the call before left there.
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
        """Run `call` three times to see how long the host takes to enqueue it."""
        durations_us = []
        for _ in range(3):
            self._synchronize()
            begin = time.perf_counter()
            call()
            durations_us.append((time.perf_counter() - begin) * 1e6)
        self._synchronize()
        spin_us = min(20.0 + 2.0 * min(durations_us), LONGEST_SPIN_US)
        return partial(self._sample_us, call, np.int64(spin_us * self._cycles_per_us))

    def flush(self) -> None:
        """Enqueues an overwriting of L2. A memset and no kernel, so traces of kernels lack it."""
        self._flush.data.memset_async(0, self._flush.nbytes)

    def _sample_us(self, call: Call, spin_cycles: np.int64) -> float:
        """One run between two events; returns once it has finished."""
        if self._cold:
            self.flush()
        self._spin((1,), (spin_cycles,))
        self._start.record()
        call()
        self._stop.record()
        self._stop.synchronize()
        return float(self._elapsed_ms(self._start, self._stop)) * 1e3


class GraphTimer:
    """Times replays of a CUDA graph that holds the call many times over: the device alone, warm.

    No event, spin or launch from the host lies between two of the calls, so this is the clock for
    kernels of a few microseconds. The call must be capturable: no allocation, no synchronisation.
    """

    name = "graph replay"
    TARGET_US = 2000.0
    """Length of one replay that is aimed at."""
    MOST_CALLS = 200

    def __init__(self) -> None:
        self._cupy = require_cupy("timing on a GPU")
        self._start = self._cupy.cuda.Event()
        self._stop = self._cupy.cuda.Event()

    def prepare(self, call: Call) -> Sampler:
        """Run `call` once, find out how long it takes, and capture as many as fill a replay."""
        graph, calls = self._filled(call)
        return partial(self._replay_us, graph, calls)

    def replayer(self, call: Call) -> tuple[Call, int]:
        """What enqueues a replay on the current stream, and how many calls that makes.

        Raises CukitError where the call cannot be captured.
        """
        try:
            graph, calls = self._filled(call)
        except Exception as error:  # whatever a call does that a capture forbids
            raise CukitError(f"not capturable: {str(error).partition(chr(10))[0]}") from error
        return (lambda: graph.launch(self._cupy.cuda.get_current_stream())), calls

    def _filled(self, call: Call) -> tuple[Any, int]:
        """A graph of about TARGET_US, and the calls in it.

        Memory that a captured call allocates goes back to the pool; replays write to it all the
        same, and nobody reads what they write.
        """
        once = self._capture(call, 1)
        once_us = min(self._replay_us(once, 1) for _ in range(2))
        calls = max(1, min(self.MOST_CALLS, int(self.TARGET_US / max(once_us, 0.1))))
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
                with suppress(Exception):  # it only repeats that the capture has failed
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


class HostTimer:
    """Times calls that have finished when they return: NumPy, on a machine without a GPU."""

    name = "wall"

    def prepare(self, call: Call) -> Sampler:
        """Run `call` once."""
        call()
        return partial(self._sample_us, call)

    def _sample_us(self, call: Call) -> float:
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6


class WallTimer:
    """Times what somebody waits for who needs the result: launch, kernels, and the way back."""

    name = "wall"

    def __init__(self) -> None:
        self._synchronize = require_cupy("timing on a GPU").cuda.Device().synchronize

    def prepare(self, call: Call) -> Sampler:
        """Run `call` once."""
        call()
        return partial(self._sample_us, call)

    def _sample_us(self, call: Call) -> float:
        self._synchronize()
        begin = time.perf_counter()
        call()
        self._synchronize()
        return (time.perf_counter() - begin) * 1e6


class EnqueueTimer:
    """Times what a call costs the host: mean of a batch that the device has no trouble keeping up
    with, the device idle before it."""

    name = "host enqueue"
    BATCH = 100

    def __init__(self) -> None:
        self._synchronize = require_cupy("timing on a GPU").cuda.Device().synchronize

    def prepare(self, call: Call) -> Sampler:
        """Run `call` once."""
        call()
        return partial(self._sample_us, call)

    def _sample_us(self, call: Call) -> float:
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(self.BATCH):
            call()
        return (time.perf_counter() - begin) * 1e6 / self.BATCH


def measure(
    arms: Mapping[str, Call],
    timer: Timer,
    *,
    rounds: int = 2,
    max_rounds: int | None = None,
    budget_ms: float = 30.0,
    min_samples: int = 5,
    max_samples: int = 40,
    pause_s: float = 0.15,
) -> dict[str, Timing]:
    """Time every arm, in turns.

    In each of `rounds` every arm rests for `pause_s`, runs once unseen, and is then sampled for
    about `budget_ms` of its own time: between `min_samples` and `max_samples` samples. Rounds are
    added, up to `max_rounds`, for as long as any arm is noisy: an arm that needs no more still
    takes its turn, so that all have seen the same machine.
    """
    samplers = {name: timer.prepare(call) for name, call in arms.items()}
    counts: dict[str, int] = {}
    for name, sample_us in samplers.items():
        once_ms = max(sample_us(), 0.1) / 1e3
        counts[name] = max(min_samples, min(max_samples, int(budget_ms / once_ms)))
    samples: dict[str, list[float]] = {name: [] for name in arms}
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
    """Most bytes that CuPy's pool and torch's allocator handed out at once inside a `with`.

    Memory that was in use on entry does not count: this is what the call needs on top of its
    inputs. torch is asked only if the process has imported it.
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
    """A CuPy memory hook that follows bytes in use. Defined here because CuPy is optional."""
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
