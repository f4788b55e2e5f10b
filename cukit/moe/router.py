"""Routing of tokens to experts: each token's top experts, their weights and the expert order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from cukit.core.arrays import (
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    Array,
    access_width,
    adopt,
    check_array,
    empty,
    float32,
    float64,
    int32,
    runs_kernel,
)
from cukit.core.compiler import MacroValue
from cukit.core.device import Device, current_device
from cukit.core.kernel import NULL, KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.core.scalars import check_choice, check_flag, check_integer, check_number
from cukit.errors import ConfigError
from cukit.moe.order import (
    OrderConfig,
    check_capacity,
    check_choices,
    check_expert_count,
    check_expert_limit,
    empty_counts,
    plan_expert_order,
    routing_parameters,
)
from cukit.reference import moe as reference
from cukit.reference.moe import Routing
from cukit.registry import register

_GRADIENT_PARAMETERS = parameter_structs("moe/parameters.cuh")["RouterGradientParameters"]
_SCORINGS = {"softmax": "Softmax", "sigmoid": "Sigmoid"}
_MAX_CHOICES = 32
"""Maximum choices per token: each lane of a warp holds one."""
_SINGLE_LAUNCH_TOKENS = 16
"""The most tokens that one block routes and orders in a single launch."""
_FEW_TOKENS = 4
_FEW_BINS = 128
"""The most experts for which the registers of a thread allow two blocks per SM."""
_BACKWARD_THREADS = 128


def topk_router(
    logits: Array,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: Array | None = None,
    capacity: int | None = None,
    losses: bool = False,
) -> Routing:
    """Chooses the `top_k` best experts of each token; returns their weights and the expert order.

    `score = softmax(logits)` or `sigmoid(logits)`. Experts are chosen by logit or, with a bias, by
    `score + bias`; among equal ones the lowest index comes first. Weights are the scores of the
    chosen experts, with `renormalize` divided by their sum. With `losses`:

        balance_loss = num_experts * sum_e share[e] * mean_t probability[t, e]
        z_loss = mean_t log_sum_exp(logits[t])^2

    where `share` is the fraction of choices that selected an expert and `probability` is the scores
    divided by their sum: an even load gives a balance loss of 1.

    Args:
        logits: float32|float16|bfloat16 [num_tokens, num_experts], C-contiguous. float64 on the CPU
            only. On the GPU up to 1024 experts.
        top_k: 1 to num_experts; up to 32 on the GPU.
        scoring: "softmax" or "sigmoid".
        renormalize: make each token's weights add up to 1.
        bias: float32 [num_experts], added to scores for the choice only (DeepSeek-V3's
            auxiliary-loss-free load balancing).
        capacity: rows of each expert, as in :func:`expert_order`: choices beyond it are dropped;
            their weight becomes 0 and their row -1. None drops nothing.
        losses: also compute `balance_loss` and `z_loss`.

    Returns:
        `Routing(weights, experts, rows, expert_counts, expert_offsets, balance_loss, z_loss)`:
        float32 and int32 [num_tokens, top_k], then an :class:`ExpertOrder`, then float32 scalars
        (None without `losses`).

    Raises:
        ArrayError: dtype, shape or layout of an argument.
        ConfigError: an option out of range.

    NaN ranks below every other logit. If a row's softmax is undefined (it has a NaN or +inf, or all
    logits are -inf), its weights are NaN, but its experts are still valid and distinct. Runs on
    CuPy's current stream, without synchronisation. Computes in float32; deterministic.
    Papers: Shazeer et al., arXiv:1701.06538; Fedus et al., arXiv:2101.03961 (balance loss); Zoph
    et al., arXiv:2202.08906 (z-loss).

    >>> import numpy as np, cukit as ck
    >>> routing = ck.topk_router(np.log([[0.1, 0.6, 0.3], [0.6, 0.2, 0.2]]).astype("float32"), 2)
    >>> routing.experts, routing.weights.round(3), routing.expert_offsets
    (array([[1, 2],
           [0, 1]], dtype=int32), array([[0.667, 0.333],
           [0.75 , 0.25 ]], dtype=float32), array([0, 1, 3, 4], dtype=int32))
    """
    logits, bias = adopt("topk_router", logits, bias)
    check_integer("topk_router", "top_k", top_k, least=1)
    check_flag("topk_router", "losses", losses)
    _check_scoring("topk_router", scoring, renormalize)
    top_k, capacity = int(top_k), check_capacity("topk_router", capacity, 1)
    if not runs_kernel("topk_router", logits, bias):
        _check(logits, top_k, bias, capacity)
        return reference.topk_router(
            logits,
            top_k,
            scoring=scoring,
            renormalize=renormalize,
            bias=bias,
            capacity=capacity,
            losses=losses,
        )
    launches = _prepare(logits, top_k, scoring, renormalize, bias, capacity, losses)
    num_tokens, num_experts = logits.shape
    weights = empty(logits, (num_tokens, top_k), float32)
    experts = empty(logits, (num_tokens, top_k), int32)
    rows = empty(logits, (num_tokens, top_k), int32)
    counts = empty(logits, (num_experts,), int32)
    offsets = empty(logits, (num_experts + 1,), int32)
    sums = empty(logits, (launches.chunks, num_experts + 1), float32) if losses else NULL
    both = empty(logits, (2,), float32) if losses else NULL
    if launches.place is None:
        launches.route(logits, bias, weights, experts, NULL, sums, rows, counts, offsets, both)
    else:
        chunk_counts = empty_counts(logits, launches.chunks, num_experts)
        launches.route(logits, bias, weights, experts, chunk_counts, sums, NULL, NULL, NULL, NULL)
        dropped = NULL if capacity is None else weights
        launches.place(experts, chunk_counts, sums, rows, counts, offsets, dropped, both)
    if both is None:
        return Routing(weights, experts, rows, counts, offsets)
    return Routing(weights, experts, rows, counts, offsets, both[0], both[1])


def topk_router_backward(
    grad_weights: Array,
    logits: Array,
    experts: Array,
    rows: Array,
    expert_counts: Array,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    grad_balance_loss: float = 0.0,
    grad_z_loss: float = 0.0,
) -> Array:
    """Gradient of :func:`topk_router` with respect to `logits`.

    Choices, their counts and the bias are treated as constants; dropped choices have no gradient.

    Args:
        grad_weights: gradient of `weights`, float32 [num_tokens, top_k].
        logits: the forward's, [num_tokens, num_experts].
        experts, rows, expert_counts: from the forward's result.
        scoring, renormalize: as in the forward.
        grad_balance_loss, grad_z_loss: gradients (coefficients) of the two losses.

    Returns:
        `grad_logits`, shape and dtype of `logits`.

    Raises:
        ArrayError, ConfigError: as :func:`topk_router`.
    """
    arrays = adopt("topk_router_backward", grad_weights, logits, experts, rows, expert_counts)
    grad_weights, logits, experts, rows, expert_counts = arrays
    _check_scoring("topk_router_backward", scoring, renormalize)
    check_number("topk_router_backward", "grad_balance_loss", grad_balance_loss)
    check_number("topk_router_backward", "grad_z_loss", grad_z_loss)
    if not runs_kernel("topk_router_backward", *arrays):
        _check_backward(grad_weights, logits, experts, rows, expert_counts)
        return reference.topk_router_backward(
            *arrays,
            scoring=scoring,
            renormalize=renormalize,
            grad_balance_loss=grad_balance_loss,
            grad_z_loss=grad_z_loss,
        )
    losses = grad_balance_loss != 0 or grad_z_loss != 0
    launch = _prepare_backward(*arrays, scoring, renormalize, losses)
    num_tokens, num_experts = logits.shape
    top_k = experts.shape[1]
    grad_logits = empty(logits, logits.shape)
    if num_tokens:
        parameters = _GRADIENT_PARAMETERS.pack(
            num_tokens=num_tokens,
            num_experts=num_experts,
            top_k=top_k,
            balance_slope=grad_balance_loss * num_experts / (num_tokens * num_tokens * top_k),
            z_slope=grad_z_loss * 2 / num_tokens,
        )
        launch(*arrays, grad_logits, trailing_args=(parameters,))
    return grad_logits


@dataclass(frozen=True)
class RouterConfig:
    """The launch configuration of one call."""

    order: OrderConfig
    dtype: str
    vec: int
    scoring: str
    renormalize: bool
    biased: bool
    losses: bool
    single_launch: bool
    """Whether one block routes and orders all tokens."""
    blocks_per_sm: int
    """Limits the registers: with 2, a thread block of the dependent launch fits on the same SM."""

    def spec(self) -> KernelSpec:
        """The kernel that chooses experts."""
        defines = (
            *self.order.defines(),
            *_scores_defines(self.dtype, self.vec, self.scoring, self.renormalize, self.losses),
            ("BIASED", self.biased),
            ("SINGLE_LAUNCH", self.single_launch),
            ("BLOCKS_PER_SM", self.blocks_per_sm),
            ("MAX_CHOICES", _SINGLE_LAUNCH_TOKENS * _MAX_CHOICES),
        )
        return KernelSpec("moe/topk_router.cu", "topk_router", defines, self.order.threads)


@cache
def plan_topk_router(
    num_tokens: int,
    num_experts: int,
    num_sms: int,
    dtype: str,
    vec: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    biased: bool = False,
    losses: bool = False,
) -> RouterConfig:
    """One block for few tokens; otherwise one block per chunk, and a second launch for the order.

    vec: logits per access, a divisor of `num_experts`.
    """
    # top_k is 1 here: a token chooses an expert at most once, so no count exceeds the tokens.
    order = plan_expert_order(num_tokens, num_experts, num_sms)
    single_launch = num_tokens <= _SINGLE_LAUNCH_TOKENS
    if single_launch:
        threads = min(order.threads, 32 * _FEW_TOKENS if num_tokens <= _FEW_TOKENS else 512)
        order = OrderConfig(order.bins, threads, max(1, num_tokens), 1)
    vec = min(vec, order.bins // 32)
    blocks_per_sm = 2 if not single_launch and order.bins <= _FEW_BINS else 1
    return RouterConfig(
        order,
        dtype,
        vec,
        _SCORINGS[scoring],
        renormalize,
        biased,
        losses,
        single_launch,
        blocks_per_sm,
    )


class _Launches(NamedTuple):
    """place: assigns the rows; None if `route` does that too. chunks: chunks of tokens."""

    route: Launch
    place: Launch | None
    chunks: int


@launch_plan
def _prepare(
    logits: Array,
    top_k: int,
    scoring: str,
    renormalize: bool,
    bias: Array | None,
    capacity: int | None,
    losses: bool,
) -> _Launches:
    _check(logits, top_k, bias, capacity)
    _check_kernel("topk_router", logits, top_k)
    num_tokens, num_experts = logits.shape
    config = plan_topk_router(
        num_tokens,
        num_experts,
        current_device().num_sms,
        logits.dtype.name,
        access_width(num_experts, logits),
        scoring,
        renormalize,
        bias is not None,
        losses,
    )
    order = config.order
    scalars = (routing_parameters(num_tokens, num_experts, top_k, order.chunk, capacity),)
    grid = (order.num_chunks,)
    route = Launch(load_kernel(config.spec()), grid, scalars)
    if config.single_launch:
        return _Launches(route, None, 1)
    place = Launch(
        load_kernel(order.place_spec(losses, polls=True)),
        (order.num_chunks + losses,),
        scalars,
        dependent=True,
    )
    return _Launches(route, place, order.num_chunks)


@launch_plan
def _prepare_backward(
    grad_weights: Array,
    logits: Array,
    experts: Array,
    rows: Array,
    expert_counts: Array,
    scoring: str,
    renormalize: bool,
    losses: bool,
) -> Launch:
    _check_backward(grad_weights, logits, experts, rows, expert_counts)
    num_tokens, num_experts = logits.shape
    _check_kernel("topk_router_backward", logits, experts.shape[1])
    check_array("topk_router_backward", "grad_weights", grad_weights, dtypes=(float32,))
    vec = access_width(num_experts, logits)
    spec = _backward_spec(num_experts, logits.dtype.name, vec, scoring, renormalize, losses)
    return Launch(load_kernel(spec), (-(-num_tokens // (_BACKWARD_THREADS // 32)),))


def _backward_spec(
    num_experts: int, dtype: str, vec: int, scoring: str, renormalize: bool, losses: bool
) -> KernelSpec:
    bins = plan_expert_order(1, num_experts, 1).bins
    defines = (
        ("BINS", bins),
        ("THREADS", _BACKWARD_THREADS),
        *_scores_defines(dtype, min(vec, bins // 32), _SCORINGS[scoring], renormalize, losses),
    )
    entry = "topk_router_backward"
    return KernelSpec(f"moe/{entry}.cu", entry, defines, _BACKWARD_THREADS)


def _scores_defines(
    dtype: str, vec: int, scoring: str, renormalize: bool, losses: bool
) -> tuple[tuple[str, MacroValue], ...]:
    return (
        ("DTYPE", dtype),
        ("VEC", vec),
        ("SCORING", scoring),
        ("RENORMALIZE", renormalize),
        ("LOSSES", losses),
    )


def _check(logits: Array, top_k: int, bias: Array | None, capacity: int | None) -> None:
    op = "topk_router"
    check_array(op, "logits", logits, dtypes=FLOAT_DTYPES, ndim=2)
    num_tokens, num_experts = logits.shape
    check_expert_count(op, num_experts)
    check_capacity(op, capacity, num_experts)
    _check_top_k(op, top_k, num_experts)
    check_choices(op, num_tokens * top_k)
    if bias is not None:
        check_array(op, "bias", bias, dtypes=(float32, float64), shape=(num_experts,))


def _check_backward(
    grad_weights: Array,
    logits: Array,
    experts: Array,
    rows: Array,
    expert_counts: Array,
) -> None:
    op = "topk_router_backward"
    check_array(op, "logits", logits, dtypes=FLOAT_DTYPES, ndim=2)
    num_tokens, num_experts = logits.shape
    check_array(op, "experts", experts, dtypes=(int32,), shape=(num_tokens, None))
    check_array(op, "rows", rows, dtypes=(int32,), shape=experts.shape)
    check_array(op, "expert_counts", expert_counts, dtypes=(int32,), shape=(num_experts,))
    dtypes = (float32, float64)
    check_array(op, "grad_weights", grad_weights, dtypes=dtypes, shape=experts.shape)
    _check_top_k(op, experts.shape[1], num_experts)


def _check_scoring(op: str, scoring: Any, renormalize: Any) -> None:
    check_choice(op, "scoring", scoring, tuple(_SCORINGS))
    check_flag(op, "renormalize", renormalize)


def _check_top_k(op: str, top_k: int, num_experts: int) -> None:
    if not 1 <= top_k <= num_experts:
        raise ConfigError(f"{op}: top_k must be 1 to {num_experts} (num_experts), got {top_k}")


def _check_kernel(op: str, logits: Array, top_k: int) -> None:
    check_array(op, "logits", logits, dtypes=KERNEL_DTYPES)
    check_expert_limit(op, logits.shape[1])
    if top_k > _MAX_CHOICES:
        raise ConfigError(f"{op}: top_k must be at most {_MAX_CHOICES} on the GPU, got {top_k}")


def _specs(device: Device) -> list[KernelSpec]:
    common = [
        plan_topk_router(tokens, experts, device.num_sms, dtype.name, 16 // dtype.itemsize)
        for tokens in (1, 16, 4096)
        for experts in (8, 128, 256)
        for dtype in KERNEL_DTYPES
    ]
    options = [
        plan_topk_router(
            tokens, 1024, device.num_sms, "float32", 4, scoring, renormalize, biased, losses
        )
        for tokens, scoring, renormalize, biased, losses in (
            (1, "softmax", True, False, False),
            (16, "softmax", True, False, True),
            (4096, "softmax", False, True, True),
            (4096, "sigmoid", True, True, False),
            (4096, "sigmoid", False, False, True),
        )
    ]
    places = [
        config.order.place_spec(losses=True, polls=True)
        for config in options
        if not config.single_launch
    ]
    return [config.spec() for config in (*common, *options)] + places


def _specs_backward(device: Device) -> list[KernelSpec]:
    return [
        _backward_spec(experts, dtype.name, 16 // dtype.itemsize, scoring, renormalize, losses)
        for experts in (8, 128, 1024)
        for dtype in KERNEL_DTYPES
        for scoring in _SCORINGS
        for renormalize, losses in ((True, True), (False, False))
    ]


register(
    name="topk_router",
    family="moe",
    function=topk_router,
    reference=reference.topk_router,
    specs=_specs,
)
register(
    name="topk_router_backward",
    family="moe",
    function=topk_router_backward,
    reference=reference.topk_router_backward,
    specs=_specs_backward,
)
