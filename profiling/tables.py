"""Writes the measured tables into Markdown: `python -m profiling.tables` (`make tables`).

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`; NAME is a family (all of its
cases), "summary" (one row an op: its largest case), "picture" (the same as profiling.figures draws
it), or "environment" (one sentence on the machine).
Nothing between those marks is typed by hand, and a test holds the files to the results.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from profiling.records import CaseKey, Record, case_key, read
from profiling.run import OURS, RESULTS

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = RESULTS / "h200.json"
DOCUMENTS = ("README.md", "docs/benchmarks.md")

MARKS = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)

NOT_MEASURED = "*Not measured yet.*\n"

TITLES = {"torch-eager": "torch", "torch-compile": "torch.compile", "liger": "Liger"}

Group = dict[str, Record]
"""The records of one case, by implementation."""


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
        "summary": _summary,
        "environment": _environment,
        "picture": _picture,
    }
    if not results["records"]:
        return NOT_MEASURED
    return special[name](results) if name in special else _family(name, results)


def _family(name: str, results: dict[str, Any]) -> str:
    """Every case of a family, every implementation a column."""
    groups = [group for group in _groups(results["records"]) if _any(group)["family"] == name]
    if not groups:
        return NOT_MEASURED
    impls = list(dict.fromkeys(impl for group in groups for impl in group))
    impls.sort(key=lambda impl: impl != OURS)
    with_memory = any("peak_bytes" in record for group in groups for record in group.values())
    header = ["op", "case", "dtype", *(TITLES.get(impl, impl) for impl in impls)]
    header += ["x fastest peer", "of the floor"]
    rows = []
    for group in groups:
        record = _any(group)
        cells = [_cell(group.get(impl), with_memory=with_memory) for impl in impls]
        names = [f"`{record['op']}`", record["case"], record["dtype"]]
        rows.append([*names, *cells, _speed(group), _of_floor(group)])
    return _markdown(header, rows, left=3)


def _summary(results: dict[str, Any]) -> str:
    """One row an op: the case with the most work."""
    largest: dict[tuple[str, str], Group] = {}
    for group in _groups(results["records"]):
        record = _any(group)
        key = (record["family"], record["op"])
        if record["floor_us"] is None or OURS not in group:
            continue
        if key not in largest or record["floor_us"] > _any(largest[key])["floor_us"]:
            largest[key] = group
    header = ["op", "case", "cukit", "fastest peer", "x fastest peer", "of the floor"]
    rows = []
    for group in largest.values():
        ours, peer = group[OURS], _fastest_peer(group)
        names = [f"`{ours['op']}`", f"{ours['case']} {ours['dtype']}"]
        other = f"{_us(peer['median_us'])} {TITLES.get(peer['impl'], peer['impl'])}" if peer else ""
        rows.append([*names, _us(ours["median_us"]), other, _speed(group), _of_floor(group)])
    return _markdown(header, rows, left=2)


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


def _groups(records: list[Record]) -> list[Group]:
    """Records of one case together, in the order of the file."""
    groups: dict[CaseKey, Group] = {}
    for record in records:
        groups.setdefault(case_key(record), {})[record["impl"]] = record
    return list(groups.values())


def _any(group: Group) -> Record:
    return next(iter(group.values()))


def _fastest_peer(group: Group) -> Record | None:
    """The quickest correct implementation that is not ours."""
    peers = [r for impl, r in group.items() if not impl.startswith(OURS) and r["correct"]]
    return min(peers, key=lambda record: float(record["median_us"]), default=None)


def _speed(group: Group) -> str:
    """Our speed over that of the fastest peer: above 1 we are faster."""
    ours, peer = group.get(OURS), _fastest_peer(group)
    if ours is None or peer is None or not ours["correct"]:
        return ""
    return f"{peer['median_us'] / ours['median_us']:.2f}"


def _of_floor(group: Group) -> str:
    """Share of the best conceivable speed that ours reaches."""
    ours = group.get(OURS)
    if ours is None or not ours["floor_us"]:
        return ""
    return f"{100 * ours['floor_us'] / ours['median_us']:.0f}%"


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


def _markdown(header: list[str], rows: list[list[str]], *, left: int) -> str:
    rule = ["---" if column < left else "--:" for column in range(len(header))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, rule, *rows))


if __name__ == "__main__":
    sys.exit(main())
