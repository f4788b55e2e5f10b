"""`cukit doctor`: what this machine has, what runs where, and how to fix what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from shlex import quote
from typing import Annotated, Any

import typer
from rich.markup import escape

from cukit.analyzer.report.numbers import num_bytes
from cukit.commands._console import print_json, stdout, table
from cukit.core import backend
from cukit.core.device import INSTALL_GPU_EXTRA
from cukit.core.driver import Driver, find_driver
from cukit.errors import ConfigError, MissingDependencyError

# The packages that install each component of GPU work, by CUDA major version.
PACKAGES = {
    12: {
        "cupy": "cupy-cuda12x",
        "nvrtc": "nvidia-cuda-nvrtc-cu12",
        "headers": "nvidia-cuda-runtime-cu12",
        "cublas": "nvidia-cublas-cu12",
        "bindings": "'cuda-bindings>=12.6,<13'",
    },
    13: {
        "cupy": "cupy-cuda13x",
        "nvrtc": "'nvidia-cuda-nvrtc>=13,<14'",
        "headers": "'nvidia-cuda-runtime>=13,<14' 'nvidia-cuda-crt>=13,<14'",
        "cublas": "'nvidia-cublas>=13,<14'",
        "bindings": "'cuda-bindings>=13,<14'",
    },
}

INSTALL_COMPILER = "apt-get install g++, or this system's equivalent; or set CXX"


class Status(str, Enum):
    """The state of a component."""

    OK = "ok"
    ABSENT = "absent"
    """Missing, but nothing on this machine needs it."""
    BROKEN = "broken"
    """Needed on this machine; `remedy` fixes it."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    status: Status
    value: str
    remedy: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what was found, what runs where, and how to fix what is missing.

    Exit code 0 if everything that this machine needs works, with or without a GPU; else 1.
    """
    findings = examine()
    broken = any(finding.status is Status.BROKEN for finding in findings)
    if as_json:
        print_json({"sane": not broken, "findings": [asdict(finding) for finding in findings]})
    else:
        _show(findings)
    raise typer.Exit(1 if broken else 0)


def examine() -> list[Finding]:
    """Examines every component. Never raises: a failure becomes a finding."""
    driver = find_driver()
    gpu_required = driver.version is not None
    packages = PACKAGES[_cuda_major(driver)]

    def part(name: str, package: str, look: Callable[[], str], *, required: bool) -> Finding:
        remedy = f"python -m pip install {packages[package]}"
        return _look(name, look, remedy, required=required)

    return [
        Finding("cukit", Status.OK, _own_version()),
        _driver_finding(driver),
        part("CuPy", "cupy", _cupy, required=gpu_required),
        _gpu_finding(driver),
        part("NVRTC", "nvrtc", _nvrtc, required=gpu_required),
        part("CUDA headers", "headers", _headers, required=gpu_required),
        part("cuBLAS", "cublas", _cublas, required=gpu_required),
        part("cuda-bindings", "bindings", _bindings, required=gpu_required),
        _cache_finding(),
        _compiler_finding(required=gpu_required),
        _look("emulator", _emulator, INSTALL_COMPILER, required=False),
        _numpy_finding(),
        _kernels_finding(required=gpu_required),
    ]


def _numpy_finding() -> Finding:
    try:
        where = "the references on the CPU"
        if backend.active is not None:
            where = f"kernels for {backend.active.device.name} in the emulator"
    except ConfigError as error:
        remedy = "unset CUKIT_BACKEND, or set it to emulator"
        return Finding("NumPy arrays", Status.BROKEN, str(error), remedy)
    return Finding("NumPy arrays", Status.OK, f"run {where}")


def _cuda_major(driver: Driver) -> int:
    """The CUDA major version of the packages: the installed CuPy's, else the driver's, else 12; the
    nearest one in PACKAGES."""
    from cukit.core.device import cupy_module

    cupy = cupy_module()
    major = driver.cuda if cupy is None else cupy.cuda.runtime.runtimeGetVersion() // 1000
    return min(max(major or 12, min(PACKAGES)), max(PACKAGES))


def _look(name: str, look: Callable[[], str], remedy: str, *, required: bool) -> Finding:
    """The finding of `look()`; if it raises, broken if required, else absent."""
    try:
        return Finding(name, Status.OK, look())
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        reason = reason.partition(f": {INSTALL_GPU_EXTRA}")[0]  # the remedy is more specific
        return Finding(name, Status.BROKEN if required else Status.ABSENT, reason, remedy)


def _own_version() -> str:
    import cukit

    place = os.path.dirname(os.path.abspath(cukit.__file__))
    return f"{cukit.__version__} in {place}, Python {platform.python_version()}"


def _driver_finding(driver: Driver) -> Finding:
    if driver.version is None:
        return Finding("driver", Status.ABSENT, str(driver))
    if not driver.extra:
        remedy = "install an NVIDIA driver of branch 525 or newer"
        return Finding("driver", Status.BROKEN, f"{driver}, too old", remedy)
    return Finding("driver", Status.OK, str(driver))


def _cupy() -> str:
    from cukit.core.device import require_cupy

    cupy = require_cupy("GPU work")
    version = cupy.cuda.runtime.runtimeGetVersion()
    return f"{cupy.__version__}, CUDA runtime {version // 1000}.{version % 1000 // 10}"


def _gpu_finding(driver: Driver) -> Finding:
    def look() -> str:
        from cukit.core.device import current_device, require_cupy

        device = current_device()
        count = require_cupy("GPU work").cuda.runtime.getDeviceCount()
        memory = f"{device.memory_bytes / 2**30:.0f} GiB"
        facts = f"{device.name}, {device.compile_arch}, {device.num_sms} SMs, {memory}"
        return facts if count == 1 else f"{facts}; the first of {count}"

    if driver.version is None:
        return Finding("GPU", Status.ABSENT, "none")
    remedy = "fix the parts above; a container needs access to the GPU (docker run --gpus all)"
    return _look("GPU", look, remedy, required=True)


def _nvrtc() -> str:
    from cukit.core.compiler import nvrtc_version

    return ".".join(map(str, nvrtc_version()))


def _headers() -> str:
    from cukit.core.compiler import cuda_include_folder

    return str(cuda_include_folder())


def _cublas() -> str:
    from cukit.core.device import require_cupy

    require_cupy("cuBLAS")
    try:
        from cupy_backends.cuda.libs import cublas
    except (ImportError, RuntimeError):  # CuPy's message lists every file that it tried
        raise MissingDependencyError("the library was not found") from None
    try:
        handle = cublas.create()
    except cublas.CUBLASError:
        return "loaded"  # the library is present; only the GPU is missing
    try:
        return str(cublas.getVersion(handle))
    finally:
        cublas.destroy(handle)


def _bindings() -> str:
    import cuda.bindings.driver  # noqa: F401 - the import is the test

    return importlib.metadata.version("cuda-bindings")


def _emulator() -> str:
    from cukit.emulator.toolchain import find_compiler

    return f"compiles kernels for the CPU with {find_compiler().path}"


def _cache_finding() -> Finding:
    from cukit.core.file_cache import cache_folder, check_folder, check_owner
    from cukit.errors import CacheError

    folder = cache_folder()
    for below in (each for each in (folder / "kernels", folder / "emulator") if each.exists()):
        try:
            check_owner(below)
        except CacheError as error:
            return Finding("kernel cache", Status.BROKEN, str(error), f"rm -r {quote(str(below))}")
        try:
            check_folder(below)
        except CacheError as error:
            remedy = "export CUKIT_CACHE_DIR=<a folder inside one that you own>"
            return Finding("kernel cache", Status.BROKEN, str(error), remedy)
    kernels = list(folder.glob("kernels/*.cubin"))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    value = f"{folder}, {len(kernels)} kernels, {num_bytes(size)}"
    nearest = folder
    while not nearest.exists():
        nearest = nearest.parent
    if nearest.is_dir() and os.access(nearest, os.W_OK):
        return Finding("kernel cache", Status.OK, value)
    remedy = "export CUKIT_CACHE_DIR=<a folder that you can write to>"
    return Finding("kernel cache", Status.BROKEN, f"{folder} is not writable", remedy)


def _compiler_finding(*, required: bool) -> Finding:
    """Compiles a small kernel: components that are all present may still be incompatible."""

    def look() -> str:
        from cukit.analyzer.timing import SPIN
        from cukit.core.compiler import compile_kernel
        from cukit.core.device import current_device, gpu_available

        arch = current_device().compile_arch if gpu_available() else "sm_90a"
        compiled = compile_kernel(SPIN, arch)
        source = "from the cache" if compiled.cached else f"in {compiled.compile_ms:.0f} ms"
        return f"{SPIN.source} for {arch} {source}"

    remedy = "python -m pip install 'cukit[compile]'" if not required else "fix the parts above"
    return _look("compiling", look, remedy, required=required)


def _kernels_finding(*, required: bool) -> Finding:
    """Runs an op on the GPU and compares it with its reference."""

    def look() -> str:
        import numpy as np

        from cukit.core.device import current_device, require_cupy
        from cukit.layers import rms_norm

        device = current_device()
        x = np.linspace(-1, 1, 4096, dtype=np.float32).reshape(4, 1024)
        weight = np.ones(1024, np.float32)
        cupy = require_cupy("GPU work")
        out = cupy.asnumpy(rms_norm(cupy.asarray(x), cupy.asarray(weight)))
        if not np.allclose(out, rms_norm(x, weight), atol=1e-5):
            raise ArithmeticError(f"rms_norm on {device.name} disagrees with its reference")
        return f"run kernels on {device.name} ({device.compile_arch}); checked with rms_norm"

    if not required:
        return Finding("CuPy arrays", Status.ABSENT, "need a GPU")
    return _look("CuPy arrays", look, "fix the parts above", required=True)


MARKS = {
    Status.OK: "[green]✓[/]",
    Status.ABSENT: "[dim]–[/]",
    Status.BROKEN: "[red]✗[/]",
}


def _show(findings: list[Finding]) -> None:
    console = stdout()
    report = table("", "", "found")
    report.show_header = False
    for finding in findings:
        report.add_row(MARKS[finding.status], f"[bold]{finding.name}[/]", escape(finding.value))
    console.print(report)
    remedies: dict[str, Any] = {
        finding.name: finding.remedy for finding in findings if finding.remedy
    }
    broken = [finding for finding in findings if finding.status is Status.BROKEN]
    if broken:
        console.print("\n[bold red]How to fix:[/]")
        for finding in broken:
            console.print(f"  {finding.name}: {escape(remedies[finding.name])}")
    elif remedies:
        console.print("\n[dim]Nothing on this machine needs the absent parts. To install them:[/]")
        for name, remedy in remedies.items():
            console.print(f"  [dim]{name}: {escape(remedy)}[/]")
