"""Groups for `tests.sanitize`: routing by one and several blocks, any alignment of rows, depth."""

from __future__ import annotations

import numpy as np

from cukit import moe
from tests.contract import random, to_device
from tests.moe.test_layer_bank import SHAPES as BANKS
from tests.moe.test_layer_bank import make
from tests.moe.test_permute import SIZES as ROW_SIZES
from tests.moe.test_permute import order_of
from tests.moe.test_router import OPTIONS
from tests.moe.test_router import SIZES as ROUTER_SIZES
from tests.sanitize import Group


def routing() -> None:
    rng = np.random.default_rng(3)
    for size in ROUTER_SIZES:
        for options in OPTIONS:
            logits = random(rng, (size.num_tokens, size.num_experts), "bfloat16")
            bias = random(rng, (size.num_experts,), "float32") if options.biased else None
            logits, bias = to_device("gpu", logits, bias)
            settings = {"scoring": options.scoring, "renormalize": options.renormalize}
            routed = moe.topk_router(
                logits,
                size.top_k,
                bias=bias,
                capacity=options.capacity,
                losses=options.losses,
                **settings,
            )
            moe.topk_router_backward(
                routed.weights,
                logits,
                routed.experts,
                routed.rows,
                routed.expert_counts,
                grad_balance_loss=float(options.losses),
                **settings,
            )
            moe.expert_order(routed.experts, size.num_experts, capacity=options.capacity)


def rows() -> None:
    rng = np.random.default_rng(3)
    for size in ROW_SIZES:
        num_tokens, hidden, top_k = size.num_tokens, size.hidden, size.top_k
        order, num_rows = order_of(rng, num_tokens, top_k)
        x, weights = (
            random(rng, (num_tokens, hidden), "float16"),
            random(rng, order.shape, "float32"),
        )
        x, order, weights = to_device("gpu", x, order, weights)
        y = moe.moe_permute(x, order, num_rows=num_rows)
        moe.moe_permute_backward(y, order)
        moe.moe_unpermute(y, order, weights)
        moe.moe_unpermute_backward(x, y, order, weights)


def banks() -> None:
    rng = np.random.default_rng(4)
    for shape in BANKS:
        x, router, layers, grad = to_device("gpu", *make(rng, shape, "bfloat16"))
        _, kept = moe.layer_bank(x, router, layers, shape[-1], keep=True)
        moe.layer_bank_backward(grad, kept, router, layers)


def depth() -> None:
    rng = np.random.default_rng(5)
    logits, x = random(rng, (2, 1500), "float32"), random(rng, (2, 1500, 40), "bfloat16")
    logits, x = to_device("gpu", logits, x)
    routing = moe.depth_router(logits, 700)
    y = moe.depth_gather(x, routing.indices)
    out = moe.depth_combine(x, y, routing.weights, routing.slots)
    _, grad = moe.depth_combine_backward(out, y, routing.weights, routing.indices)
    moe.depth_router_backward(grad, routing.weights, routing.slots)


GROUPS = {
    "banks": Group(banks),
    "depth": Group(depth, shares=True),
    "routing": Group(routing, shares=True, quick=True),
    "rows": Group(rows, quick=True),
}
