"""Results rendered as Markdown."""

from __future__ import annotations

from typing import Any

from profiling.tables import NOT_MEASURED, render, update

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "cuda": "13.0",
    "versions": {"cupy-cuda13x": "14.2", "torch": "2.11"},
    "clocks": {"sm_under_load_mhz": 1500.0, "sm_max_mhz": 1980.0},
    "ceilings": {"copy_gbps": 4200.0, "bf16_gemm_tflops": 740.0},
    "commit": "abc1234",
    "date": "2026-01-02",
}


def record(impl: str, median_us: float, **more: Any) -> dict[str, Any]:
    base = {
        "family": "layers",
        "op": "rms_norm",
        "case": "8192x4096",
        "dtype": "bfloat16",
        "impl": impl,
        "median_us": median_us,
        "iqr_us": 0.1,
        "tflops": None,
        "gbps": 3300.0,
        "floor_us": 32.0,
        "correct": True,
    }
    return base | more


def results(*records: dict[str, Any]) -> dict[str, Any]:
    return {"environment": ENVIRONMENT, "records": list(records)}


def test_a_family_has_one_row_per_case_and_one_column_per_implementation() -> None:
    table = render("layers", results(record("torch-compile", 44.0), record("cukit", 40.0)))
    header, rule, row = table.splitlines()
    assert header == ("| op | case | dtype | cukit | torch.compile | speedup | of the floor |")
    assert rule == "| --- | --- | --- | --: | --: | --: | --: |"
    assert row == "| `rms_norm` | 8192x4096 | bfloat16 | 40.0 µs | 44.0 µs | 1.10x | 80% |"


def test_a_wrong_peer_is_not_compared() -> None:
    table = render("layers", results(record("cukit", 40.0), record("liger", 1.0, correct=False)))
    assert "| wrong |  | 80% |" in table


def test_variants_of_cukit_are_not_peers() -> None:
    table = render("layers", results(record("cukit", 40.0), record("cukit, new output", 50.0)))
    assert table.splitlines()[-1].endswith("| 40.0 µs | 50.0 µs |  | 80% |")


def test_a_wrong_result_has_no_speedup() -> None:
    table = render("layers", results(record("cukit", 40.0, correct=False), record("liger", 50.0)))
    assert "| wrong | 50.0 µs |  |" in table


def test_rates_and_memory() -> None:
    table = render("layers", results(record("cukit", 12_345.0, tflops=512.3, peak_bytes=2**29)))
    assert "12.3 ms (512 TF), 0.50 GiB" in table


def test_the_summary_takes_the_largest_case_of_an_op() -> None:
    table = render(
        "summary",
        results(
            record("cukit", 40.0),
            record("cukit", 160.0, case="16384x8192", floor_us=128.0),
            record("liger", 200.0, case="16384x8192", floor_us=128.0),
        ),
    )
    assert len(table.splitlines()) == 3
    assert "| `rms_norm` | 16384x8192 bfloat16 | 160.0 µs | 200.0 µs Liger | 1.25x | 80% |" in table


def test_the_highlights_cover_all_cases_of_an_op() -> None:
    cases = {"a": (10.0, 20.0), "b": (10.0, 5.0), "c": (10.0, 20.0)}
    table = render(
        "highlights",
        results(
            *(
                record(impl, us, op="linear", case=case)
                for case, both in cases.items()
                for impl, us in zip(("cukit", "liger"), both, strict=True)
            ),
            record("cukit", 1.0, op="gated_linear"),
        ),
    )
    assert table.splitlines()[2:] == [
        "| linear layer | `linear` | **2.00x** | 0.50x to 2.00x | 3 | Liger |"
    ]


def test_a_page_has_the_largest_case_and_the_speedup_over_all_cases() -> None:
    found = results(
        record("cukit", 40.0),
        record("liger", 60.0),
        record("cukit", 160.0, case="16384x8192", floor_us=128.0),
        record("liger", 200.0, case="16384x8192", floor_us=128.0),
        record("cukit", 5.0, family="host", case="host enqueue"),
        record("liger", 1.0, family="host", case="host enqueue"),
        record("cukit", 50.0, op="layer_norm"),
    )
    figure, _, _, _, first, second = render("page layers", found).splitlines()
    assert figure.endswith("(benchmarks_layers.svg)")
    assert first == (
        "| `rms_norm` | 16384x8192 bfloat16 | 160.0 µs | 200.0 µs Liger | 80% "
        "| 1.38x (1.25x to 1.50x, 2 cases) |"
    )
    assert second == "| `layer_norm` | 8192x4096 bfloat16 | 50.0 µs |  | 64% |  |"
    text = "<!-- table:page layers -->\n<!-- /table -->\n"
    assert figure in update(text, found)
    assert render("page moe", found) == NOT_MEASURED


def test_the_verdict_counts_cases() -> None:
    times = {"a": 50.0, "b": 41.0, "c": 20.0}
    pairs = [(impl, case) for case in times for impl in ("cukit", "liger")]
    found = [record(i, 40.0 if i == "cukit" else times[c], case=c) for i, c in pairs]
    sentence = render("verdict", results(*found, record("cukit", 1.0, case="d")))
    assert "faster than the fastest peer in 1 of 3 cases, within 3% of it in 1" in sentence
    assert "slower in 1. The median speedup is 1.02x, the geometric mean 0.86x." in sentence


def test_the_environment_is_named() -> None:
    line = render("environment", results(record("cukit", 1.0)))
    for fact in ("NVIDIA H200", "580.1", "13.0", "cupy-cuda13x 14.2", "4.20 TB/s", "740 TFLOP/s"):
        assert fact in line
    assert "1500 of 1980 MHz" in line
    assert "abc1234, 2026-01-02" in line


def test_missing_measurements_are_stated() -> None:
    assert render("layers", {"environment": {}, "records": []}) == NOT_MEASURED
    assert render("attention", results(record("cukit", 1.0))) == NOT_MEASURED


def test_only_text_between_the_markers_changes() -> None:
    text = "before\n<!-- table:layers -->\nold\n<!-- /table -->\nafter\n"
    new = update(text, results(record("cukit", 40.0)))
    assert new.startswith("before\n<!-- table:layers -->\n| op |")
    assert new.endswith("|\n<!-- /table -->\nafter\n")
    assert update(new, results(record("cukit", 40.0))) == new
