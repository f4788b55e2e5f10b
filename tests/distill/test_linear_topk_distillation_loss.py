"""linear_topk_distillation_loss and linear_sampled_distillation_loss, compared with the losses
on logits."""

from __future__ import annotations

import numpy as np
import pytest

from cukit import distill
from cukit.errors import ArrayShapeError, ConfigError
from cukit.gemm import matmul
from tests.contract import DTYPES, poison_pool, random, to_device, to_host

TOKENS, HIDDEN, VOCAB, KNOWN = 70, 24, 1003, 12
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["renormalise", "bucket", "sampled"])
@pytest.mark.parametrize("chunk_tokens", [None, 32])
def test_equals_the_loss_on_logits(device, rng, dtype, kind, chunk_tokens):
    hidden, weight = random(rng, (TOKENS, HIDDEN), dtype), random(rng, (VOCAB, HIDDEN), dtype, 0.3)
    log_probs, ids = distill.teacher_top_k(random(rng, (TOKENS, VOCAB), "float32", 2), KNOWN)
    options = {"temperature": 2.0}
    known = (ids, np.exp(log_probs)) if kind == "sampled" else (log_probs, ids)
    name = "sampled_distillation_loss" if kind == "sampled" else "topk_distillation_loss"
    if kind != "sampled":
        options["tail"] = kind
    logits = matmul(hidden, weight, transpose_b=True)
    loss, grad = getattr(distill, name)(logits, *known, return_grad=True, **options)
    placed = to_device(device, hidden, weight, *known)
    poison_pool(device)
    fused = getattr(distill, f"linear_{name}")
    got = fused(*placed, chunk_tokens=chunk_tokens, **options)
    again = fused(*placed, chunk_tokens=chunk_tokens, **options)
    grad = grad.astype(np.float64)
    expected = {
        "loss": loss,
        "soft_loss": loss,
        "grad_hidden": grad @ weight.astype(np.float64),
        "grad_weight": grad.T @ hidden.astype(np.float64),
    }
    for name, value in expected.items():
        found, scale = to_host(getattr(got, name)), np.abs(value).max()
        np.testing.assert_allclose(
            found.astype(np.float64), value, atol=TOLERANCE[dtype] * scale, err_msg=name
        )
        assert found.tobytes() == to_host(getattr(again, name)).tobytes(), name
    assert not float(to_host(got.hard_loss))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tail": "sampled"}, ConfigError, "tail must be one of"),
        ({"teacher_ids": np.zeros((2, 1), np.int32)}, ArrayShapeError, "teacher_ids must have"),
        ({"bias": np.ones(4, np.float32)}, ArrayShapeError, "bias must have shape"),
        ({"hard_weight": 1.0}, ConfigError, "hard_weight=1.0 needs targets"),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    good = {
        "hidden": np.ones((3, 4), np.float32),
        "weight": np.ones((5, 4), np.float32),
        "teacher_log_probs": np.full((3, 2), -1, np.float32),
        "teacher_ids": np.array([[0, 1]] * 3, np.int32),
    }
    with pytest.raises(error, match=f"linear_topk_distillation_loss: {message}"):
        distill.linear_topk_distillation_loss(**{**good, **arguments})
