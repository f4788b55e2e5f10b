"""Cases of the narrow dtypes: conversion to 8 and 4 bits per value, and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from cukit.array_api import NarrowDtype, float8_e4m3, int4, int8
from cukit.quantization.encode import decode, encode
from cukit.registry import get_kernel
from profiling.case import Case, Workload, itemsize
from profiling.data import DTYPES, normal
from profiling.standard_impls import forward_impls

FAMILY = "quantization"

SPREAD = 3.0
"""Standard deviation of the values; most int4 codes occur."""


def cases(small: bool = False) -> list[Case]:
    """float32 and bfloat16 values."""
    tokens, hidden = (24, 256) if small else (16384, 8192)
    return [
        maker(tokens, hidden, narrow, values)
        for maker in (encode_case, decode_case)
        for values in ("float32", "bfloat16")
        for narrow in (float8_e4m3, int8, int4)
    ]


def _name(tokens: int, hidden: int, values: str) -> str:
    return f"{tokens}x{hidden}" + ("" if values == "float32" else f" {values}")


def _traffic(tokens: int, hidden: int, narrow: NarrowDtype, values: str) -> float:
    return tokens * hidden * (itemsize(values) + narrow.bits / 8)


def encode_case(tokens: int, hidden: int, narrow: NarrowDtype, values: str) -> Case:
    """Reads values, writes packed codes."""

    def build() -> Workload:
        x = normal((tokens, hidden), values, SPREAD)
        return Workload(
            impls=forward_impls(
                lambda: encode(x, narrow).storage, partial(_torch_encode, narrow), x
            ),
            expected=partial(get_kernel("encode", platform="cpu"), x, narrow.name),
        )

    traffic = _traffic(tokens, hidden, narrow, values)
    return Case(FAMILY, "encode", _name(tokens, hidden, values), narrow.name, build, bytes=traffic)


def decode_case(tokens: int, hidden: int, narrow: NarrowDtype, values: str) -> Case:
    """Reads packed codes, writes values."""

    def build() -> Workload:
        array = encode(normal((tokens, hidden), "float32", SPREAD), narrow)
        reference = get_kernel("decode", platform="cpu")
        return Workload(
            impls=forward_impls(
                partial(decode, array, DTYPES[values]),
                partial(_torch_decode, narrow, values),
                array.storage,
            ),
            expected=partial(reference, array.storage, narrow.name, hidden),
        )

    traffic = _traffic(tokens, hidden, narrow, values)
    return Case(FAMILY, "decode", _name(tokens, hidden, values), narrow.name, build, bytes=traffic)


def _torch_encode(narrow: NarrowDtype, torch: ModuleType) -> Callable[..., Any]:
    def to_float8(x: Any) -> Any:
        return x.to(torch.float8_e4m3fn).view(torch.uint8)

    def to_int8(x: Any) -> Any:
        return x.float().round().clamp(-128, 127).to(torch.int8)

    def to_int4(x: Any) -> Any:
        codes = x.float().round().clamp(-8, 7).to(torch.int8).view(torch.uint8)
        low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
        return (low & 15) | (high << 4)

    return {"float8_e4m3": to_float8, "int8": to_int8, "int4": to_int4}[narrow.name]


def _torch_decode(narrow: NarrowDtype, values: str, torch: ModuleType) -> Callable[..., Any]:
    dtype = getattr(torch, values)

    def from_float8(codes: Any) -> Any:
        return codes.view(torch.float8_e4m3fn).to(dtype)

    def from_int8(codes: Any) -> Any:
        return codes.to(dtype)

    def from_int4(codes: Any) -> Any:
        pairs = torch.stack((codes & 15, codes >> 4), dim=-1).view(torch.int8)
        return ((pairs ^ 8) - 8).flatten(-2).to(dtype)

    return {"float8_e4m3": from_float8, "int8": from_int8, "int4": from_int4}[narrow.name]
