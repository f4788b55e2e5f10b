"""Every planted bug is reported with cause and place; clean twins and legal programs are not."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from tests.emulator.planted_suite import FOLDER, Planted, read, suite
from tests.emulator.planted_table import DOCUMENT

pytestmark = pytest.mark.emulator

SUITE = suite()
BROKEN = [each for each in SUITE if each.reports]
FOUND = [each for each in BROKEN if not each.missed]
MISSED = [each for each in BROKEN if each.missed]

# Seeds for clean twins in the quick run; the fuzz test uses more.
ORDERS = ({"seed": 0}, {"seed": 1, "late": True}, {"seed": 2, "threads": 1})
FUZZ_SEEDS = range(3, 24)


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(each, marks=() if index % 2 == 0 else pytest.mark.slow)
        for index, each in enumerate(FOUND)
    ],
    ids=str,
)
def test_a_planted_bug_is_reported(planted: Planted):
    errors = [planted.run(True, seed=seed).error for seed in planted.seeds]
    text = next((error for error in errors if error), None)
    assert text is not None, "no report"
    for expression in planted.reports:
        assert re.search(expression, text), text
    for line in planted.lines():
        assert f"{planted.path.name}:{line}" in text, text


@pytest.mark.parametrize("name", ["double_sum_by", "shared_maximum_by"])
def test_guesses_for_compare_and_swap_are_reported_on_request(name: str):
    planted = read(FOLDER / "legal" / f"{name}_compare_and_swap.cu")
    assert str(planted.run(False, cas_guesses=True).error).count("race: ") == 1


@pytest.mark.parametrize("planted", MISSED, ids=str)
def test_documented_misses_are_missed(planted: Planted):
    assert planted.run(True).error is None, "now detected: remove its `missed` line"


def check_clean(planted: Planted, **options: object) -> None:
    outcome = planted.run(False, **options)
    assert outcome.error is None, f"{options}: {outcome.error}"
    expected = planted.expected()
    if expected is not None:
        assert outcome.result is not None
        np.testing.assert_array_equal(outcome.result, expected, str(options))


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(each, marks=() if each.kind == "legal" or index % 4 == 0 else pytest.mark.slow)
        for index, each in enumerate(SUITE)
    ],
    ids=str,
)
def test_correct_kernels_are_not_reported(planted: Planted):
    for options in ORDERS:
        check_clean(planted, **options)


@pytest.mark.slow
@pytest.mark.parametrize("planted", SUITE, ids=str)
def test_correct_kernels_pass_in_any_thread_order(planted: Planted):
    for seed in FUZZ_SEEDS:
        check_clean(planted, seed=seed, late=seed % 2 == 1)


def test_every_source_declares_its_launch():
    assert SUITE
    for path in FOLDER.rglob("*.cu"):
        assert path.parent.parent == FOLDER, f"{path} is not in the folder of a class"
    for planted in SUITE:
        assert planted.declared["arg"], f"{planted}: no arguments"
        assert ("BROKEN" in planted.path.read_text()) == bool(planted.reports), str(planted)


def test_the_published_table_has_every_class():
    """Its numbers are measured by `python -m tests.emulator.planted_table`."""
    text = DOCUMENT.read_text()
    counts = Counter(planted.kind for planted in SUITE)
    pairs = Counter(planted.kind for planted in BROKEN)
    rows = re.findall(r"^\| `(\w+)` \| (\d*) \| (\d*) \| (\d*) \| (\d+) \| (\d+) \|$", text, re.M)
    assert {row[0]: (row[1], row[4]) for row in rows} == {
        kind: (str(pairs[kind] or ""), str(counts[kind])) for kind in counts
    }
