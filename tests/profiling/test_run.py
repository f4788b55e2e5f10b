"""The harness: every case runs at tiny sizes; wrong or broken implementations never pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cukit.analyzer.correctness import relative_error
from cukit.analyzer.report.benchmarks import MEMORY_POOLS
from cukit.analyzer.results import OURS, case_key, read
from profiling.case import Case, PeerMissing, Workload
from profiling.data import array_module
from profiling.run import Runner, load_cases, main, run_cases, show
from profiling.tables import PUBLISHED

SMALL = load_cases(small=True)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(peers=False, quick=True)


ONE_OF_EACH_FAMILY = {case.family: case for case in SMALL}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{case.family}-{case.op}-{case.name}-{case.dtype}",
            marks=() if ONE_OF_EACH_FAMILY[case.family] is case else pytest.mark.slow,
        )
        for case in SMALL
    ],
)
def test_every_case_runs_small(case: Case, runner: Runner) -> None:
    failures = len(runner.failures)
    records = runner.run(case)
    assert runner.failures[failures:] == []
    (record,) = [record for record in records if record["impl"] == OURS]
    assert record["correct"]
    assert record["median_us"] > 0


def test_cases_have_unique_names() -> None:
    for cases in (SMALL, load_cases()):
        keys = [case.key() for case in cases]
        assert len(keys) == len(set(keys))


def test_published_results_are_of_cases_that_exist() -> None:
    """Results of the memory pool come from `profiling.memory_pool`, which has no cases."""
    cases = {case.key() for case in load_cases()}
    published = {
        case_key(record)
        for record in read(PUBLISHED)["records"]
        if record["family"] != MEMORY_POOLS
    }
    assert published <= cases


def test_every_case_has_a_floor() -> None:
    for case in load_cases():
        assert case.clock == "host" or case.bytes > 0 or case.flops > 0, case.key()


def case_of(impls: dict[str, Callable[[], Any]], **options: Any) -> Case:
    xp = array_module()
    workload = Workload(impls=impls, expected=lambda: xp.ones(4), tolerance=1e-3)
    return Case("layers", "made_up", "4", "float32", lambda: workload, bytes=32, **options)


def ones() -> Any:
    return array_module().ones(4)


def test_a_run_deletes_only_removed_cases(tmp_path: Path) -> None:
    """A run of one module keeps the cases of the same family from other modules."""
    path, runner = tmp_path / "results.json", Runner(quick=True)
    one, other, gone = (
        replace(case_of({OURS: lambda: ones}), name=name) for name in ("one", "other", "gone")
    )
    assert run_cases([one, other, gone], runner, out=path) == 0
    assert run_cases([one], runner, out=path, known=[one, other]) == 0
    assert [record["case"] for record in read(path)["records"]] == ["one", "other"]


def test_a_wrong_result_is_a_failure_and_is_marked() -> None:
    runner = Runner(quick=True)
    (record,) = runner.run(case_of({OURS: lambda: lambda: 1.01 * ones()}))
    assert not record["correct"]
    assert "WRONG" in show(record)
    assert len(runner.failures) == 1


def test_a_result_that_turns_wrong_later_is_a_failure() -> None:
    calls = iter(range(1000))
    runner = Runner(quick=True)
    (record,) = runner.run(case_of({OURS: lambda: lambda: ones() * (next(calls) < 2)}))
    assert not record["correct"]


def test_a_wrong_peer_is_marked_and_is_no_failure() -> None:
    runner = Runner(quick=True)
    records = runner.run(case_of({OURS: lambda: ones, "peer": lambda: lambda: 0 * ones()}))
    assert {record["impl"]: record["correct"] for record in records} == {OURS: True, "peer": False}
    assert runner.failures == []


def test_a_missing_peer_is_skipped_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> Any:
        raise PeerMissing("peer is not installed")

    def broken() -> Any:
        raise RuntimeError("no kernel image")

    records = Runner(quick=True).run(
        case_of({OURS: lambda: ones, "peer": missing, "other": lambda: broken})
    )
    assert [record["impl"] for record in records] == [OURS]
    output = capsys.readouterr().out
    assert "peer: skipped, peer is not installed" in output
    assert "other: failed, RuntimeError: no kernel image" in output


@pytest.mark.parametrize("when", ["factory", "call", "build"])
def test_an_exception_of_cukit_is_a_failure_and_the_run_continues(when: str) -> None:
    def fail() -> Any:
        raise RuntimeError("out of luck")

    runner = Runner(quick=True)
    if when == "build":
        records = runner.run(Case("layers", "made_up", "4", "float32", fail, bytes=32))
    else:
        factory: Callable[[], Any] = fail if when == "factory" else lambda: fail
        records = runner.run(case_of({OURS: factory}))
    assert records == []
    assert len(runner.failures) == 1


@pytest.mark.parametrize(
    ("outputs", "expected", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 5.0], [3.0, 4.0], 0.2),
        ([np.nan, 4.0], [3.0, 4.0], np.inf),
        ([3.0, 4.0, 0.0], [3.0, 4.0], np.inf),
    ],
)
def test_relative_error(outputs: list[float], expected: list[float], error: float) -> None:
    xp = array_module()
    out, wanted = xp.asarray(outputs), xp.asarray(expected)
    assert relative_error(out, wanted) == pytest.approx(error)
    assert relative_error((wanted, out), (wanted, wanted)) == pytest.approx(error)
    assert relative_error((wanted, None), (wanted, wanted)) == 0
    assert relative_error((wanted,), (wanted, wanted)) == np.inf


def test_an_unknown_op_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "nonsense", "--small"]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_missing_runs_the_cases_without_a_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--family", "host", "--small", "--no-peers", "--missing"]
    assert main(arguments) == 2
    assert "--missing needs --out" in capsys.readouterr().err
    cases = load_cases("host", small=True)
    out = tmp_path / "results.json"
    run_cases(cases[:1], Runner(peers=False, quick=True), out=out)
    assert main([*arguments, "--out", str(out)]) == 0
    assert f"{len(cases) - 1} cases in" in capsys.readouterr().out
    assert main([*arguments, "--out", str(out)]) == 0
    assert "0 cases in" in capsys.readouterr().out


def test_results_of_another_gpu_are_rejected(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.json"
    out.write_text('{"environment": {"gpu": "another"}, "records": []}')
    assert main(["--family", "host", "--small", "--no-peers", "--out", str(out)]) == 2
    assert "another" in capsys.readouterr().err
