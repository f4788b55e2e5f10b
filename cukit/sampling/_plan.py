"""Launch configurations of sampling: blocks per row of logits, and their use of shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from cukit.core.device import KIB, Device
from cukit.core.kernel import KernelSpec

MOST_TOKENS = 1 << 20
"""Largest vocabulary of the kernel: sums of integer weights must fit in 63 bits."""
MOST_LISTED = 512
"""Most log-probabilities per row that the kernel lists."""

MOST_BEST = 128
"""kMostBest in kernels_cu/sampling/best.cuh: most tokens found in a single pass over a row."""

_WORKSPACE_BYTES = 26 * KIB
"""kWorkspaceBytes in kernels_cu/sampling/select.cuh."""
_FULL_BLOCK = 1024
_SHARED_BLOCK = 512
_LIGHT_ACCESS = 4
"""Widest access, in logits, for which 64 registers per thread, those of a full block, suffice."""
_SMALL_BLOCK = 128
_SMALL_SHARE = 2048
"""Most tokens per block for which four warps suffice."""
_RESIDENT_TOKENS = 16640
"""Most tokens per block of which two blocks fit on a Hopper SM."""
_LARGEST_CLUSTER = 8
_WARP = 32
_ATOM_LOGITS = 32
"""Logits per lane in an atom: 128 bytes in flight per thread."""
_SMALL_VOCABULARY = 16384
"""Below this size an atom is one access per lane, so that there are enough atoms."""
_STREAM_BYTES = 64 * KIB
"""Most shared memory for the sums of a block's atoms."""


@dataclass(frozen=True)
class SampleConfig:
    """A launch configuration of the kernel for one vocabulary size."""

    dtype: str
    vec: int
    threads: int
    cluster: int
    iterations: int
    """Accesses per thread."""
    resident: bool
    """The row is kept in shared memory, for repeated reads."""
    penalized: bool
    verify: bool
    atom: int
    """Accesses per lane in an atom. A function of vocabulary size and `vec` only, hence so are the
    sums."""
    stream_bytes: int
    """Shared memory for the sums of a block's atoms if rows are streamed; else 0."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per block."""
        values = self.iterations * self.threads * self.vec * 4 if self.resident else 0
        return _WORKSPACE_BYTES + max(values, self.stream_bytes)

    def spec(self) -> KernelSpec:
        """The kernel variant for this configuration."""
        full_sm = not (self.penalized or self.verify) and self.threads > _SMALL_BLOCK
        full_sm &= not (self.stream_bytes and self.cluster > 1)
        defines = (
            ("DTYPE", self.dtype),
            ("VEC", self.vec),
            ("THREADS", self.threads),
            ("CLUSTER", self.cluster),
            ("RESIDENT", self.resident),
            ("PENALIZED", self.penalized),
            ("VERIFY", self.verify),
            ("ATOM", self.atom),
            ("STREAMED", self.stream_bytes > 0),
            ("BLOCKS_PER_SM", max(_FULL_BLOCK // self.threads, 1) if full_sm else 1),
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
    few: bool = False,
) -> SampleConfig:
    """The launch configuration: one cluster per row, with enough blocks to hold the row in shared
    memory, and more if there are too few rows to fill the GPU. One block per row before Hopper.

    vec: logits per access, a divisor of `vocab_size`.
    few: rows need at most their first MOST_BEST tokens, so one block streams each row if possible.
        On an H200 one large block per row took 20.7 us for one row and 29.0 us for 64 rows, eight
        and four blocks of 512 threads per row 25.3 us and 45.2 us (profiling/notes/sampling.md).
    """
    light = not (penalized or verify)
    clusters = device.compute_capability >= (9, 0)
    cluster = 1
    if few:
        while (
            clusters
            and cluster < _LARGEST_CLUSTER
            and _stream_bytes(vocab_size, vec, cluster, _SHARED_BLOCK) > _STREAM_BYTES
        ):
            cluster *= 2
    else:
        while (
            clusters
            and cluster < _LARGEST_CLUSTER
            and _needs_more_blocks(num_rows, vocab_size, cluster, device)
        ):
            cluster *= 2
    share = -(-vocab_size // cluster)
    threads = _SMALL_BLOCK
    if share > _SMALL_SHARE:
        alone = num_rows * cluster <= device.num_sms
        full = alone and light and vec <= _LIGHT_ACCESS and not (few and cluster > 1)
        threads = _FULL_BLOCK if full else _SHARED_BLOCK
    iterations = -(-vocab_size // (cluster * threads * vec))
    values_bytes = iterations * threads * vec * 4
    resident = not few and _WORKSPACE_BYTES + values_bytes <= device.shared_bytes_per_block
    stream_bytes = _stream_bytes(vocab_size, vec, cluster, threads) if few else 0
    if stream_bytes > _STREAM_BYTES:
        stream_bytes = 0
    atom = _atom(vocab_size, vec)
    return SampleConfig(
        dtype, vec, threads, cluster, iterations, resident, penalized, verify, atom, stream_bytes
    )


def stream_bytes(vocab_size: int, config: SampleConfig) -> int:
    """Shared memory for the sums of the atoms of a block of `config`."""
    return _stream_bytes(vocab_size, config.vec, config.cluster, config.threads)


def _atom(vocab_size: int, vec: int) -> int:
    return 1 if vocab_size < _SMALL_VOCABULARY else min(8, _ATOM_LOGITS // vec)


def _stream_bytes(vocab_size: int, vec: int, cluster: int, threads: int) -> int:
    """8 bytes per thread and round of a block."""
    atoms = -(-vocab_size // (_atom(vocab_size, vec) * _WARP * vec))
    share = -(-atoms // cluster)
    rounds = -(-share // (threads // _WARP))
    return 8 * threads * rounds


def _needs_more_blocks(num_rows: int, vocab_size: int, cluster: int, device: Device) -> bool:
    share = vocab_size / cluster
    too_large = share > _RESIDENT_TOKENS
    return too_large or (share > 2 * _SMALL_SHARE and 2 * num_rows * cluster <= device.num_sms)
