"""The architecture of a decoder-only transformer, checked before anything is allocated."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import ml_dtypes
import numpy as np

from cukit.errors import ConfigError

DTYPES: dict[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),  # NumPy only, to check gradients by finite differences
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class TransformerConfig:
    """A pre-norm transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    These values determine the parameter count and every array shape. An invalid combination raises
    ConfigError on construction.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int)):
                raise ConfigError(f"{field.name}: expected an integer, got {value!r}")
            if field.type in ("int", "float") and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{field.name}: expected a positive number, got {value!r}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim: must be even for rotary positions, got {self.head_dim}")
        if self.num_heads_q % self.num_heads_kv:
            raise ConfigError(
                f"num_heads_q: must be a multiple of num_heads_kv ({self.num_heads_kv}), "
                f"got {self.num_heads_q}"
            )

    @property
    def array_dtype(self) -> np.dtype[Any]:
        """`dtype` as a NumPy dtype (bfloat16 comes from ml_dtypes)."""
        return DTYPES[self.dtype]

    @property
    def head_name(self) -> str:
        """The parameter that maps hidden states to logits."""
        return "embed_tokens.weight" if self.tie_embeddings else "lm_head.weight"

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's shape by name. Matrices are [out_features, in_features]."""
        hidden, head_dim = self.hidden_size, self.head_dim
        qkv = (self.num_heads_q + 2 * self.num_heads_kv) * head_dim
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            shapes |= {
                f"layers.{layer}.input_norm.weight": (hidden,),
                f"layers.{layer}.qkv_proj.weight": (qkv, hidden),
                f"layers.{layer}.o_proj.weight": (hidden, self.num_heads_q * head_dim),
                f"layers.{layer}.mlp_norm.weight": (hidden,),
                f"layers.{layer}.gate_up_proj.weight": (2 * self.intermediate_size, hidden),
                f"layers.{layer}.down_proj.weight": (hidden, self.intermediate_size),
            }
        shapes["norm.weight"] = (hidden,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    @property
    def num_parameters(self) -> int:
        """Number of trained values."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON-ready values, for `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TransformerConfig:
        """The config from `to_dict`. Raises ConfigError for unknown or missing names."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise ConfigError(f"transformer config: unknown {', '.join(unknown)}")
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"transformer config: {error}") from None
