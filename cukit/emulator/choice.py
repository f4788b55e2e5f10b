"""`cukit.backend(...)` and CUKIT_BACKEND: where ops run their kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from cukit.core.backend import Backend, activate
from cukit.emulator.backend import Emulator
from cukit.emulator.settings import settings_from
from cukit.errors import ConfigError


@contextmanager
def backend(name: str, **options: Any) -> Iterator[None]:
    """Selects where ops run their kernels within the `with` block.

    Args:
        name: `"emulator"`: NumPy arrays run the CUDA kernels on the CPU; `"gpu"`: the default, CuPy
            arrays run the kernels on the GPU and NumPy arrays run the references.
        options: the emulator's (`cukit.emulator.Settings`): arch, checked, seed, late, threads,
            debug, patience, global_races, same_value_writes, cas_guesses, all_checks. Defaults come
            from the environment: CUKIT_EMULATOR_ARCH, _CHECK, _SEED, _LATE, _THREADS, _DEBUG,
            _PATIENCE, _GLOBAL_RACES, _SAME_VALUE_WRITES, _CAS_GUESSES, _ALL_CHECKS.

    Raises:
        ConfigError: an unknown name or option value. In the block, ops raise EmulatorError if the
            emulator detects an error in a kernel.

    Applies to the whole process, not to one thread. CUKIT_BACKEND=emulator in the environment
    selects the emulator from the start. Needs a C++ compiler and CUDA's headers.

    >>> import numpy as np, cukit as ck
    >>> with ck.backend("emulator"):                                     # doctest: +SKIP
    ...     y = ck.rms_norm(np.ones((2, 64), np.float32), np.ones(64, np.float32))
    """
    before = activate(_choose(name, **options))
    try:
        yield
    finally:
        activate(before)


def activate_from_environment() -> None:
    """Activates the backend that CUKIT_BACKEND names. An invalid value raises on first use, not on
    import, so that `cukit doctor` and `--help` still run."""
    name = os.environ.get("CUKIT_BACKEND")
    if name:
        try:
            activate(_choose(name))
        except ConfigError as error:
            activate(cast(Backend, _Misconfigured(f"CUKIT_BACKEND={name}: {error}")))


class _Misconfigured:
    """Replaces a backend whose environment variables are invalid: every use raises the error."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(self._message)


def _choose(name: str, **options: Any) -> Backend | None:
    if name == "gpu" and not options:
        return None
    if name == "emulator":
        return Emulator(settings_from(**options))
    raise ConfigError(f"backend: expected 'emulator' or 'gpu' (without options), got {name!r}")
