"""CUDA programs written for nvcc or NVRTC, compiled for the CPU.

A program is a `.cu` file or a string, with everything that it includes. Its kernels are launched by
name, with blocks of up to three dimensions; its `__device__` and `__constant__` variables are
NumPy arrays.
"""

from __future__ import annotations

import ctypes
import difflib
import functools
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cukit.core.compiler import KernelSpec, cuda_include_folder
from cukit.core.kernel import NULL
from cukit.core.source import kernels_root
from cukit.emulator.builder import Build, build_third_party, uninitialised_in
from cukit.emulator.kernel import EmulatedKernel
from cukit.emulator.library import Entry, runtime
from cukit.emulator.rewrite import KernelSource, device_macros, rewrite
from cukit.emulator.settings import Settings
from cukit.emulator.toolchain import find_compiler
from cukit.errors import CompileError, ConfigError, LaunchError

_INCLUDE = re.compile(r'^([ \t]*#[ \t]*include[ \t]*)(["<])([^">\n]+)[">]', re.MULTILINE)
_STANDARDS = ("c++11", "c++14", "c++17", "c++20")
_STAND_IN_FOLDER = Path("common") / "emulator" / "cuda"

MAX_BLOCKS_AT_ONCE = 255
MAX_THREADS_AT_ONCE = 32768
"""Limits up to which all blocks of a cooperative grid (`grid.sync()`) run as one cluster."""


@dataclass(frozen=True)
class Source:
    """A program's text and how to compile it.

    name: the name in reports. folder: where quoted includes are searched first.
    includes: folders, as with -I. defines: macros and their values, as with -D.
    keep_host: whether functions without `__device__` are compiled for the device, too.
    """

    text: str
    name: str
    folder: Path | None = None
    includes: tuple[Path, ...] = ()
    defines: tuple[tuple[str, str], ...] = ()
    standard: str = "c++17"
    keep_host: bool = False

    def with_options(self, options: Sequence[str]) -> Source:
        """Applies -I, -D, -std and -default-device; other options of nvcc or NVRTC are ignored."""
        includes, defines, standard, keep_host = [], [], self.standard, self.keep_host
        pending = [str(option) for option in options]
        while pending:
            option = pending.pop(0)
            match = re.match(r"(-I|--include-path=|-D|--define-macro=|-std=|--std=)(.*)", option)
            if option in ("-default-device", "--device-as-default-execution-space"):
                keep_host = True
            if match is None:
                continue
            value = match[2] or (pending.pop(0) if pending and match[1] in ("-I", "-D") else "")
            if match[1] in ("-I", "--include-path="):
                includes.append(Path(value))
            elif match[1] in ("-D", "--define-macro="):
                name, _, text = value.partition("=")
                defines.append((name, text if "=" in value else "1"))
            else:
                standard = value
        if standard not in _STANDARDS:
            raise ConfigError(f"-std: expected one of {', '.join(_STANDARDS)}, got {standard!r}")
        # cukit's headers need C++17; sources for older standards compile as C++17, too.
        standard = max(standard, "c++17")
        return replace(
            self,
            includes=(*self.includes, *includes),
            defines=(*self.defines, *defines),
            standard=standard,
            keep_host=keep_host,
        )


class _Spec(KernelSpec):
    """A kernel of a program; reports name it by its entry."""

    def __str__(self) -> str:
        return self.entry


class Program:
    """A compiled program with its own device variables. Raises CompileError with the log."""

    def __init__(self, source: Source, settings: Settings, expressions: Sequence[str] = ()) -> None:
        """expressions: instances of kernel templates, such as `"scale<float, 4>"`."""
        self.source = source
        self.settings = settings
        self._files = _collect(source)
        self.kernels = tuple(k for file in self._files.rewritten for k in file.kernels)
        self._cooperative = any(file.cooperative for file in self._files.rewritten)
        unit = _unit(self._files.texts, source, expressions)
        try:
            self._library, self._record = build_third_party(
                source.name, unit, settings.arch, settings.checked, settings.debug, source.standard
            )
        except CompileError as error:
            raise CompileError(f"{error}{self._files.missing_note}") from None
        self._loaded = _load(self._library, fresh=any(f.variables for f in self._files.rewritten))

    def kernel(
        self, name: str, block: Sequence[int], shared_bytes: int = 0, grid: Sequence[int] = (1,)
    ) -> EmulatedKernel:
        """A kernel to launch with this block; `grid` matters only to cooperative kernels."""
        found = _find(self._loaded, "kernel", name)
        if found is None:
            raise LaunchError(self._no_kernel(name))
        address, _ = found
        shape = (*block, 1, 1)[:3]
        spec = _Spec(self.source.name, name, (), math.prod(shape), shared_bytes)
        cluster = next(
            (
                tuple(dims)
                for symbol, dims in self._record["clusters"].items()
                if _is_of(symbol, name)
            ),
            (1, 1, 1),
        )
        blocks, threads = math.prod(grid), math.prod(grid) * math.prod(shape)
        as_one_cluster = (
            self._cooperative
            and 1 < blocks <= MAX_BLOCKS_AT_ONCE
            and threads <= MAX_THREADS_AT_ONCE
        )
        if as_one_cluster:
            cluster = (*grid, 1, 1)[:3]
        uninitialised = uninitialised_in(
            self._record["uninitialised"], name, (kernel.name for kernel in self.kernels)
        )
        build = Build(
            spec,
            self._library,
            cluster,
            shared=self._record["shared"],
            uninitialised=uninitialised,
            cooperative=as_one_cluster,
        )
        kernel = EmulatedKernel(build, self.settings, Entry.from_address(address))
        kernel.block = shape  # type: ignore[assignment]
        return kernel

    def variable(self, name: str) -> np.ndarray[Any, Any]:
        """The bytes of a `__device__` or `__constant__` variable, readable and writeable."""
        found = _find(self._loaded, "variable", name)
        if found is None:
            known = [v for file in self._files.rewritten for v in file.variables]
            raise LaunchError(
                f"{self.source.name}: no __device__ or __constant__ variable {name!r}; "
                f"{'known: ' + ', '.join(known) if known else 'the program has none'}"
            )
        address, size = found
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def variables(self) -> list[np.ndarray[Any, Any]]:
        """All device variables: memory that a kernel may access besides its arguments."""
        found = []
        for file in self._files.rewritten:
            for name in file.variables:
                place = _find(self._loaded, "variable", name)
                if place is not None:
                    found.append(self.variable(name))
        return [variable for variable in found if variable.size]

    def _no_kernel(self, name: str) -> str:
        if not self.kernels:
            return f"{self.source.name} has no __global__ function"
        known = "; ".join(map(str, self.kernels))
        base = name.partition("<")[0].strip()
        near = difflib.get_close_matches(base, [kernel.name for kernel in self.kernels], 1, 0.4)
        templates = [k for k in self.kernels if k.template and k.name == base]
        if templates:
            hint = f"; it is a template: name an instance, such as {base}<float>"
        else:
            hint = f"; did you mean {near[0]}?" if near else ""
        return f"{self.source.name}: no kernel {name!r}{hint} (known: {known})"


def parameters_of(kernels: Sequence[KernelSource], name: str) -> str | None:
    """A kernel's signature as written in the source, or None if there is no such kernel."""
    base = name.partition("<")[0].strip().removeprefix("::")
    return next((str(kernel) for kernel in kernels if kernel.name == base), None)


def only_kernel(kernels: Sequence[KernelSource], source: str) -> str:
    """The name of a program's only kernel. Raises ConfigError unless there is exactly one."""
    if not kernels:
        raise ConfigError(f"{source} has no __global__ function")
    if len(kernels) > 1 or kernels[0].template:
        what = "several kernels" if len(kernels) > 1 else "a template"
        raise ConfigError(f"{source} has {what}, name the entry: {'; '.join(map(str, kernels))}")
    return kernels[0].name


def scan(source: Source) -> tuple[KernelSource, ...]:
    """The kernels of a program, without compiling it."""
    return tuple(kernel for file in _collect(source).rewritten for kernel in file.kernels)


# Files -------------------------------------------------------------------------------------------


@dataclass
class _Files:
    texts: dict[str, str]
    rewritten: list[Any]
    missing: list[str]

    @property
    def missing_note(self) -> str:
        if not self.missing:
            return ""
        return f"\nnot found, and left out: {', '.join(dict.fromkeys(self.missing))}"


def _collect(source: Source) -> _Files:
    """The program's own files, rewritten; headers of CUDA and of the host are not copied."""
    texts = {"": source.text}
    names = {"": (source.name, "0.cpp")}
    pending, order = [("", source.folder)], [""]
    links: dict[tuple[str, str], str | None] = {}
    folders = [folder for folder in source.includes if not (folder / "cuda_runtime.h").is_file()]
    while pending:
        path, folder = pending.pop(0)
        for _, quote, include in _INCLUDE.findall(texts[path]):
            found = _own_file(include, quote, folder, folders)
            links[path, include] = found
            if found is None or found in texts:
                continue
            try:
                texts[found] = Path(found).read_text(encoding="utf-8", errors="replace")
            except OSError:
                links[path, include] = None
                continue
            names[found] = (os.path.relpath(found), f"{len(names)}.h")
            order.append(found)
            pending.append((found, Path(found).parent))
    marks = device_macros(texts.values())
    marks |= device_macros([_macros(source.defines)])
    missing: list[str] = []
    rewritten, written = [], {}
    for path in order:
        shown, file = names[path]

        def link(match: re.Match[str], path: str = path) -> str:
            target = links.get((path, match[3]))
            if target is not None:
                return f'{match[1]}"{names[target][1]}"'
            replaced = _provided(match[3])
            if replaced is None:
                missing.append(match[3])
                return f"// {match[0].strip()}"
            return f"{match[1]}<{replaced}>"

        result = rewrite(texts[path], marks, source.keep_host)
        once = "#pragma once\n" if re.search(r"^\s*#\s*pragma\s+once", texts[path], re.M) else ""
        written[file] = f"{once}#line 1 {_quoted(shown)}\n{_INCLUDE.sub(link, result.text)}\n"
        rewritten.append(result)
    return _Files(written, rewritten, missing)


def _own_file(include: str, quote: str, folder: Path | None, folders: Sequence[Path]) -> str | None:
    """The program's file that an include names; None if it is not one of the program's."""
    places = [folder] if quote == '"' and folder is not None else []
    for place in (*places, *folders):
        path = place / include
        if path.is_file():
            resolved = path.resolve()
            return None if kernels_root().resolve() in resolved.parents else str(resolved)
    return None


def _provided(include: str) -> str | None:
    """The emulator's, CUDA's or the host's header to use for `include`; None if there is none."""
    if include.startswith("cuda/std/"):
        include = include.removeprefix("cuda/std/").removeprefix("detail/libcxx/include/")
    if include.startswith("cub/"):
        include = "cub/cub.cuh"
    if include.startswith("nvtx3/") or include in ("nvToolsExt.h",):
        return None
    folders = (kernels_root() / _STAND_IN_FOLDER, kernels_root(), *_header_folders())
    return include if any((folder / include).is_file() for folder in folders) else None


@functools.cache
def _header_folders() -> tuple[Path, ...]:
    """The folder of CUDA's headers, and the default search path of the host's compiler."""
    command = [find_compiler().path, "-E", "-v", "-x", "c++", os.devnull]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    listed = output.partition("#include <...> search starts here:")[2].partition("End of search")[0]
    return (
        cuda_include_folder(),
        *(Path(line.strip()) for line in listed.split("\n") if line.strip()),
    )


def _macros(defines: Sequence[tuple[str, str]]) -> str:
    return "".join(f"#define {name} {value}\n" for name, value in defines)


def _unit(files: dict[str, str], source: Source, expressions: Sequence[str]) -> dict[str, str]:
    """The file to compile: macros, the program, its template instances and the symbol lookup."""
    main = next(iter(files))
    instances = "".join(
        f"CUKIT_EMULATOR_TEMPLATE({_quoted(name)}, {name})\n" for name in expressions
    )
    find = "#include <common/emulator/find.h>\n"
    text = f'{_macros(source.defines)}{files[main]}#line 1 "instances"\n{instances}{find}'
    return {main: text, **{name: other for name, other in files.items() if name != main}}


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


# Libraries ---------------------------------------------------------------------------------------


@functools.cache
def _shared(path: Path) -> ctypes.CDLL:
    return _open(path)


def _load(path: Path, fresh: bool) -> ctypes.CDLL:
    """fresh: load a copy, whose variables no other program shares."""
    runtime()
    if not fresh:
        return _shared(path)
    with tempfile.TemporaryDirectory() as folder:
        return _open(Path(shutil.copy(path, folder)))


def _open(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        name = re.search(r"undefined symbol: (\S+)", str(error))
        what = f"it needs {name[1]}, which is not defined" if name else str(error)
        raise CompileError(f"the program cannot be loaded: {what}") from None
    for find in ("kernel", "variable"):
        function = getattr(library, f"cukit_find_{find}")
        function.restype = ctypes.c_void_p
        function.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t)]
    return library


def _find(library: ctypes.CDLL, what: str, name: str) -> tuple[int, int] | None:
    """The address and size of a kernel's entry or of a variable; None if there is none."""
    size = ctypes.c_size_t()
    bare = name.strip().removeprefix("::")
    address = getattr(library, f"cukit_find_{what}")(bare.encode(), ctypes.byref(size))
    return (address, size.value) if address else None


def _is_of(symbol: str, name: str) -> bool:
    """Whether a demangled symbol is the kernel `name`."""
    plain = re.sub(r"\s", "", name)
    found = re.sub(r"\s", "", re.sub(r"^void ", "", symbol))
    return found == plain or found.startswith(f"{plain}(")


# Arguments ---------------------------------------------------------------------------------------


def as_argument(value: Any, size: int) -> Any:
    """Converts a scalar for a parameter of `size` bytes; returns arrays and NULL unchanged.

    Integers, also Python ints, take the width of the parameter; LaunchError if one does not fit.
    """
    if value is NULL or isinstance(value, np.ndarray):
        return value
    if isinstance(value, (bool, np.bool_)):
        return np.array(int(value)).astype(f"u{size}")[()] if size in (1, 2, 4, 8) else value
    if isinstance(value, (int, np.integer)) and size in (1, 2, 4, 8):
        if not -(1 << (8 * size - 1)) <= int(value) < 1 << (8 * size):
            raise LaunchError(f"{int(value)} does not fit a parameter of {size} bytes")
        return np.array(int(value) % (1 << (8 * size)), dtype=f"u{size}")[()]
    if isinstance(value, float):
        return np.float64(value)
    if isinstance(value, complex):
        return np.complex128(value)
    return value
