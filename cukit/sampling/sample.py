"""Sampling a token from each row of logits."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from cukit.core.arrays import (
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    Array,
    access_width,
    adopt,
    check_array,
    empty,
    float32,
    int32,
    runs_kernel,
)
from cukit.core.device import Device, current_device
from cukit.core.kernel import NULL, KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.core.scalars import check_integer
from cukit.errors import ConfigError
from cukit.reference import sampling as reference
from cukit.reference.sampling import Sample
from cukit.registry import register
from cukit.sampling._options import RequestOptions
from cukit.sampling._plan import (
    MAX_BEST,
    MAX_LISTED,
    MAX_TOKENS,
    SampleConfig,
    plan_sample,
)

_STRUCTS = parameter_structs("sampling/parameters.cuh")
_COUNT_THREADS = 256
_COUNT_CHUNK = 16384


def sample(
    logits: Array,
    *,
    temperature: Array | float = 1.0,
    top_k: Array | int | None = None,
    top_p: Array | float | None = None,
    min_p: Array | float | None = None,
    repetition_penalty: Array | float | None = None,
    presence_penalty: Array | float | None = None,
    frequency_penalty: Array | float | None = None,
    history: Array | None = None,
    prompt_lengths: Array | None = None,
    seed: Array | int = 0,
    step: Array | int = 0,
    logprobs: int | None = None,
) -> Sample:
    """Samples a token from each row of logits.

    `p = softmax(z / temperature)`, where z is the logits after the penalties. The candidates are
    truncated in order: the `top_k` most likely tokens; of these the smallest set with at least
    `top_p` of their probability, including the token that crosses `top_p`; of these the tokens with
    at least `min_p` times the largest probability. One candidate is drawn with probability
    proportional to p. Ties are ordered by token id, lowest first: `top_k=1` and `temperature=0` are
    argmax.

    Every option may be a number for all requests or an array with one value per request.

    Args:
        logits: float32|float16|bfloat16 [batch, vocab_size], C-contiguous. float64 on the CPU only.
            Up to 2^20 tokens on the GPU.
        temperature: float32 [batch] or a number, at least 0.
        top_k: int32 [batch], 0 for no limit; or a number, None for no limit.
        top_p: float32 [batch] or a number, 0 to 1. 0 keeps only the most likely token.
        min_p: float32 [batch] or a number, 0 to 1.
        repetition_penalty: float32 [batch] or a number above 0. Positive logits of tokens in
            `history` are divided by it, negative ones multiplied (Keskar et al., arXiv:1909.05858).
        presence_penalty, frequency_penalty: float32 [batch] or a number. The logit of a token that
            was generated n > 0 times is reduced by presence_penalty + n * frequency_penalty.
        history: int32 [batch, length], the tokens of each request so far, padded with ids outside
            the vocabulary such as -1. None: no penalties.
        prompt_lengths: int32 [batch]: number of leading tokens of `history` that belong to the
            prompt; only the repetition penalty applies to them. None: 0.
        seed: int64 [batch]; or a number, with seed + r for row r.
        step: int64 [batch] or a number: tokens generated so far. The same seed and step draw the
            same token from the same logits and options, regardless of the other rows and the GPU.
        logprobs: None for none, 0 for the drawn token, n to also list the n most likely tokens (up
            to 512 on the GPU).

    Returns:
        `Sample(tokens, logprobs, top_tokens, top_logprobs)`: int32 [batch], float32 [batch],
        int32 [batch, n] and float32 [batch, n], most likely first; None if not requested.
        Log-probabilities are those of softmax(z / temperature) before truncation (for temperature
        0, of softmax(z)). An invalid row (a NaN, +infinity or only -infinity, or an option out of
        range in an array) has token -1 and log-probabilities NaN.

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument.
        ConfigError: a number out of range.

    On the GPU, probabilities are computed in float32 and rounded down to integer multiples of 2^-42
    of the largest. Integer sums are exact, so results depend neither on the thread order nor on the
    number of blocks per row. The CPU computes in float64. Runs on CuPy's current stream without
    synchronisation. Random numbers are Philox4x32-10 (Salmon et al., SC 2011), 64 bits per draw.
    Papers: Holtzman et al., arXiv:1904.09751 (top-p); Nguyen et al., arXiv:2407.01082 (min-p).

    >>> import numpy as np, cukit as ck
    >>> logits = np.log([[0.1, 0.6, 0.3], [0.5, 0.25, 0.25]]).astype("float32")
    >>> ck.sample(logits, top_p=0.4).tokens
    array([1, 0], dtype=int32)
    >>> drawn = ck.sample(logits, top_k=2, seed=7, logprobs=2)
    >>> drawn.top_tokens, np.exp(drawn.top_logprobs).round(2)
    (array([[1, 2],
           [0, 1]], dtype=int32), array([[0.6 , 0.3 ],
           [0.5 , 0.25]], dtype=float32))
    """
    op = "sample"
    logits, history, prompt_lengths = adopt(op, logits, history, prompt_lengths)
    options = RequestOptions(
        op,
        {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "seed": seed,
            "step": step,
        },
    )
    if logprobs is not None:
        check_integer(op, "logprobs", logprobs, least=0)
        logprobs = int(logprobs)
    on_kernel = runs_kernel(op, logits, history, prompt_lengths, *options.arrays)
    _check(logits, options, history, prompt_lengths, logprobs)
    if not on_kernel:
        return reference.sample(
            logits,
            history=history,
            prompt_lengths=prompt_lengths,
            logprobs=logprobs,
            **options.values,
        )
    check_limits(op, logits, options)
    top_n = logprobs or 0
    if top_n > MAX_LISTED:
        raise ConfigError(f"{op}: logprobs must be at most {MAX_LISTED} on the GPU, got {top_n}")
    batch, vocab_size = logits.shape
    prepared = _prepare(logits, history, draws_of(options, vocab_size, top_n))
    counts = NULL
    if prepared.count_tokens is not None:
        counts = empty(logits, (batch, vocab_size), int32)
        prepared.count_tokens(history, prompt_lengths, counts)
    tokens = empty(logits, (batch,), int32)
    drawn = NULL if logprobs is None else empty(logits, (batch,), float32)
    top_tokens = empty(logits, (batch, top_n), int32) if top_n else NULL
    top_logprobs = empty(logits, (batch, top_n), float32) if top_n else NULL
    if batch:
        prepared.sample(
            logits,
            counts,
            *options.pointers(),
            NULL,
            NULL,
            tokens,
            drawn,
            top_tokens,
            top_logprobs,
            NULL,
            trailing_args=(pack_options(options, prepared.config, batch, vocab_size, logprobs),),
        )
    return Sample(tokens, drawn, top_tokens, top_logprobs)


def pack_options(
    options: RequestOptions,
    config: SampleConfig,
    num_rows: int,
    vocab_size: int,
    logprobs: int | None = None,
    rows_per_request: int = 1,
) -> Any:
    """The kernel's parameter struct."""
    return _STRUCTS["SampleParameters"].pack(
        seed=options.number("seed") % 2**64,
        step=options.number("step") % 2**64,
        num_rows=num_rows,
        vocab_size=vocab_size,
        capacity=config.capacity,
        logprobs=int(logprobs is not None),
        top_n=logprobs or 0,
        rows_per_request=rows_per_request,
        temperature=options.number("temperature"),
        top_p=options.number("top_p"),
        min_p=options.number("min_p"),
        repetition_penalty=options.number("repetition_penalty"),
        presence_penalty=options.number("presence_penalty"),
        frequency_penalty=options.number("frequency_penalty"),
        top_k=options.number("top_k"),
    )


class _Prepared(NamedTuple):
    sample: Launch
    count_tokens: Launch | None
    config: SampleConfig


def draws_of(options: RequestOptions, vocab_size: int, top_n: int = 0) -> str:
    """`draws` of SampleConfig for these options; the values of arrays are unknown on the host."""
    greedy = options.is_number("temperature") and options.number("temperature") == 0
    top_k = options.number("top_k") if options.number("top_k") < vocab_size else 0
    short = options.is_number("top_k") and 0 < top_k <= MAX_BEST
    if (greedy or short) and top_n <= MAX_BEST:
        return "Few"
    if top_n or not all(map(options.is_number, ("temperature", "top_k", "top_p", "min_p"))):
        return "Any"
    truncates = top_k or options.number("top_p") < 1 or options.number("min_p")
    return "Any" if truncates or options.number("temperature") == 0 else "All"


@launch_plan
def _prepare(logits: Array, history: Array | None, draws: str) -> _Prepared:
    batch, vocab_size = logits.shape
    config = plan_sample(
        batch,
        vocab_size,
        logits.dtype.name,
        access_width(vocab_size, logits),
        current_device(),
        penalized=history is not None,
        draws=draws,
    )
    launch = Launch(load_kernel(config.spec()), (batch * config.cluster,))
    if history is None:
        return _Prepared(launch, None, config)
    parameters = _STRUCTS["CountParameters"].pack(
        vocab_size=vocab_size, length=history.shape[1], chunk=_COUNT_CHUNK
    )
    grid = (-(-vocab_size // _COUNT_CHUNK), batch)
    return _Prepared(launch, Launch(load_kernel(_count_spec()), grid, (parameters,)), config)


@cache
def _count_spec() -> KernelSpec:
    defines = (("THREADS", _COUNT_THREADS),)
    return KernelSpec("sampling/count_tokens.cu", "count_tokens", defines, _COUNT_THREADS)


def _check(
    logits: Array,
    options: RequestOptions,
    history: Array | None,
    prompt_lengths: Array | None,
    logprobs: int | None,
) -> None:
    op = "sample"
    check_array(op, "logits", logits, dtypes=FLOAT_DTYPES, ndim=2)
    batch, vocab_size = logits.shape
    check_vocabulary(op, vocab_size)
    options.check_shapes(op, batch)
    if history is not None:
        check_array(op, "history", history, dtypes=(int32,), shape=(batch, None))
    if prompt_lengths is not None:
        check_array(op, "prompt_lengths", prompt_lengths, dtypes=(int32,), shape=(batch,))
    if logprobs is not None and logprobs > vocab_size:
        raise ConfigError(f"{op}: logprobs must be at most {vocab_size} (tokens), got {logprobs}")


def check_vocabulary(op: str, vocab_size: int) -> None:
    """Raises ConfigError if the vocabulary is empty."""
    if vocab_size < 1:
        raise ConfigError(f"{op}: logits must have at least one token per row, got {vocab_size}")


def check_limits(op: str, logits: Array, options: RequestOptions) -> None:
    """Checks the requirements of the kernel that the reference does not have."""
    check_array(op, "logits", logits, dtypes=KERNEL_DTYPES)
    if logits.shape[-1] > MAX_TOKENS:
        raise ConfigError(
            f"{op}: logits must have at most {MAX_TOKENS} tokens per row on the GPU, "
            f"got {logits.shape[-1]}"
        )
    for name, value in options.values.items():
        if getattr(value, "dtype", None) == "float64":
            check_array(op, name, value, dtypes=(float32,))


def _specs(device: Device) -> list[KernelSpec]:
    rows = [
        plan_sample(rows, vocab, dtype, vec, device, penalized=penalized, draws=draws)
        for rows, vocab, dtype, vec, penalized, draws in (
            (1, 128256, "float32", 4, False, "Few"),
            (256, 128256, "float32", 4, False, "Few"),
            (256, 128256, "float32", 4, False, "All"),
            (1, 128256, "float32", 4, False, "Any"),
            (256, 128256, "float32", 4, False, "Any"),
            (256, 128256, "float32", 4, True, "Any"),
            (64, 151936, "bfloat16", 8, False, "Few"),
            (64, 151936, "bfloat16", 8, False, "Any"),
            (4, 151936, "bfloat16", 8, True, "Any"),
            (256, 50257, "float16", 1, False, "All"),
            (4, 512, "float32", 4, False, "Any"),
            (4, 1 << 20, "bfloat16", 8, True, "Any"),
        )
    ]
    return [*(config.spec() for config in rows), _count_spec()]


register(
    name="sample",
    family="sampling",
    function=sample,
    reference=reference.sample,
    specs=_specs,
)
