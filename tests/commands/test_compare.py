"""`cukit compare`: verdicts, exit codes, and files that cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cukit.analyzer.comparison import compare_results
from cukit.analyzer.statistics import Verdict, estimate
from cukit.cli import run
from cukit.errors import DataError

Capture = pytest.CaptureFixture[str]
CASES = {"rms_norm": 40.0, "flash_attention": 900.0, "rope": 4.0}


def results(seed: int, *, slowdown: dict[str, float] | None = None, **environment: Any) -> Any:
    """Results of three cases, each with three rounds of samples with 0.4% noise."""
    rng = np.random.default_rng(seed)
    records = []
    for op, median in CASES.items():
        truth = median * (slowdown or {}).get(op, 1.0)
        rounds = [list(truth * (1 + 0.004 * rng.standard_normal(30))) for _ in range(3)]
        found = estimate(rounds)
        records.append(
            {
                "family": "layers",
                "op": op,
                "case": "8192x4096",
                "dtype": "bfloat16",
                "impl": "cukit",
                "median_us": found.median_us,
                "iqr_us": 0.01 * found.median_us,
                "samples": 90,
                "range_us": [found.low_us, found.high_us],
                "correct": True,
            }
        )
        records.append(records[-1] | {"impl": "torch", "median_us": 1.0})
    return {"environment": {"gpu": "H200", "driver": "580"} | environment, "records": records}


def write(folder: Path, name: str, content: Any) -> str:
    path = folder / name
    path.write_text(json.dumps(content))
    return str(path)


def test_runs_of_the_same_commit_do_not_regress() -> None:
    for repeat in range(20):
        found = compare_results(results(2 * repeat), results(2 * repeat + 1))
        assert not found.regressed
        assert {case.difference.verdict for case in found.cases} <= {
            Verdict.SAME,
            Verdict.UNCERTAIN,
        }


def test_only_a_slowdown_fails(tmp_path: Path, capsys: Capture) -> None:
    base = write(tmp_path, "base.json", results(1))
    new = write(tmp_path, "new.json", results(2, slowdown={"rope": 1.05, "rms_norm": 0.9}))
    assert run(["compare", base, new, "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    verdicts = {row["case"].split()[0]: row["verdict"] for row in facts["cases"]}
    assert verdicts == {
        "layers/rms_norm": "FASTER",
        "layers/flash_attention": "SAME",
        "layers/rope": "SLOWER",
    }
    assert run(["compare", base, new, "--tolerance", "0.2"]) == 0
    assert "SLOWER" not in capsys.readouterr().out
    assert run(["compare", new, new]) == 0
    assert "3 SAME" in capsys.readouterr().out


def test_a_newly_wrong_result_fails(tmp_path: Path, capsys: Capture) -> None:
    wrong = results(1)
    wrong["records"][0]["correct"] = False
    base = write(tmp_path, "base.json", results(1))
    assert run(["compare", base, write(tmp_path, "new.json", wrong)]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_unmatched_cases_and_different_machines_are_reported(
    tmp_path: Path, capsys: Capture
) -> None:
    new = results(3, driver="999", versions={"cupy": "14"}, clocks={"sm_under_load_mhz": 1500})
    new["records"] = [r | {"op": "new_op"} if r["op"] == "rope" else r for r in new["records"]]
    base = write(tmp_path, "base.json", results(4, clocks={"sm_under_load_mhz": 1700}))
    run(["compare", base, write(tmp_path, "new.json", new)])
    text = capsys.readouterr().out
    assert "only in base: layers/rope" in text
    assert "only in new: layers/new_op" in text
    for note in ("driver: 580 -> 999", "cupy: None -> 14", "1700 -> 1500 MHz"):
        assert note in text


def test_records_without_a_range_are_skipped_and_named() -> None:
    old = results(5)
    del old["records"][2]["range_us"]
    found = compare_results(old, results(7))
    assert len(found.cases) == 2
    assert found.notes[0].startswith("1 records of base have no range_us")
    assert "flash_attention" in found.notes[0]


def test_the_published_results_compare_with_themselves(capsys: Capture) -> None:
    published = str(Path(__file__).parents[2] / "profiling" / "results" / "h200.json")
    assert run(["compare", published, published]) == 0
    assert " SAME" in capsys.readouterr().out.splitlines()[-1]


def test_host_times_have_a_larger_tolerance() -> None:
    def host(ratio: float, timer: str) -> Any:
        found = results(8, slowdown=dict.fromkeys(CASES, ratio))
        return found | {"records": [record | {"timer": timer} for record in found["records"]]}

    for timer, ratio, regressed in (
        ("host enqueue", 1.06, False),
        ("wall", 1.06, False),
        ("host enqueue", 1.2, True),
        ("events", 1.06, True),
    ):
        found = compare_results(host(1.0, timer), host(ratio, timer))
        assert found.regressed is regressed, (timer, ratio)


def test_analyses_are_compared_too() -> None:
    def analysis(median: float) -> Any:
        times = {"median_us": median, "ci_low_us": 0.995 * median, "ci_high_us": 1.005 * median}
        kernels = [{"name": "mine", "cold": times}, {"name": "static", "cold": None}]
        return {"environment": {"gpu": "H200"}, "analyses": kernels}

    (case,) = compare_results(analysis(10.0), analysis(10.6)).cases
    assert case.difference.verdict is Verdict.SLOWER
    rounds = analysis(10.6)
    rounds["analyses"][0]["cold"] |= {"samples_us": [10.6] * 8 + [9.9] * 8, "round_sizes": [8, 8]}
    (case,) = compare_results(analysis(10.0), rounds).cases
    assert case.difference.verdict is Verdict.UNCERTAIN, "the medians of its rounds differ"
    unsure = analysis(10.6)
    unsure["analyses"][0]["cold"] |= {"overhead_us": 2.4, "overhead_uncertainty_us": 0.4}
    (case,) = compare_results(analysis(10.0), unsure).cases
    assert case.difference.verdict is Verdict.UNCERTAIN, "the event overhead is uncertain"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "neither results"),
        ('{"records": []}', "neither results"),
        ('{"environment": {"gpu": "H200"}, "records": []}', "no case"),
        ('{"environment": {"gpu": "A100"}, "records": []}', "different machines"),
        ('{"environment": {"gpu": "H200"}, "records": [{}]}', "damaged"),
        ('{"environment": {"gpu": "H200"}}', "neither results"),
    ],
)
def test_incomparable_files_give_exit_code_2(
    content: str, complaint: str, tmp_path: Path, capsys: Capture
) -> None:
    base = write(tmp_path, "base.json", results(1))
    (tmp_path / "new.json").write_text(content)
    assert run(["compare", base, str(tmp_path / "new.json")]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_another_implementation_can_be_selected() -> None:
    found = compare_results(results(1), results(2), impl="torch")
    assert all(case.base.estimate.median_us == 1.0 for case in found.cases)
    with pytest.raises(DataError, match="'triton'"):
        compare_results(results(1), results(2), impl="triton")
