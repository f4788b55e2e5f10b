"""Times of products measured on this machine, in memory and in `matmul_times.json`.

The file is stored beside the compiled kernels, in the cache folder.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from cukit.core.device import Device
from cukit.core.file_cache import cache_folder
from cukit.core.files import write_json
from cukit.gemm.dispatch._matmul_candidates import MatmulProblem, Times

_FILE = "matmul_times.json"

_times: dict[str, dict[tuple[str, str], float]] | None = None


def _path() -> Path:
    return cache_folder() / _FILE


def _key(device: Device, problem: MatmulProblem) -> str:
    fields = ",".join(str(value) for value in dataclasses.astuple(problem))
    return f"{device.name}:{fields}"


def _known() -> dict[str, dict[tuple[str, str], float]]:
    global _times
    if _times is None:
        try:
            content: dict[str, Any] = json.loads(_path().read_text())
            _times = {
                key: {(kernel, precision): float(us) for kernel, precision, us in rows}
                for key, rows in content.items()
            }
        except (OSError, ValueError, AttributeError):  # missing or malformed
            _times = {}
    return _times


def recall(device: Device, problem: MatmulProblem) -> Times | None:
    """The measured times of a problem on a device, if there are any."""
    return _known().get(_key(device, problem))


def remember(device: Device, problem: MatmulProblem, times: Times) -> None:
    """Adds measurements, in memory and on disk."""
    known = _known()
    known.setdefault(_key(device, problem), {}).update(times)
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {key: [[*pair, us] for pair, us in each.items()] for key, each in known.items()}
    write_json(path, rows)


def forget() -> None:
    """Drops the times in memory; the next recall reads the file again."""
    global _times
    _times = None
