"""Options of flash_attention and its backward: what changes scores, and who sees whom."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cukit
from cukit.attention import flash, flash_attention, flash_attention_backward
from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError, ConfigError
from cukit.reference import attention as reference
from tests.attention import plain
from tests.contract import (
    BFLOAT16,
    assert_close,
    check_gradient,
    poison_pool,
    poisoned,
    random,
    to_device,
    to_host,
)

LSE_ATOL = 1e-5
ARRAYS = ("alibi_slopes", "sinks", "bias", "mask")

# What a test asks for: "bias" and "mask" by the axes that are not broadcast, as in [b, h, q, k].
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (30, 20)},
    "window right": {"window_size": (None, 7)},
    "window far left": {"window_size": (100000, 0)},
    "causal window, sinks": {"causal": True, "window_size": (40, None), "sinks": True},
    "softcap": {"softcap": 1.5, "causal": True},
    "alibi": {"alibi_slopes": "h"},
    "alibi of each sequence, softcap": {"alibi_slopes": "bh", "softcap": 2.0},
    "bias": {"bias": "bhqk", "causal": True},
    "bias of keys": {"bias": "k", "bias_dtype": "float32"},
    "bias, mask": {"bias": "hqk", "mask": "bk"},
    "mask": {"mask": "bhqk"},
    "sinks": {"sinks": True},
    "everything": {
        "window_size": (50, 31),
        "softcap": 3.0,
        "alibi_slopes": "h",
        "bias": "qk",
        "mask": "bqk",
        "sinks": True,
    },
}
EMULATED = ("causal window, sinks", "bias, mask", "everything")


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("emulator", marks=pytest.mark.emulator),
        pytest.param("gpu", marks=pytest.mark.gpu),
        pytest.param("gpu sm80", marks=pytest.mark.gpu),
    ]
)
def place(request, monkeypatch) -> Iterator[str]:
    """As `device`; "emulator" and "gpu sm80" run class sm80, "gpu" what the GPU would choose."""
    if request.param == "emulator":
        monkeypatch.setenv("CUKIT_CACHE_DIR", str(request.config.cache.mkdir("cukit-kernels")))
        with cukit.backend("emulator", arch="sm_80"):
            yield "emulator"
        return
    _choose_class(request.param, monkeypatch)
    yield request.param.split()[0]


@pytest.fixture(params=["gpu", "gpu sm80"])
def gpu(request, monkeypatch) -> str:
    """The two classes of `place` on the GPU."""
    _choose_class(request.param, monkeypatch)
    return "gpu"


def _choose_class(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "gpu sm80":
        monkeypatch.setattr(flash, "covers", lambda problem, device: False)
        monkeypatch.setattr(flash, "_prepare_forward", flash._prepare_forward.__wrapped__)


def options_of(rng, asked, batch, heads, lengths, dtype):
    """Numbers for what `asked` describes."""
    extents = dict(zip("bhqk", (batch, heads, *lengths), strict=True))
    options = dict(asked)
    bias_dtype = options.pop("bias_dtype", dtype)

    def shape(axes):
        return tuple(extents[axis] if axis in axes else 1 for axis in "bhqk")

    if "alibi_slopes" in options:
        slopes = [extents[axis] for axis in options["alibi_slopes"]]
        options["alibi_slopes"] = rng.uniform(0.01, 0.3, slopes).astype(np.float32)
    if "sinks" in options:
        options["sinks"] = random(rng, (heads,), "float32")
    if "bias" in options:
        axes = options["bias"]
        whole = random(rng, shape(axes), bias_dtype)
        options["bias"] = whole.reshape(extents["k"]) if axes == "k" else whole
    if "mask" in options:
        options["mask"] = rng.random(shape(options["mask"])) < 0.6
    return options


def widened(value: Any) -> Any:
    floating = isinstance(value, np.ndarray) and value.dtype.kind not in "bi"
    return (
        value.astype(np.float64) if floating or getattr(value, "dtype", None) == BFLOAT16 else value
    )


def run(place, q, k, v, grad_out, options, names=("grad_q", "grad_k", "grad_v", "grad_sinks")):
    """(out, lse), and the gradients both ways."""
    (q, k, v, grad_out) = to_device(place, q, k, v, grad_out)
    options = {
        name: to_device(place, value)[0] if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    shape = (*q.shape[:-1], v.shape[-1])
    out = poisoned(place, shape, np.dtype(q.dtype).name)
    poison_pool(place)
    result, lse = flash_attention(q, k, v, out=out, return_lse=True, **options)
    assert result is out
    both = []
    for deterministic in (False, True):
        poison_pool(place)
        gradients = flash_attention_backward(
            grad_out, q, k, v, out, lse, deterministic=deterministic, **options
        )
        assert len(gradients) == (4 if options.get("sinks") is not None else 3)
        both.append(dict(zip(names, map(to_host, gradients), strict=False)))
    return to_host(out), to_host(lse), both


def judge(results, q, k, v, grad_out, options, low):
    """Results of `run` beside float64; `low` is plain's forward and backward."""
    out, lse, both = results
    q, k, v, grad_out = (x.astype(np.float64) for x in (q, k, v, grad_out))
    options = {name: widened(value) for name, value in options.items()}
    exact, exact_lse = reference.flash_attention(q, k, v, return_lse=True, **options)
    expected = reference.flash_attention_backward(grad_out, q, k, v, exact, exact_lse, **options)
    (low_out, _), low_gradients = low
    assert_close("out", out, low_out, exact)
    assert_close("lse", lse, exact_lse, exact_lse, LSE_ATOL)
    for way, gradients in zip(("atomic", "deterministic"), both, strict=True):
        for (name, got), low_one, wide in zip(
            gradients.items(), low_gradients, expected, strict=True
        ):
            # A sum over all queries of what bfloat16 has rounded.
            atol = 2e-2 if name == "grad_sinks" else None
            assert_close(f"{name} ({way})", got, low_one, wide, atol)


def check(place, rng, asked, lengths, heads=(2, 1), head_dim=64, value_dim=None, dtype="bfloat16",
          batch=1):  # fmt: skip
    seq_q, seq_kv = lengths
    q = random(rng, (batch, seq_q, heads[0], head_dim), dtype)
    k = random(rng, (batch, seq_kv, heads[1], head_dim), dtype)
    v = random(rng, (batch, seq_kv, heads[1], value_dim or head_dim), dtype)
    grad_out = random(rng, (*q.shape[:-1], v.shape[-1]), dtype)
    options = options_of(rng, asked, batch, heads[0], lengths, dtype)
    settings = {"causal": False, **options}
    low = plain.forward(q, k, v, **settings), plain.backward(grad_out, q, k, v, **settings)
    judge(run(place, q, k, v, grad_out, options), q, k, v, grad_out, options, low)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(place, rng, name):
    if place == "gpu":
        check(place, rng, OPTIONS[name], (150, 215), (4, 2), batch=2)
        check(place, rng, OPTIONS[name], (215, 150), (4, 2), 128, dtype="float16", batch=2)
        return
    if place == "emulator" and name not in EMULATED:
        pytest.skip(
            "a case compiles four kernels: three show every option, the rest is for the GPU"
        )
    check(place, rng, OPTIONS[name], (70, 135), batch=1 if place == "emulator" else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["window", "causal window, sinks", "bias, mask", "everything"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize(
    "lengths", [(1, 1), (239, 1), (1, 239), (799, 3), (113, 203), (203, 113), (1023, 1024)]
)
def test_ragged_lengths(gpu, rng, lengths, heads, name):
    check(gpu, rng, OPTIONS[name], lengths, heads, batch=2)


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
def test_heads_of_values_may_differ(place, rng, head_dim, value_dim):
    if place == "gpu":
        for causal in (False, True):
            asked = {"causal": causal}
            check(place, rng, asked, (150, 215), (4, 2), head_dim, value_dim, batch=2)
        check(place, rng, OPTIONS["everything"], (113, 203), (4, 2), head_dim, value_dim, "float16")
        return
    if place == "emulator" and (head_dim, value_dim) not in {(40, 72), (192, 128)}:
        pytest.skip("the rest is for the GPU")
    check(place, rng, {"causal": True}, (70, 135), (2, 1), head_dim, value_dim)


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_a_mask_hides_altogether(place, rng, sinks):
    """Zeros, -infinity as lse and no gradient; with a sink, its score as lse."""
    if place == "emulator" and not sinks:
        pytest.skip("the rest is for the GPU")
    q, k, v, grad_out = (random(rng, (1, 40, 2, 64), "bfloat16") for _ in range(4))
    mask = rng.random((40, 40)) < 0.5
    mask[5:30] = False
    options = {"mask": mask, **({"sinks": np.array([0.5, -np.inf], np.float32)} if sinks else {})}
    out, lse, both = run(place, q, k, v, grad_out, options)
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
        plain.forward(q, k, v, False, **options),
        plain.backward(grad_out, q, k, v, False, **options),
    )
    judge((out, lse, both), q, k, v, grad_out, options, low)


# ---- Sequences of different lengths ----

SEQUENCES = {
    "some empty": ([5, 0, 70, 3, 0], [9, 4, 135, 0, 0]),
    "one": ([70], [31]),
    "all empty": ([0, 0], [0, 0]),
}
MANY = ([1, 239, 0, 799, 113, 203, 64, 128, 1023], [1, 1, 17, 3, 203, 113, 64, 0, 1024])


def check_sequences(place, rng, asked, lengths, heads=(2, 1), head_dim=64, value_dim=None,
                    room=0):  # fmt: skip
    dtype, value_dim = "bfloat16", value_dim or head_dim
    ends = [np.concatenate([[0], np.cumsum(each)]).astype(np.int32) for each in lengths]
    total_q, total_kv = (int(each[-1]) for each in ends)
    most = [max(each) + room for each in lengths]
    q = random(rng, (total_q, heads[0], head_dim), dtype)
    k = random(rng, (total_kv, heads[1], head_dim), dtype)
    v = random(rng, (total_kv, heads[1], value_dim), dtype)
    grad_out = random(rng, (total_q, heads[0], value_dim), dtype)
    values = options_of(rng, asked, len(lengths[0]), heads[0], most, dtype)
    options = {
        **values,
        "cu_seqlens_q": ends[0],
        "cu_seqlens_kv": ends[1],
        "max_seqlen_q": most[0],
        "max_seqlen_kv": most[1],
    }
    low = plain_sequences(q, k, v, grad_out, values, ends)
    judge(run(place, q, k, v, grad_out, options), q, k, v, grad_out, options, low)


def plain_sequences(q, k, v, grad_out, options, ends):
    """plain, one sequence after the other."""
    out, gradients = np.zeros_like(grad_out), [np.zeros_like(x) for x in (q, k, v)]
    if "sinks" in options:
        gradients.append(np.zeros_like(options["sinks"]))
    for b in range(len(ends[0]) - 1):
        of_q, of_kv = (slice(each[b], each[b + 1]) for each in ends)
        lengths = [int(each[b + 1] - each[b]) for each in ends]
        part = {"causal": False, **options}
        for name in ("bias", "mask"):
            if name in part:
                matrix = part[name].reshape((1,) * (4 - part[name].ndim) + part[name].shape)
                matrix = matrix[b : b + 1] if matrix.shape[0] > 1 else matrix
                rows, columns = (
                    n if e > 1 else 1 for n, e in zip(lengths, matrix.shape[2:], strict=True)
                )
                part[name] = matrix[:, :, :rows, :columns]
        if "alibi_slopes" in part and part["alibi_slopes"].ndim == 2:
            part["alibi_slopes"] = part["alibi_slopes"][b : b + 1]
        arrays = (q[None, of_q], k[None, of_kv], v[None, of_kv])
        out[of_q] = plain.forward(*arrays, **part)[0][0]
        some = plain.backward(grad_out[None, of_q], *arrays, **part)
        for gradient, rows, value in zip(gradients, (of_q, of_kv, of_kv), some, strict=False):
            gradient[rows] = value[0]
        if "sinks" in options:
            gradients[3] += some[3]
    return (out, None), gradients


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_of_any_lengths(place, rng, name, causal):
    if place == "emulator" and name == "one":
        pytest.skip("the rest is for the GPU")
    check_sequences(place, rng, {"causal": causal}, SEQUENCES[name])


@pytest.mark.parametrize("name", ["everything", "causal window, sinks"])
def test_sequences_with_options(place, rng, name):
    if place == "emulator" and name != "everything":
        pytest.skip("the rest is for the GPU")
    check_sequences(place, rng, OPTIONS[name], SEQUENCES["some empty"], room=3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "name"),
    [
        *((64, 64, name) for name in (None, *OPTIONS)),
        *((192, 128, name) for name in (None, *OPTIONS)),
        *((*dims, name) for dims in ((128, 128), (72, 40)) for name in (None, "everything")),
    ],
)
def test_many_sequences(gpu, rng, head_dim, value_dim, name):
    asked = {"causal": True} if name is None else OPTIONS[name]
    check_sequences(gpu, rng, asked, MANY, (6, 2), head_dim, value_dim, room=5)


def test_a_sequence_does_not_see_its_neighbours(place, rng):
    """NaN in the keys and values of one sequence reaches no other."""
    ends = np.array([0, 20, 45, 60], np.int32)
    q, k, v, grad_out = (random(rng, (60, 2, 64), "bfloat16") for _ in range(4))
    options = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 25, "max_seqlen_kv": 25}
    clean = run(place, q, k, v, grad_out, options)
    for x in (k, v):
        x[20:45] = np.nan
    spoilt = run(place, q, k, v, grad_out, options)
    for row in (slice(0, 20), slice(45, 60)):
        np.testing.assert_array_equal(clean[0][row], spoilt[0][row])
        np.testing.assert_array_equal(clean[1][:, row], spoilt[1][:, row])
        for name in ("grad_q", "grad_k", "grad_v"):
            np.testing.assert_array_equal(clean[2][1][name][row], spoilt[2][1][name][row])


def test_sequences_equal_a_batch(place, rng):
    """Sequences of one length are a batch, to the bit."""
    if place != "cpu":
        pytest.skip("kernels sum such sequences in another order; each has been judged")
    q, k, v, grad_out = (random(rng, (2, 40, 2, 64), "bfloat16") for _ in range(4))
    ends = np.array([0, 40, 80], np.int32)
    options = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 40, "max_seqlen_kv": 40}
    dense = run(place, q, k, v, grad_out, {"causal": True})
    flat = (x.reshape(80, 2, 64) for x in (q, k, v, grad_out))
    behind = run(place, *flat, {"causal": True, **options})
    np.testing.assert_array_equal(dense[0].reshape(80, 2, 64), behind[0])
    np.testing.assert_array_equal(dense[1].transpose(1, 0, 2).reshape(2, 80), behind[1])
    for name, gradient in dense[2][1].items():
        np.testing.assert_array_equal(gradient.reshape(80, 2, 64), behind[2][1][name])


# ---- Order of work, layouts, errors ----


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_reruns_agree_to_the_bit(gpu, rng, name):
    """Everything but the grad_q of the default backward, which atomics sum."""
    q = random(rng, (2, 300, 4, 128), "bfloat16")
    k, v = (random(rng, (2, 333, 2, 128), "bfloat16") for _ in range(2))
    options = options_of(rng, OPTIONS[name], 2, 4, (300, 333), "bfloat16")
    first: list[bytes] = []
    for _ in range(20):
        out, lse, (atomic, fixed) = run(gpu, q, k, v, q, options)
        del atomic["grad_q"]
        bits = [x.tobytes() for x in (out, lse, *atomic.values(), *fixed.values())]
        first = first or bits
        assert bits == first


@pytest.mark.emulator
def test_the_order_of_threads_does_not_matter(request, monkeypatch, rng):
    monkeypatch.setenv("CUKIT_CACHE_DIR", str(request.config.cache.mkdir("cukit-kernels")))
    q, k, v, grad_out = (random(rng, (1, 70, 2, 64), "bfloat16") for _ in range(4))
    options = options_of(rng, OPTIONS["everything"], 1, 2, (70, 70), "bfloat16")
    results = []
    for seed in (0, 1):
        with cukit.backend("emulator", arch="sm_80", seed=seed, late=seed == 1):
            out, lse, (_, fixed) = run("emulator", q, k, v, grad_out, options)
        results.append([x.tobytes() for x in (out, lse, *fixed.values())])
    assert results[0] == results[1]


def test_strided_bias_and_mask_need_no_copy(place, rng):
    q, k, v, grad_out = (random(rng, (1, 40, 2, 64), "bfloat16") for _ in range(4))
    bias, mask = random(rng, (1, 2, 40, 40), "bfloat16"), rng.random((1, 2, 40, 40)) < 0.5
    dense = run(place, q, k, v, grad_out, {"bias": bias, "mask": mask})
    turned = [np.ascontiguousarray(x.transpose(3, 2, 1, 0)) for x in (bias, mask)]
    views = [x.transpose(3, 2, 1, 0) for x in to_device(place, *turned)]
    placed = to_device(place, q, k, v)
    options = {"bias": views[0], "mask": views[1]}
    out, lse = flash_attention(*placed, return_lse=True, **options)
    np.testing.assert_array_equal(to_host(out), dense[0])
    gradients = flash_attention_backward(
        *to_device(place, grad_out), *placed, out, lse, deterministic=True, **options
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


def test_errors_name_the_option(place, rng):
    q, k, v = to_device(place, *(random(rng, (2, 8, 2, 64), "float16") for _ in range(3)))
    (three,) = to_device(place, np.zeros(3, np.float32))
    (ends,) = to_device(place, np.array([0, 8], np.int32))

    def refuse(error, match, *inputs, **options):
        with pytest.raises(error, match=match):
            flash_attention(*(inputs or (q, k, v)), **options)

    refuse(ConfigError, "dropout is out of scope, got dropout=0.1", dropout=0.1)
    refuse(ConfigError, "softcap must be positive", softcap=0.0)
    refuse(ConfigError, r"window_size must be .* at least 0, got \(-1, 3\)", window_size=(-1, 3))
    refuse(ConfigError, "window_size must be a pair of integers", window_size=(1.5, 3))
    refuse(ConfigError, "q_descale is for float8 inputs, got float16", q_descale=three)
    refuse(ArrayShapeError, r"alibi_slopes must have shape \(2\)", alibi_slopes=three)
    refuse(ArrayDtypeError, "sinks must be float32", sinks=three[:2].astype(np.float16))
    refuse(ArrayShapeError, r"sinks must have shape", sinks=three)
    refuse(ArrayShapeError, r"bias must be broadcastable .* got shape \(3,\)", bias=three)
    refuse(ArrayDtypeError, "bias must be float16 or float32", bias=three.astype(np.int32))
    refuse(ArrayDtypeError, "mask must be bool, got float32", mask=three)
    refuse(ArrayShapeError, "v must have shape", q, k, v[:, :4])
    refuse(ConfigError, "got no cu_seqlens_kv, max_seqlen_q, max_seqlen_kv", cu_seqlens_q=ends)
    flat, lengths = (q[0], k[0], v[0]), {"max_seqlen_q": 8, "max_seqlen_kv": 8}
    both = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, **lengths}
    refuse(ArrayShapeError, "q must have 3 axes", **both)
    refuse(
        ArrayDtypeError, "cu_seqlens_q must be int32", *flat,
        **both | {"cu_seqlens_q": ends.astype(np.int64)},
    )  # fmt: skip
    refuse(
        ArrayShapeError, "must both have num_sequences", *flat,
        **both | {"cu_seqlens_kv": to_device(place, np.array([0, 3, 8], np.int32))[0]},
    )  # fmt: skip
    if place != "gpu":
        for wrong in ([0, 9], [1, 8], [0, 7]):
            (bad,) = to_device(place, np.array(wrong, np.int32))
            refuse(
                ConfigError,
                "cu_seqlens_q must rise from 0 to 8",
                *flat,
                **both | {"cu_seqlens_q": bad},
            )
        refuse(ConfigError, "more than max_seqlen_kv=7", *flat, **both | {"max_seqlen_kv": 7})
    out, lse = flash_attention(q, k, v, return_lse=True)
    with pytest.raises(ConfigError, match="flash_attention_backward: dropout is out of scope"):
        flash_attention_backward(out, q, k, v, out, lse, dropout=0.5)
    with pytest.raises(ArrayShapeError, match="flash_attention_backward: sinks must have shape"):
        flash_attention_backward(out, q, k, v, out, lse, sinks=three)


def test_a_bias_of_bytes_is_refused(rng):
    q = random(rng, (1, 4, 1, 8), "float32")
    packed = np.zeros(4 * 6, np.uint8)[1:21].view(np.float32)
    uneven = np.lib.stride_tricks.as_strided(packed, (4,), (5,))
    with pytest.raises(ArrayLayoutError, match="strides of bias must be whole elements"):
        flash_attention(q, q, q, bias=uneven)
