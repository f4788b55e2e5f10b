"""Distils a Hugging Face model into a smaller one in PyTorch, with cukit's kernels.

    pip install 'cukit[transformers]'
    python examples/distill_torch.py                                  # trains a teacher first
    python examples/distill_torch.py --teacher path/or/name --text corpus/

Without --teacher, a small teacher is trained first and saved as a checkpoint, from which the
distillation starts. Tokens are bytes, or those of your teacher's tokenizer. The student is a
smaller model of the teacher's family. `optimize` swaps cukit's kernels into both models, and one
fused loss includes both heads, without storing all logits.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import cukit.torch as ckt
from cukit.distill import Corpus, Windows, read_corpus, validation_batches


def tokens_of(text: np.ndarray[Any, Any], tokenizer: Any) -> np.ndarray[Any, Any]:
    """Token ids of a text; without a tokenizer, its bytes."""
    if tokenizer is None:
        return text
    return np.asarray(tokenizer(text.tobytes().decode("utf-8", "replace"))["input_ids"], np.int32)


def batch_on(device: str, batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """(tokens, targets) as tensors."""
    tokens, targets = (torch.from_numpy(each.astype(np.int64)).to(device) for each in batch)
    return tokens, targets


def hidden_states(model: Any, tokens: Any) -> Any:
    """The input of the head, [tokens, hidden]."""
    hidden = model.model(tokens, use_cache=False).last_hidden_state
    return hidden.reshape(-1, hidden.shape[-1])


def train(
    model: Any, windows: Windows, *, steps: int, lr: float, device: str, teacher: Any = None,
    alpha: float = 0.9, temperature: float = 2.0,
) -> list[float]:  # fmt: skip
    """Minimise alpha T^2 KL(teacher, student) + (1 - alpha) cross-entropy with AdamW; without a
    teacher, cross-entropy."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1)
    losses = []
    for step in range(steps):
        tokens, targets = batch_on(device, windows(step))
        hidden, head = hidden_states(model, tokens), model.lm_head.weight
        if teacher is None:
            loss = ckt.linear_cross_entropy(hidden, head, targets.reshape(-1))
        else:
            with torch.no_grad():
                teacher_hidden = hidden_states(teacher, tokens)
            loss = ckt.linear_distillation_loss(
                hidden, head, teacher_hidden, teacher.lm_head.weight,
                targets=targets.reshape(-1), divergence="forward_kl", temperature=temperature,
                scale_by_temperature_squared=True, soft_weight=alpha, hard_weight=1 - alpha,
            )  # fmt: skip
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(loss.detach())  # without synchronisation
    return [float(each) for each in losses]


@torch.no_grad()
def bits_per_token(model: Any, text: np.ndarray[Any, Any], seq_len: int, device: str) -> float:
    """Mean cross-entropy on windows of a text, in bits."""
    batches = validation_batches(text, batch=8, seq_len=seq_len, max_windows=32)
    losses = []
    for batch in batches:
        tokens, targets = batch_on(device, batch)
        logits = model(tokens, use_cache=False).logits
        losses.append(ckt.cross_entropy(logits, targets, reduction="none"))
    return float(torch.cat(losses).mean() / np.log(2))


def smaller(config: Any, seq_len: int) -> Any:
    """A config of the same family with half the layers and half the width."""
    values = config.to_dict()
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"):
        values[name] = max(1, values[name] // 2)
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = max(1, min(values.get("num_key_value_heads", heads), heads))
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][: values["num_hidden_layers"]]
    return type(config).from_dict(values)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, distils and compares models; prints and returns bits per token."""
    parser = argparse.ArgumentParser(description="Distil a Hugging Face model with cukit.")
    parser.add_argument("--teacher", help="folder or name of a causal language model")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="files and folders")
    parser.add_argument("--output", type=Path, default=Path("runs/distill_torch"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--size", type=int, default=128, help="width of the teacher trained here")
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    corpus: Corpus = read_corpus(options.text)
    tokenizer = None if options.teacher is None else AutoTokenizer.from_pretrained(options.teacher)
    training, held_out = (tokens_of(each, tokenizer) for each in (corpus.train, corpus.validation))
    windows = Windows(training, batch=options.batch, seq_len=options.seq, seed=0)
    settings: dict[str, Any] = {"steps": options.steps, "lr": options.lr, "device": device}

    torch.manual_seed(0)
    checkpoint = options.teacher
    if checkpoint is None:
        size = options.size
        config = LlamaConfig(
            vocab_size=256, hidden_size=size, intermediate_size=2 * size, num_hidden_layers=4,
            num_attention_heads=size // 32, num_key_value_heads=max(1, size // 64),
            max_position_embeddings=options.seq,
        )  # fmt: skip
        teacher = AutoModelForCausalLM.from_config(config).to(device, dtype)
        train(teacher, windows, **{**settings, "steps": 2 * options.steps})
        checkpoint = options.output / "teacher"
        teacher.save_pretrained(checkpoint)

    teacher = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(device).eval()
    teacher.requires_grad_(False)  # losses raise an error for a teacher that requires grad
    config = smaller(AutoConfig.from_pretrained(checkpoint), options.seq)
    results = {"teacher": bits_per_token(teacher, held_out, options.seq, device)}
    sample = {"input_ids": batch_on(device, windows(0))[0], "use_cache": False}
    print(ckt.optimize(teacher, sample))
    for name in ("student alone", "student"):
        torch.manual_seed(1)  # both start from the same weights
        student = AutoModelForCausalLM.from_config(config).to(device, dtype)
        ckt.optimize(student, sample)
        taught_by = teacher if name == "student" else None
        losses = train(student, windows, teacher=taught_by, **settings)
        print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        results[name] = bits_per_token(student, held_out, options.seq, device)
    student.save_pretrained(options.output / "student")
    for name, bits in results.items():
        print(f"{name:>14}: {bits:.3f} bits per token")
    return results


if __name__ == "__main__":
    main()
