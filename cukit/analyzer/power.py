"""Energy of a call, and the clocks and limits that the card was under: what NVML knows.

The card counts millijoules, but tells them only every few tens of milliseconds. So the call runs
back to back, and the window runs from one tick of the counter to another, a second or more later:
what is between two ticks is exact, and the uncertainty is that of the calls at its two ends.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from cukit.analyzer.schema import Conditions, Energy
from cukit.analyzer.timing import GraphTimer
from cukit.core.device import require_cupy
from cukit.errors import CukitError, MissingDependencyError

INSTALL = "python -m pip install nvidia-ml-py"

WINDOW_S = 1.0
"""Shortest window that a figure of energy is given for."""

BATCH_US = 5_000.0
"""Calls are enqueued in batches of about this long; the counter is read between them."""

LAUNCH_BOUND_US = 50.0
"""Shorter calls may take the device less time than the host takes to make them."""

_TICK_TIMEOUT_S = 2.0

_REASONS = {
    0x1: "gpu idle",
    0x2: "application clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake slowdown",
    0x100: "display clock setting",
}
_HARMLESS = 0x1


@dataclass
class _Readings:
    """What was seen of the card while a call ran."""

    sm_clocks_mhz: list[float] = field(default_factory=list)
    throttle_bits: int = 0

    def note(self, card: Card) -> None:
        """Adds what the card says at this moment."""
        clock = card.sm_clock_mhz()
        if clock is not None:
            self.sm_clocks_mhz.append(clock)
        self.throttle_bits |= card.throttle_bits()


class Card:
    """CuPy's current device as NVML sees it.

    Raises MissingDependencyError without nvidia-ml-py, CukitError where NVML refuses.
    """

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError:
            raise MissingDependencyError(f"energy and clocks need NVML: {INSTALL}") from None
        cupy = require_cupy("energy and clocks")
        self._nvml: Any = pynvml
        self._call("nvmlInit")
        bus_id = cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.Device().id)
        self._handle = self._call("nvmlDeviceGetHandleByPciBusId", bus_id)

    def joules(self) -> float:
        """Energy that the card has used since its driver was loaded."""
        return float(self._ask("nvmlDeviceGetTotalEnergyConsumption")) / 1e3

    def sm_clock_mhz(self) -> float | None:
        """The clock of the multiprocessors, now; None where the card does not tell."""
        return self._optional("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM)

    def throttle_bits(self) -> int:
        """Why the clock is not the highest, as NVML's bit mask."""
        return int(self._optional("nvmlDeviceGetCurrentClocksThrottleReasons") or 0)

    def conditions(self, readings: _Readings) -> Conditions:
        """What was seen during a run, and what does not change."""
        nvml = self._nvml
        limit = self._optional("nvmlDeviceGetEnforcedPowerLimit")
        return Conditions(
            sm_clock_mhz=statistics.median(readings.sm_clocks_mhz)
            if readings.sm_clocks_mhz
            else None,
            sm_clock_max_mhz=self._optional("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._optional("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            temperature_c=self._optional("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            power_limit_watts=None if limit is None else limit / 1e3,
            throttle_reasons=throttle_reasons(readings.throttle_bits),
        )

    def _ask(self, function: str, *arguments: Any) -> Any:
        return self._call(function, self._handle, *arguments)

    def _optional(self, function: str, *arguments: Any) -> float | None:
        try:
            return float(self._ask(function, *arguments))
        except CukitError:
            return None

    def _call(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, function)(*arguments)
        except self._nvml.NVMLError as error:
            raise CukitError(f"NVML: {function}: {error}") from None


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """NVML's bit mask in words; idling is none."""
    known = (name for bit, name in _REASONS.items() if bits & bit and bit != _HARMLESS)
    rest = bits & ~sum(_REASONS)
    return (*known, *((f"reason {rest:#x}",) if rest else ()))


def energy_of(call: Callable[[], object], once_us: float) -> tuple[Energy | None, Conditions]:
    """:func:`measure_energy` of a call on CuPy's current device.

    A call too short for the host to keep the device busy is replayed many times from a CUDA graph,
    lest the figure be that of a device that waits.
    """
    card, pace = Card(), one_batch_behind()
    if once_us >= LAUNCH_BOUND_US:
        return measure_energy(call, once_us, card, pace=pace)
    replay, calls = GraphTimer().replayer(call)
    energy, conditions = measure_energy(replay, calls * once_us, card, pace=pace)
    if energy is None:
        return None, conditions
    each = replace(
        energy,
        joules_per_call=energy.joules_per_call / calls,
        calls_per_joule=energy.calls_per_joule * calls,
        uncertainty_joules=energy.uncertainty_joules / calls,
        calls=energy.calls * calls,
    )
    return each, conditions


def one_batch_behind() -> Callable[[], None]:
    """Waits, whenever it is called, for what had been enqueued when it was called before.

    So the device always has a batch to work on, and no energy of idling is charged to the calls.
    """
    event = require_cupy("energy").cuda.Event
    latest, earlier = event(disable_timing=True), event(disable_timing=True)

    def pace() -> None:
        nonlocal latest, earlier
        latest, earlier = earlier, latest
        latest.record()
        earlier.synchronize()  # returns at once where nothing was recorded yet

    return pace


def measure_energy(
    call: Callable[[], object],
    once_us: float,
    card: Card,
    *,
    window_s: float = WINDOW_S,
    pace: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Energy | None, Conditions]:
    """Runs `call`, which takes about `once_us`, for a little more than `window_s`.

    pace: called after each batch; waits until the device is not too far behind.

    Returns what a call costs, or None where the card's counter does not move, and the conditions.
    """
    batch = max(1, int(BATCH_US / max(once_us, 0.1)))
    readings = _Readings()
    calls = 0

    def until_tick(joules: float, deadline: float) -> tuple[float, float, int] | None:
        """(joules, time, calls so far) at the first reading that differs from `joules`."""
        nonlocal calls
        while clock() < deadline:
            for _ in range(batch):
                call()
            # While the device is at work: an idle card lowers its clocks at once.
            reading, now = card.joules(), clock()
            readings.note(card)
            pace()
            calls += batch
            if reading != joules:
                return reading, now, calls
        return None

    begin = until_tick(card.joules(), clock() + _TICK_TIMEOUT_S)
    if begin is None:
        return None, card.conditions(readings)
    joules, started, calls_before = begin
    end: tuple[float, float, int] | None = begin
    deadline = started + 2 * window_s + _TICK_TIMEOUT_S
    while end is not None and end[1] - started < window_s:
        end = until_tick(end[0], deadline)
    if end is None:
        return None, card.conditions(readings)
    used, seconds, ran = end[0] - joules, end[1] - started, end[2] - calls_before
    watts = used / seconds
    # Each end may be off by the batch in which the counter ticked.
    uncertainty = 2 * watts * (seconds / ran * batch) / ran
    energy = Energy(
        joules_per_call=used / ran,
        calls_per_joule=ran / used,
        uncertainty_joules=uncertainty,
        mean_watts=watts,
        window_s=seconds,
        calls=ran,
    )
    return energy, card.conditions(readings)
