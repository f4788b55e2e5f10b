"""Gradients of linear layers."""

from __future__ import annotations

from typing import Any

from cukit.core.arrays import (
    Array,
    access_width,
    adopt,
    check_array,
    check_same_dtype,
    empty,
    float32,
    runs_kernel,
)
from cukit.core.column_sum import column_sum, column_sum_spec
from cukit.core.device import Device, current_device
from cukit.core.kernel import NULL, KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.core.scalars import check_choice, check_flag
from cukit.errors import ConfigError
from cukit.gemm.dense._gated_gradient import fused_gradient, fused_spec
from cukit.gemm.dense._linear_launch import (
    launch_linear,
    plan_for,
    prepare_linear,
    product_specs,
)
from cukit.gemm.dense._linear_plan import ACTIVATIONS, GATED_ACTIVATIONS, HOPPER, Product
from cukit.gemm.dense.linear import KERNEL_DTYPES, check_weight
from cukit.reference import gemm as reference
from cukit.registry import register

_PARAMETERS = parameter_structs("gemm/parameters.cuh")["GradientParameters"]
_THREADS = 256
_BLOCKS_PER_SM = 4
_MIN_STRIP = 32


def linear_backward(
    grad_out: Array,
    x: Array,
    w: Array,
    preactivation: Array | None = None,
    activation: str | None = None,
    *,
    with_bias: bool = False,
) -> tuple[Array, ...]:
    """Gradients of :func:`linear`: `g = grad_out f'(z)`, `grad_x = g w`, `grad_w = g^T x`.

    Args:
        grad_out: gradient of `y`; dtype of `x`, [..., n].
        x, w: the forward's operands, [..., k] and [n, k]; here `w` must be C-contiguous.
        preactivation: `z` as the forward returned it, [..., n]; only with an activation.
        activation: as in the forward.
        with_bias: also return the bias's gradient, the sum of `g` over all rows.

    Returns:
        `(grad_x, grad_w)`, or `(grad_x, grad_w, grad_bias)` with `with_bias`; dtype of `x`, shapes
        of `x`, `w` and [n].

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: an unknown activation, or one without `preactivation`.

    The activation's gradient and the bias's are computed in one pass over memory; both products
    read `g`, `w` and `x` without transposed copies. Deterministic: no atomics.
    """
    grad_out, x, w, preactivation = adopt("linear_backward", grad_out, x, w, preactivation)
    check_flag("linear_backward", "with_bias", with_bias)
    arguments = (grad_out, x, w, preactivation, activation)
    if not runs_kernel("linear_backward", grad_out, x, w, preactivation):
        _check(*arguments)
        return reference.linear_backward(*arguments, with_bias=with_bias)
    launches = _prepare(*arguments, with_bias)
    if launches is None:
        return reference.linear_backward(*arguments, with_bias=with_bias)
    gradient, product_x, product_w = launches
    grad, grad_bias = gradient(grad_out, preactivation) if gradient else (grad_out, None)
    grad_x, grad_w = empty(x, x.shape), empty(w, w.shape)
    product_x(grad, w, None, None, grad_x, None)
    product_w(grad, x, None, None, grad_w, None)
    return (grad_x, grad_w, grad_bias) if with_bias else (grad_x, grad_w)


def gated_linear_backward(
    grad_out: Array,
    x: Array,
    w: Array,
    preactivation: Array,
    activation: str = "silu",
    *,
    down: Array | None = None,
) -> tuple[Array, Array]:
    """Gradients of :func:`gated_linear`.

    Args:
        grad_out: gradient of `y`; dtype of `x`, [..., n]. With `down`, of `y down^T`, [..., h].
        x: the forward's input, [..., k].
        w: [2n, k], the gate's rows followed by those of the up projection.
        preactivation: `z` as the forward returned it, [..., 2n].
        activation: as in the forward.
        down: weight of the linear layer that follows, dtype of `x`, [h, n]. On Hopper one kernel
            (kernels_cu/gemm/gated_gradient_sm90.cu) then computes the product `grad_out down` and
            the activation's gradient, if n is a multiple of 128 and the product is large.

    Returns:
        `(grad_x, grad_w)`, dtype and shapes of `x` and `w`.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: an unknown activation.

    Deterministic: no atomics.
    """
    op = "gated_linear_backward"
    grad_out, x, w, preactivation, down = adopt(op, grad_out, x, w, preactivation, down)
    arguments = (grad_out, x, w, preactivation, activation, down)
    if not runs_kernel(op, grad_out, x, w, preactivation, down):
        _check_gated(*arguments)
        return reference.gated_linear_backward(*arguments[:-1], down=down)
    launches = _prepare_gated(*arguments)
    if launches is None:
        return reference.gated_linear_backward(*arguments[:-1], down=down)
    before, gradient, product_x, product_w = launches
    if gradient is None:
        grad = empty(preactivation, preactivation.shape)
        before(grad_out, down, preactivation, grad)
    else:
        if before is not None:
            grad_y = empty(grad_out, (*grad_out.shape[:-1], preactivation.shape[-1] // 2))
            before(grad_out, down, None, None, grad_y, None)
            grad_out = grad_y
        grad, _ = gradient(grad_out, preactivation)
    grad_x, grad_w = empty(x, x.shape), empty(w, w.shape)
    product_x(grad, w, None, None, grad_x, None)
    product_w(grad, x, None, None, grad_w, None)
    return grad_x, grad_w


class _ActivationGradient:
    """A launch of activation_gradient.cu: (grad_out, z) -> (grad, grad_bias)."""

    def __init__(
        self, rows: int, columns: int, vec: int, dtype: str, activation: str | None, *,
        gated: bool, sums: bool,
    ) -> None:  # fmt: skip
        blocks_x = -(-columns // (32 * vec))
        most = -(-current_device().num_sms * _BLOCKS_PER_SM // blocks_x)
        strips = max(1, min(most, -(-rows // _MIN_STRIP)))
        strip_rows = -(-rows // strips)
        self._strips = -(-rows // strip_rows)
        self._plain = activation is None
        self._sums = sums
        parameters = _PARAMETERS.pack(rows=rows, columns=columns, strip_rows=strip_rows)
        kernel = load_kernel(gradient_spec(dtype, vec, activation, gated=gated, sums=sums))
        self._launch = Launch(kernel, (blocks_x, self._strips), (parameters,))

    def __call__(self, grad_out: Array, z: Array | None) -> tuple[Array, Array | None]:
        grad = NULL if self._plain else empty(z, z.shape)  # type: ignore[union-attr]
        columns = grad_out.shape[-1]
        partial = empty(grad_out, (self._strips, columns), float32) if self._sums else NULL
        self._launch(grad_out, NULL if self._plain else z, grad, partial)
        grad_bias = column_sum(partial, grad_out.dtype) if self._sums else None
        return (grad_out if self._plain else grad), grad_bias


def gradient_spec(
    dtype: str, vec: int, activation: str | None, *, gated: bool, sums: bool
) -> KernelSpec:
    """A variant of activation_gradient.cu."""
    defines = (
        ("DTYPE", dtype),
        ("THREADS", _THREADS),
        ("VEC", vec),
        ("PARTS", 1 + gated),
        ("ACTIVATION", ACTIVATIONS[activation]),
        ("SUMS", sums),
    )
    name = "activation_gradient"
    return KernelSpec(f"gemm/{name}.cu", name, defines, _THREADS)


@launch_plan
def _prepare(
    grad_out: Array,
    x: Array,
    w: Array,
    z: Array | None,
    activation: str | None,
    with_bias: bool,
) -> Any:
    _check(grad_out, x, w, z, activation)
    check_array("linear_backward", "x", x, dtypes=KERNEL_DTYPES)
    if w.size == 0 or x.size == 0:
        return None  # nothing to multiply: the reference
    n, k = w.shape
    gradient = None
    if activation is not None or with_bias:
        gradient = _ActivationGradient(
            x.size // k, n, access_width(n, grad_out, z), x.dtype.name, activation,
            gated=False, sums=with_bias,
        )  # fmt: skip
    return gradient, *_products(grad_out, x, w, x.size // k, n, k)


@launch_plan
def _prepare_gated(
    grad_out: Array, x: Array, w: Array, z: Array, activation: str, down: Array | None
) -> Any:
    _check_gated(grad_out, x, w, z, activation, down)
    check_array("gated_linear_backward", "x", x, dtypes=KERNEL_DTYPES)
    if w.size == 0 or x.size == 0 or (down is not None and down.size == 0):
        return None  # nothing to multiply: the reference
    n, k = w.shape
    rows, dtype = x.size // k, x.dtype.name
    products = _products(z, x, w, rows, n, k)
    before = None
    if down is not None:
        product = Product(rows, n // 2, down.shape[0], dtype, major_b="MN")
        plan = plan_for(product, grad_out, down, z)
        if fused := fused_gradient(product, plan, activation):
            return fused, None, *products
        before = launch_linear(plan)
    width = access_width(n // 2, grad_out if down is None else None, z)
    gradient = _ActivationGradient(rows, n // 2, width, dtype, activation, gated=True, sums=False)
    return before, gradient, *products


def _products(grad: Array, x: Array, w: Array, rows: int, n: int, k: int) -> tuple[Any, Any]:
    """Launches of grad_x [rows, k] = grad w and grad_w [n, k] = grad^T x."""
    dtype = x.dtype.name
    of_x = Product(rows, k, n, dtype, major_b="MN")
    of_w = Product(n, k, rows, dtype, major_a="MN", major_b="MN")
    return prepare_linear(of_x, grad, w), prepare_linear(of_w, grad, x)


def _check(grad_out: Array, x: Array, w: Array, z: Array | None, activation: str | None) -> None:
    op = "linear_backward"
    check_choice(op, "activation", activation, tuple(ACTIVATIONS))
    if (activation is None) != (z is None):
        raise ConfigError(
            f"{op}: preactivation is required with an activation and invalid without one, got "
            f"activation={activation!r} and preactivation "
            f"{'of shape ' + str(z.shape) if z is not None else None}"
        )
    check_weight(op, "w", x, w)
    check_array(op, "grad_out", grad_out, shape=(*x.shape[:-1], w.shape[0]))
    if z is not None:
        check_array(op, "preactivation", z, shape=(*x.shape[:-1], w.shape[0]))
    check_same_dtype(op, x=x, w=w, grad_out=grad_out, preactivation=z)


def _check_gated(
    grad_out: Array, x: Array, w: Array, z: Array, activation: str, down: Array | None
) -> None:
    op = "gated_linear_backward"
    check_choice(op, "activation", activation, GATED_ACTIVATIONS)
    check_weight(op, "w", x, w)
    if w.shape[0] % 2:
        raise ConfigError(f"{op}: w holds gate and up rows, so axis 0 must be even, got {w.shape}")
    columns = w.shape[0] // 2
    if down is not None:
        check_array(op, "down", down, shape=(None, columns))
        columns = down.shape[0]
    check_array(op, "grad_out", grad_out, shape=(*x.shape[:-1], columns))
    check_array(op, "preactivation", z, shape=(*x.shape[:-1], w.shape[0]))
    check_same_dtype(op, x=x, w=w, grad_out=grad_out, preactivation=z, down=down)


def _specs(device: Device) -> list[KernelSpec]:
    gradients = [
        gradient_spec(dtype.name, vec, activation, gated=False, sums=sums)
        for dtype in KERNEL_DTYPES
        for vec in (8, 1)
        for activation in ACTIVATIONS
        for sums in (False, True)
        if activation is not None or sums
    ]
    sums = [column_sum_spec(dtype.name) for dtype in KERNEL_DTYPES]
    return [*gradients, *sums, *product_specs(device)]


def _gated_specs(device: Device) -> list[KernelSpec]:
    fused = [
        fused_spec(dtype.name, activation)
        for dtype in KERNEL_DTYPES
        for activation in GATED_ACTIVATIONS
        if device.arch == HOPPER
    ]
    return fused + [
        gradient_spec(dtype.name, vec, activation, gated=True, sums=False)
        for dtype in KERNEL_DTYPES
        for vec in (8, 1)
        for activation in GATED_ACTIVATIONS
    ]


register(
    name="linear_backward",
    family="gemm",
    function=linear_backward,
    reference=reference.linear_backward,
    specs=_specs,
)
register(
    name="gated_linear_backward",
    family="gemm",
    function=gated_linear_backward,
    reference=reference.gated_linear_backward,
    specs=_gated_specs,
)
