"""gated_scan: against the recurrence, any chunk size, carried states, extreme decays; steps."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest

import cukit
from cukit.core.device import TYPICAL_DEVICES
from cukit.errors import ArrayDtypeError, ArrayShapeError, ConfigError
from cukit.reference import sequence as reference
from cukit.sequence import gated_scan, gated_scan_backward, gated_scan_step
from cukit.sequence._plan import plan_gated_scan
from tests.contract import another_order, check_against_reference, random, to_device, to_host
from tests.quick_run import possible

ERROR = {"float16": 1e-3, "bfloat16": 6e-3, "float32": 2e-6}
"""||out - exact|| / ||exact||. Scores, decayed keys and the states that outputs are
computed from have the inputs' precision."""


class Size(NamedTuple):
    batch: int
    seq_len: int
    heads: int
    groups: int
    head_dim: int
    state_dim: int
    lengths: tuple[int, ...] | None = None

    @property
    def cu_seqlens(self):
        if self.lengths is None:
            return None
        return np.cumsum([0, *self.lengths]).astype(np.int32)


SIZES = [
    Size(2, 1, 2, 1, 64, 64),
    Size(1, 97, 3, 3, 24, 40),
    Size(1, 130, 2, 1, 72, 128),
    Size(1, 643, 2, 2, 64, 64),  # split over segments
    Size(1, 300, 2, 1, 64, 72, (0, 1, 64, 200, 35, 0)),
    Size(1, 700, 1, 1, 16, 16, (611, 89)),  # also split
]
LARGE = [
    Size(2, 4099, 8, 8, 64, 128),
    Size(1, 65536, 4, 1, 64, 64),
    Size(1, 9000, 16, 2, 128, 128, (5000, 1, 3999)),
    Size(64, 300, 8, 1, 64, 128),
]


def rng_of():
    return np.random.default_rng(5)


def inputs(rng, size, dtype, decay=0.2, *, channels=False):
    """x, b, c, log_decay (with `channels`, one per channel of the state) and initial_state."""
    batch, seq_len, heads, groups, head_dim, state_dim, lengths = size
    x = random(rng, (batch, seq_len, heads, head_dim), dtype)
    b = random(rng, (batch, seq_len, groups, state_dim), dtype, scale=state_dim**-0.5)
    c = random(rng, (batch, seq_len, groups, state_dim), dtype)
    decays = (batch, seq_len, heads, *((state_dim,) if channels else ()))
    log_decay = -np.abs(random(rng, decays, "float32", scale=decay))
    sequences = batch if lengths is None else len(lengths)
    return x, b, c, log_decay, random(rng, (sequences, heads, state_dim, head_dim), "float32")


def recurrence(x, b, c, log_decay, state):
    """The recurrence token by token in float64, with a decay per head or per channel."""
    x, b, c, log_decay, h = (array.astype(np.float64) for array in (x, b, c, log_decay, state))
    each = x.shape[2] // b.shape[2]
    b, c = np.repeat(b, each, axis=2), np.repeat(c, each, axis=2)
    y = np.zeros_like(x)
    for t in range(x.shape[1]):
        kept = np.exp(log_decay[:, t])
        h = kept.reshape(*kept.shape[:2], -1, 1) * h + b[:, t, :, :, None] * x[:, t, :, None, :]
        y[:, t] = np.einsum("bhn,bhnp->bhp", c[:, t], h)
    return y, h


def distance(got, exact):
    got, exact = to_host(got).astype(np.float64), np.asarray(exact, np.float64)
    return np.linalg.norm(got - exact) / max(np.linalg.norm(exact), 1e-30)


def run(device, arrays, size):
    """y and the final state; a second run must be bitwise equal."""
    placed = to_device(device, *arrays, size.cu_seqlens)
    runs = []
    for repeat in range(2):
        with another_order(device, repeat):
            runs.append(gated_scan(*placed[:4], initial_state=placed[4], cu_seqlens=placed[5]))
    for first, again in zip(*runs, strict=True):
        assert to_host(first).tobytes() == to_host(again).tobytes()
    return runs[0]


@pytest.mark.parametrize("size", SIZES + LARGE, ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.05, 3.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@possible(lambda device, size: device == "gpu" or size in SIZES)
def test_matches_reference(device, rng, size, decay, dtype):
    if size.seq_len > 1000 and decay == 0.0:
        decay = 1e-4  # without decay float16 outputs of long sequences overflow
    arrays = inputs(rng, size, dtype, decay)
    got = run(device, arrays, size)
    wide = reference.gated_scan(
        *(array.astype(np.float64) for array in arrays[:4]),
        initial_state=arrays[4],
        cu_seqlens=size.cu_seqlens,
    )
    assert got.y.dtype == arrays[0].dtype
    assert distance(got.y, wide.y) < ERROR[dtype]
    assert distance(got.final_state, wide.final_state) < ERROR[dtype]


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_of_each_class(rng, arch):
    """mma.sync and wgmma: several column tiles, states and segments, sequences of any length."""
    for size in (SIZES[2], SIZES[4], SIZES[5], Size(1, 2500, 1, 1, 8, 8)):
        x, b, c, decay, state = inputs(rng, size, "bfloat16")
        grad, cu_seqlens = random(rng, x.shape, "bfloat16"), size.cu_seqlens
        states = {"initial_state": state, "cu_seqlens": cu_seqlens}
        with cukit.backend("emulator", arch=arch, seed=3, late=True):
            got = [*gated_scan(x, b, c, decay, **states)]
            got += gated_scan_backward(grad, x, b, c, decay, grad_final_state=state, **states)
        wide = [array.astype(np.float64) for array in (x, b, c, decay)]
        exact = [*reference.gated_scan(*wide, **states)]
        exact += reference.gated_scan_backward(
            grad.astype(np.float64), *wide, grad_final_state=state, **states
        )
        for result, expected in zip(got, exact, strict=True):
            assert distance(result, expected) < ERROR["bfloat16"]


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_every_chunk_size_matches_the_recurrence(rng, chunk, channels):
    size = Size(2, 101, 4, 2, 6, 5)
    arrays = inputs(rng, size, "float32", channels=channels)
    arrays = [array.astype(np.float64) for array in arrays]
    y, h = recurrence(*arrays)
    scan = reference.gated_scan(*arrays[:4], initial_state=arrays[4], chunk=chunk)
    np.testing.assert_allclose(scan.y, y, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(scan.final_state, h, rtol=1e-11, atol=1e-12)


def test_packed_sequences_match_separate_calls(device, rng):
    size = SIZES[4]
    arrays = inputs(rng, size, "bfloat16")
    together = run(device, arrays, size)
    ends = size.cu_seqlens
    for number, (begin, end) in enumerate(itertools.pairwise(ends)):
        part = [np.ascontiguousarray(array[:, begin:end]) for array in arrays[:4]]
        placed = to_device(device, *part, arrays[4][number : number + 1].copy())
        alone = gated_scan(*placed[:4], initial_state=placed[4])
        assert distance(alone.y, to_host(together.y)[:, begin:end]) < 1e-6
        state = to_host(together.final_state)[number : number + 1]
        assert distance(alone.final_state, state) < 1e-6


@pytest.mark.parametrize("channels", [False, True])
def test_calls_that_carry_the_state_match_one_call(device, rng, channels):
    size = Size(2, 330, 2, 1, 32, 64)
    arrays = inputs(rng, size, "bfloat16", channels=channels)
    whole = run(device, arrays, size)
    state, outputs = to_device(device, arrays[4])[0], []
    for begin, end in ((0, 128), (128, 131), (131, 330)):
        part = [np.ascontiguousarray(array[:, begin:end]) for array in arrays[:4]]
        y, state = gated_scan(*to_device(device, *part), initial_state=state)
        outputs.append(to_host(y))
    assert distance(np.concatenate(outputs, axis=1), to_host(whole.y)) < ERROR["bfloat16"]
    assert distance(state, to_host(whole.final_state)) < ERROR["bfloat16"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_decays_of_zero_and_one(device, rng, dtype):
    """-1e4 and -infinity cause no NaN, and results after them keep their precision."""
    size = Size(1, 200, 2, 2, 16, 16)
    x, b, c, decay, state = inputs(rng, size, dtype, decay=0.01)
    decay[:, 70], decay[:, 130] = -1e4, -np.inf
    decay[:, 20:40] = 0
    got = run(device, (x, b, c, decay, state), size)
    y, h = recurrence(x, b, c, np.maximum(decay, -1e4), state)
    assert distance(got.y, y) < ERROR[dtype]
    assert distance(got.final_state, h) < ERROR[dtype]
    fresh = [np.ascontiguousarray(array[:, 130:]) for array in (x, b, c, decay)]
    alone = gated_scan(*to_device(device, *fresh))
    assert distance(alone.final_state, h) < ERROR[dtype]


def test_nan_stays_in_its_head(device, rng):
    size = Size(1, 100, 3, 3, 16, 16)
    x, b, c, decay, _ = inputs(rng, size, "bfloat16")
    decay[0, 50, 1] = np.nan
    y = to_host(gated_scan(*to_device(device, x, b, c, decay)).y).astype(np.float32)
    assert np.isnan(y[0, 64:, 1]).all()
    assert not np.isnan(y[0, :, [0, 2]]).any()


@pytest.mark.slow
def test_a_million_steps_do_not_drift():
    """A state of constant magnitude, in float32, compared with float64."""
    tokens = 1_000_000
    x, b = np.ones((1, tokens, 1, 1), np.float32), np.full((1, tokens, 1, 1), 1e-3, np.float32)
    decay = np.full((1, tokens, 1), np.log1p(-1e-3), np.float32)
    low = reference.gated_scan(x, b, b, decay, chunk=128).final_state.item()
    wide = reference.gated_scan(
        *(array.astype(np.float64) for array in (x, b, b, decay)), chunk=128
    ).final_state.item()
    assert low == pytest.approx(wide, rel=1e-4)


@pytest.mark.gpu
def test_a_million_tokens_do_not_drift(rng):
    size = Size(1, 1_000_000, 1, 1, 64, 64)
    arrays = inputs(rng, size, "bfloat16", decay=1e-3)
    got = run("gpu", arrays, size)
    wide = reference.gated_scan(
        *(array.astype(np.float64) for array in arrays[:4]), initial_state=arrays[4], chunk=256
    )
    assert distance(got.final_state, wide.final_state) < ERROR["bfloat16"]


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [False, True])
def test_launches_that_start_early_keep_the_order_of_the_stream(rng, channels):
    """Arguments are overwritten on the stream before and after each call."""
    size = Size(1, 8192, 4, 4, 64, 128)
    arrays = to_device("gpu", *inputs(rng, size, "bfloat16", channels=channels))
    grad = arrays[0].copy()

    def fill_with_nan(arrays):
        for array in arrays:
            array.view(f"i{array.dtype.itemsize}").fill(-1)

    def run_both(x, b, c, decay, state):
        return *gated_scan(x, b, c, decay, initial_state=state), *gated_scan_backward(
            grad, x, b, c, decay, initial_state=state, grad_final_state=state
        )

    expected = [to_host(each) for each in run_both(*arrays)]
    reused = [array.copy() for array in arrays]
    for _ in range(10):
        fill_with_nan(reused)
        for array, values in zip(reused, arrays, strict=True):
            array[...] = values
        got = run_both(*reused)
        fill_with_nan(reused)
        for mine, each in zip(got, expected, strict=True):
            assert to_host(mine).tobytes() == each.tobytes()


# Steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [*SIZES[:3], Size(5, 1, 4, 2, 300, 7)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_step_matches_reference(device, rng, size, dtype):
    x, b, c, decay, state = inputs(rng, size, dtype)
    one = [np.ascontiguousarray(array[:, 0]) for array in (x, b, c, decay)]

    def both(function):
        def call(state, *rest):
            changed = state.copy()
            return function(changed, *rest), changed

        return call

    check_against_reference(
        both(gated_scan_step),
        both(reference.gated_scan_step),
        (state, *one),
        device=device,
        names=("y", "state"),
    )


def test_steps_match_the_scan(device, rng):
    size = Size(2, 9, 2, 1, 16, 24)
    x, b, c, decay, state = inputs(rng, size, "bfloat16")
    whole = gated_scan(
        *to_device(device, x, b, c, decay), initial_state=to_device(device, state)[0]
    )
    (running,) = to_device(device, state.copy())
    for t in range(size.seq_len):
        one = [np.ascontiguousarray(array[:, t]) for array in (x, b, c, decay)]
        y = gated_scan_step(running, *to_device(device, *one))
        assert distance(y, to_host(whole.y)[:, t]) < 2 * ERROR["bfloat16"]
    assert distance(running, to_host(whole.final_state)) < ERROR["bfloat16"]


# Errors and the plan ---------------------------------------------------------------------------


def test_errors_name_the_argument(rng):
    x, b, c, decay, state = inputs(rng, Size(2, 5, 4, 2, 8, 8), "float32")
    with pytest.raises(ArrayShapeError, match="x must have 4 axes"):
        gated_scan(x[0], b, c, decay)
    with pytest.raises(ArrayShapeError, match=r"c must have shape \(2, 5, 2, 8\)"):
        gated_scan(x, b, c[:, :4].copy(), decay)
    with pytest.raises(ArrayDtypeError, match="log_decay must be float32"):
        gated_scan(x, b, c, decay.astype(np.float16))
    with pytest.raises(ArrayShapeError, match="number of groups of b must divide num_heads"):
        gated_scan(x[:, :, :3].copy(), b, c, decay[:, :, :3].copy())
    with pytest.raises(ArrayShapeError, match="with cu_seqlens x must have a batch of 1, got 2"):
        gated_scan(x, b, c, decay, cu_seqlens=np.array([0, 5], np.int32))
    with pytest.raises(ArrayShapeError, match=r"initial_state must have shape \(2, 4, 8, 8\)"):
        gated_scan(x, b, c, decay, initial_state=state[:1].copy())
    with pytest.raises(ArrayShapeError, match=r"state must have shape \(2, 4, 8, 8\)"):
        gated_scan_step(
            state[:1].copy(), x[:, 0].copy(), b[:, 0].copy(), c[:, 0].copy(), decay[:, 0]
        )


def test_limits_of_the_kernel_are_named(device, rng):
    if device == "cpu":
        pytest.skip("requirements of the kernels")
    for head_dim, state_dim, words in ((12, 16, "head_dim"), (16, 136, "state_dim")):
        arrays = inputs(rng, Size(1, 4, 1, 1, head_dim, state_dim), "float16")
        with pytest.raises(ConfigError, match=f"{words} must be a multiple of 8"):
            gated_scan(*to_device(device, *arrays[:4]))
    arrays = inputs(rng, Size(1 << 15, 1, 2, 2, 8, 8), "float16")
    with pytest.raises(ConfigError, match=r"at most 65535 on the GPU, got 32768 \* 2"):
        gated_scan(*to_device(device, *arrays[:4]))


@pytest.mark.parametrize(
    ("sequences", "seq_len", "heads", "state_dim", "segments"),
    [
        (8, 8192, 32, 128, 1),
        (1, 8192, 32, 128, 8),
        (1, 8192, 32, 64, 12),
        (1, 65536, 8, 128, 33),
        (1, 100, 1, 128, 1),
        (1, 65536, 128, 128, 2),
    ],
)
def test_the_plan(sequences, seq_len, heads, state_dim, segments):
    device = TYPICAL_DEVICES["sm_90"]
    shape = (sequences, seq_len, heads, 64, state_dim, "bfloat16", device)
    assert plan_gated_scan(*shape).segments == segments
    fewer = 8 if segments == 12 else segments
    assert plan_gated_scan(*shape, backward=True).segments == fewer
