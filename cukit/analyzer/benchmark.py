"""Times several implementations of the same work side by side, and checks their results.

    from cukit.analyzer import KernelBenchmark

    benchmark = KernelBenchmark(warmup_iters=5, benchmark_iters=60, export="results.json")
    benchmark.compare(
        ("mine", "softmax", "4096x4096", "float32"),
        {"mine": lambda: softmax(x), "cupy": lambda: cupy_softmax(x)},
        expected=lambda: reference(x), bytes=2 * x.nbytes,
    )

A time without a correct result is worthless: every implementation is compared with `expected`
before and after it is timed. The file is rewritten after each case, so an interrupted run keeps
the cases that it measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cukit.analyzer.correctness import relative_error
from cukit.analyzer.machine import results_environment
from cukit.analyzer.peaks import floor_us, precision_of
from cukit.analyzer.power import energy_of
from cukit.analyzer.results import CaseKey, Record, ResultsFile
from cukit.analyzer.statistics import estimate
from cukit.analyzer.suite import SUITE, SuiteCase
from cukit.analyzer.timing import (
    Call,
    EnqueueTimer,
    GpuTimer,
    GraphTimer,
    HostTimer,
    PeakMemory,
    Timer,
    Timing,
    WallTimer,
    measure,
)
from cukit.core.device import gpu_available
from cukit.errors import ConfigError, CukitError

TimedSide = Literal["device", "host"]

Failure = Callable[[str, Exception], None]
"""Called with the name of an implementation and the exception that it raised."""

OTHER_TIMERS: Mapping[str, Callable[[], Timer]] = {
    GraphTimer.name: GraphTimer,
    WallTimer.name: WallTimer,
}


@dataclass(frozen=True)
class Sampling:
    """How long to measure: arguments of :func:`cukit.analyzer.timing.measure`."""

    rounds: int = 2
    max_rounds: int | None = None
    budget_ms: float = 30.0
    min_samples: int = 5
    max_samples: int = 40
    pause_s: float = 0.15


class KernelBenchmark:
    """Measures on CuPy's current device, or on the CPU if there is no GPU.

    warmup_iters: untimed calls of each implementation.
    benchmark_iters: samples of each implementation; up to four times this number while the
        confidence interval of any implementation's median is wider than 2% of the median.
    timers: additional timers, by name: "graph replay" and "wall". The main time is measured by CUDA
        events with a cold L2 (on the CPU: "wall"); every record names its timer.
    energy: also run each implementation for a second, to read NVML's energy counter.
    export: results file to merge into after every case.
    sampling: replaces `benchmark_iters`, for finer control.
    """

    def __init__(
        self,
        warmup_iters: int = 3,
        benchmark_iters: int = 40,
        *,
        timers: Sequence[str] = (),
        energy: bool = False,
        export: Path | str | None = None,
        sampling: Sampling | None = None,
        environment: dict[str, Any] | None = None,
    ) -> None:
        if warmup_iters < 0 or benchmark_iters < 1:
            raise ConfigError(
                "KernelBenchmark: warmup_iters must not be negative and benchmark_iters positive, "
                f"got {warmup_iters} and {benchmark_iters}"
            )
        if unknown := set(timers) - set(OTHER_TIMERS):
            raise ConfigError(
                f"KernelBenchmark: no timer {sorted(unknown)}; known: {', '.join(OTHER_TIMERS)}"
            )
        self.on_gpu = gpu_available()
        self._warmup_iters = warmup_iters
        per_round = math.ceil(benchmark_iters / 2)
        self._sampling = sampling or Sampling(
            max_rounds=8, min_samples=per_round, max_samples=per_round, pause_s=0.05
        )
        self.timers: dict[TimedSide, Timer] = (
            {"device": GpuTimer(), "host": EnqueueTimer()}
            if self.on_gpu
            else {"device": HostTimer(), "host": HostTimer()}
        )
        self._others = {name: OTHER_TIMERS[name]() for name in timers} if self.on_gpu else {}
        self._energy = energy and self.on_gpu
        self.environment = environment or results_environment(self.timers["device"])
        self._file = ResultsFile(Path(export), self.environment) if export else None
        self._records: dict[CaseKey, list[Record]] = {}

    @property
    def results(self) -> dict[str, Any]:
        """All results so far, in the form of the results file."""
        records = [record for found in self._records.values() for record in found]
        return {"environment": self.environment, "records": records}

    def compare(
        self,
        key: CaseKey,
        impls: Mapping[str, Call],
        expected: Call,
        *,
        flops: float = 0.0,
        bytes: float = 0.0,  # noqa: A002 - the name that users expect
        tolerance: float = 1e-2,
        measure_memory: bool = False,
        clock: TimedSide = "device",
        pause_s: float | None = None,
        on_failure: Failure | None = None,
        views: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> list[Record]:
        """Times `impls` (name -> call) in interleaved runs; returns one record each, in order.

        key: (family, op, case, dtype), the name of this case in results and comparisons.
        expected: returns the correct result: an array, or several.
        flops, bytes: work of one call, from which rates and the floor are computed.
        tolerance: largest ||out - expected|| / ||expected|| that counts as correct.
        clock: "device" times the work, "host" the cost of the call to the calling thread.
        on_failure: called for implementations that raise when they are checked, before or after
            the timing, or in the warm-up; they get no record. Without it the first exception
            propagates.
        views: name -> function that selects the outputs to compare; default: all.
        """
        wanted = expected()
        viewed = {name: _viewed(call, (views or {}).get(name)) for name, call in impls.items()}
        errors = _errors(viewed, wanted, on_failure)
        impls = {n: impls[n] for n in errors if self._warms_up(n, impls[n], on_failure)}
        peaks = {n: self._peak(c) for n, c in impls.items() if measure_memory and self.on_gpu}
        options = asdict(self._sampling)
        if pause_s is not None:
            options["pause_s"] = min(pause_s, options["pause_s"])
        timer = self.timers[clock]
        timings = measure(impls, timer, **options)
        again = _errors({name: viewed[name] for name in impls}, wanted, on_failure)
        errors = {name: max(errors[name], error) for name, error in again.items()}
        records = []
        floor = floor_us(
            self.environment, precision_of(key[3], key[2]), flops=flops, bytes_moved=bytes
        )
        for name in errors:
            timing = timings[name]
            record = _record(key, name, timing, flops=flops, bytes_moved=bytes)
            record["floor_us"] = None if floor is None else round(floor, 2)
            record["error"] = float(f"{errors[name]:.3g}") if math.isfinite(errors[name]) else None
            record["correct"] = errors[name] <= tolerance
            record["timer"] = timer.name
            if self._others:
                record["other_us"] = self._other_us(impls[name])
            if name in peaks:
                record["peak_bytes"] = peaks[name]
            if self._energy:
                record |= _joules(impls[name], timing.median_us)
            records.append(record)
        self._records[key] = records
        if self._file:
            self._file.replace(key, records)
        return records

    def benchmark_flash_attention(self, *, small: bool = False) -> list[Record]:
        """Attention, forward, causal and full, for head dimensions of 64 and 128."""
        return self._suite("flash_attention", small)

    def benchmark_matmul(self, *, small: bool = False) -> list[Record]:
        """Matrix products of transformer shapes."""
        return self._suite("matmul", small)

    def benchmark_rms_norm(self, *, small: bool = False) -> list[Record]:
        """The RMS norm between the blocks of a transformer."""
        return self._suite("rms_norm", small)

    def run_full_suite(self, *, small: bool = False) -> dict[str, Any]:
        """Runs every benchmark above; returns :attr:`results`.

        small: sizes that a CPU finishes quickly.
        """
        for name in SUITE:
            self._suite(name, small)
        return self.results

    def _suite(self, name: str, small: bool) -> list[Record]:
        return [record for case in SUITE[name](small) for record in self._run_case(case)]

    def _run_case(self, case: SuiteCase) -> list[Record]:
        impls, expected = case.build()
        return self.compare(
            case.key,
            impls,
            expected,
            flops=case.flops,
            bytes=case.bytes,
            measure_memory=True,
        )

    def _warms_up(self, name: str, call: Call, failure: Failure | None) -> bool:
        try:
            for _ in range(self._warmup_iters):
                call()
        except Exception as error:
            if failure is None:
                raise
            failure(name, error)
            return False
        return True

    def _peak(self, call: Call) -> int:
        with PeakMemory() as memory:
            call()
        return memory.bytes

    def _other_us(self, call: Call) -> dict[str, float | None]:
        """Medians by the additional timers; None where a timer cannot time the call."""
        found: dict[str, float | None] = {}
        for name, timer in self._others.items():
            try:
                timing = measure({"call": call}, timer, rounds=1, pause_s=0.0)["call"]
                found[name] = round(timing.median_us, 2)
            except Exception:  # a call that allocates cannot be captured
                found[name] = None
        return found


def _viewed(call: Call, view: Callable[[Any], Any] | None) -> Call:
    return call if view is None else lambda: view(call())


def _errors(impls: Mapping[str, Call], wanted: Any, failure: Failure | None) -> dict[str, float]:
    """The relative error of every implementation that runs."""
    errors: dict[str, float] = {}
    for name, call in impls.items():
        try:
            errors[name] = relative_error(call(), wanted)
        except Exception as error:
            if failure is None:
                raise
            failure(name, error)
    return errors


def _record(key: CaseKey, impl: str, timing: Timing, *, flops: float, bytes_moved: float) -> Record:
    median = timing.median_us
    interval = estimate(timing.rounds)
    family, op, case, dtype = key
    return {
        "family": family,
        "op": op,
        "case": case,
        "dtype": dtype,
        "impl": impl,
        "median_us": round(median, 2),
        "iqr_us": round(timing.iqr_us, 2),
        "samples": len(timing.samples_us),
        "range_us": [round(interval.low_us, 3), round(interval.high_us, 3)],
        "tflops": round(flops / median / 1e6, 1) if flops else None,
        "gbps": round(bytes_moved / median / 1e3, 1) if bytes_moved else None,
    }


def _joules(call: Call, once_us: float) -> dict[str, Any]:
    """A call's energy as fields of its record; None with a reason if it could not be measured."""
    try:
        energy, _ = energy_of(call, once_us)
    except CukitError as error:
        return {"joules_per_call": None, "energy_missing": str(error)}
    if energy is None:
        reason = "the GPU's energy counter did not change"
        return {"joules_per_call": None, "energy_missing": reason}
    return {
        "joules_per_call": energy.joules_per_call,
        "calls_per_joule": energy.calls_per_joule,
        "joules_uncertainty": energy.uncertainty_joules,
    }
