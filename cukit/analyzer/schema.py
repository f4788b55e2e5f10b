"""What an analysis says, as frozen dataclasses that travel as JSON.

One rule holds everywhere: a figure that nothing measured is None, and `missing` says why. Nothing
is estimated in the place of a measurement, and what is computed rather than measured (theoretical
occupancy, waves, roofline) follows from fields that stand beside it.

    AnalysisReport                     the file: version, machine, kernels, AccessPoints
    ├── Environment ── Ceilings
    └── KernelAnalysis                 one kernel, or one call that launches several
        ├── LaunchAnalysis             one launch: what the compiler and the grid decide
        │   ├── Resources  OccupancyAnalysis  Waves
        │   └── MemoryAccess ── AccessWidth, InstructionMix
        ├── TimeStatistics             cold and warm
        ├── Throughput  RooflinePoint  Energy  Conditions  Counters
        └── Advice

Units are in the names. `to_json`, `from_json` (analyzer/schema_json.py) read and write it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or goes; a new field with a default does not raise it."""


@dataclass(frozen=True)
class Ceilings:
    """What this machine can do: by its datasheet, and as measured in the same process."""

    datasheet_gbps: float | None = None
    """Device memory, at the memory clock of the card; None for a card that no table knows."""
    datasheet_tflops: Mapping[str, float] = field(default_factory=dict)
    """By pipe: "fp32", "tensor_fp16", "tensor_bf16", ... dense, at the vendor's boost clock."""
    tflops_per_mhz: Mapping[str, float] = field(default_factory=dict)
    """The same pipes per MHz of SM clock, all multiprocessors together: the peak at any clock."""
    measured_copy_gbps: float | None = None
    """Bytes read plus bytes written of a device-to-device copy much larger than L2."""
    measured_tflops: Mapping[str, float] = field(default_factory=dict)
    """Of "fp32" by multiply-adds, of the tensor pipes by a large product of cuBLAS."""


@dataclass(frozen=True)
class Environment:
    """The machine and the software."""

    gpu: str | None
    """None in static mode."""
    arch: str
    """e.g. "sm_90": of the GPU, or the one that a static analysis was made for."""
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
    """What the compiler gave one kernel."""

    registers: int
    """Per thread. Of a traced kernel: as the hardware allots them, rounded up to 8."""
    static_shared_bytes: int
    dynamic_shared_bytes: int
    spill_store_bytes: int | None
    """Per thread, from ptxas' own report; None where only the loaded function could be asked."""
    spill_load_bytes: int | None
    local_bytes: int
    """Stack frame of a thread: spills, and arrays that registers cannot hold."""
    max_threads_per_block: int | None
    """From `__launch_bounds__`, or None without."""
    code_bytes: int | None = None
    constant_bytes: int | None = None


@dataclass(frozen=True)
class ResourceLimit:
    """Blocks of one multiprocessor that a resource allows; None where the kernel uses none."""

    resource: str
    """\"threads", "registers", "shared memory" or "blocks"."""
    blocks: int | None


@dataclass(frozen=True)
class NextStep:
    """The smallest change of one resource that lets one more block in."""

    resource: str
    current: int
    needed: int
    """Registers per thread, or shared bytes per block, or threads per block."""
    blocks: int
    fraction: float
    """Occupancy after the step."""


@dataclass(frozen=True)
class CurvePoint:
    """Occupancy if one quantity were `value` and the others as they are."""

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
    """How the grid fills the machine."""

    blocks: int
    blocks_per_wave: int
    """Blocks that the whole GPU holds at once."""
    waves: float
    """blocks / blocks_per_wave."""
    tail_fraction: float
    """Share of block slots in the last wave that have work; 1.0 for a full one."""
    efficiency: float
    """waves / ceil(waves): the most that the tail leaves, were all blocks equally long."""


@dataclass(frozen=True)
class AccessWidth:
    """Instructions of one kind and width in a kernel's code. A static count: loops count once."""

    operation: str
    """Of global memory "load", "store", "async copy"; else "shared load", "local store", ..."""
    bits: int
    """Per thread; 8, 16, 32, 64, 128."""
    instructions: int


@dataclass(frozen=True)
class MemoryAccess:
    """How a kernel's code touches memory."""

    source: str
    """"decoded": read from the instruction words of the cubin."""
    widths: tuple[AccessWidth, ...]
    bulk_copies: int
    """Instructions that start TMA transfers."""
    atomics: int = 0
    """Atomic instructions on global memory."""


@dataclass(frozen=True)
class InstructionMix:
    """What a kernel's instructions do. A static count: loops count once, padding not at all."""

    source: str
    """"decoded": read from the instruction words of the cubin."""
    instructions: int
    by_class: Mapping[str, int]
    """"tensor core", "floating point", "global memory", ...: analyzer/sass.py has them all."""


@dataclass(frozen=True)
class LaunchAnalysis:
    """One kernel launch: what is known without running it, and its own time if traced."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    resources: Resources | None
    occupancy: OccupancyAnalysis | None
    waves: Waves | None
    memory_access: MemoryAccess | None
    device_us: float | None = None
    """Duration of this launch by the driver's activity records, L2 cold; None without CUPTI."""
    instruction_mix: InstructionMix | None = None


@dataclass(frozen=True)
class TimeStatistics:
    """Samples of one clock in one cache state."""

    timer: str
    """"events", "graph replay", "wall" or "cupti"."""
    cache: str
    """"cold": L2 overwritten before each sample. "warm": inputs as the call before left them."""
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
    """How many of `samples_us` each sitting took, in order; empty: all of them one."""
    overhead_us: float = 0.0
    """What the clock itself reads, subtracted from every sample: add it for the raw reading."""
    overhead_uncertainty_us: float = 0.0
    """Half-width; it shifts all samples alike, and is not in the interval of the median."""


@dataclass(frozen=True)
class Throughput:
    """Work as declared by the caller over the cold median. Of a traced kernel: the bytes that its
    counters saw, over its median."""

    bytes: float | None
    flops: float | None
    gbps: float | None
    tflops: float | None


@dataclass(frozen=True)
class RooflinePoint:
    """Where a kernel stands below its roof."""

    pipe: str
    """Whose arithmetic the FLOPs are: "fp32", "tensor_bf16", ..."""
    intensity: float
    """FLOPs per byte of device memory, both as declared."""
    bound: str
    """"memory" or "compute": which roof is lower at this intensity."""
    roof: str
    """Which ceilings: "datasheet", "datasheet at the held clock" or "measured"."""
    memory_gbps: float
    compute_tflops: float | None
    """None where the kernel declares no FLOPs and no rate is known."""
    attainable_us: float
    """The time at the roof."""
    fraction: float
    """attainable_us / cold median: 1.0 is the roof itself."""


@dataclass(frozen=True)
class Energy:
    """From the card's own counter over a long window of back-to-back calls, cache warm."""

    joules_per_call: float
    calls_per_joule: float
    uncertainty_joules: float
    """Half-width from the resolution of the counter and the two ends of the window."""
    mean_watts: float
    window_s: float
    calls: int


@dataclass(frozen=True)
class Conditions:
    """The card while it was measured."""

    sm_clock_mhz: float | None
    """Median while the kernel ran."""
    sm_clock_max_mhz: float | None
    memory_clock_mhz: float | None
    temperature_c: float | None
    power_limit_watts: float | None
    throttle_reasons: tuple[str, ...]
    """In NVML's words; empty: none."""


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
    """Every metric of the file, under ncu's own name and in base units."""


@dataclass(frozen=True)
class Advice:
    """One suggestion. The evidence is quoted from fields of the same analysis."""

    rule: str
    evidence: str
    suggestion: str
    expected_gain: str
    """A bound and what it rests on: "at most 1.14x: the last wave is 14% of the time"."""


@dataclass(frozen=True)
class KernelAnalysis:
    """Everything known about one kernel, or one call that launches several."""

    name: str
    kind: str
    """"raw kernel", "elementwise kernel", "call", "cukit kernel" or "traced kernel"."""
    arch: str
    launches: tuple[LaunchAnalysis, ...]
    cold: TimeStatistics | None
    """Each sample starts with L2 overwritten; the flush is not in the time."""
    warm: TimeStatistics | None
    throughput: Throughput | None
    roofline: tuple[RooflinePoint, ...]
    """One point per kind of roof that is known."""
    energy: Energy | None
    conditions: Conditions | None
    counters: Counters | None
    advice: tuple[Advice, ...]
    missing: Mapping[str, str]
    """Field name -> why it is None or empty, for every field that could have been measured."""
    peak_bytes: int | None = None
    """Memory that the call needed on top of its inputs."""


@dataclass(frozen=True)
class AccessPoint:
    """A measured row of the access probe: loads of one width, neighbours one stride apart."""

    access_bytes: int
    stride: int
    """Distance between the words of neighbouring threads, in words of `access_bytes`."""
    useful_gbps: float
    """Only the bytes that threads asked for."""
    efficiency: float
    """useful_gbps over the best of the table."""
    sector_fraction: float
    """What sectors of 32 bytes alone would allow."""


@dataclass(frozen=True)
class TracedLaunch:
    """One kernel of a traced script, where it ran on the device's clock."""

    name: str
    stream: int
    start_us: float
    """From the start of the first kernel."""
    duration_us: float


@dataclass(frozen=True)
class AnalysisReport:
    """What `KernelAnalyzer.report()` returns and the report files hold."""

    environment: Environment
    analyses: tuple[KernelAnalysis, ...]
    schema_version: int = SCHEMA_VERSION
    timeline: tuple[TracedLaunch, ...] = ()
    """Of a traced script, in order of start; of a very long one the longest launches."""
    accesses: tuple[AccessPoint, ...] = ()
    """The access probe of this GPU, where it was asked for."""
