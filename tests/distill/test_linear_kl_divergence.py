"""linear_kl_divergence: the default of linear_distillation_loss, under its own name."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.distill import linear_distillation_loss, linear_kl_divergence
from cukit.errors import ArrayShapeError
from tests.contract import to_device, to_host
from tests.distill.test_linear_distillation_loss import head


def test_equals_the_forward_kl(device, rng):
    *placed, targets = to_device(device, *head(rng, "float32"))
    options = {"targets": targets, "hard_weight": 0.5, "temperature": 2.0}
    general = linear_distillation_loss(*placed, divergence="forward_kl", **options)
    for a, b in zip(linear_kl_divergence(*placed, **options)[:5], general[:5], strict=True):
        assert to_host(a).tobytes() == to_host(b).tobytes()


def test_errors_name_the_op():
    ones = np.ones((2, 4), np.float32)
    with pytest.raises(ArrayShapeError, match="linear_kl_divergence: weight must have shape"):
        linear_kl_divergence(ones, np.ones((5, 3), np.float32), ones, ones)
