"""A short soak test on every provider; tests/memory/soak.py runs for any length of time."""

from __future__ import annotations

import pytest

from cukit.memory import Provider
from tests.memory.simulation import SimulatedProvider
from tests.memory.soak import Soak, main

MIB = 1 << 20


@pytest.mark.parametrize(
    ("limit", "operations"),
    [
        pytest.param(24 * MIB, 15_000, id="short"),
        pytest.param(24 * MIB, 50_000, id="tight", marks=pytest.mark.slow),
        pytest.param(96 * MIB, 50_000, id="roomy", marks=pytest.mark.slow),
    ],
)
def test_soak(provider: Provider, limit: int, operations: int) -> None:
    soak = Soak(provider, limit, seed=limit)
    if "host" not in provider.name:
        operations //= 10
    soak.run(operations, operations // 10)
    assert soak.pool.statistics().bytes_moved > 0
    assert soak.checked > operations // 2
    soak.raw.clear()


@pytest.mark.parametrize("can_remap", [True, False])
def test_soak_on_adjacent_reservations(*, can_remap: bool) -> None:
    """Adjacent reservations, as from cudaMalloc: no buffer may move across a boundary."""
    provider = SimulatedProvider(96 * MIB, page_bytes=2 * MIB, can_remap=can_remap)
    provider.adjacent_bytes = 192 * MIB
    soak = Soak(provider, 96 * MIB, seed=1)
    soak.run(10_000, 500)
    assert soak.pool.statistics().bytes_moved > 0
    soak.raw.clear()


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--operations", "1000", "--limit-mib", "8", "--every", "250"])
    assert capsys.readouterr().out.startswith("1000 operations in")
