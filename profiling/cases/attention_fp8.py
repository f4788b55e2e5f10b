"""Cases of FP8 attention, in the shapes of :mod:`profiling.cases.attention` and
:mod:`profiling.cases.attention_options`.

The FP8 kernel is compared with the kernel that keeps probabilities in 16 bits (`precise`), and with
cukit's bfloat16 kernel, on the same values. The floor of these cases assumes the rate of 16-bit
products; FP8 products have twice that rate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cukit.array_api import QuantizedArray, float8_e4m3
from cukit.attention import flash_attention
from cukit.quantization.encode import encode
from cukit.reference import attention as reference
from profiling.case import Call, Case, Workload
from profiling.cases.attention import Shape, by_key_head
from profiling.cases.attention_options import by_head, lengths_of
from profiling.data import DTYPES, array_module, normal

_TOLERANCE = 4e-2  # the rounding of probabilities to e4m3 alone causes an error of 2.7e-2


def cases(small: bool = False) -> list[Case]:
    """Three lengths for every head_dim, one GQA shape, a window and varlen sequences."""
    if small:
        plain = [forward_case(Shape(1, 40, 4, 2, 16, causal)) for causal in (False, True)]
        return [
            *plain,
            forward_case(Shape(1, 60, 2, 2, 16, True), window=7),
            sequences_case([20, 0, 33], 2, 16, True),
        ]
    shapes = [
        Shape(16384 // seq_len, seq_len, 2048 // width, 2048 // width, width, causal)
        for width in (64, 128, 256)
        for seq_len in (1024, 4096, 16384)
        for causal in (False, True)
    ]
    return [
        *(forward_case(shape) for shape in (*shapes, Shape(2, 8192, 32, 8, 128, True))),
        forward_case(Shape(1, 16384, 16, 16, 128, True), window=4096),
        *(sequences_case(lengths_of(65536), 16, 128, causal) for causal in (False, True)),
    ]


def forward_case(shape: Shape, window: int | None = None) -> Case:
    """Reads q, k and v, writes out; optionally with a causal `window` of keys."""
    options: dict[str, Any] = {"causal": shape.causal}
    flops = shape.flops
    if window is not None:
        options["window_size"] = (window, None)
        pairs = (window + 1) * (shape.seq_len - window / 2)
        flops = 4 * shape.head_dim * shape.num_heads_q * shape.batch * pairs

    def build() -> Workload:
        heads = (shape.num_heads_q, shape.num_heads_kv, shape.num_heads_kv)
        narrow = [_encoded((shape.batch, shape.seq_len, n, shape.head_dim)) for n in heads]

        def attend(*arrays: Any) -> tuple[Any]:
            return (reference.flash_attention(*arrays, **options),)

        def expected(*wide: Any) -> Any:
            return by_key_head(shape, attend, *wide)[0]

        return _workload(narrow, options, expected)

    # One byte per element of q, k and v, two per element of out.
    num_bytes = 3 * shape.elements(shape.num_heads_q) // 2 + shape.elements(shape.num_heads_kv)
    name = str(shape) if window is None else f"{shape} window {window}"
    return _case(name, build, flops, num_bytes)


def sequences_case(lengths: list[int], heads: int, head_dim: int, causal: bool) -> Case:
    """Variable-length sequences."""
    total, longest = sum(lengths), max(lengths)

    def build() -> Workload:
        ends = array_module().asarray(np.cumsum([0, *lengths]).astype(np.int32))
        options = {
            "causal": causal,
            "cu_seqlens_q": ends,
            "cu_seqlens_kv": ends,
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
        }
        narrow = [_encoded((total, heads, head_dim)) for _ in range(3)]
        expected = partial(by_head, partial(reference.flash_attention, **options))
        return _workload(narrow, options, expected)

    flops = 4 * head_dim * heads * sum(length**2 for length in lengths) / (2 if causal else 1)
    mask = " causal" if causal else ""
    name = f"d{head_dim} {len(lengths)} sequences of {total}x{heads}{mask}"
    return _case(name, build, flops, 5 * total * heads * head_dim)


def _workload(
    narrow: list[QuantizedArray], options: dict[str, Any], expected: Callable[..., Any]
) -> Workload:
    wide = [_bfloat16(array) for array in narrow]

    def impl(*arrays: Any, **more: Any) -> Callable[[], Call]:
        return lambda: partial(flash_attention, *arrays, **options, **more)

    return Workload(
        impls={
            "cukit": impl(*narrow),
            "cukit-precise": impl(*narrow, precise=True),
            "cukit-bfloat16": impl(*wide),
        },
        expected=lambda: expected(*wide),
        tolerance=_TOLERANCE,
    )


def _case(name: str, build: Callable[[], Workload], flops: float, num_bytes: int) -> Case:
    return Case(
        family="attention",
        op="flash_attention",
        name=name,
        dtype="float8_e4m3",
        build=build,
        flops=flops,
        bytes=num_bytes,
    )


def _encoded(shape: tuple[int, ...]) -> QuantizedArray:
    return encode(normal(shape, "float32"), float8_e4m3)


def _bfloat16(array: QuantizedArray) -> Any:
    return array.dense().astype(DTYPES["bfloat16"])
