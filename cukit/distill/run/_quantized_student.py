"""Evaluation of the student with quantised weights, in bits per byte for each format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cukit.core.arrays import Array
from cukit.core.narrow_dtype import float8_e4m3, int4, int8
from cukit.distill.training.evaluation import Evaluation, evaluate
from cukit.errors import ConfigError
from cukit.models import Transformer
from cukit.models.parameters import Parameters
from cukit.quantization import dequantize, quantize

FORMATS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "int8": (int8, {}),
    "int4": (int4, {"group_size": 128, "zero_points": True, "clip": "mse"}),
    "fp8": (float8_e4m3, {}),
}
"""By name: dtype of the codes and options of `quantize`. One scale per output channel, or per group
of 128 inputs of a channel."""


@dataclass(frozen=True)
class QuantizedEvaluation:
    """The distilled student with the matrices of its layers in one format.

    weight_bytes: size of those matrices, including scales and zero points.
    bits_per_weight: this size in bits, divided by the number of weights.
    """

    format: str
    evaluation: Evaluation
    weight_bytes: int
    bits_per_weight: float


def check_formats(formats: Sequence[str]) -> None:
    """Raises ConfigError for a format that is not one of FORMATS, or named twice."""
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(f"--quantize: expected one of {', '.join(FORMATS)}, got {name!r}")
    if len(set(formats)) < len(formats):
        raise ConfigError(f"--quantize: formats must differ, got {', '.join(formats)}")


def with_quantized_layers(model: Transformer, name: str) -> tuple[Transformer, int, int]:
    """A copy whose layers have the dequantised values of quantised weights.

    Returns the copy, the bytes of the quantised matrices and the number of their weights.
    Embedding, head and norms are not quantised, as is usual for these formats.
    """
    dtype, options = FORMATS[name]
    parameters = model.parameters
    copy = Parameters(parameters.shapes, parameters.flat.dtype, parameters.xp)
    copy.flat[...] = parameters.flat
    weight_bytes = num_weights = 0
    for key, weight in parameters.items():
        if weight.ndim == 2 and key.startswith("layers."):
            array = quantize(_kernel_dtype(weight), dtype, **options)
            copy[key][...] = dequantize(array).astype(weight.dtype, copy=False)
            weight_bytes += array.nbytes
            num_weights += array.size
    return Transformer(model.config, copy), weight_bytes, num_weights


def evaluate_quantized(
    student: Transformer,
    teacher: Transformer,
    batches: Callable[[], Iterable[tuple[Array, Array]]],
    formats: Sequence[str],
    *,
    workers: int = 1,
) -> list[QuantizedEvaluation]:
    """Evaluate the student in each of `formats`, on the same batches."""
    found = []
    for name in formats:
        model, weight_bytes, num_weights = with_quantized_layers(student, name)
        evaluation = evaluate(model, batches(), teacher, workers=workers)
        bits = 8 * weight_bytes / num_weights
        found.append(QuantizedEvaluation(name, evaluation, weight_bytes, bits))
    return found


def _kernel_dtype(weight: Array) -> Array:
    """The weight in a dtype that `quantize` accepts: float64 (CPU only) becomes float32."""
    return weight.astype("float32") if weight.dtype == "float64" else weight
