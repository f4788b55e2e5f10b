"""Writes the measured tables into Markdown: `python -m profiling.tables` (`make tables`).

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`; NAME is a family (all of its
cases), "highlights" (chosen ops over all of their cases), "summary" (one row an op: its largest
case), "picture" (the same as profiling.figures draws it), or "environment" (one sentence on the
machine).
Nothing between those marks is typed by hand, and a test holds the files to the results.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cukit.analyzer.report.benchmarks import (
    BenchmarkResults,
    Case,
    Record,
    impl_title,
    largest_cases,
)
from cukit.analyzer.results import read
from profiling.run import RESULTS

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = RESULTS / "h200.json"
DOCUMENTS = ("README.md", "docs/benchmarks.md")

MARKS = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)

NOT_MEASURED = "*Not measured yet.*\n"

HIGHLIGHTS = (
    "flash_attention", "flash_attention_backward", "linear", "gated_linear", "quantized_linear",
    "matmul_int8", "moe_ffn", "kl_divergence", "distillation_loss", "linear_kl_divergence",
    "attention_kl", "paged_attention", "cascade_attention", "sample", "retrieve_top_k",
    "layer_bank", "graph_diffusion",
)  # fmt: skip
"""The ops that most users come for."""


def main() -> int:
    """Bring every document up to date; say which changed."""
    results = read(PUBLISHED)
    for name in DOCUMENTS:
        path = ROOT / name
        old = path.read_text()
        new = update(old, results)
        if new != old:
            path.write_text(new)
            print(f"wrote {name}")
    return 0


def update(text: str, results: dict[str, Any]) -> str:
    """`text` with every table replaced by what `results` say."""
    return MARKS.sub(lambda match: match[1] + render(match[2], results) + match[3], text)


def render(name: str, results: dict[str, Any]) -> str:
    """The table called `name`, as Markdown that ends with a line break."""
    special: dict[str, Callable[[dict[str, Any]], str]] = {
        "highlights": _highlights,
        "summary": _summary,
        "environment": _environment,
        "picture": _picture,
    }
    if not results["records"]:
        return NOT_MEASURED
    return special[name](results) if name in special else _family(name, results)


def _family(name: str, results: dict[str, Any]) -> str:
    """Every case of a family, every implementation a column."""
    measured = _measured(results)
    cases = measured.of_family(name)
    if not cases:
        return NOT_MEASURED
    impls = measured.impls_of(name)
    with_memory = any("peak_bytes" in record for case in cases for record in case.records)
    header = ["op", "case", "dtype", *map(impl_title, impls), "x fastest peer", "of the floor"]
    rows = []
    for case in cases:
        by_impl = {record["impl"]: record for record in case.records}
        cells = [_cell(by_impl.get(impl), with_memory=with_memory) for impl in impls]
        names = [f"`{case.op}`", case.name, case.dtype]
        rows.append([*names, *cells, _speed(case), _of_floor(case)])
    return markdown(header, rows, left=3)


def _highlights(results: dict[str, Any]) -> str:
    """Speed over that of the fastest peer: geometric mean, lowest and highest of an op's cases."""
    header = ["op", "cases", "mean", "lowest", "highest", "fastest peer in most"]
    rows = []
    for op in HIGHLIGHTS:
        compared = [
            (case.speed, impl_title(case.fastest_peer["impl"]))
            for case in _measured(results).cases
            if case.op == op and case.speed is not None and case.fastest_peer is not None
        ]
        if not compared:
            continue
        speeds = [speed for speed, _ in compared]
        figures = statistics.geometric_mean(speeds), min(speeds), max(speeds)
        peer = statistics.mode(title for _, title in compared)
        rows.append([f"`{op}`", str(len(speeds)), *(f"{value:.2f}" for value in figures), peer])
    return markdown(header, rows, left=1)


def _summary(results: dict[str, Any]) -> str:
    """One row an op: the case with the most work."""
    header = ["op", "case", "cukit", "fastest peer", "x fastest peer", "of the floor"]
    rows = []
    for case in largest_cases(_measured(results).cases):
        ours, peer = case.ours, case.fastest_peer
        names = [f"`{case.op}`", f"{case.name} {case.dtype}"]
        other = f"{_us(peer['median_us'])} {impl_title(peer['impl'])}" if peer else ""
        mine = _us(ours["median_us"]) if ours else ""
        rows.append([*names, mine, other, _speed(case), _of_floor(case)])
    return markdown(header, rows, left=2)


def _measured(results: dict[str, Any]) -> BenchmarkResults:
    return BenchmarkResults(results["environment"], tuple(results["records"]))


def _picture(results: dict[str, Any]) -> str:
    return "![Speed of each op beside the fastest peer and the floor](docs/benchmarks.svg)\n"


def _environment(results: dict[str, Any]) -> str:
    found = results["environment"]
    versions = found["versions"]
    names = ("cupy-cuda12x", "cupy-cuda13x", "torch", "triton", "liger-kernel")
    software = [f"{name} {versions[name]}" for name in names if name in versions]
    ceilings, clocks = found["ceilings"], found["clocks"]
    parts = [
        f"{found['gpu']}, driver {found['driver']}, CUDA {found['cuda']}, {', '.join(software)}",
        f"ceilings in the same run: copy {ceilings['copy_gbps'] / 1e3:.2f} TB/s, "
        f"bf16 matrix product {ceilings['bf16_gemm_tflops']:.0f} TFLOP/s",
    ]
    if clocks.get("sm_under_load_mhz"):
        limit = clocks["sm_max_mhz"]
        parts.append(f"SM clock under load {clocks['sm_under_load_mhz']:.0f} of {limit:.0f} MHz")
    parts.append(f"commit {found['commit']}, {found['date']}")
    return "; ".join(parts) + ".\n"


def _speed(case: Case) -> str:
    """Our speed over that of the fastest peer: above 1 we are faster."""
    return "" if case.speed is None else f"{case.speed:.2f}"


def _of_floor(case: Case) -> str:
    """Share of the best conceivable speed that ours reaches."""
    share = case.share_of_floor(case.ours) if case.ours else None
    return "" if share is None else f"{100 * share:.0f}%"


def _cell(record: Record | None, *, with_memory: bool) -> str:
    if record is None:
        return ""
    if not record["correct"]:
        return "wrong"
    text = _us(record["median_us"])
    if record["tflops"]:
        text += f" ({record['tflops']:.0f} TF)"
    if with_memory and record.get("peak_bytes") is not None:
        text += f", {record['peak_bytes'] / 2**30:.2f} GiB"
    return text


def _us(microseconds: float) -> str:
    """Three or four digits, in the unit that needs no more."""
    if microseconds >= 10_000:
        return f"{microseconds / 1e3:.1f} ms"
    return f"{microseconds:.0f} µs" if microseconds >= 1000 else f"{microseconds:.1f} µs"


def markdown(header: list[str], rows: list[list[str]], *, left: int) -> str:
    """A table whose first `left` columns are aligned to the left, the others to the right."""
    rule = ["---" if column < left else "--:" for column in range(len(header))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, rule, *rows))


if __name__ == "__main__":
    sys.exit(main())
