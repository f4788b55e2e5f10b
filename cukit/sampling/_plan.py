"""Launch configurations of sampling: blocks per row of logits, and their use of shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
_ATOM_TOKENS = 1024
_SMALL_ATOM_TOKENS = 256
_SMALL_VOCABULARY = 16384
"""Below this size atoms have _SMALL_ATOM_TOKENS tokens, so that there are enough of them."""
_ATOM_BYTES = 16
"""sizeof(AtomSum) in kernels_cu/sampling/row.cuh."""
_MOST_CANDIDATES = 10240
"""Tokens of a list of candidates (kernels_cu/sampling/candidates.cuh): on Hopper, as many as leave
room for two blocks of 512 threads per SM."""
_RESERVED_BYTES = KIB
"""Shared memory per block that CUDA reserves."""


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
    atom: int
    """Accesses per lane in an atom. The number of tokens of an atom depends on the vocabulary size
    only, hence so do the sums."""
    atoms: int
    """Atoms per block."""
    draws: str
    """What rows may need: "Few" tokens, "All" (no truncation), "Any" or "Drafts" (verified)."""
    capacity: int
    """Tokens that fit in a list of candidates; 0 without a list."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per block."""
        values = self.iterations * self.threads * self.vec * 4 if self.resident else 0
        return _WORKSPACE_BYTES + _ATOM_BYTES * self.atoms + values + 8 * self.capacity

    @property
    def blocks_per_sm(self) -> int:
        """Blocks per SM for which registers are limited."""
        full_sm = not self.penalized and self.draws != "Drafts" and self.threads > _SMALL_BLOCK
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
) -> SampleConfig:
    """The launch configuration.

    Rows are streamed by one block each, because the end of a row takes longer with more blocks: on
    an H200, with top_k, one large block per row took 20.7 us for one row and 29.0 us for 64 rows,
    eight and four blocks of 512 threads per row 25.3 us and 45.2 us (profiling/notes/sampling.md).
    Drafts are verified by one cluster per row, with enough blocks to hold the row in shared memory,
    and more if there are too few rows to fill the GPU; by one block per row before Hopper.

    vec: logits per access, a divisor of `vocab_size`.
    draws: as in SampleConfig.
    """
    verify = draws == "Drafts"
    cluster = 1
    while (
        verify
        and device.compute_capability >= (9, 0)
        and cluster < _LARGEST_CLUSTER
        and _needs_more_blocks(num_rows, vocab_size, cluster, device)
    ):
        cluster *= 2
    share = -(-vocab_size // cluster)
    threads = _SMALL_BLOCK
    if share > _SMALL_SHARE:
        alone = num_rows * cluster <= device.num_sms
        full = alone and not (penalized or verify) and vec <= _LIGHT_ACCESS
        threads = _FULL_BLOCK if full else _SHARED_BLOCK
    iterations = -(-vocab_size // (cluster * threads * vec))
    tokens = _SMALL_ATOM_TOKENS if vocab_size < _SMALL_VOCABULARY else _ATOM_TOKENS
    num_atoms = -(-vocab_size // tokens)
    config = SampleConfig(
        dtype,
        vec,
        threads,
        cluster,
        iterations,
        verify,
        penalized,
        atom=tokens // (_WARP * vec),
        atoms=-(-num_atoms // cluster),
        draws=draws,
        capacity=0,
    )
    if verify:
        fits = config.shared_bytes <= device.shared_bytes_per_block
        return config if fits else replace(config, resident=False)
    if draws != "Any":
        return config
    return replace(config, capacity=_capacity(config, vocab_size, device))


def _capacity(config: SampleConfig, vocab_size: int, device: Device) -> int:
    """Candidates that fit beside the rest of the shared memory of `config`."""
    share = device.shared_bytes_per_sm // config.blocks_per_sm - _RESERVED_BYTES
    free = min(share, device.shared_bytes_per_block) - config.shared_bytes
    return max(min(free // 8, _MOST_CANDIDATES, vocab_size), 0)


def _needs_more_blocks(num_rows: int, vocab_size: int, cluster: int, device: Device) -> bool:
    share = vocab_size / cluster
    too_large = share > _RESIDENT_TOKENS
    return too_large or (share > 2 * _SMALL_SHARE and 2 * num_rows * cluster <= device.num_sms)
