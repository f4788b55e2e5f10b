"""Cases of varying depth in `cukit.moe`: mixture of depths, in which a block processes only some of
the tokens, and adaptive depth, in which each token has its own number of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from cukit import moe
from cukit.reference import depth as reference
from profiling import peers
from profiling.case import Call, Case, Workload, itemsize
from profiling.data import array_module, normal
from profiling.standard_impls import forward_impls

FAMILY = "moe"
DTYPE = "bfloat16"


def cases(small: bool = False) -> list[Case]:
    """Mixture of depths with an eighth of the tokens; adaptive depth with uniform depths."""
    routing, layers = (
        ((2, 40, 8, 32), (40, 16, 3)) if small else ((8, 4096, 512, 4096), (8192, 4096, 4))
    )
    return [
        *(maker(*routing) for maker in ROUTING_MAKERS),
        adaptive_case(*layers),
        adaptive_backward_case(*layers),
    ]


# ---- Mixture of depths ----


def _depth_case(op: str, shape: tuple[int, int, int, int], rows: int, build: Any) -> Case:
    """rows: number of rows of hidden elements read or written; 0: only logits and slots."""
    batch, seq_len, capacity, hidden = shape
    return Case(
        family=FAMILY,
        op=op,
        name=f"{batch}x{seq_len} keep {capacity} of {hidden}",
        dtype=DTYPE,
        build=build,
        bytes=rows * hidden * itemsize(DTYPE) if rows else batch * seq_len * (4 + 4),
    )


def _routing(batch: int, seq_len: int, capacity: int) -> tuple[Any, Any]:
    logits = normal((batch, seq_len), "float32")
    return logits, moe.depth_router(logits, capacity)


def router_case(batch: int, seq_len: int, capacity: int, hidden: int) -> Case:
    def build() -> Workload:
        logits = normal((batch, seq_len), "float32")

        def torch_router(torch: ModuleType) -> Callable[..., Any]:
            def run(logits: Any) -> Any:
                weights, indices = torch.topk(logits, capacity, dim=1, sorted=False)
                indices, order = indices.sort(dim=1)
                slots = torch.full(logits.shape, -1, dtype=torch.int32, device=logits.device)
                numbers = torch.arange(capacity, dtype=torch.int32, device=logits.device)
                slots.scatter_(1, indices, numbers.expand(batch, -1))
                return indices.int(), slots, weights.gather(1, order).sigmoid()

            return run

        return Workload(
            impls=forward_impls(partial(moe.depth_router, logits, capacity), torch_router, logits),
            expected=partial(reference.depth_router, logits, capacity),
        )

    return _depth_case("depth_router", (batch, seq_len, capacity, hidden), 0, build)


def router_backward_case(batch: int, seq_len: int, capacity: int, hidden: int) -> Case:
    def build() -> Workload:
        _, routing = _routing(batch, seq_len, capacity)
        grad = normal((batch, capacity), "float32")
        arguments = (grad, routing.weights, routing.slots)
        return Workload(
            impls={"cukit": lambda: partial(moe.depth_router_backward, *arguments)},
            expected=partial(reference.depth_router_backward, *arguments),
        )

    return _depth_case("depth_router_backward", (batch, seq_len, capacity, hidden), 0, build)


def gather_case(batch: int, seq_len: int, capacity: int, hidden: int) -> Case:
    def build() -> Workload:
        _, routing = _routing(batch, seq_len, capacity)
        x = normal((batch, seq_len, hidden), DTYPE)

        def torch_gather() -> Call:
            index = peers.to_torch(routing.indices).long()[:, :, None].expand(-1, -1, hidden)
            return peers.forward(lambda x: x.gather(1, index), x)

        return Workload(
            impls={
                "cukit": lambda: partial(moe.depth_gather, x, routing.indices),
                "torch-eager": torch_gather,
            },
            expected=partial(reference.depth_gather, x, routing.indices),
        )

    rows = 2 * batch * capacity
    return _depth_case("depth_gather", (batch, seq_len, capacity, hidden), rows, build)


def combine_case(batch: int, seq_len: int, capacity: int, hidden: int) -> Case:
    def build() -> Workload:
        _, routing = _routing(batch, seq_len, capacity)
        x, y = normal((batch, seq_len, hidden), DTYPE), normal((batch, capacity, hidden), DTYPE)
        arguments = (x, y, routing.weights, routing.slots)

        def torch_combine() -> Call:
            index = peers.to_torch(routing.indices).long()[:, :, None].expand(-1, -1, hidden)
            weights = peers.to_torch(routing.weights)[:, :, None].bfloat16()
            return peers.forward(lambda x, y: x.scatter_add(1, index, weights * y), x, y)

        return Workload(
            impls={
                "cukit": lambda: partial(moe.depth_combine, *arguments),
                "torch-eager": torch_combine,
            },
            expected=partial(reference.depth_combine, *arguments),
        )

    rows = batch * (2 * seq_len + capacity)
    return _depth_case("depth_combine", (batch, seq_len, capacity, hidden), rows, build)


def combine_backward_case(batch: int, seq_len: int, capacity: int, hidden: int) -> Case:
    def build() -> Workload:
        _, routing = _routing(batch, seq_len, capacity)
        grad = normal((batch, seq_len, hidden), DTYPE)
        y = normal((batch, capacity, hidden), DTYPE)
        arguments = (grad, y, routing.weights, routing.indices)
        return Workload(
            impls={"cukit": lambda: partial(moe.depth_combine_backward, *arguments)},
            expected=partial(reference.depth_combine_backward, *arguments),
        )

    rows = 3 * batch * capacity
    return _depth_case("depth_combine_backward", (batch, seq_len, capacity, hidden), rows, build)


ROUTING_MAKERS = (
    router_case,
    router_backward_case,
    gather_case,
    combine_case,
    combine_backward_case,
)


# ---- Per-token depth ----


def _adaptive_inputs(tokens: int, hidden: int, layers: int) -> tuple[Any, Any, Any]:
    depth = np.random.default_rng(0).integers(0, layers + 1, tokens)
    weights = normal((layers, hidden, hidden), DTYPE, scale=hidden**-0.5)
    return normal((tokens, hidden), DTYPE), weights, depth


def _adaptive_case(
    op: str, tokens: int, hidden: int, layers: int, products: int, build: Callable[[], Workload]
) -> Case:
    """Depths are uniform, so a token has on average half of the layers."""
    return Case(
        family=FAMILY,
        op=op,
        name=f"{tokens}x{hidden} {layers} layers",
        dtype=DTYPE,
        build=build,
        flops=products * tokens * hidden * hidden * layers,
    )


def adaptive_case(tokens: int, hidden: int, layers: int) -> Case:
    """The peer runs all layers on all tokens, and selects the result after each layer."""

    def build() -> Workload:
        x, weights, depth = _adaptive_inputs(tokens, hidden, layers)
        masks = array_module().asarray(reference.create_adaptive_depth_mask(depth, layers))

        def torch_all(torch: ModuleType) -> Callable[..., Any]:
            chosen = peers.to_torch(masks)[:, :, None]

            def run(x: Any, weights: Any) -> Any:
                for layer in range(layers):
                    y = torch.nn.functional.silu(x @ weights[layer].T)
                    x = torch.where(chosen[layer], y, x)
                return x

            return run

        impls = forward_impls(
            partial(moe.adaptive_depth, x, weights, depth, "silu"), torch_all, x, weights
        )
        placed = array_module().asarray(depth)
        expected = partial(reference.adaptive_depth, x, weights, placed, "silu")
        return Workload(impls=impls, expected=expected, tolerance=3e-2)

    return _adaptive_case("adaptive_depth", tokens, hidden, layers, 1, build)


def adaptive_backward_case(tokens: int, hidden: int, layers: int) -> Case:
    def build() -> Workload:
        x, weights, depth = _adaptive_inputs(tokens, hidden, layers)
        grad = normal((tokens, hidden), DTYPE)
        _, states = moe.adaptive_depth(x, weights, depth, "silu", return_states=True)
        ours = partial(moe.adaptive_depth_backward, grad, weights, states, "silu")
        placed = array_module().asarray(depth)
        expected = partial(reference.adaptive_depth_backward, grad, x, weights, placed, "silu")
        return Workload(impls={"cukit": lambda: ours}, expected=expected, tolerance=3e-2)

    return _adaptive_case("adaptive_depth_backward", tokens, hidden, layers, 2, build)
