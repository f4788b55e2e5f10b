"""The backward's `rope` and `gradients`: gradients before rope, written into given arrays."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from cukit.attention import flash_attention, flash_attention_backward
from cukit.attention.flash._flash_plan_sm90 import plan_flash_attention_backward_sm90
from cukit.attention.flash._problem import AttentionProblem
from cukit.core.device import typical_device
from cukit.errors import ArrayLayoutError, ArrayShapeError, ConfigError
from cukit.layers import rope_backward
from tests.attention.checks import NAMES, inputs_of
from tests.contract import poisoned, to_device, to_host

SEQ = 150
UNIT = 2.0**-7  # the largest relative distance between adjacent bfloat16 values


def tables_of(rng, half, batch):
    """cos and sin of random angles, [batch, SEQ, half]."""
    angles = rng.uniform(0, 6, (batch, SEQ, half))
    return tuple(function(angles).astype(np.float32) for function in (np.cos, np.sin))


def gradients_by_two_ops(grad_out, q, k, v, out, lse, cos, sin):
    """The attention gradients, then `rope_backward`. cos, sin: [batch, SEQ, half]."""
    grads = flash_attention_backward(grad_out, q, k, v, out, lse, causal=True, deterministic=True)
    batch, _, half = cos.shape
    positions = np.arange(batch * SEQ, dtype=np.int32).reshape(batch, SEQ)
    flat = cos.reshape(-1, half), sin.reshape(-1, half)
    (positions,) = to_device("cpu" if isinstance(cos, np.ndarray) else "gpu", positions)
    return (*rope_backward(*grads[:2], *flat, positions), grads[2])


def slices(device, q, k, v):
    """A poisoned array [batch, SEQ, heads, head_dim], and its slices for the gradients of q, k and
    v. The last head belongs to none of them."""
    heads = np.cumsum([0, q.shape[2], k.shape[2], v.shape[2]])
    whole = poisoned(device, (*q.shape[:2], heads[-1] + 1, q.shape[3]), q.dtype.name)
    return whole, tuple(whole[:, :, low:high] for low, high in pairwise(heads))


@pytest.mark.parametrize("tables_per_sequence", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize(
    ("head_dim", "heads"), [(64, (4, 2)), (128, (2, 2)), (40, (2, 1)), (96, (1, 1)), (256, (2, 1))]
)
def test_gradients_before_rope_in_slices_of_one_array(
    either_class, rng, head_dim, heads, tables_per_sequence
):
    arrays = inputs_of(rng, (SEQ, SEQ), heads, head_dim, batch=2)
    tables = tables_of(rng, head_dim // 2, 2)
    if not tables_per_sequence:
        tables = tuple(np.stack([table[0]] * 2) for table in tables)
    q, k, v, grad_out, cos, sin = to_device(either_class, *arrays, *tables)
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    expected = gradients_by_two_ops(grad_out, q, k, v, out, lse, cos, sin)

    whole, targets = slices(either_class, q, k, v)
    untouched = to_host(whole[:, :, -1]).tobytes()
    given = (cos, sin) if tables_per_sequence else (cos[0].copy(), sin[0].copy())
    got = flash_attention_backward(
        *(grad_out, q, k, v, out, lse),
        causal=True, deterministic=True, rope=given, gradients=targets,
    )  # fmt: skip
    for name, gradient, target, wanted in zip(NAMES, got, targets, expected, strict=True):
        assert gradient is target, name
        exact, result = (to_host(each).astype(np.float64) for each in (wanted, gradient))
        np.testing.assert_allclose(result, exact, rtol=UNIT, atol=1e-6, err_msg=name)
    assert to_host(whole[:, :, -1]).tobytes() == untouched

    fresh = flash_attention_backward(
        grad_out, q, k, v, out, lse, causal=True, deterministic=True, rope=given
    )
    for gradient, target in zip(fresh, targets, strict=True):
        assert gradient.flags.c_contiguous
        assert to_host(gradient).tobytes() == to_host(target).tobytes()


def test_partial_sums_are_added_into_slices(either_class, rng):
    """Four query heads share a KV head, and there are too few key tiles to fill the GPU: several
    blocks compute partial sums of grad_k and grad_v. Separate launches add them up, and rotate
    grad_q and grad_k."""
    arrays = inputs_of(rng, (SEQ, SEQ), (4, 1), 64)
    q, k, v, grad_out, cos, sin = to_device(either_class, *arrays, *tables_of(rng, 32, 1))
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    expected = gradients_by_two_ops(grad_out, q, k, v, out, lse, cos, sin)
    _, targets = slices(either_class, q, k, v)
    flash_attention_backward(
        *(grad_out, q, k, v, out, lse),
        causal=True, deterministic=True, rope=(cos[0], sin[0]), gradients=targets,
    )  # fmt: skip
    for target, wanted in zip(targets, expected, strict=True):
        exact, result = (to_host(each).astype(np.float64) for each in (wanted, target))
        np.testing.assert_allclose(result, exact, rtol=UNIT, atol=1e-6)


def test_packed_sequences_are_written_into_slices(either_class, rng):
    q, k, v, grad_out = (array[0] for array in inputs_of(rng, (90, 90), (2, 2), 64))
    ends = np.array([0, 37, 37, 90], np.int32)
    options = {"causal": True, "max_seqlen_q": 53, "max_seqlen_kv": 53}
    q, k, v, grad_out, ends = to_device(either_class, q, k, v, grad_out, ends)
    options |= {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    given = grad_out, q, k, v, out, lse
    expected = flash_attention_backward(*given, deterministic=True, **options)
    whole = poisoned(either_class, (90, 7, 64), "bfloat16")
    targets = whole[:, :2], whole[:, 2:4], whole[:, 4:6]
    flash_attention_backward(*given, deterministic=True, gradients=targets, **options)
    for target, wanted in zip(targets, expected, strict=True):
        assert to_host(target).tobytes() == to_host(wanted).tobytes()
    tables = tuple(to_device(either_class, *(table[0] for table in tables_of(rng, 32, 1))))
    with pytest.raises(ConfigError, match="rope does not support cu_seqlens"):
        flash_attention_backward(*given, rope=tables, **options)


def test_errors_name_the_argument(rng):
    q, k, v, grad_out = inputs_of(rng, (SEQ, SEQ), (2, 2), 8, dtype="float32")
    out, lse = flash_attention(q, k, v, return_lse=True)
    given = grad_out, q, k, v, out, lse
    cos, sin = tables_of(rng, 4, 1)
    with pytest.raises(ConfigError, match="gradients must have 3 arrays, got 2"):
        flash_attention_backward(*given, gradients=(q.copy(), k.copy()))
    with pytest.raises(
        ArrayShapeError, match=r"cos must have shape \(150 or more, 4\) or \(1, 150"
    ):
        flash_attention_backward(*given, rope=(cos[0, :9], sin[0, :9]))
    short = [x[:, :7].copy() for x in (k, v)]
    rest = flash_attention(q, *short, return_lse=True)
    with pytest.raises(ArrayShapeError, match="with rope q and k must have the same length"):
        flash_attention_backward(grad_out, q, *short, *rest, rope=(cos, sin))
    swapped = np.empty((1, 2, SEQ, 8), np.float32).swapaxes(1, 2)
    with pytest.raises(ArrayLayoutError, match="the heads of grad_k must be adjacent"):
        flash_attention_backward(*given, gradients=(q.copy(), swapped, v.copy()))
    with pytest.raises(ArrayLayoutError, match="grad_v overlaps v in memory"):
        flash_attention_backward(*given, gradients=(q.copy(), k.copy(), v))
    twice = q.copy()
    with pytest.raises(ArrayLayoutError, match="grad_q overlaps grad_k in memory"):
        flash_attention_backward(*given, gradients=(twice, twice, v.copy()))


def test_which_kernels_rotate():
    h200 = typical_device("sm_90")
    problem = AttentionProblem(4, 4096, 4096, 32, 8, 128, "bfloat16", True)

    def rotates(**changes):
        config = plan_flash_attention_backward_sm90(replace(problem, **changes), False, h200)
        return config.rotates

    assert rotates()
    assert rotates(head_dim=64)
    assert not rotates(head_dim=96)
    assert not rotates(head_dim=256)
    assert not rotates(batch=1, seq_len_q=64, seq_len_kv=64, num_heads_kv=1)
