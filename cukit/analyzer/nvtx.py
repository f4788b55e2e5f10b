"""NVTX ranges around cukit's ops, for the timeline of Nsight Systems and the filters of ncu."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from cukit.core.device import require_cupy
from cukit.registry import ops


@contextlib.contextmanager
def nvtx_ranges() -> Iterator[None]:
    """Within the `with`, every call of an op opens an NVTX range of its name.

    This works however the op was imported: names in all loaded modules that refer to an op are
    replaced until the end of the `with`, so calls after it have no overhead. Modules imported
    within the `with` are not covered. Raises MissingDependencyError without CuPy.

        with nvtx_ranges():          # under `nsys profile` or `ncu --nvtx --nvtx-include rms_norm/`
            model(tokens)
    """
    nvtx: Any = require_cupy("NVTX ranges").cuda.nvtx
    wrapped = {id(op.function): _ranged(op.function, op.name, nvtx) for op in ops()}
    exchanged: list[tuple[dict[str, Any], str, Any]] = []
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            if id(value) in wrapped:
                exchanged.append((names, name, value))
                names[name] = wrapped[id(value)]
    try:
        yield
    finally:
        for names, name, value in exchanged:
            names[name] = value


def _ranged(function: Callable[..., Any], name: str, nvtx: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nvtx.RangePush(name)
        try:
            return function(*args, **kwargs)
        finally:
            nvtx.RangePop()

    return call
