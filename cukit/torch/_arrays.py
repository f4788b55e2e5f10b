"""Conversion of tensors to arrays and back, without copies, on torch's current stream.

A GPU array is constructed from a tensor's address, shape and strides. DLPack's synchronisation
between streams is not needed, since both libraries use the same stream. New arrays are allocated by
torch, so that results are tensors with their own storage, a single allocator manages all memory,
and CUDA graphs keep the memory that they captured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from cukit.core.device import require_cupy
from cukit.errors import ArrayDtypeError, ArrayLayoutError

Array = Any

_ACCESS_BYTES = 16

NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
    torch.bool: np.dtype(np.bool_),
}
TORCH_DTYPES = {dtype: tensor_dtype for tensor_dtype, dtype in NUMPY_DTYPES.items()}


def as_array(op: str, name: str, tensor: Tensor, *, strided: bool = False) -> Array:
    """The tensor's memory as a NumPy or CuPy array.

    strided: the op supports any strides with a contiguous last axis. Otherwise, or if on the GPU
    the address or a stride is not a multiple of 16 bytes, a non-contiguous tensor is copied.
    """
    if tensor.layout is not torch.strided:
        raise ArrayLayoutError(f"{op}: {name} must be a dense tensor, got {tensor.layout}")
    dtype = NUMPY_DTYPES.get(tensor.dtype)
    if dtype is None:
        allowed = ", ".join(str(each).removeprefix("torch.") for each in NUMPY_DTYPES)
        raise ArrayDtypeError(f"{op}: {name} must be {allowed}, got {tensor.dtype}")
    if not tensor.is_contiguous() and not (strided and _has_dense_rows(tensor)):
        tensor = tensor.contiguous()
    if not tensor.is_cuda:
        return _host_array(tensor, dtype)
    cuda = _cupy().cuda
    itemsize = tensor.element_size()
    strides = tensor.stride()
    # An upper bound on the bytes from the first to the end of the last element.
    extents = zip(tensor.shape, strides, strict=True)
    span = (1 + sum((extent - 1) * stride for extent, stride in extents)) * itemsize
    memory = cuda.UnownedMemory(tensor.data_ptr(), max(span, 0), tensor, tensor.device.index)
    return _cupy().ndarray(
        tuple(tensor.shape),
        dtype,
        cuda.MemoryPointer(memory, 0),
        tuple([stride * itemsize for stride in strides]),
    )


def as_tensor(array: Array, like: Tensor) -> Tensor:
    """A result as a contiguous tensor on the device of `like` that shares memory with no input."""
    if not like.is_cuda:
        host = np.asarray(array, order="C")
        host = host if host.base is None and host.flags.owndata else host.copy()
        if host.dtype == NUMPY_DTYPES[torch.bfloat16]:
            return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(host)
    memory = array.data.mem
    if not array.flags.c_contiguous or not isinstance(memory, _storage_type()):
        # Copies into torch's memory, unlike `ascontiguousarray`, which keeps a contiguous array.
        array = array.copy(order="C")
        memory = array.data.mem
    whole = memory.storage.view(TORCH_DTYPES[array.dtype])
    offset = (array.data.ptr - memory.ptr) // array.itemsize
    if offset == 0 and array.size == whole.numel():
        return whole.view(array.shape)
    # Results of one operator must not share a storage, not even different parts of it.
    return whole[offset : offset + array.size].clone().view(array.shape)


def on_current_stream(tensor: Tensor) -> _OnStream | _NullContext:
    """A context in which CuPy uses torch's device, current stream and allocator for `tensor`."""
    if not tensor.is_cuda:
        return _NULL_CONTEXT
    index = tensor.device.index
    return _OnStream(index, torch.cuda.current_stream(index).cuda_stream)


class _NullContext:
    """The context of tensors on the CPU."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_NULL_CONTEXT = _NullContext()


class _OnStream:
    """The context of tensors on the GPU, see on_current_stream."""

    __slots__ = ("_device", "_index", "_memory", "_stream")

    def __init__(self, index: int, handle: int) -> None:
        cuda = _cupy().cuda
        self._device = cuda.Device(index) if cuda.runtime.getDevice() != index else None
        self._index = index
        self._memory = cuda.using_allocator(_allocator(index))
        self._stream = _stream(index, handle)

    def __enter__(self) -> None:
        if self._device is not None:
            self._device.__enter__()
        self._stream.__enter__()
        self._memory.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._memory.__exit__(kind, error, trace)
        self._stream.__exit__(kind, error, trace)
        if self._device is not None:
            self._device.__exit__(kind, error, trace)


def _host_array(tensor: Tensor, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if tensor.dtype == torch.bfloat16:  # NumPy's DLPack does not support it
        bits: np.ndarray[Any, Any] = np.from_dlpack(tensor.detach().view(torch.int16))
        return bits.view(dtype)
    return np.from_dlpack(tensor.detach())


def _has_dense_rows(tensor: Tensor) -> bool:
    """Whether the last axis is contiguous and the other strides are positive; on the GPU also
    whether these strides and the address are multiples of 16 bytes. False for an empty tensor."""
    strides, shape = tensor.stride(), tensor.shape
    if not strides or strides[-1] != 1 or math.prod(shape) == 0:
        return False
    if not tensor.is_cuda:
        return all(stride > 0 for stride in strides)
    step = _ACCESS_BYTES // tensor.element_size()
    return tensor.data_ptr() % _ACCESS_BYTES == 0 and all(
        extent == 1 or (stride > 0 and stride % step == 0)
        for extent, stride in zip(shape[:-1], strides[:-1], strict=True)
    )


@functools.cache
def _cupy() -> ModuleType:
    return require_cupy("GPU tensors in cukit.torch")


@functools.cache
def _storage_type() -> type:
    """A class of CuPy memory that is owned by a tensor of bytes."""

    unowned: Any = _cupy().cuda.UnownedMemory

    class TensorMemory(unowned):
        def __init__(self, storage: Tensor, index: int) -> None:
            super().__init__(storage.data_ptr(), storage.numel(), storage, index)
            self.storage = storage

    return TensorMemory


@functools.cache
def _allocator(index: int) -> Callable[[int], Any]:
    """An allocator for CuPy on device `index` that takes memory from torch."""
    device = torch.device("cuda", index)
    memory, pointer = _storage_type(), _cupy().cuda.MemoryPointer

    def allocate(num_bytes: int) -> Any:
        return pointer(memory(torch.empty(num_bytes, dtype=torch.uint8, device=device), index), 0)

    return allocate


class _CudaStream:
    """A stream handle in the CUDA stream protocol."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@functools.lru_cache(maxsize=256)
def _stream(index: int, handle: int) -> Any:
    cuda = _cupy().cuda
    with cuda.Device(index):
        if hasattr(cuda.Stream, "from_external"):
            return cuda.Stream.from_external(_CudaStream(handle))
        return cuda.ExternalStream(handle, index)
