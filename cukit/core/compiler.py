"""Compiles kernel sources with NVRTC into a cache of cubins on disk.

Compilation does not need a GPU. A launch loads the cubin that `cukit compile` has written, if any.
The cache key covers the source and all files it includes, the macros, the options, the target
architecture and the versions of NVRTC and of the CUDA headers.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cukit.core.cubin import CubinInfo, read_cubin
from cukit.core.device import INSTALL_GPU_EXTRA, require_cupy
from cukit.core.file_cache import cache_folder, load, store
from cukit.core.interrupts import python_handles_interrupts
from cukit.core.parameters import layout_assertions
from cukit.core.source import closure_hash, kernels_root, read_source
from cukit.errors import CompileError, MissingDependencyError

MacroValue = int | float | str | bool


@dataclass(frozen=True)
class KernelSpec:
    """One variant of a kernel: its source, entry, macros and launch shape.

    source: path below `kernels_cu/`, e.g. `"layers/rms_norm.cu"`.
    entry: name of the `extern "C"` kernel.
    defines: `-D` macros as (name, value) pairs; True becomes 1.
    threads: threads per block.
    shared_bytes: dynamic shared memory per block.
    """

    source: str
    entry: str
    defines: tuple[tuple[str, MacroValue], ...]
    threads: int
    shared_bytes: int = 0

    def __str__(self) -> str:
        macros = ", ".join(f"{name}={value}" for name, value in self.defines)
        return f"{self.entry}({macros})"


@dataclass(frozen=True)
class CompiledKernel:
    """A cubin on disk and its resource usage."""

    spec: KernelSpec
    arch: str
    path: Path
    info: CubinInfo
    log: str
    """Output of NVRTC and ptxas: registers, spills, warnings."""
    compile_ms: float
    cached: bool


def compile_kernel(spec: KernelSpec, arch: str) -> CompiledKernel:
    """Compiles `spec` for `arch` (e.g. `"sm_90a"`), or loads it from the cache.

    Raises CompileError with NVRTC's log, MissingDependencyError without NVRTC or the CUDA headers,
    CacheError if the cache folder cannot be written or is writable by other users.
    """
    options = _options(spec, arch)
    path = cache_folder() / "kernels" / f"{spec.entry}-{arch}-{_key(spec, options)}.cubin"
    try:
        found = load(path)
        if found is not None:
            cubin, record = found
            info = read_cubin(cubin, spec.entry, record["log"])
            return CompiledKernel(
                spec, arch, path, info, record["log"], record["compile_ms"], cached=True
            )
    except (ValueError, KeyError, CompileError):
        pass  # written by another version of cukit
    start = time.perf_counter()
    cubin, log = _run_nvrtc(spec, options)
    compile_ms = (time.perf_counter() - start) * 1e3
    info = read_cubin(cubin, spec.entry, log)
    store(path, cubin, kernel=str(spec), arch=arch, compile_ms=compile_ms, log=log)
    return CompiledKernel(spec, arch, path, info, log, compile_ms, cached=False)


def compile_with_message(spec: KernelSpec, arch: str) -> CompiledKernel:
    """compile_kernel, with a line on stderr after a compilation unless CUKIT_QUIET is set."""
    start = time.perf_counter()
    compiled = compile_kernel(spec, arch)
    if not compiled.cached and not os.environ.get("CUKIT_QUIET"):
        seconds = time.perf_counter() - start
        print(f"cukit: compiled {spec} for {arch} in {seconds:.1f} s, cached", file=sys.stderr)
    return compiled


@functools.cache
def cuda_include_folder() -> Path:
    """Folder of the CUDA headers (`cuda_fp16.h`) in the runtime wheel or an installed toolkit."""
    candidates: list[Path] = []
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        found = find_nvidia_header_directory("cudart")
        candidates += [Path(found)] if found else []
    except ImportError:
        pass
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            candidates.append(Path(os.environ[variable]) / "include")
    candidates.append(Path("/usr/local/cuda/include"))
    for folder in candidates:
        if (folder / "cuda_fp16.h").is_file():
            return folder
    raise MissingDependencyError(
        f"the CUDA headers (cuda_fp16.h) were not found: {INSTALL_GPU_EXTRA}, or set CUDA_HOME"
    )


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Version of the NVRTC library that CuPy loads, e.g. `(12, 9)`."""
    cupy = require_cupy("compiling kernels")
    try:
        major, minor = cupy.cuda.nvrtc.getVersion()
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        raise MissingDependencyError(
            f"NVRTC could not be loaded ({error}): {INSTALL_GPU_EXTRA}"
        ) from error
    return int(major), int(minor)


@functools.cache
def _header_version() -> str:
    text = (cuda_include_folder() / "cuda_runtime_api.h").read_text(errors="replace")
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return match[1] if match else "unknown"


def _options(spec: KernelSpec, arch: str) -> tuple[str, ...]:
    macros = (f"-D{name}={_macro(value)}" for name, value in spec.defines)
    return (
        f"-arch={arch}",
        "-std=c++17",
        "-default-device",
        "-ftz=true",
        "-lineinfo",
        "--ptxas-options=-v",
        *macros,
    )


def _macro(value: MacroValue) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _key(spec: KernelSpec, options: tuple[str, ...]) -> str:
    layouts = layout_assertions(spec.source)
    parts = (closure_hash(spec.source), layouts, *options, str(nvrtc_version()), _header_version())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _run_nvrtc(spec: KernelSpec, options: tuple[str, ...]) -> tuple[bytes, str]:
    nvrtc_version()  # raises MissingDependencyError if the library is missing
    nvrtc = require_cupy("compiling kernels").cuda.nvrtc
    includes = (f"-I{kernels_root()}", f"-I{cuda_include_folder()}")
    text = f"{read_source(spec.source)}\n{layout_assertions(spec.source)}"
    program = nvrtc.createProgram(text, spec.source, [], [])
    try:
        with python_handles_interrupts:
            nvrtc.compileProgram(program, (*options, *includes))
        log = nvrtc.getProgramLog(program)
        # CuPy treats the cubin as a C string and drops its last byte, which ELF tools need.
        return nvrtc.getCUBIN(program) + b"\0", log
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program).strip()
        raise CompileError(f"{spec} does not compile ({error})\n{log}") from None
    finally:
        nvrtc.destroyProgram(program)
