"""Compares the analyzer with other tools, on a GPU:

    python -m profiling.prove_analyzer --out proof.json

- times compared with CUPTI, ncu and Triton's do_bench, on ten kernels from 3 us to 10 ms;
- the bandwidth of a copy kernel compared with cudaMemcpy;
- `cukit compare` must report no difference between runs of two processes, and must detect 5% more
  work;
- with ncu: theoretical and achieved occupancy, and measured and declared DRAM bytes.

A pair of events adds 2 us to the time of a kernel, do_bench 3 us, ncu 1 us. These overheads
("zeros" in the results) are measured on a kernel of known time and subtracted, as the analyzer does
for its events. CUPTI timestamps the kernel itself; nothing is subtracted from its times.

Prints the results; the exit code is 1 if a tolerance is exceeded. A tool that is not installed is
skipped, with the reason on stderr.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from cukit.analyzer.benchmark import KernelBenchmark
from cukit.analyzer.comparison import compare_results
from cukit.analyzer.cupti import KernelTrace
from cukit.analyzer.kernel_analyzer import KernelAnalyzer
from cukit.analyzer.ncu import ncu_durations, run_ncu
from cukit.analyzer.overhead import Overhead, calibration_calls, overhead_from
from cukit.analyzer.statistics import Verdict
from cukit.analyzer.suite import SUITE
from cukit.analyzer.timing import Call, GpuTimer, GraphTimer, measure
from cukit.core.device import current_device, require_cupy
from cukit.errors import CukitError
from profiling import peers
from profiling.case import PeerMissing
from profiling.proof_subjects import (
    BUSY_RESULT,
    BUSY_US,
    Subject,
    busy_rounds,
    busy_subject,
    copy_subject,
    memory_bound,
    timed_subjects,
)

TIME_TOLERANCE = 0.03
COPY_TOLERANCE = 0.02
DRAM_TOLERANCE = 0.05
REPEATS = 20

NCU_LAUNCHES = 15
DO_BENCH_REPEATS = 5
TRACED_LAUNCHES = 31

Readings = dict[str, tuple[float, ...] | None]
"""Several readings of a clock per kernel; None if the clock is not available."""


def do_bench(call: Call) -> tuple[float, ...] | None:
    """Several medians of Triton's do_bench; None without Triton."""
    try:
        testing = peers.optional("triton.testing")
    except PeerMissing as reason:
        print(f"    skipped: {reason}", file=sys.stderr)
        return None
    options: dict[str, Any] = {"warmup": 20, "rep": 60, "return_mode": "median"}
    return tuple(1e3 * testing.do_bench(call, **options) for _ in range(DO_BENCH_REPEATS))


def cupti(call: Call) -> tuple[float, ...] | None:
    """Durations in CUPTI's records, each launch with a cold L2; None without CUPTI."""
    timer = GpuTimer()
    try:
        with KernelTrace() as trace:
            for _ in range(TRACED_LAUNCHES):
                timer.flush()
                call()
    except CukitError as reason:
        print(f"    skipped: {reason}", file=sys.stderr)
        return None
    return tuple(record.duration_us for record in trace.records)


def ncu(rounds: Sequence[int]) -> list[tuple[float, ...]] | None:
    """ncu's durations of the launches of :func:`launch_for_ncu`, one tuple per kernel, in order;
    None if ncu cannot be used."""
    command = [sys.executable, "-m", "profiling.prove_analyzer", "--launch-for-ncu"]
    try:
        found = ncu_durations([*command, *map(str, rounds)])
    except CukitError as reason:
        print(f"    skipped: {reason}", file=sys.stderr)
        return None
    ours = [microseconds for name, microseconds in found if name in ("fma_rate", "busy", "copy")]
    return [
        tuple(ours[start : start + NCU_LAUNCHES]) for start in range(0, len(ours), NCU_LAUNCHES)
    ]


def launch_for_ncu(rounds: Sequence[int]) -> None:
    """Launch the calibration kernels and the ten kernels several times each, with a cold L2."""
    timer = GpuTimer()
    calls: Iterable[Call] = (*calibration_calls(), *timed_subjects(rounds))
    for call in calls:
        for _ in range(NCU_LAUNCHES):
            timer.flush()
            call()
    require_cupy("the proof").cuda.Device().synchronize()


def times() -> dict[str, Any]:
    """Time each of the ten kernels by every clock; return the overheads and, per kernel, the
    medians and the differences of the analyzer from each clock."""
    analyzer = KernelAnalyzer(energy=False, ceilings=False)
    event_overhead = analyzer.event_overhead
    rounds = [busy_rounds(us, event_overhead.us) for us in BUSY_US]
    by_ncu = ncu(rounds)
    chain = GraphTimer()
    calibration = calibration_calls()
    chain_us = [measure({"": c}, chain, rounds=1, pause_s=0)[""].median_us for c in calibration]

    def overhead_of(readings: Sequence[tuple[float, ...] | None]) -> Overhead | None:
        differences = [
            statistics.median(reading) - known
            for reading, known in zip(readings, chain_us, strict=True)
            if reading
        ]
        return overhead_from(differences) if differences else None

    overheads = {
        "events": event_overhead,
        "cupti": overhead_of([cupti(call) for call in calibration]),
        "ncu": overhead_of(by_ncu[: len(calibration)]) if by_ncu else None,
        "do_bench": overhead_of([do_bench(call) for call in calibration]),
    }
    rows = []
    for number, subject in enumerate(timed_subjects(rounds)):
        analysis = analyzer.analyze(
            subject.kernel, subject.grid, subject.block, subject.args, bytes=subject.bytes
        )
        assert analysis.cold is not None
        readings: Readings = {
            "cupti": cupti(subject),
            "ncu": by_ncu[len(calibration) + number] if by_ncu else None,
            "do_bench": do_bench(subject),
        }
        rows.append(_row(subject.name, analysis.cold.median_us, readings, overheads))
    found = {name: overhead and asdict(overhead) for name, overhead in overheads.items()}
    return {"zeros": found, "times": rows}


def _row(
    name: str,
    analyzer_us: float,
    readings: Readings,
    overheads: Mapping[str, Overhead | None],
) -> dict[str, Any]:
    """Compare the analyzer's time with CUPTI, which timestamps the kernel itself, and with the
    other clocks less their overheads.

    The uncertainty of a clock is the sum of the interquartile range of its readings and the
    uncertainty of its overhead.
    """
    events = overheads["events"]
    assert events is not None
    row: dict[str, Any] = {
        "kernel": name,
        "analyzer_us": analyzer_us,
        "events_us": analyzer_us + events.us,
    }
    for clock, reading in readings.items():
        if not reading:
            continue
        overhead = overheads[clock] if clock != "cupti" else None
        median = statistics.median(reading)
        kernel_us = median - (overhead.us if overhead else 0.0)
        low, high = np.percentile(reading, (25, 75))
        uncertainty_us = float(high - low) + (overhead.uncertainty_us if overhead else 0.0)
        row |= {
            f"{clock}_us": median,
            f"{clock}_difference": analyzer_us / kernel_us - 1,
            f"{clock}_doubt": uncertainty_us / kernel_us,
        }
    return row


def copy_bandwidth() -> dict[str, float]:
    """Measure the copy kernel (by the analyzer) and cudaMemcpy, in GB/s."""
    cupy = require_cupy("the proof")
    subject = copy_subject(2048)
    source, target, _ = subject.args
    stream = cupy.cuda.get_current_stream()

    def memcpy() -> None:
        cupy.cuda.runtime.memcpyAsync(
            target.data.ptr, source.data.ptr, source.nbytes, 3, stream.ptr
        )

    timings = measure({"kernel": subject, "memcpy": memcpy}, GpuTimer(), rounds=3)
    assert subject.bytes is not None
    rates = {name: subject.bytes / t.median_us / 1e3 for name, t in timings.items()}
    return rates | {"slower_by": 1 - rates["kernel"] / rates["memcpy"]}


def bench_runs(rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Return the results of `repeats` benchmark runs, each of a raw kernel, a norm and a matrix
    product."""
    environment: dict[str, Any] = {"gpu": current_device().name, "ceilings": {}}
    cases = [SUITE["rms_norm"](False)[0], SUITE["matmul"](False)[0]]
    built = [(case.key, *case.build()) for case in cases]
    runs = []
    for _ in range(repeats):
        benchmark = KernelBenchmark(benchmark_iters=40, environment=environment)
        _compare_busy(benchmark, busy_subject("", rounds))
        for key, impls, expected in built:
            benchmark.compare(key, impls, expected)
        runs.append(benchmark.results)
    return runs


def _compare_busy(benchmark: KernelBenchmark, subject: Subject) -> None:
    x = subject.args[0]

    def call() -> Any:
        subject()
        return x

    wanted = require_cupy("the proof").full_like(x, BUSY_RESULT)
    benchmark.compare(("proof", "busy", "100 us", "float32"), {"cukit": call}, lambda: wanted)


def verdicts(rounds: int) -> dict[str, list[str]]:
    """Compare runs, as `cukit compare` does: of the same code in two processes ("same"), and of 5%
    more work in this process ("slower")."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.json"
        command = [sys.executable, "-m", "profiling.prove_analyzer", f"--out={path}"]
        subprocess.run([*command, f"--bench-runs={rounds}"], check=True, stdout=sys.stderr)
        before = json.loads(path.read_text())
    after = bench_runs(rounds, REPEATS)
    same = [
        case.difference.verdict.value
        for pair in zip(before, after, strict=True)
        for case in compare_results(*pair).cases
    ]
    slower = []
    for base in after:
        benchmark = KernelBenchmark(benchmark_iters=40, environment=base["environment"])
        _compare_busy(benchmark, busy_subject("", int(1.05 * rounds)))
        (case,) = compare_results(base, benchmark.results).cases
        slower.append(case.difference.verdict.value)
    return {"same": same, "slower": slower}


def counters() -> list[dict[str, Any]]:
    """Measure achieved occupancy and DRAM bytes of the memory-bound calls in one run of ncu."""
    command = [sys.executable, "-m", "profiling.prove_analyzer", "--run-memory-bound"]
    found = run_ncu(command)
    analyzer = KernelAnalyzer(energy=False, ceilings=False, counters=found)
    rows = []
    for name, make in memory_bound().items():
        subject = make()
        analysis = analyzer.analyze(subject.call, name=name, bytes=subject.bytes)
        counted = [found[each.name] for each in analysis.launches if each.name in found]
        longest = max(analysis.launches, key=lambda launch: launch.device_us or 0.0)
        moved = sum((c.dram_read_bytes or 0) + (c.dram_write_bytes or 0) for c in counted)
        assert longest.occupancy is not None
        rows.append(
            {
                "kernel": name,
                "theoretical_occupancy": longest.occupancy.fraction,
                "limited_by": longest.occupancy.limiter,
                "achieved_occupancy": found[longest.name].achieved_occupancy,
                "declared_bytes": subject.bytes,
                "dram_bytes": moved,
                "difference": moved / subject.bytes - 1,
                "gbps": analysis.throughput.gbps if analysis.throughput else None,
            }
        )
        del subject, analysis
    return rows


def exceeded_tolerances(found: dict[str, Any]) -> list[str]:
    """Return the exceeded tolerances. A pure function, so that tests cover the tolerances.

    If the uncertainty of a clock exceeds its tolerance, the uncertainty is used instead, except for
    CUPTI, the reference, whose tolerance is fixed.
    """
    missed = []
    for row in found["times"]:
        for clock in ("cupti", "ncu", "do_bench"):
            difference = row.get(f"{clock}_difference")
            uncertainty = row.get(f"{clock}_doubt", 0.0) if clock != "cupti" else 0.0
            tolerance = max(TIME_TOLERANCE, uncertainty)
            if difference is not None and abs(difference) > tolerance:
                missed.append(f"{row['kernel']}: {difference:+.1%} from {clock}")
    if found["copy"]["slower_by"] > COPY_TOLERANCE:
        missed.append(f"copy: {found['copy']['slower_by']:.1%} slower than cudaMemcpy")
    allowed = {Verdict.SAME.value, Verdict.UNCERTAIN.value}
    if wrong := [v for v in found["verdicts"]["same"] if v not in allowed]:
        missed.append(f"the same kernel was reported as {wrong}")
    if wrong := [v for v in found["verdicts"]["slower"] if v != Verdict.SLOWER.value]:
        missed.append(f"a slowdown of 5% was reported as {wrong}")
    missed += [
        f"{row['kernel']}: DRAM bytes {row['difference']:+.1%} from the declared"
        for row in found["counters"]
        if abs(row["difference"]) > DRAM_TOLERANCE
    ]
    return missed


def prove() -> dict[str, Any]:
    """Run all comparisons; return the results with the exceeded tolerances."""
    found: dict[str, Any] = {"gpu": current_device().name, **times(), "copy": copy_bandwidth()}
    found["verdicts"] = verdicts(busy_rounds(100, 0.0))
    found["counters"] = []
    try:
        found["counters"] = counters()
    except CukitError as reason:
        print(f"    skipped: {reason}", file=sys.stderr)
    return found | {"missed": exceeded_tolerances(found)}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="write the results to this file, as JSON")
    # Commands that run in subprocesses.
    parser.add_argument("--launch-for-ncu", type=int, nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--run-memory-bound", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bench-runs", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.launch_for_ncu:
        launch_for_ncu(options.launch_for_ncu)
        return 0
    if options.run_memory_bound:
        for make in memory_bound().values():
            make().call()
        require_cupy("the proof").cuda.Device().synchronize()
        return 0
    found: Any = bench_runs(options.bench_runs, REPEATS) if options.bench_runs else prove()
    text = json.dumps(found, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    if options.bench_runs:
        return 0
    print(text)
    return 1 if found["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
