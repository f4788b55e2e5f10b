"""Compiles kernels and the emulator's runtime to shared libraries, in the kernel cache.

As for cubins, the cache key covers every input: the include closure, the macros, the emulator's own
sources, CUDA's headers, the compiler's version and its flags.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cukit.core.compiler import KernelSpec, cuda_include_folder
from cukit.core.device import parse_arch
from cukit.core.file_cache import Record, build_once, cache_folder
from cukit.core.parameters import layout_assertions
from cukit.core.source import closure_hash, kernels_root, read_source
from cukit.emulator.symbols import (
    Symbol,
    cluster_shapes,
    shared_variables,
    static_shared_bytes,
    symbols_of,
)
from cukit.emulator.toolchain import (
    LIBRARIES,
    NAMES,
    RUNTIME_SOURCES,
    find_compiler,
    include_flags,
    kernel_flags,
    link_flags,
    runtime_flags,
)

_GAP_BYTES = 256
_PRELUDE = '#include "common/platform.cuh"\n#include <common/emulator/entry.h>\n'
_MAX_RUNTIME_UNITS = 4
_THIRD_PARTY_PRELUDE = "#include <common/emulator/language.h>\n"
_HOST_LIBRARY = "#define CUKIT_EMULATOR_HOST_LIBRARY\n"
_HOST_HEADER = re.compile(r"^\s*#\s*include\s*<(\w+|cupy/.*)>", re.MULTILINE)
_INCLUDED_HEADERS = {
    *("algorithm", "cassert", "cfloat", "climits", "cmath", "cstddef", "cstdint", "cstdio"),
    *("cstdlib", "cstring", "limits", "type_traits", "utility"),
}
"""Standard headers that language.h includes."""


@dataclass(frozen=True)
class Build:
    """A kernel compiled for the emulator."""

    spec: KernelSpec
    library: Path
    cluster: tuple[int, int, int]
    static_shared_bytes: int = 0
    """The size of the kernel's own `__shared__` variables."""
    shared: Sequence[tuple[int, int]] = ()
    """Offset and size in bytes of each `__shared__` variable of the library, in order of offset.
    Gaps between the variables detect overruns."""
    uninitialised: Sequence[str] = ()
    """Reports of variables that are used before they have a value, from the compiler's warnings."""
    cooperative: bool = False
    """Whether `cluster` contains all blocks of a cooperative launch."""


def build_kernel(
    spec: KernelSpec, arch: str, checked: bool, debug: bool, all_checks: bool = False
) -> Build:
    """Compiles `spec`, or takes it from the cache. Raises CompileError with the compiler's log.

    all_checks: as for `kernel_flags`; always on for kernels from folders other than cukit's.
    """
    compiler = find_compiler()
    third_party = Path(spec.source).is_absolute()
    flags = (
        *kernel_flags(checked, debug, compiler, all_checks or third_party),
        *(NAMES if checked and third_party else ()),
        f"-DCUKIT_EMULATE={arch_number(arch)}",
    )
    link = (*link_flags(checked), *LIBRARIES)
    source = _translation_unit(spec)
    parts = (closure_hash(spec.source), source, _sources_hash(), compiler.version)
    key = _hash(*parts, *flags, *link)
    library = _folder() / f"{spec.entry}-{arch}-{key}.so"
    start = time.perf_counter()
    record, built = _build(library, partial(_compile_kernel, spec, source, link=link), flags)
    if built:
        _print_status(f"compiled {spec} for the emulator in {time.perf_counter() - start:.1f} s")
    x, y, z = record["cluster"]
    return Build(
        spec,
        library,
        (x, y, z),
        record["static_shared_bytes"],
        record["shared"],
        uninitialised_in(record["uninitialised"], spec.entry, _kernels(read_source(spec.source))),
    )


Recipe = Callable[[tuple[str, ...]], tuple[bytes, Record]]
"""Compiles a library with the given flags."""

_recipes: dict[Path, tuple[Recipe, tuple[str, ...]]] = {}


def _build(library: Path, recipe: Recipe, flags: tuple[str, ...]) -> tuple[Record, bool]:
    _recipes[library] = recipe, flags
    _, record, built = build_once(library, partial(recipe, flags))
    return record, built


def named_library(library: Path) -> Path:
    """The same library with the names and types of variables in its debug information. Checked
    kernels of other projects are compiled this way from the start, since they fault more often."""
    recipe, flags = _recipes[library]
    if set(NAMES) <= set(flags):
        return library
    named = library.with_name(f"{library.stem}-named.so")
    build_once(named, partial(recipe, (*flags, *NAMES)))
    return named


def build_runtime() -> Path:
    """The runtime library, which every kernel calls."""
    compiler = find_compiler()
    flags = runtime_flags()
    library = _folder() / f"runtime-{_hash(_sources_hash(), compiler.version, *flags)}.so"
    start = time.perf_counter()
    _, _, built = build_once(library, partial(_compile_runtime, flags))
    if built:
        _print_status(f"compiled the emulator itself in {time.perf_counter() - start:.1f} s")
    return library


def _print_status(what: str) -> None:
    """Prints to stderr why a first call is slow, unless CUKIT_QUIET is set."""
    if not os.environ.get("CUKIT_QUIET"):
        print(f"cukit: {what}", file=sys.stderr)


def _compile_runtime(flags: tuple[str, ...]) -> tuple[bytes, Record]:
    _print_status("compiling the emulator itself, once; this takes about ten seconds on two cores")
    flags = (*flags, f"-I{RUNTIME_SOURCES}", *include_flags())
    units = runtime_units(min(len(os.sched_getaffinity(0)), _MAX_RUNTIME_UNITS))
    with tempfile.TemporaryDirectory() as folder:
        objects = [str(Path(folder) / f"{i}.o") for i in range(len(units))]

        def compile_unit(unit: Sequence[Path], target: str) -> None:
            source = Path(target).with_suffix(".cpp")
            source.write_text("".join(f'#include "{each.name}"\n' for each in unit))
            find_compiler().run([*flags, "-c", str(source), "-o", target], "the emulator itself")

        with ThreadPoolExecutor(len(units)) as pool:
            list(pool.map(compile_unit, units, objects))
        return _output_of(["-shared", "-pthread", *objects], "the emulator"), {}


def runtime_units(count: int) -> list[list[Path]]:
    """The runtime's sources in `count` groups of about equal size. Each group is compiled as one
    file, since parsing the headers takes longer than compiling most of the sources."""
    units: list[list[Path]] = [[] for _ in range(count)]
    sizes = [0] * count
    sources = sorted(RUNTIME_SOURCES.glob("*.cpp"), key=lambda path: (-path.stat().st_size, path))
    for source in sources:
        smallest = sizes.index(min(sizes))
        units[smallest].append(source)
        sizes[smallest] += source.stat().st_size
    return units


def build_third_party(
    name: str, files: Mapping[str, str], arch: str, checked: bool, debug: bool, standard: str
) -> tuple[Path, Record]:
    """Compiles the first of `files` (texts by name), which includes the others, or takes it from
    the cache. Returns the library and its record: the `clusters` of its kernels by symbol name,
    `shared` as in a Build, and `uninitialised` (:func:`uninitialised_in`).

    Raises CompileError with the compiler's log.
    """
    compiler = find_compiler()
    flags = (
        *kernel_flags(checked, debug, compiler),
        *(NAMES if checked else ()),
        f"-DCUKIT_EMULATE={arch_number(arch)}",
        f"-std={standard}",
    )
    link = link_flags(checked)
    key = _hash(*files, *files.values(), _sources_hash(), compiler.version, *flags, *link)
    library = _folder() / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:64]}-{arch}-{key}.so"
    start = time.perf_counter()
    record, built = _build(library, partial(_compile_third_party, name, files, link=link), flags)
    if built:
        _print_status(f"compiled {name} for the emulator in {time.perf_counter() - start:.1f} s")
    return library, record


def _compile_third_party(
    name: str, files: Mapping[str, str], flags: tuple[str, ...], link: tuple[str, ...]
) -> tuple[bytes, Record]:
    # Unreferenced code is dropped, so that libraries that only host code uses are not required.
    own = ("-fvisibility=hidden", "-ffunction-sections", "-fdata-sections")
    headers = {name for text in files.values() for name in _HOST_HEADER.findall(text)}
    prelude = _HOST_LIBRARY * bool(headers - _INCLUDED_HEADERS) + _THIRD_PARTY_PRELUDE
    library, symbols, uninitialised = _compile_unit(
        name, files, (*flags, *own), prelude, (*link, "-Wl,--gc-sections", "-pthread")
    )
    facts = {"clusters": cluster_shapes(symbols), "shared": shared_variables(symbols)}
    return library, {"kernel": name, "uninitialised": uninitialised, **facts}


def _compile_kernel(
    spec: KernelSpec, source: str, flags: tuple[str, ...], link: tuple[str, ...]
) -> tuple[bytes, Record]:
    unit = f"{spec.entry}.cpp"
    library, symbols, uninitialised = _compile_unit(
        str(spec), {unit: source}, flags, _PRELUDE, link
    )
    return library, {
        "kernel": str(spec),
        "cluster": cluster_shapes(symbols).get(spec.entry, (1, 1, 1)),
        "static_shared_bytes": static_shared_bytes(symbols, spec.entry),
        "shared": shared_variables(symbols),
        "uninitialised": uninitialised,
    }


def _compile_unit(
    what: str,
    files: Mapping[str, str],
    flags: tuple[str, ...],
    prelude: str,
    link: tuple[str, ...],
) -> tuple[bytes, list[Symbol], list[tuple[str, str, str]]]:
    """The library; its symbols; and function, name and place of each variable that is used
    uninitialised."""
    header = _precompiled_prelude(flags, prelude)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        unit, assembly = str(Path(folder) / next(iter(files))), Path(folder) / "kernel.s"
        library = Path(folder) / "kernel.so"
        places = [f"-ffile-prefix-map={folder}=.", f"-fdebug-prefix-map={os.getcwd()}=."]
        arguments = [*flags, *places, "-include", str(header), *include_flags(), "-S", unit]
        messages = find_compiler().run([*arguments, "-o", str(assembly)], what)
        assembly.write_text(_with_gaps(assembly.read_text(encoding="utf-8")), encoding="utf-8")
        find_compiler().run([str(assembly), *link, "-o", str(library)], what)
        code = library.read_bytes()
        return code, symbols_of(code), _uninitialised(messages)


def _uninitialised(messages: str) -> list[tuple[str, str, str]]:
    function, found = "", []
    for line in messages.splitlines():
        if match := re.search(r": In (?:\w+ )*function '(?:.*?[ :*&])?(\w+)(?:<.*>)?\(", line):
            function = match[1]
        elif match := re.match(r"(.+?:\d+):\d+: warning: '([\w.]+)' is used uninitialized", line):
            found.append((function, match[2], match[1]))
    return found


def uninitialised_in(
    found: Iterable[tuple[str, str, str]], entry: str, kernels: Iterable[str]
) -> list[str]:
    """Reports of the uninitialised variables in a library's record, except those in kernels other
    than `entry`."""
    others = set(kernels) - {entry.partition("<")[0].rpartition("::")[2]}
    return [
        f"uninitialised variable: `{name}` is used before it has a value\n"
        f"  in {function} at {place}"
        for function, name, place in found
        if function not in others
    ]


def _kernels(text: str) -> list[str]:
    """Names of the kernels in a source."""
    return re.findall(r"__global__[^;{}]*?\b(\w+)\s*\((?=[^;{}]*\)\s*\{)", text)


def _with_gaps(assembly: str) -> str:
    """Adds a gap after every thread-local variable; `__shared__` variables are thread-local."""
    lines, in_shared = [], False
    for line in assembly.split("\n"):
        lines.append(line)
        directive = line.split(None, 1)[:1]
        if directive in ([".section"], [".text"], [".data"], [".bss"]):
            in_shared = ".tbss" in line
        elif in_shared and directive == [".zero"]:
            lines.append(f"\t.zero\t{_GAP_BYTES}")
    return "\n".join(lines)


def _translation_unit(spec: KernelSpec) -> str:
    """The macros, the kernel's file (unchanged) and its entry.

    The prelude includes the headers of CUDA and of the host first, so that the macros do not affect
    them.
    """
    macros = "".join(f"#define {name} {macro_value(value)}\n" for name, value in spec.defines)
    layouts = layout_assertions(spec.source)
    bound = _launch_bound(read_source(spec.source), spec.entry)
    entry = f"CUKIT_EMULATOR_ENTRY({', '.join((spec.entry, *bound))})"
    return f'{macros}#include "{spec.source}"\n{layouts}{entry}\n'


def _launch_bound(text: str, entry: str) -> tuple[str, ...]:
    """The first argument of the entry's `__launch_bounds__`, an expression; empty without one."""
    for found in re.finditer(r"__launch_bounds__\s*\(", text):
        depth, end = 1, found.end()
        while depth and end < len(text):
            depth += {"(": 1, ")": -1, ",": -depth if depth == 1 else 0}.get(text[end], 0)
            end += 1
        if re.match(rf"[^;{{}}]*\b{entry}\s*\(", text[end:]):
            return (f"({text[found.end() : end - 1]})",)
    return ()


def macro_value(value: object) -> str:
    """The text of a macro's value; 1 or 0 for a bool."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _precompiled_prelude(flags: tuple[str, ...], text: str) -> Path:
    """CUDA's headers, precompiled for each set of flags: parsing them dominates the compilation of
    small kernels."""
    compiler = find_compiler()
    key = _hash(_sources_hash(), compiler.version, text, *flags)
    header = _folder() / f"prelude-{key}.h"
    build_once(header, lambda: (text.encode(), {}))
    if "-g3" in flags:
        return header  # a precompiled header would hide macros such as threadIdx from gdb
    arguments = [*flags, *include_flags(), "-x", "c++-header", str(header)]
    build_once(
        header.with_name(f"{header.name}.gch"),
        lambda: (_output_of(arguments, "the prelude"), {}),
    )
    return header


def arch_number(arch: str) -> int:
    """The value of `__CUDA_ARCH__`: 900 for sm_90."""
    major, minor = parse_arch(arch)
    return major * 100 + minor * 10


@functools.cache
def _sources_hash() -> str:
    """A hash of the emulator's compiled sources, and of CUDA's include folder and the size of its
    cuda_fp16.h, which stand for CUDA's headers."""
    emulator = kernels_root() / "common" / "emulator"
    files = sorted(
        path
        for folder in (emulator, RUNTIME_SOURCES)
        for path in folder.rglob("*")
        if path.is_file()
    )
    texts = (path.read_text(encoding="utf-8") for path in files)
    platform = (kernels_root() / "common" / "platform.cuh").read_text(encoding="utf-8")
    cuda = (cuda_include_folder() / "cuda_fp16.h").stat()
    return _hash(*texts, platform, str(cuda_include_folder()), str(cuda.st_size))


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _folder() -> Path:
    return cache_folder() / "emulator"


def _output_of(arguments: Iterable[str], what: str) -> bytes:
    """The output file of the compiler for these arguments."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        find_compiler().run([*arguments, "-o", str(output)], what)
        return output.read_bytes()
