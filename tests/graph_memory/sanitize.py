"""Groups for `tests.sanitize`: retrievals of every layout of queries, diffusion, its gradients."""

from __future__ import annotations

import numpy as np

from cukit import graph_memory
from tests.contract import random, to_device
from tests.graph_memory.test_diffusion import graph
from tests.graph_memory.test_retrieve import SIZES
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


GROUPS = {
    "retrieval": Group(retrieval, shares=True, quick=True),
    "diffusion": Group(diffusion, quick=True),
}
