"""Scalar options: accepted values, and messages for all others."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cukit.core.scalars import (
    check_choice,
    check_dtype,
    check_flag,
    check_integer,
    check_number,
)
from cukit.errors import ArrayDtypeError, ConfigError


@pytest.mark.parametrize("value", [0, 1.5, np.float32(2), np.int64(3)])
def test_numbers(value):
    check_number("op", "eps", value, least=0)


@pytest.mark.parametrize("value", [None, "1e-6", math.nan, math.inf, -1, True, 1j, [1.0], 10**400])
def test_invalid_numbers(value):
    with pytest.raises(ConfigError, match="op: eps must be a finite number of 0 or more, got "):
        check_number("op", "eps", value, least=0)


def test_a_range_without_a_lower_bound():
    check_number("op", "temperature", 1e-30, above=0, most=10)
    for value in (0, 10.5):
        with pytest.raises(ConfigError, match=r"a finite number above 0 and at most 10, got"):
            check_number("op", "temperature", value, above=0, most=10)


@pytest.mark.parametrize("value", [-100, np.int32(7)])
def test_integers(value):
    check_integer("op", "ignore_index", value)


@pytest.mark.parametrize("value", [None, 1.5, "1", True, np.float32(1), 1 << 70])
def test_invalid_integers(value):
    with pytest.raises(ConfigError, match=r"op: step must be an integer of 1 or more and at most"):
        check_integer("op", "step", value, least=1, most=1 << 31)


@pytest.mark.parametrize("value", ["no", 1, 0, None])
def test_invalid_flags(value):
    check_flag("op", "causal", np.bool_(True))
    with pytest.raises(ConfigError, match="op: causal must be True or False, got "):
        check_flag("op", "causal", value)


@pytest.mark.parametrize("value", ["Mean", 3, ["mean"], np.ones(2)])
def test_invalid_choices(value):
    check_choice("op", "reduction", "mean", ("mean", "sum"))
    with pytest.raises(ConfigError, match="op: reduction must be one of 'mean', 'sum', got "):
        check_choice("op", "reduction", value, ("mean", "sum"))


@pytest.mark.parametrize("value", ["float32", np.float32, np.dtype("float32"), "<f4"])
def test_dtypes_in_every_form(value):
    assert check_dtype("op", "dtype", value) == np.float32
    assert check_dtype("op", "dtype", "bfloat16").name == "bfloat16"


@pytest.mark.parametrize("value", [None, "int32", "no", 7, np.ones(2), [1], object()])
def test_invalid_dtypes(value):
    with pytest.raises(ArrayDtypeError, match="op: dtype must be float32, float16, bfloat16, fl"):
        check_dtype("op", "dtype", value)
