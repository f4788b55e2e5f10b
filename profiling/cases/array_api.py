"""Cases of the narrow dtypes: float32 to one byte or half a byte a value, and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from cukit.array_api import NarrowDtype, float8_e4m3, int4
from cukit.array_api.narrow import decode, encode
from cukit.registry import get_kernel
from profiling.arms import forward_arms
from profiling.case import Call, Case, Workload
from profiling.data import normal

FAMILY = "array_api"


def cases(small: bool = False) -> list[Case]:
    """float8, which torch has as well, and int4, which it has not."""
    tokens, hidden = (24, 256) if small else (16384, 8192)
    return [
        maker(tokens, hidden, dtype)
        for maker in (encode_case, decode_case)
        for dtype in (float8_e4m3, int4)
    ]


def _arms(
    ours: Call, theirs: Callable[[ModuleType], Callable[..., Any]], x: Any, dtype: NarrowDtype
) -> Any:
    if dtype is int4:
        return {"cukit": lambda: ours}
    return forward_arms(ours, theirs, x)


def encode_case(tokens: int, hidden: int, dtype: NarrowDtype) -> Case:
    """float32 in, packed codes out."""

    def to_float8(torch: ModuleType) -> Callable[..., Any]:
        return lambda x: x.to(torch.float8_e4m3fn).view(torch.uint8)

    def build() -> Workload:
        x = normal((tokens, hidden), "float32")
        return Workload(
            arms=_arms(lambda: encode(x, dtype).storage, to_float8, x, dtype),
            expected=partial(get_kernel("encode", platform="cpu"), x, dtype),
        )

    traffic = tokens * hidden * (4 + dtype.bits / 8)
    return Case(FAMILY, "encode", f"{tokens}x{hidden}", dtype.name, build, bytes=traffic)


def decode_case(tokens: int, hidden: int, dtype: NarrowDtype) -> Case:
    """Packed codes in, float32 out."""

    def from_float8(torch: ModuleType) -> Callable[..., Any]:
        return lambda codes: codes.view(torch.float8_e4m3fn).float()

    def build() -> Workload:
        array = encode(normal((tokens, hidden), "float32"), dtype)
        return Workload(
            arms=_arms(partial(decode, array), from_float8, array.storage, dtype),
            expected=partial(get_kernel("decode", platform="cpu"), array.storage, dtype, hidden),
        )

    traffic = tokens * hidden * (4 + dtype.bits / 8)
    return Case(FAMILY, "decode", f"{tokens}x{hidden}", dtype.name, build, bytes=traffic)
