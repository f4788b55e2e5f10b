"""The energy of a call, and the GPU's clocks and limits during it, from NVML.

NVML's energy counter has a resolution of a millijoule, but is updated only every few tens of
milliseconds. The call therefore runs back to back, and the window extends from one update of the
counter to another, a second or more later. The energy between two updates is exact; the uncertainty
is in the number of calls at both ends.
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
"""The shortest window for which energy is reported."""

BATCH_US = 5_000.0
"""Calls are enqueued in batches of about this length; the counter is read between them."""

LAUNCH_BOUND_US = 50.0
"""Shorter calls may take less time on the device than the host needs to launch them."""

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
    """NVML readings taken while a call runs."""

    sm_clocks_mhz: list[float] = field(default_factory=list)
    throttle_bits: int = 0

    def note(self, gpu: NvmlDevice) -> None:
        """Adds the current readings."""
        clock_mhz = gpu.sm_clock_mhz()
        if clock_mhz is not None:
            self.sm_clocks_mhz.append(clock_mhz)
        self.throttle_bits |= gpu.throttle_bits()


class NvmlDevice:
    """NVML queries of CuPy's current device.

    Raises MissingDependencyError without nvidia-ml-py, CukitError if NVML reports an error.
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
        """Energy used since the driver was loaded."""
        return float(self._query("nvmlDeviceGetTotalEnergyConsumption")) / 1e3

    def sm_clock_mhz(self) -> float | None:
        """The current SM clock; None if the GPU does not report it."""
        return self._optional("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM)

    def throttle_bits(self) -> int:
        """The reasons why the clock is below its maximum, as NVML's bit mask."""
        return int(self._optional("nvmlDeviceGetCurrentClocksThrottleReasons") or 0)

    def conditions(self, readings: _Readings) -> Conditions:
        """The readings of a run, with the GPU's limits, memory clock and temperature."""
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

    def _query(self, function: str, *arguments: Any) -> Any:
        return self._call(function, self._handle, *arguments)

    def _optional(self, function: str, *arguments: Any) -> float | None:
        try:
            return float(self._query(function, *arguments))
        except CukitError:
            return None

    def _call(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, function)(*arguments)
        except self._nvml.NVMLError as error:
            raise CukitError(f"NVML: {function}: {error}") from None


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """The reasons in NVML's bit mask by name, except "gpu idle"."""
    known = (name for bit, name in _REASONS.items() if bits & bit and bit != _HARMLESS)
    rest = bits & ~sum(_REASONS)
    return (*known, *((f"reason {rest:#x}",) if rest else ()))


def energy_of(call: Callable[[], object], once_us: float) -> tuple[Energy | None, Conditions]:
    """:func:`measure_energy` of a call on CuPy's current device.

    A call too short for the host to keep the device busy is replayed many times from a CUDA graph;
    otherwise the result would include the energy of an idle device.
    """
    gpu, pace = NvmlDevice(), one_batch_behind()
    if once_us >= LAUNCH_BOUND_US:
        return measure_energy(call, once_us, gpu, pace=pace)
    replay, calls = GraphTimer().replayer(call)
    energy, conditions = measure_energy(replay, calls * once_us, gpu, pace=pace)
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
    """Returns a function that waits for the work enqueued before its previous call.

    The device thus always has a batch enqueued, and no idle energy is attributed to the calls.
    """
    event = require_cupy("energy").cuda.Event
    latest, earlier = event(disable_timing=True), event(disable_timing=True)

    def pace() -> None:
        nonlocal latest, earlier
        latest, earlier = earlier, latest
        latest.record()
        earlier.synchronize()  # returns immediately if nothing was recorded

    return pace


def measure_energy(
    call: Callable[[], object],
    once_us: float,
    gpu: NvmlDevice,
    *,
    window_s: float = WINDOW_S,
    pace: Callable[[], None],
    seconds_now: Callable[[], float] = time.perf_counter,
) -> tuple[Energy | None, Conditions]:
    """Runs `call`, which takes about `once_us`, for a little longer than `window_s`.

    pace: called after each batch; limits how far the host runs ahead of the device.

    Returns the energy of a call, or None if the counter does not change, and the conditions.
    """
    batch = max(1, int(BATCH_US / max(once_us, 0.1)))
    readings = _Readings()
    calls = 0

    def until_tick(joules: float, deadline: float) -> tuple[float, float, int] | None:
        """(joules, time, calls so far) at the first reading other than `joules`; None after the
        deadline."""
        nonlocal calls
        while seconds_now() < deadline:
            for _ in range(batch):
                call()
            # Read while the device is busy: an idle GPU lowers its clocks immediately.
            reading, now = gpu.joules(), seconds_now()
            readings.note(gpu)
            pace()
            calls += batch
            if reading != joules:
                return reading, now, calls
        return None

    begin = until_tick(gpu.joules(), seconds_now() + _TICK_TIMEOUT_S)
    if begin is None:
        return None, gpu.conditions(readings)
    joules, started, calls_before = begin
    end: tuple[float, float, int] | None = begin
    deadline = started + 2 * window_s + _TICK_TIMEOUT_S
    while end is not None and end[1] - started < window_s:
        end = until_tick(end[0], deadline)
    if end is None:
        return None, gpu.conditions(readings)
    used, seconds, ran = end[0] - joules, end[1] - started, end[2] - calls_before
    watts = used / seconds
    # Each end is uncertain by the batch during which the counter was updated.
    uncertainty = 2 * watts * (seconds / ran * batch) / ran
    energy = Energy(
        joules_per_call=used / ran,
        calls_per_joule=ran / used,
        uncertainty_joules=uncertainty,
        mean_watts=watts,
        window_s=seconds,
        calls=ran,
    )
    return energy, gpu.conditions(readings)
