"""Quantisation to narrow dtypes with scales, dequantisation, error reports, and files."""

from cukit.quantization.dequantize import dequantize
from cukit.quantization.files import load_quantized, save_quantized
from cukit.quantization.quantize import quantize
from cukit.quantization.report import QuantizationReport, quantization_report

__all__ = [
    "QuantizationReport",
    "dequantize",
    "load_quantized",
    "quantization_report",
    "quantize",
    "save_quantized",
]
