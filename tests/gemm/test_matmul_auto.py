"""matmul(precision=...): plans, sampled errors, and results of every choice."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import cukit as ck
from cukit.core.device import current_device, typical_device
from cukit.errors import ConfigError, UnsupportedDeviceError
from cukit.gemm import forget_decisions
from cukit.gemm.dispatch import _matmul_times as measured_times
from cukit.gemm.dispatch._matmul_candidates import MatmulProblem, plan_matmul
from cukit.gemm.dispatch._matmul_narrowing import sampled_error
from tests.contract import random, to_device, to_host

H200 = typical_device("sm_90")


@pytest.fixture(autouse=True)
def fresh_decisions(tmp_path, monkeypatch):
    """Start without cached decisions and measured times."""
    monkeypatch.setattr(measured_times, "cache_folder", lambda: tmp_path)
    measured_times.forget()
    forget_decisions()
    yield
    measured_times.forget()
    forget_decisions()


def best(problem, device=H200, times=None):
    return plan_matmul(problem, device, times)[0]


def linear(m, n, k, dtype="bfloat16", **options):
    return MatmulProblem(m, n, k, dtype, options.pop("out", dtype), transpose_b=True, **options)


def test_short_products_of_few_tokens_go_to_gemv():
    """These shapes were measured: gemv is faster than cuBLAS on an H200."""
    for tokens in (1, 8, 16):
        assert best(linear(tokens, 1024, 8192)).kernel == "gemv"
        assert best(MatmulProblem(4096, tokens, 1024, "bfloat16", "bfloat16")).kernel != "cublas"
    assert best(linear(1, 8192, 28672)).kernel != "gemv"
    assert best(MatmulProblem(1, 4096, 4096, "bfloat16", "bfloat16")).kernel == "cublas"
    assert best(linear(17, 4096, 1024)).kernel != "gemv"
    assert best(linear(1, 4096, 4096, aligned=False)).kernel == "cublas"
    assert best(linear(1, 1024, 4096, accumulate=True)).kernel == "cublas"


def test_excluded_kernels_have_a_reason():
    def reasons(problem, device=H200):
        return {each.kernel: each.reason for each in plan_matmul(problem, device)}

    assert reasons(linear(64, 64, 64))["linear"] is None
    assert "contiguous" in reasons(linear(64, 64, 64, flat=False))["linear"]
    assert "accumulates" in reasons(linear(64, 64, 64, accumulate=True))["linear"]
    assert "accumulate" in reasons(linear(8, 64, 64, accumulate=True))["gemv"]
    assert reasons(MatmulProblem(3, 3, 3, "float64", "float64")) == {"cublas": None}


def test_lower_precision_is_faster_only_for_large_products():
    def order(m, n, k):
        kept = [e for e in plan_matmul(linear(m, n, k, "float32"), H200) if e.reason is None]
        return [each.precision for each in kept]

    large = list(dict.fromkeys(order(4096, 4096, 4096)))
    assert large.index("float8_e4m3") < large.index("bfloat16") < large.index("tf32")
    assert order(4096, 4096, 4096)[-1] == "float32"
    assert order(64, 64, 64)[0] in ("float32", "tf32")


def test_measured_times_override_the_cost_model():
    problem = linear(4096, 4096, 4096)
    slow = {("cublas", "bfloat16"): 300.0, ("fp8", "float8_e4m3"): 300.0}
    chosen = best(problem, times=slow)
    assert chosen.kernel == "linear"
    times = {**slow, ("linear", "bfloat16"): 400.0}
    assert best(problem, times=times) == plan_matmul(problem, H200, times)[0]
    assert best(problem, times=times).measured


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_every_device_has_a_kernel_for_everything(arch):
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        for m, n, k in ((1, 1, 1), (0, 0, 3), (0, 5, 3), (3, 5, 0), (4096, 4096, 4096)):
            chosen = best(linear(m, n, k, dtype), typical_device(arch))
            assert chosen.reason is None
            assert chosen.time_us > 0


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(3, 40, 72), (70, 136, 64), (40, 5, 24)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_equal_those_of_matmul(device, rng, dtype, m, n, k, transpose_a, transpose_b):
    a = random(rng, (k, m) if transpose_a else (m, k), dtype)
    b = random(rng, (n, k) if transpose_b else (k, n), dtype)
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    placed = to_device(device, a, b)
    for _ in range(2):  # the second call uses the cached decision
        out, plan = ck.matmul(*placed, **options, precision="auto", return_plan=True)
        want = to_host(ck.matmul(*placed, **options)).astype(np.float32)
        np.testing.assert_allclose(to_host(out).astype(np.float32), want, rtol=1e-2, atol=1e-1)
        assert out.dtype == a.dtype
    assert plan.precision == dtype
    assert not plan.errors
    assert plan.kernel == "reference" if device == "cpu" else plan.estimates


@pytest.mark.parametrize(("m", "n", "k"), [(0, 0, 8), (0, 5, 8), (5, 0, 8), (3, 5, 0)])
def test_empty_products(device, m, n, k):
    a, b = to_device(device, np.ones((m, k), np.float16), np.ones((k, n), np.float16))
    out = to_host(ck.matmul(a, b, precision="auto"))
    assert out.shape == (m, n)
    assert not out.any()


def test_leading_axes_out_and_accumulation(device, rng):
    a, b = random(rng, (2, 3, 64), "bfloat16"), random(rng, (40, 64), "bfloat16")
    placed = to_device(device, a, b)
    out = ck.matmul(*placed, transpose_b=True, precision="auto")
    assert out.shape == (2, 3, 40)
    target = to_device(device, np.ones((2, 3, 40), np.float32))[0]
    again = ck.matmul(*placed, transpose_b=True, out=target, accumulate=True, precision="auto")
    assert again is target
    want = 1 + np.einsum("abk,nk->abn", a.astype(np.float64), b.astype(np.float64))
    np.testing.assert_allclose(to_host(target), want, rtol=1e-3, atol=1e-2)


def test_a_strided_out_uses_kernels_that_support_it(device, rng):
    if device == "cpu":
        pytest.skip("the CPU has no such kernels")
    a, b = (random(rng, (64, 64), "bfloat16") for _ in range(2))
    a, b, wide = to_device(device, a, b, random(rng, (64, 96), "bfloat16"))
    reasons = {e.kernel: e.reason for e in ck.explain_matmul(a, b, out=wide[:, :64]).estimates}
    assert "contiguous" in reasons["linear"]
    assert reasons["cublas"] is None
    kept = to_host(wide[:, 64:]).copy()
    ck.matmul(a, b, out=wide[:, :64], precision="auto")
    np.testing.assert_array_equal(to_host(wide[:, :64]), to_host(ck.matmul(a, b)))
    np.testing.assert_array_equal(to_host(wide[:, 64:]), kept)


@pytest.mark.parametrize(
    ("rtol", "expected"), [(None, "float32"), (1e-6, "float32"), (2e-3, "tf32"), (1e-2, "bfloat16"),
     (0.1, "float8_e4m3")],
)  # fmt: skip
def test_the_lowest_precision_within_rtol(rng, rtol, expected):
    """Plans only, for the emulator's H200, at a size where lower precision is faster."""
    a = np.broadcast_to(random(rng, (1, 512), "float32"), (4096, 512)).copy()
    b = random(rng, (4096, 512), "float32")
    with ck.backend("emulator", arch="sm_90"):
        plan = ck.explain_matmul(a, b, transpose_b=True, rtol=rtol)
    assert plan.precision == expected
    assert all(error >= 0 for _, error in plan.errors)
    assert f"{plan.kernel} in {expected}" in str(plan)


def test_a_product_in_lower_precision_stays_within_rtol(device, rng):
    """Named precisions: every device with kernels uses the requested arithmetic."""
    a, b = random(rng, (5, 64), "float32"), random(rng, (48, 64), "float32")
    exact = a.astype(np.float64) @ b.T.astype(np.float64)
    precisions = [("bfloat16", 8e-3), ("tf32", 2e-3), ("float32", 1e-6)]
    if device != "cpu" and current_device().arch == "sm_90":
        precisions.append(("float8_e4m3", 6e-2))
    for precision, bound in precisions:
        out = to_host(ck.matmul(*to_device(device, a, b), transpose_b=True, precision=precision))
        assert out.dtype == np.float32
        error = np.linalg.norm(out - exact, axis=1) / np.linalg.norm(exact, axis=1)
        assert error.max() <= bound


@pytest.mark.parametrize("place", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_sampled_errors(place, rng):
    a, b = random(rng, (300, 128), "float32"), random(rng, (500, 128), "float32")
    placed = to_device(place, a, b)
    errors = {
        precision: sampled_error(*placed, precision, transpose_a=False, transpose_b=True)
        for precision in ("tf32", "bfloat16", "float8_e4m3")
    }
    assert 1e-4 < errors["tf32"] < 2e-3
    assert 1e-3 < errors["bfloat16"] < 1e-2
    assert 1e-2 < errors["float8_e4m3"] < 6e-2
    transposed = to_device(place, a.T.copy(), b.T.copy())
    again = sampled_error(*transposed, "tf32", transpose_a=True, transpose_b=False)
    assert again == pytest.approx(errors["tf32"], rel=1e-6)
    zeros = to_device(place, np.zeros_like(a), b)
    assert sampled_error(*zeros, "bfloat16", transpose_a=False, transpose_b=True) == 0
    broken = to_device(place, np.full_like(a, np.inf), b)
    error = sampled_error(*broken, "bfloat16", transpose_a=False, transpose_b=True)
    assert not error <= 1  # never within any rtol


def test_a_decision_is_made_once(monkeypatch, rng, caplog):
    from cukit.gemm.dispatch import _matmul_decision as decision

    calls = []

    def counted(*args, **options):
        calls.append(args)
        return sampled_error(*args, **options)

    monkeypatch.setattr(decision, "sampled_error", counted)
    a, b = random(rng, (512, 64), "float32"), random(rng, (64, 512), "float32")
    with ck.backend("emulator"), caplog.at_level(logging.DEBUG, "cukit.gemm"):
        for _ in range(3):
            ck.matmul(a, b, precision="auto", rtol=1e-6)
    assert len(calls) <= 2  # one per lower precision
    assert len(caplog.records) == 1
    assert "cublas in float32" in caplog.text


def test_measured_times_are_kept_on_disk(tmp_path):
    problem = linear(64, 64, 64)
    measured_times.remember(H200, problem, {("cublas", "bfloat16"): 5.0})
    measured_times.forget()
    assert measured_times.recall(H200, problem) == {("cublas", "bfloat16"): 5.0}
    assert measured_times.recall(typical_device("sm_80"), problem) is None
    (tmp_path / "matmul_times.json").write_text("[1")
    measured_times.forget()
    assert measured_times.recall(H200, problem) is None


@pytest.mark.gpu
def test_tuning_measures_every_candidate(rng):
    a, b = to_device("gpu", random(rng, (64, 256), "float32"), random(rng, (128, 256), "float32"))
    plan = ck.tune_matmul(a, b, transpose_b=True)
    assert all(each.measured for each in plan.estimates if each.reason is None)
    _, after = ck.matmul(a, b, transpose_b=True, precision="auto", return_plan=True)
    assert after.estimates == plan.estimates


class Strict:
    """An array with only the parts of the array API standard that a product requires."""

    def __init__(self, array):
        self._array = np.asarray(array)
        self.shape, self.dtype = self._array.shape, self._array.dtype

    def __array_namespace__(self, api_version=None):
        def wrapped(function):
            return lambda x, *args: Strict(function(x._array, *args))

        return SimpleNamespace(
            reshape=wrapped(np.reshape),
            matrix_transpose=wrapped(np.matrix_transpose),
            astype=wrapped(np.astype),
            matmul=lambda x, y: Strict(x._array @ y._array),
            float64=np.float64,
            asarray=Strict,
        )


@pytest.mark.parametrize("library", ["stand-in", "array_api_strict"])
def test_arrays_of_the_standard(rng, library):
    """Arrays of other libraries are multiplied by their own library."""
    if library == "stand-in":
        xp = Strict(0).__array_namespace__()
    else:
        xp = pytest.importorskip("array_api_strict")

    def values(array):
        return array._array if isinstance(array, Strict) else np.asarray(array)

    host_a, host_b = random(rng, (2, 3, 8), "float32"), random(rng, (5, 8), "float32")
    a, b = xp.asarray(host_a), xp.asarray(host_b)
    for options in ({}, {"precision": "auto", "rtol": 1e-2}):
        out = ck.matmul(a, b, transpose_b=True, **options)
        assert type(out) is type(a)
        np.testing.assert_allclose(values(out), host_a @ host_b.T, rtol=1e-5, atol=1e-6)
    out = ck.matmul(a, a, transpose_a=True, out_dtype=xp.float64)
    assert out.dtype == xp.float64
    assert out.shape == (8, 8)
    for options in (
        {"precision": "auto", "return_plan": True},
        {"accumulate": True},
        {"out": np.zeros((2, 3, 5), np.float32)},
        {"precision": "float8_e4m3"},
    ):
        with pytest.raises(ConfigError, match="a precision by name need NumPy or CuPy operands"):
            ck.matmul(a, b, transpose_b=True, **options)
    with pytest.raises(ConfigError, match="rtol must be a finite number"):
        ck.matmul(a, b, transpose_b=True, precision="auto", rtol=-1.0)


def test_errors_name_the_argument():
    a, b = np.ones((2, 4), np.float32), np.ones((4, 3), np.float32)
    with pytest.raises(ConfigError, match="precision of float32 operands must be auto, float32"):
        ck.matmul(a, b, precision="int8")
    with pytest.raises(ConfigError, match="precision of bfloat16 operands must be auto, bfloat16"):
        ck.matmul(a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16), precision="tf32")
    half = a.astype(np.float16)
    with (
        ck.backend("emulator", arch="sm_80"),
        pytest.raises(ConfigError, match="no kernel can multiply in float8_e4m3; fp8: it does"),
    ):
        ck.matmul(half, half, transpose_b=True, precision="float8_e4m3")
    with pytest.raises(ConfigError, match="rtol must be a finite number"):
        ck.matmul(a, b, precision="auto", rtol=-1.0)
    with pytest.raises(ConfigError, match="rtol and return_plan need a precision"):
        ck.matmul(a, b, rtol=1e-3)
    with pytest.raises(UnsupportedDeviceError, match="must be on a GPU"):
        ck.tune_matmul(a, b)
