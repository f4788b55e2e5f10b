"""Grouped products: any number of rows, both layouts, every tiling, gradients, errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import cukit
from cukit.core.device import KIB, TYPICAL_DEVICES
from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError, ConfigError
from cukit.gemm import grouped_gated_linear, grouped_gemm, grouped_gemm_backward
from cukit.gemm.dense._linear_plan import Product
from cukit.gemm.grouped import _grouped_plan as grouped_plan
from cukit.gemm.grouped._grouped_launch import GroupedSm80, GroupedSm90
from cukit.gemm.grouped._grouped_plan import GroupedProblem, Layout, plan_grouped_sm80
from cukit.reference import grouped_gemm as reference
from tests.contract import (
    another_order,
    assert_close,
    check_gradient,
    poisoned,
    random,
    to_device,
    to_host,
)
from tests.quick_run import possible

GROUPS = {
    "ragged": [0, 1, 130, 64, 0, 7],
    "none": [0, 0, 0],
    "one": [3],
    "many": [i % 3 for i in range(70)],
}
LARGE = {"large": [1000, 4096, 0, 513, 128, 1, 300, 2000]}
CAPACITY = 140


class Groups:
    """Rows of groups in one of the layouts, with NaN in rows of no group."""

    def __init__(self, rng, counts, fixed_capacity, k, dtype):
        self.counts = np.array(counts, np.int32)
        self.offsets = np.array([0, *np.cumsum(counts)], np.int32)
        self.fixed_capacity = fixed_capacity
        self.capacity = max(CAPACITY, *counts) if max(counts) > CAPACITY else CAPACITY
        groups = len(counts)
        self.lead = (groups, self.capacity) if fixed_capacity else (int(self.offsets[-1]) + 5,)
        self.used = np.zeros(self.lead, bool)
        for group, count in enumerate(counts):
            if fixed_capacity:
                self.used[group, :count] = True
            else:
                self.used[self.offsets[group] : self.offsets[group + 1]] = True
        self.x = self.rows(rng, k, dtype)

    def rows(self, rng, columns, dtype, scale=1.0):
        """Returns [..., columns], with NaN in rows of no group."""
        x = random(rng, (*self.lead, columns), dtype, scale)
        x[~self.used] = np.nan
        return x

    def where(self, device):
        """The argument with the groups' offsets or counts."""
        name, value = (
            ("expert_counts", self.counts)
            if self.fixed_capacity
            else ("expert_offsets", self.offsets)
        )
        return {name: to_device(device, value)[0]}

    @property
    def layout(self):
        rows = int(np.prod(self.lead))
        return Layout(len(self.counts), rows, self.lead[-1], self.fixed_capacity)


def check(device, groups, function, expected, names):
    """Runs `function` twice: compares the rows of groups with the reference, and the bits of both
    runs."""
    wide, low = expected(np.float64), expected(None)
    bits = None
    for repeat in range(2):
        with another_order(device, repeat):
            results = [to_host(result) for result in function()]
        now = []
        for name, got, plain, exact in zip(names, results, low, wide, strict=True):
            by_row = got.shape[: len(groups.lead)] == groups.lead
            used = groups.used if by_row else ...
            assert_close(name, got[used], plain[used], exact[used])
            now.append(got[used].tobytes())
        assert bits in (None, now), f"run {repeat} differs in bits"
        bits = now


@pytest.mark.parametrize("counts", GROUPS | LARGE)
@pytest.mark.parametrize("fixed_capacity", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True])
@possible(lambda device, counts: device == "gpu" or counts in GROUPS)
def test_matches_reference(device, rng, counts, fixed_capacity, dtype, transposed):
    n, k = (136, 72) if counts in GROUPS else (520, 328)
    groups = Groups(rng, (GROUPS | LARGE)[counts], fixed_capacity, k, dtype)
    shape = (len(groups.counts), *((k, n) if transposed else (n, k)))
    weights = random(rng, shape, dtype, scale=k**-0.5)
    placed_x, placed_weights = to_device(device, groups.x, weights)
    out = poisoned(device, (*groups.lead, n), dtype)

    def function():
        where = groups.where(device)
        y = grouped_gemm(placed_x, placed_weights, **where, transpose_weights=transposed, out=out)
        assert y is out
        if device != "cpu":
            assert np.isnan(to_host(y)[~groups.used].astype(np.float32)).all(), "outside all groups"
        return (y,)

    def expected(wide):
        x, w = (a.astype(wide or dtype_of(a)) for a in (groups.x, weights))
        return (reference.grouped_gemm(x, w, **groups.where("cpu"), transpose_weights=transposed),)

    check(device, groups, function, expected, ("y",))


def dtype_of(array):
    return array.dtype


@pytest.mark.parametrize("num_groups", [1, 3])
def test_no_rows(device, num_groups):
    x, weights, grad, offsets = to_device(
        device,
        np.ones((0, 24), np.float16),
        np.ones((num_groups, 16, 24), np.float16),
        np.ones((0, 16), np.float16),
        np.zeros(num_groups + 1, np.int32),
    )
    assert grouped_gemm(x, weights, offsets).shape == (0, 16)
    assert grouped_gated_linear(x, weights, offsets).shape == (0, 8)
    grad_x, grad_weights = grouped_gemm_backward(grad, x, weights, offsets)
    assert grad_x.shape == x.shape
    assert not to_host(grad_weights).any()


@pytest.mark.parametrize("counts", GROUPS | LARGE)
@pytest.mark.parametrize("fixed_capacity", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@possible(lambda device, counts: device == "gpu" or counts in GROUPS)
def test_backward_matches_reference(device, rng, counts, fixed_capacity, dtype):
    """Rows of no group are NaN: they must not enter any sum."""
    n, k = (136, 72) if counts in GROUPS else (520, 328)
    groups = Groups(rng, (GROUPS | LARGE)[counts], fixed_capacity, k, dtype)
    weights = random(rng, (len(groups.counts), n, k), dtype, scale=n**-0.5)
    grad_out = groups.rows(rng, n, dtype)
    placed = to_device(device, grad_out, groups.x, weights)

    def expected(wide):
        arrays = [a.astype(wide or a.dtype) for a in (grad_out, groups.x, weights)]
        return reference.grouped_gemm_backward(*arrays, **groups.where("cpu"))

    check(
        device,
        groups,
        lambda: grouped_gemm_backward(*placed, **groups.where(device)),
        expected,
        ("grad_x", "grad_weights"),
    )


@pytest.mark.parametrize("counts", GROUPS | LARGE)
@pytest.mark.parametrize("fixed_capacity", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("keep", [False, True])
@possible(lambda device, counts: device == "gpu" or counts in GROUPS)
def test_gated_matches_reference(device, rng, counts, fixed_capacity, activation, keep):
    n, k, dtype = (136, 72, "bfloat16") if counts in GROUPS else (520, 328, "bfloat16")
    groups = Groups(rng, (GROUPS | LARGE)[counts], fixed_capacity, k, dtype)
    weights = random(rng, (len(groups.counts), 2 * n, k), dtype, scale=k**-0.5)
    placed = to_device(device, groups.x, weights)

    def function():
        result = grouped_gated_linear(
            *placed, **groups.where(device), activation=activation, keep=keep
        )
        return result if keep else (result,)

    def expected(wide):
        x, w = (a.astype(wide or a.dtype) for a in (groups.x, weights))
        where = groups.where("cpu")
        y = reference.grouped_gated_linear(x, w, **where, activation=activation)
        return (y, reference.grouped_gemm(x, w, **where)) if keep else (y,)

    check(device, groups, function, expected, ("y", "joined")[: 1 + keep])


PROBLEMS = {
    "forward": Product(0, 328, 136, "bfloat16"),
    "transposed": Product(0, 328, 136, "bfloat16", major_b="MN"),
    "gated": Product(0, 328, 136, "bfloat16", activation="silu", gated=True),
    "weights": Product(328, 136, 0, "bfloat16", major_a="MN", major_b="MN"),
}


def problem_of(kind, rows, groups):
    if kind == "weights":
        return GroupedProblem(replace(PROBLEMS[kind], k=rows), groups, ragged="k")
    return GroupedProblem(replace(PROBLEMS[kind], m=rows), groups)


TILINGS = [
    pytest.param(kind, tiling, id=f"{kind}-{tiling or 'mma.sync'}")
    for kind in PROBLEMS
    for tiling in (None, *grouped_plan.candidates(problem_of(kind, 300, 4)))
]


@pytest.mark.parametrize(("kind", "tiling"), TILINGS)
def test_every_tiling(device, rng, kind, tiling):
    """A grid of two blocks processes all tiles, ragged on every axis. None: the mma.sync kernel,
    whose grid has a block per tile."""
    if device == "cpu":
        pytest.skip("the CPU has no such kernels")
    counts, dtype = [150, 0, 1, 77], "bfloat16"
    product = PROBLEMS[kind]
    n, k = (product.m, product.n) if kind == "weights" else (product.n, product.k)
    groups = Groups(rng, counts, False, k, dtype)
    problem = problem_of(kind, len(groups.x), len(counts))
    if tiling is None:
        launch = GroupedSm80(plan_grouped_sm80(problem, aligned=True, num_sms=1), groups.layout)
    else:
        config = replace(grouped_plan.configure(problem, tiling, 132), num_blocks=2)
        launch = GroupedSm90(config, groups.layout)
    where = groups.where("cpu")
    if kind == "weights":
        a, b = groups.rows(rng, n, dtype, scale=0.1), groups.x
        out = poisoned(device, (len(counts), n, k), dtype)
        reference_of = lambda a, b: reference.grouped_gemm_backward(  # noqa: E731
            a, b, np.zeros((len(counts), n, k), a.dtype), **where
        )[1]
    else:
        shape = (k, n) if kind == "transposed" else (n * (1 + product.gated), k)
        a, b = groups.x, random(rng, (len(counts), *shape), dtype, scale=k**-0.5)
        out = poisoned(device, (*groups.lead, n), dtype)
        if kind == "gated":
            reference_of = lambda a, b: reference.grouped_gated_linear(a, b, **where)  # noqa: E731
        else:
            reference_of = lambda a, b: reference.grouped_gemm(  # noqa: E731
                a, b, **where, transpose_weights=kind == "transposed"
            )
    (ends,) = to_device(device, groups.offsets)
    launch(*to_device(device, a, b), out, None, ends)
    used = ... if kind == "weights" else groups.used
    wide = reference_of(a.astype(np.float64), b.astype(np.float64))
    assert_close("out", to_host(out)[used], reference_of(a, b)[used], wide[used])


@pytest.mark.gpu
def test_a_graph_replays_with_other_offsets(rng):
    """A replay uses the current contents of the offsets."""
    import cupy

    x, weights = to_device(
        "gpu", random(rng, (64, 64), "float16"), random(rng, (3, 64, 64), "float16", scale=0.1)
    )
    offsets = cupy.array([0, 10, 10, 64], cupy.int32)
    out = cupy.zeros((64, 64), cupy.float16)
    grouped_gemm(x, weights, offsets, out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        grouped_gemm(x, weights, offsets, out=out)
        graph = stream.end_capture()
    offsets[:] = cupy.array([0, 0, 50, 64], cupy.int32)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    expected = grouped_gemm(x, weights, offsets)
    np.testing.assert_array_equal(to_host(out), to_host(expected))


def test_gradients_by_finite_differences(rng):
    offsets = np.array([0, 3, 3, 7], np.int32)
    check_gradient(
        lambda x, weights: reference.grouped_gemm(x, weights, offsets),
        lambda grad, x, weights: reference.grouped_gemm_backward(grad, x, weights, offsets),
        (rng.standard_normal((7, 4)), rng.standard_normal((3, 5, 4))),
        rng,
    )


X, WEIGHTS, OFFSETS = np.ones((4, 8), np.float16), np.ones((2, 16, 8), np.float16), [0, 1, 4]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"expert_offsets": None}, ConfigError, "either expert_offsets or expert_counts"),
        ({"x": X[:, :4].copy()}, ArrayShapeError, "4 columns and 8"),
        ({"x": X.astype(np.int8)}, ArrayDtypeError, "x must be float32"),
        ({"weights": WEIGHTS.astype(np.float32)}, ArrayDtypeError, "weights must have the dtype"),
        ({"expert_offsets": np.zeros(4, np.int32)}, ArrayShapeError, "expert_offsets must have"),
        ({"expert_offsets": np.zeros(3)}, ArrayDtypeError, "expert_offsets must be int32"),
        ({"out": np.ones((4, 8), np.float16)}, ArrayShapeError, r"out must have shape \(4, 16\)"),
        ({"out": X}, ArrayLayoutError, "out overlaps x in memory"),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    call = {"x": X, "weights": WEIGHTS, "expert_offsets": np.array(OFFSETS, np.int32)} | arguments
    with pytest.raises(error, match=f"grouped_gemm: .*{message}"):
        grouped_gemm(**call)


def test_limits_of_the_kernel_are_named(device):
    if device == "cpu":
        pytest.skip("requirements of the kernels")
    x, weights, offsets = to_device(
        device,
        np.ones((4, 8), np.float16),
        np.ones((513, 8, 8), np.float16),
        np.zeros(514, np.int32),
    )
    with pytest.raises(ConfigError, match="at most 512 groups on the GPU, got 513"):
        grouped_gemm(x, weights, offsets)


@pytest.mark.parametrize("fixed_capacity", [False, True])
def test_rows_that_are_not_aligned(device, rng, fixed_capacity):
    check_ops(device, rng, 45, 37, fixed_capacity)


def test_other_architectures(rng):
    with cukit.backend("emulator", arch="sm_80"):
        check_ops("cpu", rng, 136, 72, fixed_capacity=False)


def check_ops(device, rng, n, k, fixed_capacity):
    """Compares all three ops with the reference."""
    dtype = "float16"
    groups = Groups(rng, GROUPS["ragged"], fixed_capacity, k, dtype)
    weights = random(rng, (len(groups.counts), 2 * n, k), dtype, scale=k**-0.5)
    half = weights[:, :n].copy()
    grad = groups.rows(rng, n, dtype, scale=n**-0.5)
    x, w, first, g = to_device(device, groups.x, weights, half, grad)
    where = groups.where(device)

    def expected(wide):
        x, w, g = (a.astype(wide or dtype) for a in (groups.x, weights, grad))
        own = groups.where("cpu")
        return (
            reference.grouped_gemm(x, w[:, :n], **own),
            reference.grouped_gated_linear(x, w, **own),
            *reference.grouped_gemm_backward(g, x, w[:, :n], **own),
        )

    def function():
        return (
            grouped_gemm(x, first, **where),
            grouped_gated_linear(x, w, **where),
            *grouped_gemm_backward(g, x, first, **where),
        )

    check(device, groups, function, expected, ("y", "gated", "grad_x", "grad_weights"))


@pytest.mark.parametrize("problem", grouped_plan.representative("bfloat16"), ids=str)
def test_tilings_fit_hopper(problem):
    hopper = TYPICAL_DEVICES["sm_90"]
    for tiling in grouped_plan.candidates(problem):
        config = grouped_plan.configure(problem, tiling, hopper.num_sms)
        spec = config.spec()
        assert spec.shared_bytes + 3 * KIB <= hopper.shared_bytes_per_block
        assert dict(spec.defines)["STAGES"] >= 3


@pytest.mark.parametrize(
    ("rows", "groups", "n", "k", "tile"),
    [
        (32768, 4, 6144, 7168, "128x256 transposed"),
        (32768, 8, 7168, 3072, "128x256 transposed"),
        (8000, 32, 6144, 7168, "128x256"),
        (1024, 64, 4096, 7168, "128x32 transposed"),
        (256, 64, 4096, 7168, "128x16 transposed"),
    ],
)
def test_the_plan(rows, groups, n, k, tile):
    problem = GroupedProblem(Product(rows, n, k, "bfloat16"), groups)
    assert str(grouped_plan.plan_grouped_sm90(problem, 132).tiling) == tile
