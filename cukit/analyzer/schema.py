"""The results of an analysis, as frozen dataclasses that are stored as JSON.

One rule holds throughout: a value that was not measured is None, and `missing` gives the reason.
Nothing is estimated in place of a measurement, and computed values (theoretical occupancy, waves,
roofline) follow from fields of the same analysis.

    AnalysisReport                     the file: version, machine, kernels, AccessPoints
    ├── Environment ── Ceilings
    └── KernelAnalysis                 one kernel, or one call that launches several
        ├── LaunchAnalysis             one launch: properties set by the compiler and the grid
        │   ├── Resources  OccupancyAnalysis  Waves
        │   └── MemoryAccess ── AccessWidth, InstructionMix
        ├── TimeStatistics             cold and warm
        ├── Throughput  RooflinePoint  Energy  Conditions  Counters
        └── Advice

Units are in the names. analyzer/schema_json.py has `to_json` and `from_json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SCHEMA_VERSION = 1
"""Increased when a field is removed or changes its meaning, not for new fields with a default."""

Dim3 = tuple[int, int, int]
"""The extents of a grid or block: x, y, z."""


@dataclass(frozen=True)
class Ceilings:
    """The peak rates of this machine: from its datasheet, and as measured in the same process."""

    datasheet_gbps: float | None = None
    """Of device memory. Computed from memory clock and bus width if the GPU has no datasheet in
    analyzer/devices.py; None if these are unknown, too."""
    datasheet_tflops: Mapping[str, float] = field(default_factory=dict)
    """By pipe: "fp32", "tensor_fp16", "tensor_bf16", ... dense, at the vendor's boost clock."""
    tflops_per_mhz: Mapping[str, float] = field(default_factory=dict)
    """The same pipes: TFLOP/s of all SMs per MHz of SM clock, for the peak at any clock."""
    measured_copy_gbps: float | None = None
    """Bytes read plus bytes written of a device-to-device copy much larger than L2."""
    measured_tflops: Mapping[str, float] = field(default_factory=dict)
    """"fp32": by multiply-adds; tensor pipes: by a large matrix product of cuBLAS."""


@dataclass(frozen=True)
class Environment:
    """The machine and the software."""

    gpu: str | None
    """None in static mode."""
    arch: str
    """E.g. "sm_90": of the GPU, or the target of a static analysis."""
    num_sms: int
    l2_bytes: int
    memory_bytes: int
    driver: str | None
    cuda: str | None
    versions: Mapping[str, str]
    date: str
    """UTC, ISO 8601 to the second."""
    ceilings: Ceilings = Ceilings()


@dataclass(frozen=True)
class Resources:
    """The resources that the compiler assigned to one kernel."""

    registers: int
    """Per thread. For a traced kernel: as allocated, rounded up to a multiple of 8."""
    static_shared_bytes: int
    dynamic_shared_bytes: int
    spill_store_bytes: int | None
    """Per thread, from ptxas' report; None if only the loaded function could be queried."""
    spill_load_bytes: int | None
    local_bytes: int
    """Stack frame of a thread: spills, and arrays that do not fit in registers."""
    max_threads_per_block: int | None
    """From `__launch_bounds__`; None without bounds, and for traced kernels."""
    code_bytes: int | None = None
    constant_bytes: int | None = None


@dataclass(frozen=True)
class ResourceLimit:
    """Blocks per SM that a resource allows; None if the kernel does not use it."""

    resource: str
    """\"threads", "registers", "shared memory" or "blocks"."""
    blocks: int | None


@dataclass(frozen=True)
class NextStep:
    """The smallest change of one resource that makes more warps resident."""

    resource: str
    current: int
    needed: int
    """Registers per thread, or shared bytes per block, or threads per block."""
    blocks: int
    fraction: float
    """Occupancy after the step."""


@dataclass(frozen=True)
class CurvePoint:
    """Occupancy with one quantity changed to `value` and the others unchanged."""

    value: int
    fraction: float


@dataclass(frozen=True)
class OccupancyAnalysis:
    """Theoretical residency of one launch."""

    blocks_per_sm: int
    warps_per_sm: int
    max_warps_per_sm: int
    fraction: float
    limiter: str
    limits: tuple[ResourceLimit, ...]
    next_steps: tuple[NextStep, ...]
    by_threads: tuple[CurvePoint, ...]
    by_registers: tuple[CurvePoint, ...]
    by_shared_bytes: tuple[CurvePoint, ...]


@dataclass(frozen=True)
class Waves:
    """How the grid fills the GPU."""

    blocks: int
    blocks_per_wave: int
    """Blocks that the whole GPU can hold at once."""
    waves: float
    """blocks / blocks_per_wave."""
    tail_fraction: float
    """Share of the last wave's block slots that are used; 1.0 for a full wave."""
    efficiency: float
    """waves / ceil(waves): an upper bound, reached if all blocks take the same time."""


@dataclass(frozen=True)
class AccessWidth:
    """Instructions of one kind and width in a kernel's code. Instructions in loops count once."""

    operation: str
    """For global memory "load", "store", "async copy"; else "shared load", "local store", ..."""
    bits: int
    """Per thread; 8, 16, 32, 64, 128."""
    instructions: int


@dataclass(frozen=True)
class MemoryAccess:
    """A kernel's memory instructions."""

    source: str
    """"decoded": read from the instruction words of the cubin."""
    widths: tuple[AccessWidth, ...]
    bulk_copies: int
    """Instructions that start TMA transfers."""
    atomics: int = 0
    """Atomic instructions on global memory."""


@dataclass(frozen=True)
class InstructionMix:
    """A kernel's instructions by class. Instructions in loops count once; padding is left out."""

    source: str
    """"decoded": read from the instruction words of the cubin."""
    instructions: int
    by_class: Mapping[str, int]
    """"tensor core", "floating point", "global memory", ...: see analyzer/sass.py."""


@dataclass(frozen=True)
class LaunchAnalysis:
    """One kernel launch: its static properties, and its own time if it was traced."""

    name: str
    grid: Dim3
    block: Dim3
    resources: Resources | None
    occupancy: OccupancyAnalysis | None
    waves: Waves | None
    memory_access: MemoryAccess | None
    device_us: float | None = None
    """Duration from CUPTI's activity records; None without CUPTI. L2 is cold, except in a traced
    script."""
    instruction_mix: InstructionMix | None = None


@dataclass(frozen=True)
class TimeStatistics:
    """Samples from one timer in one cache state."""

    timer: str
    """"events", "graph replay", "wall" or "cupti"."""
    cache: str
    """"cold": L2 overwritten before each sample. "warm": caches as the previous call left them. For
    a traced kernel: "as the script left it"."""
    median_us: float
    iqr_us: float
    mean_us: float
    std_us: float
    min_us: float
    max_us: float
    ci_low_us: float
    """Distribution-free confidence interval of the median."""
    ci_high_us: float
    confidence: float
    samples: int
    noisy: bool
    """The interval is wider than 2% of the median: compare with care."""
    samples_us: tuple[float, ...] = ()
    round_sizes: tuple[int, ...] = ()
    """Sizes of the rounds in which `samples_us` were taken, in order; empty: one round."""
    overhead_us: float = 0.0
    """The timer's overhead, which was subtracted from every sample."""
    overhead_uncertainty_us: float = 0.0
    """Half-width; it shifts all samples alike, and is not part of the median's interval."""


@dataclass(frozen=True)
class Throughput:
    """The caller's declared work over the cold median. For a traced kernel: bytes from hardware
    counters, over its median."""

    bytes: float | None
    flops: float | None
    gbps: float | None
    tflops: float | None


@dataclass(frozen=True)
class RooflinePoint:
    """The position of a kernel below a roof."""

    pipe: str
    """The pipe that the FLOPs run on: "fp32", "tensor_bf16", ..."""
    intensity: float
    """FLOPs per byte of device memory, both as declared."""
    bound: str
    """"memory" or "compute": which roof is lower at this intensity."""
    roof: str
    """The source of the ceilings: "datasheet", "datasheet at the held clock" or "measured"."""
    memory_gbps: float
    compute_tflops: float | None
    """None if the kernel declares no FLOPs and no rate is known."""
    attainable_us: float
    """The time at the roof."""
    fraction: float
    """attainable_us / cold median: 1.0 is the roof itself."""


@dataclass(frozen=True)
class Energy:
    """From the GPU's energy counter, over a long window of back-to-back calls with a warm cache."""

    joules_per_call: float
    calls_per_joule: float
    uncertainty_joules: float
    """Half-width: at each end of the window, the number of calls is uncertain by one batch."""
    mean_watts: float
    window_s: float
    calls: int


@dataclass(frozen=True)
class Conditions:
    """The state of the GPU during the measurement of the energy."""

    sm_clock_mhz: float | None
    """Median while the kernel ran."""
    sm_clock_max_mhz: float | None
    memory_clock_mhz: float | None
    temperature_c: float | None
    power_limit_watts: float | None
    throttle_reasons: tuple[str, ...]
    """NVML's reasons; empty if there were none."""


@dataclass(frozen=True)
class Counters:
    """Hardware counters, read by Nsight Compute."""

    source: str
    """"ncu" or the name of the imported file."""
    achieved_occupancy: float | None = None
    dram_read_bytes: float | None = None
    dram_write_bytes: float | None = None
    l1_hit_fraction: float | None = None
    l2_hit_fraction: float | None = None
    load_sectors_per_request: float | None = None
    """Sectors of 32 bytes that a warp's load of global memory touches, on average."""
    store_sectors_per_request: float | None = None
    duration_us: float | None = None
    stall_reasons: Mapping[str, float] = field(default_factory=dict)
    """Average warps stalled per issue-active cycle, by reason."""
    raw: Mapping[str, float] = field(default_factory=dict)
    """Every metric in the file, by ncu's name, in bytes, microseconds and fractions."""


@dataclass(frozen=True)
class Advice:
    """One suggestion. Its evidence is quoted from the same analysis."""

    rule: str
    evidence: str
    suggestion: str
    expected_gain: str
    """A bound and its reason ("at most 1.14x: the idle lanes of the last warp"), or the reason why
    there is none."""


@dataclass(frozen=True)
class KernelAnalysis:
    """All results for one kernel, or for one call that launches several."""

    name: str
    kind: str
    """"raw kernel", "elementwise kernel", "call", "cukit kernel" or "traced kernel"."""
    arch: str
    launches: tuple[LaunchAnalysis, ...]
    cold: TimeStatistics | None
    """L2 is overwritten before each sample; the flush is not part of the time."""
    warm: TimeStatistics | None
    throughput: Throughput | None
    roofline: tuple[RooflinePoint, ...]
    """One point for each known roof."""
    energy: Energy | None
    conditions: Conditions | None
    counters: Counters | None
    advice: tuple[Advice, ...]
    missing: Mapping[str, str]
    """Name of a field or quantity -> why it is absent, for all that could have been measured."""
    peak_bytes: int | None = None
    """Memory that the call allocates in addition to its inputs."""


@dataclass(frozen=True)
class AccessPoint:
    """One measurement of the access probe: a load width and a stride between adjacent threads."""

    access_bytes: int
    stride: int
    """Distance between the words of adjacent threads, in words of `access_bytes`."""
    useful_gbps: float
    """Counts only the bytes that threads request."""
    efficiency: float
    """useful_gbps over the highest rate in the table."""
    sector_fraction: float
    """The efficiency that 32-byte sectors alone would give."""


@dataclass(frozen=True)
class TracedLaunch:
    """One kernel launch of a traced script, on the device's clock."""

    name: str
    stream: int
    start_us: float
    """From the start of the first kernel."""
    duration_us: float


@dataclass(frozen=True)
class AnalysisReport:
    """The result of `KernelAnalyzer.report()` and the content of report files."""

    environment: Environment
    analyses: tuple[KernelAnalysis, ...]
    schema_version: int = SCHEMA_VERSION
    timeline: tuple[TracedLaunch, ...] = ()
    """For a traced script: its launches in order of start; only the longest of a very long one."""
    accesses: tuple[AccessPoint, ...] = ()
    """The access probe's results for this GPU, if it was run."""
