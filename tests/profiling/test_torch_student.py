"""The benchmark of a student's training steps: its report, and a tiny run in two processes."""

from __future__ import annotations

import pytest

from profiling.torch_student import IMPLEMENTATIONS, Round, Run, main, summary, time_rounds


class Timed(Run):
    """A run that returns given rounds instead of starting a process."""

    def __init__(self, name: str, rounds: list[Round | None]) -> None:
        self.name, self.rounds, self.left = name, [], rounds

    def time_round(self) -> Round | None:
        return self.left.pop(0)


def test_every_round_is_printed_with_its_ratio(capsys) -> None:
    slow, fast = (Round(s, 2**30, (2.0, 1.5, 1.25)[:count]) for s, count in ((0.2, 3), (0.1, 2)))
    runs = [Timed("torch", [slow, slow]), Timed("cukit", [fast, fast]), Timed("lost", [fast, None])]
    left = time_rounds(runs, 2)
    assert [run.name for run in left] == ["torch", "cukit"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "round 1: cukit 100.00 ms (median 100.00, 0.500 of torch's best)"
    assert len(lines) == 5
    first, second = summary(left, 1000).splitlines()
    assert "200.00 ms (1.000 of torch's best, 200.00..200.00), 5 k tokens/s" in first
    assert "peak 1.00 GiB, loss 2.0000 -> 1.5000" in first
    assert IMPLEMENTATIONS["cukit"].title in second


@pytest.mark.slow
def test_a_tiny_run() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    arguments = ["--tiny", "--rounds", "1", "--steps", "1", "--only", "torch", "cukit"]
    runs = main(arguments)
    assert [run.name for run in runs] == ["torch", "cukit"]
    plain, swapped = (run.rounds[-1].losses for run in runs)
    assert swapped[:4] == pytest.approx(plain[:4], rel=1e-3)
