"""Turns code addresses in the runtime's reports into source lines."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from pathlib import Path

from cukit.core.source import kernels_root

_ADDRESS = re.compile(r"\{at ([0-9a-f]+)\}")
_SHIMS = "common/emulator/"


def describe_fault(text: str, library: Path) -> str:
    """`text` with every `{at address}` replaced by where that is in the kernel's source."""
    addresses = sorted(set(_ADDRESS.findall(text)))
    places = _locate(addresses, library)
    return _ADDRESS.sub(lambda match: places[match[1]], text)


def _locate(addresses: list[str], library: Path) -> dict[str, str]:
    tool = shutil.which("addr2line")
    if tool is None:
        return {
            address: f"at address 0x{address} (addr2line is not installed)" for address in addresses
        }
    return {address: _frames(tool, address, library) for address in addresses}


def _frames(tool: str, address: str, library: Path) -> str:
    """ "at layers/rms_norm.cu:63, in load (common/types.cuh:71)": the line of the kernel, and the
    helpers inlined there."""
    command = [tool, "-e", str(library), "-i", "-f", "-C", f"0x{address}"]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
    frames = []
    for function, place in zip(output[::2], output[1::2], strict=False):
        frames.append((function.partition("(")[0], _shorten(place)))
    if not frames:
        return f"at address 0x{address}"
    # Of the emulator's own headers only what nothing else explains.
    frames = [frame for frame in frames if _SHIMS not in frame[1]] or frames
    helpers = [f"{_bare(function)} ({where})" for function, where in frames[:-1]]
    return f"at {frames[-1][1]}" + (f", in {' called by '.join(helpers)}" if helpers else "")


def _bare(function: str) -> str:
    """The name without namespaces, return type and template arguments."""
    name = re.sub(r"<[^<>]*>", "", re.sub(r"<[^<>]*>", "", function))
    return name.rpartition("::")[2].rpartition(" ")[2] or function


def _shorten(place: str) -> str:
    place = place.partition(" (discriminator")[0]
    path, _, line = place.rpartition(":")
    with contextlib.suppress(ValueError):
        path = Path(path).resolve().relative_to(kernels_root().resolve()).as_posix()
    return f"{path.removeprefix('./')}:{line}"
