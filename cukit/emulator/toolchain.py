"""The host's C++ compiler, and the flags that the emulator gives it."""

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
"""Has the compiler find variables that are used before they have a value."""

NAMES = ("-g2", "-fno-var-tracking")
"""Has the debug information say what variables at fixed places and parameters are called."""

LIBRARIES = ("-nodefaultlibs", "-lm", "-lgcc", "-lc")
"""Of a kernel. The C++ library comes with the runtime, which is loaded before: reading its symbols
takes a third of the time of linking."""

RUNTIME_SOURCES = Path(__file__).resolve().parent / "runtime"


@dataclass(frozen=True)
class Compiler:
    """path: of the executable. version: its first line about itself."""

    path: str
    version: str

    @property
    def is_gcc(self) -> bool:
        return "clang" not in self.version

    @property
    def major(self) -> int:
        """Of the version number."""
        number = re.search(r"\b(\d+)\.\d+\.\d+", self.version)
        return int(number[1]) if number else 0

    def run(self, arguments: list[str], what: str) -> str:
        """The compiler's messages, in English. Raises CompileError with them."""
        command = [self.path, *arguments]
        environment = {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            if WARNINGS in arguments:  # of which none is the reason
                return self.run(["-w" if each == WARNINGS else each for each in arguments], what)
            raise CompileError(f"{what} does not compile for the emulator\n{done.stderr.strip()}")
        return done.stderr


@functools.cache
def find_compiler() -> Compiler:
    """$CXX, else g++, else clang++."""
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
    """AVX2 and fused multiply-add where the processor has them."""
    if platform.machine() != "x86_64":
        return ()
    try:
        known = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return ()
    return ("-march=x86-64-v3",) if {"avx2", "fma", "bmi2", "f16c", "movbe"} <= set(known) else ()


def include_flags() -> list[str]:
    """The kernels, the stand-ins for CUDA's compiler headers, and CUDA's own headers."""
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
    "-fstack-clash-protection",  # no frame leaps over the guard below a fiber's stack
    "-gdwarf-4",  # of version 5 some addr2line mix up the files
)

_QUICK = (
    "-O1",
    *("-fira-region=one", "-fira-algorithm=priority"),
    *("-fno-tree-loop-optimize", "-fno-ivopts", "-fno-tree-loop-im", "-fno-move-loop-invariants"),
)
"""Checked code mostly calls the runtime. Registers that are chosen with care and loops that are
optimised make no kernel faster, and take a fifth of the time of compiling."""

_SANITIZERS = ("thread", "bounds", "alignment")
"""Null pointers, divisions by zero and the alignment of plain accesses the runtime sees itself.
`alignment`: without it GCC lets a call write the structure that it returns straight into its place,
and tells the runtime nothing of that store."""

_MORE_SANITIZERS = (
    "null",
    "integer-divide-by-zero",
    "return",
    "unreachable",
    "object-size",
)
"""For what it does not see: ways out of a function without a value, pointers that leave the
variable they were made of. They cost half of the time of compiling."""


def runtime_flags() -> tuple[str, ...]:
    """For the emulator's own sources."""
    inner = ("-fno-semantic-interposition",)  # its functions call each other directly
    return (*_LANGUAGE, *_machine_flags(), *inner, "-w", "-O2", "-g1")


def kernel_flags(
    checked: bool, debug: bool, compiler: Compiler, all_checks: bool = True
) -> tuple[str, ...]:
    """For a kernel. The sanitizers only instrument: what they call is the emulator's own.

    all_checks: with all that the compiler can look for.
    """
    gcc = compiler.is_gcc
    flags = [*_LANGUAGE, *_machine_flags(), WARNINGS if checked and gcc else "-w"]
    if debug:
        flags += ["-O0", "-g3"]
    else:
        flags += [*(_QUICK if gcc else ("-O1",)), "-g1"] if checked else ["-O2", "-g1"]
    flags.append("-fno-plt")
    flags.append("-fno-optimize-sibling-calls")  # calls of the emulator return to where they are
    if gcc:
        # Constants of templates belong to their kernel: two kernels may have the same names.
        flags.append("-fno-gnu-unique")
    if checked:
        if not gcc or compiler.major >= 12:
            # Whatever has no initialiser holds numbers that show, in every thread the same.
            flags.append("-ftrivial-auto-var-init=pattern")
        sanitizers = (*_SANITIZERS, *_MORE_SANITIZERS) if all_checks else _SANITIZERS
        flags.append(f"-fsanitize={','.join(sanitizers)}")
        # Every variable has its own place on the stack: wgmma's registers are known by it.
        if gcc:
            # Whole structures are loaded and stored at once: their alignment is what is checked.
            flags += ["-fno-tree-sra", "--param=tsan-instrument-func-entry-exit=0"]
            flags.append("--param=tsan-distinguish-volatile=1")
            flags.append("-fstack-reuse=none")
        else:
            flags += ["-mllvm", "-tsan-instrument-func-entry-exit=0"]
            flags += ["-mllvm", "-tsan-distinguish-volatile=1", "-mllvm", "-no-stack-coloring"]
    return tuple(flags)


# With one object and with an array; delete without and with the size.
_NEW_AND_DELETE = ("_Znwm", "_Znam", "_ZdlPv", "_ZdaPv", "_ZdlPvm", "_ZdaPvm")


def link_flags(checked: bool) -> tuple[str, ...]:
    """For a kernel's library. Without the sanitizers, whose own runtimes must stay out; the
    emulator sees copies by the C library's functions, which the compiler does not instrument, and
    knows what is on the heap."""
    calls = ("memcpy", "memmove", "memset", "malloc", "free", *_NEW_AND_DELETE) if checked else ()
    return ("-shared", *(f"-Wl,--wrap={name}" for name in calls))
