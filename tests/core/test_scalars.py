"""Scalar options: accepted values, and messages for all others."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cukit.core.scalars import (
    adopt_scalars,
    arrays_among,
    check_choice,
    check_dtype,
    check_flag,
    check_integer,
    check_number,
    check_scalar,
)
from cukit.errors import ArrayDtypeError, ArrayError, ArrayShapeError, ConfigError


@pytest.mark.parametrize("value", [0, 1.5, np.float32(2), np.int64(3)])
def test_valid_numbers_are_accepted(value):
    check_number("op", "eps", value, least=0)


@pytest.mark.parametrize("value", [None, "1e-6", math.nan, math.inf, -1, True, 1j, [1.0], 10**400])
def test_invalid_numbers_are_rejected(value):
    with pytest.raises(ConfigError, match="op: eps must be a finite number of 0 or more, got "):
        check_number("op", "eps", value, least=0)


def test_an_exclusive_lower_bound_is_checked():
    check_number("op", "temperature", 1e-30, above=0, most=10)
    for value in (0, 10.5):
        with pytest.raises(ConfigError, match=r"a finite number above 0 and at most 10, got"):
            check_number("op", "temperature", value, above=0, most=10)


@pytest.mark.parametrize("value", [-100, np.int32(7)])
def test_valid_integers_are_accepted(value):
    check_integer("op", "ignore_index", value)


@pytest.mark.parametrize("value", [None, 1.5, "1", True, np.float32(1), 1 << 70])
def test_invalid_integers_are_rejected(value):
    with pytest.raises(ConfigError, match=r"op: step must be an integer of 1 or more and at most"):
        check_integer("op", "step", value, least=1, most=1 << 31)


@pytest.mark.parametrize("value", [3, -0.5, np.float32(2), math.inf, np.array(2, np.float64)])
def test_scalars_may_be_numbers_or_0d_arrays(value):
    check_scalar("op", "grad_loss", value)
    assert adopt_scalars("op", value, None) == (value, None)
    arrays = [value] if isinstance(value, np.ndarray) else []
    assert list(arrays_among(None, value)) == arrays


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (10**400, ConfigError, "must be a number in the range of a float"),
        (np.ones(2, np.float32), ArrayShapeError, "must have shape"),
        (np.array(1), ArrayDtypeError, "must be float32, float64"),
        ("1", ArrayError, "must be"),
    ],
)
def test_invalid_scalars_are_rejected(value, error, message):
    with pytest.raises(error, match=f"op: grad_loss {message}"):
        check_scalar("op", "grad_loss", value)


@pytest.mark.parametrize("value", ["no", 1, 0, None])
def test_invalid_flags_are_rejected(value):
    check_flag("op", "causal", np.bool_(True))
    with pytest.raises(ConfigError, match="op: causal must be True or False, got "):
        check_flag("op", "causal", value)


@pytest.mark.parametrize("value", ["Mean", 3, ["mean"], np.ones(2)])
def test_invalid_choices_are_rejected(value):
    check_choice("op", "reduction", "mean", ("mean", "sum"))
    with pytest.raises(ConfigError, match="op: reduction must be one of 'mean', 'sum', got "):
        check_choice("op", "reduction", value, ("mean", "sum"))


@pytest.mark.parametrize("value", ["float32", np.float32, np.dtype("float32"), "<f4"])
def test_dtypes_are_accepted_in_every_form(value):
    assert check_dtype("op", "dtype", value) == np.float32
    assert check_dtype("op", "dtype", "bfloat16").name == "bfloat16"


@pytest.mark.parametrize("value", [None, "int32", "no", 7, np.ones(2), [1], object()])
def test_invalid_dtypes_are_rejected(value):
    with pytest.raises(ArrayDtypeError, match="op: dtype must be float32, float16, bfloat16, fl"):
        check_dtype("op", "dtype", value)
