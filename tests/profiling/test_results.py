"""The results file: locking, merging, replacing, and atomic writes."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cukit.analyzer.results import ResultsError, ResultsFile, case_key, read, write

GPU = "NVIDIA H200"


def environment(commit: str, gpu: str = GPU) -> dict[str, Any]:
    return {"gpu": gpu, "commit": commit, "date": "2026-01-02"}


def record(family: str, op: str, median_us: float, **more: Any) -> dict[str, Any]:
    key = {"family": family, "op": op, "case": "8x8", "dtype": "float32"}
    return key | {"impl": "cukit", "median_us": median_us} | more


def put(results: ResultsFile, *records: dict[str, Any]) -> None:
    for each in records:
        results.replace(case_key(each), [each])


def test_a_second_process_is_refused_while_a_run_writes(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    code = (
        "import pathlib, sys; from cukit.analyzer.results import ResultsFile;"
        "ResultsFile(pathlib.Path(sys.argv[1]), {'gpu': 'x'})"
    )
    ours = ResultsFile(path, environment("aaa"))
    theirs = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    assert f"{path}: another run is writing there" in theirs.stderr
    put(ours, record("layers", "gelu", 2.0))
    del ours
    gc.collect()
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]
    put(ResultsFile(path, environment("bbb")), record("layers", "rope", 1.0))
    assert len(read(path)["records"]) == 2


def test_a_run_replaces_what_it_measured_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    first = ResultsFile(path, environment("aaa"))
    put(first, record("layers", "rope", 1.0), record("layers", "gelu", 2.0))
    put(first, record("attention", "flash_attention", 3.0))

    second = ResultsFile(path, environment("bbb"))
    put(second, record("layers", "rope", 0.5))

    results = read(path)
    assert results["environment"]["commit"] == "bbb"
    old = {"commit": "aaa", "date": "2026-01-02"}
    assert results["records"] == [
        record("layers", "rope", 0.5),
        record("layers", "gelu", 2.0, **old),
        record("attention", "flash_attention", 3.0, **old),
    ]


def test_a_record_keeps_its_own_commit_over_many_runs(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    put(ResultsFile(path, environment("aaa")), record("layers", "gelu", 2.0))
    for commit in ("bbb", "ccc"):
        put(ResultsFile(path, environment(commit)), record("layers", "rope", 1.0))
    assert [r.get("commit") for r in read(path)["records"]] == ["aaa", None]


def test_a_case_that_failed_keeps_no_old_figures(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    rope = record("layers", "rope", 1.0)
    put(ResultsFile(path, environment("aaa")), rope, rope | {"impl": "liger"})
    ResultsFile(path, environment("bbb")).replace(case_key(rope), [])
    assert read(path)["records"] == []


def test_implementations_measured_separately_keep_each_other(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    ours = record("memory_pool", "replay", 1.0)
    peer = ours | {"impl": "rmm"}
    put(ResultsFile(path, environment("aaa")), ours, peer)
    again = ours | {"median_us": 2.0}
    ResultsFile(path, environment("bbb")).replace(case_key(ours), [again], only_measured=True)
    first, second = read(path)["records"]
    assert first == again
    assert (second["impl"], second["commit"]) == ("rmm", "aaa")


def test_removed_cases_are_deleted(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    results = ResultsFile(path, environment("aaa"))
    rope, gelu, host = (
        record(*names, 1.0) for names in (("layers", "rope"), ("layers", "gelu"), ("host", "rope"))
    )
    put(results, rope, gelu, host)
    results.keep_only("layers", [case_key(gelu)])
    assert read(path)["records"] == [gelu, host]


def test_results_of_two_gpus_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    put(ResultsFile(path, environment("aaa")), record("layers", "rope", 1.0))
    with pytest.raises(ResultsError, match="NVIDIA A100"):
        ResultsFile(path, environment("aaa", "NVIDIA A100"))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"records": []}'])
def test_errors_name_the_damaged_file(content: str, tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    path.write_text(content)
    with pytest.raises(ResultsError, match=r"h200\.json"):
        read(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    write(path, {"environment": {}, "records": []})
    before = path.read_text()
    with pytest.raises(TypeError):
        write(path, {"environment": {}, "records": [object()]})
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["h200.json"]
    assert json.loads(before) == {"environment": {}, "records": []}
