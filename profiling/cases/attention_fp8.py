"""Cases of attention of float8 inputs, in the shapes of :mod:`profiling.cases.attention`.

Beside the float8 kernel run the one that keeps probabilities at sixteen bits, and our own for
bfloat16, all on the same values: what rounding to eight bits buys. The floor of these rows is that
of 16-bit products; float8 multiplies twice as fast.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from cukit.array_api import QuantizedArray, float8_e4m3
from cukit.array_api.narrow import encode
from cukit.attention import flash_attention
from cukit.reference import attention as reference
from profiling.case import Case, Workload
from profiling.cases.attention import Shape, by_key_head
from profiling.data import DTYPES, normal

_TOLERANCE = 4e-2  # rounding probabilities to e4m3 alone costs 2.7e-2


def cases(small: bool = False) -> list[Case]:
    """Three lengths of every width of head, and one grouped-query shape."""
    if small:
        return [forward_case(Shape(1, 40, 4, 2, 16, causal)) for causal in (False, True)]
    shapes = [
        Shape(16384 // seq_len, seq_len, 2048 // width, 2048 // width, width, causal)
        for width in (64, 128, 256)
        for seq_len in (1024, 4096, 16384)
        for causal in (False, True)
    ]
    return [forward_case(shape) for shape in (*shapes, Shape(2, 8192, 32, 8, 128, True))]


def forward_case(shape: Shape) -> Case:
    """q, k and v in, out and lse out."""

    def build() -> Workload:
        heads = (shape.num_heads_q, shape.num_heads_kv, shape.num_heads_kv)
        narrow = [
            encode(normal((shape.batch, shape.seq_len, n, shape.head_dim), "float32"), float8_e4m3)
            for n in heads
        ]
        wide = [_bfloat16(array) for array in narrow]

        def attend(*arrays: Any) -> tuple[Any]:
            return (reference.flash_attention(*arrays, causal=shape.causal),)

        return Workload(
            arms={
                "cukit": lambda: partial(flash_attention, *narrow, causal=shape.causal),
                "cukit-precise": lambda: partial(
                    flash_attention, *narrow, causal=shape.causal, precise=True
                ),
                "cukit-bfloat16": lambda: partial(flash_attention, *wide, causal=shape.causal),
            },
            expected=lambda: by_key_head(shape, attend, *wide)[0],
            tolerance=_TOLERANCE,
        )

    # A byte an element; those of out, half of what a query head has, take two.
    num_bytes = 3 * shape.elements(shape.num_heads_q) // 2 + shape.elements(shape.num_heads_kv)
    return Case(
        family="attention",
        op="flash_attention",
        name=str(shape),
        dtype="float8_e4m3",
        build=build,
        flops=shape.flops,
        bytes=num_bytes,
    )


def _bfloat16(array: QuantizedArray) -> Any:
    return array.dense().astype(DTYPES["bfloat16"])
