"""Mixture of experts and of depths: ops that choose the layers that each token passes through."""

from cukit.moe.adaptive_depth import (
    DepthStates,
    adaptive_depth,
    adaptive_depth_backward,
    create_adaptive_depth_mask,
)
from cukit.moe.balance import ExpertPlacement, balance_experts
from cukit.moe.depth_routing import (
    depth_combine,
    depth_combine_backward,
    depth_gather,
    depth_router,
    depth_router_backward,
)
from cukit.moe.ffn import moe_ffn, moe_ffn_backward
from cukit.moe.layer_bank import LayerBank, layer_bank, layer_bank_backward
from cukit.moe.order import expert_order
from cukit.moe.permute import (
    moe_permute,
    moe_permute_backward,
    moe_unpermute,
    moe_unpermute_backward,
)
from cukit.moe.router import topk_router, topk_router_backward
from cukit.reference.depth import DepthRouting
from cukit.reference.layer_bank import BankActivations, BankGradients
from cukit.reference.moe import ExpertOrder, Routing
from cukit.reference.moe_ffn import ExpertActivations, ExpertGradients

__all__ = [
    "BankActivations",
    "BankGradients",
    "DepthRouting",
    "DepthStates",
    "ExpertActivations",
    "ExpertGradients",
    "ExpertOrder",
    "ExpertPlacement",
    "LayerBank",
    "Routing",
    "adaptive_depth",
    "adaptive_depth_backward",
    "balance_experts",
    "create_adaptive_depth_mask",
    "depth_combine",
    "depth_combine_backward",
    "depth_gather",
    "depth_router",
    "depth_router_backward",
    "expert_order",
    "layer_bank",
    "layer_bank_backward",
    "moe_ffn",
    "moe_ffn_backward",
    "moe_permute",
    "moe_permute_backward",
    "moe_unpermute",
    "moe_unpermute_backward",
    "topk_router",
    "topk_router_backward",
]
