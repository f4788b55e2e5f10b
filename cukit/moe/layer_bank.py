"""A bank of layers: each sample passes through the few layers that its mean token selects."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    Array,
    access_width,
    adopt,
    check_array,
    check_same_dtype,
    empty,
    float32,
    float64,
    int32,
    namespace,
    runs_kernel,
)
from cukit.core.compiler import MacroValue
from cukit.core.device import MAX_GRID_YZ, Device
from cukit.core.kernel import NULL, KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.core.scalars import MAX_INT32, check_choice, check_flag, check_integer, check_number
from cukit.errors import ArrayError, ArrayShapeError, ConfigError
from cukit.gemm import grouped_gemm, grouped_gemm_backward
from cukit.moe.permute import moe_permute
from cukit.moe.router import topk_router, topk_router_backward
from cukit.reference import layer_bank as reference
from cukit.reference.layer_bank import BankActivations, BankGradients
from cukit.reference.moe import Routing
from cukit.registry import get_op, register

_PARAMETERS = parameter_structs("moe/parameters.cuh")["BankParameters"]
_ACTIVATIONS = {
    "silu": "Silu",
    "gelu": "GeluErf",
    "gelu_tanh": "GeluTanh",
    "relu": "Relu",
}
_THREADS = 128
_LOGIT_THREADS = 256
_VECS = 4
"""Vectors per thread of bank_combine_backward."""
_TOKENS = 32
"""Tokens that one thread block of bank_means sums; more if a sample has over 64 * 32 tokens."""


def layer_bank(
    x: Array,
    router: Array,
    layers: Array,
    top_k: int,
    *,
    activation: str = "silu",
    renormalize: bool = False,
    keep: bool = False,
) -> Array | tuple[Array, BankActivations]:
    """Applies the `top_k` layers of a bank that a router chooses for each sample by its mean token.

        p = softmax(router mean_t x[b, t])      y[b] = x[b] + sum_i p_i f(layers[i] x[b])

    Only the chosen layers are computed: samples are permuted so that those of each layer are
    contiguous, and one grouped product computes all layers.

    Args:
        x: float16|bfloat16 [batch, seq_len, dim], C-contiguous; float32|float64 on the CPU only.
        router: float32 [num_layers, dim]; also float64 on the CPU.
        layers: dtype of `x`, [num_layers, dim, dim]: rows are outputs.
        top_k: 1 to num_layers, up to 32 on the GPU.
        activation: f: "silu", "gelu", "gelu_tanh" or "relu".
        renormalize: make the weights of a sample's layers add up to 1.
        keep: also return the activations that the backward needs.

    Returns:
        `y`, shape and dtype of `x`; with `keep`, `(y, BankActivations)`.

    Raises:
        ArrayError: dtype, shape or layout of an argument.
        ConfigError: an option out of range.

    Runs on CuPy's current stream without synchronisation. Accumulates in float32; deterministic.

    >>> import numpy as np, cukit as ck
    >>> x, layers = np.ones((1, 3, 2)), np.stack([np.eye(2), 2 * np.eye(2)])
    >>> ck.layer_bank(x, np.array([[0.0, 0.0], [1.0, 1.0]]), layers, 1, activation="relu")[0, 0]
    array([2.76159416, 2.76159416])
    """
    op = "layer_bank"
    x, router, layers = adopt(op, x, router, layers)
    check_integer(op, "top_k", top_k, least=1)
    _check_options(op, activation, renormalize)
    check_flag(op, "keep", keep)
    top_k = int(top_k)
    _check(op, "x", x, router, layers)
    if top_k > len(router):
        raise ConfigError(f"{op}: top_k must be at most num_layers ({len(router)}), got {top_k}")
    if x.size * top_k > MAX_INT32 * x.shape[2]:
        raise ArrayShapeError(f"{op}: batch * top_k * seq_len must be below 2^31, got {x.shape}")
    if not runs_kernel(op, x, router, layers):
        return reference.layer_bank(
            x, router, layers, top_k, activation=activation, renormalize=renormalize, keep=keep
        )
    batch, seq_len, dim = x.shape
    stages = _prepare(x, router, top_k, activation)
    sums = empty(x, (batch, stages.parts, dim), float32)
    means, logits = (
        empty(x, (batch, dim), float32),
        empty(x, (batch, len(router)), float32),
    )
    stages.means(x, sums)
    stages.logits(sums, router, means, logits)
    routing = topk_router(logits, top_k, renormalize=renormalize)
    permuted = moe_permute(x.reshape(batch, -1), routing.rows).reshape(-1, dim)
    hidden = grouped_gemm(permuted, layers, routing.expert_offsets * np.int32(seq_len))
    y = empty(x, x.shape)
    stages.combine(x, hidden, routing.rows, routing.weights, NULL, y)
    if not keep:
        return y
    shape = (batch * top_k, seq_len, dim)
    return y, BankActivations(
        means, logits, routing, permuted.reshape(shape), hidden.reshape(shape)
    )


def layer_bank_backward(
    grad_out: Array,
    activations: BankActivations,
    router: Array,
    layers: Array,
    *,
    activation: str = "silu",
    renormalize: bool = False,
) -> BankGradients:
    """Gradients of :func:`layer_bank`, through the weights and through the layers.

    Args:
        grad_out: gradient of `y`, [batch, seq_len, dim].
        activations: as the forward returned them with `keep`.
        router, layers, activation, renormalize: as in the forward.

    Returns:
        `BankGradients(x, router, layers)`; layers that no sample chose have zero gradients.

    Raises:
        ArrayError, ConfigError: as :func:`layer_bank`.
    """
    op = "layer_bank_backward"
    if not isinstance(activations, BankActivations):
        raise ArrayError(
            f"{op}: activations must be BankActivations, got {type(activations).__name__}"
        )
    grad_out, router, layers = adopt(op, grad_out, router, layers)
    _check_options(op, activation, renormalize)
    _check(op, "grad_out", grad_out, router, layers)
    means, logits, routing, permuted, hidden = _check_kept(op, activations, grad_out, router)
    options: dict[str, Any] = {"activation": activation, "renormalize": renormalize}
    if not runs_kernel(op, grad_out, router, layers, means, logits, permuted, hidden):
        kept = BankActivations(means, logits, routing, permuted, hidden)
        return reference.layer_bank_backward(grad_out, kept, router, layers, **options)
    batch, seq_len, dim = grad_out.shape
    top_k = routing.rows.shape[1]
    stages = _prepare_backward(grad_out, hidden, router, top_k, activation)
    grad_hidden = empty(hidden, hidden.shape)
    parts = empty(grad_out, (batch, top_k, stages.parts), float32)
    stages.combine(grad_out, hidden, routing.rows, routing.weights, grad_hidden, parts)
    grad_logits = topk_router_backward(
        parts.sum(axis=2), logits, routing.experts, routing.rows, routing.expert_counts,
        renormalize=renormalize,
    )  # fmt: skip
    grad_permuted, grad_layers = grouped_gemm_backward(
        grad_hidden.reshape(-1, dim),
        permuted.reshape(-1, dim),
        layers,
        routing.expert_offsets * np.int32(seq_len),
    )
    grad_x = empty(grad_out, grad_out.shape)
    grad_means = grad_logits @ router
    stages.inputs(grad_out, grad_permuted, routing.rows, NULL, grad_means, grad_x)
    return BankGradients(grad_x, grad_logits.T @ means, grad_layers)


class LayerBank:
    """A bank of layers that tracks the importance of each layer and can be pruned and grown.

    router: float32 [num_layers, dim]; also float64 on the CPU.
    layers: [num_layers, dim, dim].
    importance: dtype of `router` [num_layers], the exponential moving average of `p`, averaged over
        samples; it adds up to 1.
    """

    def __init__(
        self,
        router: Array,
        layers: Array,
        top_k: int,
        *,
        activation: str = "silu",
        renormalize: bool = False,
        decay: float = 0.99,
    ) -> None:
        """decay: of the importance, 0 to 1. Other arguments: see :func:`layer_bank`.

        Raises ConfigError for an option out of range, ArrayError for shapes that do not match.
        """
        op = "LayerBank"
        router, layers = adopt(op, router, layers)
        check_number(op, "decay", decay, least=0, most=1)
        check_integer(op, "top_k", top_k, least=1)
        _check_options(op, activation, renormalize)
        check_array(op, "router", router, dtypes=(float32, float64), ndim=2)
        num_layers, dim = router.shape
        check_array(op, "layers", layers, dtypes=FLOAT_DTYPES, shape=(num_layers, dim, dim))
        self.router, self.layers, self.top_k = router, layers, int(top_k)
        self.activation, self.renormalize, self.decay = activation, renormalize, float(decay)
        xp = namespace(router)
        self.importance = xp.full(num_layers, 1 / max(num_layers, 1), router.dtype)

    @classmethod
    def initialise(
        cls, num_layers: int, dim: int, top_k: int, *, seed: int = 0, **options: Any
    ) -> LayerBank:
        """A float32 bank on the CPU with normally distributed weights of variance 1 / dim."""
        rng = np.random.default_rng(seed)
        router = rng.standard_normal((num_layers, dim), np.float32) * np.float32(dim**-0.5)
        layers = rng.standard_normal((num_layers, dim, dim), np.float32) * np.float32(dim**-0.5)
        return cls(router, layers, top_k, **options)

    def forward(self, x: Array, *, track: bool = True) -> tuple[Array, BankActivations]:
        """Returns `(y, activations)` of :func:`layer_bank`; `track` updates the importance."""
        y, kept = layer_bank(
            x, self.router, self.layers, self.top_k, activation=self.activation,
            renormalize=self.renormalize, keep=True,
        )  # fmt: skip
        if track and len(x):
            self._track(kept.logits)
        return y, kept

    def __call__(self, x: Array) -> Array:
        """Returns only `y`, without updating the importance."""
        return layer_bank(
            x, self.router, self.layers, self.top_k, activation=self.activation,
            renormalize=self.renormalize,
        )  # fmt: skip

    def backward(self, grad_out: Array, activations: BankActivations) -> BankGradients:
        """The gradients of :func:`layer_bank_backward`."""
        return layer_bank_backward(
            grad_out, activations, self.router, self.layers, activation=self.activation,
            renormalize=self.renormalize,
        )  # fmt: skip

    def _track(self, logits: Array) -> None:
        xp = namespace(logits)
        p = xp.exp(logits - logits.max(axis=1, keepdims=True))
        p = (p / p.sum(axis=1, keepdims=True)).mean(axis=0)
        self.importance = self.decay * self.importance + (1 - self.decay) * p

    def prune(self, count: int) -> Array:
        """Removes the `count` least important layers (of equally important layers, the last ones);
        at least `top_k` layers must remain.

        Returns the indices of the kept layers, ascending, for selecting the optimizer's state. The
        importance of the kept layers is rescaled to add up to 1.
        """
        num_layers = len(self.router)
        check_integer("LayerBank.prune", "count", count, least=0, most=num_layers - self.top_k)
        xp = namespace(self.router)
        order = xp.argsort(-self.importance, kind="stable")[: num_layers - int(count)]
        kept = xp.sort(order)
        self._replace_layers(self.router[kept], self.layers[kept], self.importance[kept])
        return kept

    def grow(self, count: int, *, seed: int = 0, scale: float = 0.1) -> None:
        """Adds `count` layers with normally distributed weights of variance scale^2 / dim.

        Their router rows are the mean of the existing rows plus noise of the same scale, so their
        logits are close to the mean logit. Their importance is the mean importance; all importances
        are then rescaled to add up to 1.
        """
        check_integer("LayerBank.grow", "count", count, least=0)
        check_number("LayerBank.grow", "scale", scale, least=0)
        xp, count = namespace(self.router), int(count)
        dim = self.router.shape[1]
        rng = np.random.default_rng(seed)
        noise = [
            rng.standard_normal(shape) * scale * dim**-0.5
            for shape in ((count, dim), (count, dim, dim))
        ]
        rows = self.router.mean(axis=0) + xp.asarray(noise[0])
        new = xp.asarray(noise[1].astype(np.float32)).astype(self.layers.dtype)
        share = xp.full(count, self.importance.mean(), self.importance.dtype)
        self._replace_layers(
            xp.concatenate([self.router, rows.astype(self.router.dtype)]),
            xp.concatenate([self.layers, new]),
            xp.concatenate([self.importance, share]),
        )

    def _replace_layers(self, router: Array, layers: Array, importance: Array) -> None:
        xp = namespace(router)
        self.router, self.layers = xp.ascontiguousarray(router), xp.ascontiguousarray(layers)
        self.importance = importance / importance.sum()


class _Stages(NamedTuple):
    """Launches of the forward. parts: parts of a sample that are summed separately."""

    parts: int
    means: Launch
    logits: Launch
    combine: Launch


class _BackwardStages(NamedTuple):
    """Launches of the backward. parts: parts of a sample, as in :class:`_Stages`."""

    parts: int
    combine: Launch
    inputs: Launch


@launch_plan
def _prepare(x: Array, router: Array, top_k: int, activation: str) -> _Stages:
    op = "layer_bank"
    _check_kernel(op, x, router)
    batch, seq_len, dim = x.shape
    vec = access_width(dim, x)
    parts = max(1, min(-(-seq_len // _TOKENS), 64))
    fields = {"batch": batch, "seq_len": seq_len, "dim": dim, "top_k": top_k}
    scalars = (_PARAMETERS.pack(**fields, num_layers=len(router), parts=parts),)
    columns = -(-dim // (vec * _THREADS))
    means = Launch(load_kernel(_means_spec(x.dtype.name, vec)), (columns, parts, batch), scalars)
    logits = Launch(load_kernel(_logits_spec(dim)), (batch,), scalars)
    spec = _combine_spec(x.dtype.name, vec, _ACTIVATIONS[activation], True, False)
    blocks = -(-seq_len * dim // (vec * _THREADS))
    combine = Launch(load_kernel(spec), (blocks, batch), scalars)
    return _Stages(parts, means, logits, combine)


@launch_plan
def _prepare_backward(
    grad_out: Array, hidden: Array, router: Array, top_k: int, activation: str
) -> _BackwardStages:
    op = "layer_bank_backward"
    _check_kernel(op, grad_out, router)
    batch, seq_len, dim = grad_out.shape
    vec = access_width(dim, grad_out, hidden)
    parts = max(1, -(-seq_len * dim // (vec * _THREADS * _VECS)))
    fields = {"batch": batch, "seq_len": seq_len, "dim": dim, "top_k": top_k}
    scalars = (_PARAMETERS.pack(**fields, num_layers=len(router), parts=parts),)
    dtype = grad_out.dtype.name
    spec = _backward_spec(dtype, vec, _ACTIVATIONS[activation])
    combine = Launch(load_kernel(spec), (top_k, parts, batch), scalars)
    spec = _combine_spec(dtype, vec, "NoActivation", False, True)
    blocks = -(-seq_len * dim // (vec * _THREADS))
    return _BackwardStages(parts, combine, Launch(load_kernel(spec), (blocks, batch), scalars))


def _means_spec(dtype: str, vec: int) -> KernelSpec:
    defines = (("DTYPE", dtype), ("VEC", vec), ("THREADS", _THREADS))
    return KernelSpec("moe/bank_means.cu", "bank_means", defines, _THREADS)


def _logits_spec(dim: int) -> KernelSpec:
    defines = (("THREADS", _LOGIT_THREADS),)
    return KernelSpec("moe/bank_logits.cu", "bank_logits", defines, _LOGIT_THREADS, 4 * dim)


def _combine_spec(
    dtype: str, vec: int, activation: str, weighted: bool, shifted: bool
) -> KernelSpec:
    defines: tuple[tuple[str, MacroValue], ...] = (
        ("DTYPE", dtype),
        ("VEC", vec),
        ("ACTIVATION", activation),
        ("WEIGHTED", weighted),
        ("SHIFTED", shifted),
        ("THREADS", _THREADS),
    )
    return KernelSpec("moe/bank_combine.cu", "bank_combine", defines, _THREADS)


def _backward_spec(dtype: str, vec: int, activation: str) -> KernelSpec:
    defines = (("DTYPE", dtype), ("VEC", vec), ("ACTIVATION", activation), ("THREADS", _THREADS))
    source = "moe/bank_combine_backward.cu"
    return KernelSpec(source, "bank_combine_backward", defines, _THREADS)


def _check_options(op: str, activation: Any, renormalize: Any) -> None:
    check_choice(op, "activation", activation, tuple(_ACTIVATIONS))
    check_flag(op, "renormalize", renormalize)


def _check(op: str, name: str, x: Array, router: Array, layers: Array) -> None:
    check_array(op, name, x, dtypes=FLOAT_DTYPES, ndim=3)
    dim = x.shape[2]
    check_array(op, "router", router, dtypes=(float32, float64), shape=(None, dim))
    check_array(op, "layers", layers, dtypes=FLOAT_DTYPES, shape=(len(router), dim, dim))
    check_same_dtype(op, **{name: x}, layers=layers)
    if 0 in x.shape or len(router) == 0:
        raise ArrayShapeError(f"{op}: {name} and router must not be empty, got shape {x.shape}")


def _check_kernel(op: str, x: Array, router: Array) -> None:
    check_array(op, "x" if op == "layer_bank" else "grad_out", x, dtypes=KERNEL_DTYPES[1:])
    check_array(op, "router", router, dtypes=(float32,))
    batch, seq_len, dim = x.shape
    if 4 * dim > 48 * 1024:
        raise ConfigError(f"{op}: dim must be at most 12288 on the GPU, got {dim}")
    if batch > MAX_GRID_YZ:
        raise ConfigError(f"{op}: batch must be at most {MAX_GRID_YZ} on the GPU, got {batch}")
    if seq_len * dim // (_THREADS * _VECS) > MAX_GRID_YZ * 8:
        raise ConfigError(f"{op}: seq_len * dim is too large for the GPU, got {seq_len * dim}")


def _check_kept(op: str, kept: BankActivations, grad_out: Array, router: Array) -> BankActivations:
    if not isinstance(kept.routing, Routing):
        raise ArrayError(
            f"{op}: activations.routing must be Routing, got {type(kept.routing).__name__}"
        )
    means, logits, permuted, hidden = adopt(op, kept[0], kept[1], kept[3], kept[4])
    routing = Routing(*adopt(op, *kept.routing))
    batch, seq_len, dim = grad_out.shape
    wide = (float32, float64)
    check_array(op, "activations.means", means, dtypes=wide, shape=(batch, dim))
    check_array(op, "activations.logits", logits, dtypes=wide, shape=(batch, len(router)))
    rows, weights = routing.rows, routing.weights
    check_array(op, "activations.routing.rows", rows, dtypes=(int32,), shape=(batch, None))
    check_array(op, "activations.routing.weights", weights, dtypes=wide, shape=rows.shape)
    shape = (rows.size, seq_len, dim)
    for name, array in (("permuted", permuted), ("hidden", hidden)):
        check_array(op, f"activations.{name}", array, dtypes=FLOAT_DTYPES, shape=shape)
        check_same_dtype(op, grad_out=grad_out, **{f"activations.{name}": array})
    return BankActivations(means, logits, routing, permuted, hidden)


def _own_specs(backward: bool) -> list[KernelSpec]:
    specs = []
    for dtype in KERNEL_DTYPES[1:]:
        for activation in _ACTIVATIONS.values():
            if backward:
                specs.append(_backward_spec(dtype.name, 8, activation))
            else:
                specs.append(_combine_spec(dtype.name, 8, activation, True, False))
        if backward:
            specs.append(_combine_spec(dtype.name, 8, "NoActivation", False, True))
        else:
            specs.append(_means_spec(dtype.name, 8))
    return specs if backward else [*specs, _logits_spec(1024)]


def _specs(backward: bool, ops: tuple[str, ...], device: Device) -> list[KernelSpec]:
    """The op's own kernel variants and those of the ops that it calls."""
    others = [spec for name in ops for spec in get_op(name).specs(device)]
    return list(dict.fromkeys([*_own_specs(backward), *others]))


register(
    name="layer_bank",
    family="moe",
    function=layer_bank,
    reference=reference.layer_bank,
    specs=partial(_specs, False, ("topk_router", "moe_permute", "grouped_gemm")),
)
register(
    name="layer_bank_backward",
    family="moe",
    function=layer_bank_backward,
    reference=reference.layer_bank_backward,
    specs=partial(_specs, True, ("topk_router_backward", "grouped_gemm_backward")),
)
