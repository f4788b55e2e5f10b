"""Groups for `tests.sanitize`: scans of one or several segments, gradients, steps, convolution."""

from __future__ import annotations

from cukit import sequence
from tests.contract import random, to_device
from tests.sanitize import Group
from tests.sequence.test_causal_conv import CASES as CONV_CASES
from tests.sequence.test_causal_conv import inputs as conv_inputs
from tests.sequence.test_channel_decay import problem
from tests.sequence.test_gated_scan import SIZES, inputs, rng_of


def scans() -> None:
    for size in SIZES:
        x, b, c, decay, state = to_device("gpu", *inputs(rng_of(), size, "bfloat16"))
        (lengths,) = to_device("gpu", size.cu_seqlens)
        sequence.gated_scan(x, b, c, decay, initial_state=state, cu_seqlens=lengths)


def gradients() -> None:
    for size in SIZES:
        arrays = inputs(rng_of(), size, "bfloat16")
        grad = random(rng_of(), arrays[0].shape, "bfloat16")
        grad, x, b, c, decay, state, lengths = to_device("gpu", grad, *arrays, size.cu_seqlens)
        states = {"initial_state": state, "grad_final_state": state}
        sequence.gated_scan_backward(grad, x, b, c, decay, **states, cu_seqlens=lengths)


def channels() -> None:
    """A decay per channel, within the range of tensor-core products and beyond it."""
    for size in SIZES:
        for decay in (0.05, 3.0):
            arrays, (grad, final) = problem(rng_of(), size, "bfloat16", decay)
            x, b, c, decays, state, grad, final, lengths = to_device(
                "gpu", *arrays, grad, final, size.cu_seqlens
            )
            states = {"initial_state": state, "cu_seqlens": lengths}
            sequence.gated_scan(x, b, c, decays, **states)
            sequence.gated_scan_backward(grad, x, b, c, decays, grad_final_state=final, **states)


def steps() -> None:
    for size in SIZES[:3]:
        x, b, c, decay, state = inputs(rng_of(), size, "float16")
        one = [array[:, 0].copy() for array in (x, b, c, decay)]
        sequence.gated_scan_step(*to_device("gpu", state[: len(x)].copy(), *one))
        one[3] = problem(rng_of(), size, "float16")[0][3][:, 0].copy()
        sequence.gated_scan_step(*to_device("gpu", state[: len(x)].copy(), *one))


def convolutions() -> None:
    for case in CONV_CASES:
        x, weight, bias, state, grad = to_device("gpu", *conv_inputs(rng_of(), *case))
        sequence.causal_conv(x, weight, bias, initial_state=state)
        sequence.causal_conv_backward(grad, x, weight, bias, initial_state=state)
        sequence.causal_conv_step(state, x[:, 0].copy(), weight, bias)


GROUPS = {
    "convolutions": Group(convolutions),
    "scans": Group(scans, shares=True, quick=True),
    "gradients": Group(gradients, shares=True),
    "channels": Group(channels, shares=True),
    "steps": Group(steps, shares=True),
}
