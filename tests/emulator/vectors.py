"""Small cases of single instructions, with the same inputs on every machine.

Values are small integers in every number format: sums are exact in any order, so the results of the
GPU and the emulator are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cukit.core.kernel import KernelSpec, load_kernel
from cukit.core.tensor_map import encode_tensor_map

KERNELS = Path(__file__).parent / "kernels"
STORED = Path(__file__).parent / "vectors.npz"

Place = Callable[[np.ndarray[Any, Any]], Any]
"""Copies an array to the GPU; returns it unchanged for the emulator."""
Arguments = Callable[[Place], tuple[tuple[Any, ...], Any]]
"""Returns the kernel's arguments and the array that receives the result."""


@dataclass(frozen=True)
class Case:
    """name: key of the result in vectors.npz. arch: oldest architecture with the instruction."""

    name: str
    spec: KernelSpec
    arguments: Arguments
    arch: str = "sm_80"
    grid: int = 1

    def run(self, place: Place) -> Any:
        """The result, on the device chosen by `place`."""
        args, result = self.arguments(place)
        load_kernel(self.spec)((self.grid,), args)
        return result


def cases() -> Iterator[Case]:
    """All cases."""
    for trans in (0, 1):
        yield _ldmatrix(trans)
        yield _stmatrix(trans)
    for kind in range(len(_MMA)):
        yield _mma(kind)
    yield from _tensor_maps()
    yield from _wgmma()


def _spec(name: str, entry: str, threads: int, shared: int, **defines: int) -> KernelSpec:
    return KernelSpec(str(KERNELS / name), entry, tuple(defines.items()), threads, shared)


def _ldmatrix(trans: int) -> Case:
    def arguments(place: Place) -> tuple[tuple[Any, ...], Any]:
        rows = place(np.arange(32 * 8, dtype=np.uint16).reshape(32, 8))
        out = place(np.zeros((4, 32), np.uint32))
        return (rows, out), out

    spec = _spec("instructions.cu", "ldmatrix", 32, 0, TRANS=trans)
    return Case(f"ldmatrix_trans{trans}", spec, arguments)


def _stmatrix(trans: int) -> Case:
    def arguments(place: Place) -> tuple[tuple[Any, ...], Any]:
        registers = place(np.arange(4 * 32 * 2, dtype=np.uint16).reshape(4, 32, 2))
        rows = place(np.zeros((32, 8), np.uint16))
        return (registers, rows), rows

    spec = _spec("instructions_sm90.cu", "stmatrix", 128, 0, TRANS=trans)
    return Case(f"stmatrix_trans{trans}", spec, arguments, "sm_90")


_MMA: tuple[tuple[str, Any, str], ...] = (
    ("f16_k16", np.float16, "sm_80"),
    ("bf16_k16", ml_dtypes.bfloat16, "sm_80"),
    ("f16_k8", np.float16, "sm_80"),
    ("bf16_k8", ml_dtypes.bfloat16, "sm_80"),
    ("tf32_k8", np.float32, "sm_80"),
    ("s8_k32", np.int8, "sm_80"),
    ("e4m3_k32", ml_dtypes.float8_e4m3fn, "sm_89"),
    ("e5m2_k32", ml_dtypes.float8_e5m2, "sm_89"),
)


def _mma(kind: int) -> Case:
    name, dtype, arch = _MMA[kind]
    total = np.int32 if dtype is np.int8 else np.float32

    def arguments(place: Place) -> tuple[tuple[Any, ...], Any]:
        rng = np.random.default_rng(kind)
        a = place(_small(rng, 32 * 16, dtype).view(np.uint32))
        b = place(_small(rng, 32 * 8, dtype).view(np.uint32))
        c = place(rng.integers(-9, 10, (32, 4)).astype(total))
        out = place(np.zeros((32, 4), total))
        return (a, b, c, out), out

    spec = _spec("instructions.cu", "mma", 32, 0, KIND=kind)
    return Case(f"mma_{name}", spec, arguments, arch)


def _small(rng: np.random.Generator, num_bytes: int, dtype: Any) -> np.ndarray[Any, Any]:
    """`num_bytes` bytes of integers from -3 to 3."""
    return rng.integers(-3, 4, num_bytes // np.dtype(dtype).itemsize).astype(dtype)


def _tensor_maps() -> Iterator[Case]:
    # Boxes inside the tensor; across its lower edge, and with a swizzle of 128 bytes also across
    # its right edge; across its left and upper edges.
    for x, y in ((16, 8), (72, 90), (-8, -3)):
        for swizzle in (0, 32, 64, 128):
            yield _tensor_load(x, y, swizzle)
    for add in (0, 1):
        for x, y in ((16, 8), (72, 90)):
            yield _tensor_store(x, y, 128, add)
        yield _tensor_store(16, 8, 64, add)


_TENSOR = (100, 104)  # 16-bit elements
_BOX_ROWS = 16


def _tensor_load(x: int, y: int, swizzle: int) -> Case:
    columns = (swizzle or 64) // 2
    box_bytes = _BOX_ROWS * columns * 2

    def arguments(place: Place) -> tuple[tuple[Any, ...], Any]:
        tensor = place(np.arange(_TENSOR[0] * _TENSOR[1], dtype=np.uint16).reshape(_TENSOR))
        out = place(np.full(box_bytes // 2, 0xFFFF, np.uint16))
        tensor_map = encode_tensor_map(tensor, (_BOX_ROWS, columns), swizzle_bytes=swizzle)
        return (_keep(tensor_map, tensor), out), out

    spec = _spec(
        "instructions_sm90.cu",
        "tensor_load",
        128,
        box_bytes,
        BYTES=box_bytes,
        BOX_X=x,
        BOX_Y=y,
        ADD=0,
    )
    return Case(f"tensor_load_{x}_{y}_swizzle{swizzle}", spec, arguments, "sm_90")


def _tensor_store(x: int, y: int, swizzle: int, add: int) -> Case:
    columns = swizzle // 2
    box_bytes = _BOX_ROWS * columns * 2

    def arguments(place: Place) -> tuple[tuple[Any, ...], Any]:
        rng = np.random.default_rng(7)
        tensor = place(_small(rng, 2 * _TENSOR[0] * _TENSOR[1], np.float16).reshape(_TENSOR))
        image = place(rng.integers(-9, 10, box_bytes // 2).astype(np.float16))
        tensor_map = encode_tensor_map(tensor, (_BOX_ROWS, columns), swizzle_bytes=swizzle)
        return (image, tensor_map), tensor

    spec = _spec(
        "instructions_sm90.cu",
        "tensor_store",
        128,
        box_bytes,
        BYTES=box_bytes,
        BOX_X=x,
        BOX_Y=y,
        ADD=add,
    )
    name = f"tensor_{'add' if add else 'store'}_{x}_{y}_swizzle{swizzle}"
    return Case(name, spec, arguments, "sm_90")


_kept: list[Any] = []


def _keep(tensor_map: Any, tensor: Any) -> Any:
    """Returns the map, and keeps the tensor alive: a map holds only its address."""
    _kept.append(tensor)
    return tensor_map


_PIECE_BYTES = 2048


def bulk_copy() -> Case:
    """Copies 1024 uint16, 0, 1, 2, ..., through shared memory."""

    def arguments(place: Place) -> tuple[tuple[Any, ...], Any]:
        source = place(np.arange(_PIECE_BYTES // 2, dtype=np.uint16))
        target = place(np.zeros(_PIECE_BYTES // 2, np.uint16))
        return (source, target), target

    spec = _spec("instructions_sm90.cu", "bulk_copy", 128, _PIECE_BYTES, PIECE=_PIECE_BYTES)
    return Case("bulk_copy", spec, arguments, "sm_90")


def multicast() -> Case:
    """Both blocks of a cluster receive the same 32 rows of 64 uint16, swizzled by 128 bytes."""

    def arguments(place: Place) -> tuple[tuple[Any, ...], Any]:
        tensor = place(np.arange(32 * 64, dtype=np.uint16).reshape(32, 64))
        out = place(np.zeros((2, 32 * 64), np.uint16))
        tensor_map = encode_tensor_map(tensor, (16, 64), swizzle_bytes=128)
        return (_keep(tensor_map, tensor), out), out

    spec = _spec("instructions_sm90.cu", "multicast", 128, 2 * _PIECE_BYTES, PIECE=_PIECE_BYTES)
    return Case("multicast", spec, arguments, "sm_90", grid=2)


# Swizzle code: (leading, stride) byte offsets of a K-major operand.
_K_MAJOR = {0: (128, 256), 1: (16, 1024), 2: (16, 512), 3: (16, 256)}
# name: (swizzle code, transposed a, transposed b, columns, a from registers, float8,
#        (leading, stride) of a, (leading, stride) of b)
_WGMMA: dict[str, tuple[int, int, int, int, int, int, tuple[int, int], tuple[int, int]]] = {
    "k_major_none": (0, 0, 0, 64, 0, 0, _K_MAJOR[0], _K_MAJOR[0]),
    "k_major_128": (1, 0, 0, 128, 0, 0, _K_MAJOR[1], _K_MAJOR[1]),
    "k_major_64": (2, 0, 0, 64, 0, 0, _K_MAJOR[2], _K_MAJOR[2]),
    "k_major_32": (3, 0, 0, 64, 0, 0, _K_MAJOR[3], _K_MAJOR[3]),
    "k_major_128_n256": (1, 0, 0, 256, 0, 0, _K_MAJOR[1], _K_MAJOR[1]),
    "a_mn_major_128": (1, 1, 0, 64, 0, 0, (8192, 1024), _K_MAJOR[1]),
    "b_mn_major_128": (1, 0, 1, 128, 0, 0, _K_MAJOR[1], (2048, 1024)),
    "both_mn_major_64": (2, 1, 1, 64, 0, 0, (1024, 512), (1024, 512)),
    "both_mn_major_32": (3, 1, 1, 64, 0, 0, (512, 256), (512, 256)),
    "both_mn_major_none": (0, 1, 1, 64, 0, 0, (128, 256), (128, 256)),
    "registers_k_major_128": (1, 0, 0, 64, 1, 0, _K_MAJOR[1], _K_MAJOR[1]),
    "registers_b_mn_major_128": (1, 0, 1, 128, 1, 0, _K_MAJOR[1], (2048, 1024)),
    "e4m3_k_major_128": (1, 0, 0, 64, 0, 1, _K_MAJOR[1], _K_MAJOR[1]),
}
_A_BYTES = 16384
_B_BYTES = 32768


def _wgmma() -> Iterator[Case]:
    for name, (swizzle, ta, tb, n, registers, float8, a_steps, b_steps) in _WGMMA.items():
        yield _wgmma_case(name, swizzle, ta, tb, n, registers, float8, a_steps, b_steps)


def _wgmma_case(
    name: str, swizzle: int, ta: int, tb: int, n: int, registers: int, float8: int,
    a_steps: tuple[int, int], b_steps: tuple[int, int],
) -> Case:  # fmt: skip
    dtype: Any = ml_dtypes.float8_e4m3fn if float8 else np.float16
    image_bytes = _A_BYTES + _B_BYTES

    def arguments(place: Place) -> tuple[tuple[Any, ...], Any]:
        rng = np.random.default_rng(len(name))
        image = place(_small(rng, image_bytes, dtype).view(np.uint32))
        a = place(_small(rng, 128 * 16, np.float16).view(np.uint32))
        out = place(np.zeros((128, n // 2), np.float32))
        offsets = (0, _A_BYTES, *a_steps, *b_steps)
        return (image, a, out, *map(np.int32, offsets)), out

    spec = _spec(
        "instructions_sm90.cu", "wgmma", 128, image_bytes, IMAGE=image_bytes, COLUMNS=n,
        SWIZZLE=swizzle, TRANSPOSED_A=ta, TRANSPOSED_B=tb, REGISTERS=registers, FLOAT8=float8,
    )  # fmt: skip
    return Case(f"wgmma_{name}", spec, arguments, "sm_90")
