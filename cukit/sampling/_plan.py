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

MOST_BEST = 128
"""kMostBest in kernels_cu/sampling/best.cuh: tokens that one reading of a row finds."""

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
_WARP = 32
_ATOM_LOGITS = 32
"""Logits of a lane in an atom, 128 bytes in flight a thread."""
_SMALL_VOCABULARY = 16384
"""Below, atoms are one access a lane, so that there are enough of them."""
_STREAM_BYTES = 64 * KIB
"""Sums of atoms that a block may keep."""


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
    """A row stays in shared memory where it is read more than once."""
    penalized: bool
    verify: bool
    atom: int
    """Accesses of a lane in an atom; depends on the vocabulary and `vec` alone, so that sums do."""
    stream_bytes: int
    """Shared memory for the sums of the atoms that a block streams; 0: rows are not streamed."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        values = self.iterations * self.threads * self.vec * 4 if self.resident else 0
        return _WORKSPACE_BYTES + max(values, self.stream_bytes)

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        crowded = not (self.penalized or self.verify) and self.threads > _SMALL_BLOCK
        crowded &= not (self.stream_bytes and self.cluster > 1)
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
            ("BLOCKS_PER_SM", max(_FULL_BLOCK // self.threads, 1) if crowded else 1),
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
    """A cluster a row, of so many blocks that the row fits into their shared memory; of more where
    there are too few rows for all multiprocessors. One block before Hopper.

    vec: logits an access, a divisor of `vocab_size`.
    few: most rows need their first MOST_BEST tokens at most, so that one block streams each row: on
        an H200 one large block took 20.7 us for one row and 29.0 us for 64, eight and four blocks
        of 512 threads 25.3 us and 45.2 us (profiling/notes/sampling.md).
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
            and _wants_more(num_rows, vocab_size, cluster, device)
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
    """Shared memory for the sums of the atoms that a block of `config` streams."""
    return _stream_bytes(vocab_size, config.vec, config.cluster, config.threads)


def _atom(vocab_size: int, vec: int) -> int:
    return 1 if vocab_size < _SMALL_VOCABULARY else min(8, _ATOM_LOGITS // vec)


def _stream_bytes(vocab_size: int, vec: int, cluster: int, threads: int) -> int:
    """8 bytes for each thread and round of a block."""
    atoms = -(-vocab_size // (_atom(vocab_size, vec) * _WARP * vec))
    share = -(-atoms // cluster)
    rounds = -(-share // (threads // _WARP))
    return 8 * threads * rounds


def _wants_more(num_rows: int, vocab_size: int, cluster: int, device: Device) -> bool:
    share = vocab_size / cluster
    crowded = share > _RESIDENT_TOKENS
    return crowded or (share > 2 * _SMALL_SHARE and 2 * num_rows * cluster <= device.num_sms)
