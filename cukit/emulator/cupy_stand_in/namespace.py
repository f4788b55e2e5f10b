"""The names of `cupy` that the emulator replaces, and the errors that the others raise."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cukit.emulator.cupy_stand_in import devices
from cukit.emulator.cupy_stand_in.array import Pointer, ndarray, wrapped
from cukit.emulator.cupy_stand_in.generated import ElementwiseKernel, ReductionKernel
from cukit.emulator.cupy_stand_in.raw import RawKernel, RawModule
from cukit.emulator.poison import poison
from cukit.emulator.settings import settings_from

_DROPPED = ("stream", "blocking")
"""Keywords that CuPy's functions accept and NumPy's do not."""

_SUBMODULES = ("linalg", "fft", "random", "testing")


@contextlib.contextmanager
def emulate_cupy(**settings: Any) -> Iterator[types.ModuleType]:
    """Runs CuPy's kernels in the emulator within the `with` block, on NumPy-backed arrays.

    A program's `RawKernel`, `RawModule`, `ElementwiseKernel` and `ReductionKernel` are compiled for
    the CPU and launched with every access checked: bounds, initialisation, barriers, and races in
    shared memory (in global memory with `global_races=True`).
    `cupy.ndarray` is a NumPy array with CuPy's methods; functions that NumPy also has (`zeros`,
    `asarray`, `sum`, `linalg`, `fft`, `random`, ...) are NumPy's. Every other function of the
    namespace raises NotImplementedError with its name; `cupyx` is not changed.

    Modifies the `cupy` module itself, so that modules which imported it before are affected, but
    not names imported from it (`from cupy import RawKernel`) before the block. Without CuPy, a
    module of that name is created. Not thread-safe.

    Args:
        settings: the emulator's (`cukit.emulator.Settings`): arch, checked, seed, late, ...

    Raises:
        EmulatorError: in the block, from a launch in which the emulator finds an error.
        ConfigError: an option outside its legal values.

    >>> import cukit as ck
    >>> with ck.emulate_cupy() as cupy:                                  # doctest: +SKIP
    ...     twice = cupy.RawKernel(
    ...         'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }', "twice")
    ...     x = cupy.ones(32, cupy.float32)
    ...     twice((1,), (32,), (x,))
    """
    chosen = settings_from(**settings)
    try:
        module = importlib.import_module("cupy")
        made = []
    except ImportError:
        module = types.ModuleType("cupy")
        module.__path__ = []  # so that `import cupy.cuda` finds the submodules below
        sys.modules["cupy"] = module
        made = ["cupy"]
    before = dict(vars(module))
    before_settings = devices.choose(chosen)
    names = _names(module)
    vars(module).update(names)
    hidden = {f"cupy.{name}": sys.modules.get(f"cupy.{name}") for name in (*_SUBMODULES, "cuda")}
    for name in hidden:
        replaced = names.get(name.partition(".")[2])
        if isinstance(replaced, types.ModuleType):
            sys.modules[name] = replaced
    try:
        yield module
    finally:
        devices.choose(before_settings)
        vars(module).clear()
        vars(module).update(before)
        for name, old in hidden.items():
            if old is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = old
        for name in made:
            sys.modules.pop(name, None)


class _Function:
    """A NumPy function that takes and returns `cupy.ndarray`."""

    def __init__(self, name: str, function: Any, casts: bool = False) -> None:
        """casts: whether CuPy's function takes a `dtype` and NumPy's does not."""
        self.__name__ = name
        self.__doc__ = getattr(function, "__doc__", None)
        self._function = function
        self._casts = casts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for name in _DROPPED:
            kwargs.pop(name, None)
        dtype = kwargs.pop("dtype", None) if self._casts else None
        result = wrapped(self._function(*args, **kwargs))
        return result if dtype is None else result.astype(dtype)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._function, name)
        return _Function(name, found) if callable(found) else found

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)


class _Absent:
    """A name of CuPy that is not emulated."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(_absent(self._name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")


def _absent(name: str) -> str:
    return (
        f"{name} is not emulated: cukit.emulate_cupy runs RawKernel, RawModule, ElementwiseKernel "
        "and ReductionKernel, and provides the functions that NumPy also has"
    )


class _Module(types.ModuleType):
    """A submodule of the stand-in.

    names: what is emulated. real: CuPy's submodule, which provides modules that are not in `names`.
    Any other name raises NotImplementedError when called.
    """

    def __init__(self, name: str, names: dict[str, Any], real: Any = None) -> None:
        super().__init__(name)
        self.__path__ = []
        vars(self).update(names)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self.__dict__["_real"], name, None)
        if isinstance(found, types.ModuleType):
            return found
        return _Absent(f"{self.__name__}.{name}")


def _names(module: types.ModuleType) -> dict[str, Any]:
    """All names that are replaced in the namespace of `module`."""
    public = {name for name in dir(module) if not name.startswith("_")} | _of_numpy(np)
    names: dict[str, Any] = {}
    for name in public:
        ours = getattr(np, name, None)
        theirs = getattr(module, name, None)
        if isinstance(theirs, types.ModuleType) and name not in _SUBMODULES:
            continue
        if callable(ours) and not isinstance(ours, type):
            names[name] = _Function(name, ours)
        elif ours is not None and not isinstance(ours, types.ModuleType):
            names[name] = ours
        elif callable(theirs) and not _is_plain(theirs):
            names[name] = _Absent(f"cupy.{name}")
    for name in ("linalg", "fft", "random"):
        names[name] = _Module(f"cupy.{name}", _wrapped_module(getattr(np, name)))
    for name in (
        "rand",
        "randn",
        "random",
        "random_sample",
        "uniform",
        "normal",
        "standard_normal",
    ):
        vars(names["random"])[name] = _Function(name, getattr(np.random, name), casts=True)
    names.pop("testing", None)  # CuPy's own module, which uses the names replaced here
    names["cuda"] = _cuda(getattr(module, "cuda", None))
    for name in ("empty", "empty_like"):
        names[name] = _poisoned(names[name])
    names |= {
        "ndarray": ndarray,
        "array": _array,
        "asarray": _asarray,
        "asanyarray": _asarray,
        "ascontiguousarray": functools.partial(_asarray, order="C"),
        "asfortranarray": functools.partial(_asarray, order="F"),
        "asnumpy": _asnumpy,
        "get_array_module": functools.partial(_array_module, module),
        "RawKernel": RawKernel,
        "RawModule": RawModule,
        "ElementwiseKernel": ElementwiseKernel,
        "ReductionKernel": ReductionKernel,
        "fuse": _decorator,
        "memoize": _memoize,
        "clear_memo": lambda: None,
        "is_available": lambda: True,
        "get_default_memory_pool": devices.MemoryPool,
        "get_default_pinned_memory_pool": devices.MemoryPool,
        "show_config": lambda *_, **__: print("cupy, emulated by cukit"),
    }
    return names


def _of_numpy(module: Any) -> set[str]:
    return {name for name in dir(module) if not name.startswith("_")} - {"ma", "test", "typing"}


def _is_plain(value: Any) -> bool:
    """True for exceptions and for NumPy's types, which both namespaces share."""
    return isinstance(value, type) and (
        issubclass(value, (BaseException, np.generic)) or value.__module__.startswith("numpy")
    )


def _wrapped_module(module: Any) -> dict[str, Any]:
    return {
        name: _Function(name, value)
        if callable(value := getattr(module, name)) and not isinstance(value, type)
        else value
        for name in _of_numpy(module)
    }


def _cuda(real: Any) -> types.ModuleType:
    Device, Stream, Event = devices.Device, devices.Stream, devices.Event
    return _Module(
        "cupy.cuda",
        {
            "Device": Device,
            "Stream": Stream,
            "ExternalStream": Stream,
            "Event": Event,
            "MemoryPointer": Pointer,
            "MemoryPool": devices.MemoryPool,
            "get_current_stream": lambda *_: Stream.null,
            "get_elapsed_time": lambda start, end: (end.time - start.time) * 1e3,
            "get_device_id": lambda: 0,
            "is_available": lambda: True,
            "get_nvcc_path": lambda: None,
            "get_cuda_path": lambda: None,
            "get_local_runtime_version": lambda: 12090,
            "set_allocator": lambda *_: None,
            "set_pinned_memory_allocator": lambda *_: None,
            "runtime": _Module("cupy.cuda.runtime", devices.runtime_functions()),
            "device": _Module(
                "cupy.cuda.device",
                {"Device": Device, "get_compute_capability": lambda: Device().compute_capability},
            ),
            "stream": _Module("cupy.cuda.stream", {"Stream": Stream, "Event": Event}),
        },
        real,
    )


def _poisoned(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function, updated=())
    def make(*args: Any, **kwargs: Any) -> Any:
        array = function(*args, **kwargs)
        poison(array)
        return array

    return make


def _array(
    value: Any, dtype: Any = None, copy: bool = True, order: Any = "K", subok: bool = False,
    ndmin: int = 0, *, blocking: bool = False,
) -> Any:  # fmt: skip
    if not copy and isinstance(value, ndarray):
        made = np.asarray(value, dtype, order=None if order == "K" else order)
    else:
        made = np.array(value, dtype=dtype, order=order)
    while made.ndim < ndmin:
        made = made[None]
    return made.view(ndarray)


def _asarray(
    value: Any, dtype: Any = None, order: Any = None, *, blocking: bool = False, copy: Any = None
) -> Any:
    """An array on the device: a copy of anything not on it yet, as on a GPU."""
    if isinstance(value, ndarray) and not copy:
        same = dtype is None or value.dtype == np.dtype(dtype)
        if same and order in (None, "K", "A"):
            return value
        return np.asarray(value, dtype, order).view(ndarray)
    return np.array(value, dtype=dtype, order=order or "K").view(ndarray)


def _asnumpy(
    a: Any, stream: Any = None, order: Any = "C", out: Any = None, *, blocking: bool = True
) -> np.ndarray[Any, Any]:
    if isinstance(a, ndarray):
        return a.get(order=order, out=out)
    return np.asarray(a, order=order)


def _array_module(module: types.ModuleType, *args: Any) -> types.ModuleType:
    return module if any(isinstance(value, ndarray) for value in args) else np


def _decorator(*args: Any, **_: Any) -> Any:
    """`@cupy.fuse` and `@cupy.fuse()`: returns the function unchanged."""
    return args[0] if args and callable(args[0]) else lambda function: function


def _memoize(for_each_device: bool = False) -> Callable[[Any], Any]:
    return functools.cache
