"""Cases of `cukit.distill`: losses with their gradients, losses fused with the output head, and the
optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from cukit.distill import (
    AdamWState,
    adamw,
    cross_entropy,
    cross_entropy_backward,
    distillation_loss,
    ema_update,
    global_norm,
    kl_divergence,
    kl_divergence_backward,
    linear_cross_entropy,
    linear_distillation_loss,
    linear_kl_divergence,
    linear_sampled_distillation_loss,
    linear_topk_distillation_loss,
    sampled_distillation_loss,
    teacher_top_k,
    topk_distillation_loss,
)
from cukit.reference import losses, optimizer
from profiling import peers
from profiling.case import Call, Case, Workload, itemsize
from profiling.data import DTYPES, array_module, integers, normal
from profiling.standard_impls import forward_impls

FAMILY = "distill"
DTYPE = "bfloat16"
TEMPERATURE = 2.0
SOFTCAP = 30.0
LIGER_DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "total_variation")
DIVERGENCES = ("reverse_kl", "jsd", "skewed_forward_kl", "total_variation")
ROWS_AT_ONCE = 512
"""Rows per chunk of the reference, which limits its float32 copies of logits."""

LogitsShape = tuple[int, int]
LOGITS: tuple[LogitsShape, ...] = ((4096, 32768), (4096, 256000))
SMALL_LOGITS: tuple[LogitsShape, ...] = ((12, 300),)
HeadShape = tuple[int, int, int]
HEADS: tuple[HeadShape, ...] = ((4096, 2048, 32768), (4096, 2304, 256000), (8192, 4096, 128256))
SMALL_HEADS: tuple[HeadShape, ...] = ((12, 16, 300),)
# A transformer of 124 million parameters: embedding, then four matrices and two vectors per layer.
MODEL = [(50304, 768), *[(2304, 768), (768, 768), (3072, 768), (768, 3072), (768,), (768,)] * 12]
SMALL_MODEL = [(30, 8), (8,), (24, 8)]


def cases(small: bool = False) -> list[Case]:
    """Losses on logits, losses with output heads, and the optimizer: logits and heads in bfloat16,
    parameters in float32."""
    logits = SMALL_LOGITS if small else LOGITS
    heads = SMALL_HEADS if small else HEADS
    model = SMALL_MODEL if small else MODEL
    few_rows = (5, 301) if small else (512, 50257)
    on_logits = (cross_entropy_case, cross_entropy_backward_case, kl_case, kl_backward_case)
    return [
        *(make(*shape) for make in on_logits for shape in logits),
        cross_entropy_case(*few_rows),
        *(close_kl_case(*shape) for shape in logits),
        *(divergence_case(*shape, name) for shape in logits for name in DIVERGENCES),
        *(divergence_case(*shape, "jsd", distance=0.05) for shape in logits),
        *(topk_case(*shape) for shape in logits),
        *(sampled_case(*shape) for shape in logits),
        *(capped_kl_case(*shape) for shape in logits),
        *(make(*shape) for make in (linear_kl_case, linear_cross_entropy_case) for shape in heads),
        *(linear_jsd_case(*shape) for shape in heads),
        small_workspace_case(*heads[-1 if small else 1]),
        *(linear_topk_case(*shape) for shape in heads[:2]),
        *(linear_sampled_case(*shape) for shape in heads[:2]),
        adamw_case(model),
        global_norm_case(model),
        ema_update_case(model),
    ]


def cross_entropy_case(tokens: int, vocab_size: int) -> Case:
    """Loss and gradient: reads the logits, writes the gradient."""
    return _cross_entropy_case("cross_entropy", tokens, vocab_size, forward=True)


def cross_entropy_backward_case(tokens: int, vocab_size: int) -> Case:
    """The gradient only. Peers need a forward to compute it."""
    return _cross_entropy_case("cross_entropy_backward", tokens, vocab_size, forward=False)


def _cross_entropy_case(op: str, tokens: int, vocab_size: int, *, forward: bool) -> Case:
    def build() -> Workload:
        logits, targets = normal((tokens, vocab_size), DTYPE), integers(0, vocab_size, (tokens,))

        def torch_loss(torch: ModuleType) -> Callable[..., Any]:
            return lambda z, ids: torch.nn.functional.cross_entropy(z.float(), ids.long())

        def oracle(rows: slice) -> tuple[Any, Any]:
            result: tuple[Any, Any] = losses.cross_entropy(
                logits[rows], targets[rows], normalizer=tokens, return_grad=True
            )
            return result

        ours = (
            partial(cross_entropy, logits, targets, return_grad=True)
            if forward
            else partial(cross_entropy_backward, 1.0, logits, targets)
        )
        return _logits_workload(ours, torch_loss, oracle, (logits,), (targets,), forward)

    traffic = 2 * tokens * vocab_size * itemsize(DTYPE)
    return Case(FAMILY, op, f"{tokens}x{vocab_size}", DTYPE, build, bytes=traffic)


def kl_case(tokens: int, vocab_size: int) -> Case:
    """Loss and gradient: reads both logits, writes the gradient."""
    return _kl_case("kl_divergence", tokens, vocab_size, forward=True)


def close_kl_case(tokens: int, vocab_size: int) -> Case:
    """Loss and gradient of a student that is close to its teacher."""
    return _kl_case("kl_divergence", tokens, vocab_size, forward=True, distance=0.05)


def divergence_case(
    tokens: int, vocab_size: int, divergence: str, distance: float | None = None
) -> Case:
    """Loss and gradient of a divergence other than the forward KL."""
    return _kl_case(
        "distillation_loss", tokens, vocab_size, forward=True, distance=distance,
        divergence=divergence,
    )  # fmt: skip


def topk_case(tokens: int, vocab_size: int, known: int = 64) -> Case:
    """Loss and gradient for a teacher's top-k tokens: reads the logits, writes the gradient."""

    def build() -> Workload:
        student = normal((tokens, vocab_size), DTYPE)
        signal = teacher_top_k(normal((tokens, vocab_size), DTYPE), known)
        options: dict[str, Any] = {"tail": "bucket"}

        def torch_loss(torch: ModuleType) -> Callable[..., Any]:
            def loss(s: Any, log_p: Any, ids: Any) -> Any:
                log_q = torch.log_softmax(s.float(), -1).gather(-1, ids.long())
                p, q = log_p.exp(), log_q.exp()
                rest_p, rest_q = ((1 - each.sum(-1)).clamp_min(1e-9) for each in (p, q))
                rest = rest_p * (rest_p.log() - rest_q.log())
                return ((p * (log_p - log_q)).sum(-1) + rest).mean()

            return loss

        def oracle(rows: slice) -> tuple[Any, Any]:
            result: tuple[Any, Any] = losses.topk_distillation_loss(
                student[rows], *(part[rows] for part in signal), normalizer=tokens,
                return_grad=True, **options,
            )  # fmt: skip
            return result

        ours = partial(topk_distillation_loss, student, *signal, return_grad=True, **options)
        return _logits_workload(ours, torch_loss, oracle, (student,), signal, True)

    traffic = tokens * (2 * vocab_size * itemsize(DTYPE) + 8 * known)
    name = f"{tokens}x{vocab_size} top {known}"
    return Case(FAMILY, "topk_distillation_loss", name, DTYPE, build, bytes=traffic)


def sampled_case(tokens: int, vocab_size: int, samples: int = 64) -> Case:
    """Loss and gradient from tokens sampled from a teacher."""

    def build() -> Workload:
        student = normal((tokens, vocab_size), DTYPE)
        ids = integers(0, vocab_size, (tokens, samples), "int32")

        def torch_loss(torch: ModuleType) -> Callable[..., Any]:
            return lambda s, ids: -torch.log_softmax(s.float(), -1).gather(-1, ids.long()).mean()

        def oracle(rows: slice) -> tuple[Any, Any]:
            result: tuple[Any, Any] = losses.sampled_distillation_loss(
                student[rows], ids[rows], normalizer=tokens, return_grad=True
            )
            return result

        ours = partial(sampled_distillation_loss, student, ids, return_grad=True)
        return _logits_workload(ours, torch_loss, oracle, (student,), (ids,), True)

    traffic = tokens * (2 * vocab_size * itemsize(DTYPE) + 4 * samples)
    name = f"{tokens}x{vocab_size} {samples} samples"
    return Case(FAMILY, "sampled_distillation_loss", name, DTYPE, build, bytes=traffic)


def capped_kl_case(tokens: int, vocab_size: int) -> Case:
    """Loss and gradient with a softcap on the logits of both models."""
    return _kl_case("kl_divergence", tokens, vocab_size, forward=True, softcap=SOFTCAP)


def kl_backward_case(tokens: int, vocab_size: int) -> Case:
    """The gradient only. Peers need a forward to compute it."""
    return _kl_case("kl_divergence_backward", tokens, vocab_size, forward=False)


def _kl_case(
    op: str,
    tokens: int,
    vocab_size: int,
    *,
    forward: bool,
    distance: float | None = None,
    divergence: str = "forward_kl",
    softcap: float | None = None,
) -> Case:
    """distance: standard deviation of student - teacher; None: independent logits.
    softcap: of both models' logits."""

    def build() -> Workload:
        student = normal((tokens, vocab_size), DTYPE)
        teacher = normal((tokens, vocab_size), DTYPE)
        if distance is not None:
            for start in range(0, tokens, ROWS_AT_ONCE):
                rows = slice(start, start + ROWS_AT_ONCE)
                wide = student[rows].astype("float32") + distance * teacher[rows].astype("float32")
                teacher[rows] = wide.astype(teacher.dtype)

        def torch_loss(torch: ModuleType) -> Callable[..., Any]:
            functional = torch.nn.functional

            def loss(s: Any, t: Any) -> Any:
                s, t = s.float(), t.float()
                if softcap is not None:
                    s, t = (softcap * torch.tanh(each / softcap) for each in (s, t))
                log_q = functional.log_softmax(s / TEMPERATURE, -1)
                log_p = functional.log_softmax(t / TEMPERATURE, -1)
                return _torch_divergence(torch, log_p, log_q, divergence)

            return loss

        def liger_loss(torch: ModuleType) -> Callable[..., Any]:
            liger = _liger_divergence(divergence)

            def loss(s: Any, t: Any) -> Any:
                with torch.no_grad():
                    log_p = torch.log_softmax(t.float() / TEMPERATURE, -1)
                return liger(torch.log_softmax(s.float() / TEMPERATURE, -1), log_p)

            return loss

        def oracle(rows: slice) -> tuple[Any, Any]:
            result: tuple[Any, Any] = losses.distillation_loss(
                student[rows],
                teacher[rows],
                divergence=divergence,
                temperature=TEMPERATURE,
                softcap=softcap,
                teacher_softcap=softcap,
                normalizer=tokens,
                return_grad=True,
            )
            return result

        options: dict[str, Any] = {"temperature": TEMPERATURE}
        if softcap is not None:
            options |= {"softcap": softcap, "teacher_softcap": softcap}
        ours = partial(kl_divergence_backward, 1.0, student, teacher, **options)
        if divergence != "forward_kl":
            options["divergence"] = divergence
            ours = partial(distillation_loss, student, teacher, return_grad=True, **options)
        elif forward:
            ours = partial(kl_divergence, student, teacher, return_grad=True, **options)
        workload = _logits_workload(ours, torch_loss, oracle, (student,), (teacher,), forward)
        if softcap is None and forward and divergence in LIGER_DIVERGENCES:
            impl = partial(_with_gradients, liger_loss, (student,), (teacher,))
            workload = replace(workload, impls={**workload.impls, "liger": impl})
        return workload

    traffic = 3 * tokens * vocab_size * itemsize(DTYPE)
    name = f"{tokens}x{vocab_size}" + ("" if distance is None else " close")
    name += "" if divergence == "forward_kl" else f" {divergence}"
    name += "" if softcap is None else " capped"
    return Case(FAMILY, op, name, DTYPE, build, bytes=traffic)


def _liger_divergence(divergence: str) -> Callable[..., Any]:
    """Liger's mean divergence over rows: a function of the log-probabilities of student and
    teacher."""
    liger = peers.optional("liger_kernel.transformers")
    if divergence == "total_variation":
        tvd = liger.LigerTVDLoss(reduction="batchmean")
        return lambda log_q, log_p: tvd(log_q.exp(), log_p.exp())
    if divergence == "forward_kl":
        kl: Callable[..., Any] = liger.LigerKLDIVLoss(reduction="batchmean", log_target=True)
        return kl
    jsd: Callable[..., Any] = liger.LigerJSD(beta={"jsd": 0.5, "reverse_kl": 1.0}[divergence])
    return jsd


def _torch_divergence(torch: ModuleType, log_p: Any, log_q: Any, divergence: str) -> Any:
    """The mean divergence over rows; mixtures of p and q have equal weights."""
    p, q = log_p.exp(), log_q.exp()
    log_m = torch.log((p + q) / 2)
    rows = {
        "forward_kl": lambda: p * (log_p - log_q),
        "reverse_kl": lambda: q * (log_q - log_p),
        "jsd": lambda: (p * (log_p - log_m) + q * (log_q - log_m)) / 2,
        "skewed_forward_kl": lambda: p * (log_p - log_m),
        "total_variation": lambda: (p - q).abs() / 2,
    }[divergence]()
    return rows.sum(-1).mean()


def linear_kl_case(tokens: int, hidden: int, vocab_size: int) -> Case:
    """Two heads, the forward KL, and the gradients of the student's head and input."""
    return _linear_case("linear_kl_divergence", tokens, hidden, vocab_size, "forward_kl")


def linear_jsd_case(tokens: int, hidden: int, vocab_size: int) -> Case:
    """Two heads, the Jensen-Shannon divergence, and gradients of the student's head and input."""
    return _linear_case("linear_distillation_loss", tokens, hidden, vocab_size, "jsd")


def small_workspace_case(tokens: int, hidden: int, vocab_size: int) -> Case:
    """The forward KL of two heads, with at most 1 GiB for logits."""
    op = "linear_kl_divergence"
    return _linear_case(op, tokens, hidden, vocab_size, "forward_kl", workspace_bytes=1 << 30)


def _linear_case(
    op: str,
    tokens: int,
    hidden: int,
    vocab_size: int,
    divergence: str,
    workspace_bytes: int | None = None,
) -> Case:
    """Two heads, a divergence, and the gradients of the student's head and input."""

    def build() -> Workload:
        student = normal((tokens, hidden), DTYPE), normal((vocab_size, hidden), DTYPE, scale=0.02)
        teacher = normal((tokens, hidden), DTYPE), normal((vocab_size, hidden), DTYPE, scale=0.02)

        def torch_loss(torch: ModuleType) -> Callable[..., Any]:
            functional = torch.nn.functional

            def loss(h: Any, w: Any, teacher_h: Any, teacher_w: Any) -> Any:
                with torch.no_grad():
                    teacher_logits = (teacher_h @ teacher_w.T).float() / TEMPERATURE
                    log_p = functional.log_softmax(teacher_logits, -1)
                log_q = functional.log_softmax((h @ w.T).float() / TEMPERATURE, -1)
                return _torch_divergence(torch, log_p, log_q, divergence)

            return loss

        def liger_loss(torch: ModuleType) -> Callable[..., Any]:
            module = peers.optional("liger_kernel.chunked_loss").LigerFusedLinearJSDLoss(
                weight_hard_loss=0.0,
                weight_soft_loss=1.0,
                beta=0.0 if divergence == "forward_kl" else 0.5,
                temperature=TEMPERATURE,
            )
            labels = peers.to_torch(integers(0, vocab_size, (tokens,), "int64"))
            return lambda h, w, teacher_h, teacher_w: module(h, w, teacher_h, teacher_w, labels)

        def ours() -> Any:
            if divergence == "forward_kl":
                result = linear_kl_divergence(
                    *student, *teacher, temperature=TEMPERATURE, workspace_bytes=workspace_bytes
                )
            else:
                result = linear_distillation_loss(
                    *student, *teacher, divergence=divergence, temperature=TEMPERATURE
                )
            return result.loss, result.grad_hidden, result.grad_weight

        def part(rows: slice, grad_weight: Any) -> tuple[Any, Any]:
            result = losses.linear_distillation_loss(
                student[0][rows],
                student[1],
                teacher[0][rows],
                teacher[1],
                divergence=divergence,
                temperature=TEMPERATURE,
                normalizer=tokens,
                grad_weight=grad_weight,
            )
            return result.loss, result.grad_hidden

        workload = _head_workload(ours, torch_loss, liger_loss, part, student, teacher)

        def liger_fused(torch: ModuleType) -> Callable[..., Any]:
            module = peers.optional("liger_kernel.transformers.fused_linear_jsd")
            beta = 0.0 if divergence == "forward_kl" else 0.5
            fused = module.LigerFusedLinearJSD(jsd_beta=beta, temperature=TEMPERATURE)
            return lambda h, w, teacher_h, teacher_w: fused(h, w, teacher_h, teacher_w, None)

        impl = partial(_with_gradients, liger_fused, student, teacher)
        return replace(workload, impls={**workload.impls, "liger-fused": impl})

    case = _head_case(op, tokens, hidden, vocab_size, 8, build)
    return case if workspace_bytes is None else replace(case, name=f"{case.name} in 1 GiB")


def linear_topk_case(tokens: int, hidden: int, vocab_size: int, known: int = 64) -> Case:
    """One head, the divergence from a teacher's top-k tokens, and the gradients."""

    def build() -> Workload:
        head = normal((tokens, hidden), DTYPE), normal((vocab_size, hidden), DTYPE, scale=0.02)
        signal = teacher_top_k(normal((tokens, vocab_size), DTYPE), known)

        def torch_loss(torch: ModuleType) -> Callable[..., Any]:
            def loss(h: Any, w: Any, log_p: Any, ids: Any) -> Any:
                log_p = log_p - log_p.logsumexp(-1, keepdim=True)
                log_q = torch.log_softmax((h @ w.T).float(), -1).gather(-1, ids.long())
                return (log_p.exp() * (log_p - log_q)).sum(-1).mean()

            return loss

        def part(rows: slice, grad_weight: Any) -> tuple[Any, Any]:
            result = losses.linear_topk_distillation_loss(
                head[0][rows], head[1], *(each[rows] for each in signal), normalizer=tokens,
                grad_weight=grad_weight,
            )  # fmt: skip
            return result.loss, result.grad_hidden

        def ours() -> Any:
            result = linear_topk_distillation_loss(*head, *signal)
            return result.loss, result.grad_hidden, result.grad_weight

        return _head_workload(ours, torch_loss, None, part, head, signal)

    return _head_case("linear_topk_distillation_loss", tokens, hidden, vocab_size, 6, build)


def linear_sampled_case(tokens: int, hidden: int, vocab_size: int, samples: int = 64) -> Case:
    """One head, tokens sampled from a teacher, and the gradients."""

    def build() -> Workload:
        head = normal((tokens, hidden), DTYPE), normal((vocab_size, hidden), DTYPE, scale=0.02)
        ids = integers(0, vocab_size, (tokens, samples), "int32")

        def torch_loss(torch: ModuleType) -> Callable[..., Any]:
            def loss(h: Any, w: Any, ids: Any) -> Any:
                return -torch.log_softmax((h @ w.T).float(), -1).gather(-1, ids.long()).mean()

            return loss

        def part(rows: slice, grad_weight: Any) -> tuple[Any, Any]:
            result = losses.linear_sampled_distillation_loss(
                head[0][rows], head[1], ids[rows], normalizer=tokens, grad_weight=grad_weight
            )
            return result.loss, result.grad_hidden

        def ours() -> Any:
            result = linear_sampled_distillation_loss(*head, ids)
            return result.loss, result.grad_hidden, result.grad_weight

        return _head_workload(ours, torch_loss, None, part, head, (ids,))

    return _head_case("linear_sampled_distillation_loss", tokens, hidden, vocab_size, 6, build)


def linear_cross_entropy_case(tokens: int, hidden: int, vocab_size: int) -> Case:
    """One head, the cross-entropy, and the gradients of head and input."""

    def build() -> Workload:
        head = normal((tokens, hidden), DTYPE), normal((vocab_size, hidden), DTYPE, scale=0.02)
        targets = integers(0, vocab_size, (tokens,), "int64")

        def torch_loss(torch: ModuleType) -> Callable[..., Any]:
            cross = torch.nn.functional.cross_entropy
            return lambda h, w, ids: cross((h @ w.T).float(), ids)

        def liger_loss(torch: ModuleType) -> Callable[..., Any]:
            module = peers.optional("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
            return lambda h, w, ids: module(w, h, ids)

        def ours() -> Any:
            result = linear_cross_entropy(*head, targets)
            return result.loss, result.grad_hidden, result.grad_weight

        def part(rows: slice, grad_weight: Any) -> tuple[Any, Any]:
            result = losses.linear_cross_entropy(
                head[0][rows], head[1], targets[rows], normalizer=tokens, grad_weight=grad_weight
            )
            return result.loss, result.grad_hidden

        return _head_workload(ours, torch_loss, liger_loss, part, head, (targets,))

    return _head_case("linear_cross_entropy", tokens, hidden, vocab_size, 6, build)


def adamw_case(shapes: Sequence[tuple[int, ...]]) -> Case:
    """float32 parameters. With beta1 = beta2 = 0 the step is repeatable: m = g, v = g^2."""

    def build() -> Workload:
        params = [normal(shape, "float32") for shape in shapes]
        grads = [normal(shape, "float32") for shape in shapes]
        state = AdamWState.for_params(params)

        def ours() -> Any:
            adamw(params, grads, state, lr=0.0, beta1=0.0, beta2=0.0, step=1)
            return state.exp_avg[0], state.exp_avg_sq[0]

        def torch_impl(**options: bool) -> Call:
            leaves = [peers.to_torch(param).requires_grad_() for param in params]
            for leaf, grad in zip(leaves, grads, strict=True):
                leaf.grad = peers.to_torch(grad)
            run = peers.torch().optim.AdamW(
                leaves, lr=0.0, betas=(0.0, 0.0), weight_decay=0.0, **options
            )

            def call() -> Any:
                run.step()
                return run.state[leaves[0]]["exp_avg"], run.state[leaves[0]]["exp_avg_sq"]

            return call

        return Workload(
            impls={
                "cukit": lambda: ours,
                "torch-fused": partial(torch_impl, fused=True),
                "torch-foreach": partial(torch_impl, foreach=True),
            },
            expected=lambda: (grads[0], grads[0] * grads[0]),
            tolerance=1e-5,
        )

    # Reads parameter, gradient, both moments; writes parameter, both moments.
    return Case(FAMILY, "adamw", _millions(shapes), "float32", build, bytes=28 * _count(shapes))


def ema_update_case(shapes: Sequence[tuple[int, ...]]) -> Case:
    """float32 averages of float32 master weights, and bfloat16 copies. With values equal to the
    average, a step with decay 1/2 is repeatable."""

    def build() -> Workload:
        averages = [normal(shape, "float32") for shape in shapes]
        values = [average.copy() for average in averages]
        copies = [average.astype(DTYPES["bfloat16"]) for average in averages]

        def ours() -> Any:
            ema_update(averages, values, 0.5, copies)
            return averages[0], copies[0]

        def torch_impl() -> Call:
            torch = peers.torch()
            lists = [[peers.to_torch(each) for each in column] for column in
                     (averages, values, copies)]  # fmt: skip

            def call() -> Any:
                torch._foreach_lerp_(lists[0], lists[1], 0.5)
                torch._foreach_copy_(lists[2], lists[0])
                return lists[0][0], lists[2][0]

            return call

        return Workload(
            impls={"cukit": lambda: ours, "torch-foreach": torch_impl},
            expected=lambda: (values[0], values[0].astype(DTYPES["bfloat16"])),
            tolerance=1e-5,
        )

    # Reads average, value; writes average, copy.
    return Case(
        FAMILY, "ema_update", _millions(shapes), "bfloat16", build, bytes=14 * _count(shapes)
    )


def global_norm_case(shapes: Sequence[tuple[int, ...]]) -> Case:
    """The global norm of the gradients of a model."""

    def build() -> Workload:
        grads = [normal(shape, "float32") for shape in shapes]

        def torch_norm(torch: ModuleType) -> Callable[..., Any]:
            return lambda *tensors: torch.linalg.vector_norm(
                torch.stack(torch._foreach_norm(list(tensors)))
            )

        return Workload(
            impls=forward_impls(partial(global_norm, grads), torch_norm, *grads),
            expected=partial(optimizer.global_norm, grads),
            tolerance=1e-5,
        )

    return Case(
        FAMILY, "global_norm", _millions(shapes), "float32", build, bytes=4 * _count(shapes)
    )


TorchLoss = Callable[[ModuleType], Callable[..., Any]]


def _logits_workload(
    ours: Call,
    torch_loss: TorchLoss,
    oracle: Callable[[slice], tuple[Any, Any]],
    logits: tuple[Any],
    others: tuple[Any, ...],
    forward: bool,
) -> Workload:
    """`ours` returns loss and gradient, or without `forward` the gradient only."""

    def impl(compiled: bool) -> Call:
        call = _with_gradients(torch_loss, logits, others, compiled=compiled)
        return call if forward else lambda: call()[1]

    def expected() -> Any:
        loss, gradients = _in_parts(oracle, logits[0].shape[0])
        return (loss, gradients) if forward else gradients

    return Workload(
        impls={
            "cukit": lambda: ours,
            "torch-eager": partial(impl, False),
            "torch-compile": partial(impl, True),
        },
        expected=expected,
    )


def _head_workload(
    ours: Call,
    torch_loss: TorchLoss,
    liger_loss: TorchLoss | None,
    part: Callable[[slice, Any], tuple[Any, Any]],
    head: tuple[Any, Any],
    others: tuple[Any, ...],
) -> Workload:
    def expected() -> Any:
        grad_weight = array_module().zeros(head[1].shape, "float32")
        loss, grad_hidden = _in_parts(lambda rows: part(rows, grad_weight), head[0].shape[0])
        return loss, grad_hidden, grad_weight

    impls: dict[str, Callable[[], Call]] = {
        "cukit": lambda: ours,
        "torch-eager": lambda: _with_gradients(torch_loss, head, others),
        "torch-compile": lambda: _with_gradients(torch_loss, head, others, compiled=True),
    }
    if liger_loss is not None:
        impls["liger"] = partial(_with_gradients, liger_loss, head, others)
    return Workload(
        impls=impls,
        expected=expected,
        tolerance=2e-2,  # logits and their gradients are rounded to bfloat16
    )


def _head_case(
    op: str, tokens: int, hidden: int, vocab_size: int, flops: int, build: Callable[[], Workload]
) -> Case:
    """flops: FLOPs per token, hidden unit and class, 2 for each GEMM of the case."""
    return Case(
        FAMILY,
        op,
        f"{tokens}x{hidden}x{vocab_size}",
        DTYPE,
        build,
        flops=flops * tokens * hidden * vocab_size,
        measure_memory=True,
    )


def _with_gradients(
    torch_loss: TorchLoss,
    inputs: Sequence[Any],
    constants: Sequence[Any],
    *,
    compiled: bool = False,
) -> Call:
    """A call that runs forward and backward: (loss, gradients of `inputs`...)."""
    torch = peers.torch()
    function = torch_loss(torch)
    run = peers.compile_function(function) if compiled else function
    leaves = [peers.to_torch(array).detach().requires_grad_() for array in inputs]
    fixed = [peers.to_torch(array) for array in constants]

    def call() -> Any:
        loss = run(*leaves, *fixed)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    return call


def _in_parts(oracle: Callable[[slice], tuple[Any, Any]], tokens: int) -> tuple[Any, Any]:
    """Sum of the losses and all gradients, computed in chunks of rows."""
    parts = [
        oracle(slice(start, min(start + ROWS_AT_ONCE, tokens)))
        for start in range(0, tokens, ROWS_AT_ONCE)
    ]
    loss = sum((loss for loss, _ in parts[1:]), start=parts[0][0])
    return loss, array_module().concatenate([gradient for _, gradient in parts])


def _count(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))


def _millions(shapes: Sequence[tuple[int, ...]]) -> str:
    return f"{len(shapes)} tensors, {_count(shapes) / 1e6:.1f} M"
