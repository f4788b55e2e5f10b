"""Plans of attention, which are pure functions: for every architecture, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cukit.attention.flash._arguments import fits_tensor_maps
from cukit.attention.flash._flash_plan import (
    choose_raster_group,
    kernel_class,
    plan_flash_attention,
    plan_flash_attention_backward,
)
from cukit.attention.flash._flash_tilings import (
    FORWARD_TILINGS,
    HEAD_WIDTHS,
    KEY_TILINGS,
    KEY_WIDTHS,
    QUERY_TILINGS,
    first_fit,
)
from cukit.attention.flash._problem import AttentionProblem
from cukit.core.device import KIB, TYPICAL_DEVICES, typical_device
from cukit.errors import ArrayShapeError, UnsupportedDeviceError

H200 = typical_device("sm_90")
PROBLEM = AttentionProblem(4, 4096, 4096, 32, 8, 128, "bfloat16", True)


# The tilings of every tile width.
TABLES = [
    *((FORWARD_TILINGS[width], width) for width in HEAD_WIDTHS),
    *((tilings[width], width) for tilings in (KEY_TILINGS, QUERY_TILINGS) for width in KEY_WIDTHS),
]


@pytest.mark.parametrize("arch", TYPICAL_DEVICES)
@pytest.mark.parametrize(("tilings", "width"), TABLES)
def test_every_architecture_has_a_tiling_that_fits(arch, tilings, width):
    device = TYPICAL_DEVICES[arch]
    tiling = first_fit(tilings, width, width, device)
    shared = tiling.shared_bytes(width, width)
    assert shared <= device.shared_bytes_per_block
    assert tiling.blocks_per_sm * (shared + KIB) <= device.shared_bytes_per_sm
    assert tiling.blocks_per_sm * tiling.threads <= device.max_threads_per_sm
    # A thread with fewer than 128 registers would spill its accumulators.
    assert device.registers_per_sm // (tiling.blocks_per_sm * tiling.threads) >= 128


@pytest.mark.parametrize(("tilings", "width"), TABLES)
def test_every_tiling_is_chosen_on_some_architecture(tilings, width):
    used = {first_fit(tilings, width, width, device) for device in TYPICAL_DEVICES.values()}
    assert used == set(tilings)


@pytest.mark.parametrize("arch", TYPICAL_DEVICES)
def test_heads_of_k_and_v_may_differ(arch):
    """Every pair of widths has tilings that fit. If several warps divide the columns, each has a
    power of two."""
    device = TYPICAL_DEVICES[arch]
    pairs = product((8, 64, 72, 128, 192, 256), repeat=2)
    options = ({}, {"varlen": True}, {"bias": "bfloat16"})
    for (head_dim, value_dim), option in product(pairs, options):
        if head_dim == value_dim:
            continue
        problem = replace(PROBLEM, head_dim=head_dim, value_dim=value_dim, **option)
        backward = plan_flash_attention_backward(problem, True, device)
        for spec in (plan_flash_attention(problem, device).spec(), *backward.specs()):
            assert spec.shared_bytes <= device.shared_bytes_per_block
            macros = dict(spec.defines)
            assert macros["HEAD_DIM"] >= head_dim
            assert macros["VALUE_DIM"] >= value_dim
            assert macros["VALUE_PADDED"] == (macros["VALUE_DIM"] != value_dim)
        columns = backward.keys.warps // backward.keys.key_warps
        for width in (backward.width, backward.value_width):
            assert columns == 1 or (width // columns) & (width // columns - 1) == 0
        columns = backward.width // (backward.keys.warps // backward.keys.query_warps)
        assert columns % (16 * backward.keys.query_passes) == 0


@pytest.mark.parametrize("arch", TYPICAL_DEVICES)
@pytest.mark.parametrize("option", [{"mask": True}, {"varlen": True}, {"bias": "bfloat16"}])
def test_options_have_tilings_that_fit(arch, option):
    device = TYPICAL_DEVICES[arch]
    for width in HEAD_WIDTHS:
        problem = replace(PROBLEM, head_dim=width, **option)
        backward = plan_flash_attention_backward(problem, True, device)
        for spec in (plan_flash_attention(problem, device).spec(), *backward.specs()):
            assert spec.shared_bytes <= device.shared_bytes_per_block
        assert backward.keys.blocks_per_sm * backward.keys.threads <= device.max_threads_per_sm


def test_options_become_macros():
    problem = replace(
        PROBLEM, window=(3, None), sinks=True, bias="float32", softcap=True, alibi=True, varlen=True
    )
    assert problem.features == {"window", "sinks", "bias", "softcap", "alibi", "varlen"}
    for spec in (
        plan_flash_attention(problem, H200).spec(),
        plan_flash_attention_backward(problem, True, H200).keys_spec(),
        plan_flash_attention_backward(problem, True, H200).queries_spec(),
    ):
        macros = dict(spec.defines)
        used = {name for name in ("WINDOW", "SINKS", "SOFTCAP", "ALIBI", "VARLEN") if macros[name]}
        assert len(used) == 5
        assert (macros["BIAS"], macros["CAUSAL"]) == (2, True)
    assert PROBLEM.features == frozenset()
    assert (
        dict(plan_flash_attention(replace(PROBLEM, bias="bfloat16"), H200).spec().defines)["BIAS"]
        == 1
    )


def test_scratch_has_whole_tiles_for_every_sequence():
    """Sequence b starts at tile cu_seqlens[b] // tile + b, so that sequences never share a tile."""
    rng = np.random.default_rng(3)
    for _ in range(50):
        lengths = rng.integers(0, 200, 7) * (rng.random(7) < 0.7)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        problem = replace(PROBLEM, batch=7, varlen=True)
        config = plan_flash_attention_backward(problem, False, H200)
        tile = config.keys.tile_m
        starts = (ends // tile + np.arange(8)) * tile
        assert (np.diff(starts) >= -(-lengths // tile) * tile).all()
        heads, rows = config.scratch_rows(int(ends[-1]))
        assert heads == PROBLEM.num_heads_q
        assert rows >= starts[-1]
        assert rows % tile == 0


@pytest.mark.parametrize("width", KEY_WIDTHS)
def test_warps_of_a_key_tiling_split_whole_blocks(width):
    """The conditions that the kernel asserts, and the column ranges that its swizzle supports."""
    for tiling in KEY_TILINGS[width]:
        for rows, cols, along in (
            (tiling.tile_m, tiling.tile_n, tiling.score_warps),
            (tiling.tile_n, width, tiling.key_warps),
            (tiling.tile_m, width, tiling.query_warps),
        ):
            assert tiling.warps % along == 0
            span = cols // (tiling.warps // along)
            assert rows % (16 * along) == 0
            assert span % 16 == 0
            assert span == cols or span & (span - 1) == 0


def test_a_gpu_with_too_little_shared_memory_is_rejected():
    tiny = replace(H200, shared_bytes_per_block=16 * KIB)
    with pytest.raises(UnsupportedDeviceError, match=r"needs .* bytes of shared memory"):
        plan_flash_attention(PROBLEM, tiny)


def test_kernel_class():
    assert kernel_class(typical_device("sm_80")) == "sm80"
    with pytest.raises(UnsupportedDeviceError, match="sm_80 or newer"):
        kernel_class(replace(H200, compute_capability=(7, 5)))


@pytest.mark.parametrize(
    ("head_dim", "width"), [(8, 64), (64, 64), (72, 96), (104, 128), (136, 192), (256, 256)]
)
def test_head_dims_are_padded_to_the_next_width(head_dim, width):
    problem = replace(PROBLEM, head_dim=head_dim)
    defines = dict(plan_flash_attention(problem, H200).spec().defines)
    assert (defines["HEAD_DIM"], defines["PADDED"]) == (width, head_dim != width)


def test_wider_heads_are_rejected():
    with pytest.raises(ArrayShapeError, match="at most 256, got 264"):
        plan_flash_attention(replace(PROBLEM, head_dim=264), H200)


def test_grids_cover_every_row():
    problem = replace(PROBLEM, batch=3, seq_len_q=257, seq_len_kv=130)
    forward = plan_flash_attention(problem, H200)
    tile = forward.tiling.tile_m
    assert forward.num_blocks(257) == 3 * 32 * -(-257 // tile)
    backward = plan_flash_attention_backward(problem, False, H200)
    heads, rows = backward.scratch_rows(0)
    assert (heads, rows % backward.keys.tile_m) == (3 * 32, 0)
    assert rows >= 257
    assert backward.prepare_blocks(0) * 256 >= heads * rows * 128 // 8
    assert backward.finish_blocks(0) * backward.keys.tile_m == heads * rows
    assert backward.query_blocks * backward.queries.tile_m >= 3 * 32 * 257
    key_tiles = -(-130 // backward.keys.tile_n)
    assert backward.key_blocks == 3 * 8 * backward.splits * key_tiles


def test_groups_are_split_only_to_fill_the_gpu():
    few = replace(PROBLEM, batch=1, seq_len_kv=512, num_heads_kv=2)
    config = plan_flash_attention_backward(few, False, H200)
    assert config.splits > 1
    assert few.group % config.splits == 0
    assert config.sum_spec() in config.specs()
    many = plan_flash_attention_backward(replace(PROBLEM, batch=64), False, H200)
    assert many.splits == 1
    assert many.sum_spec() not in many.specs()


def test_raster_groups():
    """A group has the heads that fit in half of L2, or more: if their tiles are too few to fill the
    GPU and enough blocks share the reads of a head."""
    half = H200.l2_bytes // 2
    assert choose_raster_group(64, 8, half // 16, 264, H200) == 16
    assert choose_raster_group(64, 8, half // 15, 264, H200) == 16, "groups of equal size"
    assert choose_raster_group(16, 128, half, 264, H200) == 16, "nine heads make four waves"
    assert choose_raster_group(64, 32, half, 264, H200) == 16, "16 blocks share a head's reads"
    assert choose_raster_group(53, 8, half // 15, 264, H200) == 18, "a prime: nearly equal groups"
    assert choose_raster_group(3, 8, half // 16, 264, H200) == 3
    assert choose_raster_group(0, 0, 0, 264, H200) == 1
    assert plan_flash_attention(replace(PROBLEM, causal=False), H200).raster_group == 1
    assert plan_flash_attention(PROBLEM, H200).raster_group > 1


def test_layouts_that_tensor_maps_support():
    dense = np.zeros((2, 8, 4, 64), np.float16)
    assert fits_tensor_maps(dense, dense.swapaxes(1, 2), dense[:, :, 1:3])
    assert not fits_tensor_maps(dense, dense[:, ::-1])
    assert not fits_tensor_maps(np.broadcast_to(dense[:, :, :1], dense.shape))
    assert fits_tensor_maps(np.broadcast_to(dense[:1, :1, :1], (1, 1, 1, 64)))
    assert not fits_tensor_maps(dense, dense[:, :0])


def test_at_lengths_equals_replacing_the_fields():
    problem = AttentionProblem(2, 1024, 2048, 8, 2, 128, "bfloat16", True, varlen=True)
    assert problem.features  # cached before at_lengths; independent of lengths
    config = plan_flash_attention_backward(problem, False, typical_device("sm_80"))
    there = replace(problem, seq_len_q=1000, seq_len_kv=2000)
    assert problem.at_lengths(1000, 2000) == there
    assert problem.at_lengths(1000, 2000).features == there.features
    assert config.at_lengths(1000, 2000) == replace(config, problem=there)
