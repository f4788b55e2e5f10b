"""Cases of the divergence between the attention of two models: the shapes of `attention` with
head_dims of 128 and 64, with and without known log-sum-exps.

The peer is the straightforward torch code with both score matrices, eager and compiled. It is
skipped for sequences longer than LONGEST_PEER, whose matrices do not fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from cukit.attention import attention_kl, attention_kl_backward, flash_attention
from cukit.distill import distillation_attention
from cukit.reference import attention
from cukit.reference import attention_kl as reference
from profiling.case import Case, PeerMissing, Workload, itemsize
from profiling.cases.attention import Shape, by_key_head
from profiling.data import array_module, normal
from profiling.standard_impls import backward_impls, forward_impls

LONGEST_PEER = 4096


def cases(small: bool = False) -> list[Case]:
    """Two lengths for two head_dims, and a GQA shape: forward, forward with the student's output,
    backward."""
    if small:
        shapes = [Shape(1, 40, 4, 2, 16, causal) for causal in (False, True)]
    else:
        shapes = [
            Shape(16384 // seq_len, seq_len, 2048 // width, 2048 // width, width, causal)
            for width in (64, 128)
            for seq_len in (4096, 16384)
            for causal in (False, True)
        ]
        shapes.append(Shape(2, 8192, 32, 8, 128, True))
    found = [forward_case(shape, known) for shape in shapes for known in (True, False)]
    found += [one_pass_case(shape, known) for shape in shapes for known in (True, False)]
    return found + [backward_case(shape) for shape in shapes]


def inputs_of(shape: Shape) -> tuple[Any, Any, Any, Any]:
    """Teacher's and student's queries and keys."""
    q_t, k_t, _, _ = shape.arrays("bfloat16")
    xp = array_module()
    # A partly trained student: queries and keys are mixtures of the teacher's and of noise.
    q_s, k_s = (
        (0.8 * x.astype(xp.float32) + 0.6 * normal(x.shape, "float32")).astype(x.dtype)
        for x in (q_t, k_t)
    )
    return q_t, k_t, q_s, k_s


def torch_kl(shape: Shape, torch: ModuleType) -> Callable[..., Any]:
    """The mean divergence, computed with both matrices."""
    if shape.seq_len > LONGEST_PEER:
        size = f"{shape.seq_len} x {shape.seq_len}"
        raise PeerMissing(f"no room for two matrices of {size} scores per head")

    def log_probabilities(q: Any, k: Any) -> Any:
        k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * q.shape[-1] ** -0.5
        if shape.causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        return scores.log_softmax(dim=-1, dtype=torch.float32)

    def function(q_s: Any, k_s: Any, q_t: Any, k_t: Any) -> Any:
        teacher, student = log_probabilities(q_t, k_t), log_probabilities(q_s, k_s)
        terms = teacher.exp() * (teacher - student)
        if shape.causal:
            terms = terms.nan_to_num(0.0)
        return terms.sum() / terms[..., 0].numel()

    return function


def forward_case(shape: Shape, known: bool) -> Case:
    """The mean divergence, with or without known log-sum-exps."""

    def build() -> Workload:
        q_t, k_t, q_s, k_s = inputs_of(shape)
        given: dict[str, Any] = {}
        if known:
            _, lse_t, lse_s = attention_kl(q_t, k_t, q_s, k_s, causal=shape.causal, return_lse=True)
            given = {"lse_t": lse_t, "lse_s": lse_s}

        def divergence(*heads: Any) -> tuple[Any]:
            rows: Any = reference.attention_kl(*heads, causal=shape.causal, reduction="none")
            return (rows.transpose(0, 2, 1)[..., None],)

        ours = partial(attention_kl, q_t, k_t, q_s, k_s, causal=shape.causal, **given)
        return Workload(
            impls=forward_impls(ours, partial(torch_kl, shape), q_s, k_s, q_t, k_t),
            expected=lambda: by_key_head(shape, divergence, q_t, k_t, q_s, k_s)[0].mean(),
        )

    return Case(
        family="attention",
        op="attention_kl",
        name=f"{shape}{' known' if known else ''}",
        dtype="bfloat16",
        build=build,
        flops=shape.flops,
        bytes=_elements(shape) * itemsize("bfloat16"),
        measure_memory=True,
    )


def one_pass_case(shape: Shape, known: bool) -> Case:
    """The mean divergence and the output of the student's attention, with or without the teacher's
    log-sum-exps: distillation_attention, compared with flash_attention followed by attention_kl."""

    def build() -> Workload:
        q_t, k_t, q_s, k_s = arrays = inputs_of(shape)
        v_s = k_t
        options: dict[str, Any] = {"causal": shape.causal}
        if known:
            options["lse_t"] = attention_kl(*arrays, return_lse=True, causal=shape.causal)[1]

        def ours() -> Any:
            result = distillation_attention(q_t, k_t, None, q_s, k_s, v_s, **options)
            return result.out, result.loss

        def separate() -> Any:
            out, lse = flash_attention(q_s, k_s, v_s, causal=shape.causal, return_lse=True)
            return out, attention_kl(*arrays, lse_s=lse, **options)

        def expected() -> tuple[Any, Any]:
            def both(*heads: Any) -> tuple[Any, Any]:
                rows: Any = reference.attention_kl(
                    *heads[:4], causal=shape.causal, reduction="none"
                )
                out: Any = attention.flash_attention(*heads[2:], causal=shape.causal)
                return rows.transpose(0, 2, 1)[..., None], out

            rows, out = by_key_head(shape, both, *arrays, v_s)
            return out, rows.mean()

        return Workload(
            impls={"cukit": lambda: ours, "cukit-separate": lambda: separate}, expected=expected
        )

    return Case(
        family="attention",
        op="attention_kl",
        name=f"{shape} with output{' known' if known else ''}",
        dtype="bfloat16",
        build=build,
        flops=3 * shape.flops / 2,
        bytes=3 * _elements(shape) * itemsize("bfloat16") / 2,
        measure_memory=True,
    )


def backward_case(shape: Shape) -> Case:
    """The gradients of the student's queries and keys, also with deterministic grad_q."""

    def build() -> Workload:
        q_t, k_t, q_s, k_s = arrays = inputs_of(shape)
        _, lse_t, lse_s = attention_kl(*arrays, causal=shape.causal, return_lse=True)

        def gradients(*heads: Any) -> tuple[Any, ...]:
            options: dict[str, Any] = {"causal": shape.causal, "reduction": "sum"}
            _, *both = reference.attention_kl(*heads, return_lse=True, **options)
            return reference.attention_kl_backward(*heads, *both, **options)

        ours = partial(
            attention_kl_backward, *arrays, lse_t, lse_s, causal=shape.causal, reduction="sum"
        )
        grad = array_module().asarray(_rows(shape), dtype="float32")
        impls = backward_impls(ours, partial(torch_kl, shape), (q_s, k_s), grad, q_t, k_t)
        impls["cukit-ordered"] = lambda: partial(ours, deterministic=True)
        return Workload(
            impls=impls, expected=lambda: by_key_head(shape, gradients, q_t, k_t, q_s, k_s)
        )

    return Case(
        family="attention",
        op="attention_kl_backward",
        name=str(shape),
        dtype="bfloat16",
        build=build,
        flops=2 * shape.flops,
        bytes=_elements(shape) * itemsize("bfloat16") * 3 / 2,
        measure_memory=True,
    )


def _rows(shape: Shape) -> float:
    return float(shape.batch * shape.num_heads_q * shape.seq_len)


def _elements(shape: Shape) -> int:
    """The elements of both models' queries and keys."""
    heads = 2 * (shape.num_heads_q + shape.num_heads_kv)
    return shape.batch * shape.seq_len * heads * shape.head_dim
