"""Operators of cukit.torch: gradients, agreement of devices, layouts, torch.library checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is an extra: pip install 'cukit[torch]'")

import cukit  # noqa: E402
import cukit.torch as ckt  # noqa: E402
from cukit.core import backend  # noqa: E402
from cukit.errors import ArrayError, ConfigError  # noqa: E402
from cukit.torch._operator_definitions import OPERATORS  # noqa: E402
from cukit.torch._operators import arguments_of  # noqa: E402
from tests.torch.cases import CASES, results  # noqa: E402

Array = Any

every_case = pytest.mark.parametrize("name", CASES)

# Relative to the largest element: two roundings to the dtype, and the roundings of sums in between.
TOLERANCE = {"float32": 2e-5, "float16": 8e-3, "bfloat16": 6e-2}
EMULATED = ("rms_norm", "add_rms_norm", "silu_and_mul", "rope", "kl_divergence", "flash_attention")


@contextmanager
def on_the_references() -> Iterator[None]:
    """Deactivates the backend of the test: the exact results are computed in float64 on NumPy."""
    before = backend.activate(None)
    try:
        yield
    finally:
        backend.activate(before)


def test_every_operator_has_a_case() -> None:
    differentiable = {each.name for each in OPERATORS if each.backward is not None}
    assert differentiable == {case.operator for case in CASES.values()} | {"quantized_linear"}


@every_case
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradients_by_finite_differences(name: str, fast: bool) -> None:
    """Fast: along random directions; slow: element by element."""
    case = CASES[name]
    inputs, constants = case.make(torch.float64, "cpu")
    assert torch.autograd.gradcheck(
        lambda *args: case.call(*args, *constants), inputs, atol=1e-6, fast_mode=fast
    )


@every_case
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_device_agrees_with_float64(name: str, dtype: str, device: str, place: str) -> None:
    case = CASES[name]
    if device == "emulator" and (name not in EMULATED or dtype != case.dtypes[-1]):
        pytest.skip("only a few run in the emulator; the kernels have their own tests")
    if device != "cpu" and dtype not in case.dtypes:
        pytest.skip(f"the kernel takes {', '.join(case.dtypes)}")
    with on_the_references():
        exact = results(case, *case.make(torch.float64, "cpu"))
    found = results(case, *case.make(getattr(torch, dtype), place))
    for want, got in zip(exact, found, strict=True):
        assert got.shape == want.shape
        error = float((got - want).abs().max()) / max(float(want.abs().max()), 1e-30)
        assert error <= TOLERANCE[dtype], error


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if "float32" in case.dtypes])
@pytest.mark.parametrize("fast", [True, False])
def test_gradients_by_finite_differences_in_float32(name: str, fast: bool) -> None:
    """Steps of 0.01: truncation error and float32 rounding are both about 1e-3."""
    case = CASES[name]
    inputs, constants = case.make(torch.float32, "cuda")
    assert torch.autograd.gradcheck(
        lambda *args: case.call(*args, *constants), inputs, eps=1e-2, atol=5e-3, rtol=2e-2,
        nondet_tol=1e-5, fast_mode=fast,
    )  # fmt: skip


@every_case
def test_torch_accepts_the_operator(name: str) -> None:
    """opcheck accepts the schema, the autograd registration and the fake kernel."""
    case = CASES[name]
    inputs, constants = case.make(torch.float64, "cpu")
    calls = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "cukit":
                calls.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Recorder():
        found = case.call(*inputs, *constants)
        first = found[0] if isinstance(found, tuple) else found
        first.sum().backward()
    assert len(calls) >= 2
    for function, args, kwargs in calls:
        fresh = [
            each.detach().requires_grad_(each.requires_grad) if isinstance(each, torch.Tensor)
            else each
            for each in args
        ]  # fmt: skip
        torch.library.opcheck(
            function, tuple(fresh), kwargs,
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )  # fmt: skip


@pytest.mark.parametrize("layout", ["transposed", "slice", "expanded", "reversed storage"])
def test_attention_takes_any_layout(layout: str, device: str, place: str) -> None:
    if device == "emulator":
        pytest.skip("strides are handled on the host, as for tensors on the CPU")
    dtype = torch.float32 if place == "cpu" else torch.float16
    torch.manual_seed(0)
    base = torch.randn(2, 4, 9, 48, dtype=dtype, device=place)  # [batch, heads, seq, 3 x dim]
    if layout == "transposed":
        q, k, v = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in base.chunk(3, -1))
    elif layout == "slice":
        q, k, v = base.chunk(3, -1)
    elif layout == "expanded":
        q, k, v = (
            base[..., :16],
            *(each[:, :1].expand(-1, 4, -1, -1) for each in base.chunk(3, -1)[1:]),
        )
    else:
        q, k, v = (each.flip(-1) for each in base.chunk(3, -1))
    views = [each.transpose(1, 2).requires_grad_() for each in (q, k, v)]
    dense = [
        each.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        for each in views
    ]
    out, want = (ckt.flash_attention(*each, causal=True) for each in (views, dense))
    assert out.is_contiguous()
    torch.testing.assert_close(out, want)
    out.sum().backward()  # the gradient of a sum is an expanded scalar
    want.backward(torch.ones_like(want))
    for one, other in zip(views, dense, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "misaligned"])
def test_gradients_of_a_projection_take_any_layout(layout: str, device: str, place: str) -> None:
    if device == "emulator":
        pytest.skip("strides are handled on the host, as for tensors on the CPU")
    dtype = torch.float32 if place == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    grads = [torch.randn(2, heads, 7, 16).to(place, dtype) for heads in (4, 2, 2)]
    if layout == "expanded":
        grads = [each[..., :1].expand(each.shape) for each in grads]
    grads = [each.transpose(1, 2) for each in grads]
    if layout == "misaligned":
        grads = [torch.cat([each.new_zeros(1), each.flatten()])[1:].view_as(each) for each in grads]
    angles = torch.rand(7, 8).to(place)
    tables = angles.cos(), angles.sin()
    operators = torch.ops.cukit
    want = torch.cat([*operators.rope_backward(*grads[:2], *tables), grads[2]], dim=2)
    assert torch.equal(operators.rope_qkv_backward(*grads, *tables), want)
    weight, x = torch.randn(128, 24).to(place, dtype), torch.randn(2, 7, 24).to(place, dtype)
    for operator, args in (
        (operators.rope_qkv_backward, (*grads, *tables)),
        (operators.linear_rope, (x, weight, *tables, 6)),
    ):  # fmt: skip
        torch.library.opcheck(operator.default, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("own_tables", [False, True])
def test_gradients_of_attention_side_by_side(own_tables: bool, device: str, place: str) -> None:
    """Equal to those of separate operators; rotary tables shared by both sequences, or one each."""
    exact = device == "cpu"  # the reference
    dtype, tolerance = (torch.float32, 1e-6) if exact else (torch.bfloat16, 2e-2)
    torch.manual_seed(0)
    operators = torch.ops.cukit
    heads, seq_len = (4, 2, 2), 9
    qkv = torch.randn(2, seq_len, sum(heads), 64).to(place, dtype).split(heads, dim=2)
    angles = torch.rand(2 * seq_len if own_tables else seq_len, 32).to(place)
    tables = angles.cos(), angles.sin()
    positions = None
    if own_tables:
        positions = torch.arange(2 * seq_len, dtype=torch.int32, device=place).view(2, seq_len)
    out, lse = operators.flash_attention(*qkv, causal=True)
    given = torch.randn_like(out), *qkv, out, lse
    separate = operators.flash_attention_backward(
        given[0], out, lse, *qkv, causal=True, deterministic=True
    )
    want = operators.rope_qkv_backward(*separate[:3], *tables, positions)
    got = operators.flash_attention_qkv_backward(*given, *tables, True, None, True)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    torch.library.opcheck(
        operators.flash_attention_qkv_backward.default, (*given, *tables, True, None, True),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_results_share_no_memory_with_inputs() -> None:
    x = torch.zeros(3, 8)
    gate = ckt.gelu(x)
    gate += 1
    assert not x.any()
    assert ckt.rms_norm(torch.zeros(0, 8), torch.ones(8)).shape == (0, 8)


@every_case
def test_results_share_no_memory_with_each_other(name: str, place_of_results: str) -> None:
    case = CASES[name]
    dtype = torch.float64 if place_of_results == "cpu" else getattr(torch, case.dtypes[-1])
    inputs, constants = case.make(dtype, place_of_results)
    found = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func.namespace == "cukit":
                each_result = out if isinstance(out, tuple) else (out,)
                found.append([x.untyped_storage().data_ptr() for x in each_result if x.numel()])
            return out

    with Recorder():
        results(case, inputs, constants)
    assert any(found)
    for addresses in found:
        assert len(set(addresses)) == len(addresses)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place_of_results(request: pytest.FixtureRequest) -> str:
    return request.param


def test_backward_twice_gives_the_same() -> None:
    case = CASES["linear_kl_divergence"]
    inputs, constants = case.make(torch.float32, "cpu")
    loss = case.call(*inputs, *constants)
    first = torch.autograd.grad(loss, inputs, 3 * torch.ones(()), retain_graph=True)
    second = torch.autograd.grad(loss, inputs, torch.ones(()))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, 3 * other)


def test_an_upstream_gradient_is_not_rounded() -> None:
    """1/3 in bfloat16 is off by two thousandths; the gradients may be off by one rounding."""
    hidden, weight, teacher, head = (
        torch.randn(shape, dtype=torch.float32)
        for shape in ((64, 32), (96, 32), (64, 16), (96, 16))
    )
    tensors = [each.bfloat16() for each in (hidden, weight, teacher, head)]
    tensors[0].requires_grad_()
    whole, third = (
        torch.autograd.grad(factor * ckt.linear_kl_divergence(*tensors), tensors[0])[0].double()
        for factor in (1.0, 1 / 3)
    )
    ratio = float((third * whole).sum() / (whole * whole).sum())
    assert ratio == pytest.approx(1 / 3, rel=3e-4)


def test_lse_is_a_constant() -> None:
    q = torch.randn(1, 3, 2, 8, requires_grad=True)
    out, lse = ckt.flash_attention(q, q, q, return_lse=True)
    assert out.requires_grad
    assert not lse.requires_grad


@pytest.mark.parametrize("temperature", [1.0, 1.5])
@pytest.mark.parametrize("given", [False, True])
def test_distillation_attention_equals_attention_and_divergence(
    temperature: float, given: bool
) -> None:
    """One operator gives the results and gradients of flash_attention and attention_kl."""
    torch.manual_seed(1)
    q_t, k_t, v_t = (torch.randn(2, 7, 2, 24, dtype=torch.float64) for _ in range(3))
    student = [
        torch.randn(2, 7, heads, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    ]
    options: dict[str, Any] = {
        "temperature": temperature, "head_map": [1, 0, 0, 1], "scale_t": 0.3, "scale_s": 0.2,
    }  # fmt: skip
    if given:
        _, lse_t, _ = cukit.attention_kl(
            *(x.detach().numpy() for x in (q_t, k_t, *student[:2])),
            **options, causal=True, return_lse=True,
        )  # fmt: skip
        options["lse_t"] = torch.from_numpy(lse_t)
    out, loss, out_t = ckt.distillation_attention(q_t, k_t, v_t, *student, causal=True, **options)
    want = ckt.flash_attention(*student, causal=True, scale=0.2)
    want_loss = ckt.attention_kl(q_t, k_t, *student[:2], causal=True, **options)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(loss, want_loss)
    torch.testing.assert_close(out_t, ckt.flash_attention(q_t, k_t, v_t, causal=True, scale=0.3))
    for mine, theirs in (
        (out.sum() + 3 * loss, want.sum() + 3 * want_loss), (out.sum(), want.sum()),
    ):  # fmt: skip
        for one, other in zip(
            torch.autograd.grad(mine, student, retain_graph=True),
            torch.autograd.grad(theirs, student, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(one, other)
    alone = torch.autograd.grad(loss, student, allow_unused=True)
    assert alone[2] is None
    for one, other in zip(alone[:2], torch.autograd.grad(want_loss, student[:2]), strict=True):
        torch.testing.assert_close(one, other)


def test_inputs_without_gradient_are_rejected() -> None:
    q = torch.randn(1, 3, 2, 8, requires_grad=True)
    with pytest.raises(ConfigError, match="flash_attention: bias requires grad"):
        ckt.flash_attention(q, q, q, bias=torch.zeros(1, 1, 3, 3, requires_grad=True))
    tables = torch.ones(3, 4), torch.zeros(3, 4, requires_grad=True)
    with pytest.raises(ConfigError, match="rope: sin requires grad"):
        ckt.rope(q, q, *tables)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ArrayError, match=r"rms_norm: weight must have shape \(8,\), got \(4,\)"):
        ckt.rms_norm(torch.zeros(2, 8), torch.ones(4))
    with pytest.raises(ArrayError, match=r"rms_norm: x must be .*got torch\.complex64"):
        ckt.rms_norm(torch.zeros(2, 8, dtype=torch.complex64), torch.ones(8))
    sparse = torch.eye(8).to_sparse()
    with pytest.raises((ArrayError, NotImplementedError)):
        ckt.gelu(sparse)


def test_autocast_chooses_the_dtype_of_products() -> None:
    x, weight = torch.randn(4, 16), torch.randn(8, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ckt.linear(x, weight, None, "silu")
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert weight.grad.dtype == torch.float32


def test_a_schema_follows_a_signature() -> None:
    def loss(
        logits: Array, targets: Array | None = None, *, beta: float = 0.5, kind: str = "a",
        most: int | None = None, extra: Any = 1,
    ) -> None: ...  # fmt: skip

    with pytest.raises(TypeError, match="no schema type for extra"):
        arguments_of(loss)
    assert arguments_of(loss, drop=("extra",)) == (
        'Tensor logits, Tensor? targets=None, float beta=0.5, str kind="a", SymInt? most=None'
    )


def test_numpy_and_torch_give_the_same_bits() -> None:
    x, weight = torch.randn(5, 32), torch.randn(32)
    want = cukit.rms_norm(x.numpy(), weight.numpy())
    np.testing.assert_array_equal(ckt.rms_norm(x, weight).numpy(), want)
