"""Energy of a simulated GPU with constant power and a coarse counter; NVML queries of a stub."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from cukit.analyzer import power
from cukit.analyzer.power import NvmlDevice, measure_energy, throttle_reasons
from cukit.analyzer.schema import Conditions
from cukit.errors import CukitError, MissingDependencyError


class SimulatedGpu:
    """Draws constant power; its clock advances only during calls."""

    def __init__(self, *, call_us: float, watts: float, tick_s: float = 0.05) -> None:
        self.now = 100.0
        self.call_s, self.watts, self.tick_s = call_us / 1e6, watts, tick_s
        self.calls = 0

    def call(self) -> None:
        self.calls += 1
        self.now += self.call_s

    def synchronize(self) -> None:
        self.now += 20e-6

    def joules(self) -> float:
        self.now += 5e-6
        if self.tick_s == float("inf"):
            return 7.0
        return round(self.watts * (self.now // self.tick_s * self.tick_s), 3)

    def sm_clock_mhz(self) -> float:
        return 1755.0

    def throttle_bits(self) -> int:
        return 0x5

    def conditions(self, readings: Any) -> Conditions:
        clock = readings.sm_clocks_mhz[0]
        return Conditions(clock, 1980.0, None, None, None, throttle_reasons(readings.throttle_bits))


@pytest.mark.parametrize("call_us", [3.0, 100.0, 12_000.0])
def test_the_energy_of_a_call_is_its_power_times_its_time(call_us: float) -> None:
    gpu = SimulatedGpu(call_us=call_us, watts=500.0)
    energy, conditions = measure_energy(
        gpu.call,
        call_us,
        gpu,  # type: ignore[arg-type]
        pace=gpu.synchronize,
        seconds_now=lambda: gpu.now,
    )
    assert energy is not None
    truth = 500.0 * call_us / 1e6
    assert energy.window_s >= 1.0
    assert energy.calls < gpu.calls
    assert energy.joules_per_call == pytest.approx(truth, rel=0.04)
    assert abs(energy.joules_per_call - truth) <= energy.uncertainty_joules + 0.006 * truth
    assert energy.calls_per_joule == pytest.approx(1 / energy.joules_per_call)
    assert energy.mean_watts == pytest.approx(500, rel=0.03)
    assert conditions.sm_clock_mhz == 1755.0
    assert conditions.throttle_reasons == ("software power cap",)


def test_a_counter_that_does_not_change_gives_none() -> None:
    gpu = SimulatedGpu(call_us=100.0, watts=500.0, tick_s=float("inf"))
    energy, conditions = measure_energy(
        gpu.call,
        100.0,
        gpu,  # type: ignore[arg-type]
        pace=gpu.synchronize,
        seconds_now=lambda: gpu.now,
    )
    assert energy is None
    assert conditions.sm_clock_mhz == 1755.0


def test_the_host_waits_for_the_previous_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        names = iter("ab")

        def __init__(self, disable_timing: bool) -> None:
            self.name = next(self.names)

        def record(self) -> None:
            done.append(f"record {self.name}")

        def synchronize(self) -> None:
            done.append(f"wait for {self.name}")

    fake = types.SimpleNamespace(cuda=types.SimpleNamespace(Event=Event))
    monkeypatch.setattr(power, "require_cupy", lambda purpose: fake)
    pace = power.one_batch_behind()
    for _ in range(3):
        pace()
    assert done == [
        *("record b", "wait for a"),
        *("record a", "wait for b"),
        *("record b", "wait for a"),
    ]


def test_throttle_reasons_are_described() -> None:
    assert throttle_reasons(0) == ()
    assert throttle_reasons(0x1) == ()
    assert throttle_reasons(0x28) == ("hardware slowdown", "software thermal slowdown")
    assert throttle_reasons(0x1004) == ("software power cap", "reason 0x1000")


def test_without_nvml_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MissingDependencyError, match="nvidia-ml-py"):
        NvmlDevice()


def test_unsupported_nvml_queries_are_an_error_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy")

    class NVMLError(Exception):
        pass

    def refuse(*arguments: Any) -> None:
        raise NVMLError("Not Supported")

    nvml = types.ModuleType("pynvml")
    known: dict[str, Any] = {
        "NVMLError": NVMLError,
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByPciBusId": lambda bus_id: ("handle", bus_id),
        "nvmlDeviceGetTotalEnergyConsumption": refuse,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
        "nvmlDeviceGetMaxClockInfo": lambda handle, kind: 1980,
        "nvmlDeviceGetClockInfo": refuse,
        "nvmlDeviceGetTemperature": lambda handle, kind: 41,
    }
    for name, value in known.items():
        setattr(nvml, name, value)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(cupy.cuda.runtime, "deviceGetPCIBusId", lambda device: "0000:01:00.0")
    monkeypatch.setattr(cupy.cuda, "Device", lambda: types.SimpleNamespace(id=0))
    gpu = NvmlDevice()
    with pytest.raises(CukitError, match="TotalEnergyConsumption: Not Supported"):
        gpu.joules()
    from cukit.analyzer.power import _Readings

    conditions = gpu.conditions(_Readings())
    assert conditions == Conditions(None, 1980.0, None, 41.0, 700.0, ())
