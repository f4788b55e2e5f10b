"""One implementation of the training step that profiling/torch_student.py times."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import cukit.torch as ckt
from cukit.gemm.dense import _gated_gradient
from profiling.torch_student import Implementation, Round, Sizes

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def torch_loss(hidden: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor) -> Any:
    """The forward KL with all logits in memory."""
    student = functional.log_softmax((hidden @ weight.T).float(), -1)
    target = functional.log_softmax((teacher @ teacher_weight.T).float(), -1)
    return functional.kl_div(student, target, reduction="batchmean", log_target=True)


def liger_jsd(hidden: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor) -> Any:
    """Liger's fused head with both models' hidden states; beta 0 is the forward KL."""
    from liger_kernel.transformers import LigerFusedLinearJSD

    loss = LigerFusedLinearJSD(jsd_beta=0.0)
    return loss(hidden, weight, teacher, teacher_weight, None)


def liger_kl(hidden: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor) -> Any:
    """Liger's fused head with the teacher's probabilities in memory."""
    from liger_kernel.ops.fused_linear_kl_div import LigerFusedLinearKLDivFunction

    target = torch.softmax(teacher @ teacher_weight.T, -1)
    return LigerFusedLinearKLDivFunction.apply(hidden, weight, target)


def cukit_loss(hidden: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor) -> Any:
    """Both heads fused, logits in chunks."""
    return ckt.linear_kl_divergence(hidden, weight, teacher, teacher_weight)


def loss_function(name: str, *, compiled: bool) -> Loss:
    """The loss called `name`; `torch_loss` instead of `liger_kl` if Liger is not installed."""
    if name == "liger_kl" and find_spec("liger_kernel") is None:
        name = "torch_loss"
    losses = {each.__name__: each for each in (torch_loss, liger_jsd, liger_kl, cukit_loss)}
    return torch.compile(torch_loss) if name == "torch_loss" and compiled else losses[name]


class Student:
    """A student, its data and its optimizer; the same in every process.

    kernels: a lock held while cukit's kernels are compiled; other processes then load them from the
    disk cache.
    """

    def __init__(self, implementation: Implementation, sizes: Sizes, kernels: Any) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

        # No sequences are packed; the check for packing would synchronise in every step.
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
        device = sizes.device
        self.on_gpu = device == "cuda"
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        config = LlamaConfig(
            vocab_size=sizes.vocab, hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate, num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads, num_key_value_heads=sizes.heads,
            max_position_embeddings=sizes.seq, tie_word_embeddings=True,
        )  # fmt: skip
        torch.manual_seed(0)
        shape = sizes.batch, sizes.seq
        self.batches = [
            torch.randint(0, sizes.vocab, shape, device=device) for _ in range(sizes.steps)
        ]
        teacher = torch.randn(sizes.batch * sizes.seq, 2 * sizes.hidden, device=device)
        head = torch.randn(sizes.vocab, 2 * sizes.hidden, device=device) * 0.05
        self.teacher = teacher.to(dtype), head.to(dtype)
        with torch.device(device):
            self.model = LlamaForCausalLM(config).to(dtype)
        self.model.set_attn_implementation("sdpa")
        compiled = implementation.compiled and self.on_gpu
        self.loss = loss_function(implementation.loss, compiled=compiled)
        if not implementation.gated_gradient:
            _gated_gradient._MIN_ROUNDS = sys.maxsize
        if implementation.swaps:
            with kernels:
                run_kernels(sizes, dtype)
            self._swap(implementation.swaps)
        if compiled:
            for layer in self.model.model.layers:
                layer.compile()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=3e-4, fused=self.on_gpu, weight_decay=0.1
        )
        self.losses: list[Tensor] = []

    def _swap(self, kinds: tuple[str, ...]) -> None:
        sample = {"input_ids": self.batches[0], "use_cache": False}  # runs the kernels of a step
        handle = ckt.optimize(
            self.model.model, sample, kinds=kinds, tolerance=0.1, only_faster=False, dry_run=False,
            repeats=1,
        )  # fmt: skip
        rejected = [row for row in handle.report if row.outcome != "swapped"]
        if rejected:
            print(f"{len(rejected)} modules not swapped, such as {rejected[0]}", flush=True)

    def step(self, ids: Tensor) -> None:
        """Forward, backward and update; the loss stays on the device."""
        hidden = self.model.model(ids, use_cache=False).last_hidden_state
        hidden = hidden.reshape(-1, hidden.shape[-1])
        loss = self.loss(hidden, self.model.lm_head.weight, *self.teacher)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())

    def warm_up(self) -> None:
        """Runs two steps, which compile all kernels, then releases memory for other processes."""
        for _ in range(2):
            self.step(self.batches[0])
        self._finish()

    def time_round(self) -> Round:
        """Returns the mean time of a step over the batches, after an untimed step."""
        self.step(self.batches[0])
        before = 0
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        for ids in self.batches:
            self.step(ids)
        if self.on_gpu:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / len(self.batches)
        peak = torch.cuda.max_memory_allocated() - before if self.on_gpu else 0
        self._finish()
        return Round(seconds, peak, tuple(float(each) for each in self.losses))

    def _finish(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def run_kernels(sizes: Sizes, dtype: torch.dtype) -> None:
    """Calls each operator of a step in its own thread, since NVRTC takes seconds per kernel."""
    ops = torch.ops.cukit
    tokens, heads, hidden = (sizes.batch, sizes.seq), sizes.heads, sizes.hidden
    head_dim = hidden // heads

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=sizes.device)

    x, weight = zeros(*tokens, hidden), zeros(hidden)
    gate, down = zeros(sizes.intermediate, hidden), zeros(hidden, sizes.intermediate)
    inner = zeros(*tokens, 2 * sizes.intermediate)
    qkv = zeros(*tokens, 3 * heads, head_dim).split(heads, dim=2)
    out = zeros(*tokens, heads, head_dim)
    lse = zeros(sizes.batch, heads, sizes.seq, dtype=torch.float32)
    tables = [zeros(sizes.seq, head_dim // 2, dtype=torch.float32) for _ in range(2)]
    states, teacher = x.view(-1, hidden), zeros(x[..., 0].numel(), 2 * hidden)
    embedding, head = zeros(sizes.vocab, hidden), zeros(sizes.vocab, 2 * hidden)
    calls: list[Callable[[], Any]] = [
        lambda: ops.linear_rope(x, zeros(3 * hidden, hidden), *tables, 2 * heads),
        lambda: ops.flash_attention(*qkv, causal=True),
        lambda: ops.flash_attention_qkv_backward(out, *qkv, out, lse, *tables, True),
        lambda: ops.flash_attention_backward(out, out, lse, *qkv, causal=True),
        lambda: ops.gated_mlp(x, gate, gate, down),
        lambda: ops.gated_mlp_backward(x, x, gate, gate, down, inner, "silu"),
        lambda: ops.rms_norm(x, weight),
        lambda: ops.rms_norm_backward(x, x, weight),
        lambda: ops.add_rms_norm(x, x, weight),
        lambda: ops.add_rms_norm_backward(x, x, x, weight),
        lambda: cukit_loss(states, embedding, teacher, head),
    ]
    with ThreadPoolExecutor(len(calls)) as pool:
        for call in [pool.submit(each) for each in calls]:
            call.result()
    if sizes.device == "cuda":
        torch.cuda.synchronize()
