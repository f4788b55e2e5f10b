"""embedding and its backward, and the sort of ids that it uses."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.errors import ArrayDtypeError, ArrayError, ArrayShapeError, ConfigError
from cukit.layers import embedding, embedding_backward
from cukit.layers._id_sort import plan_id_sort, sort_ids
from cukit.layers.embedding import plan_embedding_backward
from cukit.reference import embedding as reference
from tests.contract import (
    DTYPES,
    check_against_reference,
    check_gradient,
    poisoned,
    random,
    to_device,
    to_host,
)


def ids_of(rng, kind, num_tokens, num_embeddings):
    """Token ids: all equal, ascending, uniformly distributed, or as skewed as text."""
    if kind == "equal":
        return np.full(num_tokens, num_embeddings - 1)
    if kind == "rising":
        return np.arange(num_tokens) % num_embeddings
    if kind == "uniform":
        return rng.integers(0, num_embeddings, num_tokens)
    return np.minimum(rng.zipf(1.3, num_tokens), num_embeddings) - 1


KINDS = ["equal", "rising", "uniform", "skewed"]

# num_embeddings, hidden, shape of ids: scalar accesses, several slices of columns, partial chunks,
# sorts of one and of several passes, sorts of several chunks.
SIZES = [
    (5, 8, (3,)),
    (1, 3, (65,)),
    (256, 129, (2, 100)),
    (256, 512, (4, 1025)),
    (1023, 72, (64,)),
    (1024, 2056, (130,)),
    (70_001, 16, (9, 500)),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
def test_matches_reference(device, rng, size, dtype, id_dtype):
    num_embeddings, hidden, shape = size
    ids = rng.integers(0, num_embeddings, shape).astype(id_dtype)
    weight = random(rng, (num_embeddings, hidden), dtype)
    check_against_reference(
        lambda weight: embedding(to_device(device, ids)[0], weight),
        lambda weight: reference.embedding(ids, weight),
        (weight,),
        device=device,
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_matches_reference(device, rng, size, kind, dtype):
    num_embeddings, hidden, shape = size
    ids = ids_of(rng, kind, int(np.prod(shape)), num_embeddings).reshape(shape).astype(np.int32)
    grad_out = random(rng, (*shape, hidden), dtype)
    check_against_reference(
        embedding_backward,
        reference.embedding_backward,
        (grad_out, ids, num_embeddings),
        device=device,
        names=("grad_weight",),
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_backward_can_keep_the_full_sums(device, rng, dtype):
    ids = rng.integers(0, 7, 300)
    check_against_reference(
        embedding_backward,
        reference.embedding_backward,
        (random(rng, (300, 40), dtype), ids, 7),
        device=device,
        names=("grad_weight",),
        dtype=np.dtype(np.float32),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 31, 2048, 2049, 100_003])
@pytest.mark.parametrize("num_keys", [1, 255, 256, 1023, 1024, 50_257, 2**20, 2**31 - 1])
@pytest.mark.parametrize("kind", KINDS)
def test_sort_is_stable_and_complete(rng, num_tokens, num_keys, kind):
    ids = ids_of(rng, kind, num_tokens, num_keys).astype(np.int64)
    ids[rng.random(num_tokens) < 0.01] = -1
    ids[rng.random(num_tokens) < 0.01] = 2**40
    keys, tokens = map(to_host, sort_ids(to_device("gpu", ids)[0], num_keys))
    clipped = np.where((ids < 0) | (ids >= num_keys), num_keys, ids)
    order = np.argsort(clipped, kind="stable")
    np.testing.assert_array_equal(tokens, order)
    np.testing.assert_array_equal(keys, clipped[order])


@pytest.mark.gpu
def test_ids_outside_the_table(rng):
    """The forward returns rows of NaN for these ids; the backward ignores their grad_out rows."""
    ids = np.array([3, -1, 0, 4, 3], np.int64)
    weight, grad_out = random(rng, (4, 24), "float16"), random(rng, (5, 24), "float32")
    grad_out[[1, 3]] = np.nan
    placed_ids, placed_weight, placed_grad = to_device("gpu", ids, weight, grad_out)
    rows = to_host(embedding(placed_ids, placed_weight))
    np.testing.assert_array_equal(rows[[0, 2, 4]], weight[[3, 0, 3]])
    assert np.isnan(rows[[1, 3]].astype(np.float32)).all()
    kept = [0, 2, 4]
    np.testing.assert_allclose(
        to_host(embedding_backward(placed_grad, placed_ids, 4)),
        reference.embedding_backward(grad_out[kept], ids[kept], 4),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("ids", [[0, 4], [-1, 0]])
def test_ids_outside_the_table_raise_on_the_cpu(ids):
    with pytest.raises(ArrayError, match="ids must be 0 to 3"):
        embedding(np.array(ids), np.ones((4, 2), np.float32))
    with pytest.raises(ArrayError, match="ids must be 0 to 3"):
        embedding_backward(np.ones((2, 2), np.float32), np.array(ids), 4)


def test_gradient_by_finite_differences(rng):
    ids = rng.integers(0, 6, (3, 5))
    check_gradient(
        lambda weight: reference.embedding(ids, weight),
        lambda grad_out, weight: (reference.embedding_backward(grad_out, ids, 6),),
        (rng.standard_normal((6, 4)),),
        rng,
    )


def test_out_is_filled_and_returned(device, rng):
    ids, weight = to_device(device, np.array([[2, 0, 1]]), random(rng, (3, 40), "float32"))
    out = poisoned(device, (1, 3, 40), "float32")
    assert embedding(ids, weight, out=out) is out
    np.testing.assert_array_equal(to_host(out)[0], to_host(weight)[[2, 0, 1]])


def test_no_tokens(device):
    ids, weight = to_device(device, np.zeros((2, 0), np.int32), np.ones((3, 8), np.float32))
    rows = embedding(ids, weight)
    assert rows.shape == (2, 0, 8)
    grad_weight = embedding_backward(rows, ids, 3)
    assert grad_weight.shape == (3, 8)
    assert not to_host(grad_weight).any()


def test_errors_name_the_argument():
    ids, weight = np.zeros(3, np.int32), np.ones((4, 2), np.float32)
    with pytest.raises(ArrayDtypeError, match="embedding: ids must be int32, int64"):
        embedding(ids.astype(np.float32), weight)
    with pytest.raises(ArrayShapeError, match="embedding: weight must have 2 axes"):
        embedding(ids, weight[0])
    with pytest.raises(ArrayShapeError, match=r"embedding: out must have shape \(3, 2\)"):
        embedding(ids, weight, out=weight.copy())
    with pytest.raises(ArrayShapeError, match=r"grad_out must have shape \(3, any\)"):
        embedding_backward(weight, ids, 4)
    with pytest.raises(ConfigError, match="num_embeddings must be an integer of 0 or more"):
        embedding_backward(weight[:3], ids, -1)
    with pytest.raises(ArrayDtypeError, match="dtype must be float32"):
        embedding_backward(weight[:3], ids, 4, dtype=np.int32)


@pytest.mark.parametrize("num_tokens", [1, 2048, 100_000, 10**7, 2**31 - 1])
@pytest.mark.parametrize("num_keys", [1, 255, 256, 1023, 1024, 256_000, 2**31 - 1])
def test_sort_plan_covers_every_key_and_token(num_tokens, num_keys):
    config = plan_id_sort(num_tokens, num_keys)
    assert 8 <= config.digit_bits <= 10
    assert config.digit_bits * config.num_passes >= num_keys.bit_length()
    assert (config.num_passes - 1) * config.digit_bits < 32
    assert config.num_chunks * config.chunk >= num_tokens
    assert config.num_chunks <= 64


@pytest.mark.parametrize("hidden", [1, 3, 64, 129, 4096, 4100])
def test_plan_covers_every_column(hidden):
    vec = next(v for v in (8, 4, 2, 1) if hidden % v == 0)
    config = plan_embedding_backward(1000, hidden, "bfloat16", vec, "float32")
    assert config.slices * config.threads * config.vec >= hidden
    assert config.join_slices * config.join_threads * config.join_vec >= hidden
    assert config.num_chunks * config.span >= 1000
