"""Holds the analyzer to other people's instruments, on a GPU:

    python -m profiling.prove_analyzer --out proof.json

- its times against Triton's do_bench and CUPTI's durations, on ten kernels from 3 us to 10 ms;
- the bandwidth of a copy kernel against cudaMemcpy's;
- two measurements of the same kernel are never told apart, one with 5% more work always is;
- with ncu: theoretical beside achieved occupancy, and DRAM bytes against the declared ones.

Prints what it finds, and exits with 1 where a bar is missed. What an instrument that is not here
would have said is left out, and named.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cukit.analyzer.kernel_analyzer import KernelAnalyzer
from cukit.analyzer.ncu import run_ncu
from cukit.analyzer.statistics import Verdict, compare, estimate
from cukit.analyzer.timing import GpuTimer, measure
from cukit.core.device import current_device, require_cupy
from cukit.errors import CukitError
from profiling import peers
from profiling.case import PeerMissing

TIME_BAR = 0.03
COPY_BAR = 0.02
DRAM_BAR = 0.05
REPEATS = 20

BUSY = r"""
extern "C" __global__ void __launch_bounds__(256) busy(float* x, int rounds) {
  float a = x[threadIdx.x], b = a + 1.0f;
  for (int i = 0; i < rounds; ++i) { a = fmaf(a, 0.999f, b); b = fmaf(b, 0.998f, a); }
  x[blockIdx.x * 256 + threadIdx.x] = a + b;
}
extern "C" __global__ void __launch_bounds__(256) copy(
    const float4* __restrict__ from, float4* __restrict__ to, long long n) {
  const long long step = 256ll * gridDim.x;
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < n; i += step) to[i] = from[i];
}"""

BUSY_US = (3, 10, 30, 100, 10_000)
COPIES_MIB = (2, 16, 64, 512, 2048)
LARGE_MIB = 4096


@dataclass(frozen=True)
class Subject:
    """A kernel to be timed. `shape` is its (grid, block) for the analyzer."""

    name: str
    kernel: Any
    grid: int
    args: tuple[Any, ...]
    bytes: float | None = None

    def __call__(self) -> None:
        self.kernel((self.grid,), (256,), self.args)


def copy_subject(mebibytes: int) -> Subject:
    """Reads and writes this much."""
    cupy = require_cupy("the proof")
    words = (mebibytes << 20) // 4
    source = cupy.arange(words, dtype=cupy.float32)
    target = cupy.empty_like(source)
    kernel = cupy.RawModule(code=BUSY).get_function("copy")
    grid = min(words // 4 // 256, 16 * current_device().num_sms)
    arguments = (source, target, np.int64(words // 4))
    return Subject(f"copy {mebibytes} MiB", kernel, grid, arguments, 8.0 * words)


def busy_subject(target_us: float) -> Subject:
    """Arithmetic for about this long: the rounds are found by timing."""
    cupy = require_cupy("the proof")
    blocks = 4 * current_device().num_sms
    x = cupy.zeros(blocks * 256, cupy.float32)
    kernel = cupy.RawModule(code=BUSY).get_function("busy")

    def subject(rounds: int) -> Subject:
        return Subject(f"busy {target_us:g} us", kernel, blocks, (x, np.int32(rounds)))

    timer = GpuTimer(cold=False)

    def time_us(rounds: int) -> float:
        return measure({"": subject(rounds)}, timer, rounds=1, pause_s=0)[""].median_us

    per_round_us = (time_us(20_000) - time_us(10_000)) / 10_000
    return subject(max(1, int(target_us / per_round_us)))


def times(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """Each subject by every instrument."""
    rows = []
    analyzer = KernelAnalyzer(energy=False, ceilings=False)
    for subject in subjects:
        analysis = analyzer.analyze(
            subject.kernel, subject.grid, 256, subject.args, bytes=subject.bytes
        )
        assert analysis.cold is not None
        row: dict[str, Any] = {"kernel": subject.name, "analyzer_us": analysis.cold.median_us}
        row["graph_us"] = analysis.warm.median_us if analysis.warm else None
        row["cupti_us"] = analysis.launches[0].device_us
        if row["cupti_us"] is None:
            print(f"    left out: {analysis.missing['device_us']}", file=sys.stderr)
        row["do_bench_us"] = _do_bench_us(subject)
        others = [row[key] for key in ("cupti_us", "do_bench_us") if row[key] is not None]
        row["largest_difference"] = max(
            (abs(row["analyzer_us"] / other - 1) for other in others), default=None
        )
        rows.append(row)
    return rows


def _do_bench_us(subject: Subject) -> float | None:
    """Triton's own median; None where Triton is not."""
    try:
        testing = peers.optional("triton.testing")
    except PeerMissing as reason:
        print(f"    left out: {reason}", file=sys.stderr)
        return None
    return 1e3 * float(testing.do_bench(subject, warmup=50, rep=200, return_mode="median"))


def copy_bandwidth() -> dict[str, float]:
    """GB/s of the copy kernel by the analyzer, and of cudaMemcpy."""
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
    return rates | {"difference": abs(rates["kernel"] / rates["memcpy"] - 1)}


def verdicts() -> dict[str, list[str]]:
    """Of the same kernel twice, and of one that does 5% more, each REPEATS times."""
    subject = busy_subject(100)
    x, rounds = subject.args
    slower = Subject("slower", subject.kernel, subject.grid, (x, np.int32(1.05 * rounds)))
    timer = GpuTimer()

    def once(call: Subject) -> Any:
        return estimate(measure({"": call}, timer, rounds=3, pause_s=0.05)[""].rounds)

    found: dict[str, list[str]] = {"same": [], "slower": []}
    for _ in range(REPEATS):
        base = once(subject)
        found["same"].append(compare(base, once(subject)).verdict.value)
        found["slower"].append(compare(base, once(slower)).verdict.value)
    return found


def counters() -> list[dict[str, Any]]:
    """Achieved occupancy and DRAM bytes of large copies, of one process under ncu for each."""
    rows = []
    for mebibytes in (LARGE_MIB, LARGE_MIB // 2, LARGE_MIB // 4, LARGE_MIB // 8, LARGE_MIB // 16):
        command = [sys.executable, "-m", "profiling.prove_analyzer", f"--run-copy={mebibytes}"]
        found = run_ncu(command)["copy"]
        subject = copy_subject(mebibytes)
        analysis = KernelAnalyzer(arch=current_device().arch, counters={"copy": found}).analyze(
            subject.kernel, subject.grid, 256
        )
        occupancy = analysis.launches[0].occupancy
        moved = (found.dram_read_bytes or 0) + (found.dram_write_bytes or 0)
        rows.append(
            {
                "kernel": subject.name,
                "theoretical_occupancy": occupancy.fraction if occupancy else None,
                "achieved_occupancy": found.achieved_occupancy,
                "declared_bytes": subject.bytes,
                "dram_bytes": moved,
                "difference": abs(moved / subject.bytes - 1) if subject.bytes else None,
            }
        )
    return rows


def judge(found: dict[str, Any]) -> list[str]:
    """The bars that were missed. Pure, so that the bars themselves are tested."""
    missed = [
        f"{row['kernel']}: {row['largest_difference']:.1%} from another clock"
        for row in found["times"]
        if row["largest_difference"] is not None and row["largest_difference"] > TIME_BAR
    ]
    if found["copy"]["difference"] > COPY_BAR:
        missed.append(f"copy: {found['copy']['difference']:.1%} from cudaMemcpy")
    allowed = {Verdict.SAME.value, Verdict.UNCERTAIN.value}
    if wrong := [v for v in found["verdicts"]["same"] if v not in allowed]:
        missed.append(f"the same kernel was called {wrong}")
    if wrong := [v for v in found["verdicts"]["slower"] if v != Verdict.SLOWER.value]:
        missed.append(f"a slowdown of 5% was called {wrong}")
    missed += [
        f"{row['kernel']}: DRAM bytes {row['difference']:.1%} from the declared"
        for row in found["counters"]
        if row["difference"] is not None and row["difference"] > DRAM_BAR
    ]
    return missed


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="where to write what was found, as JSON")
    parser.add_argument("--run-copy", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run_copy:
        copy_subject(options.run_copy)()
        require_cupy("the proof").cuda.Device().synchronize()
        return 0
    subjects = [busy_subject(us) for us in BUSY_US] + [copy_subject(mib) for mib in COPIES_MIB]
    found: dict[str, Any] = {
        "gpu": current_device().name,
        "times": times(subjects),
        "copy": copy_bandwidth(),
        "verdicts": verdicts(),
        "counters": [],
    }
    try:
        found["counters"] = counters()
    except CukitError as reason:
        print(f"    left out: {reason}", file=sys.stderr)
    found["missed"] = judge(found)
    text = json.dumps(found, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 1 if found["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
