"""Every tiling of the sm90 forward kernel, with keys that are masked for some warpgroups."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

import cukit
from cukit.attention import flash_attention
from cukit.attention.flash import _flash_launch_sm90, flash
from cukit.attention.flash._flash_plan_sm90 import WarpgroupForwardConfig
from cukit.attention.flash._flash_tilings import WARPGROUP_TILINGS
from cukit.reference import attention as reference
from tests.attention import plain
from tests.contract import assert_close, random, to_device, to_host

_BLOCKS = 3
TILINGS = [
    pytest.param(widths, tiling, id=f"{widths[0]}-{tiling.consumers}x{tiling.tile_n}")
    for widths, tilings in WARPGROUP_TILINGS.items()
    for tiling in tilings
]


@pytest.fixture
def force(monkeypatch):
    """Replaces the plan of attention by a given tiling and three thread blocks."""

    def choose(tiling):
        monkeypatch.setattr(
            _flash_launch_sm90,
            "plan_flash_attention_sm90",
            lambda problem, *_: WarpgroupForwardConfig(problem, tiling, _BLOCKS),
        )
        for cached in ("mapped_forward", "_prepare_forward"):
            monkeypatch.setattr(flash, cached, getattr(flash, cached).__wrapped__)

    return choose


def shuffled_threads(device):
    if device == "emulator":
        return cukit.backend("emulator", arch="sm_90", seed=2)
    return nullcontext()


def check(device, force, rng, tiling, widths, lengths, options):
    (seq_q, seq_kv), (head_dim, value_dim) = lengths, widths
    q = random(rng, (1, seq_q, 2, head_dim), "bfloat16")
    k = random(rng, (1, seq_kv, 1, head_dim), "bfloat16")
    v = random(rng, (1, seq_kv, 1, value_dim), "bfloat16")
    force(tiling)
    placed = to_device(device, q, k, v)
    with shuffled_threads(device):
        out, lse = flash_attention(*placed, **options, return_lse=True)
        without = flash_attention(*placed, **options)
    wide = (x.astype(np.float64) for x in (q, k, v))
    exact, exact_lse = reference.flash_attention(*wide, **options, return_lse=True)
    low, low_lse = plain.forward(q, k, v, **{"causal": False, **options})
    assert_close("out", out, low, exact)
    assert_close("lse", lse, low_lse, exact_lse, 1e-5)
    np.testing.assert_array_equal(to_host(without).view(np.uint16), to_host(out).view(np.uint16))


@pytest.mark.parametrize(("widths", "tiling"), TILINGS)
def test_warpgroups_stop_at_their_last_visible_key(sm90_device, force, rng, widths, tiling):
    """Eight query tiles for three thread blocks; the last query tile of each of the two heads has
    at least one warpgroup without queries."""
    rows = 3 * tiling.tile_m + tiling.tile_m // 2 - 10
    check(sm90_device, force, rng, tiling, widths, (rows, rows + 30), {"causal": True})


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "window_size": (70, None)}, {"window_size": (130, 40)}],
    ids=["all", "causal window", "window"],
)
def test_four_warpgroups(sm90_device, force, rng, options):
    tiling = next(each for each in WARPGROUP_TILINGS[64, 64] if each.consumers == 4)
    check(sm90_device, force, rng, tiling, (64, 64), (600, 640), options)
