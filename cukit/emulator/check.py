"""Runs any CUDA kernel once, on NumPy arrays, with the emulator's checks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cukit.core.scalars import check_integer
from cukit.emulator.builder import macro_value
from cukit.emulator.limits import MAX_DYNAMIC_SHARED_BYTES, MAX_THREADS
from cukit.emulator.program import Program, Source, as_argument, only_kernel, parameters_of, scan
from cukit.emulator.settings import settings_from
from cukit.errors import ConfigError, LaunchError


def check_kernel(
    source: str | os.PathLike[str],
    entry: str | None = None,
    *,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any] = (),
    shared_bytes: int = 0,
    constants: Mapping[str, np.ndarray[Any, Any]] | None = None,
    options: Sequence[str] = (),
    include: Sequence[str | os.PathLike[str]] = (),
    defines: Mapping[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Compiles a CUDA program for the CPU and launches one of its kernels, checking every access.

    Races in global memory are detected only with `global_races=True`.

    Args:
        source: path of a `.cu` file, or the source itself. Its host functions are ignored.
        entry: name of a `__global__` function, with namespaces, or an instance of a template:
            `"scale<float, 4>"`. Optional if the program has only one kernel.
        grid, block: one to three extents.
        args: NumPy arrays, which the kernel reads and writes in place; NumPy scalars; Python ints
            that fit the parameter; None for a null pointer.
        shared_bytes: dynamic shared memory of a block.
        constants: values of `__constant__` and `__device__` variables by name, as
            cudaMemcpyToSymbol sets them. A writeable array holds the variable's value afterwards.
        options: options of nvcc or NVRTC; all but -I, -D, -std and -default-device are ignored.
        include, defines: include folders and macros, like -I and -D.
        settings: the emulator's (`cukit.emulator.Settings`): arch, checked, seed, late, ...

    Raises:
        EmulatorError: an error in the kernel; the message names thread, file and line.
        CompileError: the program does not compile, with the compiler's messages.
        LaunchError: no such kernel, or arguments that do not fit its parameters.
        ConfigError: an option or extent outside its legal values; a source that does not exist.

    Device variables start with their initial values in every call. Needs a C++ compiler and
    CUDA's headers (`pip install 'cukit[compile]'`).

    >>> import numpy as np, cukit as ck
    >>> source = '__global__ void twice(float* x) { x[threadIdx.x] *= 2; }'
    >>> x = np.ones(32, np.float32)
    >>> ck.check_kernel(source, grid=1, block=32, args=[x])              # doctest: +SKIP
    """
    chosen = settings_from(**settings)
    program_source = source_of(source, options, include, defines or {})
    blocks, threads = extents("grid", grid), extents("block", block)
    if math.prod(threads) > MAX_THREADS:
        raise ConfigError(f"block: at most {MAX_THREADS} threads, got {math.prod(threads)}")
    check_integer(
        "check_kernel", "shared_bytes", shared_bytes, least=0, most=MAX_DYNAMIC_SHARED_BYTES
    )
    if entry is None:
        entry = only_kernel(scan(program_source), program_source.name)
    program = Program(program_source, chosen, [entry] if "<" in entry else [])
    for name, value in (constants or {}).items():
        _variable(program, name, value)[:] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    kernel = program.kernel(entry, threads, shared_bytes, blocks)
    sizes = kernel.parameter_bytes
    if len(sizes) != len(args):
        written = parameters_of(program.kernels, entry) or entry
        raise LaunchError(f"{written} takes {len(sizes)} arguments, got {len(args)}")
    converted = [as_argument(value, size) for value, size in zip(args, sizes, strict=True)]
    kernel.launch(blocks, tuple(converted), settings=chosen, reachable=program.variables())
    for name, value in (constants or {}).items():
        if isinstance(value, np.ndarray) and value.flags.writeable:
            value[...] = program.variable(name).view(value.dtype).reshape(value.shape)


def source_of(
    source: str | os.PathLike[str],
    options: Sequence[str] = (),
    include: Sequence[str | os.PathLike[str]] = (),
    defines: Mapping[str, Any] | None = None,
) -> Source:
    """The program in a file or a string. Raises ConfigError if the file cannot be read."""
    is_text = isinstance(source, str) and any(mark in source for mark in "\n{;")
    if is_text:
        found = Source(str(source), "kernel.cu")
    else:
        path = Path(source)
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
        found = Source(text, str(path), path.resolve().parent)
    given = [*options, *(f"-I{folder}" for folder in include)]
    given += [f"-D{name}={macro_value(value)}" for name, value in (defines or {}).items()]
    found = found.with_options(given)
    for folder in found.includes:
        if not folder.is_dir():
            raise ConfigError(f"include: there is no folder {folder}")
    return found


def extents(what: str, value: int | Sequence[int]) -> tuple[int, int, int]:
    """One to three extents, padded with 1 to three. Raises ConfigError for anything else."""
    given = (value,) if isinstance(value, (int, np.integer)) else tuple(value)
    if not 1 <= len(given) <= 3:
        raise ConfigError(f"{what}: expected one to three extents, got {len(given)}")
    for extent in given:
        check_integer("check_kernel", what, extent, least=1, most=2**31 - 1)
    x, y, z = (*map(int, given), 1, 1)[:3]
    return x, y, z


def _variable(program: Program, name: str, value: Any) -> np.ndarray[Any, Any]:
    variable = program.variable(name)
    if not isinstance(value, (np.ndarray, np.generic)) or value.nbytes != variable.nbytes:
        got = f"{value.nbytes} bytes" if hasattr(value, "nbytes") else type(value).__name__
        raise LaunchError(f"{name} is a variable of {variable.nbytes} bytes, got {got}")
    return variable
