"""Cases of `cukit.sampling`: memory-bound; the floor is one read of the logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from cukit import sampling
from cukit.reference import sampling as reference
from profiling import peers
from profiling.case import Call, Case, Workload, itemsize
from profiling.data import array_module, integers, normal
from profiling.standard_impls import forward_impls

FAMILY = "sampling"
SPREAD = 3.0
"""Standard deviation of the logits: about 4 % of the tokens have 90 % of the probability."""
NEARLY_EQUAL = 1e-3
"""Allows for peers whose float32 sums round to an adjacent token."""

Options = dict[str, Any]
TOP_K_TOP_P: Options = {"top_k": 50, "top_p": 0.9}
TOP_P: Options = {"top_p": 0.9}
PLAIN: Options = {}


def cases(small: bool = False) -> list[Case]:
    """One request, and batches of a server, over the vocabulary of Llama 3."""
    batches, vocab_size = ((5,), 1000) if small else ((1, 64, 256), 128256)
    return [
        *(sample_case(batch, vocab_size, TOP_K_TOP_P) for batch in batches),
        *(sample_case(batch, vocab_size, TOP_P) for batch in batches),
        sample_case(batches[-1], vocab_size, PLAIN),
        sample_case(batches[-1], vocab_size, TOP_K_TOP_P, logprobs=5),
        sample_case(batches[-1], vocab_size, TOP_P, logprobs=0),
        sample_case(batches[-1], vocab_size, TOP_K_TOP_P, dtype="bfloat16"),
        verify_case(2, 3, vocab_size, TOP_K_TOP_P),
        verify_case(batches[-1] // 4, 3, vocab_size, TOP_K_TOP_P),
        verify_case(batches[-1] // 4, 3, vocab_size, PLAIN),
    ]


def sample_case(
    batch: int,
    vocab_size: int,
    options: Options,
    *,
    logprobs: int | None = None,
    dtype: str = "float32",
) -> Case:
    """Tokens drawn with one seed each; torch sorts, and uses the same uniform numbers."""

    def build() -> Workload:
        xp = array_module()
        logits = normal((batch, vocab_size), dtype, SPREAD)
        seeds = np.arange(batch)
        bits = reference.philox_uint64(seeds.astype(np.uint64), np.zeros(batch, np.uint64), 0)
        uniform = xp.asarray((bits.astype(np.float64) * 2.0**-64).astype(np.float32)[:, None])
        seed = xp.asarray(seeds)

        def ours() -> Any:
            return sampling.sample(logits, seed=seed, logprobs=logprobs, **options).tokens

        impls = forward_impls(ours, partial(torch_sample, options), logits, uniform)
        views: dict[str, Callable[[Any], Any]] = {}
        if logprobs is None:
            for name, factory in flashinfer_impls(logits, options).items():
                impls[name] = factory
                views[name] = partial(_drawable, logits, seed, options)
        return Workload(
            impls,
            lambda: reference.sample(logits, seed=seed, **options).tokens,
            tolerance=NEARLY_EQUAL,
            views=views,
        )

    words = [name.replace("_", " ") + f" {value}" for name, value in options.items()]
    if logprobs is not None:
        words.append(f"log-probabilities of {logprobs + 1}")
    name = ", ".join([f"{batch}x{vocab_size}", *words])
    moved = batch * vocab_size * itemsize(dtype)
    return Case(FAMILY, "sample", name, dtype, build, bytes=moved)


def flashinfer_impls(logits: Any, options: Options) -> dict[str, Callable[[], Call]]:
    """FlashInfer's samplers, including the softmax for those that take probabilities.

    They use other random numbers. FlashInfer's "joint" order is not a peer: it applies top-p to the
    whole distribution, which is a different rule.
    """
    top_k, top_p = options.get("top_k"), options.get("top_p")

    def impl(function: Callable[[ModuleType, Any], Any]) -> Callable[[], Call]:
        def factory() -> Call:
            module = peers.optional("flashinfer.sampling")
            x = peers.to_torch(logits)
            return lambda: function(module, x)

        return factory

    if top_k and top_p:
        ways = {
            "flashinfer-top-k-first": lambda m, x: m.top_k_top_p_sampling_from_logits(
                x, top_k, top_p, filter_apply_order="top_k_first"
            ),
        }
        if logits.dtype == np.float32:
            ways["flashinfer-probs"] = lambda m, x: m.top_k_top_p_sampling_from_probs(
                m.softmax(x), top_k, top_p
            )
    elif top_p:
        ways = {"flashinfer": lambda m, x: m.top_p_sampling_from_probs(m.softmax(x), top_p)}
    elif top_k:
        ways = {"flashinfer": lambda m, x: m.top_k_sampling_from_probs(m.softmax(x), top_k)}
    else:
        ways = {"flashinfer": lambda m, x: m.sampling_from_logits(x)}
    return {name: impl(way) for name, way in ways.items()}


def _drawable(logits: Any, seed: Any, options: Options, tokens: Any) -> Any:
    """The reference's tokens where the peer's are permitted as well, else -1."""
    xp = array_module()
    drawn = xp.asarray(tokens.cpu().numpy() if hasattr(tokens, "cpu") else tokens)
    kept = reference.kept_tokens(logits, **options)
    rows = xp.arange(len(drawn))
    expected = reference.sample(logits, seed=seed, **options).tokens
    return xp.where(kept[rows, drawn], expected, -1)


def torch_sample(options: Options, torch: ModuleType) -> Callable[..., Any]:
    """Sort, mask, scatter back, cumulative sum: the usual implementation without a kernel."""
    top_k, top_p = options.get("top_k"), options.get("top_p")

    def function(logits: Any, uniform: Any) -> Any:
        if top_k or top_p:
            values, order = logits.float().sort(dim=-1, descending=True)
            if top_k:
                values[:, top_k:] = -torch.inf
            probs = values.softmax(dim=-1)
            values = values.masked_fill(probs.cumsum(dim=-1) - probs >= top_p, -torch.inf)
            logits = torch.empty_like(values).scatter_(1, order, values)
        upto = logits.float().softmax(dim=-1).cumsum(dim=-1)
        return (upto <= uniform * upto[:, -1:]).sum(dim=-1).int()

    return function


def verify_case(batch: int, num_drafts: int, vocab_size: int, options: Options) -> Case:
    """Drafts that are the target's most likely tokens and are accepted, except those of the last
    request, which are rejected."""

    def build() -> Workload:
        logits = normal((batch, num_drafts + 1, vocab_size), "float32", SPREAD)
        probs = abs(normal((batch, num_drafts, vocab_size), "float32", 1 / vocab_size))
        drafts = integers(0, vocab_size, (batch, num_drafts)).astype(np.int32)
        drafts[:-1] = logits[:-1, :num_drafts].argmax(axis=-1).astype(np.int32)
        probs[-1, np.arange(num_drafts), drafts[-1]] = 1
        arguments = {"draft_probs": probs, **options}
        call = partial(sampling.speculative_verify, drafts, logits, **arguments)
        return Workload(
            {
                "cukit": lambda: call,
                "flashinfer": partial(flashinfer_verify, drafts, logits, probs, options),
            },
            lambda: reference.speculative_verify(drafts, logits, **arguments),
            tolerance=NEARLY_EQUAL,
            views={"flashinfer": partial(_verifiable, drafts, logits, arguments)},
        )

    words = [name.replace("_", " ") + f" {value}" for name, value in options.items()]
    name = ", ".join([f"{batch}x{num_drafts} drafts of {vocab_size}", *words])
    # For a rejected draft, its distribution is read as well.
    moved = batch * (num_drafts + 1) * vocab_size * itemsize("float32")
    return Case(FAMILY, "speculative_verify", name, "float32", build, bytes=moved)


def flashinfer_verify(drafts: Any, logits: Any, probs: Any, options: Options) -> Call:
    """FlashInfer's chain_speculative_sampling, which takes the target's truncated probabilities."""
    module = peers.optional("flashinfer.sampling")
    tokens, x, q = map(peers.to_torch, (drafts, logits, probs))

    def call() -> Any:
        target = module.softmax(x.reshape(-1, x.shape[-1]))
        if "top_k" in options:
            target = module.top_k_renorm_probs(target, options["top_k"])
        if "top_p" in options:
            target = module.top_p_renorm_probs(target, options["top_p"])
        return module.chain_speculative_sampling(q, tokens, target.reshape(x.shape))

    return call


def _verifiable(drafts: Any, logits: Any, arguments: Options, result: Any) -> Any:
    """The reference's results for requests for which the peer's tokens are permitted, else -2."""
    xp = array_module()
    tokens, _, emitted = (xp.asarray(part.cpu().numpy()) for part in result)
    options = {name: value for name, value in arguments.items() if name != "draft_probs"}
    expected = reference.speculative_verify(drafts, logits, **arguments)
    kept = reference.kept_tokens(logits.reshape(-1, logits.shape[-1]), **options)
    rows = xp.arange(len(kept)).reshape(tokens.shape)
    permitted = (tokens < 0) | kept[rows, xp.maximum(tokens, 0)]
    counts = expected.num_accepted
    permitted &= (tokens < 0) == (xp.arange(tokens.shape[1]) > counts[:, None])
    right = permitted.all(axis=1) & (emitted == counts)
    return (
        xp.where(right[:, None], expected.tokens, -2),
        xp.where(right, counts, -2),
    )
