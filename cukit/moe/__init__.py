"""Mixture of experts: routing, expert order, and layers of experts."""

from cukit.moe.order import expert_order
from cukit.moe.permute import (
    moe_permute,
    moe_permute_backward,
    moe_unpermute,
    moe_unpermute_backward,
)
from cukit.moe.router import topk_router, topk_router_backward
from cukit.reference.moe import ExpertOrder, Routing

__all__ = [
    "ExpertOrder",
    "Routing",
    "expert_order",
    "moe_permute",
    "moe_permute_backward",
    "moe_unpermute",
    "moe_unpermute_backward",
    "topk_router",
    "topk_router_backward",
]
