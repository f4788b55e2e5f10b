"""Everything that the compiler decides about a kernel, for any architecture, with or without a GPU.

A kernel is compiled again, from the source and options stored by CuPy, because only ptxas' log
reports spills; an existing cubin is only read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cukit.analyzer.residency import analyze_occupancy, analyze_waves
from cukit.analyzer.sass import instruction_mix, memory_access
from cukit.analyzer.schema import Dim3, LaunchAnalysis, Resources
from cukit.core.compiler import cuda_include_folder, nvrtc_version
from cukit.core.cubin import CubinInfo, kernel_code, read_cubin
from cukit.core.device import Device, require_cupy
from cukit.errors import CompileError, ConfigError


@dataclasses.dataclass(frozen=True)
class KernelSource:
    """The source to compile a kernel again, or its cubin.

    entry: the function's name, or the name expression of a template.
    code: CUDA C++; None if `cubin` holds the compiled kernel.
    """

    entry: str
    code: str | None = None
    options: tuple[str, ...] = ()
    name_expressions: tuple[str, ...] = ()
    cubin: bytes | None = None


def kernel_source(kernel: Any, name: str | None = None) -> KernelSource:
    """The code of `kernel`.

    kernel: a `cupy.RawKernel`, a function of a `cupy.RawModule`, such a module (then `name` is the
        function), a compiled kernel of cukit, a path to a cubin, or a KernelSource.
    Raises ConfigError for anything else.
    """
    if isinstance(kernel, KernelSource):
        return kernel
    if isinstance(kernel, (str, Path)):
        return KernelSource(_required(name, kernel), cubin=Path(kernel).read_bytes())
    compiled = getattr(kernel, "compiled", None)
    if compiled is not None:  # a Kernel of cukit.core.kernel
        return KernelSource(compiled.spec.entry, cubin=compiled.path.read_bytes())
    cupy = require_cupy("reading a kernel's source")
    if not isinstance(kernel, (cupy.RawKernel, cupy.RawModule)):
        raise ConfigError(
            f"analyze: expected a RawKernel, RawModule, cukit kernel or cubin path, got {kernel!r}"
        )
    # A RawModule has these values as attributes, a RawKernel only in its pickled state.
    is_kernel = isinstance(kernel, cupy.RawKernel)
    state = kernel.__getstate__() if is_kernel else {k: getattr(kernel, k) for k in _MODULE_STATE}
    entry = state["name"] if is_kernel else _required(name, kernel)
    if state["file_path"] is not None:
        return KernelSource(entry, cubin=Path(state["file_path"]).read_bytes())
    options = tuple(state["options"])
    if state["enable_cooperative_groups"] or state["backend"] != "nvrtc":
        raise UnrepeatableError(
            f"analyze: {entry} is compiled by nvcc or for cooperative groups, which needs a linker "
            "and cannot be repeated here; analyze its cubin, or run it on a GPU"
        )
    return KernelSource(entry, state["code"], options, tuple(state["name_expressions"] or ()))


_MODULE_STATE = (
    "code",
    "options",
    "backend",
    "name_expressions",
    "file_path",
    "enable_cooperative_groups",
)


class UnrepeatableError(ConfigError):
    """The kernel cannot be recompiled here to read its properties."""


def _required(name: str | None, kernel: Any) -> str:
    if name is None:
        raise ConfigError(f"analyze: which function of {kernel}? Pass name=...")
    return name


@dataclasses.dataclass(frozen=True)
class StaticKernel:
    """One kernel as compiled for one architecture."""

    info: CubinInfo
    code: bytes
    spills_known: bool

    def launch(
        self, device: Device, grid: Dim3 | None, block: Dim3, dynamic_shared_bytes: int
    ) -> LaunchAnalysis:
        """The launch's resources and residency on `device`."""
        info = self.info
        threads = block[0] * block[1] * block[2]
        occupancy = analyze_occupancy(
            device,
            threads=threads,
            registers=info.registers,
            shared_bytes=info.static_shared_bytes + dynamic_shared_bytes,
        )
        blocks = grid[0] * grid[1] * grid[2] if grid else 0
        return LaunchAnalysis(
            name=info.entry,
            grid=grid or (0, 0, 0),
            block=block,
            resources=self.resources(dynamic_shared_bytes),
            occupancy=occupancy,
            waves=analyze_waves(device, blocks, occupancy.blocks_per_sm),
            memory_access=memory_access(self.code, device.compute_capability),
            instruction_mix=instruction_mix(self.code, device.compute_capability),
        )

    def resources(self, dynamic_shared_bytes: int = 0) -> Resources:
        """The resources that the compiler assigned to the kernel."""
        info = self.info
        return Resources(
            registers=info.registers,
            static_shared_bytes=info.static_shared_bytes,
            dynamic_shared_bytes=dynamic_shared_bytes,
            spill_store_bytes=info.spill_store_bytes if self.spills_known else None,
            spill_load_bytes=info.spill_load_bytes if self.spills_known else None,
            local_bytes=info.frame_bytes,
            max_threads_per_block=info.max_threads_per_block,
            code_bytes=len(self.code),
        )


def launch_of_loaded(
    device: Device,
    name: str,
    grid: Dim3,
    block: Dim3,
    resources: Resources,
    device_us: float | None = None,
) -> LaunchAnalysis:
    """Residency of a kernel whose resources the driver reports but whose code is unknown."""
    resident = analyze_occupancy(
        device,
        threads=block[0] * block[1] * block[2],
        registers=resources.registers,
        shared_bytes=resources.static_shared_bytes + resources.dynamic_shared_bytes,
    )
    blocks = grid[0] * grid[1] * grid[2]
    return LaunchAnalysis(
        name=name,
        grid=grid,
        block=block,
        resources=resources,
        occupancy=resident,
        waves=analyze_waves(device, blocks, resident.blocks_per_sm),
        memory_access=None,
        device_us=device_us,
    )


def inspect(kernel: Any, arch: str, name: str | None = None) -> StaticKernel:
    """Compiles or reads `kernel` for `arch`; see :func:`kernel_source` for the accepted types.

    Raises CompileError with the compiler's log, MissingDependencyError without NVRTC.
    """
    source = kernel_source(kernel, name)
    entry, cubin, log = source.entry, source.cubin, ""
    if cubin is None:
        entry, cubin, log = _compile(source, arch)
    info = read_cubin(cubin, entry, log)
    return StaticKernel(info, kernel_code(cubin, entry), spills_known="spill stores" in log)


def _compile(source: KernelSource, arch: str) -> tuple[str, bytes, str]:
    """(mangled entry, cubin, log), compiled with CuPy's own options for this kernel and `-v`."""
    nvrtc_version()  # reports a missing library before anything else
    nvrtc = require_cupy("compiling kernels").cuda.nvrtc
    assert source.code is not None
    program = nvrtc.createProgram(source.code, f"{source.entry}.cu", [], [])
    try:
        for expression in source.name_expressions:
            nvrtc.addNameExpression(program, expression)
        nvrtc.compileProgram(program, _options(source.options, arch))
        log = nvrtc.getProgramLog(program)
        entry = source.entry
        if entry in source.name_expressions:
            entry = nvrtc.getLoweredName(program, entry)
        # CuPy's buffer is sized for a C string and drops the last byte, which ELF tools need.
        return entry, nvrtc.getCUBIN(program) + b"\0", log
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program).strip()
        raise CompileError(f"{source.entry} does not compile ({error})\n{log}") from None
    finally:
        nvrtc.destroyProgram(program)


def _options(given: Sequence[str], arch: str) -> tuple[str, ...]:
    standard = () if any("-std" in option for option in given) else ("-std=c++17",)
    kept = tuple(o for o in given if not o.startswith(("-arch", "--gpu-architecture")))
    include = f"-I{cuda_include_folder()}"
    return (*kept, *standard, "-ftz=true", f"-arch={arch}", include, "--ptxas-options=-v")
