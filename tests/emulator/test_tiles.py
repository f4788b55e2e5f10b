"""SharedTile (common/hopper/shared_tile.cuh): products of K-major and MN-major tiles with every
swizzle."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from cukit.core.device import current_device, parse_arch
from cukit.core.kernel import KernelSpec, load_kernel
from cukit.core.tensor_map import encode_tensor_map
from tests.contract import to_device, to_host
from tests.devices import kernels_only
from tests.emulator.vectors import KERNELS

ROWS, COLUMNS, DEPTH = 128, 128, 128
SWIZZLES = {"none": (0, 0), "128": (1, 128), "64": (2, 64), "32": (3, 32)}
CHUNK_BYTES = 16
ITEM_BYTES = 2


@kernels_only
@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize(("a_mn", "b_mn"), list(product([False, True], repeat=2)))
@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_products_of_tiles_are_exact(device, rng, swizzle, a_mn, b_mn, staged):
    if current_device().compute_capability < parse_arch("sm_90"):
        pytest.skip("needs sm_90")
    code, width = SWIZZLES[swizzle]
    a = rng.integers(-2, 3, (ROWS, DEPTH)).astype(np.float16)
    b = rng.integers(-2, 3, (COLUMNS, DEPTH)).astype(np.float16)
    expected = a.astype(np.float64) @ b.astype(np.float64).T  # also exact in float16
    # MN-major operands are stored transposed: [k, m] and [k, n].
    placed = to_device(device, *(x.T.copy() if mn else x for x, mn in ((a, a_mn), (b, b_mn))))
    (out,) = to_device(device, np.full((ROWS, COLUMNS), np.nan, np.float16))
    box_columns = (width or CHUNK_BYTES) // ITEM_BYTES
    maps = [
        encode_tensor_map(each, (each.shape[0], box_columns), swizzle_bytes=width)
        for each in placed
    ]
    spec = KernelSpec(
        str(KERNELS / "tiles_sm90.cu"),
        "tile_product",
        (
            ("SWIZZLE", code),
            ("A_MN", a_mn),
            ("B_MN", b_mn),
            ("COLUMNS", COLUMNS),
            ("DEPTH", DEPTH),
            ("STAGED", staged),
        ),
        384,
        ITEM_BYTES * (DEPTH * (ROWS + COLUMNS) + ROWS * COLUMNS),
    )
    load_kernel(spec)((1,), (*maps, encode_tensor_map(out, (64, 64)), out))
    np.testing.assert_array_equal(to_host(out).astype(np.float64), expected)
