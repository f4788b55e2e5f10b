"""FlashInfer's paged attention as a peer.

Plans are made before the timed call, because a model makes them once for all its layers.
`flashinfer-python` compiles a kernel with nvcc on first use, unless `data/aot` in its folder
contains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from profiling import peers
from profiling.case import Call, PeerMissing

_WORKSPACE_BYTES = 512 << 20


class Pages:
    """The blocks of each request, in FlashInfer's format."""

    def __init__(self, table: Any, lengths: Sequence[int], block_size: int) -> None:
        """`table`: int32 [batch, blocks], on the GPU."""
        torch = peers.torch()
        counts = [-(-length // block_size) for length in lengths]
        rows = peers.to_torch(table)
        self.ends = _integers([0, *np.cumsum(counts).tolist()])
        self.indices = torch.cat([rows[b, :count] for b, count in enumerate(counts)])
        self.last_lens = _integers([(length - 1) % block_size + 1 for length in lengths])


def _integers(values: Sequence[int]) -> Any:
    return peers.torch().tensor(values, dtype=peers.torch().int32, device="cuda")


def _workspace() -> Any:
    torch = peers.torch()
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _plan(wrapper: Any, *args: Any, **options: Any) -> None:
    """Call wrapper.plan, which compiles the kernel; raise PeerMissing if that fails."""
    try:
        wrapper.plan(*args, **options)
    except RuntimeError as error:
        raise PeerMissing(f"flashinfer: {str(error).splitlines()[0][:200]}") from None


def decode(
    q: Any, k: Any, v: Any, table: Any, lengths: Sequence[int], scale: float | None = None
) -> Call:
    """BatchDecodeWithPagedKVCacheWrapper on tensor cores.

    scale: the scale of an FP8 cache; None for a bfloat16 cache.
    """
    module, torch = peers.optional("flashinfer.decode"), peers.torch()
    _, block_size, heads_kv, head_dim = k.shape
    pages = Pages(table, lengths, block_size)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(), "NHD", use_tensor_cores=True, backend="fa2"
    )
    stored = torch.bfloat16 if scale is None else torch.float8_e4m3fn
    _plan(
        wrapper,
        *(pages.ends, pages.indices, pages.last_lens, q.shape[2], heads_kv, head_dim, block_size),
        q_data_type=torch.bfloat16,
        kv_data_type=stored,
        o_data_type=torch.bfloat16,
    )
    scales = {} if scale is None else {"k_scale": scale, "v_scale": scale}

    def function(q: Any, k: Any, v: Any) -> Any:
        out = wrapper.run(q[:, 0], (k.view(stored), v.view(stored)), **scales)
        return out[:, None]

    return peers.forward(function, q, k, v)


def prefill(
    q: Any,
    k: Any,
    v: Any,
    table: Any,
    queries: Sequence[int],
    lengths: Sequence[int],
    backend: str,
    scale: float | None = None,
) -> Call:
    """BatchPrefillWithPagedKVCacheWrapper, causal.

    queries, lengths: queries and keys of each request. backend: "fa2" or "fa3". scale: the scale of
    an FP8 cache; None for a bfloat16 cache.
    """
    module, torch = peers.optional("flashinfer.prefill"), peers.torch()
    _, block_size, heads_kv, head_dim = k.shape
    pages = Pages(table, lengths, block_size)
    stored = torch.bfloat16 if scale is None else torch.float8_e4m3fn
    wrapper = module.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend=backend)
    _plan(
        wrapper,
        *(_integers([0, *np.cumsum(queries).tolist()]), pages.ends, pages.indices, pages.last_lens),
        *(q.shape[-2], heads_kv, head_dim, block_size),
        causal=True,
        q_data_type=torch.bfloat16,
        kv_data_type=stored,
    )
    scales = {} if scale is None else {"k_scale": scale, "v_scale": scale}

    def function(q: Any, k: Any, v: Any) -> Any:
        rows = q.reshape(-1, *q.shape[-2:])
        return wrapper.run(rows, (k.view(stored), v.view(stored)), **scales).reshape(q.shape)

    return peers.forward(function, q, k, v)


def cascade(q: Any, k: Any, v: Any, table: Any, shared: int, own: int) -> Call:
    """MultiLevelCascadeAttentionWrapper with two levels: `shared` keys of all requests, then `own`
    keys per request."""
    module, torch = peers.optional("flashinfer.cascade"), peers.torch()
    _, block_size, heads_kv, head_dim = k.shape
    batch, _, heads_q, _ = q.shape
    first = Pages(table[:1], [shared], block_size)
    last = Pages(table[:, shared // block_size :], [own] * batch, block_size)
    wrapper = module.MultiLevelCascadeAttentionWrapper(2, _workspace(), "NHD")
    _plan(
        wrapper,
        [_integers([0, batch]), _integers(range(batch + 1))],
        [first.ends, last.ends],
        [first.indices, last.indices],
        [first.last_lens, last.last_lens],
        *(heads_q, heads_kv, head_dim, block_size),
        q_data_type=torch.bfloat16,
    )

    def function(q: Any, k: Any, v: Any) -> Any:
        return wrapper.run(q[:, 0], (k, v))[:, None]

    return peers.forward(function, q, k, v)
