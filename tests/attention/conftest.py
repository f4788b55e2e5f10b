"""Fixtures that select the kernel class as well as the device."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest

import cukit
from cukit.attention.divergence import _indexer_plan
from cukit.attention.flash import flash, flash_backward
from cukit.attention.paged import paged
from cukit.attention.paged._paged_plan import plan_paged_attention
from tests.devices import EMULATOR, EMULATOR_SM80, GPU, GPU_SM80

KL = import_module("cukit.attention.divergence.attention_kl")
KL_BACKWARD = import_module("cukit.attention.divergence.attention_kl_backward")
INDEXER = import_module("cukit.attention.divergence.indexer_kl")
INDEXER_BACKWARD = import_module("cukit.attention.divergence.indexer_kl_backward")


@pytest.fixture(
    params=[
        "cpu",
        EMULATOR,
        GPU,
        GPU_SM80,
    ]
)
def device_and_class(request, monkeypatch) -> Iterator[str]:
    """As `device`; "emulator" and "gpu sm80" run class sm80, "gpu" runs the planned class."""
    if request.param == "emulator":
        with cukit.backend("emulator", arch="sm_80"):
            yield "emulator"
        return
    choose_class(request.param, monkeypatch)
    yield request.param.split()[0]


@pytest.fixture(
    params=[
        "cpu",
        EMULATOR,
        EMULATOR_SM80,
        GPU,
        GPU_SM80,
    ]
)
def either_class(request, monkeypatch) -> Iterator[str]:
    """As `device_and_class`; "emulator" runs class sm90, "emulator sm80" class sm80."""
    device, *named = request.param.split()
    if device == "emulator":
        with cukit.backend("emulator", arch="sm_80" if named else "sm_90"):
            yield device
        return
    choose_class(request.param, monkeypatch)
    yield device


@pytest.fixture(params=["gpu", "gpu sm80"])
def gpu(request, monkeypatch) -> str:
    """The GPU, with the planned kernel class and with class sm80."""
    choose_class(request.param, monkeypatch)
    return "gpu"


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """Clears the cached plans of paged_attention before and after a test that changes a planner."""

    def forget() -> None:
        plan_paged_attention.cache_clear()
        paged._prepare.forget()

    forget()
    yield
    forget()


@pytest.fixture
def sm90_device(device: str) -> str:
    """`device`, except the CPU: the GPU or the emulator, both of which run class sm90."""
    if device == "cpu":
        pytest.skip("the CPU has no kernels of class sm90")
    return device


@pytest.fixture
def late_completion_emulator() -> Iterator[str]:
    """The emulator; its TMA copies and wgmmas complete only when a thread waits for them."""
    with cukit.backend("emulator", arch="sm_90", seed=5, late=True):
        yield "emulator"


@pytest.fixture
def emulated_ampere() -> Iterator[str]:
    """An emulated GPU that runs class sm80 only."""
    with cukit.backend("emulator", arch="sm_80"):
        yield "emulator"


def choose_class(device_and_class: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes class sm80 run every call if `device_and_class` is "gpu sm80"."""
    if device_and_class == "gpu sm80":
        monkeypatch.setattr(flash, "mapped_forward", lambda problem: None)
        monkeypatch.setattr(flash, "_prepare_forward", flash._prepare_forward.__wrapped__)
        monkeypatch.setattr(flash_backward, "covers", lambda problem, device: False)
        bare = flash_backward._prepare_backward.__wrapped__
        monkeypatch.setattr(flash_backward, "_prepare_backward", bare)
        monkeypatch.setattr(_indexer_plan, "has_wgmma", lambda device: False)
        bare = INDEXER.prepare_indexer.__wrapped__
        for module in (INDEXER, INDEXER_BACKWARD):
            monkeypatch.setattr(module, "prepare_indexer", bare)
        for module, cached in ((KL, "_prepare_sweep"), (KL_BACKWARD, "_prepare_backward")):
            monkeypatch.setattr(module, "covers", lambda problem, device: False)
            monkeypatch.setattr(module, cached, getattr(module, cached).__wrapped__)
