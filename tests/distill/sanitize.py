"""Groups for `tests.sanitize`: rows of one column to rows that exceed the shared memory of a
cluster."""

from __future__ import annotations

import itertools

import numpy as np

from cukit import distill
from cukit.distill import AdamWState
from cukit.distill.losses._loss_options import DIVERGENCES
from tests.contract import random, to_device
from tests.distill.test_adamw import OPTIONS, SHAPES
from tests.distill.test_cross_entropy import targets_for
from tests.distributed.ranks import Mirrored
from tests.sanitize import Group

ROWS = [(2, 1), (5, 7), (9, 1001), (2, 32768), (2, 50257), (1, 131071), (1, 300001)]


def _rng() -> np.random.Generator:
    return np.random.default_rng(3)


def cross_entropy() -> None:
    rng = _rng()
    for shape, dtype in itertools.product(ROWS, ("float32", "bfloat16")):
        logits, targets = to_device("gpu", random(rng, shape, dtype), targets_for(rng, shape))
        for reduction in ("mean", "none"):
            loss = distill.cross_entropy(logits, targets, reduction=reduction)
            distill.cross_entropy_backward(loss, logits, targets, reduction=reduction)
        distill.cross_entropy(logits, targets, return_grad=True, inplace=True)


def kl_divergence() -> None:
    rng = _rng()
    for shape, dtype in itertools.product(ROWS, ("float32", "bfloat16")):
        arrays = (random(rng, shape, dtype), random(rng, shape, dtype), targets_for(rng, shape))
        student, teacher, targets = to_device("gpu", *arrays)
        options = {"temperature": 2.0, "targets": targets}
        loss = distill.kl_divergence(student, teacher, **options)
        distill.kl_divergence_backward(loss, student, teacher, **options)
        distill.kl_divergence(student, teacher, return_grad=True, reduction="none")


def divergences() -> None:
    rng = _rng()
    for shape, divergence in itertools.product(ROWS, DIVERGENCES[1:]):
        arrays = random(rng, shape, "bfloat16"), random(rng, shape, "bfloat16")
        student, teacher, targets = to_device("gpu", *arrays, targets_for(rng, shape))
        options = {"targets": targets, "hard_weight": 0.5, "return_grad": True}
        distill.distillation_loss(student, teacher, divergence=divergence, **options)
    for shape, tail in itertools.product(ROWS, ("renormalise", "bucket")):
        log_probs, ids = distill.teacher_top_k(random(rng, shape, "float32"), min(20, shape[1]))
        arrays = to_device("gpu", random(rng, shape, "bfloat16"), log_probs, ids)
        distill.topk_distillation_loss(*arrays, tail=tail, return_grad=True)


def options() -> None:
    """Token weights, softcaps, a padded vocabulary, and teachers given by samples."""
    rng = _rng()
    for shape in ROWS[1:]:
        rows, width = shape
        student, teacher = (random(rng, (rows, width + extra), "bfloat16") for extra in (3, 8))
        weights = np.ones(rows, np.float32)
        arrays = (student, teacher, targets_for(rng, shape), weights)
        student, teacher, targets, weights = to_device("gpu", *arrays)
        common = {"vocab_size": width, "token_weights": weights, "softcap": 5.0}
        common |= {"return_grad": True, "targets": targets}
        distill.cross_entropy(student, **common)
        for divergence in ("forward_kl", "jsd"):
            distill.distillation_loss(
                student, teacher, divergence=divergence, teacher_softcap=7.0, hard_weight=0.5,
                **common,
            )  # fmt: skip
        ids = rng.integers(0, width, (rows, 20)).astype(np.int32)
        distill.sampled_distillation_loss(student, *to_device("gpu", ids), **common)


def linear_losses() -> None:
    """Rows are whole 16-byte vectors: of other rows, cuBLAS reads padding without using it."""
    rng = _rng()
    for dtype in ("float32", "bfloat16"):
        arrays = [random(rng, shape, dtype) for shape in ((40, 64), (504, 64), (40, 48), (504, 48))]
        hidden, weight, teacher, teacher_weight = to_device("gpu", *arrays)
        (targets,) = to_device("gpu", targets_for(rng, (40, 504)))
        distill.linear_cross_entropy(hidden, weight, targets, chunk_tokens=16)
        distill.linear_kl_divergence(
            hidden, weight, teacher, teacher_weight, targets=targets, hard_weight=0.5,
            chunk_tokens=16,
        )  # fmt: skip


def sharded_heads() -> None:
    """Every phase of the sharded losses, on a part of each row."""
    rng = _rng()
    for vocab_size in (37, 1008, 70000):
        shard = distill.VocabularyShard(Mirrored(), vocab_size)
        shapes = ((20, 64), (shard.size, 64), (20, 48), (shard.size, 48))
        arrays = to_device("gpu", *(random(rng, shape, "bfloat16") for shape in shapes))
        (targets,) = to_device("gpu", targets_for(rng, (20, vocab_size)))
        for divergence in ("forward_kl", "jsd"):
            distill.vocabulary_parallel_distillation_loss(
                *arrays, shard=shard, targets=targets, hard_weight=0.5, divergence=divergence,
                chunk_tokens=16,
            )  # fmt: skip
        distill.vocabulary_parallel_cross_entropy(*arrays[:2], targets, shard=shard)


def optimizer() -> None:
    rng = _rng()
    for dtype in ("float32", "bfloat16"):
        params, grads = (
            list(to_device("gpu", *(np.asarray(random(rng, shape, dtype)) for shape in SHAPES)))
            for _ in range(2)
        )
        scale = distill.global_norm(grads)
        state = AdamWState.for_params(params)
        distill.adamw(params, grads, state, step=1, grad_scale=scale, **OPTIONS)
        distill.ema_update(state.master, grads, 0.9, params)


GROUPS = {
    "cross_entropy": Group(cross_entropy, shares=True, quick=True),
    "kl_divergence": Group(kl_divergence, shares=True),
    "divergences": Group(divergences, shares=True),
    "options": Group(options, shares=True),
    "linear losses": Group(linear_losses),
    "sharded heads": Group(sharded_heads),
    "optimizer": Group(optimizer, shares=True, quick=True),
}
