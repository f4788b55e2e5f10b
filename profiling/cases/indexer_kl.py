"""Cases of the loss of a sparse-attention indexer: GQA heads, and the heads of DeepSeek-V3.2, over
all keys and over selected ones.

The peer is the straightforward torch code with all score matrices, eager and compiled. It is
skipped for sequences longer than LONGEST_PEER, whose matrices do not fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from cukit.attention import flash_attention, indexer_kl, indexer_kl_backward
from cukit.reference import indexer_kl as reference
from profiling.case import Case, PeerMissing, Workload, itemsize
from profiling.data import array_module, normal
from profiling.standard_impls import backward_impls, forward_impls

LONGEST_PEER = 4096
CHECKED_ROWS = 512
"""Queries per chunk of the reference."""

DTYPE = "bfloat16"


@dataclass(frozen=True)
class Shape:
    """Causal attention (suffix _t) and its indexer (suffix _s)."""

    batch: int
    seq_len: int
    num_heads_t: int
    num_kv_heads_t: int
    head_dim_t: int
    num_heads_s: int
    head_dim_s: int
    top_k: int | None = None

    def __str__(self) -> str:
        heads = str(self.num_heads_t)
        if self.num_kv_heads_t != self.num_heads_t:
            heads += f"/{self.num_kv_heads_t}"
        chosen = "" if self.top_k is None else f" top {self.top_k}"
        return (
            f"d{self.head_dim_t} {self.batch}x{heads}x{self.seq_len}, index d{self.head_dim_s} "
            f"x{self.num_heads_s}{chosen}"
        )

    def flops(self, student_products: int) -> float:
        """FLOPs of one product of the teacher and `student_products` products of the student, for
        the unmasked half of the pairs; `top_k` is ignored."""
        columns = self.num_heads_t * self.head_dim_t
        columns += student_products * self.num_heads_s * self.head_dim_s
        return float(self.batch * columns * self.seq_len**2)

    def bytes(self, *, backward: bool) -> float:
        """Bytes of all inputs and, if `backward`, of the gradients of the indexer's inputs."""
        teacher = (self.num_heads_t + self.num_kv_heads_t) * self.head_dim_t * itemsize(DTYPE)
        teacher += self.num_heads_t * itemsize("float32")  # the log-sum-exps
        indexer = (self.num_heads_s + 1) * self.head_dim_s * itemsize(DTYPE)
        indexer += self.num_heads_s * itemsize("float32")  # the weights of the heads
        selected = 0 if self.top_k is None else self.top_k * itemsize("int32")
        row = teacher + indexer * (2 if backward else 1) + selected
        return float(self.batch * self.seq_len * row)

    def arrays(self) -> tuple[Any, ...]:
        """q_t, k_t, lse_t, q_s, k_s, weights."""
        rows = (self.batch, self.seq_len)
        q_t = normal((*rows, self.num_heads_t, self.head_dim_t), DTYPE)
        k_t = normal((*rows, self.num_kv_heads_t, self.head_dim_t), DTYPE)
        q_s = normal((*rows, self.num_heads_s, self.head_dim_s), DTYPE)
        k_s = normal((*rows, self.head_dim_s), DTYPE)
        weights = normal((*rows, self.num_heads_s), "float32")
        weights *= (self.num_heads_s * self.head_dim_s) ** -0.5
        _, lse = flash_attention(q_t, k_t, k_t, causal=True, return_lse=True)
        return q_t, k_t, lse, q_s, k_s, weights

    def indices(self) -> Any:
        """Up to top_k earlier keys of every query; None without a selection."""
        if self.top_k is None:
            return None
        xp = array_module()
        rows = xp.arange(self.seq_len, dtype=xp.int32)[None, :, None]
        steps = xp.arange(self.top_k, dtype=xp.int32)[None, None]
        # Multiples of the stride select both recent and distant keys.
        stride = max(1, self.seq_len // self.top_k)
        return xp.broadcast_to(rows - stride * steps, (self.batch, self.seq_len, self.top_k)).copy()


def cases(small: bool = False) -> list[Case]:
    """Dense and with top-k selection, forward and backward."""
    if small:
        shapes = [Shape(1, 40, 4, 2, 16, 3, 16, top_k) for top_k in (None, 8)]
    else:
        shapes = [
            Shape(1, 4096, 32, 8, 128, 16, 128),
            Shape(1, 4096, 128, 128, 192, 64, 128),
            Shape(1, 4096, 128, 128, 192, 64, 128, 2048),
            Shape(1, 16384, 32, 8, 128, 16, 128),
        ]
    return [make(shape) for shape in shapes for make in (forward_case, backward_case)]


def torch_kl(shape: Shape, torch: ModuleType) -> Callable[..., Any]:
    """The mean divergence, computed with all score matrices."""
    if shape.seq_len > LONGEST_PEER:
        size = f"{shape.seq_len} x {shape.seq_len}"
        raise PeerMissing(f"no room for {shape.num_heads_t} matrices of {size} scores")

    def function(
        q_s: Any, k_s: Any, weights: Any, q_t: Any, k_t: Any, lse: Any, indices: Any = None
    ) -> Any:
        k_t = k_t.repeat_interleave(q_t.shape[2] // k_t.shape[2], dim=2)
        scores = q_t.transpose(1, 2) @ k_t.permute(0, 2, 3, 1)
        masked = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q_s.device).triu(1)[None]
        if indices is not None:
            selected = torch.zeros(
                (q_s.shape[0], *scores.shape[-2:]), dtype=torch.bool, device=q_s.device
            )
            # Negative indices are clamped to the first key, whose flag is corrected below.
            selected.scatter_(2, indices.clamp(min=0).long(), indices >= 0)
            selected[..., 0] |= (indices == 0).any(-1)
            masked = masked | ~selected
        p = (scores.float() * shape.head_dim_t**-0.5 - lse[..., None]).exp().sum(1)
        p = p.masked_fill(masked, 0.0)
        p = p / p.sum(-1, keepdim=True)
        products = (q_s.transpose(1, 2) @ k_s[:, None].transpose(2, 3)).relu()
        index = torch.einsum("bhij,bih->bij", products, weights.to(products.dtype)).float()
        log_q = index.masked_fill(masked, float("-inf")).log_softmax(-1)
        terms = torch.where(p > 0, p * (p.log() - log_q), 0.0)
        return terms.sum() / (p.shape[0] * p.shape[1])

    return function


def forward_case(shape: Shape) -> Case:
    """The mean divergence."""

    def build() -> Workload:
        arrays, indices = shape.arrays(), shape.indices()

        q_t, k_t, lse, *student = arrays
        selection = () if indices is None else (indices,)
        ours = partial(indexer_kl, *arrays, topk_indices=indices, causal=True)
        impls = forward_impls(ours, partial(torch_kl, shape), *student, q_t, k_t, lse, *selection)
        return Workload(impls, expected=lambda: _expected(arrays, indices)[0])

    return Case(
        family="attention",
        op="indexer_kl",
        name=str(shape),
        dtype=DTYPE,
        build=build,
        flops=shape.flops(1),
        bytes=shape.bytes(backward=False),
        measure_memory=True,
    )


def backward_case(shape: Shape) -> Case:
    """The gradients of the indexer's queries, keys and weights."""

    def build() -> Workload:
        arrays, indices = shape.arrays(), shape.indices()
        options: dict[str, Any] = {"topk_indices": indices, "causal": True, "reduction": "sum"}
        _, *statistics = indexer_kl(*arrays, **options, return_statistics=True)

        q_t, k_t, lse, *student = arrays
        selection = () if indices is None else (indices,)
        grad = array_module().asarray(shape.batch * shape.seq_len, dtype="float32")
        ours = partial(indexer_kl_backward, *arrays, *statistics, **options)
        impls = backward_impls(
            ours, partial(torch_kl, shape), student, grad, q_t, k_t, lse, *selection
        )
        return Workload(impls, expected=lambda: tuple(_expected(arrays, indices)[1:]))

    return Case(
        family="attention",
        op="indexer_kl_backward",
        name=str(shape),
        dtype=DTYPE,
        build=build,
        flops=shape.flops(3),
        bytes=shape.bytes(backward=True),
        measure_memory=True,
    )


def _expected(arrays: tuple[Any, ...], indices: Any) -> list[Any]:
    """The mean divergence and the gradients of the sum, in chunks of queries."""
    q_t, k_t, lse, q_s, k_s, weights = arrays
    xp = array_module()
    seq_len = q_s.shape[1]
    total, grad_q, grad_weights = 0.0, [], []
    grad_k = xp.zeros(k_s.shape, xp.float32)
    for first in range(0, seq_len, CHECKED_ROWS):
        end = min(seq_len, first + CHECKED_ROWS)
        rows = slice(first, end)
        part = (
            q_t[:, rows], k_t[:, :end], lse[..., rows], q_s[:, rows], k_s[:, :end],
            weights[:, rows],
        )  # fmt: skip
        options: dict[str, Any] = {
            "causal": True, "reduction": "sum",
            "topk_indices": None if indices is None else indices[:, rows],
        }  # fmt: skip
        loss, *statistics = reference.indexer_kl(*part, **options, return_statistics=True)
        own_q, own_k, own_weights = reference.indexer_kl_backward(*part, *statistics, **options)
        total = total + loss
        grad_q.append(own_q)
        grad_k[:, :end] += own_k.astype(xp.float32)
        grad_weights.append(own_weights)
    mean = total / (q_s.shape[0] * seq_len)
    return [mean, xp.concatenate(grad_q, 1), grad_k, xp.concatenate(grad_weights, 1)]
