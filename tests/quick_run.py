"""A pytest plugin that chooses the cases of the quick run: `pytest -m "not slow"`, or `make test`.

A test of ops is a grid of cases: shapes x dtypes x options, on the CPU, in the emulator and on the
GPU. The quick run takes a few cases of each grid in which every value of every parameter occurs; in
the emulator, where most cases compile a kernel of their own, one of these few. The plugin marks the
rest `slow`. Tests and parameters may carry the mark themselves. Without `-m` everything runs.
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

import pytest
import threadpoolctl

PLACES = ("device", "place", "anywhere", "gpu", "provider")
"""Fixtures that choose what runs a test: the cases of each place are a grid of their own."""

MOST_EMULATED = 1 << 16
"""Elements of the largest shape that a test parameter may have in the emulator."""

QUICK = "quick: every value of every parameter; the whole: make test-all, or pytest without -m"
REST = "slow: what the quick run leaves out; the quick run: make test, or pytest -m 'not slow'"
WHOLE = "whole: every case; the quick run: make test, or pytest -m 'not slow'"


def emulated(condition: Callable[..., bool]) -> pytest.MarkDecorator:
    """Of a test's cases the emulator runs those whose parameters meet `condition`, the GPU all."""
    return pytest.mark.emulated.with_args(condition)


def possible(condition: Callable[..., bool]) -> pytest.MarkDecorator:
    """Of a test's cases only those exist whose parameters meet `condition`."""
    return pytest.mark.possible.with_args(condition)


def cover(cases: Sequence[Sequence[Hashable]]) -> set[int]:
    """Indices of a few `cases` that together have every property that any case has.

    Greedy: each choice adds the most properties, among equals the most pairs of properties, then
    the properties that were chosen least. A case only gets worse by what else is chosen, so one
    that is still the best after an update is the next choice.
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
    """A process of pytest-xdist has one core: NumPy's products stay on it."""
    if hasattr(config, "workerinput"):
        threadpoolctl.threadpool_limits(1, user_api="blas")


def pytest_report_header(config: pytest.Config) -> str:
    """Which cases run, and how to get the others."""
    expression = config.option.markexpr
    return "cases: " + (
        QUICK if "not slow" in expression else REST if "slow" in expression else WHOLE
    )


@pytest.hookimpl(tryfirst=True)  # pytest applies `-m` afterwards
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips cases that never run in their place, marks `slow` what the quick run leaves out."""
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
    for (test, where), grid in grids.items():
        quick = cover([_properties(item) for item in grid])
        if "emulator" in where:
            # The name decides which, so that all tests together mix what kernels differ in.
            quick = {sorted(quick)[zlib.crc32(test.encode()) % len(quick)]}
        for index, item in enumerate(grid):
            if index not in quick:
                item.add_marker(pytest.mark.slow)


def _runs_an_op(item: pytest.Function) -> bool:
    """A test that is run in several places, or one of kernels alone."""
    marked = any(item.get_closest_marker(name) for name in ("emulator", "gpu"))
    return marked or any(place in item.callspec.params for place in PLACES)


def _properties(item: pytest.Function) -> list[Hashable]:
    """The values of a case: of each `parametrize` one, even if it sets several arguments."""
    identities = {name: id(value) for name, value in item.callspec.params.items()}
    properties: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = re.split(r"\s*,\s*", names) if isinstance(names, str) else names
        properties.append(tuple((name, identities.pop(name)) for name in names))
    return [*properties, *identities.items()]


def _why_not(item: pytest.Function) -> str | None:
    """Why a case never runs in its place."""
    if not _meets(item, "possible"):
        return "parameters that exclude each other"
    if item.get_closest_marker("emulator") is None:
        return None
    if not _meets(item, "emulated"):
        return "the emulator runs what differs most; the rest is for the GPU"
    shapes = filter(_is_shape, item.callspec.params.values())
    if any(math.prod(shape) > MOST_EMULATED for shape in shapes):
        return f"more than {MOST_EMULATED} elements: for the GPU"
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
