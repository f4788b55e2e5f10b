"""Completes the runtime's reports with source lines for code addresses and names for memory."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cukit.core.source import kernels_root
from cukit.emulator.builder import Build, named_library
from cukit.emulator.names import Names

_ADDRESS = re.compile(r"\{at ([0-9a-f]+)\}")
_PLACE = re.compile(r"\{(static|device|argument) (\d+)(?: (\d+))?\}")
_SHIMS = "common/emulator/"


def describe_fault(text: str, build: Build, arguments: Sequence[Any]) -> str:
    """`text` with every `{at address}` replaced by its source line, and every placeholder for a
    memory location by the variable, or the element of an argument, that is stored there."""
    addresses = sorted(set(_ADDRESS.findall(text)))
    places = _locate(addresses, build.library)
    if _PLACE.search(text):
        names = Names(named_library(build.library))
        text = _PLACE.sub(lambda match: _name(match, names, build.spec.entry, arguments), text)
    return _ADDRESS.sub(lambda match: places[match[1]], text)


def _name(match: re.Match[str], names: Names, entry: str, arguments: Sequence[Any]) -> str:
    """The name for `{static BYTE}`, `{device BYTE}`, `{argument NUMBER}` or `{argument NUMBER
    BYTE}`, in parentheses; empty if it is unknown."""
    number = int(match[2])
    if match[1] == "argument":
        array = arguments[number]
        parts = [f"`{name}`"] if (name := names.parameter(entry, number)) else []
        if match[3] is not None and array.flags.c_contiguous and array.size:
            index = np.unravel_index(int(match[3]) // array.itemsize, array.shape)
            parts.append(f"element [{', '.join(map(str, index))}]")
        parts.append(f"{array.dtype} of shape {array.shape}")
        text = ", ".join(parts)
    else:
        text = names.shared(number) if match[1] == "static" else names.device(number)
    return f" ({text})" if text else ""


def _locate(addresses: list[str], library: Path) -> dict[str, str]:
    tool = shutil.which("addr2line")
    if tool is None:
        return {
            address: f"at address 0x{address} (addr2line is not installed)" for address in addresses
        }
    return {address: _frames(tool, address, library) for address in addresses}


def _frames(tool: str, address: str, library: Path) -> str:
    """The kernel's line and the functions inlined there, as in "at layers/rms_norm.cu:63, in load
    (common/types.cuh:71)"."""
    command = [tool, "-e", str(library), "-i", "-f", "-C", f"0x{address}"]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
    frames = []
    for function, place in zip(output[::2], output[1::2], strict=False):
        frames.append((function.partition("(")[0], _shorten(place)))
    if not frames:
        return f"at address 0x{address}"
    # Frames in the emulator's headers are omitted if there are others.
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
