"""The built-in cases of `KernelBenchmark`: one function per op.

A function passes to `_case` the name of a registered op, the shapes of its arguments, and the FLOPs
and output elements of a call; `SUITE` lists the functions by name. The repository's own cases, with
all their peers, are in `profiling/cases/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cukit.analyzer.correctness import array_module
from cukit.analyzer.results import CaseKey
from cukit.analyzer.timing import Call
from cukit.registry import get_op

Impls = Mapping[str, Call]


@dataclass(frozen=True)
class SuiteCase:
    """One case; nothing is allocated before `build` is called."""

    key: CaseKey
    build: Callable[[], tuple[Impls, Call]]
    flops: float
    bytes: float


def flash_attention_cases(small: bool) -> list[SuiteCase]:
    """Causal and full attention of 4096 positions, heads of 64 and 128."""
    shapes = [(1, 48, 2, 32)] if small else [(2, 4096, 32, 64), (2, 4096, 16, 128)]
    return [
        _case(
            "attention",
            "flash_attention",
            f"d{shape[3]} {shape[0]}x{shape[2]}x{shape[1]}{' causal' if causal else ''}",
            (shape,) * 3,
            flops=4.0 * shape[0] * shape[2] * shape[1] ** 2 * shape[3] / (2 if causal else 1),
            out_elements=_size(shape),
            causal=causal,
        )
        for shape in shapes
        for causal in (False, True)
    ]


def matmul_cases(small: bool) -> list[SuiteCase]:
    """Products of m x k and k x n matrices."""
    sizes = [(48, 32, 64)] if small else [(4096, 4096, 4096), (8192, 14336, 4096), (16, 8192, 8192)]
    return [
        _case(
            "gemm",
            "matmul",
            f"{m}x{n}x{k}",
            ((m, k), (k, n)),
            flops=2.0 * m * n * k,
            out_elements=m * n,
        )
        for m, n, k in sizes
    ]


def rms_norm_cases(small: bool) -> list[SuiteCase]:
    """RMS norm of arrays [tokens, hidden]."""
    shapes = [(24, 256)] if small else [(8192, 4096), (16384, 8192)]
    return [
        _case(
            "layers",
            "rms_norm",
            f"{rows}x{columns}",
            ((rows, columns), (columns,)),
            flops=0.0,
            out_elements=rows * columns,
        )
        for rows, columns in shapes
    ]


SUITE: Mapping[str, Callable[[bool], list[SuiteCase]]] = {
    "flash_attention": flash_attention_cases,
    "matmul": matmul_cases,
    "rms_norm": rms_norm_cases,
}


def _case(
    family: str,
    op: str,
    name: str,
    shapes: tuple[tuple[int, ...], ...],
    *,
    flops: float,
    out_elements: int,
    **options: Any,
) -> SuiteCase:
    """A case of `op` on random float16 arrays of `shapes`; its reference is the expected result."""

    def build() -> tuple[Impls, Call]:
        rng = np.random.default_rng(20)
        xp = array_module()
        arrays = [
            xp.asarray(rng.standard_normal(shape, np.float32).astype(np.float16))
            for shape in shapes
        ]
        entry = get_op(op)
        truth = partial(entry.reference, *(array.astype(xp.float32) for array in arrays), **options)
        return {"cukit": partial(entry.function, *arrays, **options)}, truth

    elements = sum(map(_size, shapes)) + out_elements
    return SuiteCase((family, op, name, "float16"), build, flops, 2.0 * elements)


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))
