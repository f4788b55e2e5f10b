"""Cases of grouped products, family gemm: long groups (prompts) and short groups (decoding)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

import cukit as ck
from cukit.gemm import (
    grouped_gated_linear,
    grouped_gemm,
    grouped_gemm_backward,
    grouped_gemm_fp8,
)
from cukit.reference import activations
from cukit.reference import grouped_gemm as reference
from profiling import peers
from profiling.case import Call, Case, PeerMissing, Workload, itemsize
from profiling.data import array_module, normal

FAMILY = "gemm"
DTYPE = "bfloat16"


def cases(small: bool = False) -> list[Case]:
    """DeepSeek-V3's expert layers, among others; rows of a group vary by 30 %."""
    if small:
        return [
            forward_case(3, 20, 32, 64),
            forward_case(3, 20, 32, 64, padded=True),
            backward_case(3, 20, 32, 64),
            gated_case(3, 20, 32, 64),
            fp8_case(3, 20, 32, 64),
        ]
    return [
        forward_case(4, 8192, 6144, 7168),
        forward_case(8, 4096, 7168, 3072),
        forward_case(64, 16, 4096, 7168),
        forward_case(32, 192, 6144, 7168, padded=True),
        backward_case(8, 4096, 7168, 3072),
        gated_case(32, 1024, 2048, 7168),
        fp8_case(4, 8192, 6144, 7168),
        fp8_case(8, 4096, 7168, 3072),
        fp8_case(32, 192, 6144, 7168, padded=True),
    ]


def counts_of(groups: int, rows: int) -> np.ndarray[Any, Any]:
    """Rows of each group: 0.7 to 1.3 times `rows`, the same in every run."""
    share = np.random.default_rng(groups * rows).uniform(0.7, 1.3, groups)
    counts = (share / share.sum() * groups * rows).astype(np.int32)
    counts[-1] += groups * rows - counts.sum()
    return counts


def forward_case(groups: int, rows: int, n: int, k: int, padded: bool = False) -> Case:
    """y[r] = weights[g] x[r] for each row r of group g. The peers are cuBLAS, one call per group
    with sizes known on the host, and torch's grouped product.

    padded: x is [groups, capacity, k], and each group uses only its first rows.
    """
    counts = counts_of(groups, rows)

    def build() -> Workload:
        xp = array_module()
        weights = normal((groups, n, k), DTYPE, scale=k**-0.5)
        if padded:
            x = normal((groups, int(counts.max()), k), DTYPE)
            out = xp.zeros((*x.shape[:2], n), x.dtype)
            where: dict[str, Any] = {"expert_counts": xp.asarray(counts)}
            impls = _loop_impls(out, x, weights, list(enumerate(counts.tolist())))
        else:
            x = normal((groups * rows, k), DTYPE)
            out = xp.zeros((groups * rows, n), x.dtype)
            where = {"expert_offsets": _offsets(counts)}
            impls = _loop_impls(out, x, weights, _slices(counts))
            impls["torch-grouped"] = lambda: _torch_grouped(x, weights, counts)
        impls["cukit"] = lambda: partial(grouped_gemm, x, weights, **where, out=out)
        return Workload(impls, partial(reference.grouped_gemm, x, weights, **where))

    name = f"{groups} x {rows}, {n}x{k}{' set aside' if padded else ''}"
    return _case("grouped_gemm", name, build, groups, rows, n, k)


def backward_case(groups: int, rows: int, n: int, k: int) -> Case:
    """Both gradients; the peer is two cuBLAS calls per group."""
    counts = counts_of(groups, rows)

    def build() -> Workload:
        weights = normal((groups, n, k), DTYPE, scale=n**-0.5)
        x = normal((groups * rows, k), DTYPE)
        grad = normal((groups * rows, n), DTYPE, scale=rows**-0.5)
        offsets = _offsets(counts)

        def torch_loop() -> Call:
            torch = peers.torch()
            tensors = [peers.to_torch(a) for a in (grad, x, weights)]

            def call() -> Any:
                of_rows, own, matrices = tensors
                grad_x = torch.empty_like(own)
                grad_weights = torch.empty_like(matrices)
                for group, rows in enumerate(_slices(counts)):
                    torch.mm(of_rows[rows], matrices[group], out=grad_x[rows])
                    torch.mm(of_rows[rows].T, own[rows], out=grad_weights[group])
                return grad_x, grad_weights

            return call

        return Workload(
            {
                "cukit": lambda: partial(grouped_gemm_backward, grad, x, weights, offsets),
                "torch-loop": torch_loop,
            },
            partial(reference.grouped_gemm_backward, grad, x, weights, offsets),
        )

    name = f"{groups} x {rows}, {n}x{k}"
    return _case("grouped_gemm_backward", name, build, groups, rows, n, k, products=2)


def gated_case(groups: int, rows: int, n: int, k: int) -> Case:
    """SwiGLU per group; the peer is torch's grouped product followed by the activation."""
    counts = counts_of(groups, rows)

    def build() -> Workload:
        weights = normal((groups, 2 * n, k), DTYPE, scale=k**-0.5)
        x, offsets = normal((groups * rows, k), DTYPE), _offsets(counts)

        def expected() -> Any:
            return activations.silu_and_mul(reference.grouped_gemm(x, weights, offsets))

        return Workload(
            {
                "cukit": lambda: partial(grouped_gated_linear, x, weights, offsets),
                "torch-grouped": lambda: _torch_grouped(x, weights, counts, gated=True),
            },
            expected,
        )

    return _case(
        "grouped_gated_linear", f"{groups} x {rows}, 2x{n}x{k}", build, groups, rows, 2 * n, k
    )


def fp8_case(groups: int, rows: int, n: int, k: int, padded: bool = False) -> Case:
    """y[r] = weights[g] x[r] of FP8 codes with block scales; padded: as in forward_case."""
    counts = counts_of(groups, rows)

    def build() -> Workload:
        xp = array_module()
        lead = (groups, int(counts.max())) if padded else (groups * rows,)
        steps, blocks = -(-k // 128), -(-n // 128)
        ones = xp.ones((steps, -(-math.prod(lead) // 4) * 4), xp.float32)
        x = ck.QuantizedArray.encode(
            normal((*lead, k), DTYPE),
            ck.float8_e4m3,
            scales=ones[:, : math.prod(lead)].T.reshape(*lead, steps),
            axis=-1,
            group_size=128,
        )
        weights = ck.QuantizedArray.encode(
            normal((groups, n, k), DTYPE),
            ck.float8_e4m3,
            scales=xp.ones((groups, blocks, steps), xp.float32),
            axis=(1, 2),
            group_size=128,
        )
        out = xp.zeros((*lead, n), normal((1,), DTYPE).dtype)
        where: dict[str, Any] = (
            {"expert_counts": xp.asarray(counts)}
            if padded
            else {"expert_offsets": _offsets(counts)}
        )

        def expected() -> Any:
            wide = (array.decode("bfloat16") for array in (x, weights))
            return reference.grouped_gemm(*wide, **where)

        return Workload(
            {"cukit": lambda: partial(grouped_gemm_fp8, x, weights, **where, out=out)}, expected
        )

    name = f"{groups} x {rows}, {n}x{k}{' set aside' if padded else ''}"
    moved = groups * rows * (2 * n + k) + groups * n * k
    flops = 2.0 * groups * rows * n * k
    return Case(FAMILY, "grouped_gemm_fp8", name, "float8_e4m3", build, flops=flops, bytes=moved)


def _case(
    op: str,
    name: str,
    build: Callable[[], Workload],
    groups: int,
    rows: int,
    n: int,
    k: int,
    products: int = 1,
) -> Case:
    elements = groups * rows * (n + k) + groups * n * k
    return Case(
        FAMILY,
        op,
        name,
        DTYPE,
        build,
        flops=2.0 * products * groups * rows * n * k,
        bytes=products * elements * itemsize(DTYPE),
    )


def _slices(counts: np.ndarray[Any, Any]) -> list[slice]:
    ends = np.cumsum(counts).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]


def _offsets(counts: np.ndarray[Any, Any]) -> Any:
    return array_module().asarray(np.array([0, *np.cumsum(counts)], np.int32))


def _loop_impls(out: Any, x: Any, weights: Any, places: list[Any]) -> dict[str, Callable[[], Call]]:
    """cuBLAS, one call per group; places: rows of each group, or (group, count) with a capacity."""

    def factory() -> Call:
        torch = peers.torch()
        result, own, matrices = (peers.to_torch(a) for a in (out, x, weights))
        views = [
            (own[p], matrices[g].T, result[p])
            if isinstance(p, slice)
            else (own[g, : p[1]], matrices[g].T, result[g, : p[1]])
            for g, p in enumerate(places)
        ]

        def call() -> Any:
            for rows, matrix, into in views:
                torch.mm(rows, matrix, out=into)
            return result

        return call

    return {"torch-loop": factory}


def _torch_grouped(x: Any, weights: Any, counts: Any, gated: bool = False) -> Call:
    """torch's own grouped product."""
    torch: ModuleType = peers.torch()
    if not hasattr(torch, "_grouped_mm"):
        raise PeerMissing("torch has no _grouped_mm")
    own, matrices = peers.to_torch(x), peers.to_torch(weights).transpose(1, 2)
    ends = torch.from_numpy(np.cumsum(counts).astype(np.int32)).cuda()
    silu = torch.nn.functional.silu

    def call() -> Any:
        y = torch._grouped_mm(own, matrices, offs=ends)
        if not gated:
            return y
        half = y.shape[-1] // 2
        return silu(y[:, :half]) * y[:, half:]

    return call
