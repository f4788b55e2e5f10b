"""topk_router and expert_order with almost 2^31 tokens, near the limit of int32 indices."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cukit.core.kernel import load_kernel
from cukit.moe import expert_order, topk_router
from cukit.moe.order import plan_expert_order, routing_parameters
from tests.contract import to_device, to_host
from tests.devices import kernels_only

MAX = 2**31 - 1
LAST = 5000  # tokens whose results are compared one by one
NUM_SMS = 132
GIB = 1 << 30

BOUNDS = """
#include "moe/expert_order.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) bounds(
    int* out,  // [THREADS / 32, 6]
    const int chunk, const __grid_constant__ cukit::RoutingParameters p) {
  const cukit::Choices c(p, chunk);
  if (threadIdx.x % 32 == 0) {
    int* const to = out + threadIdx.x / 32 * 6;
    to[0] = c.first_token, to[1] = c.tokens, to[2] = c.first, to[3] = c.count;
    to[4] = c.own_first, to[5] = c.own_end;
  }
}
"""


@kernels_only
@pytest.mark.parametrize(("num_tokens", "top_k"), [(MAX, 1), (MAX // 8, 8), (20_000, 32), (9, 2)])
def test_chunks_cover_all_choices(device, tmp_path, num_tokens, top_k):
    config = plan_expert_order(num_tokens, 64, NUM_SMS, top_k)
    source = tmp_path / "bounds.cu"
    source.write_text(BOUNDS)
    kernel = load_kernel(
        dataclasses.replace(config.count_spec(), source=str(source), entry="bounds")
    )
    parameters = routing_parameters(num_tokens, 64, top_k, config.chunk, None)
    for chunk in (0, config.num_chunks - 1, config.num_chunks):  # the last computes losses
        (out,) = to_device(device, np.full((config.threads // 32, 6), -1, np.int32))
        kernel((1,), (out, np.int32(chunk), parameters))
        warps = to_host(out)
        first = min(chunk * config.chunk, num_tokens)
        tokens = min(config.chunk, num_tokens - first)
        np.testing.assert_array_equal(
            warps[:, :4], [[first, tokens, first * top_k, tokens * top_k]] * len(warps)
        )
        choices = [i for *_, begin, end in warps.tolist() for i in range(begin, end)]
        assert choices == list(range(tokens * top_k))


@pytest.fixture
def empty_gpu_pool():
    """Empties CuPy's memory pool before and after the test, which needs 40 GiB."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    free = cupy.cuda.Device().mem_info[0]
    if free < 40 * GIB:
        pytest.skip(f"needs 40 GiB of GPU memory, {free / GIB:.0f} are free")
    yield
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.gpu
def test_expert_order(empty_gpu_pool):
    import cupy

    experts = cupy.zeros((MAX, 1), np.int32)
    experts[-LAST:, 0] = cupy.arange(LAST) % 3
    ones, twos = (LAST + 1) // 3, LAST // 3
    order = expert_order(experts, 3)
    counts = [MAX - ones - twos, ones, twos]
    np.testing.assert_array_equal(to_host(order.expert_counts), counts)
    check_last(order.rows, to_host(experts[-LAST:, 0]), counts)


@pytest.mark.gpu
def test_topk_router(empty_gpu_pool):
    import cupy

    logits = cupy.zeros((MAX, 2), np.float16)
    logits[-LAST:, 1] = cupy.arange(LAST) % 2  # all other tokens choose the first of equal logits
    routing = topk_router(logits, 1)
    chosen = np.arange(LAST, dtype=np.int32) % 2
    counts = [MAX - LAST // 2, LAST // 2]
    np.testing.assert_array_equal(to_host(routing.expert_counts), counts)
    np.testing.assert_array_equal(to_host(routing.experts[-LAST:, 0]), chosen)
    check_last(routing.rows, chosen, counts)
    assert bool((routing.weights == 1).all())


def check_last(rows, chosen, counts):
    """Checks that the last tokens have the last rows of their experts."""
    got = to_host(rows[-LAST:, 0])
    for expert, end in enumerate(np.cumsum(counts)):
        mine = got[chosen == expert]
        np.testing.assert_array_equal(mine, np.arange(end - len(mine), end))
