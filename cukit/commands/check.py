"""`cukit check`: runs any CUDA kernel on the CPU with every access checked."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from cukit.emulator.check import check_kernel
from cukit.emulator.poison import poison
from cukit.errors import CompileError, ConfigError, EmulatorError

_ERRORS_FOUND = 1  # exit code
_MAX_ELEMENTS = 1 << 28
_FILLS = ("random", "zeros", "ones", "arange", "empty")
_NULLS = ("null", "NULL", "nullptr")
_NAMES = {
    "half": "float16", "float": "float32", "double": "float64", "char": "int8",
    "short": "int16", "int": "int32", "long": "int64", "uint": "uint32", "bf16": "bfloat16",
}  # fmt: skip


def check(
    source: Annotated[str, typer.Argument(help="A .cu file.")],
    entry: Annotated[
        str | None,
        typer.Option(help="The kernel, or an instance of a template: 'scale<float, 4>'."),
    ] = None,
    grid: Annotated[str, typer.Option(help="Grid size in blocks: 4, or 4,2 or 4,2,1.")] = "1",
    block: Annotated[
        str, typer.Option(help="Block size in threads: 128, or 32,4 or 8,8,4.")
    ] = "32",
    arg: Annotated[
        list[str] | None,
        typer.Option(
            help="A kernel argument; repeat in order. An array float32:1024 or float32:64x64:zeros "
            "(fill: random, zeros, ones, arange, empty or a number), a scalar int32=1024, a file "
            "x.npy, or null."
        ),
    ] = None,
    shared: Annotated[int, typer.Option(help="Bytes of dynamic shared memory.")] = 0,
    constant: Annotated[
        list[str] | None,
        typer.Option(help="A __constant__ or __device__ variable: name=float32:64:random."),
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option("--include", "-I", help="A folder of headers.")
    ] = None,
    define: Annotated[
        list[str] | None, typer.Option("--define", "-D", help="A macro: NAME or NAME=VALUE.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="Any other option of nvcc or NVRTC, such as -std=c++20."),
    ] = None,
    arch: Annotated[
        str, typer.Option(help="Architecture whose instructions are available.")
    ] = "sm_90",
    seed: Annotated[
        int, typer.Option(help="0 runs threads in order; other seeds, in a random order.")
    ] = 0,
    late: Annotated[
        bool, typer.Option("--late", help="Finish asynchronous copies as late as possible.")
    ] = False,
    global_races: Annotated[
        bool, typer.Option("--global-races", help="Detect races in global memory too; slower.")
    ] = False,
) -> None:
    """Compile a CUDA kernel for the CPU, run it, and report its errors.

    Checks bounds, alignment, initialisation, barriers and races in shared memory; needs no GPU.
    Host code in the file is ignored. Random arguments are the same in every run. Exit code 1 if a
    check fails, 2 if the kernel cannot be run.
    """
    rng = np.random.default_rng(0)
    values = [argument("--arg", text, rng) for text in arg or []]
    constants = {}
    for text in constant or []:
        name, is_assignment, value = text.partition("=")
        if not is_assignment:
            raise ConfigError(f"--constant: expected name=dtype:shape[:fill], got {text!r}")
        if value in _NULLS:
            raise ConfigError(f"--constant {text}: a variable has a value, got {value}")
        constants[name] = np.asarray(argument(f"--constant {name}", value, rng))
    settings: dict[str, Any] = {"global_races": True} if global_races else {}
    try:
        check_kernel(
            Path(source),
            entry,
            grid=extents_of("--grid", grid),
            block=extents_of("--block", block),
            args=values,
            shared_bytes=shared,
            constants=constants,
            options=[*(f"-D{macro}" for macro in define or []), *(option or [])],
            include=include or [],
            arch=arch,
            seed=seed,
            late=late,
            **settings,
        )
    except EmulatorError as error:
        print(error)
        raise typer.Exit(_ERRORS_FOUND) from None
    except CompileError as error:
        raise ConfigError(first_error(str(error))) from None
    print(f"{source}: no errors found")


def argument(option: str, text: str, rng: np.random.Generator) -> Any:
    """The value that `text` describes. Raises ConfigError that names `option`, which it is from."""
    given = f"{option} {text}"
    if text in _NULLS:
        return None
    if text.endswith(".npy"):
        try:
            return np.load(text)
        except (OSError, ValueError, EOFError) as error:
            raise ConfigError(f"{given}: {error}") from None
    name, is_scalar, value = text.partition("=")
    if is_scalar:
        dtype = _dtype(name, given)
        try:
            return _number(value, dtype)
        except ValueError:
            raise ConfigError(f"{given}: {value!r} is not a valid {dtype}") from None
    name, _, rest = text.partition(":")
    dtype = _dtype(name, given)
    shape_text, _, fill = rest.partition(":")
    if not re.fullmatch("[0-9]{1,19}(x[0-9]{1,19}){0,31}", shape_text):
        raise ConfigError(f"{given}: expected dtype:shape[:fill], dtype=value, a .npy file or null")
    shape = tuple(int(extent) for extent in shape_text.split("x"))
    if max(*shape, math.prod(shape)) > _MAX_ELEMENTS:
        raise ConfigError(f"{given}: at most {_MAX_ELEMENTS} elements")
    return _filled(given, dtype, shape, fill or "random", rng)


def _filled(
    given: str, dtype: np.dtype[Any], shape: tuple[int, ...], fill: str, rng: np.random.Generator
) -> np.ndarray[Any, Any]:
    """A filled array; "random" is standard normal for floats, 0 to 99 for integers."""
    if fill == "random":
        if dtype.kind in "iub":
            return rng.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)
        return rng.standard_normal(shape).astype(dtype)
    if fill == "arange":
        return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    if fill == "empty":
        array = np.empty(shape, dtype)
        poison(array)
        return array
    try:
        number = _number({"zeros": "0", "ones": "1"}.get(fill, fill), dtype)
    except ValueError:
        raise ConfigError(
            f"{given}: {fill!r} is neither {', '.join(_FILLS)} nor a valid {dtype}"
        ) from None
    return np.full(shape, number)


def _number(text: str, dtype: np.dtype[Any]) -> Any:
    """The scalar of `dtype` in `text`. Raises ValueError if there is none."""
    import ml_dtypes

    number: Any
    if dtype.kind == "c":
        number = complex(text)
    elif dtype.kind == "f":
        number = float(text)
    else:
        try:
            limits = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
        except ValueError:  # a narrow float, or bool
            number = bool(int(text, 0)) if dtype.kind == "b" else float(text)
        else:
            number = int(text, 0)
            if not limits.min <= number <= limits.max:
                raise ValueError(text)
    with np.errstate(over="ignore"):  # infinity
        return np.array(number).astype(dtype)[()]


def _dtype(name: str, given: str) -> np.dtype[Any]:
    import ml_dtypes

    name = _NAMES.get(name, name)
    extension = getattr(ml_dtypes, name, None)
    if re.fullmatch("[A-Za-z][A-Za-z0-9_]*", name):
        with suppress(TypeError, ValueError):
            dtype = np.dtype(name if extension is None else extension)
            # The dtypes of ml_dtypes have kind "V", as structures do.
            if dtype.kind in "biufcV" and dtype.type is not np.void:
                return dtype
    raise ConfigError(f"{given}: unknown dtype {name!r}; for example float32, int32")


def extents_of(option: str, text: str) -> tuple[int, ...]:
    """The extents in `4`, `4,2` or `4x2x1`. Raises ConfigError."""
    if not re.fullmatch("[0-9]{1,19}([,x][0-9]{1,19}){0,2}", text):
        raise ConfigError(f"{option}: expected one to three extents such as 4,2,1, got {text!r}")
    return tuple(int(extent) for extent in re.split("[,x]", text))


def first_error(log: str) -> str:
    """The first error of a compiler's log, in one line, with the number of further errors."""
    errors = [line.strip() for line in log.split("\n") if re.search(r"\b(fatal )?error:", line)]
    notes = [line for line in log.split("\n") if line.startswith("not found, and left out")]
    if not errors:
        return " ".join(log.split())
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    missing = f"; {notes[0]}" if notes else ""
    return f"{errors[0]}{more}{missing}"
