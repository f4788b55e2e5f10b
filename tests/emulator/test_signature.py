"""Which arguments a kernel's signature accepts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cukit.emulator.signature import mismatch, parameter_name


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("const char* f() [with T = const float* __restrict__]", "const float*"),
        ("const char *f() [T = const float *]", "const float*"),
        ("const char* f() [with T = long unsigned int; U = int]", "long unsigned int"),
        ("const char* f() [with T = float* const*]", "float* const*"),
    ],
)  # fmt: skip
def test_the_type_is_read_from_a_printed_signature(printed: str, name: str):
    assert parameter_name(printed) == name


def array(dtype: object) -> np.ndarray:
    return np.zeros(4, dtype)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("const float*", array("f4")),
        ("const float4*", array("f4")),
        ("float2*", array("c8")),
        ("const __half*", array("f2")),
        ("const __half*", array("u2")),
        ("const __half2*", array("u4")),
        ("const __nv_bfloat16*", array(ml_dtypes.bfloat16)),
        ("unsigned int*", array("i4")),
        ("const uint4*", array("f2")),
        ("const unsigned int*", array("u2")),
        ("unsigned int*", array("f4")),
        ("float*", array("u1")),
        ("void*", array("f8")),
        ("unsigned char*", array("f8")),
        ("const Tile*", array("f8")),
        ("float* const*", array("u8")),
        ("float*", None),
        ("float*", np.uint64(1 << 40)),
        ("float", np.float32(1)),
        ("unsigned int", np.int32(1)),
        ("Parameters", np.zeros(1, np.dtype((np.void, 4)))),
    ],
)
def test_compatible_arguments_are_accepted(name, argument):
    assert mismatch(name, argument) is None


@pytest.mark.parametrize(
    ("name", "argument", "what"),
    [
        ("const float*", array("f8"), "an array of float64"),
        ("float*", array("i4"), "an array of int32"),
        ("int*", array("i8"), "an array of int64"),
        ("int*", array("f4"), "an array of float32"),
        ("unsigned int*", array("i8"), "an array of int64"),
        ("float2*", array("i8"), "an array of int64"),
        ("const __half*", array(ml_dtypes.bfloat16), "an array of bfloat16"),
        ("double*", array("f4"), "an array of float32"),
        ("const float4*", array("f8"), "an array of float64"),
        ("long int", array("f4"), "an array of float32"),
        ("long int", None, "a null pointer"),
        ("float", np.int32(1), "an int32"),
        ("int", np.float32(1), "a float32"),
        ("float*", np.float64(1), "a float64"),
    ],
)
def test_incompatible_arguments_are_named(name, argument, what):
    assert mismatch(name, argument) == what
