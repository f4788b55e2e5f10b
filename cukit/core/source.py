"""Finds the CUDA sources and hashes the include closure of a kernel."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from cukit.errors import CukitError

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@functools.cache
def kernels_root() -> Path:
    """Folder of the `.cu` files: inside an installed package, next to the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "kernels_cu", package.parent / "kernels_cu"):
        if folder.is_dir():
            return folder
    raise CukitError(f"kernels_cu not found in {package} or next to it: the installation is broken")


def read_source(source: str) -> str:
    """Text of a kernel source, given relative to `kernels_cu/`, e.g. `"layers/rms_norm.cu"`."""
    path = kernels_root() / source
    if not path.is_file():
        raise CukitError(f"kernel source {source!r} not found in {kernels_root()}")
    return path.read_text(encoding="utf-8")


def include_closure(source: str) -> tuple[str, ...]:
    """`source` and every file it includes with quotes, transitively, sorted."""
    seen: set[str] = set()
    pending = [source]
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        for include in _INCLUDE.findall(read_source(name)):
            pending.append(_resolve(include, including=name))
    return tuple(sorted(seen))


def _resolve(include: str, including: str) -> str:
    """The included file: relative to `including` first, then to the root, as in the compiler."""
    beside = Path(including).parent / include
    return beside.as_posix() if (kernels_root() / beside).is_file() else include


def closure_hash(source: str) -> str:
    """SHA-256 over names and texts of the include closure."""
    digest = hashlib.sha256()
    for name in include_closure(source):
        digest.update(f"{name}\0{read_source(name)}\0".encode())
    return digest.hexdigest()
