"""The host's C++ compiler, and the flags that the emulator passes to it."""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from cukit.core.compiler import cuda_include_folder
from cukit.core.source import kernels_root
from cukit.errors import CompileError, MissingDependencyError

WARNINGS = "-Wuninitialized"
"""Reports variables that are used before they have a value."""

NAMES = ("-g2", "-fno-var-tracking")
"""Adds the names of parameters and of variables at fixed addresses to the debug information."""

LIBRARIES = ("-nodefaultlibs", "-lm", "-lgcc", "-lc")
"""Libraries that a kernel links. The C++ library is not among them, because reading its symbols
takes a third of the link time; the runtime, which is loaded first, provides it."""

RUNTIME_SOURCES = Path(__file__).resolve().parent / "runtime"


@dataclass(frozen=True)
class Compiler:
    """path: of the executable. version: the first line that `--version` prints."""

    path: str
    version: str

    @property
    def is_gcc(self) -> bool:
        return "clang" not in self.version

    @property
    def major(self) -> int:
        """The major version number."""
        number = re.search(r"\b(\d+)\.\d+\.\d+", self.version)
        return int(number[1]) if number else 0

    def run(self, arguments: list[str], what: str) -> str:
        """The compiler's messages, in English. Raises CompileError, with them, if it fails."""
        command = [self.path, *arguments]
        environment = {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            if WARNINGS in arguments:  # show the errors alone
                return self.run(["-w" if each == WARNINGS else each for each in arguments], what)
            raise CompileError(f"{what} does not compile for the emulator\n{done.stderr.strip()}")
        return done.stderr


@functools.cache
def find_compiler() -> Compiler:
    """The compiler named by $CXX, else g++, else clang++."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            banner = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
            return Compiler(path, banner.stdout.splitlines()[0])
    raise MissingDependencyError(
        "the emulator needs a C++17 compiler: install g++ or clang++, or set CXX"
    )


@functools.cache
def _machine_flags() -> tuple[str, ...]:
    """Enables AVX2 and fused multiply-add if the processor has them."""
    if platform.machine() != "x86_64":
        return ()
    try:
        known = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return ()
    return ("-march=x86-64-v3",) if {"avx2", "fma", "bmi2", "f16c", "movbe"} <= set(known) else ()


def include_flags() -> list[str]:
    """The include folders: the kernels, replacements of CUDA's compiler headers, CUDA's headers."""
    root = kernels_root()
    return [
        f"-I{root}",
        "-isystem",
        str(root / "common" / "emulator" / "cuda"),
        "-isystem",
        str(cuda_include_folder()),
    ]


# Kernels reinterpret memory freely, integers wrap, and a * b + c is one operation, as on the GPU.
_LANGUAGE = (
    "-std=c++17",
    "-fPIC",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fstack-clash-protection",  # no frame skips the guard below a fiber's stack
    "-gdwarf-4",  # some versions of addr2line mix up files in version 5
)

_QUICK = (
    "-O1",
    *("-fira-region=one", "-fira-algorithm=priority"),
    *("-fno-tree-loop-optimize", "-fno-ivopts", "-fno-tree-loop-im", "-fno-move-loop-invariants"),
)
"""Checked code mostly calls the runtime. Better register allocation and loop optimisation do not
make checked kernels faster, and take a fifth of the compile time."""

_SANITIZERS = ("thread", "bounds", "alignment")
"""The runtime itself finds null pointers, divisions by zero and misaligned plain accesses.
`alignment`: without this option, a call writes a returned structure directly to its destination, a
store that GCC does not instrument."""

_MORE_SANITIZERS = (
    "null",
    "integer-divide-by-zero",
    "return",
    "unreachable",
    "object-size",
)
"""For errors that the runtime cannot detect: functions that end without a value, pointers that
leave their variable. Compilation takes 50% longer with them."""


def runtime_flags() -> tuple[str, ...]:
    """Flags for the emulator's own sources."""
    inner = ("-fno-semantic-interposition",)  # direct calls within the runtime
    return (*_LANGUAGE, *_machine_flags(), *inner, "-w", "-O2", "-g1")


def kernel_flags(
    checked: bool, debug: bool, compiler: Compiler, all_checks: bool = True
) -> tuple[str, ...]:
    """Flags for a kernel. The sanitizers only add calls, which the emulator's runtime defines.

    all_checks: enable every check that the compiler offers.
    """
    gcc = compiler.is_gcc
    flags = [*_LANGUAGE, *_machine_flags(), WARNINGS if checked and gcc else "-w"]
    if debug:
        flags += ["-O0", "-g3"]
    else:
        flags += [*(_QUICK if gcc else ("-O1",)), "-g1"] if checked else ["-O2", "-g1"]
    flags.append("-fno-plt")
    flags.append("-fno-optimize-sibling-calls")  # a return address identifies the line
    if gcc:
        # Static data of templates must stay local: the libraries of two kernels may use the same
        # names.
        flags.append("-fno-gnu-unique")
    if checked:
        if not gcc or compiler.major >= 12:
            # Variables without an initialiser hold conspicuous values, the same in every thread.
            flags.append("-ftrivial-auto-var-init=pattern")
        sanitizers = (*_SANITIZERS, *_MORE_SANITIZERS) if all_checks else _SANITIZERS
        flags.append(f"-fsanitize={','.join(sanitizers)}")
        # Every variable has its own place on the stack, which identifies wgmma's registers.
        if gcc:
            # Structures are loaded and stored whole, so that their alignment is checked.
            flags += ["-fno-tree-sra", "--param=tsan-instrument-func-entry-exit=0"]
            flags.append("--param=tsan-distinguish-volatile=1")
            flags.append("-fstack-reuse=none")
        else:
            flags += ["-mllvm", "-tsan-instrument-func-entry-exit=0"]
            flags += ["-mllvm", "-tsan-distinguish-volatile=1", "-mllvm", "-no-stack-coloring"]
    return tuple(flags)


# For single objects and for arrays; delete without and with the size.
_NEW_AND_DELETE = ("_Znwm", "_Znam", "_ZdlPv", "_ZdaPv", "_ZdlPvm", "_ZdaPvm")


def link_flags(checked: bool) -> tuple[str, ...]:
    """Flags to link a kernel's library, without the sanitizers' own runtimes. Calls of the C
    library's copy functions and allocators are redirected to the emulator: the compiler does not
    instrument them."""
    calls = ("memcpy", "memmove", "memset", "malloc", "free", *_NEW_AND_DELETE) if checked else ()
    return ("-shared", *(f"-Wl,--wrap={name}" for name in calls))
