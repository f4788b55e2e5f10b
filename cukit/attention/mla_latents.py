"""Latents as float8 codes, in the layout that mla_attention reads."""

from __future__ import annotations

from cukit.core.arrays import KERNEL_DTYPES, Array, adopt, bfloat16, check_array, float32, namespace
from cukit.core.narrow_dtype import float8_e4m3
from cukit.core.quantized_array import QuantizedArray
from cukit.reference.mla_attention import GROUP, LATENT_DIM, ROPE_DIM

_OP = "encode_mla_latents"


def encode_mla_latents(latents: Array) -> Array:
    """Rows of a latent cache as float8: 656 bytes a token instead of 1152.

    512 codes (float8_e4m3), 4 float32 scales, each the largest magnitude of 128 columns divided by
    448, and the 64 rotated columns as bfloat16. To be written to slots of a uint8 cache
    [num_blocks, 64, 1, 656], of which :func:`mla_attention` takes the place of the rows.

    Args:
        latents: float32|float16|bfloat16 [..., 576]: 512 columns of latent, 64 of rotated key.

    Returns:
        uint8 [..., 656].

    Raises:
        ArrayError: dtype or shape of the argument.

    Runs on CuPy's current stream.

    >>> import numpy as np, cukit as ck
    >>> ck.encode_mla_latents(np.ones((3, 1, 576), np.float32)).shape
    (3, 1, 656)
    """
    (latents,) = adopt(_OP, latents)
    check_array(_OP, "latents", latents, dtypes=KERNEL_DTYPES, least_ndim=1, contiguous=None)
    *extents, _ = latents.shape
    check_array(_OP, "latents", latents, shape=(*extents, LATENT_DIM + ROPE_DIM), contiguous=None)
    xp = namespace(latents)
    rows = latents.reshape(-1, LATENT_DIM + ROPE_DIM)
    values = xp.ascontiguousarray(rows[:, :LATENT_DIM], dtype=float32)
    groups = abs(values).reshape(len(rows), LATENT_DIM // GROUP, GROUP)
    scales = groups.max(axis=-1) / float32.type(float8_e4m3.most)
    codes = QuantizedArray.encode(values, float8_e4m3, scales=scales, axis=1, group_size=GROUP)
    rope = xp.ascontiguousarray(rows[:, LATENT_DIM:], dtype=bfloat16)
    parts = codes.storage, scales.view(xp.uint8), rope.view(xp.uint8)
    encoded: Array = xp.concatenate(parts, axis=1)
    return encoded.reshape(*extents, encoded.shape[1])
