"""Measurements of memory pools, and their tables and figures in the docs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cukit.analyzer.report import generate_report
from cukit.analyzer.results import read
from profiling.memory_pool import FAMILY, RECORDED, main, title
from profiling.pool_figures import BARS, MAP, draw_bars, draw_map
from profiling.pool_tables import DOCUMENTS, NOT_MEASURED, update
from profiling.tables import PUBLISHED, ROOT

GIB = 1 << 30

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "cuda": "13.0",
    "versions": {"cupy-cuda13x": "14.2", "torch": "2.11"},
    "commit": "abc1234",
    "date": "2026-01-02",
}


def record(op: str, impl: str, held_gib: float = 0.0, **more: Any) -> dict[str, Any]:
    base = {"family": FAMILY, "op": op, "case": "serving", "dtype": "", "impl": impl}
    base |= {"median_us": 2.5, "iqr_us": 0.1, "samples": 10, "correct": True}
    if held_gib:
        base |= {"mean_us": 7.25, "p99_us": 250.4, "free_mean_us": 1.0, "completed": True}
        base |= {"peak_live_bytes": 2 * GIB, "peak_reserved_bytes": int(held_gib * GIB)}
    return base | more


RESULTS = {
    "environment": ENVIRONMENT,
    "records": [
        record("replay", "cupy", 3.0),
        record("replay", "cukit", 2.02),
        record("replay_tight", "cupy", 2.1, completed=False),
        record("replay_tight", "cukit", 2.02),
        record("pair", "cukit", case="1 MiB"),
        record("pair", "cupy", case="1 MiB", median_us=0.61),
        record("remap", "cukit", case="1024 MiB in pages of 2 MiB", median_us=25_000.0),
        record("defragment", "cukit", case="2 GiB", median_us=4_000.0, gbps=1073.0),
        record("training_step", "cupy", case="teacher", median_us=20e3, tokens_per_second=1.6e6),
        record("training_step", "cukit", case="teacher", median_us=21e3, tokens_per_second=1.5e6),
    ],
}


def rendered(name: str, document: str = "docs/memory.md") -> str:
    text = f"<!-- pools:{name} -->\nold\n<!-- /pools -->"
    return update(text, RESULTS, document).split("\n", 1)[1]


def test_memory_held_and_failures() -> None:
    assert rendered("replay").splitlines()[:3] == [
        "| log | peak live | cukit | CuPy |",
        "| --- | --: | --: | --: |",
        "| `serving` | 2.0 GiB | 1.01, 1.01 | 1.50, **fails** |",
    ]


def test_tables_of_times() -> None:
    assert "| `serving` | 7.2 / 250 / 1.0 | 7.2 / 250 / 1.0 |" in rendered("latency")
    calls = rendered("calls")
    assert "| allocate and free 1 MiB | 2.50 µs | 0.61 µs |" in calls
    assert "| remap 1024 MiB in pages of 2 MiB | 25.00 ms |  |" in calls
    assert "| defragment 2 GiB | 4.00 ms (1.07 TB/s) |  |" in calls
    steps = "| teacher | 21.00 ± 0.00 ms, 1.50 M tokens/s | 20.00 ± 0.00 ms, 1.60 M tokens/s |"
    assert steps in rendered("training")


def test_the_verdict_counts_completed_logs() -> None:
    verdict = rendered("verdict")
    assert "Of 1 allocation logs, " in verdict
    assert ": cukit 1; CuPy 0.\n" in verdict


def test_the_cost_is_relative_to_cupy() -> None:
    cost = rendered("cost")
    assert "take 4.1 to 4.1 times as long as in CuPy's compiled pool." in cost
    assert "Time of a remap: 1024 MiB in pages of 2 MiB 25.0 ms.\n" in cost


def test_machine_and_figure() -> None:
    assert rendered("machine").startswith(
        "NVIDIA H200, driver 580.1, cupy-cuda13x 14.2, torch 2.11, 2026-01-02.\n"
    )
    assert "(memory_pools.svg)" in rendered("picture")
    assert "(docs/memory_pools.svg)" in rendered("picture", "README.md")


def test_no_results_give_no_tables_or_figure() -> None:
    text = "<!-- pools:replay -->\nold\n<!-- /pools -->"
    nothing = {"environment": {}, "records": []}
    assert NOT_MEASURED in update(text, nothing, "README.md")
    assert draw_bars(nothing) is None


def test_the_bars_name_failures() -> None:
    drawn = draw_bars(RESULTS)
    assert drawn is not None
    ElementTree.fromstring(drawn)
    assert "+50%, fails within 5%" in drawn
    assert "+1%" in drawn
    assert "prefers-color-scheme: dark" in drawn


def test_a_report_takes_the_records(tmp_path: Path) -> None:
    """Records of pools are not kernel cases, so summaries of kernels do not count them."""
    path = tmp_path / "report.html"
    made = generate_report([RESULTS], [path])
    page = path.read_text(encoding="utf-8")
    assert "these complete: cukit 1, CuPy 0." in page
    assert "+50%, fails within 5%" in page
    assert "0 cases, none with both cukit and a peer." in str(made.sections)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_contain_the_measured_values(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert update(text, read(PUBLISHED), name) == text, "run `make tables`"


def test_the_figures_show_the_measured_values() -> None:
    drawn = BARS.read_text(encoding="utf-8") if BARS.exists() else None
    assert drawn == draw_bars(read(PUBLISHED)), "run `make tables`"
    assert MAP.read_text(encoding="utf-8") == draw_map(), "run `make tables`"


def test_recorded_logs_are_small() -> None:
    for path in RECORDED:
        assert path.stat().st_size < 300_000
    assert title(str(RECORDED[0])) == "distill"
    assert title("random-10000-64") == "random-10000-64"


def test_measuring_works_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.json"
    assert main(["--small", "--pools", "cukit", "--out", str(out)]) == 0
    records = read(out)["records"]
    assert {r["op"] for r in records} == {"replay", "replay_tight", "pair", "remap", "defragment"}
    assert all(r["family"] == FAMILY and r["impl"] == "cukit" for r in records)
    assert all(r["completed"] for r in records if "completed" in r)
    assert "remap" in capsys.readouterr().out
    again = main(["--small", "--pools", "cukit", "--only", "calls", "--out", str(out)])
    assert again == 0
    assert len(read(out)["records"]) == len(records), "a case is replaced"
