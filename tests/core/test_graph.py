"""Ops can be captured in a CUDA graph and replayed on new contents."""

from __future__ import annotations

import pytest

import cukit as ck
from tests.contract import random, to_device, to_host

pytestmark = pytest.mark.gpu


def test_a_captured_block_replays_on_new_inputs(rng):
    import cupy

    x, weight = to_device(
        "gpu", random(rng, (64, 512), "bfloat16"), random(rng, (512,), "bfloat16")
    )
    normed, gated = ck.empty_like(x), ck.empty((64, 256), "bfloat16", device="gpu")

    def block():
        ck.rms_norm(x, weight, out=normed)
        ck.silu_and_mul(normed, out=gated)

    block()  # compile and plan outside the capture
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.wait_event(cupy.cuda.get_current_stream().record())
    with stream:
        stream.begin_capture()
        block()
        graph = stream.end_capture()
        for _ in range(3):
            x[...] = to_device("gpu", random(rng, (64, 512), "bfloat16"))[0]
            graph.launch(stream)
            stream.synchronize()
            replayed = to_host(gated).copy()
            block()
            stream.synchronize()
            assert replayed.tobytes() == to_host(gated).tobytes()


def test_attention_replays_without_hidden_state(rng):
    import cupy

    q, k, v = (to_device("gpu", random(rng, (2, 100, 4, 64), "float16"))[0] for _ in range(3))
    out = ck.empty_like(q)
    expected = ck.flash_attention(q, k, v, causal=True)
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.wait_event(cupy.cuda.get_current_stream().record())
    with stream:
        # CuPy's pool keeps free blocks per stream: this run frees a block that the capture reuses.
        ck.flash_attention(q, k, v, causal=True, out=out)
        stream.begin_capture()
        ck.flash_attention(q, k, v, causal=True, out=out)
        graph = stream.end_capture()
        out.fill(0)
        graph.launch(stream)
        stream.synchronize()
    assert to_host(out).tobytes() == to_host(expected).tobytes()
