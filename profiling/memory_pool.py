"""Compares memory pools and merges the measurements into a results file.

    python -m profiling.memory_pool --out profiling/results/h200.json
    python -m profiling.memory_pool --small                # host pages; no GPU needed

Records have the family "memory_pool", and additional fields:

    replay, replay_tight   one log on one pool: median_us, mean_us, p99_us of an allocation,
                           free_mean_us, completed, failure, limit_bytes, peak_live_bytes,
                           peak_reserved_bytes, fragmentation. "Tight": the limit is 1.05 times the
                           log's peak of live bytes, plus 2 MiB per stream.
    pair                   an allocation and its free, of the size that was freed just before
    remap                  an allocation for which scattered free pages must be remapped
    defragment             compaction of all buffers of a pool; gbps counts bytes read and written,
                           copy_us and copy_gbps are of the copy kernel only
    training_step          a step of `cukit distill` with arrays from the pool; host_us until the
                           step is enqueued, tokens_per_second. Needs a GPU
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cukit.analyzer.report.benchmarks import MEMORY_POOLS
from cukit.analyzer.results import OURS, Record, ResultsFile, case_key
from cukit.analyzer.statistics import estimate
from cukit.analyzer.timing import GpuTimer, HostTimer
from cukit.core.device import gpu_available
from cukit.core.kernel import Kernel
from cukit.memory import MemoryPool, MemoryPoolConfig
from cukit.memory.providers.provider import Provider
from cukit.memory.replay.mixes import STANDARD
from cukit.memory.replay.pools import POOLS, make_pool
from cukit.memory.replay.processes import PoolMissing, Request, replay_apart
from cukit.memory.replay.replay import ReplayResult
from profiling.environment import describe
from profiling.pool_training import measure_training

FAMILY = MEMORY_POOLS

LOGS = Path(__file__).parent / "logs"
RECORDED = (LOGS / "distill.csv.gz",)
"""Logs of real programs; profiling/notes/memory_pool.md describes how they were recorded."""

MIB, GIB = 1 << 20, 1 << 30

PAIR_SIZES = {"512 B": 512, "1 MiB": MIB}
PAIRS, ROUNDS = 20_000, 7

DEFRAGMENTED = (
    (64 * 1024, 64, None),
    (MIB, 4096, None),
    (64 * 1024, 16384, None),
    (64 * 1024, 65536, None),
    (16 * MIB, 2048, 64 * MIB),
)
"""Bytes per buffer, number of buffers, bytes per page (None: the default). Buffers are smaller than
a page, because buffers of whole pages would be remapped, not copied. The first entry is only for
`--small`."""


def logs(small: bool) -> list[str]:
    """Synthetic logs by name, recorded logs by path."""
    if small:
        return ["random-200-4", "torture"]
    return [*STANDARD, *map(str, RECORDED)]


# Logs ---------------------------------------------------------------------------------------------


def replay_records(pool: str, names: Sequence[str]) -> list[Record]:
    """Replay every log on one pool, without a limit and at a tight one."""
    requests = [Request(name, limit) for name in names for limit in (None, "tight")]
    results = replay_apart(pool, requests)
    return [_replayed(r, result) for r, result in zip(requests, results, strict=True)]


def _replayed(request: Request, result: ReplayResult) -> Record:
    allocate = result.allocate
    return {
        **_key("replay" if request.limit is None else "replay_tight", title(request.log)),
        "impl": result.pool,
        "median_us": round(allocate.median_us, 3),
        "iqr_us": round(allocate.iqr_us, 3),
        "samples": allocate.samples,
        "mean_us": round(allocate.mean_us, 3),
        "p99_us": round(allocate.p99_us, 3),
        "free_mean_us": round(result.free.mean_us, 3),
        "correct": True,
        "timer": HostTimer.name,
        "completed": result.completed,
        "failure": result.failure,
        "limit_bytes": result.limit_bytes,
        "peak_live_bytes": result.peak_live_bytes,
        "peak_reserved_bytes": result.peak_reserved_bytes,
        "fragmentation": round(result.fragmentation, 4),
    }


def title(log: str) -> str:
    """The name of a synthetic log, or of a file without folder and suffixes."""
    return Path(log).name.partition(".")[0]


def _key(op: str, case: str) -> Record:
    return {"family": FAMILY, "op": op, "case": case, "dtype": ""}


def _timed(op: str, case: str, impl: str, rounds: Sequence[Sequence[float]], **more: Any) -> Record:
    found = estimate(rounds)
    pooled = sorted(sample for samples in rounds for sample in samples)
    quarter = len(pooled) // 4
    return {
        **_key(op, case),
        "impl": impl,
        "median_us": round(found.median_us, 3),
        "iqr_us": round(pooled[-1 - quarter] - pooled[quarter], 3),
        "samples": len(pooled),
        "range_us": [round(found.low_us, 3), round(found.high_us, 3)],
        "correct": True,
        "timer": HostTimer.name,
        **more,
    }


# Pairs --------------------------------------------------------------------------------------------


def pair_records(pools: Sequence[str], small: bool) -> list[Record]:
    """Time an allocation and its free through each pool's own functions and, for cukit's and CuPy's
    pools on a GPU, through CuPy."""
    count = 200 if small else PAIRS
    impls: dict[tuple[str, str], Callable[[], float]] = {}
    for name, size in PAIR_SIZES.items():
        for pool in pools:
            if impl := _raw_pair(pool, size, count):
                impls[name, pool] = impl
            if impl := _cupy_pair(pool, size, count):
                impls[f"{name} through CuPy", pool] = impl
    samples: dict[tuple[str, str], list[list[float]]] = {key: [] for key in impls}
    for _ in range(ROUNDS):
        for key, impl in impls.items():
            samples[key].append([impl()])
    return [_timed("pair", case, pool, rounds) for (case, pool), rounds in samples.items()]


def _loop(pair: Callable[[], None], count: int) -> Callable[[], float]:
    """Return a function that measures the mean microseconds per pair, after a warm-up."""

    def measure() -> float:
        for _ in range(100):
            pair()
        start = time.perf_counter()
        for _ in range(count):
            pair()
        return (time.perf_counter() - start) / count * 1e6

    return measure


def _raw_pair(pool: str, size: int, count: int) -> Callable[[], float] | None:
    try:
        made = make_pool(pool, 1, None)
    except Exception as reason:
        print(f"    {pool}: skipped, {reason}", flush=True)
        return None
    allocate, free = made.allocate, made.free
    return _loop(lambda: free(allocate(size, 0), 0), count)


def _cupy_pair(pool: str, size: int, count: int) -> Callable[[], float] | None:
    if not gpu_available() or pool not in ("cukit", "cupy", "cupy-async"):
        return None
    import cupy

    allocate = cupy.cuda.alloc
    if pool == "cukit":
        ours = MemoryPool()
        loop = _loop(lambda: allocate(size), count)

        def measure() -> float:
            with ours.use():
                return loop()

        return measure
    theirs = cupy.cuda.MemoryPool() if pool == "cupy" else cupy.cuda.MemoryAsyncPool()
    loop = _loop(lambda: allocate(size), count)

    def measure_theirs() -> float:
        with cupy.cuda.using_allocator(theirs.malloc):
            return loop()

    return measure_theirs


# Only cukit's pool -------------------------------------------------------------------------------


def remap_records(small: bool) -> list[Record]:
    """Time the allocation of one large block by remapping free pages between live ones."""
    total = 32 * MIB if small else GIB
    records = []
    for page in (2 * MIB,) if small else (2 * MIB, 16 * MIB):
        rounds = [[_remap_once(total, page)] for _ in range(2 if small else 5)]
        records.append(
            _timed("remap", f"{total // MIB} MiB in pages of {page // MIB} MiB", OURS, rounds)
        )
    return records


def _remap_once(total: int, page: int) -> float:
    """Return microseconds of the allocation."""
    pool = MemoryPool(MemoryPoolConfig(max_pool_size=2 * total), _provider(page))
    blocks = [pool.allocate(page) for _ in range(2 * total // page)]
    for block in blocks[::2]:
        pool.free(block)
    before = pool.statistics()
    with _synchronised(pool):
        start = time.perf_counter()
        large = pool.allocate(total)
        seconds = time.perf_counter() - start
    after = pool.statistics()
    assert after.pages_remapped - before.pages_remapped == total // page, "pages were not remapped"
    assert after.reserved_bytes == before.reserved_bytes, "the pool has grown"
    for block in (large, *blocks[1::2]):
        pool.free(block)
    pool.close()
    return seconds * 1e6


def defragment_records(small: bool) -> list[Record]:
    """Time the compaction of a pool in which every second buffer is closed."""
    records = []
    for size, count, page in DEFRAGMENTED[:1] if small else DEFRAGMENTED[1:]:
        _defragment_once(size, count, page)  # compiles the copy kernel
        found = [_defragment_once(size, count, page) for _ in range(2 if small else 5)]
        moved = found[0][1]
        rounds = [[microseconds] for microseconds, _, _ in found]
        case = f"{moved // MIB} MiB of {size // 1024} KiB buffers"
        record = _timed("defragment", case, OURS, rounds)
        record["gbps"] = round(2 * moved / record["median_us"] / 1e3, 1)
        copies = sorted(copy for _, _, copy in found)
        if copies[0]:
            record["copy_us"] = round(copies[len(copies) // 2], 3)
            record["copy_gbps"] = round(2 * moved / record["copy_us"] / 1e3, 1)
        records.append(record)
    return records


def _defragment_once(size: int, count: int, page: int | None) -> tuple[float, int, float]:
    """Return microseconds, bytes moved, and GPU microseconds of the copies (0 on the host)."""
    pool = MemoryPool(provider=_provider(page) if page else None)
    buffers = [pool.allocate_buffer(size) for _ in range(count)]
    for buffer in buffers[::2]:
        buffer.close()
    with _timed_copies() as copies:
        report = pool.defragment()
    copied = sum(end() for end in copies)
    for buffer in buffers[1::2]:
        buffer.close()
    pool.close()
    return report.seconds * 1e6, report.bytes_moved, copied


@contextmanager
def _timed_copies() -> Iterator[list[Callable[[], float]]]:
    """Collect the GPU time of each copy kernel launched in the block, in microseconds."""
    found: list[Callable[[], float]] = []
    if not gpu_available():
        yield found
        return
    import cupy

    launch = Kernel.__call__

    def timed_launch(kernel: Kernel, grid: tuple[int, ...], args: Any, **options: Any) -> None:
        if kernel.compiled.spec.entry != "batched_copy":
            launch(kernel, grid, args, **options)
            return
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(options.get("stream"))
        launch(kernel, grid, args, **options)
        end.record(options.get("stream"))
        found.append(lambda: cupy.cuda.get_elapsed_time(begin, end) * 1e3)

    Kernel.__call__ = timed_launch  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Kernel.__call__ = launch  # type: ignore[method-assign]


def _provider(page_bytes: int) -> Provider:
    if gpu_available():
        from cukit.memory.providers.cuda_vmm import CudaVirtualMemory

        return CudaVirtualMemory(page_bytes=page_bytes)
    from cukit.memory.providers.host import HostProvider

    return HostProvider(page_bytes=page_bytes)


@contextmanager
def _synchronised(pool: MemoryPool) -> Iterator[None]:
    """Synchronise before and after the block."""
    pool.provider.synchronize_device()
    yield
    pool.provider.synchronize_device()


# Training -----------------------------------------------------------------------------------------


def training_records() -> list[Record]:
    """Time training steps on cukit's pool and on CuPy's."""
    if not gpu_available():
        return []
    return [
        _timed(
            "training_step",
            found.case,
            found.pool,
            [[sample] for sample in found.step_us],
            host_us=round(statistics.median(found.host_us), 3),
            tokens_per_second=round(found.tokens / statistics.median(found.step_us) * 1e6),
        )
        for found in measure_training()
    ]


# The command line ---------------------------------------------------------------------------------


PARTS = ("replay", "calls", "training")


def measure(pools: Sequence[str], small: bool, parts: Sequence[str]) -> Iterator[list[Record]]:
    """Yield the records of the selected parts in groups."""
    for pool in pools if "replay" in parts else ():
        try:
            yield replay_records(pool, logs(small))
        except PoolMissing as reason:
            print(f"    {pool}: skipped, {reason}", flush=True)
    if "calls" in parts:
        yield pair_records(pools, small)
        yield remap_records(small)
        yield defragment_records(small)
    if "training" in parts:
        yield training_records()


def show(record: Record) -> str:
    """Format a record as one line of the log."""
    line = (
        f"{record['op']:<13}{record['case']:<36}{record['impl']:<18}{record['median_us']:>10.2f} us"
    )
    if "peak_reserved_bytes" in record:
        overhead = record["peak_reserved_bytes"] / max(record["peak_live_bytes"], 1)
        verdict = "" if record["completed"] else f"  FAILED {record['failure'][:70]}"
        line += f"  p99 {record['p99_us']:>9.2f}  held {overhead:.3f} of live{verdict}"
    elif "host_us" in record:
        line += f"  host {record['host_us']:.0f} us  {record['tokens_per_second']:,} tokens/s"
    elif "gbps" in record:
        line += f"  {record['gbps']:.0f} GB/s"
        if "copy_us" in record:
            line += f", copies {record['copy_us']:.0f} us, {record['copy_gbps']:.0f} GB/s"
    return line


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m profiling.memory_pool", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="results file to merge into (default: none)")
    parser.add_argument("--small", action="store_true", help="small logs, few samples")
    parser.add_argument("--only", choices=PARTS, help="run only this part")
    parser.add_argument(
        "--pools", default=",".join(POOLS), help="run only these pools, comma-separated"
    )
    options = parser.parse_args(arguments)
    pools = options.pools.split(",")
    results = None
    if options.out:
        environment = describe(GpuTimer() if gpu_available() else HostTimer())
        results = ResultsFile(options.out, environment)
    found: dict[Any, list[Record]] = {}
    failed = False
    for records in measure(pools, options.small, [options.only] if options.only else PARTS):
        for record in records:
            print(show(record), flush=True)
            found.setdefault(case_key(record), []).append(record)
            failed |= record["impl"] == OURS and not record.get("completed", True)
        if results:
            for case in dict.fromkeys(case_key(record) for record in records):
                results.replace(case, found[case], only_measured=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
