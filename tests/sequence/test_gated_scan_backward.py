"""gated_scan_backward: finite differences, the reference, packed sequences, extreme decays."""

from __future__ import annotations

import itertools
from importlib import import_module

import numpy as np
import pytest

import cukit
from cukit.errors import ArrayDtypeError, ArrayShapeError, ConfigError
from cukit.reference import sequence as reference
from cukit.sequence import gated_scan_backward
from cukit.sequence._plan import HeadRange
from tests.contract import another_order, check_gradient, random, to_device, to_host
from tests.quick_run import possible
from tests.sequence.test_gated_scan import LARGE, SIZES, Size, distance, inputs

ERROR = {"float16": 1e-3, "bfloat16": 6e-3}
"""||gradient - exact|| / ||exact||. Scores, states and their gradients are rounded to the inputs'
dtype before they are multiplied."""

NAMES = ("x", "b", "c", "log_decay", "initial_state")
MODULE = import_module("cukit.sequence.gated_scan_backward")
GiB = 1 << 30

PASSES = [
    (Size(2, 130, 5, 1, 24, 40), 2),
    (Size(1, 97, 6, 3, 72, 64), 5),  # whole groups
    (Size(1, 300, 4, 2, 64, 72, (0, 1, 64, 200, 35, 0)), 1),
    (Size(1, 643, 3, 1, 64, 64), 2),  # split over segments
]
"""Sizes, and the number of heads for which the workspace suffices."""


def problem(rng, size, dtype, decay=0.2, *, channels=False):
    """grad_y, grad_final_state, and the forward's arguments."""
    arrays = inputs(rng, size, dtype, decay, channels=channels)
    grad_final = random(rng, arrays[4].shape, "float32")
    return random(rng, arrays[0].shape, dtype), grad_final, arrays


def call(function, grad_y, grad_final, arrays, cu_seqlens, **options):
    x, b, c, decay, state = arrays
    states = {"grad_final_state": grad_final, "initial_state": state}
    return function(grad_y, x, b, c, decay, **states, cu_seqlens=cu_seqlens, **options)


def run(device, grad_y, grad_final, arrays, cu_seqlens):
    """The gradients; checks that a second run is bitwise equal."""
    grad_y, grad_final, cu_seqlens, *arrays = to_device(
        device, grad_y, grad_final, cu_seqlens, *arrays
    )
    runs = []
    for repeat in range(2):
        with another_order(device, repeat):
            runs.append(call(gated_scan_backward, grad_y, grad_final, arrays, cu_seqlens))
    for first, again in zip(*runs, strict=True):
        assert to_host(first).tobytes() == to_host(again).tobytes()
    return runs[0]


def exact(grad_y, grad_final, arrays, cu_seqlens, device="cpu"):
    """The reference's gradients in float64, computed on `device`."""
    wide = [array.astype(np.float64) for array in (grad_y, grad_final, *arrays)]
    grad_y, grad_final, *wide = to_device(device, *wide)
    result = call(reference.gated_scan_backward, grad_y, grad_final, wide, cu_seqlens)
    return [to_host(gradient) for gradient in result]


def check(got, wide, dtype):
    for name, gradient, expected in zip(NAMES, got, wide, strict=True):
        error = distance(gradient, expected)
        assert error < ERROR[dtype], f"{name}: {error}"


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *((size, "bfloat16") for size in SIZES + LARGE),
        *((size, "float16") for size in (SIZES[2], LARGE[0])),
    ],
    ids=str,
)
@possible(lambda device, size: device == "gpu" or (device == "emulator" and size in SIZES))
def test_matches_reference(device, rng, size, dtype):
    grad_y, grad_final, arrays = problem(rng, size, dtype)
    got = run(device, grad_y, grad_final, arrays, size.cu_seqlens)
    assert [gradient.dtype for gradient in got[:3]] == [arrays[0].dtype] * 3
    check(got, exact(grad_y, grad_final, arrays, size.cu_seqlens, device), dtype)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_gradients_match_finite_differences(rng, chunk):
    """Gradients of outputs and final state together, with several chunk sizes; two heads share b
    and c."""
    size = Size(2, 23, 4, 2, 6, 5)
    arrays = [array.astype(np.float64) for array in inputs(rng, size, "float32")]
    split = int(np.prod(arrays[0].shape))

    def forward(x, b, c, decay, state):
        scan = reference.gated_scan(x, b, c, decay, initial_state=state, chunk=chunk)
        return np.concatenate([scan.y.ravel(), scan.final_state.ravel()])

    def backward(grad, x, b, c, decay, state):
        grad_y, grad_final = grad[:split].reshape(x.shape), grad[split:].reshape(state.shape)
        return tuple(
            call(
                reference.gated_scan_backward,
                grad_y,
                grad_final,
                (x, b, c, decay, state),
                None,
                chunk=chunk,
            )
        )

    check_gradient(forward, backward, arrays, rng)


def test_packed_sequences_match_separate_calls(device, rng):
    size = SIZES[4]
    grad_y, grad_final, arrays = problem(rng, size, "bfloat16")
    together = [to_host(g) for g in run(device, grad_y, grad_final, arrays, size.cu_seqlens)]
    for number, (begin, end) in enumerate(itertools.pairwise(size.cu_seqlens)):
        grad, *part = (np.ascontiguousarray(array[:, begin:end]) for array in (grad_y, *arrays[:4]))
        state, final = (array[number : number + 1].copy() for array in (arrays[4], grad_final))
        alone = run(device, grad, final, (*part, state), None)
        for gradient, whole in zip(alone[:4], together[:4], strict=True):
            assert distance(gradient, whole[:, begin:end]) < 1e-5
        assert distance(alone[4], together[4][number : number + 1]) < 1e-5


def test_extreme_decays(device, rng):
    """A decay of 0 passes no gradient back and causes no NaN; clamped log decays have a gradient
    of 0."""
    size = Size(1, 200, 2, 2, 16, 16)
    grad_y, grad_final, arrays = problem(rng, size, "bfloat16", decay=0.01)
    decay = arrays[3]
    decay[:, 70], decay[:, 130], decay[:, 150] = -1e4, -np.inf, 0.5
    decay[:, 20:40] = 0
    grad_y[:, :70] = 0
    got = run(device, grad_y, grad_final, arrays, None)
    check(got, exact(grad_y, grad_final, arrays, None), "bfloat16")
    of_decay = to_host(got.log_decay)
    assert not of_decay[:, [70, 130, 150]].any()
    assert of_decay[:, 71:130].all()
    assert not to_host(got.x)[:, :70].any()
    assert not to_host(got.initial_state).any()


def test_strong_decays_have_small_gradients(device, rng):
    """The gradients must not be computed as differences of large sums, which would cancel."""
    size = Size(1, 130, 1, 1, 64, 64)
    grad_y, grad_final, arrays = problem(rng, size, "bfloat16")
    arrays[3][...] = -30.0
    wide = exact(grad_y, grad_final, arrays, None)
    got = run(device, grad_y, grad_final, arrays, None)
    assert distance(got.log_decay, wide[3]) < 2e-2
    assert np.abs(wide[3]).max() < 1e-9


def test_nan_stays_in_its_head(device, rng):
    size = Size(1, 100, 3, 3, 16, 16)
    grad_y, grad_final, arrays = problem(rng, size, "bfloat16")
    grad_y[0, 80, 1] = np.nan
    for gradient in run(device, grad_y, grad_final, arrays, None)[:4]:
        found = to_host(gradient).astype(np.float32)
        assert np.isnan(found[0, :, 1]).any()
        assert not np.isnan(found[0, :, [0, 2]]).any()


def test_without_states(device, rng):
    size = Size(2, 70, 2, 1, 16, 16)
    grad_y, grad_final, arrays = problem(rng, size, "float16")
    placed = to_device(device, grad_y, *arrays[:4])
    zeros = [np.zeros_like(grad_final), (*arrays[:4], np.zeros_like(arrays[4]))]
    check(gated_scan_backward(*placed), exact(grad_y, *zeros, None), "float16")


# Passes over the heads -------------------------------------------------------------------------


@pytest.fixture
def limit_workspace(monkeypatch):
    """A function that limits the workspace to that of `heads` heads, clears the op's plans, and
    returns the number of passes."""

    def limit(size, heads, channels):
        sequences = size.batch if size.lengths is None else len(size.lengths)
        shape = (sequences, size.heads, size.state_dim, size.head_dim)
        tokens = size.batch * size.seq_len
        per_head = MODULE.workspace_per_head(tokens, shape, channels=channels)
        monkeypatch.setattr(MODULE, "WORKSPACE_BYTES", heads * per_head)
        MODULE._prepare.forget()
        return len(MODULE.plan_passes(size.heads, size.groups, per_head))

    MODULE._prepare.forget()
    yield limit
    MODULE._prepare.forget()


def check_passes(device, rng, size, heads, channels, limit_workspace):
    """Gradients of several passes equal those of one pass bitwise: the segments are the same."""
    grad_y, grad_final, arrays = problem(rng, size, "bfloat16", 0.05, channels=channels)
    whole = run(device, grad_y, grad_final, arrays, size.cu_seqlens)
    assert limit_workspace(size, heads, channels) > 1
    got = run(device, grad_y, grad_final, arrays, size.cu_seqlens)
    check(got, exact(grad_y, grad_final, arrays, size.cu_seqlens), "bfloat16")
    for gradient, expected in zip(got, whole, strict=True):
        assert to_host(gradient).tobytes() == to_host(expected).tobytes()


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(("size", "heads"), PASSES, ids=str)
@possible(lambda device: device == "gpu")
def test_several_passes_equal_one_pass(device, rng, size, heads, channels, limit_workspace):
    check_passes(device, rng, size, heads, channels, limit_workspace)


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(("size", "heads"), PASSES, ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_passes_of_each_class(rng, arch, size, heads, channels, limit_workspace):
    with cukit.backend("emulator", arch=arch):
        check_passes("emulator", rng, size, heads, channels, limit_workspace)


@possible(lambda device: device == "gpu")
def test_passes_match_the_reference(device, rng, limit_workspace):
    """With many segments; their boundaries differ from those of a single pass."""
    size = LARGE[2]
    grad_y, grad_final, arrays = problem(rng, size, "bfloat16")
    assert limit_workspace(size, 3, False) == 6
    got = run(device, grad_y, grad_final, arrays, size.cu_seqlens)
    check(got, exact(grad_y, grad_final, arrays, size.cu_seqlens, device), "bfloat16")


def test_the_passes():
    tokens = 65536
    per_head = MODULE.workspace_per_head(tokens, (1, 128, 128, 64), channels=False)
    passes = MODULE.plan_passes(128, 1, per_head)
    assert passes == tuple(HeadRange(first, 32) for first in range(0, 128, 32))
    sums = 2 * tokens * 128 * 4
    assert 32 * per_head + sums < 1.7 * GiB
    assert MODULE.plan_passes(32, 1, per_head) == (HeadRange(0, 32),)
    assert MODULE.plan_passes(1, 1, 4 * GiB) == (HeadRange(0, 1),)


@pytest.mark.parametrize(
    ("heads", "groups", "most", "sizes"),
    [
        (5, 1, 5, [5]),
        (5, 1, 4, [3, 2]),
        (5, 1, 2, [2, 2, 1]),
        (6, 3, 5, [4, 2]),
        (6, 2, 2, [2, 1, 2, 1]),
        (8, 4, 3, [2, 2, 2, 2]),
        (4, 4, 3, [2, 2]),
    ],
)
def test_passes_are_groups_or_of_one_group(heads, groups, most, sizes):
    passes = MODULE.plan_passes(heads, groups, MODULE.WORKSPACE_BYTES // most)
    assert [part.heads for part in passes] == sizes
    assert [part.first for part in passes] == [sum(sizes[:i]) for i in range(len(sizes))]


def test_errors_name_the_argument(rng):
    grad_y, grad_final, (x, b, c, decay, _) = problem(rng, Size(2, 5, 4, 2, 8, 8), "float32")
    with pytest.raises(ArrayShapeError, match=r"grad_y must have shape \(2, 5, 4, 8\)"):
        gated_scan_backward(grad_y[:1].copy(), x, b, c, decay)
    with pytest.raises(ArrayDtypeError, match="grad_y must be float32"):
        gated_scan_backward(grad_y.astype(np.float16), x, b, c, decay)
    with pytest.raises(ArrayShapeError, match=r"grad_final_state must have shape \(2, 4, 8, 8\)"):
        gated_scan_backward(grad_y, x, b, c, decay, grad_final_state=grad_final[:1].copy())


def test_limits_of_the_kernel_are_named(device, rng):
    if device == "cpu":
        pytest.skip("the CPU has no such limits")
    grad_y, _, arrays = problem(rng, Size(1, 4, 1, 1, 12, 16), "float16")
    with pytest.raises(ConfigError, match="head_dim must be a multiple of 8"):
        gated_scan_backward(*to_device(device, grad_y, *arrays[:4]))
