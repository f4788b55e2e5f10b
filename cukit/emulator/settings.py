"""The emulator's options, and the environment variables that set them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from cukit.core.device import typical_device
from cukit.core.scalars import check_integer, check_number
from cukit.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """How kernels are emulated.

    arch: the GPU architecture to emulate, e.g. `"sm_90"`. Ops are planned for it, and only its
        instructions are available.
    checked: check every memory access (several times slower); without it kernels only run.
    seed: 0 runs the threads of a block in order; every other number selects another order.
    late: complete asynchronous copies and wgmmas only when a thread waits for them.
    threads: OS threads that run the blocks of a grid; 0 for one per processor.
    debug: compile without optimisation, for a debugger.
    patience: seconds without progress, in which all threads only poll or compute, before the
        launch is ended as stuck.
    global_races: look for races in global memory too, between blocks as well as within them.
    same_value_writes: allow unordered writes of the same value to one address by several threads.
    cas_guesses: also report plain reads that race with atomics but only provide the first guess of
        a loop around atomicCAS.
    all_checks: compile cukit's own kernels, too, with every check that the compiler offers, which
        takes 50% longer: pointers that leave their variable, functions that end without a return
        value. Other projects' kernels are always compiled with these checks.
    """

    arch: str = "sm_90"
    checked: bool = True
    seed: int = 0
    late: bool = False
    threads: int = 0
    debug: bool = False
    patience: float = 20.0
    global_races: bool = False
    same_value_writes: bool = False
    cas_guesses: bool = False
    all_checks: bool = False

    def __post_init__(self) -> None:
        typical_device(self.arch)
        check_integer("emulator", "seed", self.seed, least=0, most=2**64 - 1)
        check_integer("emulator", "threads", self.threads, least=0, most=4096)
        check_number("emulator", "patience", self.patience, above=0)


def settings_from(environment: Mapping[str, str] = os.environ, **options: object) -> Settings:
    """The settings: `options` where given, else the variables CUKIT_EMULATOR_ARCH, _CHECK, _SEED
    and so on, else the defaults."""
    values: dict[str, object] = {}
    for name, variable in _VARIABLES.items():
        text = environment.get(f"CUKIT_EMULATOR_{variable}")
        if text:
            values[name] = text if name == "arch" else _number(variable, text, name == "patience")
    values.update(options)
    for each in fields(Settings):
        if each.name in values and isinstance(each.default, bool):
            values[each.name] = bool(values[each.name])
    unknown = set(values) - set(_VARIABLES)
    if unknown:
        raise ConfigError(f"emulator: no option {min(unknown)!r}; known: {', '.join(_VARIABLES)}")
    return Settings(**values)  # type: ignore[arg-type]


_VARIABLES = {
    "arch": "ARCH",
    "checked": "CHECK",
    "seed": "SEED",
    "late": "LATE",
    "threads": "THREADS",
    "debug": "DEBUG",
    "patience": "PATIENCE",
    "global_races": "GLOBAL_RACES",
    "same_value_writes": "SAME_VALUE_WRITES",
    "cas_guesses": "CAS_GUESSES",
    "all_checks": "ALL_CHECKS",
}


def _number(variable: str, text: str, fractional: bool) -> float:
    try:
        return float(text) if fractional else int(text)
    except ValueError:
        expected = "a number" if fractional else "an integer"
        raise ConfigError(f"CUKIT_EMULATOR_{variable} must be {expected}, got {text!r}") from None
