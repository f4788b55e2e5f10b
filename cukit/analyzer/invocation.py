"""Converts everything that can be launched to one form: a call without arguments, and a launch.

Launches that would fail (a block that is too large, too much shared memory, a kernel that does not
compile) are reported here, with the reason, before anything runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cukit.analyzer.occupancy import MAX_THREADS_PER_BLOCK, occupancy
from cukit.analyzer.schema import Dim3, LaunchAnalysis, Resources
from cukit.analyzer.static import StaticKernel, UnrepeatableError, inspect, launch_of_loaded
from cukit.core.compiler import KernelSpec, compile_kernel
from cukit.core.cubin import kernel_code
from cukit.core.device import Device, cupy_module
from cukit.core.kernel import Kernel
from cukit.errors import ConfigError, LaunchError

MAX_BLOCK_DEPTH = 64
"""The largest extent of a block along z."""
DEFAULT_SHARED_BYTES = 48 * 1024
"""More dynamic shared memory than this needs an opt-in."""


@dataclass(frozen=True)
class Invocation:
    """A kernel or call to analyse."""

    name: str
    kind: str
    launch: LaunchAnalysis | None
    """The properties of a single kernel launch; None for a call that launches its own kernels."""
    call: Callable[[], object] | None
    """None if nothing may run: static mode."""


def invocation(
    kernel: Any,
    device: Device,
    *,
    grid: Any = None,
    block: Any = None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    shared_bytes: int = 0,
    name: str | None = None,
    runnable: bool,
) -> Invocation:
    """See :meth:`KernelAnalyzer.analyze` for the arguments.

    Raises ConfigError for anything but a kernel, CompileError with the compiler's log, LaunchError
    for a launch that `device` would reject.
    """
    if isinstance(kernel, KernelSpec):
        return _from_spec(kernel, device, _dim3(grid, "grid"))
    if isinstance(kernel, Kernel):
        return _from_kernel(kernel, device, _dim3(grid, "grid"), args, runnable=runnable)
    if _is_raw(kernel) or not callable(kernel):
        return _from_raw(kernel, device, grid, block, args, shared_bytes, name, runnable=runnable)
    if grid is not None or block is not None:
        raise ConfigError(
            f"analyze: {_name_of(kernel)} chooses its own grid and block: pass neither"
        )
    options = dict(kwargs or {})
    kind = "elementwise kernel" if type(kernel).__name__ == "ElementwiseKernel" else "call"
    call = (lambda: kernel(*args, **options)) if runnable else None
    return Invocation(name or _name_of(kernel), kind, None, call)


def _is_raw(kernel: Any) -> bool:
    cupy = cupy_module()
    return cupy is not None and isinstance(kernel, (cupy.RawKernel, cupy.RawModule))


def _name_of(function: Any) -> str:
    """The name of a function, of a partial of one, or of a kernel."""
    inner = getattr(function, "func", function)
    found = getattr(inner, "__name__", None) or getattr(inner, "name", None)
    return str(found or type(function).__name__)


def _from_spec(spec: KernelSpec, device: Device, grid: Dim3 | None) -> Invocation:
    compiled = compile_kernel(spec, device.compile_arch)
    cubin = compiled.path.read_bytes()
    static = StaticKernel(compiled.info, kernel_code(cubin, spec.entry), spills_known=True)
    launch = static.launch(device, grid, (spec.threads, 1, 1), spec.shared_bytes)
    return Invocation(str(spec), "cukit kernel", launch, None)


def _from_kernel(
    kernel: Kernel, device: Device, grid: Dim3 | None, args: tuple[Any, ...], *, runnable: bool
) -> Invocation:
    described = _from_spec(kernel.compiled.spec, device, grid)
    call = (lambda: kernel(grid, args)) if runnable and grid is not None else None
    return Invocation(described.name, described.kind, described.launch, call)


def _from_raw(
    kernel: Any,
    device: Device,
    grid: Any,
    block: Any,
    args: tuple[Any, ...],
    shared_bytes: int,
    name: str | None,
    *,
    runnable: bool,
) -> Invocation:
    cupy = cupy_module()
    threads, blocks = _dim3(block, "block"), _dim3(grid, "grid")
    if threads is None:
        raise ConfigError("analyze: a raw kernel needs its block: pass block=...")
    try:
        static = inspect(kernel, device.arch, name)
    except UnrepeatableError:
        if not runnable or blocks is None or cupy is None:
            raise
        raw = kernel.get_function(name) if isinstance(kernel, cupy.RawModule) else kernel
        launch = _loaded(raw, device, blocks, threads, shared_bytes)
    else:
        check_launch(static, device, threads, shared_bytes)
        launch = static.launch(device, blocks, threads, shared_bytes)
    call = None
    if runnable and blocks is not None and cupy is not None and _is_raw(kernel):
        raw = kernel.get_function(name) if isinstance(kernel, cupy.RawModule) else kernel
        if shared_bytes > DEFAULT_SHARED_BYTES:
            raw.max_dynamic_shared_size_bytes = shared_bytes

        def call() -> None:
            raw(blocks, threads, args, shared_mem=shared_bytes)

    return Invocation(name or launch.name, "raw kernel", launch, call)


def _loaded(raw: Any, device: Device, grid: Dim3, block: Dim3, shared_bytes: int) -> LaunchAnalysis:
    """The launch of a kernel that CuPy compiled, with the driver's figures."""
    resources = Resources(
        registers=raw.num_regs,
        static_shared_bytes=raw.shared_size_bytes,
        dynamic_shared_bytes=shared_bytes,
        spill_store_bytes=None,
        spill_load_bytes=None,
        local_bytes=raw.local_size_bytes,
        max_threads_per_block=None,
        constant_bytes=raw.const_size_bytes,
    )
    return launch_of_loaded(device, raw.name, grid, block, resources)


def check_launch(static: StaticKernel, device: Device, block: Dim3, shared_bytes: int) -> None:
    """Raises LaunchError, which names the limit, for a block that `device` cannot run."""
    info, threads = static.info, block[0] * block[1] * block[2]
    if threads > MAX_THREADS_PER_BLOCK:
        raise LaunchError(
            f"{info.entry}: {threads} threads per block, the limit is {MAX_THREADS_PER_BLOCK}"
        )
    if block[2] > MAX_BLOCK_DEPTH:
        raise LaunchError(
            f"{info.entry}: a block extends {block[2]} along z, the limit is {MAX_BLOCK_DEPTH}"
        )
    if info.max_threads_per_block is not None and threads > info.max_threads_per_block:
        raise LaunchError(
            f"{info.entry}: {threads} threads per block, but its __launch_bounds__ allow at most "
            f"{info.max_threads_per_block}"
        )
    total = info.static_shared_bytes + shared_bytes
    if total > device.shared_bytes_per_block:
        raise LaunchError(
            f"{info.entry}: {total} bytes of shared memory per block ({info.static_shared_bytes} "
            f"static, {shared_bytes} dynamic); {device.name} has {device.shared_bytes_per_block}"
        )
    resident = occupancy(device, threads=threads, registers=info.registers, shared_bytes=total)
    if resident.blocks == 0:
        raise LaunchError(
            f"{info.entry}: {threads} threads of {info.registers} registers do not fit on an SM of "
            f"{device.name}; compile it with __launch_bounds__({threads})"
        )


def _dim3(extent: Any, what: str) -> Dim3 | None:
    """One to three positive integers, as three."""
    if extent is None:
        return None
    try:
        values = [
            operator.index(e) for e in (extent if isinstance(extent, Iterable) else (extent,))
        ]
    except TypeError:
        values = []
    if not 1 <= len(values) <= 3 or min(values) < 1:
        raise ConfigError(f"analyze: {what} takes one to three positive integers, got {extent!r}")
    x, y, z = (*values, 1, 1)[:3]
    return x, y, z
