"""CuPy without a GPU: the kernels that a program hands to CuPy run in the emulator.

`with cukit.emulate_cupy():` puts NumPy-backed stand-ins into the `cupy` module (`namespace`), among
them `RawKernel`, `RawModule` (`raw`), `ElementwiseKernel` and `ReductionKernel` (`generated`).
"""

from cukit.emulator.cupy_stand_in.namespace import emulate_cupy

__all__ = ["emulate_cupy"]
