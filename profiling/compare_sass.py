"""Compares the machine code of kernels with that of an earlier revision:

    python -m profiling.compare_sass main --source attention/flash_attention_sm90.cu

Compiles every registered variant of the sources, in this tree and in a copy of the revision. Prints
for each variant whether the instructions are bitwise identical, and its instruction count,
registers and spills, for both revisions if they differ. A refactoring with identical machine code
needs no timing.

--cubins FOLDER keeps the cubins of variants that differ, for nvdisasm, as 00.before.cubin and
00.after.cubin; the number of each variant is printed. The exit code is 1 if a variant differs or
exists in only one of the revisions.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cukit.commands.compile import compile_all, devices, variants
from cukit.core.compiler import CompiledKernel
from cukit.core.cubin import kernel_code

_INSTRUCTION_BYTES = 16


@dataclass(frozen=True)
class Code:
    """The compiled code of a variant in one revision."""

    cubin: bytes
    instructions: bytes
    registers: int
    spill_bytes: int

    def __str__(self) -> str:
        count = len(self.instructions) // _INSTRUCTION_BYTES
        return f"{count} instructions, {self.registers} registers, {self.spill_bytes} B spilled"


def collect(arch: str, sources: Sequence[str]) -> dict[str, Code]:
    """Return the code of all variants of `sources`, by spec. A compile error ends the program."""
    wanted = [each for each in variants(devices(arch)) if each.spec.source in sources]
    found = {}
    for variant, compiled in compile_all(wanted):
        if not isinstance(compiled, CompiledKernel):
            raise SystemExit(str(compiled))
        cubin, info = compiled.path.read_bytes(), compiled.info
        spilled = info.spill_store_bytes + info.spill_load_bytes
        code = kernel_code(cubin, info.entry)
        found[str(variant.spec)] = Code(cubin, code, info.registers, spilled)
    return found


def collect_revision(revision: str, arch: str, sources: Sequence[str]) -> dict[str, Code]:
    """Run this file on a copy of a revision, in a process that imports that copy."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", revision, "cukit", "kernels_cu"], check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        out = Path(folder) / "code.pickle"
        command = [sys.executable, __file__, "--arch", arch, "--collect", str(out)]
        command += [word for source in sources for word in ("--source", source)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": folder})
        # Safe to unpickle: written by this file, running on the other copy of the package.
        return {name: Code(*facts) for name, facts in pickle.loads(out.read_bytes()).items()}


def differing(before: Mapping[str, Code], after: Mapping[str, Code]) -> list[str]:
    """Print the comparison of each variant; return the names of those that differ."""
    names = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old is not None and new is not None and old.instructions == new.instructions:
            print(f"same     {name}: {new}")
            continue
        print(f"DIFFERS  {name}:\n           before {old}\n           after  {new}")
        names.append(name)
    print(f"{len(names)} of {len(before.keys() | after.keys())} variants differ")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("revision", nargs="?", default="HEAD")
    parser.add_argument("--source", action="append", required=True, help="below kernels_cu/")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--cubins", type=Path, help="folder for the cubins of variants that differ")
    parser.add_argument("--collect", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    after = collect(arguments.arch, arguments.source)
    if arguments.collect:
        facts = {name: tuple(vars(code).values()) for name, code in after.items()}
        arguments.collect.write_bytes(pickle.dumps(facts))
        return
    before = collect_revision(arguments.revision, arguments.arch, arguments.source)
    names = differing(before, after)
    if arguments.cubins:
        arguments.cubins.mkdir(parents=True, exist_ok=True)
        for index, name in enumerate(names):
            print(f"{index:02}: {name}")
            for when, codes in (("before", before), ("after", after)):
                if name in codes:
                    path = arguments.cubins / f"{index:02}.{when}.cubin"
                    path.write_bytes(codes[name].cubin)
    raise SystemExit(1 if names else 0)


if __name__ == "__main__":
    main()
