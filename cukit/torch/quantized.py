"""Linear layers with int8 or int4 weights."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import cukit
from cukit.core.quantized_array import QuantizedArray
from cukit.errors import ConfigError
from cukit.gemm.quantized.weight_only_layout import WeightDescription, pack_weight
from cukit.torch import _operator_definitions as _operator_definitions
from cukit.torch._arrays import as_array, as_tensor, on_current_stream
from cukit.torch._operator_definitions import packed_weight

_BITS = {8: cukit.int8, 4: cukit.int4}
_GROUPS = (32, 64, 128)


class QuantizedLinear(nn.Module):
    """`x weight^T + bias` with an int8 or int4 weight that is dequantised in the kernel.

    Create it with :meth:`from_linear`. The weight is a constant, stored in the buffers `blocks` and
    `row_scales`; the input, and a bias that is a parameter, have gradients. Inputs are float16 or
    bfloat16; on the CPU also float32 and float64.
    """

    blocks: Tensor
    row_scales: Tensor | None

    def __init__(
        self, blocks: Tensor, row_scales: Tensor | None, description: WeightDescription,
        bias: Tensor | nn.Parameter | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.out_features, self.in_features = description.shape
        self.register_buffer("blocks", blocks)
        self.register_buffer("row_scales", row_scales)
        if isinstance(bias, nn.Parameter):
            self.bias: Tensor | None = bias
        else:
            self.register_buffer("bias", bias)
        self.bits = description.dtype.bits
        self.group_size = description.group_size
        self._description = {
            "dtype": description.dtype.name,
            "rows": self.out_features,
            "columns": self.in_features,
            "group_size": description.group_size or 0,
            "scale_dtype": description.scale_dtype.name,
            "zero_points": description.has_zero_points,
        }

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, bits: int = 8, group_size: int | None = None
    ) -> QuantizedLinear:
        """Quantise the weight of `linear` on its device; the bias is shared.

        Args:
            bits: 8 or 4.
            group_size: number of columns that share a scale: 32, 64 or 128; None: the whole row for
                8 bits, 128 columns for 4.

        Raises:
            ConfigError: invalid bits or group_size.
        """
        if bits not in _BITS:
            raise ConfigError(f"QuantizedLinear: bits must be 8 or 4, got {bits!r}")
        if group_size is not None and group_size not in _GROUPS:
            raise ConfigError(
                f"QuantizedLinear: group_size must be 32, 64, 128 or None, got {group_size!r}"
            )
        if group_size is None and bits == 4:
            group_size = 128
        weight = linear.weight.detach()
        if weight.dtype == torch.float64:
            weight = weight.float()
        with on_current_stream(weight):
            array = as_array("QuantizedLinear", "weight", weight)
            scale_dtype = "float32" if weight.dtype == torch.float32 else array.dtype
            options: dict[str, Any] = {"group_size": group_size, "scale_dtype": scale_dtype}
            codes: QuantizedArray = cukit.quantize(array, _BITS[bits], **options)
            packed = pack_weight(codes)
            blocks = as_tensor(packed.blocks, weight)
            scales = packed.row_scales
            row_scales = None if scales is None else as_tensor(scales, weight)
        return cls(blocks, row_scales, packed.description, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return torch.ops.cukit.quantized_linear(
            x, bias, self.blocks, self.row_scales, **self._description
        )

    def dequantize(self) -> Tensor:
        """The dequantised weight [out_features, in_features], float32."""
        with on_current_stream(self.blocks):
            scales = self.row_scales
            blocks = as_array("QuantizedLinear", "blocks", self.blocks)
            rows = None if scales is None else as_array("QuantizedLinear", "row_scales", scales)
            packed = packed_weight(blocks, rows, **self._description)
            return as_tensor(packed.unpack().decode(), self.blocks)

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedLinear:
        """`.to(dtype)` converts the bias; the codes and their scales keep their dtypes."""
        kept = self.row_scales
        super()._apply(fn, recurse)
        if kept is not None and self.row_scales is not None:
            self.row_scales = kept.to(self.row_scales.device)
        return self

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        group = "row" if self.group_size is None else self.group_size
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, bits={self.bits}, group={group}"
        )


def replace_linear_with_quantized(
    model: nn.Module,
    bits: int = 8,
    exclude_layers: Iterable[str] = ("lm_head",),
    *,
    group_size: int | None = None,
) -> nn.Module:
    """Replace every nn.Linear in `model` by a :class:`QuantizedLinear`, in place.

    Args:
        model: any module; shared linear layers remain shared.
        bits: 8 or 4.
        exclude_layers: names or patterns, such as "model.layers.0.*", of linear layers to keep.
            They match the full dotted name or its last part.
        group_size: as in :meth:`QuantizedLinear.from_linear`.

    Returns:
        `model`.

    Raises:
        ConfigError: invalid `bits` or `group_size`; `exclude_layers` is a string, not a list;
            `model` is itself a linear layer.
    """
    if isinstance(exclude_layers, str):
        raise ConfigError(
            f"replace_linear_with_quantized: exclude_layers must be a list of names, got the "
            f"string {exclude_layers!r}"
        )
    if isinstance(model, nn.Linear):
        raise ConfigError(
            "replace_linear_with_quantized: model must contain linear layers, but is one itself; "
            "use QuantizedLinear.from_linear"
        )
    patterns = tuple(exclude_layers)
    made: dict[int, QuantizedLinear] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(module, nn.Linear) or _matches(name, patterns):
            continue
        parent, _, leaf = name.rpartition(".")
        if id(module) not in made:
            made[id(module)] = QuantizedLinear.from_linear(module, bits, group_size)
        setattr(model.get_submodule(parent), leaf, made[id(module)])
    return model


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    leaf = name.rpartition(".")[2]
    return any(fnmatch.fnmatchcase(each, pattern) for pattern in patterns for each in (name, leaf))
