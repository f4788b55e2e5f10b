"""Projections of latent attention with the up-projections of keys and values absorbed."""

from __future__ import annotations

from cukit.core.arrays import FLOAT_DTYPES, Array, adopt, check_array, check_same_dtype, namespace
from cukit.errors import ArrayLayoutError, ArrayShapeError
from cukit.reference import mla_attention as reference

_OP = "absorb_mla_projections"


def absorb_mla_projections(w_q: Array, w_o: Array, w_uk: Array, w_uv: Array) -> tuple[Array, Array]:
    """Query and output projections of attention that sees latents in place of keys and values.

        score = (W_q x)^T (W_uk c) = (W_uk^T W_q x)^T c;    W_o (W_uv o) = (W_o W_uv) o

    The rotated columns of the queries are left as they are. Called once, when weights are loaded.

    Args:
        w_q: float32|float16|bfloat16 (float64 on the CPU) [num_heads * (nope_dim + rope_dim),
            q_rank], C-contiguous, of each head first the rows without, then those with rotation.
        w_o: dtype of w_q, [hidden, num_heads * value_dim], C-contiguous.
        w_uk: dtype of w_q, [num_heads, nope_dim, latent_dim], keys from latents.
        w_uv: dtype of w_q, [num_heads, value_dim, latent_dim], values from latents.

    Returns:
        w_q of [num_heads * (latent_dim + rope_dim), q_rank], whose queries
        :func:`mla_attention` takes, and w_o of [hidden, num_heads * latent_dim] for its output.
        They are latent_dim / nope_dim times as large: for many tokens at a time W_q and then W_uk
        by heads is less work.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.

    Products are float32 (float64 of float64), rounded once, on the arrays' device.
    Paper: DeepSeek-AI, DeepSeek-V2, arXiv:2405.04434, section 2.1.2.

    >>> import numpy as np, cukit as ck
    >>> rng = np.random.default_rng(0)
    >>> shapes = (2 * (3 + 2), 7), (9, 2 * 4), (2, 3, 6), (2, 4, 6)
    >>> w_q, w_o = ck.absorb_mla_projections(*(rng.standard_normal(shape) for shape in shapes))
    >>> w_q.shape, w_o.shape
    ((16, 7), (9, 12))
    """
    w_q, w_o, w_uk, w_uv = arrays = adopt(_OP, w_q, w_o, w_uk, w_uv)
    check_array(_OP, "w_q", w_q, dtypes=FLOAT_DTYPES, ndim=2)
    check_array(_OP, "w_uk", w_uk, dtypes=FLOAT_DTYPES, ndim=3)
    heads, nope, latent = w_uk.shape
    check_array(_OP, "w_uv", w_uv, dtypes=FLOAT_DTYPES, shape=(heads, None, latent))
    check_array(_OP, "w_o", w_o, dtypes=FLOAT_DTYPES, shape=(None, heads * w_uv.shape[1]))
    check_same_dtype(_OP, w_q=w_q, w_o=w_o, w_uk=w_uk, w_uv=w_uv)
    if len({namespace(array) for array in arrays}) > 1:
        raise ArrayLayoutError(f"{_OP}: all arrays must be on one device")
    if not heads or w_q.shape[0] % heads or w_q.shape[0] < heads * nope:
        raise ArrayShapeError(
            f"{_OP}: w_q must have a multiple of num_heads = {heads} rows, at least nope_dim = "
            f"{nope} a head, got {w_q.shape}"
        )
    return reference.absorb_mla_projections(*arrays)
