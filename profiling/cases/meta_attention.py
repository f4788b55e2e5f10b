"""Cases of `cukit.models.MetaAttention`: forward, backward, and one token per sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np

from cukit import registry
from cukit.models import MetaAttention, MetaAttentionConfig, MetaAttentionState, meta_attention
from profiling import peers
from profiling.case import Call, Case, Workload, itemsize
from profiling.data import normal
from profiling.standard_impls import backward_impls, forward_impls

FAMILY = "sequence"
DTYPE = "bfloat16"
CHUNK = 128
"""Tokens per chunk of the scan in torch."""
TOLERANCE = 3e-2
"""Activations between eight ops are rounded to bfloat16."""

OPS = (
    "linear", "linear_backward", "flash_attention", "flash_attention_backward", "causal_conv",
    "causal_conv_backward", "causal_conv_step", "gated_scan", "gated_scan_backward",
    "gated_scan_step",
)  # fmt: skip
"""Ops that the module calls; the expected results use their references."""


def cases(small: bool = False) -> list[Case]:
    """Layers of (sequences, tokens); steps of (sequences, tokens in the full caches)."""
    config = MetaAttentionConfig(hidden=2048, num_heads=32, state_dim=64)
    shapes: tuple[tuple[int, int], ...] = ((2, 4096), (8, 1024))
    steps = ((64, 4096),)
    if small:
        config = MetaAttentionConfig(hidden=32, num_heads=2, state_dim=16, filter_length=9)
        shapes, steps = ((2, 20),), ((2, 6),)
    return [
        *(layer_case(config, *shape, backward) for backward in (False, True) for shape in shapes),
        *(step_case(config, *shape) for shape in steps),
    ]


def _name(config: MetaAttentionConfig, batch: int, tokens: int) -> str:
    return f"{batch}x{tokens}x{config.hidden}, {config.num_heads} heads, state {config.state_dim}"


def _parameters(config: MetaAttentionConfig) -> dict[str, Any]:
    scale = {"conv_weight": 0.5, "gate_bias": 0.0, "conv_bias": 0.0}
    return {
        name: normal(shape, DTYPE, scale.get(name, config.hidden**-0.5))
        for name, shape in config.shapes().items()
    }


def _expected(
    config: MetaAttentionConfig, parameters: dict[str, Any], run: Callable[..., Any]
) -> Any:
    """The result of `run` for a float32 module whose ops are the references."""
    references: dict[str, Any] = {name: registry.get_op(name).reference for name in OPS}
    wide = {name: array.astype(np.float32) for name, array in parameters.items()}
    with mock.patch.multiple(meta_attention, **references):
        return run(MetaAttention(config, wide))


def layer_case(config: MetaAttentionConfig, batch: int, tokens: int, backward: bool) -> Case:
    """The forward, or the gradients of x and of all parameters."""

    def build() -> Workload:
        parameters = _parameters(config)
        module = MetaAttention(config, parameters)
        names = tuple(config.shapes())
        x = normal((batch, tokens, config.hidden), DTYPE)
        inputs = (x, *(parameters[name] for name in names))
        function = partial(torch_forward, config)
        if not backward:
            impls = forward_impls(lambda: module.forward(x)[0], function, *inputs)
            run = partial(_forward_of, x.astype(np.float32))
            return Workload(impls, lambda: _expected(config, parameters, run), TOLERANCE)
        grad_y = normal(x.shape, DTYPE)
        _, kept = module.forward(x)

        def ours() -> Any:
            grad_x, grads = module.backward(grad_y, kept)
            return (grad_x, *(grads[name] for name in names))

        def gradients(exact: MetaAttention) -> Any:
            _, activations = exact.forward(x.astype(np.float32))
            grad_x, grads = exact.backward(grad_y.astype(np.float32), activations)
            return (grad_x, *(grads[name] for name in names))

        return Workload(
            backward_impls(ours, function, inputs, grad_y),
            lambda: _expected(config, parameters, gradients),
            TOLERANCE,
        )

    rows, hidden = batch * tokens, config.hidden
    weights = sum(int(np.prod(shape)) for shape in config.shapes().values())
    products = 2.0 * rows * hidden * (config.channels + 4 * hidden + 5 * config.num_heads)
    attention = 4.0 * batch * hidden * tokens * (tokens + 1) / 2
    moved = (2 * rows * hidden + weights) * itemsize(DTYPE)
    return Case(
        FAMILY,
        "meta_attention_backward" if backward else "meta_attention",
        _name(config, batch, tokens),
        DTYPE,
        build,
        flops=(2 * products + 2.5 * attention) if backward else products + attention,
        bytes=moved * (2 if backward else 1),
        measure_memory=True,
    )


def _forward_of(x: Any, module: MetaAttention) -> Any:
    return module.forward(x)[0]


def step_case(config: MetaAttentionConfig, batch: int, tokens: int) -> Case:
    """The step of the last token that fits in the state, repeated. The decays are so strong that
    the scan's state contains only this token, so that repeated steps have equal results."""

    def build() -> Workload:
        parameters = _parameters(config)
        parameters["gate_bias"][: config.num_heads] = 30
        module = MetaAttention(config, parameters)
        x = normal((batch, config.hidden), DTYPE)
        k, v, values = (normal((batch, tokens, config.hidden), DTYPE) for _ in range(3))

        def full(module: MetaAttention) -> MetaAttentionState:
            state = module.start(batch, tokens)
            state.k[:], state.v[:] = k.reshape(state.k.shape), v.reshape(state.v.shape)
            state.values[:] = values
            for _ in range(4):  # fills the convolution's state
                state.length = tokens - 1
                module.step(x.astype(state.k.dtype), state)
            return state

        state = full(module)

        def ours() -> Any:
            state.length = tokens - 1
            return module.step(x, state)

        def exact(module: MetaAttention) -> Any:
            state = full(module)
            state.length = tokens - 1
            return module.step(x.astype(np.float32), state)

        def theirs(compiled: bool) -> Call:
            caches = (state.conv, state.scan, state.k, state.v, state.values)
            arrays = (x, *(parameters[name] for name in config.shapes()), *caches)
            copies = [array.copy() for array in arrays]
            function = torch_step(config, peers.torch())
            return peers.forward(function, *copies, compiled=compiled)

        impls: dict[str, Callable[[], Call]] = {
            "cukit": lambda: ours,
            "torch-eager": partial(theirs, False),
            "torch-compile": partial(theirs, True),
        }
        return Workload(impls, lambda: _expected(config, parameters, exact), TOLERANCE)

    weights = sum(int(np.prod(shape)) for shape in config.shapes().values())
    caches = batch * config.hidden * (2 * tokens + min(tokens, config.filter_length))
    states = 2 * batch * config.hidden * config.state_dim * itemsize("float32")
    moved = (weights + caches) * itemsize(DTYPE) + states
    return Case(
        FAMILY, "meta_attention_step", _name(config, batch, tokens), DTYPE, build, bytes=moved
    )


def torch_forward(config: MetaAttentionConfig, torch: ModuleType) -> Callable[..., Any]:
    """The same module in torch: its linear layers, convolution, attention and FFT, and a scan in
    chunks (Dao and Gu, arXiv:2405.21060, listing 1)."""
    functional = torch.nn.functional
    heads, width = config.num_heads, config.head_dim
    groups, rank = config.num_groups, config.state_dim

    def segments(log_decay: Any) -> Any:
        """exp(sum of log_decay[..., j + 1 : i + 1]) for j <= i, else 0."""
        upto = log_decay.cumsum(-1)
        differences = upto[..., :, None] - upto[..., None, :]
        lower = torch.ones_like(differences, dtype=torch.bool).tril()
        return differences.masked_fill(~lower, -torch.inf).exp()

    def scan(u: Any, b: Any, c: Any, log_decay: Any) -> Any:
        batch, tokens = u.shape[:2]
        chunk = CHUNK if tokens % CHUNK == 0 else tokens
        parts = tokens // chunk
        u = u.reshape(batch, parts, chunk, heads, width)
        b, c = (
            a.reshape(batch, parts, chunk, groups, rank).repeat_interleave(heads // groups, 3)
            for a in (b, c)
        )
        decay = log_decay.reshape(batch, parts, chunk, heads).permute(0, 3, 1, 2)
        upto = decay.cumsum(-1)
        within = (torch.einsum("bpihs,bpjhs->bhpij", c, b) * segments(decay)).to(u.dtype)
        y = torch.einsum("bhpij,bpjhd->bpihd", within, u)
        remaining = (upto[..., -1:] - upto).exp().permute(0, 2, 3, 1)[..., None]
        states = torch.einsum("bpjhs,bpjhd->bphsd", (b * remaining).to(u.dtype), u)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], 1).float()
        between = segments(functional.pad(upto[..., -1], (1, 0)))
        before = torch.einsum("bhpq,bqhsd->bphsd", between, states)[:, :-1].to(u.dtype)
        faded = (c * upto.exp().permute(0, 2, 3, 1)[..., None]).to(u.dtype)
        return (y + torch.einsum("bpihs,bphsd->bpihd", faded, before)).reshape(
            batch, tokens, heads, width
        )

    def function(
        x: Any,
        in_proj: Any,
        gate_proj: Any,
        gate_bias: Any,
        conv_weight: Any,
        conv_bias: Any,
        taps: Any,
        out_proj: Any,
    ) -> Any:
        batch, tokens, hidden = x.shape
        raw, q, k, v = functional.linear(x, in_proj).split([config.channels] + 3 * [hidden], -1)
        conv = functional.conv1d(
            raw.transpose(1, 2), conv_weight[:, None], conv_bias, padding=3, groups=config.channels
        )
        mixed = functional.silu(conv[..., :tokens]).transpose(1, 2)
        u, b, c = mixed.split([hidden, groups * rank, groups * rank], -1)
        rows = functional.linear(x, gate_proj).float() + gate_bias.float()
        gates = rows[..., heads:].reshape(batch, tokens, heads, 4).softmax(-1)
        split = (batch, tokens, heads, width)
        scanned = scan(u, b, c, -functional.softplus(rows[..., :heads]))
        q, k, v = (a.reshape(split).transpose(1, 2) for a in (q, k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        size = 2 * tokens
        spectrum = torch.fft.rfft(taps[:, :tokens].float(), size).T
        filtered = torch.fft.irfft(torch.fft.rfft(u.float(), size, 1) * spectrum, size, 1)
        filtered = filtered[:, :tokens].to(x.dtype)
        branches = (u, scanned, attended, filtered)
        mixture = sum(
            branch.reshape(split).float() * gates[..., i, None] for i, branch in enumerate(branches)
        )
        return functional.linear(mixture.to(x.dtype).reshape(x.shape), out_proj)

    return function


def torch_step(config: MetaAttentionConfig, torch: ModuleType) -> Callable[..., Any]:
    """The last token of full caches in torch; updates them in place."""
    functional = torch.nn.functional
    heads, width = config.num_heads, config.head_dim
    groups, rank = config.num_groups, config.state_dim

    def function(
        x: Any,
        in_proj: Any,
        gate_proj: Any,
        gate_bias: Any,
        conv_weight: Any,
        conv_bias: Any,
        taps: Any,
        out_proj: Any,
        conv: Any,
        state: Any,
        keys: Any,
        values: Any,
        inputs: Any,
    ) -> Any:
        batch, hidden = x.shape
        raw, q, k, v = functional.linear(x, in_proj).split([config.channels] + 3 * [hidden], -1)
        window = torch.cat([conv, raw[:, None]], 1)
        conv.copy_(window[:, 1:])
        mixed = functional.silu(torch.einsum("bwc,cw->bc", window, conv_weight) + conv_bias)
        u, b, c = mixed.split([hidden, groups * rank, groups * rank], -1)
        rows = functional.linear(x, gate_proj).float() + gate_bias.float()
        gates = rows[:, heads:].reshape(batch, heads, 4).softmax(-1)
        decay = torch.exp(-functional.softplus(rows[:, :heads]))
        split = (batch, heads, width)
        b, c = (
            a.reshape(batch, groups, rank).repeat_interleave(heads // groups, 1).float()
            for a in (b, c)
        )
        added = b[..., None] * u.reshape(split)[:, :, None].float()
        state.copy_(state * decay[..., None, None] + added)
        scanned = torch.einsum("bhs,bhsd->bhd", c, state)
        keys[:, -1], values[:, -1], inputs[:, -1] = k.reshape(split), v.reshape(split), u
        attended = functional.scaled_dot_product_attention(
            q.reshape(split)[:, :, None], keys.transpose(1, 2), values.transpose(1, 2)
        )[:, :, 0]
        count = min(inputs.shape[1], taps.shape[1])
        filtered = (inputs[:, -count:] * taps[:, :count].flip(1).T).float().sum(1)
        branches = (u, scanned, attended, filtered)
        mixture = sum(
            branch.reshape(split).float() * gates[..., i, None] for i, branch in enumerate(branches)
        )
        return functional.linear(mixture.to(x.dtype).reshape(x.shape), out_proj)

    return function
