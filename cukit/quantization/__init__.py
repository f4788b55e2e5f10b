"""Numbers to narrow codes with scales, and back; what that costs in accuracy; files of both."""

from cukit.quantization.dequantize import dequantize
from cukit.quantization.quantize import quantize

__all__ = ["dequantize", "quantize"]
