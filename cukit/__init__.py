"""cukit: CUDA kernels as plain source strings, with a NumPy-like surface.

>>> import cukit as ck
>>> x = ck.ones((2, 8))          # on the GPU where there is one, else on the CPU
>>> ck.rms_norm(x, ck.ones(8)).shape
(2, 8)
"""

from typing import Any

from cukit.array_api import *  # noqa: F403
from cukit.array_api import __all__ as _array_api_names
from cukit.array_api import xp_namespace
from cukit.attention import *  # noqa: F403
from cukit.attention import __all__ as _attention_names
from cukit.distill import (
    adamw,
    cross_entropy,
    cross_entropy_backward,
    global_norm,
    kl_divergence,
    kl_divergence_backward,
    linear_cross_entropy,
    linear_kl_divergence,
)
from cukit.emulator import activate_from_environment, backend
from cukit.errors import *  # noqa: F403
from cukit.gemm import *  # noqa: F403
from cukit.gemm import __all__ as _gemm_names
from cukit.layers import *  # noqa: F403
from cukit.layers import __all__ as _layers_names
from cukit.registry import get_kernel, register_kernel

__version__ = "0.1.0"

__all__ = sorted(
    [
        *_array_api_names,
        *_attention_names,
        *_gemm_names,
        *_layers_names,
        "__version__",
        "adamw",
        "cross_entropy",
        "cross_entropy_backward",
        "backend",
        "get_kernel",
        "global_norm",
        "kl_divergence",
        "kl_divergence_backward",
        "linear_cross_entropy",
        "linear_kl_divergence",
        "register_kernel",
        "xp",
    ]
)


activate_from_environment()


def __getattr__(name: str) -> Any:
    # Which namespace `xp` is depends on the machine and on CUKIT_DEVICE: looked up when used.
    if name == "xp":
        return xp_namespace()
    raise AttributeError(f"module 'cukit' has no attribute {name!r}")
