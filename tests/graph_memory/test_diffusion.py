"""graph_diffusion: compared with dense powers of T, invariants, column slices, gradients."""

from __future__ import annotations

from math import exp, factorial

import numpy as np
import pytest

from cukit.core.device import TYPICAL_DEVICES
from cukit.errors import ArrayError, ArrayShapeError, ConfigError
from cukit.graph_memory import Transition, graph_diffusion, graph_diffusion_backward, transpose
from cukit.graph_memory import diffusion as module
from cukit.graph_memory.diffusion import DiffuseConfig, plan_diffusion
from cukit.reference import graph_memory as reference
from tests.contract import check_against_reference, check_gradient, random, to_device, to_host

SIZES = [(1, 8), (37, 24), (70, 129), (200, 64)]  # nodes, dim


def graph(rng, num_nodes, most=12, normalised=True, dtype=np.float32):
    """Rows of various degrees, including 0 and more than the lanes of a warp."""
    degrees = rng.integers(0, min(most, num_nodes) + 1, num_nodes)
    degrees[num_nodes // 2] = min(num_nodes, 45)
    offsets = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int32)
    columns = [rng.choice(num_nodes, degree, replace=False) for degree in degrees]
    values = rng.random(offsets[-1])
    if normalised:
        sums = np.add.reduceat(np.append(values, 0), offsets[:-1])
        values /= np.repeat(np.where(degrees, sums, 1), degrees)
    return Transition(offsets, np.concatenate(columns).astype(np.int32), values.astype(dtype))


def dense(transition, num_nodes):
    matrix = np.zeros((num_nodes, num_nodes))
    offsets, columns, values = transition
    np.add.at(matrix, (np.repeat(np.arange(num_nodes), np.diff(offsets)), columns), values)
    return matrix


def call(function, **options):
    """`function`, with the transition passed as three arrays after the others."""

    def run(*arrays):
        *first, offsets, columns, values = arrays
        return function(*first, Transition(offsets, columns, values), **options)

    return run


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("method", ["pagerank", "heat"])
def test_matches_reference(device, rng, size, dtype, method):
    memory = random(rng, size, dtype)
    steps = 4 if dtype == "float32" else 3
    check_against_reference(
        call(graph_diffusion, steps=steps, method=method),
        call(reference.graph_diffusion, steps=steps, method=method),
        (memory, *graph(rng, size[0])),
        device=device,
        atol=None if dtype == "float32" else 3 * {"float16": 1e-3, "bfloat16": 8e-3}[dtype],
    )


def test_pagerank_equals_its_series(rng):
    transition, memory = graph(rng, 20, dtype=np.float64), rng.standard_normal((20, 3))
    matrix = dense(transition, 20)
    want, power = 0.0, memory
    for _ in range(6):
        want, power = want + 0.3 * power, 0.7 * matrix @ power
    got = graph_diffusion(memory, transition, steps=6, restart=0.3)
    np.testing.assert_allclose(got, want + power, rtol=1e-12, atol=1e-12)


def test_heat_equals_its_series(rng):
    transition, memory = graph(rng, 20, dtype=np.float64), rng.standard_normal((20, 3))
    matrix, power, want = dense(transition, 20), memory, 0.0
    for term in range(30):
        want, power = want + exp(-2.5) * 2.5**term / factorial(term) * power, matrix @ power
    got = graph_diffusion(memory, transition, steps=29, method="heat", time=2.5)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["pagerank", "heat"])
def test_conserved_quantities(device, rng, method):
    """If rows of T sum to 1, constants are preserved; if columns do, the sum over the nodes is."""
    degrees = 8
    offsets = np.arange(51, dtype=np.int32) * degrees
    columns = np.stack([rng.permutation(50) for _ in range(degrees)], axis=1).astype(np.int32)
    doubly_stochastic = Transition(
        offsets, columns.ravel(), np.full(50 * degrees, 1 / degrees, np.float32)
    )
    memory = random(rng, (50, 16), "float32")
    placed = Transition(*to_device(device, *doubly_stochastic))
    constant, placed_memory = to_device(device, np.full((50, 16), 0.75, np.float32), memory)
    np.testing.assert_allclose(
        to_host(graph_diffusion(constant, placed, method=method)), 0.75, rtol=1e-6
    )
    sums = to_host(graph_diffusion(placed_memory, placed, method=method)).sum(axis=0)
    np.testing.assert_allclose(sums, memory.sum(axis=0), atol=1e-5)


def test_slices_do_not_change_bits(device, rng, monkeypatch):
    if device == "cpu":
        pytest.skip("a requirement of the kernels")
    transition = Transition(*to_device(device, *graph(rng, 60)))
    (memory,) = to_device(device, random(rng, (60, 200), "bfloat16"))
    results = set()
    for lanes, together in ((8, 1), (8, 4), (16, 1), (32, 2)):
        monkeypatch.setattr(
            module,
            "plan_diffusion",
            lambda *args, lanes=lanes, together=together: DiffuseConfig(
                "bfloat16", 8, lanes, together
            ),
        )
        module._prepare.forget()
        results.add(to_host(graph_diffusion(memory, transition, steps=3)).tobytes())
    module._prepare.forget()
    assert len(results) == 1


def test_nan_spreads_only_along_edges(device, rng):
    """Rows without edges to a NaN node are unaffected, as are rows of degree 0."""
    offsets = np.array([0, 1, 1, 3], np.int32)
    transition = Transition(offsets, np.array([2, 1, 2], np.int32), np.ones(3, np.float32))
    memory = random(rng, (3, 16), "float32")
    memory[0] = np.nan
    out = to_host(
        graph_diffusion(
            to_device(device, memory)[0], Transition(*to_device(device, *transition)), steps=3
        )
    )
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1:]).all()


def test_zero_steps_and_empty_arrays(device, rng):
    memory, transition = random(rng, (9, 8), "float32"), graph(rng, 9)
    placed = Transition(*to_device(device, *transition))
    (on_device,) = to_device(device, memory)
    np.testing.assert_array_equal(to_host(graph_diffusion(on_device, placed, steps=0)), memory)
    empty = Transition(*to_device(device, np.zeros(1, np.int32), *graph(rng, 9)[1:]))
    empty = empty._replace(columns=empty.columns[:0], values=empty.values[:0])
    assert graph_diffusion(on_device[:0], empty).shape == (0, 8)


# Backward --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["pagerank", "heat"])
def test_backward_matches_reference(device, rng, size, dtype, method):
    memory, grad = random(rng, size, dtype), random(rng, size, dtype)
    check_against_reference(
        call(graph_diffusion_backward, steps=3, method=method),
        call(reference.graph_diffusion_backward, steps=3, method=method),
        (grad, memory, *graph(rng, size[0])),
        device=device,
        names=("grad_memory", "grad_values"),
        atol=None if dtype == "float32" else 0.03,
    )


@pytest.mark.parametrize("method", ["pagerank", "heat"])
def test_gradients_match_finite_differences(rng, method):
    offsets, columns, values = graph(rng, 14, dtype=np.float64)

    def forward(memory, values):
        transition = Transition(offsets, columns, values)
        return graph_diffusion(memory, transition, steps=4, method=method, time=2.0)

    def backward(grad, memory, values):
        transition = Transition(offsets, columns, values)
        return graph_diffusion_backward(grad, memory, transition, steps=4, method=method, time=2.0)

    check_gradient(forward, backward, (rng.standard_normal((14, 5)), values), rng)


def test_a_given_transpose_is_used(device, rng):
    memory, grad = random(rng, (30, 16), "float32"), random(rng, (30, 16), "float32")
    transition = graph(rng, 30)
    back = transpose(transition)
    np.testing.assert_array_equal(dense(back, 30), dense(transition, 30).T)
    placed = [Transition(*to_device(device, *each)) for each in (transition, back)]
    arrays = to_device(device, grad, memory)
    first = graph_diffusion_backward(*arrays, placed[0], steps=2, values=False)
    again = graph_diffusion_backward(
        *arrays, placed[0], transposed=placed[1], steps=2, values=False
    )
    assert first[1] is None
    np.testing.assert_array_equal(to_host(first[0]), to_host(again[0]))
    if device == "cpu":
        return  # the reference computes the transpose itself
    zeros = placed[1]._replace(values=placed[1].values * 0)
    other = graph_diffusion_backward(*arrays, placed[0], transposed=zeros, steps=2, values=False)
    assert (to_host(other[0]) != to_host(first[0])).any()


# Errors and the plan ---------------------------------------------------------------------------


def test_errors_name_the_argument(rng):
    memory, transition = random(rng, (9, 8), "float32"), graph(rng, 9)
    with pytest.raises(ArrayError, match="transition must be a Transition, got tuple"):
        graph_diffusion(memory, tuple(transition))
    with pytest.raises(ArrayShapeError, match=r"transition.row_offsets must have shape \(9,\)"):
        graph_diffusion(memory[:8].copy(), transition)
    wrong = transition._replace(columns=transition.columns + 9)
    with pytest.raises(ArrayError, match=r"transition.columns must be 0 to 8, got 9 to"):
        graph_diffusion(memory, wrong)
    wrong = transition._replace(row_offsets=transition.row_offsets[::-1].copy())
    with pytest.raises(ArrayError, match=r"^graph_diffusion: .*row_offsets must ascend from 0"):
        graph_diffusion(memory, wrong)
    for options in ({"steps": -1}, {"restart": 1.5}, {"method": "cold"}, {"time": np.nan}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            graph_diffusion(memory, transition, **options)


def test_the_plan_keeps_slices_in_l2():
    device = TYPICAL_DEVICES["sm_90"]
    config = plan_diffusion(65536, 65536 * 32, 256, "bfloat16", 2, 8, device)
    assert config == DiffuseConfig("bfloat16", 8, 8, 1)
    small = plan_diffusion(1000, 32000, 256, "bfloat16", 2, 8, device)
    assert small == DiffuseConfig("bfloat16", 8, 32, 1)
    wide = plan_diffusion(1000, 32000, 600, "float32", 4, 4, device)
    assert wide == DiffuseConfig("float32", 4, 32, 5)
