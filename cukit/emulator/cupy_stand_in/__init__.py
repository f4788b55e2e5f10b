"""CuPy without a GPU: the kernels that a program passes to CuPy run in the emulator.

`with cukit.emulate_cupy():` replaces names of the `cupy` module by stand-ins on NumPy arrays
(`namespace`), among them `RawKernel` and `RawModule` (`raw`), `ElementwiseKernel` and
`ReductionKernel` (`generated`).
"""

from cukit.emulator.cupy_stand_in.namespace import emulate_cupy

__all__ = ["emulate_cupy"]
