"""Verification of drafted tokens (speculative decoding)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    access_width,
    adopt,
    check_array,
    empty,
    float32,
    float64,
    int32,
    runs_kernel,
)
from cukit.core.device import Device, current_device
from cukit.core.kernel import NULL, KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.reference import sampling as reference
from cukit.reference.sampling import Verified
from cukit.registry import register
from cukit.sampling._options import RequestOptions
from cukit.sampling._plan import SampleConfig, plan_sample
from cukit.sampling.sample import check_limits, check_vocabulary, draws_of, pack_options

_COLLECT = parameter_structs("sampling/parameters.cuh")["CollectParameters"]
_COLLECT_THREADS = 128


def speculative_verify(
    draft_tokens: Array,
    logits: Array,
    *,
    draft_probs: Array | None = None,
    temperature: Array | float = 1.0,
    top_k: Array | int | None = None,
    top_p: Array | float | None = None,
    min_p: Array | float | None = None,
    seed: Array | int = 0,
    step: Array | int = 0,
) -> Verified:
    """Speculative sampling: accepts drafted tokens so that outputs follow the target distribution.

    With p the target's distribution after temperature, top_k, top_p and min_p as in
    :func:`sample`, and q the draft's, token x drafted at position j is accepted with probability
    `min(1, p_j(x) / q_j(x))`. The first rejected token is replaced by a draw from
    `max(p_j - q_j, 0)`, normalised; if all are accepted, one more token is drawn from p.
    Acceptance, replacement and the last token use separate random streams.

    Args:
        draft_tokens: int32 [batch, num_drafts]. Tokens outside the vocabulary, such as -1, are
            never accepted; use them to pad requests with fewer drafts.
        logits: of the target model, float32|float16|bfloat16 [batch, num_drafts + 1, vocab_size].
            float64 on the CPU only.
        draft_probs: float32 [batch, num_drafts, vocab_size], the distributions that the drafts
            were drawn from. None for deterministic drafts, such as n-grams or greedy decoding.
        temperature, top_k, top_p, min_p, seed, step: as in :func:`sample`, one value per request;
            position j uses step + j. Without drafts the token is that of :func:`sample`.

    Returns:
        `Verified(tokens, num_accepted)`: int32 [batch, num_drafts + 1], the accepted drafts and one
        more token, then -1; and int32 [batch]. A request whose logits or options are invalid, as
        defined by :func:`sample`, ends at that position, and its num_accepted is -1.

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument.
        ConfigError: a number out of range.

    Runs on CuPy's current stream without synchronisation; deterministic, as :func:`sample`.
    Paper: Leviathan et al., arXiv:2211.17192.

    >>> import numpy as np, cukit as ck
    >>> logits = np.log(np.full((1, 3, 4), 0.05) + 0.8 * np.eye(4)[[2, 1, 0]]).astype("float32")
    >>> ck.speculative_verify(np.array([[2, 3]], "int32"), logits, temperature=0)
    Verified(tokens=array([[ 2,  1, -1]], dtype=int32), num_accepted=array([1], dtype=int32))
    """
    op = "speculative_verify"
    draft_tokens, logits, draft_probs = adopt(op, draft_tokens, logits, draft_probs)
    options = RequestOptions(
        op,
        {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "step": step,
        },
    )
    kernel = runs_kernel(op, draft_tokens, logits, draft_probs, *options.arrays)
    _check(draft_tokens, logits, draft_probs, options)
    if not kernel:
        return reference.speculative_verify(
            draft_tokens, logits, draft_probs=draft_probs, **options.values
        )
    check_limits(op, logits, options)
    if draft_probs is not None:
        check_array(op, "draft_probs", draft_probs, dtypes=(float32,))
    batch, turns, vocab_size = logits.shape
    prepared = _prepare(logits, draws_of(options, vocab_size))
    drawn, accepted = (empty(logits, (batch, turns), int32) for _ in range(2))
    tokens, num_accepted = empty(logits, (batch, turns), int32), empty(logits, (batch,), int32)
    if batch:
        parameters = pack_options(
            options, prepared.config, batch * turns, vocab_size, rows_per_request=turns
        )
        prepared.verify(
            logits,
            NULL,
            *options.pointers(),
            draft_tokens,
            draft_probs,
            drawn,
            NULL,
            NULL,
            NULL,
            accepted,
            trailing_args=(parameters,),
        )
        prepared.collect(drawn, accepted, tokens, num_accepted)
    return Verified(tokens, num_accepted)


class _Prepared(NamedTuple):
    verify: Launch
    collect: Launch
    config: SampleConfig


@launch_plan
def _prepare(logits: Array, draws: str) -> _Prepared:
    batch, turns, vocab_size = logits.shape
    config = plan_sample(
        batch * turns,
        vocab_size,
        logits.dtype.name,
        access_width(vocab_size, logits),
        current_device(),
        draws=draws,
        verifies=True,
    )
    verify = Launch(load_kernel(config.spec()), (batch * turns * config.cluster,))
    parameters = _COLLECT.pack(num_requests=batch, num_drafts=turns - 1)
    grid = (-(-batch // _COLLECT_THREADS),)
    collect = Launch(load_kernel(_collect_spec()), grid, (parameters,), dependent=True)
    return _Prepared(verify, collect, config)


@cache
def _collect_spec() -> KernelSpec:
    defines = (("THREADS", _COLLECT_THREADS),)
    return KernelSpec("sampling/collect_drafts.cu", "collect_drafts", defines, _COLLECT_THREADS)


def _check(
    draft_tokens: Array, logits: Array, draft_probs: Array | None, options: RequestOptions
) -> None:
    op = "speculative_verify"
    check_array(op, "draft_tokens", draft_tokens, dtypes=(int32,), ndim=2)
    batch, num_drafts = draft_tokens.shape
    shape = (batch, num_drafts + 1, None)
    check_array(op, "logits", logits, dtypes=FLOAT_DTYPES, shape=shape)
    check_vocabulary(op, logits.shape[-1])
    if draft_probs is not None:
        check_array(
            op,
            "draft_probs",
            draft_probs,
            dtypes=(float32, float64),
            shape=(batch, num_drafts, logits.shape[-1]),
        )
    options.check_shapes(op, batch)


def _specs(device: Device) -> list[KernelSpec]:
    rows = [
        plan_sample(rows, vocab, dtype, vec, device, draws=draws, verifies=True)
        for rows, vocab, dtype, vec, draws in (
            (256, 128256, "float32", 4, "Few"),
            (256, 128256, "float32", 4, "All"),
            (6, 128256, "float32", 4, "Any"),
            (256, 128256, "float32", 4, "Any"),
            (256, 128256, "bfloat16", 8, "Any"),
            (8, 512, "float16", 8, "Any"),
        )
    ]
    return [*(config.spec() for config in rows), _collect_spec()]


register(
    name="speculative_verify",
    family="sampling",
    function=speculative_verify,
    reference=reference.speculative_verify,
    specs=_specs,
)
