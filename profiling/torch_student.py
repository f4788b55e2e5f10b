"""Times steps of a Llama-style student distilled in torch, with cukit's and torch's modules.

    python -m profiling.torch_student                 # 110 M parameters, 65536 tokens, on the GPU
    python -m profiling.torch_student --tiny          # a smoke test on the CPU

All implementations have the same student, data, optimizer (AdamW, fused) and loss: the forward KL
divergence from a teacher's head on fixed random hidden states. Runs are interleaved. Layers are
compiled one by one (`layer.compile()`), which avoids an attention mask. A step with few tokens
(`--batch 8 --seq 1024`) is host-bound. RoPE stays torch's, because its replacement would be
shared by all models in the same file of transformers.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import cukit.torch as ckt

Loss = Callable[[Any, Any, Any, Any], Any]


def torch_loss(hidden: Any, weight: Any, teacher: Any, teacher_weight: Any) -> Any:
    """All logits in memory; compiled."""
    student = functional.log_softmax((hidden @ weight.T).float(), -1)
    target = functional.log_softmax((teacher @ teacher_weight.T).float(), -1)
    return functional.kl_div(student, target, reduction="batchmean", log_target=True)


def liger_jsd(hidden: Any, weight: Any, teacher: Any, teacher_weight: Any) -> Any:
    """Liger's fused head with both models' hidden states; beta 0 is the forward KL."""
    from liger_kernel.transformers import LigerFusedLinearJSD

    loss = LigerFusedLinearJSD(jsd_beta=0.0)
    return loss(hidden, weight, teacher, teacher_weight, None)


def liger_kl(hidden: Any, weight: Any, teacher: Any, teacher_weight: Any) -> Any:
    """Liger's fused head with the teacher's probabilities in memory."""
    from liger_kernel.ops.fused_linear_kl_div import LigerFusedLinearKLDivFunction

    target = torch.softmax(teacher @ teacher_weight.T, -1)
    return LigerFusedLinearKLDivFunction.apply(hidden, weight, target)


def cukit_loss(hidden: Any, weight: Any, teacher: Any, teacher_weight: Any) -> Any:
    """Both heads fused, logits in chunks."""
    return ckt.linear_kl_divergence(hidden, weight, teacher, teacher_weight)


class Student:
    """One implementation of the training step."""

    def __init__(
        self, name: str, config: Any, state: dict[str, Any], loss: Loss, *,
        swaps: tuple[str, ...] | None, compiled: bool, device: str, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        from transformers import LlamaForCausalLM

        self.name, self.loss = name, loss
        self.model = LlamaForCausalLM(copy.deepcopy(config)).to(device=device, dtype=dtype)
        self.model.load_state_dict(state)
        self.model.set_attn_implementation("sdpa")
        if swaps is not None:
            sample = torch.zeros(1, 64, dtype=torch.long, device=device)
            handle = ckt.optimize(
                self.model, sample, kinds=swaps, only_faster=False, dry_run=False, repeats=1
            )
            kept = [row for row in handle.report if row.outcome != "swapped"]
            if kept:
                print(f"{name}: not swapped: {kept}")
        if compiled:
            for layer in self.model.model.layers:
                layer.compile()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=3e-4, fused=device == "cuda", weight_decay=0.1
        )
        self.losses: list[Any] = []
        self.times: list[float] = []
        self.peak = 0

    def step(self, ids: Any, teacher: Any, teacher_weight: Any) -> None:
        """Run forward, backward and update; the loss stays on the device."""
        hidden = self.model.model(ids, use_cache=False).last_hidden_state
        hidden = hidden.reshape(-1, hidden.shape[-1])
        loss = self.loss(hidden, self.model.lm_head.weight, teacher, teacher_weight)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())

    def timed_steps(self, batches: list[Any], *rest: Any) -> None:
        """Record the mean time per step, and the peak memory above that before the steps."""
        on_gpu = batches[0].is_cuda
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            there = torch.cuda.memory_allocated()
        start = time.perf_counter()
        for ids in batches:
            self.step(ids, *rest)
        if on_gpu:
            torch.cuda.synchronize()
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - there)
        self.times.append((time.perf_counter() - start) / len(batches))


def main(arguments: list[str] | None = None) -> list[Student]:
    """Train every implementation in interleaved runs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tiny", action="store_true", help="a smoke test on the CPU")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of implementations")
    options = parser.parse_args(arguments)
    from transformers import LlamaConfig, masking_utils

    # No sequences are packed; the check for packing would synchronise in every step.
    masking_utils.find_packed_sequence_indices = lambda position_ids: None

    device, dtype = ("cpu", torch.float32) if options.tiny else ("cuda", torch.bfloat16)
    sizes = (64, 128, 2, 4, 97) if options.tiny else (768, 2048, 12, 12, 32000)
    hidden, intermediate, layers, heads, vocab = sizes
    batch, seq = (2, 16) if options.tiny else (options.batch, options.seq)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=seq, tie_word_embeddings=True,
    )  # fmt: skip
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    state = LlamaForCausalLM(config).state_dict()
    teacher_size = 2 * hidden
    teacher = torch.randn(batch * seq, teacher_size, device=device).to(dtype)
    teacher_weight = (torch.randn(vocab, teacher_size, device=device) * 0.05).to(dtype)
    batches = [torch.randint(0, vocab, (batch, seq), device=device) for _ in range(options.steps)]
    all_of_it, but_norms = ("attention", "norm", "mlp", "residual"), ("attention", "mlp")
    table: list[tuple[str, Loss, tuple[str, ...] | None, bool]] = [
        ("torch: compile, SDPA, logits", torch.compile(torch_loss), None, True),
        ("torch: compile, SDPA, Liger JSD", liger_jsd, None, True),
        ("torch: compile, SDPA, Liger KL", liger_kl, None, True),
        ("cukit: eager, all swaps", cukit_loss, all_of_it, False),
        ("cukit: compile, attention", cukit_loss, ("attention",), True),
        ("cukit: compile, attention, mlp", cukit_loss, but_norms, True),
        ("cukit: compile, all swaps", cukit_loss, all_of_it, True),
    ]
    if options.tiny:
        table = [("torch", torch_loss, None, False), ("cukit", cukit_loss, all_of_it, False)]
    impls = []
    for name, loss, swaps, compiled in table:
        if options.only and name not in options.only:
            continue
        try:
            impl = Student(
                name, config, state, loss, swaps=swaps, compiled=compiled, device=device,
                dtype=dtype,
            )  # fmt: skip
            start = time.perf_counter()
            for _ in range(2):
                impl.step(batches[0], teacher, teacher_weight)
            print(f"{name}: ready in {time.perf_counter() - start:.1f} s", flush=True)
            impls.append(impl)
        except Exception as error:  # such as a missing library
            words = " ".join(str(error).split())[:300]
            print(f"{name}: {type(error).__name__}: {words}", flush=True)
    for _ in range(options.rounds):
        for impl in impls:
            impl.timed_steps(batches, teacher, teacher_weight)
    best = min(statistics.median(impl.times) for impl in impls if impl.name.startswith("torch"))
    for impl in impls:
        median = statistics.median(impl.times)
        losses = [float(each) for each in impl.losses]
        print(
            f"{impl.name:34} {1e3 * median:8.2f} ms ({median / best:.2f} of torch's best, "
            f"{1e3 * min(impl.times):.2f}..{1e3 * max(impl.times):.2f}), "
            f"{batch * seq / median / 1e3:.0f} k tokens/s, peak {impl.peak / 2**30:.2f} GiB, "
            f"loss {losses[0]:.4f} -> {losses[-1]:.4f}"
        )
    return impls


if __name__ == "__main__":
    main()
    sys.exit(0)
