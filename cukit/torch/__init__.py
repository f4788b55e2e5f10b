"""cukit for PyTorch: functions and modules with gradients, on torch's current stream.

>>> import torch, cukit.torch as ckt
>>> x = torch.randn(2, 8, requires_grad=True)
>>> ckt.rms_norm(x, torch.ones(8)).sum().backward()

Tensors and arrays share memory. CPU tensors use the references, or the kernels in the emulator
(`with cukit.backend("emulator")`). The operators are `torch.ops.cukit.*`, which torch.compile
traces without graph breaks. See docs/torch.md.
"""

from cukit.errors import MissingDependencyError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(
        "cukit.torch needs PyTorch 2.6 or newer: pip install 'cukit[torch]'"
    ) from error

from cukit.torch.attention_kl import (
    attention_kl,
    distillation_attention,
    indexer_kl,
    relation_kl,
)
from cukit.torch.functional import (
    flash_attention,
    gated_linear,
    gated_mlp,
    gelu,
    gelu_and_mul,
    layer_norm,
    linear,
    rms_norm,
    rope,
    silu_and_mul,
)
from cukit.torch.losses import (
    cross_entropy,
    distillation_loss,
    kl_divergence,
    linear_cross_entropy,
    linear_distillation_loss,
    linear_kl_divergence,
    linear_sampled_distillation_loss,
    linear_topk_distillation_loss,
    sampled_distillation_loss,
    teacher_top_k,
    topk_distillation_loss,
)
from cukit.torch.modules import (
    FlashAttention,
    LayerNorm,
    LinearActivation,
    LinearGELU,
    LinearSiLU,
    RMSNorm,
    SwiGLU,
)
from cukit.torch.optimize import Optimized, SwapReport, optimize
from cukit.torch.quantized import QuantizedLinear, replace_linear_with_quantized
from cukit.torch.transformers import register_attention

__all__ = [
    "FlashAttention",
    "LayerNorm",
    "LinearActivation",
    "LinearGELU",
    "LinearSiLU",
    "Optimized",
    "QuantizedLinear",
    "RMSNorm",
    "SwapReport",
    "SwiGLU",
    "attention_kl",
    "cross_entropy",
    "distillation_attention",
    "distillation_loss",
    "flash_attention",
    "gated_linear",
    "gated_mlp",
    "gelu",
    "gelu_and_mul",
    "indexer_kl",
    "kl_divergence",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_distillation_loss",
    "linear_kl_divergence",
    "linear_sampled_distillation_loss",
    "linear_topk_distillation_loss",
    "optimize",
    "register_attention",
    "relation_kl",
    "replace_linear_with_quantized",
    "rms_norm",
    "rope",
    "sampled_distillation_loss",
    "silu_and_mul",
    "teacher_top_k",
    "topk_distillation_loss",
]
