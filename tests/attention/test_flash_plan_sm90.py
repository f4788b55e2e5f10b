"""Plans of attention on Hopper: tilings, grids, and the schedule of variable-length sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cukit.attention.flash._flash_plan_sm90 import (
    covers,
    plan_flash_attention_sm90,
    specs_of,
    tilings_of,
)
from cukit.attention.flash._flash_tilings import WARPGROUP_TILINGS, warpgroup_tilings
from cukit.attention.flash._problem import AttentionProblem, rounded_length
from cukit.core.device import KIB, typical_device
from cukit.core.kernel import load_kernel
from tests.contract import to_device, to_host
from tests.quick_run import emulated

H200 = typical_device("sm_90")
PROBLEM = AttentionProblem(4, 4096, 4096, 32, 8, 128, "bfloat16", True)
EVERY_WIDTH = range(8, 257, 8)


def test_class_sm90_covers_hopper_only():
    assert covers(PROBLEM, H200)
    assert not covers(PROBLEM, typical_device("sm_100"))
    assert not covers(PROBLEM, typical_device("sm_80"))
    assert not covers(replace(PROBLEM, seq_len_kv=0), H200)


@pytest.mark.parametrize("widths", WARPGROUP_TILINGS)
def test_tilings_of_warpgroups_fit_an_sm(widths):
    for tiling in WARPGROUP_TILINGS[widths]:
        static = KIB  # barriers, and the producer's data on each stage
        assert tiling.shared_bytes(*widths) + static <= H200.shared_bytes_per_block
        # Scores, probabilities and outputs of a thread, after the producer has released registers.
        at_start = H200.registers_per_sm // tiling.threads // 8 * 8
        later = (at_start * (tiling.consumers + 1) - 40) // tiling.consumers // 8 * 8
        assert later >= (widths[1] + 1.5 * tiling.tile_n) / 2
        assert later <= 255
        assert tiling.tile_n * 128 % 1024 == 0, "whole swizzle periods per 64 columns"


@pytest.mark.parametrize("value_dim", EVERY_WIDTH)
def test_every_pair_of_widths_has_a_tiling(value_dim):
    for head_dim in EVERY_WIDTH:
        assert warpgroup_tilings(head_dim, value_dim)
        config = plan_flash_attention_sm90(
            replace(PROBLEM, head_dim=head_dim, value_dim=value_dim), H200
        )
        assert config.spec().shared_bytes + KIB <= H200.shared_bytes_per_block
        assert 0 <= config.width - head_dim < 16
        assert config.width % 16 == 0
        assert 0 <= config.value_width - value_dim < 16
        assert config.value_width % 16 == 0


def test_a_bias_takes_shorter_tiles_where_registers_are_short():
    for head_dim, value_dim, plain, biased in ((192, 192, 112, 80), (192, 128, 128, 96)):
        problem = replace(PROBLEM, head_dim=head_dim, value_dim=value_dim)
        assert plan_flash_attention_sm90(problem, H200).tiling.tile_n == plain
        problem = replace(problem, bias="bfloat16")
        assert plan_flash_attention_sm90(problem, H200).tiling.tile_n == biased


def test_narrow_heads_take_the_tiling_that_wastes_less():
    narrow = replace(PROBLEM, head_dim=64, causal=False)
    assert plan_flash_attention_sm90(narrow, H200).tiling.consumers == 3
    short = replace(narrow, seq_len_q=1024, seq_len_kv=1024)
    assert plan_flash_attention_sm90(short, H200).tiling.consumers == 4
    assert plan_flash_attention_sm90(replace(short, causal=True), H200).tiling.consumers == 4
    tiny = replace(short, seq_len_q=128, seq_len_kv=128)
    assert plan_flash_attention_sm90(tiny, H200).tiling.consumers == 2


def test_per_score_options_take_the_tiling_with_most_registers():
    for option in ({"mask": True}, {"bias": "float32"}, {"alibi": True}, {"softcap": True}):
        problem = replace(PROBLEM, head_dim=64, **option)
        assert [each.consumers for each in tilings_of(problem)] == [2]
    assert len(tilings_of(replace(PROBLEM, head_dim=64, sinks=True, window=(5, 5)))) == 3


def test_blocks_of_class_sm90():
    def num_blocks(problem):
        return plan_flash_attention_sm90(problem, H200).num_blocks(problem.seq_len_q)

    assert num_blocks(PROBLEM) == 132
    few = replace(PROBLEM, batch=1, num_heads_q=8, seq_len_q=130)
    assert num_blocks(few) == 8, "a pair of tiles each"
    assert num_blocks(replace(few, causal=False)) == 16
    assert num_blocks(replace(few, window=(64, None))) == 16


def test_sequences_and_block_masks_are_scheduled_on_the_gpu():
    assert plan_flash_attention_sm90(PROBLEM, H200).plan_spec() is None
    varlen = replace(PROBLEM, varlen=True)
    config = plan_flash_attention_sm90(varlen, H200)
    assert config.plan_spec().entry == "plan_sequences"
    assert config.plan_spec() in specs_of(varlen, H200)
    assert config.plan_size(4096, 4096) == 2 * 4 + 2
    blocks = plan_flash_attention_sm90(PROBLEM, H200, (128, 128))
    assert blocks.plan_spec().entry == "plan_blocks"
    assert blocks.plan_size(4096, 4096, 3) == 1 + 3 * 32 * 33
    assert blocks.plan_blocks(4096, 3) * 4 >= 3 * 32


def plan_sequences(device, lengths_q, lengths_kv, heads, tile_m=128):
    """(starts, order) as the kernel writes them."""
    count = len(lengths_q)
    problem = replace(PROBLEM, batch=count, num_heads_q=heads, varlen=True)
    config = plan_flash_attention_sm90(problem, H200)
    assert config.tiling.tile_m == tile_m
    ends = [
        np.concatenate([[0], np.cumsum(each)]).astype(np.int32) for each in (lengths_q, lengths_kv)
    ]
    placed = to_device(device, *ends, np.full(config.plan_size(0, 0), -1, np.int32))
    facts = (count, heads, max(lengths_kv), 132)
    kernel = load_kernel(config.plan_spec())
    kernel((config.plan_blocks(0),), (*placed, *(np.int32(fact) for fact in facts)))
    plan = to_host(placed[2])
    assert plan[0] == 132
    return plan[1 : count + 2], plan[count + 2 :]


@pytest.mark.parametrize("count", [1, 37, 2500])
@emulated(lambda count: count <= 1024)
def test_every_sequence_is_scheduled_once_longest_first(device, rng, count):
    if device == "cpu":
        pytest.skip("a kernel computes the order")
    lengths_q = rng.integers(0, 700, count)
    lengths_kv = np.exp(rng.uniform(0, 9.7, count)).astype(int)
    starts, order = plan_sequences(device, lengths_q, lengths_kv, heads=3)
    assert sorted(order) == list(range(count))
    works = 3 * -(-lengths_q[order] // 128)
    np.testing.assert_array_equal(np.diff(starts), works)
    assert starts[0] == 0
    sorted_lengths = lengths_kv[order]
    bucket = max(lengths_kv) / 1023
    assert (np.diff(sorted_lengths) <= bucket + 1).all(), "longest first, except within a bucket"


def test_lengths_round_up_in_small_steps():
    lengths = range(1, 40000)
    rounded = [rounded_length(length) for length in lengths]
    for length, up in zip(lengths, rounded, strict=True):
        assert length <= up < length + max(64, length / 7)
    assert rounded == sorted(rounded)
    assert [rounded_length(up) for up in rounded] == rounded
    assert {64, 1024, 2048, 4096, 16384} <= set(rounded)
