"""Transition matrices from adjacency and similarity, and GraphDiffusionMemory."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.errors import ArrayDtypeError, ArrayError, ArrayShapeError, ConfigError
from cukit.graph_memory import (
    GraphDiffusionMemory,
    Transition,
    graph_diffusion,
    graph_diffusion_backward,
    memory_read,
    transition_from_adjacency,
    transition_from_similarity,
    transition_from_similarity_backward,
)
from tests.contract import check_gradient, random, to_device, to_host
from tests.graph_memory.test_diffusion import dense, graph


def host(transition):
    return Transition(*map(to_host, transition))


@pytest.mark.parametrize("normalize", ["row", "softmax", "symmetric"])
@pytest.mark.parametrize("sparse", [False, True])
def test_adjacency(device, rng, normalize, sparse):
    matrix = np.where(rng.random((12, 12)) < 0.4, rng.random((12, 12)), 0).astype(np.float32)
    matrix += matrix.T
    matrix[5] = matrix[:, 5] = 0
    wide = matrix.astype(np.float64)
    if normalize == "softmax":
        want = np.where(wide > 0, np.exp(wide), 0)
        want /= np.maximum(want.sum(axis=1, keepdims=True), 1e-30)
    else:
        sums = np.where(wide.sum(axis=1) == 0, 1, wide.sum(axis=1))
        power = -0.5 if normalize == "symmetric" else -1
        want = sums[:, None] ** power * wide
        want = want * sums**-0.5 if normalize == "symmetric" else want
    given = to_device(device, matrix)[0]
    if sparse:
        rows, columns = np.nonzero(matrix)
        ends = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=12))]).astype(np.int32)
        given = Transition(
            *to_device(device, ends, columns.astype(np.int32), matrix[rows, columns])
        )
    got = host(transition_from_adjacency(given, normalize=normalize))
    assert got.values.dtype == np.float32
    np.testing.assert_allclose(dense(got, 12), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("normalize", ["softmax", "symmetric"])
@pytest.mark.parametrize("self_loops", [False, True])
def test_similarity(device, rng, normalize, self_loops):
    memory, k = random(rng, (40, 16), "float16" if device != "cpu" else "float32"), 5
    (placed,) = to_device(device, memory)
    got = host(
        transition_from_similarity(placed, k, scale=0.5, normalize=normalize, self_loops=self_loops)
    )
    scores = 0.5 * memory.astype(np.float64) @ memory.astype(np.float64).T
    if not self_loops:
        np.fill_diagonal(scores, -np.inf)
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    weights = np.zeros((40, 40))
    np.put_along_axis(weights, chosen, np.exp(np.take_along_axis(scores, chosen, 1)), axis=1)
    if normalize == "softmax":
        want = weights / weights.sum(axis=1, keepdims=True)
        np.testing.assert_array_equal(got.columns.reshape(40, k), chosen)
    else:
        weights = (weights + weights.T) / 2
        roots = weights.sum(axis=1) ** -0.5
        want = roots[:, None] * weights * roots
    np.testing.assert_allclose(dense(got, 40), want, rtol=1e-4, atol=1e-6)


def test_gradients_go_through_the_graph_of_the_memory(rng):
    """Diffusion over the memory's own graph: neighbours are constant, edge weights are not."""
    options = {"steps": 3, "restart": 0.2}

    def forward(memory):
        return graph_diffusion(memory, transition_from_similarity(memory, 4, scale=0.3), **options)

    def backward(grad, memory):
        walk = transition_from_similarity(memory, 4, scale=0.3)
        grad_memory, grad_values = graph_diffusion_backward(grad, memory, walk, **options)
        through = transition_from_similarity_backward(grad_values, memory, walk, scale=0.3)
        return grad_memory + through

    check_gradient(forward, backward, (rng.standard_normal((20, 5)),), rng)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_gradient_of_a_similarity(device, rng, dtype):
    memory, k = random(rng, (40, 16), dtype), 4
    (placed,) = to_device(device, memory)
    walk = transition_from_similarity(placed, k)
    grad = random(rng, walk.values.shape, "float32")
    p, g = dense(host(walk), 40), dense(host(walk)._replace(values=grad), 40)
    slopes = p * (g - (p * g).sum(axis=1, keepdims=True)) / 4
    want = (slopes + slopes.T) @ memory.astype(np.float64)
    got = transition_from_similarity_backward(to_device(device, grad)[0], placed, walk)
    assert got.dtype == memory.dtype
    np.testing.assert_allclose(to_host(got).astype(np.float64), want, atol=3e-2)


def test_graph_diffusion_memory_equals_its_ops(device, rng):
    dtype = "float32" if device == "cpu" else "float16"
    memory, queries = random(rng, (40, 64), dtype), random(rng, (3, 64), dtype)
    placed, placed_queries = to_device(device, memory, queries)
    bank = GraphDiffusionMemory.from_similarity(placed, 4, steps=2, restart=0.2)
    diffused = graph_diffusion(placed, bank.transition, steps=2, restart=0.2)
    want = to_host(memory_read(placed_queries, diffused))
    assert to_host(bank.read(placed_queries)).tobytes() == want.tobytes()
    before = to_host(bank.diffused)
    values, gates = random(rng, (2, 64), dtype), np.ones(2, np.float32)
    bank.write(*to_device(device, np.array([3, 9], np.int32), values, gates))
    np.testing.assert_array_equal(to_host(bank.memory)[[3, 9]], values)
    assert not np.array_equal(to_host(bank.diffused), before)
    assert bank.retrieve_top_k(placed_queries, 3).indices.shape == (3, 3)


def test_a_memory_on_given_edges(rng):
    memory = random(rng, (9, 8), "float32")
    bank = GraphDiffusionMemory.from_adjacency(memory, np.eye(9, dtype=np.float32), steps=3)
    np.testing.assert_allclose(bank.diffused, memory, rtol=1e-6)


def test_kernels_reject_a_float64_adjacency(device):
    if device == "cpu":
        pytest.skip("a requirement of the kernels")
    (matrix,) = to_device(device, np.eye(3))
    with pytest.raises(ArrayDtypeError, match="adjacency must be float32, got float64"):
        transition_from_adjacency(matrix)
    ends = np.arange(4, dtype=np.int32)
    edges = Transition(*to_device(device, ends, ends[:3], np.ones(3)))
    with pytest.raises(ArrayDtypeError, match=r"adjacency\.values must be float32"):
        transition_from_adjacency(edges)


def test_errors_name_the_argument(rng):
    memory = random(rng, (9, 8), "float32")
    with pytest.raises(ConfigError, match="normalize"):
        transition_from_adjacency(np.eye(3), normalize="rows")
    with pytest.raises(ArrayShapeError, match=r"adjacency must have shape \(3, 3\)"):
        transition_from_adjacency(np.ones((3, 2)))
    valid = graph(rng, 9)
    wrong = valid._replace(columns=np.full(len(valid.columns), 9, np.int32))
    with pytest.raises(
        ArrayError, match=r"^transition_from_adjacency: .*must be 0 to 8, got 9 to 9"
    ):
        transition_from_adjacency(wrong)
    with pytest.raises(ConfigError, match=r"k must be below the number of rows \(9\), got 9"):
        transition_from_similarity(memory, 9)
    with pytest.raises(ConfigError, match=r"k must be at most the number of rows \(9\), got 10"):
        transition_from_similarity(memory, 10, self_loops=True)
    with pytest.raises(ArrayShapeError, match=r"must have num_nodes \+ 1 ="):
        GraphDiffusionMemory(memory, graph(rng, 8))
