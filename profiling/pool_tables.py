"""Writes the tables on memory pools into Markdown: part of `make tables`.

The text between `<!-- pools:NAME -->` and `<!-- /pools -->` is generated from the records of
profiling.memory_pool; a test compares the documents with the records. NAME is one of

- "verdict": one sentence with the number of logs that each pool completes at a tight limit;
- "cost": one sentence on the time of an allocation and of a remap;
- "replay": memory held by each pool on each log, relative to the peak of live bytes;
- "latency": time of an allocation and of a free;
- "calls": times of an allocation and its free, of remaps and of defragmentations;
- "training": times of a step of `cukit distill`;
- "machine": the GPU, the versions and the date;
- "picture": a link to the figure of memory held.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cukit.analyzer.report import numbers
from cukit.analyzer.report.memory_pools import (
    by_case,
    overhead,
    pool_title,
    pools_in,
    replayed_on,
)
from cukit.analyzer.results import OURS, Record, read
from profiling.memory_pool import FAMILY
from profiling.tables import NOT_MEASURED, PUBLISHED, ROOT, markdown

DOCUMENTS = ("README.md", "docs/memory.md")

MARKS = re.compile(r"(<!-- pools:(\w+) -->\n).*?(<!-- /pools -->)", re.DOTALL)


def main() -> int:
    """Update the documents; print the names of those that changed."""
    results = read(PUBLISHED)
    for name in DOCUMENTS:
        path = ROOT / name
        old = path.read_text(encoding="utf-8")
        new = update(old, results, name)
        if new != old:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {name}")
    return 0


def update(text: str, results: Mapping[str, Any], document: str) -> str:
    """Return `text` with every table generated from `results`."""
    records = [record for record in results["records"] if record["family"] == FAMILY]

    def table(name: str) -> str:
        if not records:
            return NOT_MEASURED
        if name == "machine":
            return _machine(results["environment"], records)
        if name == "picture":
            folder = "" if document.startswith("docs/") else "docs/"
            return (
                f"![Memory held by each pool beyond live allocations]({folder}memory_pools.svg)\n"
            )
        return TABLES[name](records)

    return MARKS.sub(lambda match: match[1] + table(match[2]) + match[3], text)


def _verdict(records: Sequence[Record]) -> str:
    """How many logs each pool completes at a tight limit."""
    tight = by_case(records, "replay_tight").values()
    parts = [
        f"{pool_title(pool)} {sum(found[pool]['completed'] for found in tight if pool in found)}"
        for pool in replayed_on(records)
    ]
    return (
        f"Of {len(tight)} allocation logs, replayed with a limit 5% above peak live memory, these "
        f"complete: {'; '.join(parts)}.\n"
    )


def _cost(records: Sequence[Record]) -> str:
    """Time of an allocation and its free relative to CuPy's pool, and time of a remap."""
    ratios = [
        found[OURS]["median_us"] / found["cupy"]["median_us"]
        for found in by_case(records, "pair").values()
        if "cupy" in found
    ]
    remaps = [
        f"{case} {found[OURS]['median_us'] / 1e3:.1f} ms"
        for case, found in by_case(records, "remap").items()
    ]
    return (
        f"An allocation served from a free list and its free take {min(ratios):.1f} to "
        f"{max(ratios):.1f} times as long as in CuPy's compiled pool. Time of a remap: "
        f"{'; '.join(remaps)}.\n"
    )


def _replay(records: Sequence[Record]) -> str:
    """Peak of bytes held over peak of live bytes, without a limit and at a tight one."""
    tight = by_case(records, "replay_tight")
    pools = replayed_on(records)
    rows = []
    for case, free in by_case(records, "replay").items():
        live = next(iter(free.values()))["peak_live_bytes"] / 2**30
        cells = [_held(free.get(pool), tight.get(case, {}).get(pool)) for pool in pools]
        rows.append([f"`{case}`", f"{live:.1f} GiB", *cells])
    return markdown(["log", "peak live", *map(pool_title, pools)], rows, left=1)


def _held(free: Record | None, tight: Record | None) -> str:
    if free is None:
        return ""
    text = f"{overhead(free):.2f}" if free["completed"] else "fails"
    if tight is None:
        return text
    return f"{text}, **fails**" if not tight["completed"] else f"{text}, {overhead(tight):.2f}"


def _latency(records: Sequence[Record]) -> str:
    """Mean and 99th percentile of an allocation, without a limit; the mean of a free."""
    pools = replayed_on(records)
    rows = []
    for case, free in by_case(records, "replay").items():
        cells = [_times(free.get(pool)) for pool in pools]
        rows.append([f"`{case}`", *cells])
    return markdown(["log", *map(pool_title, pools)], rows, left=1)


def _times(record: Record | None) -> str:
    if record is None:
        return ""
    return f"{_us(record['mean_us'])} / {_us(record['p99_us'])} / {_us(record['free_mean_us'])}"


def _calls(records: Sequence[Record]) -> str:
    """Times of single calls."""
    pools = pools_in([record for record in records if record["op"] == "pair"])
    rows = []
    for case, found in by_case(records, "pair").items():
        times = [f"{found[pool]['median_us']:.2f} µs" if pool in found else "" for pool in pools]
        rows.append([f"allocate and free {case}", *times])
    for op in ("remap", "defragment"):
        for case, found in by_case(records, op).items():
            record = found[OURS]
            text = f"{record['median_us'] / 1e3:.2f} ms"
            if record.get("gbps"):
                text += f" ({numbers.gbps(record['gbps'])})"
            if record.get("copy_us"):
                copied = numbers.gbps(record["copy_gbps"])
                text += f", copies alone {record['copy_us'] / 1e3:.2f} ms ({copied})"
            rows.append([f"{op} {case}", text, *[""] * (len(pools) - 1)])
    return markdown(["call", *map(pool_title, pools)], rows, left=1)


def _training(records: Sequence[Record]) -> str:
    """A step of `cukit distill`: its time, and tokens per second."""
    pools = pools_in([record for record in records if record["op"] == "training_step"])
    rows = []
    for case, found in by_case(records, "training_step").items():
        cells = [
            f"{found[pool]['median_us'] / 1e3:.2f} ± {found[pool]['iqr_us'] / 2e3:.2f} ms, "
            f"{numbers.count(found[pool]['tokens_per_second'])} tokens/s"
            for pool in pools
        ]
        rows.append([case, *cells])
    return markdown(["a step of `cukit distill`", *map(pool_title, pools)], rows, left=1)


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _machine(environment: Mapping[str, Any], records: Sequence[Record]) -> str:
    dates = sorted({str(record.get("date", environment.get("date"))) for record in records})
    versions = environment["versions"]
    known = [f"{name} {versions[name]}" for name in ("cupy-cuda13x", "torch") if name in versions]
    return (
        f"{environment['gpu']}, driver {environment['driver']}, {', '.join(known)}, {dates[-1]}.\n"
    )


TABLES: dict[str, Callable[[Sequence[Record]], str]] = {
    "verdict": _verdict,
    "cost": _cost,
    "replay": _replay,
    "latency": _latency,
    "calls": _calls,
    "training": _training,
}


if __name__ == "__main__":
    sys.exit(main())
