"""Cases of block-sparse products, tree summation and mixed depth in `cukit.gemm`.

The peers of block-sparse products are torch's bsr_dense_addmm (Triton), for layouts that it
supports, and the dense product of the same shape in cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from cukit import gemm
from cukit.gemm import BlockPattern, BlockSparseMatrix, create_sparse_mask
from cukit.reference import bsr as bsr_reference
from cukit.reference import depth as depth_reference
from cukit.reference import gemm as gemm_reference
from profiling import peers
from profiling.case import Call, Case, Workload, itemsize
from profiling.data import array_module, normal
from profiling.impls import forward_impls

FAMILY = "gemm"
DTYPE = "bfloat16"

# A weight of 8192 x 8192 on 4096 tokens; and small.
SPARSE_SHAPE = (8192, 8192, 4096)
SMALL_SHAPE = (256, 128, 48)


def cases(small: bool = False) -> list[Case]:
    """Random masks: block rows share block columns only by chance."""
    if small:
        return [
            *(maker(*SMALL_SHAPE, 32, 0.3) for maker in SPARSE_MAKERS),
            tree_case(16, 24, 600, "float32"),
            *(maker(2, 40, 8, 32) for maker in DEPTH_MAKERS),
            adaptive_case(40, 16, 3),
            adaptive_backward_case(40, 16, 3),
        ]
    densities = [(block, density) for block in (64, 128) for density in (0.1, 0.5)]
    return [
        *(sparse_dense_case(*SPARSE_SHAPE, *each) for each in (*densities, (32, 0.1), (16, 0.1))),
        *(dense_sparse_case(*SPARSE_SHAPE, block, 0.1) for block in (64, 128)),
        *(sampled_case(*SPARSE_SHAPE, block, 0.1) for block in (64, 128)),
        tree_case(4096, 4096, 16384, "bfloat16"),
        *(maker(8, 4096, 512, 4096) for maker in DEPTH_MAKERS),
        adaptive_case(8192, 4096, 4),
        adaptive_backward_case(8192, 4096, 4),
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


# ---- Mixture of depths ----


def _depth_case(op: str, shape: tuple[int, int, int, int], rows: int, build: Any) -> Case:
    """rows: number of rows of hidden elements read or written."""
    batch, seq_len, capacity, hidden = shape
    return Case(
        family=FAMILY,
        op=op,
        name=f"{batch}x{seq_len} keep {capacity} of {hidden}",
        dtype=DTYPE,
        build=build,
        bytes=rows * hidden * itemsize(DTYPE) if rows else batch * seq_len * (4 + 4),
    )


def _routing(batch: int, seq_len: int, capacity: int) -> tuple[Any, Any]:
    logits = normal((batch, seq_len), "float32")
    return logits, gemm.depth_router(logits, capacity)


def router_case(batch: int, seq_len: int, capacity: int, hidden: int) -> Case:
    def build() -> Workload:
        logits = normal((batch, seq_len), "float32")

        def torch_router(torch: ModuleType) -> Callable[..., Any]:
            def run(logits: Any) -> Any:
                weights, indices = torch.topk(logits, capacity, dim=1, sorted=False)
                indices, order = indices.sort(dim=1)
                slots = torch.full(logits.shape, -1, dtype=torch.int32, device=logits.device)
                numbers = torch.arange(capacity, dtype=torch.int32, device=logits.device)
                slots.scatter_(1, indices, numbers.expand(batch, -1))
                return indices.int(), slots, weights.gather(1, order).sigmoid()

            return run

        return Workload(
            impls=forward_impls(partial(gemm.depth_router, logits, capacity), torch_router, logits),
            expected=partial(depth_reference.depth_router, logits, capacity),
        )

    return _depth_case("depth_router", (batch, seq_len, capacity, hidden), 0, build)


def router_backward_case(batch: int, seq_len: int, capacity: int, hidden: int) -> Case:
    def build() -> Workload:
        _, routing = _routing(batch, seq_len, capacity)
        grad = normal((batch, capacity), "float32")
        arguments = (grad, routing.weights, routing.slots)
        return Workload(
            impls={"cukit": lambda: partial(gemm.depth_router_backward, *arguments)},
            expected=partial(depth_reference.depth_router_backward, *arguments),
        )

    return _depth_case("depth_router_backward", (batch, seq_len, capacity, hidden), 0, build)


def gather_case(batch: int, seq_len: int, capacity: int, hidden: int) -> Case:
    def build() -> Workload:
        _, routing = _routing(batch, seq_len, capacity)
        x = normal((batch, seq_len, hidden), DTYPE)

        def torch_gather() -> Call:
            index = peers.to_torch(routing.indices).long()[:, :, None].expand(-1, -1, hidden)
            return peers.forward(lambda x: x.gather(1, index), x)

        return Workload(
            impls={
                "cukit": lambda: partial(gemm.depth_gather, x, routing.indices),
                "torch-eager": torch_gather,
            },
            expected=partial(depth_reference.depth_gather, x, routing.indices),
        )

    rows = 2 * batch * capacity
    return _depth_case("depth_gather", (batch, seq_len, capacity, hidden), rows, build)


def combine_case(batch: int, seq_len: int, capacity: int, hidden: int) -> Case:
    def build() -> Workload:
        _, routing = _routing(batch, seq_len, capacity)
        x, y = normal((batch, seq_len, hidden), DTYPE), normal((batch, capacity, hidden), DTYPE)
        arguments = (x, y, routing.weights, routing.slots)

        def torch_combine() -> Call:
            index = peers.to_torch(routing.indices).long()[:, :, None].expand(-1, -1, hidden)
            weights = peers.to_torch(routing.weights)[:, :, None].bfloat16()
            return peers.forward(lambda x, y: x.scatter_add(1, index, weights * y), x, y)

        return Workload(
            impls={
                "cukit": lambda: partial(gemm.depth_combine, *arguments),
                "torch-eager": torch_combine,
            },
            expected=partial(depth_reference.depth_combine, *arguments),
        )

    rows = batch * (2 * seq_len + capacity)
    return _depth_case("depth_combine", (batch, seq_len, capacity, hidden), rows, build)


def combine_backward_case(batch: int, seq_len: int, capacity: int, hidden: int) -> Case:
    def build() -> Workload:
        _, routing = _routing(batch, seq_len, capacity)
        grad = normal((batch, seq_len, hidden), DTYPE)
        y = normal((batch, capacity, hidden), DTYPE)
        arguments = (grad, y, routing.weights, routing.indices)
        return Workload(
            impls={"cukit": lambda: partial(gemm.depth_combine_backward, *arguments)},
            expected=partial(depth_reference.depth_combine_backward, *arguments),
        )

    rows = 3 * batch * capacity
    return _depth_case("depth_combine_backward", (batch, seq_len, capacity, hidden), rows, build)


DEPTH_MAKERS = (
    router_case,
    router_backward_case,
    gather_case,
    combine_case,
    combine_backward_case,
)


# ---- Per-token depth ----


def _adaptive_inputs(tokens: int, hidden: int, layers: int) -> tuple[Any, Any, Any]:
    depth = np.random.default_rng(0).integers(0, layers + 1, tokens)
    weights = normal((layers, hidden, hidden), DTYPE, scale=hidden**-0.5)
    return normal((tokens, hidden), DTYPE), weights, depth


def _adaptive_case(
    op: str, tokens: int, hidden: int, layers: int, products: int, build: Callable[[], Workload]
) -> Case:
    """Uniform depths: on average half of the layers per token. The peer runs all layers."""
    return Case(
        family=FAMILY,
        op=op,
        name=f"{tokens}x{hidden} {layers} layers",
        dtype=DTYPE,
        build=build,
        flops=products * tokens * hidden * hidden * layers,
    )


def adaptive_case(tokens: int, hidden: int, layers: int) -> Case:
    """The peer: the layers on all tokens, and a selection afterwards."""

    def build() -> Workload:
        x, weights, depth = _adaptive_inputs(tokens, hidden, layers)
        masks = array_module().asarray(depth_reference.create_adaptive_depth_mask(depth, layers))

        def torch_all(torch: ModuleType) -> Callable[..., Any]:
            chosen = peers.to_torch(masks)[:, :, None]

            def run(x: Any, weights: Any) -> Any:
                for layer in range(layers):
                    y = torch.nn.functional.silu(x @ weights[layer].T)
                    x = torch.where(chosen[layer], y, x)
                return x

            return run

        impls = forward_impls(
            partial(gemm.adaptive_depth, x, weights, depth, "silu"), torch_all, x, weights
        )
        placed = array_module().asarray(depth)
        expected = partial(depth_reference.adaptive_depth, x, weights, placed, "silu")
        return Workload(impls=impls, expected=expected, tolerance=3e-2)

    return _adaptive_case("adaptive_depth", tokens, hidden, layers, 1, build)


def adaptive_backward_case(tokens: int, hidden: int, layers: int) -> Case:
    def build() -> Workload:
        x, weights, depth = _adaptive_inputs(tokens, hidden, layers)
        grad = normal((tokens, hidden), DTYPE)
        _, states = gemm.adaptive_depth(x, weights, depth, "silu", return_states=True)
        ours = partial(gemm.adaptive_depth_backward, grad, weights, states, "silu")
        placed = array_module().asarray(depth)
        expected = partial(
            depth_reference.adaptive_depth_backward, grad, x, weights, placed, "silu"
        )
        return Workload(impls={"cukit": lambda: ours}, expected=expected, tolerance=3e-2)

    return _adaptive_case("adaptive_depth_backward", tokens, hidden, layers, 2, build)
