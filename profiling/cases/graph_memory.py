"""Cases of `cukit.graph_memory`: brute-force retrieval, diffusion, reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cukit import graph_memory
from cukit.core.arrays import namespace
from cukit.graph_memory import Transition
from cukit.reference import graph_memory as reference
from profiling import peers
from profiling.case import Call, Case, Workload, itemsize
from profiling.data import integers, normal

FAMILY = "graph_memory"
DTYPE = "bfloat16"


def cases(small: bool = False) -> list[Case]:
    """Retrievals (queries, rows, dim, k), graphs (nodes, neighbours, dim, steps), reads (queries,
    rows, dim) and writes (rows, writes, dim)."""
    if small:
        retrievals, graphs = [(3, 500, 32, 8)], [(50, 4, 16, 3)]
        reading, writing = (5, 40, 16), (30, 20, 16)
    else:
        retrievals = [(256, 1_000_000, 128, 64), (1, 1_000_000, 128, 64)]
        graphs = [(65536, 32, 256, 10)]
        reading, writing = (256, 65536, 128), (65536, 16384, 256)
    return [
        *(retrieve_case(*shape) for shape in retrievals),
        *(diffusion_case(*shape) for shape in graphs),
        *(diffusion_backward_case(*shape) for shape in graphs),
        read_case(*reading),
        read_backward_case(*reading),
        write_case(*writing),
        write_backward_case(*writing),
    ]


def retrieve_case(num_queries: int, num_rows: int, dim: int, k: int) -> Case:
    """The top-k scores; torch writes all scores, in bfloat16 or float32."""

    def build() -> Workload:
        queries, memory = normal((num_queries, dim), DTYPE), normal((num_rows, dim), DTYPE)

        def ours() -> Any:
            return graph_memory.retrieve_top_k(queries, memory, k).scores

        def theirs(wide: bool = False, compiled: bool = False) -> Call:
            torch = peers.torch()

            def function(queries: Any, memory: Any) -> Any:
                options = {"out_dtype": torch.float32} if wide else {}
                return torch.topk(torch.mm(queries, memory.T, **options), k).values

            return peers.forward(function, queries, memory, compiled=compiled)

        impls: dict[str, Callable[[], Call]] = {
            "cukit": lambda: ours,
            "torch": theirs,
            "torch-float32": partial(theirs, wide=True),
            "torch-compile": partial(theirs, compiled=True),
        }
        return Workload(
            impls, lambda: reference.retrieve_top_k(queries, memory, k).scores, tolerance=5e-3
        )

    moved = (num_queries + num_rows) * dim * itemsize(DTYPE) + num_queries * k * 8
    return Case(
        FAMILY,
        "retrieve_top_k",
        f"{k} of {num_rows}x{dim}, {num_queries} queries",
        DTYPE,
        build,
        flops=2.0 * num_queries * num_rows * dim,
        bytes=moved,
        measure_memory=True,
    )


def _graph(like: Any, num_nodes: int, neighbours: int) -> Transition:
    """The same number of random neighbours for each node, with equal weights."""
    xp = namespace(like)
    columns = np.random.default_rng(0).integers(0, num_nodes, num_nodes * neighbours)
    return Transition(
        xp.asarray(np.arange(num_nodes + 1, dtype=np.int32) * neighbours),
        xp.asarray(columns.astype(np.int32)),
        xp.full(num_nodes * neighbours, 1 / neighbours, xp.float32),
    )


def gathered_bytes(num_nodes: int, neighbours: int, dim: int, steps: int) -> int:
    """Bytes of all steps. A step reads a row of the state per edge, the edges and the memory, and
    writes the result."""
    edges = num_nodes * neighbours
    rows = (edges + 2 * num_nodes) * dim * itemsize(DTYPE)
    return steps * (rows + 8 * edges + 4 * num_nodes)


def diffusion_case(num_nodes: int, neighbours: int, dim: int, steps: int) -> Case:
    """Personalised PageRank over random neighbours; the peer is cuSPARSE through torch.

    The floor counts one row of the state per edge, as if read from device memory.
    """

    def build() -> Workload:
        memory = normal((num_nodes, dim), DTYPE)
        transition = _graph(memory, num_nodes, neighbours)

        def theirs() -> Call:
            torch = peers.torch()
            offsets, columns, values = map(peers.to_torch, transition)
            matrix = torch.sparse_csr_tensor(
                offsets, columns, values.to(torch.bfloat16), (num_nodes, num_nodes)
            )

            def function(memory: Any) -> Any:
                z = memory
                for _ in range(steps):
                    z = torch.addmm(memory, matrix, z, beta=0.15, alpha=0.85)
                return z

            return peers.forward(function, memory)

        impls: dict[str, Callable[[], Call]] = {
            "cukit": lambda: partial(graph_memory.graph_diffusion, memory, transition, steps=steps),
            "torch-cusparse": theirs,
        }
        expected = partial(reference.graph_diffusion, memory, transition, steps=steps)
        return Workload(impls, expected)

    return Case(
        FAMILY,
        "graph_diffusion",
        f"{num_nodes} nodes, {neighbours} neighbours, {steps} steps, {dim}",
        DTYPE,
        build,
        bytes=gathered_bytes(num_nodes, neighbours, dim, steps),
    )


def diffusion_backward_case(num_nodes: int, neighbours: int, dim: int, steps: int) -> Case:
    """The gradient of the memory: the transposed diffusion."""

    def build() -> Workload:
        memory, grad = (normal((num_nodes, dim), DTYPE) for _ in range(2))
        transition = _graph(memory, num_nodes, neighbours)
        options: dict[str, Any] = {
            "transposed": reference.transpose(transition),
            "steps": steps,
            "values": False,
        }

        def ours() -> Any:
            return graph_memory.graph_diffusion_backward(grad, memory, transition, **options)[0]

        def expected() -> Any:
            return reference.graph_diffusion_backward(grad, memory, transition, **options)[0]

        return Workload({"cukit": lambda: ours}, expected)

    return Case(
        FAMILY,
        "graph_diffusion_backward",
        f"{num_nodes} nodes, {neighbours} neighbours, {steps} steps, {dim}, memory",
        DTYPE,
        build,
        bytes=gathered_bytes(num_nodes, neighbours, dim, steps),
    )


def read_case(num_queries: int, num_rows: int, dim: int) -> Case:
    """Attention of all queries over all rows; the peer is torch."""

    def build() -> Workload:
        queries, memory = normal((num_queries, dim), DTYPE), normal((num_rows, dim), DTYPE)

        def theirs() -> Call:
            attend = peers.torch().nn.functional.scaled_dot_product_attention

            def function(queries: Any, memory: Any) -> Any:
                keys = memory[None, None]
                return attend(queries[None, None], keys, keys)[0, 0]

            return peers.forward(function, queries, memory)

        impls: dict[str, Callable[[], Call]] = {
            "cukit": lambda: partial(graph_memory.memory_read, queries, memory),
            "torch": theirs,
        }
        return Workload(impls, lambda: reference.memory_read(queries, memory), tolerance=2e-2)

    moved = (2 * num_queries + num_rows) * dim * itemsize(DTYPE)
    name = f"{num_queries} queries, {num_rows}x{dim}"
    flops = 4.0 * num_queries * num_rows * dim
    return Case(FAMILY, "memory_read", name, DTYPE, build, flops=flops, bytes=moved)


def read_backward_case(num_queries: int, num_rows: int, dim: int) -> Case:
    """Gradients of queries and memory."""

    def build() -> Workload:
        queries, memory = normal((num_queries, dim), DTYPE), normal((num_rows, dim), DTYPE)
        kept = graph_memory.memory_read(queries, memory, return_lse=True)
        arrays = (normal(queries.shape, DTYPE), queries, memory, *kept)
        return Workload(
            {"cukit": lambda: partial(graph_memory.memory_read_backward, *arrays)},
            lambda: reference.memory_read_backward(*arrays),
            tolerance=2e-2,
        )

    moved = (4 * num_queries + 2 * num_rows) * dim * itemsize(DTYPE)
    name = f"{num_queries} queries, {num_rows}x{dim}"
    flops = 10.0 * num_queries * num_rows * dim
    return Case(FAMILY, "memory_read_backward", name, DTYPE, build, flops=flops, bytes=moved)


def _writes(num_rows: int, num_writes: int, dim: int) -> tuple[Any, ...]:
    memory, values = normal((num_rows, dim), DTYPE), normal((num_writes, dim), DTYPE)
    gates = abs(normal((num_writes,), "float32", 0.3))
    return memory, integers(0, num_rows, (num_writes,)), values, gates


def write_case(num_rows: int, num_writes: int, dim: int) -> Case:
    """Writes to random rows; the peer is torch's index_add, which is not deterministic."""

    def build() -> Workload:
        arrays = _writes(num_rows, num_writes, dim)

        def theirs() -> Call:
            torch = peers.torch()

            def function(memory: Any, indices: Any, values: Any, gates: Any) -> Any:
                totals = torch.zeros(num_rows, device=memory.device)
                totals = totals.index_add(0, indices, gates)
                sums = torch.zeros(memory.shape, device=memory.device)
                sums = sums.index_add(0, indices, gates[:, None] * values.float())
                scale = totals.clamp(min=1)
                kept = 1 - totals / scale
                return (kept[:, None] * memory.float() + sums / scale[:, None]).to(memory.dtype)

            return peers.forward(function, *arrays, compiled=True)

        impls: dict[str, Callable[[], Call]] = {
            "cukit": lambda: partial(graph_memory.memory_write, *arrays),
            "torch-compile": theirs,
        }
        return Workload(impls, lambda: reference.memory_write(*arrays))

    moved = (2 * num_rows + num_writes) * dim * itemsize(DTYPE)
    name = f"{num_writes} writes, {num_rows}x{dim}"
    return Case(FAMILY, "memory_write", name, DTYPE, build, bytes=moved)


def write_backward_case(num_rows: int, num_writes: int, dim: int) -> Case:
    """Gradients of memory, values and gates."""

    def build() -> Workload:
        memory, indices, values, gates = _writes(num_rows, num_writes, dim)
        out, totals = graph_memory.memory_write(memory, indices, values, gates, keep=True)
        grad = normal(memory.shape, DTYPE)
        arrays = (grad, memory, out, indices, values, gates, totals)
        return Workload(
            {"cukit": lambda: partial(graph_memory.memory_write_backward, *arrays)},
            lambda: reference.memory_write_backward(*arrays),
        )

    moved = (2 * num_rows + 4 * num_writes) * dim * itemsize(DTYPE)
    name = f"{num_writes} writes, {num_rows}x{dim}"
    return Case(FAMILY, "memory_write_backward", name, DTYPE, build, bytes=moved)
