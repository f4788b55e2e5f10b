"""Options of flash_attention and its backward: scores and masks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import cukit
from cukit.attention import flash_attention, flash_attention_backward
from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError, ConfigError
from cukit.reference import attention as reference
from tests.attention import plain
from tests.attention.checks import (
    check,
    compare_with_float64,
    inputs_of,
    run_forward_and_backward,
    widened,
)
from tests.attention.options import OPTIONS, options_of
from tests.contract import check_gradient, random, to_device, to_host
from tests.quick_run import emulated

PAGE = Path(__file__).parents[2] / "docs" / "attention.md"
EMULATED = ("causal window, sinks", "bias, mask", "everything")


def check_options(device, rng, requested, lengths, heads=(2, 1), head_dim=64, value_dim=None,
                  dtype="bfloat16", batch=1):  # fmt: skip
    inputs = inputs_of(rng, lengths, heads, head_dim, value_dim, batch=batch, dtype=dtype)
    check(device, *inputs, options_of(rng, requested, batch, heads[0], lengths, dtype))


@pytest.mark.parametrize("name", OPTIONS)
@emulated(
    lambda name: name in EMULATED
)  # a case compiles four kernels; three cases cover every option
def test_options(device_and_class, rng, name):
    if device_and_class == "gpu":
        check_options(device_and_class, rng, OPTIONS[name], (150, 215), (4, 2), batch=2)
        check_options(
            device_and_class, rng, OPTIONS[name], (215, 160), (4, 2), 128, dtype="float16", batch=2
        )
        return
    # Rows of 144 elements start at multiples of 16 bytes, rows of 135 do not.
    lengths = (70, 144) if name == "bias, mask" else (70, 135)
    batch = 1 if device_and_class == "emulator" else 2
    check_options(device_and_class, rng, OPTIONS[name], lengths, batch=batch)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["window", "causal window, sinks", "bias, mask", "everything"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize(
    "lengths", [(1, 1), (239, 1), (1, 239), (799, 3), (113, 203), (203, 113), (1023, 1024)]
)
def test_ragged_lengths(gpu, rng, lengths, heads, name):
    check_options(gpu, rng, OPTIONS[name], lengths, heads, batch=2)


@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [
        (192, 128),
        (40, 72),
        (64, 128),
        (128, 64),
        (256, 64),
        (64, 256),
        (96, 128),
        (8, 16),
        (192, 192),
    ],
)
@emulated(lambda head_dim, value_dim: (head_dim, value_dim) in {(40, 72), (192, 128)})
def test_head_dims_of_values_may_differ(device_and_class, rng, head_dim, value_dim):
    if device_and_class == "gpu":
        for causal in (False, True):
            requested = {"causal": causal}
            check_options(
                device_and_class, rng, requested, (150, 215), (4, 2), head_dim, value_dim, batch=2
            )
        requested, lengths = OPTIONS["everything"], (113, 203)
        check_options(
            device_and_class, rng, requested, lengths, (4, 2), head_dim, value_dim, "float16"
        )
        return
    check_options(device_and_class, rng, {"causal": True}, (70, 135), (2, 1), head_dim, value_dim)


@pytest.mark.parametrize("sinks", [False, True])
@emulated(lambda sinks: sinks)
def test_fully_masked_rows(device_and_class, rng, sinks):
    """Fully masked rows: zeros, -infinity as lse and no gradient; with a sink, its score as lse."""
    q, k, v, grad_out = (random(rng, (1, 40, 2, 64), "bfloat16") for _ in range(4))
    mask = rng.random((40, 40)) < 0.5
    mask[5:30] = False
    options = {"mask": mask, **({"sinks": np.array([0.5, -np.inf], np.float32)} if sinks else {})}
    out, lse, both = run_forward_and_backward(device_and_class, q, k, v, grad_out, options)
    assert (out[:, 5:30] == 0).all()
    assert np.isneginf(lse[:, 1, 5:30]).all()
    if sinks:
        np.testing.assert_allclose(lse[:, 0, 5:30], 0.5, atol=1e-6)
    else:
        assert np.isneginf(lse[:, 0, 5:30]).all()
    for gradients in both:
        assert (gradients["grad_q"][:, 5:30] == 0).all()
        assert all(np.isfinite(x.astype(np.float32)).all() for x in gradients.values())
        if sinks:
            assert gradients["grad_sinks"][1] == 0
    low = (
        (plain.forward(q, k, v, False, **options)[0], None),
        plain.backward(grad_out, q, k, v, False, **options),
    )
    compare_with_float64((out, lse, both), q, k, v, grad_out, options, low)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_reruns_are_bitwise_equal(gpu, rng, name):
    """Everything except the grad_q of the default backward, which is summed by atomics."""
    q = random(rng, (2, 300, 4, 128), "bfloat16")
    k, v = (random(rng, (2, 333, 2, 128), "bfloat16") for _ in range(2))
    options = options_of(rng, OPTIONS[name], 2, 4, (300, 333), "bfloat16")
    first: list[bytes] = []
    for _ in range(20):
        out, lse, (atomic, fixed) = run_forward_and_backward(gpu, q, k, v, q, options)
        del atomic["grad_q"]
        bits = [x.tobytes() for x in (out, lse, *atomic.values(), *fixed.values())]
        first = first or bits
        assert bits == first


@pytest.mark.emulator
def test_the_order_of_threads_does_not_matter(rng):
    q, k, v, grad_out = (random(rng, (1, 70, 2, 64), "bfloat16") for _ in range(4))
    options = options_of(rng, OPTIONS["everything"], 1, 2, (70, 70), "bfloat16")
    results = []
    for seed in (0, 1):
        with cukit.backend("emulator", arch="sm_80", seed=seed, late=seed == 1):
            out, lse, (_, fixed) = run_forward_and_backward("emulator", q, k, v, grad_out, options)
        results.append([x.tobytes() for x in (out, lse, *fixed.values())])
    assert results[0] == results[1]


def test_strided_bias_and_mask_need_no_copy(device_and_class, rng):
    q, k, v, grad_out = (random(rng, (1, 40, 2, 64), "bfloat16") for _ in range(4))
    bias, mask = random(rng, (1, 2, 40, 40), "bfloat16"), rng.random((1, 2, 40, 40)) < 0.5
    dense = run_forward_and_backward(
        device_and_class, q, k, v, grad_out, {"bias": bias, "mask": mask}
    )
    turned = [np.ascontiguousarray(x.transpose(3, 2, 1, 0)) for x in (bias, mask)]
    views = [x.transpose(3, 2, 1, 0) for x in to_device(device_and_class, *turned)]
    placed = to_device(device_and_class, q, k, v)
    options = {"bias": views[0], "mask": views[1]}
    out, lse = flash_attention(*placed, return_lse=True, **options)
    np.testing.assert_array_equal(to_host(out), dense[0])
    gradients = flash_attention_backward(
        *to_device(device_and_class, grad_out), *placed, out, lse, deterministic=True, **options
    )
    for one, other in zip(gradients, dense[2][1].values(), strict=True):
        np.testing.assert_array_equal(to_host(one), other)


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("name", [*OPTIONS, "values"])
def test_gradients_by_finite_differences(rng, name, varlen):
    shapes = [(2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 16 if name == "values" else 8)]
    options = options_of(rng, OPTIONS.get(name, {}), 2, 4, (5, 7), "float64")
    if "window_size" in options:
        options["window_size"] = (2, 1)
    options = {key: widened(value) for key, value in options.items()}
    if varlen:
        shapes = [(shape[1] * 2 - 1, *shape[2:]) for shape in shapes]
        options["cu_seqlens_q"] = np.array([0, 4, 9], np.int32)
        options["cu_seqlens_kv"] = np.array([0, 7, 13], np.int32)
        options |= {"max_seqlen_q": 5, "max_seqlen_kv": 7}
    inputs = [rng.standard_normal(shape) for shape in shapes]
    if "sinks" in options:
        inputs.append(options.pop("sinks"))

    def forward(q, k, v, sinks=None):
        return reference.flash_attention(q, k, v, sinks=sinks, **options)

    def backward(grad_out, q, k, v, sinks=None):
        out, lse = reference.flash_attention(q, k, v, sinks=sinks, return_lse=True, **options)
        return reference.flash_attention_backward(
            grad_out, q, k, v, out, lse, sinks=sinks, **options
        )

    check_gradient(forward, backward, inputs, rng)


def test_errors_name_the_option(device_and_class, rng):
    q, k, v = to_device(
        device_and_class, *(random(rng, (2, 8, 2, 64), "float16") for _ in range(3))
    )
    (three,) = to_device(device_and_class, np.zeros(3, np.float32))
    (ends,) = to_device(device_and_class, np.array([0, 8], np.int32))

    def check_error(error, match, *inputs, **options):
        with pytest.raises(error, match=match):
            flash_attention(*(inputs or (q, k, v)), **options)

    check_error(ConfigError, "attention dropout is not supported, got dropout=0.1", dropout=0.1)
    check_error(ConfigError, "softcap must be positive", softcap=0.0)
    check_error(
        ConfigError, r"window_size must be .* at least 0, got \(-1, 3\)", window_size=(-1, 3)
    )
    check_error(ConfigError, "window_size must be a pair of integers", window_size=(1.5, 3))
    check_error(ConfigError, "q_descale is for float8 inputs, got float16", q_descale=three)
    check_error(ArrayShapeError, r"alibi_slopes must have shape \(2,\)", alibi_slopes=three)
    check_error(ArrayDtypeError, "sinks must be float32", sinks=three[:2].astype(np.float16))
    check_error(ArrayShapeError, r"sinks must have shape", sinks=three)
    check_error(ArrayShapeError, r"bias must be broadcastable .* got shape \(3,\)", bias=three)
    check_error(ArrayDtypeError, "bias must be float16 or float32", bias=three.astype(np.int32))
    check_error(ArrayDtypeError, "mask must be bool, got float32", mask=three)
    check_error(ArrayShapeError, "v must have shape", q, k, v[:, :4])
    check_error(ConfigError, "got no cu_seqlens_kv, max_seqlen_q, max_seqlen_kv", cu_seqlens_q=ends)
    flat, lengths = (q[0], k[0], v[0]), {"max_seqlen_q": 8, "max_seqlen_kv": 8}
    both = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, **lengths}
    check_error(ArrayShapeError, "q must have 3 axes", **both)
    check_error(
        ArrayDtypeError, "cu_seqlens_q must be int32", *flat,
        **both | {"cu_seqlens_q": ends.astype(np.int64)},
    )  # fmt: skip
    check_error(
        ArrayShapeError, "must both have num_sequences", *flat,
        **both | {"cu_seqlens_kv": to_device(device_and_class, np.array([0, 3, 8], np.int32))[0]},
    )  # fmt: skip
    if device_and_class != "gpu":
        for wrong in ([0, 9], [1, 8], [0, 7]):
            (bad,) = to_device(device_and_class, np.array(wrong, np.int32))
            check_error(
                ConfigError,
                "cu_seqlens_q must be non-decreasing from 0 to 8",
                *flat,
                **both | {"cu_seqlens_q": bad},
            )
        check_error(ConfigError, "more than max_seqlen_kv=7", *flat, **both | {"max_seqlen_kv": 7})
    out, lse = flash_attention(q, k, v, return_lse=True)
    with pytest.raises(
        ConfigError, match="flash_attention_backward: attention dropout is not supported"
    ):
        flash_attention_backward(out, q, k, v, out, lse, dropout=0.5)
    with pytest.raises(ArrayShapeError, match="flash_attention_backward: sinks must have shape"):
        flash_attention_backward(out, q, k, v, out, lse, sinks=three)


def test_a_bias_with_unaligned_strides_is_rejected(rng):
    q = random(rng, (1, 4, 1, 8), "float32")
    packed = np.zeros(4 * 6, np.uint8)[1:21].view(np.float32)
    uneven = np.lib.stride_tricks.as_strided(packed, (4,), (5,))
    with pytest.raises(
        ArrayLayoutError, match="strides of bias must be multiples of its element size"
    ):
        flash_attention(q, q, q, bias=uneven)


def test_the_examples_of_the_page_run():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) > 2
    exec("\n".join(blocks), {})
