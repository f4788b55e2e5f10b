"""Groups for `tests.sanitize`: retrieval; diffusion, reads and writes with their gradients."""

from __future__ import annotations

import numpy as np

from cukit import graph_memory
from tests.contract import random, to_device
from tests.graph_memory.test_diffusion import graph
from tests.graph_memory.test_retrieve import SIZES
from tests.graph_memory.test_write import SIZES as WRITES
from tests.graph_memory.test_write import writes
from tests.sanitize import Group


def retrieval() -> None:
    rng = np.random.default_rng(1)
    for size in SIZES:
        queries = random(rng, (size.queries, size.dim), "bfloat16")
        memory = random(rng, (size.rows, size.dim), "bfloat16")
        graph_memory.retrieve_top_k(*to_device("gpu", queries, memory), size.k)


def diffusion() -> None:
    rng = np.random.default_rng(2)
    for dtype, dim in (("float32", 24), ("bfloat16", 129), ("float16", 200)):
        transition = graph_memory.Transition(*to_device("gpu", *graph(rng, 70)))
        grad, memory = to_device("gpu", *(random(rng, (70, dim), dtype) for _ in range(2)))
        graph_memory.graph_diffusion(memory, transition, steps=2)
        graph_memory.graph_diffusion_backward(grad, memory, transition, steps=2)


def reads_and_writes() -> None:
    rng = np.random.default_rng(3)
    for dtype, size in (("float32", WRITES[2]), ("bfloat16", WRITES[1])):
        memory, indices, values, gates = to_device("gpu", *writes(rng, size, dtype))
        out, totals = graph_memory.memory_write(memory, indices, values, gates, keep=True)
        graph_memory.memory_write_backward(out, memory, out, indices, values, gates, totals)
    queries, memory = to_device("gpu", *(random(rng, (n, 64), "float16") for n in (5, 1024)))
    out, lse = graph_memory.memory_read(queries, memory, return_lse=True)
    graph_memory.memory_read_backward(out, queries, memory, out, lse)


GROUPS = {
    "reads and writes": Group(reads_and_writes),
    "retrieval": Group(retrieval, shares=True, quick=True),
    "diffusion": Group(diffusion, quick=True),
}
