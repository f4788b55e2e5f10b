"""How many blocks share a row of logits, and what of it they keep in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from cukit.core.device import KIB, Device
from cukit.core.kernel import KernelSpec

MOST_TOKENS = 1 << 20
"""Of a vocabulary, in the kernel: sums of integer weights must fit in 63 bits."""
MOST_LISTED = 512
"""Log-probabilities of a row, in the kernel."""

_WORKSPACE_BYTES = 26 * KIB
"""kWorkspaceBytes in kernels_cu/sampling/select.cuh."""
_FULL_BLOCK = 1024
_SHARED_BLOCK = 512
_LIGHT_ACCESS = 4
"""Logits an access up to which 64 registers, those of a full block's thread, suffice."""
_SMALL_BLOCK = 128
_SMALL_SHARE = 2048
"""Tokens of a block up to which four warps suffice."""
_RESIDENT_TOKENS = 16640
"""Tokens a block: two blocks of so many fit on a multiprocessor of Hopper."""
_LARGEST_CLUSTER = 8


@dataclass(frozen=True)
class SampleConfig:
    """One way to run the kernel over rows of one vocabulary."""

    dtype: str
    vec: int
    threads: int
    cluster: int
    iterations: int
    """Accesses of a thread."""
    resident: bool
    penalized: bool
    verify: bool

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        values = self.iterations * self.threads * self.vec * 4 if self.resident else 0
        return _WORKSPACE_BYTES + values

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        light = not (self.penalized or self.verify)
        defines = (
            ("DTYPE", self.dtype),
            ("VEC", self.vec),
            ("THREADS", self.threads),
            ("CLUSTER", self.cluster),
            ("RESIDENT", self.resident),
            ("PENALIZED", self.penalized),
            ("VERIFY", self.verify),
            ("BLOCKS_PER_SM", 2 if light and self.threads == _SHARED_BLOCK else 1),
        )
        source = "sampling/sample.cu"
        return KernelSpec(source, "sample", defines, self.threads, self.shared_bytes)


@cache
def plan_sample(
    num_rows: int,
    vocab_size: int,
    dtype: str,
    vec: int,
    device: Device,
    *,
    penalized: bool = False,
    verify: bool = False,
) -> SampleConfig:
    """A cluster a row, of so many blocks that the row fits into their shared memory; of more where
    there are too few rows for all multiprocessors. One block before Hopper.

    vec: logits an access, a divisor of `vocab_size`.
    """
    cluster = 1
    if device.compute_capability >= (9, 0):
        while cluster < _LARGEST_CLUSTER and _wants_more(num_rows, vocab_size, cluster, device):
            cluster *= 2
    share = -(-vocab_size // cluster)
    threads = _SMALL_BLOCK
    if share > _SMALL_SHARE:
        alone = num_rows * cluster <= device.num_sms
        light = not (penalized or verify) and vec <= _LIGHT_ACCESS
        threads = _FULL_BLOCK if alone and light else _SHARED_BLOCK
    iterations = -(-vocab_size // (cluster * threads * vec))
    values_bytes = iterations * threads * vec * 4
    resident = _WORKSPACE_BYTES + values_bytes <= device.shared_bytes_per_block
    return SampleConfig(dtype, vec, threads, cluster, iterations, resident, penalized, verify)


def _wants_more(num_rows: int, vocab_size: int, cluster: int, device: Device) -> bool:
    share = vocab_size / cluster
    crowded = share > _RESIDENT_TOKENS
    return crowded or (share > 2 * _SMALL_SHARE and 2 * num_rows * cluster <= device.num_sms)
