"""`cupy.ndarray` in host memory."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from cukit.emulator.cupy_stand_in.devices import Device
from cukit.emulator.poison import poison
from cukit.errors import ArrayError


class Pointer:
    """`cupy.cuda.MemoryPointer`: an address, and a reference that keeps its memory alive.

    ptr: the address. mem: in CuPy the memory object; here the pointer itself, which has `ptr` too.
    """

    def __init__(self, memory: np.ndarray[Any, Any], offset: int = 0) -> None:
        self.memory = memory
        self.offset = offset
        self.ptr: int = int(memory.ctypes.data) + offset

    def __int__(self) -> int:
        return self.ptr

    def __index__(self) -> int:
        return self.ptr

    def __add__(self, offset: int) -> Pointer:
        return Pointer(self.memory, self.offset + int(offset))

    def __sub__(self, offset: int) -> Pointer:
        return self + -int(offset)

    @property
    def mem(self) -> Pointer:
        return self

    def copy_from_host(self, source: Any, size: int | None = None) -> None:
        """Copies the first `size` bytes of an array, or all of them, to this address."""
        values = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        count = values.size if size is None else size
        self.bytes()[:count] = values[:count]

    copy_from = copy_from_host

    def bytes(self) -> np.ndarray[Any, Any]:
        """The bytes from the address to the end of the memory."""
        return self.memory.reshape(-1).view(np.uint8)[self.offset :]


_addressed: weakref.WeakValueDictionary[int, np.ndarray[Any, Any]] = weakref.WeakValueDictionary()


def addressed() -> list[np.ndarray[Any, Any]]:
    """Arrays whose addresses the program has read: kernels may find these addresses in memory."""
    return list(_addressed.values())


class ndarray(np.ndarray[Any, Any]):  # noqa: N801 - CuPy's name
    """A NumPy array with CuPy's methods; NumPy functions return this class, too.

    As in CuPy, results of reductions and single elements are zero-dimensional arrays.
    """

    def __new__(
        cls,
        shape: Any,
        dtype: Any = float,
        memptr: Any = None,
        strides: Any = None,
        order: Any = "C",
    ) -> ndarray:
        made: ndarray
        if memptr is not None:
            made = np.ndarray.__new__(cls, shape, dtype, memptr.bytes(), 0, strides, order)
        else:
            made = np.ndarray.__new__(cls, shape, dtype, None, 0, None, order)
            poison(made)
        return made

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return np.asarray(array).view(ndarray)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(found, np.ndarray):
            return found
        keys = key if isinstance(key, tuple) else (key,)
        return super().__getitem__((*keys, ...))

    @property
    def device(self) -> Any:
        return Device(0)

    @property
    def data(self) -> Any:
        """The address. Later kernels may access this array through an address in memory."""
        owner = owner_of(self)
        _addressed[id(owner)] = owner
        return Pointer(owner, int(self.ctypes.data) - int(owner.ctypes.data))

    def get(
        self, stream: Any = None, order: Any = "C", out: Any = None, blocking: bool = True
    ) -> np.ndarray[Any, Any]:
        """A copy as a NumPy array, as if from the GPU."""
        if out is not None:
            out[...] = self
            return out  # type: ignore[no-any-return]
        return np.array(self, order=order, subok=False)

    def set(self, array: Any, stream: Any = None) -> None:
        """Copies the values of a NumPy array of the same shape and dtype."""
        values = np.asarray(array)
        if values.shape != self.shape or values.dtype != self.dtype:
            raise ArrayError(
                f"set: expected {self.dtype} of shape {self.shape}, got {values.dtype} of shape "
                f"{values.shape}"
            )
        self[...] = values

    def scatter_add(self, slices: Any, value: Any) -> None:
        np.add.at(self, slices, value)


def wrapped(result: Any) -> Any:
    """A result of a NumPy function, as CuPy would return it."""
    if isinstance(result, ndarray):
        return result
    if isinstance(result, np.ndarray):
        return result.view(ndarray)
    if isinstance(result, np.generic):
        return np.asarray(result).view(ndarray)
    if type(result) in (tuple, list):
        return type(result)(map(wrapped, result))
    return result


def owner_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
