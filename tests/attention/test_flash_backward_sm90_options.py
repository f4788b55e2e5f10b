"""Class sm90 of the backward: score options and masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cukit
from tests.attention.checks import NAMES, check_backward, inputs_of, run_backward
from tests.attention.options import OPTIONS, options_of
from tests.attention.test_flash_sequences import plain_sequences
from tests.contract import assert_close, to_host
from tests.quick_run import emulated

# Common combinations, in addition to tests/attention/options.py.
EVERY_OPTION: dict[str, dict[str, Any]] = {
    **OPTIONS,
    "window, sinks": {"window_size": (40, 9), "sinks": True},
    "window causal": {"causal": True, "window_size": (70, None)},
    "alibi causal": {"causal": True, "alibi_slopes": "h"},
    "bias of floats, softcap": {"bias": "hqk", "bias_dtype": "float32", "softcap": 2.0},
    "mask causal": {"causal": True, "mask": "bk"},
}
# Cases of the emulator, and whether they are deterministic: blocks add to dQ in a fixed order.
EMULATED = {
    ("window, sinks", 64): True,
    ("window causal", 128): False,
    ("alibi causal", 64): False,
    ("softcap", 64): False,
    ("bias, mask", 128): False,
    ("bias of floats, softcap", 256): False,
    ("everything", 256): True,
}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", EVERY_OPTION)
@emulated(lambda name, head_dim: (name, head_dim) in EMULATED)
def test_options(sm90_device, rng, name, head_dim):
    """Several query and key tiles, a partial key tile, and blocks whose keys are fully masked."""
    if sm90_device == "emulator":
        lengths, heads, batch = (150, 272), (2, 1), 1
        ways: tuple[bool, ...] = (EMULATED[name, head_dim],)
    else:
        lengths, heads, batch = (700, 600), (4, 2), 2
        ways = (False, True)
    inputs = inputs_of(rng, lengths, heads, head_dim, batch=batch)
    options = options_of(rng, EVERY_OPTION[name], batch, heads[0], lengths, "bfloat16")
    for deterministic in ways:
        check_backward(sm90_device, *inputs, options, deterministic)


# head_dim of q and k, and of v.
WIDTHS = [(96, 96), (192, 128), (64, 256), (128, 64), (40, 72), (192, 192), (8, 16), (256, 8)]


@pytest.mark.parametrize(("head_dim", "value_dim"), WIDTHS)
@emulated(lambda head_dim, value_dim: (head_dim, value_dim) in WIDTHS[:3])
def test_widths(sm90_device, rng, head_dim, value_dim):
    """Padding columns are skipped; warpgroups divide the columns."""
    if sm90_device == "emulator":
        lengths, heads, ways = (150, 150), (2, 1), (head_dim == 192,)
    else:
        lengths, heads, ways = (700, 600), (8, 2), (False, True)
    inputs = inputs_of(rng, lengths, heads, head_dim, value_dim=value_dim)
    for deterministic in ways:
        check_backward(sm90_device, *inputs, {"causal": True}, deterministic)


def sequences_of(rng, lengths, heads, head_dim):
    """Packed inputs and their cu_seqlens."""
    ends = [np.concatenate([[0], np.cumsum(each)]).astype(np.int32) for each in lengths]
    totals = int(ends[0][-1]), int(ends[1][-1])
    arrays = [x[0] for x in inputs_of(rng, totals, heads, head_dim)]
    where = {
        "cu_seqlens_q": ends[0],
        "cu_seqlens_kv": ends[1],
        "max_seqlen_q": max(lengths[0]) + 3,
        "max_seqlen_kv": max(lengths[1]),
    }
    return arrays, where


def check_sequences(device, rng, requested, lengths, heads, head_dim, deterministic=False):
    arrays, where = sequences_of(rng, lengths, heads, head_dim)
    most = where["max_seqlen_q"], where["max_seqlen_kv"]
    options = options_of(rng, requested, len(lengths[0]), heads[0], most, "bfloat16")
    grads, expected = run_backward(device, *arrays, {**options, **where}, deterministic)
    ends = where["cu_seqlens_q"], where["cu_seqlens_kv"]
    _, low = plain_sequences(*arrays, options, ends)
    for name, *of_input in zip(NAMES, grads, low, expected, strict=False):
        assert_close(name, *of_input)


FEW = ([5, 0, 140, 3, 0, 70], [9, 4, 135, 0, 0, 150])


@pytest.mark.parametrize(
    ("head_dim", "name", "deterministic"),
    [(128, "causal", False), (64, "window, sinks", True), (256, "causal", True), (64, None, False)],
)
@emulated(lambda name: name is not None)
def test_sequences_of_any_lengths(sm90_device, rng, head_dim, name, deterministic):
    requested = {"causal": name == "causal"} if name in (None, "causal") else EVERY_OPTION[name]
    check_sequences(sm90_device, rng, requested, FEW, (2, 1), head_dim, deterministic)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@emulated(lambda head_dim: head_dim == 64)
def test_nan_in_a_neighbouring_sequence_is_ignored(sm90_device, rng, head_dim):
    """The last tiles of a sequence include rows of the next sequence, multiplied by zeros."""
    lengths = [20, 25, 15, 140, 9], [20, 25, 15, 40, 200]
    arrays, where = sequences_of(rng, lengths, (2, 1), head_dim)
    broken = [x.copy() for x in arrays]
    for x, name in zip(broken, ("q", "kv", "kv", "q"), strict=True):
        ends = where[f"cu_seqlens_{name}"]
        for sequence in (1, 4):
            x[ends[sequence] : ends[sequence + 1]] = np.nan
    ways = []
    with np.errstate(invalid="ignore"):
        for some in (arrays, broken):
            ways.append(run_backward(sm90_device, *some, where, deterministic=True)[0])
    for clean, spoilt, name in zip(*ways, ("q", "kv", "kv"), strict=True):
        ends = where[f"cu_seqlens_{name}"]
        for sequence in (0, 2, 3):
            rows = slice(ends[sequence], ends[sequence + 1])
            np.testing.assert_array_equal(to_host(clean)[rows], to_host(spoilt)[rows])


@pytest.mark.emulator
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_order_of_threads_does_not_matter(rng, head_dim):
    """Bitwise equal for every thread order, and with late completion of copies and wgmmas."""
    arrays, where = sequences_of(rng, ([150, 3, 70], [140, 9, 75]), (2, 1), head_dim)
    options = {"softcap": 2.0, "window_size": (100, 30), **where}
    bits = []
    for seed in (0, 1):
        with cukit.backend("emulator", arch="sm_90", seed=seed, late=seed == 1):
            grads, _ = run_backward("emulator", *arrays, options, deterministic=True)
        bits.append([grad.tobytes() for grad in grads])
    assert bits[0] == bits[1]
