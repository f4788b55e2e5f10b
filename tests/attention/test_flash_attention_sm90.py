"""The sm90 forward kernel: persistent blocks with many tiles, layouts, cached tensor maps."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.attention import flash_attention
from tests.attention.checks import check_forward, inputs_of
from tests.contract import to_device, to_host
from tests.quick_run import emulated


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_process_several_tiles(device, rng, causal):
    """140 query tiles, more than there are SMs, with several key tiles each, so that pipelines wrap
    around."""
    check_forward(device, *inputs_of(rng, (20, 300), (70, 70), 64, batch=2)[:3], {"causal": causal})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@emulated(lambda causal: not causal)  # test_late_completion covers causal=True
def test_many_tiles_of_keys(device, rng, head_dim, causal):
    check_forward(device, *inputs_of(rng, (200, 530), (2, 1), head_dim)[:3], {"causal": causal})


@pytest.mark.emulator
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_late_completion(late_completion_emulator, rng, head_dim):
    check_forward(
        late_completion_emulator,
        *inputs_of(rng, (200, 530), (2, 1), head_dim)[:3],
        {"causal": True},
    )


@pytest.mark.emulator
@pytest.mark.parametrize("head_dim", [64, 128])
def test_ampere_runs_class_sm80(emulated_ampere, rng, head_dim):
    check_forward(
        emulated_ampere, *inputs_of(rng, (70, 135), (2, 1), head_dim)[:3], {"causal": True}
    )


def test_layouts_that_tma_cannot_read_run_class_sm80(device, rng):
    """One KV head viewed as two, with a stride of 0, falls back to class sm80."""
    q, k, v, _ = inputs_of(rng, (20, 70), (2, 1), 64)
    placed = to_device(device, q, k, v)
    module = np if device != "gpu" else pytest.importorskip("cupy")
    broadcast = [module.broadcast_to(x, (1, 70, 2, 64)) for x in placed[1:]]
    got = to_host(flash_attention(placed[0], *broadcast, causal=True)).astype(np.float32)
    expected = to_host(flash_attention(*placed, causal=True)).astype(np.float32)
    np.testing.assert_allclose(got, expected, rtol=2e-2, atol=1e-2)


def test_new_contents_at_an_old_address(device, rng):
    """Tensor maps are cached by address; the contents are read each time."""
    q, k, v = to_device(device, *inputs_of(rng, (20, 70), (2, 1), 64)[:3])
    first = to_host(flash_attention(q, k, v))
    q[...] = q[:, ::-1].copy()
    again = to_host(flash_attention(q, k, v))
    assert (again != first).any()
    np.testing.assert_array_equal(again, to_host(flash_attention(q.copy(), k, v)))
