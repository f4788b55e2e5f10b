"""A small call of every differentiable operator of cukit.torch except quantized_linear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import cukit.torch as ckt

Tensor = torch.Tensor
Shape = tuple[int, ...]

VOCAB, ROWS = 40, 6


@dataclass(frozen=True)
class Case:
    """A call of an operator.

    operator: its name in cukit/torch/_operator_definitions.py. call: takes the inputs, then the
    constants. inputs: shapes of the differentiable inputs. constants: shapes of the other
    arguments, or functions that create them. dtypes: dtypes that the kernel supports.
    """

    operator: str
    call: Callable[..., Any]
    inputs: tuple[Shape, ...]
    constants: tuple[Any, ...] = ()
    dtypes: tuple[str, ...] = ("float32", "bfloat16")

    def make(
        self, dtype: torch.dtype, device: str, seed: int = 0
    ) -> tuple[list[Tensor], list[Any]]:
        """Inputs that require grad, and constants; the same numbers for every dtype and device."""
        generator = torch.Generator().manual_seed(seed)

        def normal(shape: Shape) -> Tensor:
            # Rounded to bfloat16, so that every dtype starts from the same numbers.
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return values.to(torch.bfloat16).to(device=device, dtype=dtype)

        inputs = [normal(shape).requires_grad_() for shape in self.inputs]
        made = [
            normal(each) if isinstance(each, tuple) else each(generator, device, dtype)
            for each in self.constants
        ]
        return inputs, made


def _targets(generator: torch.Generator, device: str, dtype: torch.dtype) -> Tensor:
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    targets[1] = -100
    return targets.to(device)


def _selected(generator: torch.Generator, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    lse = torch.full((2, 4, 7), 3.0, device=device)
    indices = torch.randint(-1, 7, (2, 7, 5), generator=generator, dtype=torch.int32)
    return lse, indices.to(device)


def _angles(generator: torch.Generator, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.rand(7, 8, generator=generator) * 6
    return angles.cos().to(device), angles.sin().to(device)


def _top(generator: torch.Generator, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    logits = torch.randn(ROWS, VOCAB, generator=generator)
    log_probs, ids = ckt.teacher_top_k(logits.to(device), 5)
    return log_probs, ids


HALF = ("float16", "bfloat16")
QKV = ((2, 7, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16))
HEADS = ((ROWS, 24), (VOCAB, 24))
TEACHER = ((ROWS, 32), (VOCAB, 32))

CASES = {
    "rms_norm": Case("rms_norm", ckt.rms_norm, ((3, 24), (24,))),
    "add_rms_norm": Case(
        "add_rms_norm", lambda x, y, w: ckt.rms_norm(x, w, 1e-5, y), ((3, 24), (3, 24), (24,))
    ),
    "layer_norm": Case("layer_norm", ckt.layer_norm, ((3, 24), (24,), (24,))),
    "rope": Case(
        "rope", lambda q, k, tables: ckt.rope(q, k, *tables), ((2, 7, 3, 16), (2, 7, 1, 16)),
        (_angles,),
    ),
    "silu_and_mul": Case("silu_and_mul", ckt.silu_and_mul, ((3, 2, 16),)),
    "gelu_and_mul": Case("gelu_and_mul", ckt.gelu_and_mul, ((5, 16),)),
    "gelu": Case("gelu", lambda x: ckt.gelu(x, approximate="tanh"), ((5, 16),)),
    "flash_attention": Case(
        "flash_attention", lambda q, k, v: ckt.flash_attention(q, k, v, causal=True), QKV,
        dtypes=HALF,
    ),
    "flash_attention_options": Case(
        "flash_attention",
        lambda q, k, v, s, bias: ckt.flash_attention(
            q, k, v, window_size=(3, 1), softcap=5.0, sinks=s.to(
                torch.float64 if q.dtype == torch.float64 else torch.float32
            ), bias=bias, scale=0.3,
        ),
        (*QKV, (4,)), ((1, 1, 7, 7),), HALF,
    ),
    "linear": Case("linear", ckt.linear, ((5, 16), (24, 16), (24,)), dtypes=HALF),
    "linear_silu": Case(
        "linear", lambda x, w: ckt.linear(x, w, None, "silu"), ((5, 16), (24, 16)), dtypes=HALF
    ),
    "gated_linear": Case(
        "gated_linear", ckt.gated_linear, ((5, 16), (24, 16), (24, 16)), dtypes=HALF
    ),
    "gated_mlp": Case(
        "gated_mlp", ckt.gated_mlp, ((5, 16), (24, 16), (24, 16), (16, 24)), dtypes=HALF
    ),
    "cross_entropy": Case("cross_entropy", ckt.cross_entropy, ((ROWS, VOCAB),), (_targets,)),
    "kl_divergence": Case(
        "kl_divergence",
        lambda s, t, targets: ckt.kl_divergence(s, t, temperature=2.0, targets=targets),
        ((ROWS, VOCAB),), ((ROWS, VOCAB), _targets),
    ),
    "distillation_loss": Case(
        "distillation_loss",
        lambda s, t, targets: ckt.distillation_loss(
            s, t, divergence="jsd", beta=0.3, hard_weight=0.5, targets=targets, reduction="none"
        ),
        ((ROWS, VOCAB),), ((ROWS, VOCAB), _targets),
    ),
    "topk_distillation_loss": Case(
        "topk_distillation_loss",
        lambda s, top: ckt.topk_distillation_loss(s, *top, tail="bucket", normalizer=11.0),
        ((ROWS, VOCAB),), (_top,),
    ),
    "attention_kl": Case(
        "attention_kl",
        lambda q, k, t, u: ckt.attention_kl(t, u, q, k, causal=True, temperature=2.0), QKV[:2],
        QKV[:2], HALF,
    ),
    "distillation_attention": Case(
        "distillation_attention",
        lambda q, k, v, t, u: ckt.distillation_attention(t, u, u, q, k, v, window_size=(3, 0))[:2],
        QKV, QKV[:2], HALF,
    ),
    "distillation_attention at a temperature": Case(
        "distillation_attention",
        lambda q, k, v, t, u: ckt.distillation_attention(
            t, u, None, q, k, v, temperature=2.0, causal=True, reduction="sum"
        )[:2],
        QKV, QKV[:2], HALF,
    ),
    "the divergence of distillation_attention": Case(
        "distillation_attention",
        lambda q, k, t, u: ckt.distillation_attention(t, u, None, q, k, u)[1],
        QKV[:2], QKV[:2], HALF,
    ),
    "indexer_kl": Case(
        "indexer_kl",
        lambda q, k, w, t, u, given: ckt.indexer_kl(
            t, u, given[0], q, k, w if w.dtype == torch.float64 else w.float(),
            topk_indices=given[1], reduction="none",
        ),
        ((2, 7, 3, 16), (2, 7, 16), (2, 7, 3)), (*QKV[:2], _selected), HALF,
    ),
    "relation_kl": Case(
        "attention_kl", lambda x, t: ckt.relation_kl(t, x, relation_heads=8, reduction="sum"),
        QKV[:1], ((2, 7, 4, 32),), HALF,
    ),
    "sampled_distillation_loss": Case(
        "sampled_distillation_loss",
        lambda s, top: ckt.sampled_distillation_loss(s, top[1], top[0].exp()),
        ((ROWS, VOCAB),), (_top,),
    ),
    "linear_topk_distillation_loss": Case(
        "linear_topk_distillation_loss",
        lambda h, w, b, top: ckt.linear_topk_distillation_loss(h, w, *top, bias=b),
        (*HEADS, (VOCAB,)), (_top,), HALF,
    ),
    "linear_sampled_distillation_loss": Case(
        "linear_sampled_distillation_loss",
        lambda h, w, top: ckt.linear_sampled_distillation_loss(
            h, w, top[1], top[0].exp(), reduction="none"
        ),
        HEADS, (_top,), HALF,
    ),
    "linear_cross_entropy": Case(
        "linear_cross_entropy", ckt.linear_cross_entropy, HEADS, (_targets,), HALF
    ),
    "linear_kl_divergence": Case(
        "linear_kl_divergence", ckt.linear_kl_divergence, HEADS, TEACHER, HALF
    ),
    "linear_distillation_loss": Case(
        "linear_distillation_loss",
        lambda h, w, t, u, targets: 3 * ckt.linear_distillation_loss(
            h, w, t, u, divergence="skewed_reverse_kl", beta=0.2, hard_weight=0.5, targets=targets,
        ),
        HEADS, (*TEACHER, _targets), HALF,
    ),
}  # fmt: skip


def results(case: Case, inputs: list[Tensor], constants: list[Any]) -> list[Tensor]:
    """The outputs, and the gradients of a weighted sum of their elements."""
    outputs = case.call(*inputs, *constants)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum(
        (output.double() * _weights(output)).sum() for output in outputs if output.requires_grad
    )
    gradients = torch.autograd.grad(total, inputs)
    return [each.detach().cpu().double() for each in (*outputs, *gradients)]


def _weights(output: Tensor) -> Tensor:
    count = torch.arange(output.numel(), dtype=torch.float64, device=output.device)
    return torch.cos(count).reshape(output.shape)
