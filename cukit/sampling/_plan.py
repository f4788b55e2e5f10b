"""Launch configurations of sampling: blocks per row of logits, and their use of shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from cukit.core.device import KIB, Device
from cukit.core.kernel import KernelSpec

MAX_TOKENS = 1 << 20
"""Largest vocabulary of the kernel: sums of integer weights must fit in 63 bits."""
MAX_LISTED = 512
"""Maximum number of log-probabilities per row that the kernel lists."""

MAX_BEST = 128
"""kMaxBest in kernels_cu/sampling/best.cuh: maximum tokens found in one pass over a row."""

_WORKSPACE_BYTES = 26 * KIB
"""kWorkspaceBytes in kernels_cu/sampling/select.cuh."""
_FULL_BLOCK = 1024
_SHARED_BLOCK = 512
_LIGHT_ACCESS = 4
"""Widest access, in logits, for which 64 registers per thread suffice, as in a full block."""
_SMALL_BLOCK = 128
_SMALL_SHARE = 2048
"""Maximum tokens per block for which four warps suffice."""
_LARGEST_CLUSTER = 8
_WARP = 32
_ATOM_TOKENS = 1024
"""Tokens of an atom, the unit in which a row is summed (kernels_cu/sampling/row.cuh)."""
_SMALL_ATOM_TOKENS = 256
_SMALL_VOCABULARY = 16384
"""Smaller vocabularies have atoms of _SMALL_ATOM_TOKENS tokens, so that more warps have atoms."""
_ATOM_BYTES = 16
"""sizeof(AtomSum) in kernels_cu/sampling/row.cuh."""
_MAX_CANDIDATES = 10240
"""Maximum tokens of a list of candidates (kernels_cu/sampling/candidates.cuh). On Hopper it leaves
room for two blocks per SM: a list of 20480 took 9 us longer for a batch of 64 on an H200."""
_RESERVED_BYTES = KIB
"""Shared memory per block that CUDA reserves."""


@dataclass(frozen=True)
class SampleConfig:
    """A launch configuration of the kernel for one vocabulary size."""

    dtype: str
    vec: int
    threads: int
    cluster: int
    resident: bool
    """The row is kept in shared memory, for repeated reads."""
    penalized: bool
    atom: int
    """Accesses per lane in an atom. The number of tokens of an atom depends on the vocabulary size
    only, hence so do the sums."""
    atoms: int
    """Atoms per block."""
    draws: str
    """Draws that rows may require: "Few" (from at most MAX_BEST tokens), "All" (no truncation) or
    "Any"."""
    verifies: bool
    """Rows may have drafted tokens to verify."""
    capacity: int
    """Tokens that fit in a list of candidates; 0 without a list."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per block."""
        values = 4 * self.atom * _WARP * self.vec if self.resident else 0
        return _WORKSPACE_BYTES + (_ATOM_BYTES + values) * self.atoms + 8 * self.capacity

    @property
    def blocks_per_sm(self) -> int:
        """Blocks per SM in the kernel's launch bounds, which limit the registers per thread."""
        full_sm = not self.resident and not self.penalized and self.threads > _SMALL_BLOCK
        return max(_FULL_BLOCK // self.threads, 1) if full_sm else 1

    def spec(self) -> KernelSpec:
        """The kernel variant for this configuration."""
        defines = (
            ("DTYPE", self.dtype),
            ("VEC", self.vec),
            ("THREADS", self.threads),
            ("CLUSTER", self.cluster),
            ("RESIDENT", self.resident),
            ("PENALIZED", self.penalized),
            ("ATOM", self.atom),
            ("DRAWS", self.draws),
            ("VERIFIES", self.verifies),
            ("BLOCKS_PER_SM", self.blocks_per_sm),
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
    draws: str = "Any",
    verifies: bool = False,
) -> SampleConfig:
    """The launch configuration.

    Rows are streamed by one block each, because the steps after the last load of a row take longer
    with more blocks. On an H200, with top_k, one block of 1024 threads per row took 20.7 us for one
    row and 29.0 us for 64 rows; eight blocks of 512 threads took 25.3 us for one row, four blocks
    per row 45.2 us for 64 rows (profiling/notes/sampling.md).
    If there are few rows, and truncation may keep more than MAX_BEST tokens, a cluster keeps each
    row in shared memory: with top_p, clusters of eight took 38 us for 8 rows and 64 us (two waves)
    for 16 rows, single blocks 66 us and 67 us. Without truncation, clusters are used only to verify
    drafts, as a rejected draft takes a second pass over the row. Before Hopper there are no
    clusters.

    vec: logits per access, a divisor of `vocab_size`.
    draws, verifies: as in SampleConfig.
    """
    tokens = _SMALL_ATOM_TOKENS if vocab_size < _SMALL_VOCABULARY else _ATOM_TOKENS
    streamed = SampleConfig(
        dtype,
        vec,
        _SMALL_BLOCK if vocab_size <= _SMALL_SHARE else _SHARED_BLOCK,
        cluster=1,
        resident=False,
        penalized=penalized,
        atom=tokens // (_WARP * vec),
        atoms=-(-vocab_size // tokens),
        draws=draws,
        verifies=verifies,
        capacity=0,
    )
    rereads = draws == "Any" or (draws == "All" and verifies)
    if rereads and _few_rows(num_rows, vocab_size, device):
        clustered = _cluster_per_row(streamed, vocab_size)
        if clustered.shared_bytes <= device.shared_bytes_per_block:
            return clustered
    alone = num_rows <= device.num_sms or draws == "Any"
    if alone and vocab_size > _SMALL_SHARE and vec <= _LIGHT_ACCESS and not penalized:
        streamed = replace(streamed, threads=_FULL_BLOCK)
    if draws != "Any":
        return streamed
    return replace(streamed, capacity=_capacity(streamed, vocab_size, device))


def _few_rows(num_rows: int, vocab_size: int, device: Device) -> bool:
    """Whether rows are long, and clusters of eight blocks occupy at most half of the SMs: not every
    SM can belong to a cluster of eight."""
    clusters = device.compute_capability >= (9, 0)
    return (
        clusters
        and vocab_size >= _SMALL_VOCABULARY
        and 2 * num_rows * _LARGEST_CLUSTER <= device.num_sms
    )


def _cluster_per_row(streamed: SampleConfig, vocab_size: int) -> SampleConfig:
    """A cluster per row, which keeps the row in shared memory."""
    cluster = 1
    while cluster < _LARGEST_CLUSTER and vocab_size > 2 * _SMALL_SHARE * cluster:
        cluster *= 2
    return replace(
        streamed,
        threads=_SHARED_BLOCK,
        cluster=cluster,
        resident=True,
        draws="Any",
        atoms=-(-streamed.atoms // cluster),
    )


def _capacity(config: SampleConfig, vocab_size: int, device: Device) -> int:
    """Candidates that fit in the shared memory that `config` leaves free."""
    share = device.shared_bytes_per_sm // config.blocks_per_sm - _RESERVED_BYTES
    free = min(share, device.shared_bytes_per_block) - config.shared_bytes
    return max(min(free // 8, _MAX_CANDIDATES, vocab_size), 0)
