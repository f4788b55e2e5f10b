"""Named views into one flat array."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.errors import DataError
from cukit.models import Parameters
from cukit.models.parameters import ALIGNMENT
from tests.models.small import CPU_AND_GPU

SHAPES = {"norm": (5,), "wide": (3, 7), "bias": (2,), "square": (4, 4)}


def test_views_share_the_flat_array_matrices_first() -> None:
    parameters = Parameters(SHAPES, np.float32)
    assert list(parameters) == list(SHAPES)
    for number, name in enumerate(parameters, start=1):
        parameters[name][...] = number
    matrices, vectors = parameters.groups()
    assert set(np.unique(matrices)) == {0, 2, 4}
    assert set(np.unique(vectors)) == {0, 1, 3}
    assert parameters.flat.size == matrices.size + vectors.size
    for array in parameters.values():
        offset = array.ctypes.data - parameters.flat.ctypes.data
        assert offset % (ALIGNMENT * 4) == 0


@CPU_AND_GPU
def test_clear_zeroes_everything(device: str) -> None:
    xp = pytest.importorskip("cupy") if device == "gpu" else np
    parameters = Parameters(SHAPES, np.float32, xp)
    parameters.flat[...] = 3
    parameters.clear()
    assert float(abs(parameters.flat).sum()) == 0


def test_load_is_all_or_nothing() -> None:
    parameters = Parameters(SHAPES, np.float32)
    good = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    for bad, message in (
        ({k: v for k, v in good.items() if k != "wide"}, "wide is missing"),
        (good | {"more": np.ones(1)}, "more is not part"),
        (good | {"bias": np.ones(3)}, r"bias has shape \(3,\), expected \(2,\)"),
    ):
        with pytest.raises(DataError, match=f"here: {message}"):
            parameters.load(bad, "here")
        assert not parameters.flat.any()
    parameters.load(good, "here")
    assert all((array == 1).all() for array in parameters.values())


def test_to_host_copies() -> None:
    parameters = Parameters(SHAPES, np.float32)
    host = parameters.to_host()
    host["wide"][...] = 1
    assert not parameters["wide"].any()
