"""Writes the results of profiling.prove_analyzer into docs/profiling.md: part of `make tables`.

The tables are between `<!-- proof:NAME -->` and `<!-- /proof -->`; a test compares them with
profiling/results/analyzer_proof.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from typing import Any

from profiling.run import RESULTS
from profiling.tables import ROOT, markdown

PROOF = RESULTS / "analyzer_proof.json"
DOCUMENT = ROOT / "docs" / "profiling.md"

MARKS = re.compile(r"(<!-- proof:(\w+) -->\n).*?(<!-- /proof -->)", re.DOTALL)


def main() -> int:
    """Update the document."""
    DOCUMENT.write_text(update(DOCUMENT.read_text(), json.loads(PROOF.read_text())))
    return 0


def update(text: str, found: dict[str, Any]) -> str:
    """Return `text` with every table generated from `found`."""
    tables = {"times": times, "counters": counters, "summary": summary}
    return MARKS.sub(lambda match: match[1] + tables[match[2]](found) + match[3], text)


def times(found: dict[str, Any]) -> str:
    """One row per kernel, one column per clock; the last row has the subtracted overheads."""
    overheads = found["zeros"]
    header = ["kernel", "analyzer", "CUPTI", "ncu", "do_bench"]
    rows = [
        [row["kernel"], _us(row["analyzer_us"]), _compared(row, "cupti", 0.0)]
        + [_compared(row, clock, _overhead_us(overheads[clock])) for clock in ("ncu", "do_bench")]
        for row in found["times"]
    ]
    cells = {
        name: f"{overhead['us']:.2f} ± {overhead['uncertainty_us']:.2f} µs" if overhead else ""
        for name, overhead in overheads.items()
    }
    subtracted = ["*subtracted*", cells["events"], "", cells["ncu"], cells["do_bench"]]
    return markdown(header, [*rows, subtracted], left=1)


def counters(found: dict[str, Any]) -> str:
    """Occupancy and DRAM bytes of memory-bound kernels."""
    header = ["kernel", "theoretical occupancy", "achieved", "declared", "DRAM", "difference"]
    rows = [
        [
            f"`{row['kernel']}`",
            f"{row['theoretical_occupancy']:.0%} ({row['limited_by']})",
            f"{row['achieved_occupancy']:.0%}",
            f"{row['declared_bytes'] / 1e9:.3f} GB",
            f"{row['dram_bytes'] / 1e9:.3f} GB",
            _signed(row["difference"]),
        ]
        for row in found["counters"]
    ]
    return markdown(header, rows, left=1)


def summary(found: dict[str, Any]) -> str:
    """The copy, the verdicts, and measurements outside their tolerance."""
    copy, verdicts = found["copy"], found["verdicts"]
    same, slower = Counter(verdicts["same"]), Counter(verdicts["slower"])
    missed = "; ".join(found["missed"]) or "none"
    lines = [
        f"- GPU: {found['gpu']}.",
        f"- Copy of 2 GiB: kernel {copy['kernel']:.0f} GB/s, cudaMemcpy {copy['memcpy']:.0f}.",
        f"- Same code in two processes: {_counted(same)}.",
        f"- 5% more work in the same process: {_counted(slower)}.",
        f"- Outside the tolerance: {missed}.",
    ]
    return "\n".join(lines) + "\n"


def _overhead_us(overhead: dict[str, float] | None) -> float:
    return overhead["us"] if overhead else 0.0


def _compared(row: dict[str, Any], clock: str, overhead_us: float) -> str:
    """The kernel's time by `clock`, less its overhead, and the analyzer's difference from it."""
    if f"{clock}_us" not in row:
        return ""
    return f"{_us(row[f'{clock}_us'] - overhead_us)} ({_signed(row[f'{clock}_difference'])})"


def _signed(share: float) -> str:
    return f"{round(share, 3) + 0.0:+.1%}"  # no negative zero


def _us(value: float) -> str:
    return f"{value:,.2f} µs" if value < 1000 else f"{value:,.0f} µs"


def _counted(verdicts: Counter[str]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))


if __name__ == "__main__":
    sys.exit(main())
