"""`cupy.RawKernel` and `cupy.RawModule` in the emulator."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from cukit.emulator.cupy_stand_in.array import Pointer, addressed, ndarray, owner_of
from cukit.emulator.cupy_stand_in.devices import architecture, current_settings
from cukit.emulator.limits import MAX_DYNAMIC_SHARED_BYTES
from cukit.emulator.program import Program, Source, as_argument
from cukit.emulator.settings import Settings
from cukit.errors import LaunchError

_SHARED_WITHOUT_OPTING_IN = 48 * 1024


class RawModule:
    """CUDA code, compiled when one of its kernels is first launched."""

    def __init__(
        self,
        code: str | None = None,
        path: str | None = None,
        options: Sequence[str] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        *,
        enable_cooperative_groups: bool = False,
        name_expressions: Sequence[str] | None = None,
        jitify: bool = False,
    ) -> None:
        if (code is None) == (path is None):
            raise TypeError("cupy.RawModule: expected either code or path")
        if code is None:
            raise NotImplementedError(
                f"cupy.RawModule(path={path!r}): compiled code cannot be emulated: pass its source "
                "as code"
            )
        self.code = _cucomplex(code) if translate_cucomplex else code
        self.options = tuple(options)
        self.backend = backend
        self.file_path = None
        self.name_expressions = tuple(name_expressions or ())
        self.enable_cooperative_groups = enable_cooperative_groups
        self._name = "module.cu"
        self._loaded: dict[tuple[Settings, tuple[str, ...]], Program] = {}
        self._instances = self.name_expressions

    def compile(self, log_stream: Any = None) -> None:
        """Compiles the code now."""
        self.program()

    def program(self, instance: str | None = None) -> Program:
        """The program, with this template instance among its kernels."""
        if instance is not None and "<" in instance and instance not in self._instances:
            self._instances = (*self._instances, instance)
        settings = current_settings()
        key = (compiled_by(settings), self._instances)
        if key not in self._loaded:
            self._loaded[key] = Program(_source(self), settings, self._instances)
        return self._loaded[key]

    def get_function(self, name: str) -> RawKernel:
        """The kernel of this name, or a template instance."""
        kernel = RawKernel.__new__(RawKernel)
        kernel._start(self, name)
        return kernel

    def get_global(self, name: str) -> Pointer:
        """The address of a `__device__` or `__constant__` variable."""
        return Pointer(self.program().variable(name))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loaded": {}}


class RawKernel:
    """One kernel in CUDA code; called with a grid, a block and its arguments."""

    def __init__(
        self,
        code: str,
        name: str,
        options: Sequence[str] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        *,
        enable_cooperative_groups: bool = False,
        jitify: bool = False,
    ) -> None:
        module = RawModule(code, None, options, backend, translate_cucomplex)
        module._name = f"{name.partition('<')[0].rpartition('::')[2]}.cu"
        self._start(module, name)

    def _start(self, module: RawModule, name: str) -> None:
        self._module = module
        self.name = name
        self.code = module.code
        self.options = module.options
        self.backend = module.backend
        self.file_path = None
        self.enable_cooperative_groups = module.enable_cooperative_groups
        self.max_dynamic_shared_size_bytes = _SHARED_WITHOUT_OPTING_IN
        self.preferred_shared_memory_carveout = -1

    @property
    def kernel(self) -> RawKernel:
        return self

    def compile(self, log_stream: Any = None) -> None:
        """Compiles the code now."""
        self._module.program(self.name)

    @property
    def attributes(self) -> dict[str, int]:
        """Attributes of the kernel; those without a meaning on the CPU are 0 or a default."""
        return {
            "max_threads_per_block": 1024,
            "shared_size_bytes": 0,
            "const_size_bytes": 0,
            "local_size_bytes": 0,
            "num_regs": 0,
            "ptx_version": 80,
            "binary_version": int(architecture().removeprefix("sm_").rstrip("af")),
            "cache_mode_ca": 0,
            "max_dynamic_shared_size_bytes": self.max_dynamic_shared_size_bytes,
            "preferred_shared_memory_carveout": self.preferred_shared_memory_carveout,
        }

    max_threads_per_block = 1024
    num_regs = local_size_bytes = const_size_bytes = shared_size_bytes = 0

    def __call__(
        self, grid: Any, block: Any, args: Sequence[Any], *, shared_mem: int = 0, stream: Any = None
    ) -> None:
        """Runs the kernel to completion. Raises EmulatorError if a check fails."""
        program = self._module.program(self.name)
        blocks, threads = _extents("grid", grid), _extents("block", block)
        limit = min(self.max_dynamic_shared_size_bytes, MAX_DYNAMIC_SHARED_BYTES)
        if shared_mem > limit:
            raise LaunchError(
                f"{self.name}: {shared_mem} bytes of dynamic shared memory, the limit is {limit}: "
                f"raise max_dynamic_shared_size_bytes (up to {MAX_DYNAMIC_SHARED_BYTES})"
            )
        kernel = program.kernel(self.name, threads, shared_mem, blocks)
        sizes = kernel.parameter_bytes
        message = f"{self.name} takes {len(sizes)} arguments, got {len(args)}"
        if len(args) < len(sizes):
            raise LaunchError(message)
        if len(args) > len(sizes):  # CUDA ignores arguments beyond the last parameter
            warnings.warn(message, stacklevel=2)
        arguments, memory = [], [*program.variables(), *addressed()]
        for index, (value, size) in enumerate(zip(args, sizes, strict=False)):
            arguments.append(_argument(self.name, index, value, size, memory))
        kernel.launch(blocks, tuple(arguments), current_settings(), memory)


def _argument(name: str, index: int, value: Any, size: int, memory: list[Any]) -> Any:
    """Converts an argument for the launch; appends the array that it refers to to `memory`."""
    if isinstance(value, ndarray):
        memory.append(owner_of(value))  # a view may be indexed beyond its own elements
        return np.asarray(value)
    if isinstance(value, Pointer):
        memory.append(value.memory)
        return np.uint64(value.ptr)
    if isinstance(value, np.ndarray) and value.dtype.type is not np.void:
        raise TypeError(
            f"{name}: argument {index} is a NumPy array, which a GPU cannot access: pass "
            "cupy.asarray(...)"
        )
    if isinstance(value, (np.void, np.ndarray)):
        raw = np.ascontiguousarray(value)
        return raw.reshape(1).view(np.dtype((np.void, raw.nbytes)))
    try:
        return as_argument(value, size)
    except LaunchError as error:
        raise LaunchError(f"{name}: argument {index}: {error}") from None


def _extents(what: str, value: Any) -> tuple[int, int, int]:
    given = tuple(int(each) for each in (value if isinstance(value, Sequence) else (value,)))
    if not 1 <= len(given) <= 3 or min(given) < 1:
        raise LaunchError(f"{what}: expected one to three positive extents, got {value!r}")
    x, y, z = (*given, 1, 1)[:3]
    return x, y, z


def _cucomplex(code: str) -> str:
    """Replaces CUDA's complex types by `complex<T>`."""
    code = re.sub(r"\bcuDoubleComplex\b", "complex<double>", code)
    code = re.sub(r"\bcu(Float)?Complex\b", "complex<float>", code)
    return f"#include <cupy/cuComplex_bridge.h>\n#line 1\n{code}"


def _source(module: RawModule) -> Source:
    defines = (("__CUDACC_RTC__", "1"),)
    found = Source(module.code, module._name, None, (), defines)
    return found.with_options(module.options)


def compiled_by(settings: Settings) -> Settings:
    """The settings on which a compiled program depends."""
    return Settings(arch=settings.arch, checked=settings.checked, debug=settings.debug)
