"""gated_scan, its backward and its step with a decay per channel of the state: against finite
differences and the reference; extreme decays together with none; steps; errors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import cukit
from cukit.core.device import TYPICAL_DEVICES
from cukit.errors import ArrayLayoutError, ArrayShapeError
from cukit.reference import sequence as reference
from cukit.sequence import gated_scan, gated_scan_backward, gated_scan_step
from cukit.sequence._plan import plan_gated_scan
from tests.contract import another_order, check_gradient, random, to_device, to_host
from tests.quick_run import possible
from tests.sequence.test_gated_scan import SIZES, Size, distance, inputs

ERROR = {"float16": 1e-3, "bfloat16": 6e-3}
"""||out - exact|| / ||exact||. Decayed queries and keys, scores and states are rounded to the
inputs' dtype before they are multiplied."""

NAMES = ("y", "final_state", "x", "b", "c", "log_decay", "initial_state")
LARGE = [
    Size(1, 6000, 4, 4, 64, 128),  # split over segments
    Size(1, 3000, 8, 2, 128, 64, (2000, 1, 999)),
    Size(40, 100, 8, 1, 64, 128),
]


def problem(rng, size, dtype, decay=0.2):
    """x, b, c, log_decay and initial_state; gradients of y and of the final state."""
    arrays = list(inputs(rng, size, dtype, decay, channels=True))
    return arrays, (random(rng, arrays[0].shape, dtype), random(rng, arrays[4].shape, "float32"))


def evaluate(forward, backward, arrays, grads, cu_seqlens):
    """The outputs and the gradients."""
    *arguments, state = arrays
    states = {"initial_state": state, "cu_seqlens": cu_seqlens}
    results = [*forward(*arguments, **states)]
    results += backward(grads[0], *arguments, grad_final_state=grads[1], **states)
    return results


def run(device, arrays, grads, cu_seqlens):
    """Results of a run; a second run must be bitwise equal."""
    placed = to_device(device, *arrays)
    of_outputs = to_device(device, *grads)
    (lengths,) = to_device(device, cu_seqlens)
    runs = []
    for repeat in range(2):
        with another_order(device, repeat):
            runs.append(evaluate(gated_scan, gated_scan_backward, placed, of_outputs, lengths))
    for first, again in zip(*runs, strict=True):
        assert to_host(first).tobytes() == to_host(again).tobytes()
    return runs[0]


def exact(arrays, grads, cu_seqlens, device="cpu"):
    """The reference's results in float64, computed on `device`."""
    wide = [to_device(device, *(a.astype(np.float64) for a in part)) for part in (arrays, grads)]
    results = evaluate(reference.gated_scan, reference.gated_scan_backward, *wide, cu_seqlens)
    return [to_host(result) for result in results]


def check(got, wide, dtype):
    for name, result, expected in zip(NAMES, got, wide, strict=True):
        error = distance(result, expected)
        assert error < ERROR[dtype], f"{name}: {error}"


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_gradients_match_finite_differences(rng, chunk):
    arrays, _ = problem(rng, Size(2, 23, 4, 2, 6, 5), "float32")
    arrays = [array.astype(np.float64) for array in arrays]
    split = int(np.prod(arrays[0].shape))

    def forward(*arguments):
        *rest, state = arguments
        scan = reference.gated_scan(*rest, initial_state=state, chunk=chunk)
        return np.concatenate([scan.y.ravel(), scan.final_state.ravel()])

    def backward(grad, *arguments):
        *rest, state = arguments
        grad_y, final = grad[:split].reshape(rest[0].shape), grad[split:].reshape(state.shape)
        states = {"grad_final_state": final, "initial_state": state}
        return tuple(reference.gated_scan_backward(grad_y, *rest, **states, chunk=chunk))

    check_gradient(forward, backward, arrays, rng)


@pytest.mark.parametrize("size", SIZES + LARGE, ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.05, 3.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@possible(lambda device, size: device == "gpu" or size in SIZES)
def test_matches_reference(device, rng, size, decay, dtype):
    """Without decay, with decays that tensor-core products within 16 tokens represent, and with
    stronger ones."""
    if size.seq_len > 1000 and decay == 0.0:
        decay = 1e-4  # without decay float16 outputs of long sequences overflow
    arrays, grads = problem(rng, size, dtype, decay)
    got = run(device, arrays, grads, size.cu_seqlens)
    assert [result.dtype for result in (got[0], *got[2:5])] == [arrays[0].dtype] * 4
    check(got, exact(arrays, grads, size.cu_seqlens, device), dtype)


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_of_each_class(rng, arch):
    """mma.sync and wgmma; results are bitwise equal in two orders of thread blocks and copies."""
    for size in (SIZES[2], SIZES[4], SIZES[5]):
        arrays, grads = problem(rng, size, "bfloat16", 0.05)
        arrays[3][:, ::7] *= 60  # some sub-chunks with extreme decays
        runs = []
        for options in ({"seed": 0}, {"seed": 3, "late": True, "global_races": True}):
            with cukit.backend("emulator", arch=arch, **options):
                runs.append(
                    evaluate(gated_scan, gated_scan_backward, arrays, grads, size.cu_seqlens)
                )
        got = runs[0]
        for first, again in zip(*runs, strict=True):
            assert first.tobytes() == again.tobytes()
        check(got, exact(arrays, grads, size.cu_seqlens), "bfloat16")


def test_equal_decays_match_one_decay_per_head(device, rng):
    size = Size(1, 150, 2, 1, 16, 24)
    arrays, grads = problem(rng, size, "bfloat16")
    per_head = arrays[3][..., 0].copy()
    arrays[3] = np.repeat(per_head[..., None], size.state_dim, axis=-1)
    got = run(device, arrays, grads, None)
    *arguments, state = (array.astype(np.float64) for array in arrays)
    arguments[3] = per_head.astype(np.float64)
    wide = evaluate(
        reference.gated_scan, reference.gated_scan_backward, [*arguments, state], grads, None
    )
    got[5] = to_host(got[5]).sum(-1)
    check(got, wide, "bfloat16")


def test_packed_sequences_match_separate_calls(device, rng):
    size = SIZES[4]
    arrays, grads = problem(rng, size, "bfloat16")
    together = [to_host(result) for result in run(device, arrays, grads, size.cu_seqlens)]
    for number, (begin, end) in enumerate(itertools.pairwise(size.cu_seqlens)):
        part = [np.ascontiguousarray(array[:, begin:end]) for array in (*arrays[:4], grads[0])]
        states = [array[number : number + 1].copy() for array in (arrays[4], grads[1])]
        alone = run(device, [*part[:4], states[0]], (part[4], states[1]), None)
        for index, (result, whole) in enumerate(zip(alone, together, strict=True)):
            of_state = index in (1, 6)
            same = whole[number : number + 1] if of_state else whole[:, begin:end]
            assert distance(result, same) < 1e-5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_channels_with_strong_and_weak_decay(device, rng, dtype):
    """-1e4 and -infinity in some channels cause no NaN; clamped log decays have a gradient of 0."""
    size = Size(1, 200, 2, 2, 16, 16)
    arrays, grads = problem(rng, size, dtype, decay=0.01)
    decay = arrays[3]
    decay[:, 70, :, ::2], decay[:, 130, :, 5], decay[:, 150, 1] = -1e4, -np.inf, 0.5
    decay[:, 20:40] = 0
    decay[:, 100:110, :, 7] = -20.0
    got = run(device, arrays, grads, None)
    check(got, exact([np.maximum(a, -1e4) for a in arrays], grads, None), dtype)
    of_decay = to_host(got[5])
    assert not of_decay[:, 70, :, ::2].any()
    assert not of_decay[:, 130, :, 5].any()
    assert not of_decay[:, 150, 1].any()
    assert of_decay[:, 71:130].all()


def test_strong_decays_have_small_gradients(device, rng):
    """The gradients must not be computed as differences of large sums, which would cancel."""
    size = Size(1, 130, 1, 1, 64, 64)
    arrays, grads = problem(rng, size, "bfloat16")
    arrays[3][...] = -30.0
    wide = exact(arrays, grads, None)
    got = run(device, arrays, grads, None)
    assert distance(got[5], wide[5]) < 2e-2
    assert np.abs(wide[5]).max() < 1e-9


@pytest.mark.parametrize(
    "decays",
    [(-2.59,), (-2.61,), (-0.259, -0.261), (0.5, -3.0), (0, -1e-3, -0.26, -2.6, -20, -104, -1e4)],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_gradients_beside_large_sums(device, rng, decays, dtype):
    """Decays near the strongest that tensor-core products within 16 tokens represent, and mixtures
    in which only some decays have a gradient. The gradient of a decay is a prefix sum: the terms of
    token pairs that do not span the decay must cancel exactly."""
    size = Size(1, 130, 4, 2, 72, 72)
    arrays, grads = problem(rng, size, dtype)
    arrays[3][...] = rng.choice(np.array(decays, np.float32), arrays[3].shape)
    check(run(device, arrays, grads, None), exact(arrays, grads, None), dtype)


def test_nan_stays_in_its_head(device, rng):
    size = Size(1, 100, 3, 3, 16, 16)
    arrays, grads = problem(rng, size, "bfloat16")
    arrays[3][0, 50, 1, 3] = np.nan
    got = run(device, arrays, grads, None)
    y = to_host(got[0]).astype(np.float32)
    assert np.isnan(y[0, 64:, 1]).all()
    assert not np.isnan(y[0, :48, 1]).any()
    for result in (got[0], *got[2:6]):
        assert not np.isnan(to_host(result).astype(np.float32)[0, :, [0, 2]]).any()


@pytest.mark.parametrize("size", [*SIZES[:3], Size(5, 1, 4, 2, 300, 7)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_step_matches_reference(device, rng, size, dtype):
    arrays, _ = problem(rng, size, dtype)
    x, b, c, decay = (np.ascontiguousarray(array[:, 0]) for array in arrays[:4])
    decay[..., 1] = -1e4
    state = arrays[4].astype(np.float64)
    y = reference.gated_scan_step(state, *(a.astype(np.float64) for a in (x, b, c, decay)))
    (running, *one) = to_device(device, arrays[4].copy(), x, b, c, decay)
    got = gated_scan_step(running, *one)
    assert distance(got, y) < {**ERROR, "float32": 1e-6}[dtype]
    assert distance(running, state) < 1e-6


def test_steps_match_the_scan(device, rng):
    size = Size(2, 9, 2, 1, 16, 24)
    arrays, _ = problem(rng, size, "bfloat16")
    placed = to_device(device, *arrays)
    whole = gated_scan(*placed[:4], initial_state=placed[4])
    (running,) = to_device(device, arrays[4].copy())
    for t in range(size.seq_len):
        one = [np.ascontiguousarray(array[:, t]) for array in arrays[:4]]
        y = gated_scan_step(running, *to_device(device, *one))
        assert distance(y, to_host(whole.y)[:, t]) < 2 * ERROR["bfloat16"]
    assert distance(running, to_host(whole.final_state)) < ERROR["bfloat16"]


def test_errors_name_the_argument(rng):
    arrays, grads = problem(rng, Size(2, 5, 4, 2, 8, 8), "float32")
    x, b, c, decay, state = arrays
    with pytest.raises(ArrayShapeError, match=r"log_decay must have shape \(2, 5, 4, 8\)"):
        gated_scan(x, b, c, decay[..., :4].copy())
    with pytest.raises(ArrayShapeError, match=r"log_decay must have 3 axes .* or 4 .* got shape"):
        gated_scan(x, b, c, decay[..., None].copy())
    with pytest.raises(ArrayShapeError, match=r"log_decay must have shape \(2, 5, 4, 8\)"):
        gated_scan_backward(grads[0], x, b, c, decay[:, :, :2].copy())
    one = (array[:, 0].copy() for array in (x, b, c))
    with pytest.raises(ArrayShapeError, match=r"log_decay must have shape \(2, 4, 8\)"):
        gated_scan_step(state, *one, decay[:, 0, :2].copy())


def test_limits_of_the_kernel_are_named(device, rng):
    if device == "cpu":
        pytest.skip("requirements of the kernels")
    arrays, _ = problem(rng, Size(1, 4, 1, 1, 16, 16), "float16")
    x, b, c, decay = to_device(device, *arrays[:4])
    (longer,) = to_device(device, np.zeros(decay.size + 1, np.float32))
    with pytest.raises(ArrayLayoutError, match="log_decay must be 16-byte aligned"):
        gated_scan(x, b, c, longer[1:].reshape(decay.shape))


def test_the_plan():
    device = TYPICAL_DEVICES["sm_90"]
    for channels in (False, True):
        config = plan_gated_scan(1, 8192, 32, 64, 128, "bfloat16", device, channels=channels)
        assert config.segments == 8
        assert ("CHANNELS", channels) in config.defines()
