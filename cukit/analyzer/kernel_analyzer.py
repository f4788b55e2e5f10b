"""Analyses one kernel or one call: all results in one frozen object.

    from cukit.analyzer import KernelAnalyzer

    analyzer = KernelAnalyzer()
    analysis = analyzer.analyze(kernel, (blocks,), (256,), (x, out), bytes=2 * x.nbytes)
    analyzer.generate_report("report.html")

Without a GPU, or for another architecture (`arch`), the same call reports what the cubin contains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from cukit.analyzer.access_probe import probe_accesses
from cukit.analyzer.advice import advise
from cukit.analyzer.cupti import KernelRecord, KernelTrace
from cukit.analyzer.devices import analysis_device
from cukit.analyzer.invocation import Invocation, invocation
from cukit.analyzer.machine import environment
from cukit.analyzer.ncu import read_counters
from cukit.analyzer.overhead import Overhead, calibration_calls, overhead_of
from cukit.analyzer.power import energy_of
from cukit.analyzer.roofline import DEFAULT_PIPE, roofline, throughput
from cukit.analyzer.schema import (
    AccessPoint,
    AnalysisReport,
    Counters,
    Environment,
    KernelAnalysis,
    LaunchAnalysis,
    Resources,
    TimeStatistics,
)
from cukit.analyzer.static import launch_of_loaded
from cukit.analyzer.statistics import summarize
from cukit.analyzer.timing import GpuTimer, GraphTimer, PeakMemory, Timer, measure, not_capturable
from cukit.core.device import Device, current_device, gpu_available, require_cupy
from cukit.errors import CompileError, CukitError, LaunchError, UnsupportedDeviceError

T = TypeVar("T")

TRACED_CALLS = 21

NO_GPU = "static mode: nothing was run"
NOT_DECLARED = "the caller declared no bytes (bytes=...)"


class KernelAnalyzer:
    """Analyses kernels on CuPy's current device, or for an architecture.

    arch: analyse for this architecture without running anything. None: the current GPU, or, if
        there is none, static mode for sm_90.
    counters: hardware counters by kernel name, or a file written by ncu.
    energy: run each call for another second to read NVML's energy counter.
    ceilings: first measure this machine's ceilings (about two seconds, once).
    """

    def __init__(
        self,
        *,
        arch: str | None = None,
        counters: Mapping[str, Counters] | Path | str | None = None,
        energy: bool = True,
        ceilings: bool = True,
    ) -> None:
        self.static = arch is not None or not gpu_available()
        self.device: Device = analysis_device(arch or "sm_90") if self.static else current_device()
        if isinstance(counters, (str, Path)):
            counters = read_counters(Path(counters))
        self._counters = counters
        self._energy = energy
        self._ceilings = ceilings
        self._analyses: list[KernelAnalysis] = []
        self._accesses: tuple[AccessPoint, ...] = ()

    @cached_property
    def environment(self) -> Environment:
        """The machine and its measured ceilings."""
        timer = self._cold_timer if self._ceilings and not self.static else None
        return environment(self.device, static=self.static, timer=timer)

    @cached_property
    def _cold_timer(self) -> GpuTimer:
        return GpuTimer()

    @cached_property
    def event_overhead(self) -> Overhead:
        """The time that a pair of events adds to the work between them, as measured here."""
        return overhead_of(self._cold_timer, GraphTimer(), calibration_calls())

    def analyze(
        self,
        kernel: Any,
        grid: Any = None,
        block: Any = None,
        args: Sequence[Any] = (),
        *,
        flops: float | None = None,
        bytes: float | None = None,  # noqa: A002 - the name that users expect
        pipe: str = DEFAULT_PIPE,
        shared_bytes: int = 0,
        name: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> KernelAnalysis:
        """Compiles, launches, times and assesses one kernel.

        kernel: a `cupy.RawKernel`; a `cupy.RawModule` (with `name`); a kernel or KernelSpec of
            cukit; a path to a cubin (with `name`); or any callable that takes `args` and launches
            kernels itself: an ElementwiseKernel, a cukit op, a function of yours.
        grid, block: one to three numbers each, for kernels that take them.
        flops, bytes: the work of one call: floating-point operations, and bytes read once plus
            bytes written once. Without them there are times, but no rates and no roofline.
        pipe: the pipe that `flops` run on: "fp32", "tensor_bf16", "tensor_fp16", ...
        shared_bytes: dynamic shared memory per block.
        name: the kernel in a RawModule or cubin; for any other callable, its name in the report.
        kwargs: keyword arguments of a callable.

        The call must be repeatable: it runs hundreds of times by itself, is replayed in a CUDA
        graph, and with `energy` runs back to back for more than a second, on the same arguments.
        Raises CompileError with the compiler's log and LaunchError for a launch that cannot run,
        both before anything is timed.
        """
        work = invocation(
            kernel,
            self.device,
            grid=grid,
            block=block,
            args=tuple(args),
            kwargs=kwargs,
            shared_bytes=shared_bytes,
            name=name,
            runnable=not self.static,
        )
        declared = throughput(bytes_moved=bytes, flops=flops, time_us=None)
        analysis = KernelAnalysis(
            name=work.name,
            kind=work.kind,
            arch=self.device.arch,
            launches=(work.launch,) if work.launch else (),
            cold=None,
            warm=None,
            throughput=declared if bytes or flops else None,
            roofline=(),
            energy=None,
            conditions=None,
            counters=None,
            advice=(),
            missing={},
        )
        analysis = (
            self._without_run(analysis, work) if work.call is None else self._run(analysis, work)
        )
        analysis = self._add_counters(analysis)
        if analysis.cold is not None:
            analysis = self._add_roofline(analysis, pipe)
        advice = advise(analysis, self.device.num_sms, self._accesses)
        analysis = replace(analysis, advice=advice)
        self._analyses.append(analysis)
        return analysis

    def report(self) -> AnalysisReport:
        """All analyses so far, with the machine."""
        return AnalysisReport(self.environment, tuple(self._analyses), accesses=self._accesses)

    def analyze_memory_patterns(self) -> tuple[AccessPoint, ...]:
        """Measures the cost of strided loads on this GPU; the report shows the table.

        Raises UnsupportedDeviceError in static mode.
        """
        if self.static:
            raise UnsupportedDeviceError(
                "the access probe needs a GPU, and a KernelAnalyzer without arch=..."
            )
        self._accesses = probe_accesses(self._cold_timer, self.device)
        return self._accesses

    def generate_report(self, *outputs: Path | str) -> Any:
        """Writes all analyses so far; suffixes choose formats: .html, .txt, .json, .trace.json."""
        from cukit.analyzer.report import generate_report

        return generate_report([self.report()], outputs)

    def _without_run(self, analysis: KernelAnalysis, work: Invocation) -> KernelAnalysis:
        reason = NO_GPU if self.static else "nothing was run: grid and arguments were not given"
        names = ["cold", "warm", "roofline", "energy", "conditions"]
        if work.launch is None:
            names.append("launches")
        missing = {**analysis.missing, **dict.fromkeys(names, reason)}
        if work.launch is not None and work.launch.waves is None:
            missing["waves"] = "no grid was given"
        return replace(analysis, missing=missing)

    def _add_counters(self, analysis: KernelAnalysis) -> KernelAnalysis:
        """Adds the counters given for the kernel, or why there are none.

        A call that launches several kernels is looked up by its own name.
        """
        name = analysis.launches[0].name if len(analysis.launches) == 1 else analysis.name
        found = (self._counters or {}).get(name)
        if found is not None:
            return replace(analysis, counters=found)
        reason = f"the counters given have no kernel {name}"
        if self._counters is None:
            reason = "no counters were given: `cukit analyze --counters` reads them with ncu"
        return replace(analysis, missing={**analysis.missing, "counters": reason})

    def _run(self, analysis: KernelAnalysis, work: Invocation) -> KernelAnalysis:
        call = work.call
        assert call is not None
        self._first_call(call, work.name)
        missing: dict[str, str] = {}

        def attempt(field: str, action: Callable[[], T]) -> T | None:
            """The result of `action`; None and an entry in `missing` if it raises CukitError."""
            try:
                return action()
            except CukitError as reason:
                missing[field] = str(reason)
                return None

        cold = _statistics(call, self._cold_timer, "cold", self.event_overhead)
        warm = attempt("warm graph replay", lambda: _replayed(call))
        if warm is None:
            warm = _statistics(call, GpuTimer(cold=False), "warm", self.event_overhead)
        # Directly after the timed calls: the first milliseconds after a pause are slower.
        traced = attempt("device_us", lambda: self._traced(call, work.launch))
        launches = traced or analysis.launches
        if not launches:
            missing.setdefault("device_us", "the call launched no kernel")
            missing["launches"] = missing["device_us"]
        energy = conditions = None
        if self._energy:
            measured = attempt("energy", lambda: energy_of(call, warm.median_us))
            if measured is None:
                missing["conditions"] = missing["energy"]
            else:
                energy, conditions = measured
                if energy is None:
                    missing["energy"] = "the GPU's energy counter did not change"
        else:
            missing |= dict.fromkeys(("energy", "conditions"), "not requested")
        with PeakMemory() as memory:
            call()
        return replace(
            analysis,
            launches=launches,
            cold=cold,
            warm=warm,
            energy=energy,
            conditions=conditions,
            missing={**analysis.missing, **missing},
            peak_bytes=memory.bytes,
        )

    def _first_call(self, call: Callable[[], object], name: str) -> None:
        """Compiles and runs the call once, so that a broken kernel is reported by its own name."""
        cupy = require_cupy("running a kernel")
        try:
            call()
            cupy.cuda.Device().synchronize()
        except cupy.cuda.compiler.CompileException as error:
            raise CompileError(f"{name} does not compile\n{error}") from error
        except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
            raise LaunchError(f"{name}: the launch failed: {error}") from error

    def _traced(
        self, call: Callable[[], object], launch: LaunchAnalysis | None
    ) -> tuple[LaunchAnalysis, ...]:
        """The launches of one call, each with its duration with a cold L2, from CUPTI.

        If the call launches one kernel that is already analysed, only its duration is added.
        """
        with KernelTrace() as trace:
            for _ in range(TRACED_CALLS):
                self._cold_timer.flush()
                call()
        records = typical_call(trace.records, TRACED_CALLS)
        if launch is not None and len(records) == 1:
            return (replace(launch, device_us=records[0].duration_us),)
        return tuple(launch_of(record, self.device) for record in records)

    def _add_roofline(self, analysis: KernelAnalysis, pipe: str) -> KernelAnalysis:
        """Adds rates and rooflines to a timed analysis."""
        assert analysis.cold is not None
        work = analysis.throughput
        median_us = analysis.cold.median_us
        rates = throughput(
            bytes_moved=work.bytes if work else None,
            flops=work.flops if work else None,
            time_us=median_us,
        )
        held = analysis.conditions.sm_clock_mhz if analysis.conditions else None
        points = roofline(
            rates,
            self.environment.ceilings,
            median_us=median_us,
            pipe=pipe,
            held_clock_mhz=held,
        )
        missing = dict(analysis.missing)
        if not points:
            missing["roofline"] = (
                NOT_DECLARED if not rates.bytes else f"no ceiling is known for the pipe {pipe!r}"
            )
        elif all(point.roof != "measured" for point in points):
            missing["measured roof"] = (
                f"the rate of the pipe {pipe!r} was not measured"
                if self._ceilings
                else "the ceilings were not requested"
            )
        return replace(
            analysis, throughput=rates if work else None, roofline=points, missing=missing
        )


def typical_call(records: Sequence[KernelRecord], calls: int) -> list[KernelRecord]:
    """The launches of one call, each with its median duration over all `calls`.

    If the calls did not launch the same kernels in the same order, all records are returned.
    """
    each = len(records) // calls
    columns = [records[i::each] for i in range(each)]
    alike = len(records) == each * calls and all(
        len({(record.name, record.grid) for record in column}) == 1 for column in columns
    )
    if not alike:
        return list(records)
    return [sorted(column, key=lambda r: r.duration_us)[calls // 2] for column in columns]


def launch_of(record: KernelRecord, device: Device) -> LaunchAnalysis:
    """A traced launch and its residency; a trace has no spills and no access widths."""
    resources = Resources(
        registers=record.registers,
        static_shared_bytes=record.static_shared_bytes,
        dynamic_shared_bytes=record.dynamic_shared_bytes,
        spill_store_bytes=None,
        spill_load_bytes=None,
        local_bytes=record.local_bytes,
        max_threads_per_block=None,
    )
    shape = (record.name, record.grid, record.block)
    return launch_of_loaded(device, *shape, resources, record.duration_us)


def _statistics(
    call: Callable[[], object], timer: Timer, cache: str, overhead: Overhead | None = None
) -> TimeStatistics:
    timing = measure({"call": call}, timer, rounds=2, max_rounds=8, pause_s=0.05)["call"]
    samples_us = overhead.corrected(timing.samples_us) if overhead else timing.samples_us
    found = summarize(samples_us, timer=timer.name, cache=cache, round_sizes=timing.round_sizes)
    if overhead is None:
        return found
    return replace(found, overhead_us=overhead.us, overhead_uncertainty_us=overhead.uncertainty_us)


def _replayed(call: Callable[[], object]) -> TimeStatistics:
    """Warm times from graph replays. Raises CukitError if the call cannot be captured."""
    try:
        return _statistics(call, GraphTimer(), "warm")
    except Exception as error:  # anything that is not allowed during capture
        raise not_capturable(error) from error
