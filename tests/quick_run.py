"""A pytest plugin that selects the cases of the quick run: `pytest -m "not slow"`, or `make test`.

A test of an op is a grid of cases: shapes x dtypes x options, on the CPU, in the emulator and on
the GPU. The quick run takes a few cases of each grid that together cover every value of every
parameter. In the emulator, where most cases compile another variant, it takes one of these cases,
and only from the first tests of each file. The plugin marks all other cases `slow`. Tests and
parameters may also be marked directly. Without `-m` all cases run.
"""

from __future__ import annotations

import heapq
import inspect
import itertools
import math
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import pytest
import threadpoolctl

PLACES = ("device", "place", "anywhere", "gpu", "provider")
"""Fixtures that select the device: the cases of each device are a separate grid."""

MAX_EMULATED = 1 << 16
"""Largest number of elements of a shape parameter in the emulator."""

MAX_EMULATED_TESTS = 3
"""The number of tests per file, from the top, that the quick run also runs in the emulator.
tests/emulator/test_every_op.py runs every op in the emulator."""

QUICK = "quick: every value of every parameter; all cases: make test-all, or pytest without -m"
REST = "slow: the cases outside the quick run; quick run: make test, or pytest -m 'not slow'"
WHOLE = "all; quick run: make test, or pytest -m 'not slow'"


def emulated(condition: Callable[..., bool]) -> pytest.MarkDecorator:
    """Restrict the emulator to the cases that satisfy `condition`; the CPU and the GPU run all."""
    return pytest.mark.emulated.with_args(condition)


def possible(condition: Callable[..., bool]) -> pytest.MarkDecorator:
    """Restrict a test to the cases that satisfy `condition`."""
    return pytest.mark.possible.with_args(condition)


def cover(cases: Sequence[Sequence[Hashable]]) -> set[int]:
    """Return indices of a few `cases` that together cover every property of all cases.

    Greedy: each choice adds the most new properties. Ties are broken by the most new pairs of
    properties, then by the properties that were chosen least often. The score of a case only
    decreases as others are chosen, so a case that is still the best after an update is chosen.
    """
    pairs = [frozenset(itertools.combinations(case, 2)) for case in cases]
    uses: Counter[Hashable] = Counter()
    used_pairs: set[tuple[Hashable, Hashable]] = set()
    chosen: set[int] = set()

    def rank(index: int) -> tuple[int, int, int, int]:
        added = sum(each not in uses for each in cases[index])
        total = sum(uses[each] for each in cases[index])
        return -added, -len(pairs[index] - used_pairs), total, index

    queue = [rank(index) for index in range(len(cases))]
    heapq.heapify(queue)
    while queue:
        *_, index = heapq.heappop(queue)
        current = rank(index)
        if current[0] == 0:
            continue
        if queue and queue[0] < current:
            heapq.heappush(queue, current)
            continue
        chosen.add(index)
        uses.update(cases[index])
        used_pairs |= pairs[index]
    return chosen


def pytest_configure(config: pytest.Config) -> None:
    """Limit NumPy to one thread in processes of pytest-xdist, which have one core each."""
    if hasattr(config, "workerinput"):
        threadpoolctl.threadpool_limits(1, user_api="blas")


def pytest_report_header(config: pytest.Config) -> str:
    """Report which cases run, and how to run the others."""
    expression = config.option.markexpr
    return "cases: " + (
        QUICK if "not slow" in expression else REST if "slow" in expression else WHOLE
    )


@pytest.hookimpl(tryfirst=True)  # pytest applies `-m` afterwards
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip cases that never run on their device; mark cases outside the quick run `slow`."""
    grids: defaultdict[tuple[str, tuple[Hashable, ...]], list[pytest.Function]]
    grids = defaultdict(list)
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        if reason := _why_not(item):
            item.add_marker(pytest.mark.skip(reason=reason))
        elif _runs_an_op(item) and not item.get_closest_marker("slow"):
            test, _, _ = item.nodeid.partition("[")
            where = tuple(item.callspec.params.get(place) for place in PLACES)
            grids[test, where].append(item)
    emulated_tests: Counter[Path] = Counter()
    for (test, where), grid in grids.items():
        quick = cover([_properties(item) for item in grid])
        if "emulator" in where:
            path = grid[0].path
            emulated_tests[path] += 1
            # Chosen by a hash of the name, so that the tests together cover different values.
            quick = {sorted(quick)[zlib.crc32(test.encode()) % len(quick)]}
            if emulated_tests[path] > MAX_EMULATED_TESTS:
                quick = set()
        for index, item in enumerate(grid):
            if index not in quick:
                item.add_marker(pytest.mark.slow)


def _runs_an_op(item: pytest.Function) -> bool:
    """True for a test that runs on several devices, or only in the emulator or on the GPU."""
    marked = any(item.get_closest_marker(name) for name in ("emulator", "gpu"))
    return marked or any(place in item.callspec.params for place in PLACES)


def _properties(item: pytest.Function) -> list[Hashable]:
    """Return the values of a case: one per `parametrize`, even if it sets several arguments."""
    identities = {name: id(value) for name, value in item.callspec.params.items()}
    properties: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = re.split(r"\s*,\s*", names) if isinstance(names, str) else names
        properties.append(tuple((name, identities.pop(name)) for name in names))
    return [*properties, *identities.items()]


def _why_not(item: pytest.Function) -> str | None:
    """Return the reason why a case never runs on its device, or None."""
    if not _meets(item, "possible"):
        return "parameters that exclude each other"
    if item.get_closest_marker("emulator") is None:
        return None
    if not _meets(item, "emulated"):
        return "not selected for the emulator; runs on the GPU"
    shapes = filter(_is_shape, item.callspec.params.values())
    if any(math.prod(shape) > MAX_EMULATED for shape in shapes):
        return f"more than {MAX_EMULATED} elements: for the GPU"
    return None


def _meets(item: pytest.Function, marker: str) -> bool:
    params = item.callspec.params
    conditions = [mark.args[0] for mark in item.iter_markers(marker)]
    return all(
        condition(**{name: params[name] for name in inspect.signature(condition).parameters})
        for condition in conditions
    )


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(extent, int) for extent in value)
