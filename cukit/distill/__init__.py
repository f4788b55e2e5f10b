"""Knowledge distillation: losses, optimiser, and the loop that puts them together."""

from cukit.distill.adamw import AdamWState, adamw
from cukit.distill.cross_entropy import cross_entropy, cross_entropy_backward
from cukit.distill.global_norm import clip_scale, global_norm
from cukit.distill.kl_divergence import kl_divergence, kl_divergence_backward
from cukit.distill.linear_cross_entropy import LinearCrossEntropyResult, linear_cross_entropy
from cukit.distill.linear_kl_divergence import LinearKlResult, linear_kl_divergence

__all__ = [
    "AdamWState",
    "LinearCrossEntropyResult",
    "LinearKlResult",
    "adamw",
    "clip_scale",
    "cross_entropy",
    "cross_entropy_backward",
    "global_norm",
    "kl_divergence",
    "kl_divergence_backward",
    "linear_cross_entropy",
    "linear_kl_divergence",
]
