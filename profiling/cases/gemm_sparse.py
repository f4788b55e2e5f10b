"""Cases of block-sparse products and tree summation in `cukit.gemm`.

The peers of block-sparse products are torch's bsr_dense_addmm (Triton), for layouts that it
supports, and the dense product of the same shape in cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cukit import gemm
from cukit.gemm import BlockPattern, BlockSparseMatrix, create_sparse_mask
from cukit.reference import bsr as bsr_reference
from cukit.reference import gemm as gemm_reference
from profiling import peers
from profiling.case import Call, Case, Workload, itemsize
from profiling.data import normal
from profiling.standard_impls import forward_impls

FAMILY = "gemm"
DTYPE = "bfloat16"

# [m, k] of the weight and number of tokens; SMALL_SHAPE is for `cases(small=True)`.
SPARSE_SHAPE = (8192, 8192, 4096)
SMALL_SHAPE = (256, 128, 48)


def cases(small: bool = False) -> list[Case]:
    """Random masks: block rows share block columns only by chance."""
    if small:
        return [
            *(maker(*SMALL_SHAPE, 32, 0.3) for maker in SPARSE_MAKERS),
            tree_case(16, 24, 600, "float32"),
        ]
    densities = [(block, density) for block in (64, 128) for density in (0.1, 0.5)]
    return [
        *(sparse_dense_case(*SPARSE_SHAPE, *each) for each in (*densities, (32, 0.1), (16, 0.1))),
        *(dense_sparse_case(*SPARSE_SHAPE, block, 0.1) for block in (64, 128)),
        *(sampled_case(*SPARSE_SHAPE, block, 0.1) for block in (64, 128)),
        tree_case(4096, 4096, 16384, "bfloat16"),
    ]


# ---- Block-sparse ----


def _weight(m: int, k: int, block: int, density: float) -> BlockSparseMatrix:
    pattern = BlockPattern.from_mask(create_sparse_mask((m, k), block, density), block)
    shape = (pattern.num_blocks, block, block)
    return BlockSparseMatrix(normal(shape, DTYPE, scale=(density * k) ** -0.5), pattern)


def _sparse_case(
    name: str, m: int, k: int, n: int, block: int, density: float, build: Callable[[], Workload]
) -> Case:
    return Case(
        family=FAMILY,
        op="bsr_matmul",
        name=f"{name} {m}x{k}x{n} block {block} density {density}",
        dtype=DTYPE,
        build=build,
        flops=2 * m * k * n * density,
        bytes=(m * k * density + k * n + m * n) * itemsize(DTYPE),
    )


def sparse_dense_case(m: int, k: int, n: int, block: int, density: float) -> Case:
    """A sparse weight [m, k] times activations [k, n]."""

    def build() -> Workload:
        weight, x = _weight(m, k, block, density), normal((k, n), DTYPE)

        def torch_bsr() -> Call:
            torch = peers.torch()
            operations = peers.optional("torch.sparse._triton_ops")
            index = (
                torch.from_numpy(each).cuda()
                for each in (weight.pattern.indptr, weight.pattern.indices)
            )
            sparse = torch.sparse_bsr_tensor(
                *index, peers.to_torch(weight.values), size=weight.shape
            )
            dense, start = peers.to_torch(x), torch.zeros(m, n, dtype=torch.bfloat16, device="cuda")
            return lambda: operations.bsr_dense_addmm(start, sparse, dense, beta=0)

        return Workload(
            impls={
                "cukit": lambda: partial(gemm.bsr_matmul, weight, x),
                "torch-bsr": torch_bsr,
                "torch-dense": lambda: peers.forward(_torch_matmul, weight.to_dense(), x),
            },
            expected=partial(bsr_reference.bsr_matmul, weight, x),
        )

    return _sparse_case("sparse x dense", m, k, n, block, density, build)


def dense_sparse_case(m: int, k: int, n: int, block: int, density: float) -> Case:
    """A linear layer with a sparse weight [m, k] on n tokens."""

    def build() -> Workload:
        weight, x = _weight(m, k, block, density), normal((n, k), DTYPE)
        return Workload(
            impls={
                "cukit": lambda: partial(gemm.bsr_matmul, x, weight, transpose_b=True),
                "torch-dense": lambda: peers.forward(lambda x, w: x @ w.T, x, weight.to_dense()),
            },
            expected=partial(bsr_reference.bsr_matmul, x, weight, transpose_b=True),
        )

    return _sparse_case("dense x sparse", m, k, n, block, density, build)


def sampled_case(m: int, k: int, n: int, block: int, density: float) -> Case:
    """The gradient of the sparse weight. The peer computes the whole dense gradient."""

    def build() -> Workload:
        pattern = _weight(m, k, block, density).pattern
        grad, x = normal((n, m), DTYPE, scale=n**-0.5), normal((n, k), DTYPE)

        def ours() -> Any:
            return gemm.bsr_matmul(grad, x, transpose_a=True, pattern=pattern).values

        def torch_dense() -> Call:
            torch = peers.torch()
            left, right = peers.to_torch(grad), peers.to_torch(x)
            rows, columns = (
                torch.from_numpy(each).cuda().long() for each in (pattern.rows, pattern.indices)
            )
            grid = (m // block, block, k // block, block)
            return lambda: (left.T @ right).reshape(grid).transpose(1, 2)[rows, columns]

        return Workload(
            impls={"cukit": lambda: ours, "torch-dense": torch_dense},
            expected=partial(bsr_reference.bsr_matmul, grad, x, transpose_a=True, pattern=pattern),
        )

    return _sparse_case("blocks of dense x dense", m, k, n, block, density, build)


SPARSE_MAKERS = (sparse_dense_case, dense_sparse_case, sampled_case)


def _torch_matmul(a: Any, b: Any) -> Any:
    return a @ b


# ---- Tree summation ----


def tree_case(m: int, n: int, k: int, dtype: str) -> Case:
    """a [m, k] times b [k, n], in leaves of 512 terms."""

    def build() -> Workload:
        a, b = normal((m, k), dtype), normal((k, n), dtype, scale=k**-0.5)
        return Workload(
            impls=forward_impls(partial(gemm.tree_matmul, a, b), lambda torch: torch.matmul, a, b),
            expected=partial(gemm_reference.matmul, a, b),
        )

    return Case(
        family=FAMILY,
        op="tree_matmul",
        name=f"{m}x{n}x{k}",
        dtype=dtype,
        build=build,
        flops=2 * m * n * k,
        bytes=(m * k + n * k + m * n) * itemsize(dtype),
    )
