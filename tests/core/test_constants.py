"""Constant arrays: which of them are cached."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.core import constants
from cukit.core.constants import constant

LIKE = np.zeros(1)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(constants, "_kept", {})


def test_equal_constants_are_one_array():
    first = constant(LIKE, 3, 7, np.int32)
    np.testing.assert_array_equal(first, np.array([7, 7, 7], np.int32), strict=True)
    assert constant(LIKE, 3, 7, np.int32) is first
    for count, value, dtype in ((4, 7, np.int32), (3, 8, np.int32), (3, 7, np.float32)):
        other = constant(LIKE, count, value, dtype)
        assert other is not first
        np.testing.assert_array_equal(other, np.full(count, value, dtype), strict=True)


def test_another_stream_fills_its_own_array(monkeypatch):
    first = constant(LIKE, 3, 7, np.int32)
    monkeypatch.setattr(constants, "current_stream", lambda like: 1)
    assert constant(LIKE, 3, 7, np.int32) is not first


def test_an_array_filled_during_capture_is_not_kept(monkeypatch):
    """The fill is captured and has not run: a launch outside the graph would read garbage."""
    monkeypatch.setattr(constants, "is_captured", lambda like: True)
    captured = constant(LIKE, 3, 7, np.int32)
    monkeypatch.undo()
    assert constant(LIKE, 3, 7, np.int32) is not captured


def test_a_capture_reads_the_array_that_is_kept(monkeypatch):
    first = constant(LIKE, 3, 7, np.int32)
    monkeypatch.setattr(constants, "is_captured", lambda like: True)
    assert constant(LIKE, 3, 7, np.int32) is first


def test_the_number_of_kept_arrays_is_bounded(monkeypatch):
    monkeypatch.setattr(constants, "_MAX_KEPT", 2)
    arrays = [constant(LIKE, 1, value, np.int32) for value in range(3)]
    assert len(constants._kept) == 2
    assert [constant(LIKE, 1, value, np.int32) is arrays[value] for value in range(3)] == [
        True,
        True,
        False,
    ]
