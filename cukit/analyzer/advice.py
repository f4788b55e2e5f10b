"""Suggestions for making a kernel faster, from rules based on evidence in the analysis. Pure.

A rule states what was observed, what to do, and a bound on the gain with its reason. Where the data
give no bound, the rule says so: higher occupancy, for example, only helps a latency-bound kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from cukit.analyzer.occupancy import WARP_THREADS
from cukit.analyzer.schema import AccessPoint, Advice, KernelAnalysis, LaunchAnalysis

TAIL_EFFICIENCY = 0.9
LOW_OCCUPANCY = 0.5
NEAR_ROOF = 0.85
SHORT_US = 10.0
WIDE_BITS = 128
SLOW_CLOCK = 0.97
SECTORS_PER_WORD = 4
"""Sectors of 32 bytes in a request of 32 adjacent threads, per 4 bytes accessed by each thread."""


def advise(
    analysis: KernelAnalysis, num_sms: int, accesses: Sequence[AccessPoint] = ()
) -> tuple[Advice, ...]:
    """Every suggestion that `analysis` supports, the most certain first.

    accesses: the access probe's results on the same GPU, if it was run.
    """
    found = [advice for rule in _CALL_RULES if (advice := rule(analysis))]
    found += _uncoalesced(analysis)
    if len(analysis.launches) == 1:
        (launch,) = analysis.launches
        found += advise_launch(launch, num_sms, accesses, at_roof=_at_roof(analysis))
    return tuple(found)


def advise_launch(
    launch: LaunchAnalysis,
    num_sms: int,
    accesses: Sequence[AccessPoint] = (),
    *,
    at_roof: bool = False,
) -> tuple[Advice, ...]:
    """Suggestions from the compiled code and the launch shape alone, without times.

    at_roof: the measured time is so close to a roof that more warps or wider accesses cannot help.
    """
    found = [advice for rule in _LAUNCH_RULES if (advice := rule(launch, num_sms))]
    if not at_roof and not _copies_tiles(launch):
        found += _access_width(launch, accesses)
        found += _low_occupancy(launch)
    return tuple(found)


def _copies_tiles(launch: LaunchAnalysis) -> bool:
    """Whether TMA moves the data: its copies are wide, and hide latency without more warps."""
    return launch.memory_access is not None and launch.memory_access.bulk_copies > 0


def _at_roof(analysis: KernelAnalysis) -> bool:
    return any(p.roof == "measured" and p.fraction >= NEAR_ROOF for p in analysis.roofline)


def _roof(analysis: KernelAnalysis) -> Advice | None:
    best = next((p for p in analysis.roofline if p.roof == "measured"), None)
    if best is None or analysis.cold is None or best.fraction < NEAR_ROOF:
        return None
    return Advice(
        "at the roof",
        f"{best.fraction:.0%} of the measured {best.bound} roof ({best.attainable_us:.1f} us)",
        "Reduce the bytes or FLOPs, or fuse adjacent kernels; this one cannot get much faster.",
        f"at most {1 / best.fraction:.2f}x: the remaining distance to the roof",
    )


def _throttled(analysis: KernelAnalysis) -> Advice | None:
    held = analysis.conditions
    if held is None or not held.throttle_reasons:
        return None
    clock, highest = held.sm_clock_mhz, held.sm_clock_max_mhz
    if not clock or not highest or clock > SLOW_CLOCK * highest:
        return None
    return Advice(
        "throttled",
        f"SM clock {clock:.0f} of {highest:.0f} MHz: {', '.join(held.throttle_reasons)}",
        "Compare with the roof at the measured clock, not with the datasheet roof.",
        f"at most {highest / clock:.2f}x if the GPU could hold its highest clock",
    )


def _short(analysis: KernelAnalysis) -> Advice | None:
    time = analysis.warm or analysis.cold
    if time is None or time.median_us >= SHORT_US:
        return None
    return Advice(
        "launch bound",
        f"{time.median_us:.1f} us ({time.timer}); a launch from the host costs about 2 to 5 us",
        "Capture it with its neighbours in a CUDA graph, or fuse them.",
        "not bounded by this analysis: it depends on the launches before and after",
    )


def _uncoalesced(analysis: KernelAnalysis) -> Iterable[Advice]:
    """Without known access widths, reports only sector counts too high for 16-byte accesses."""
    counters = analysis.counters
    for operation, sectors in (
        ("load", counters.load_sectors_per_request if counters else None),
        ("store", counters.store_sectors_per_request if counters else None),
    ):
        bits = [bits for name, bits, _ in _widths(analysis) if name == operation]
        ideal = SECTORS_PER_WORD * max(bits, default=WIDE_BITS) / 32
        if sectors is None or sectors <= 1.1 * ideal:
            continue
        known = "suffice" if bits else f"suffice for {WIDE_BITS // 8} bytes a thread"
        verb = "read" if operation == "load" else "write"
        yield Advice(
            f"uncoalesced {operation}s",
            f"{sectors:.1f} sectors a {operation} request; {ideal:.0f} {known}",
            f"Let adjacent threads {verb} adjacent addresses, through shared memory if necessary.",
            f"at most {sectors / ideal:.1f}x for the time spent on these {operation}s",
        )


def _widths(analysis: KernelAnalysis) -> list[tuple[str, int, int]]:
    return [
        (width.operation, width.bits, width.instructions)
        for launch in analysis.launches
        if launch.memory_access
        for width in launch.memory_access.widths
    ]


def _spills(launch: LaunchAnalysis, num_sms: int) -> Advice | None:
    resources = launch.resources
    if resources is None or not (resources.spill_store_bytes or resources.spill_load_bytes):
        return None
    return Advice(
        "spills",
        f"{resources.spill_store_bytes} bytes stored and {resources.spill_load_bytes} loaded per "
        f"thread at {resources.registers} registers",
        "Keep fewer values live, use smaller tiles, or allow more registers in __launch_bounds__.",
        "not bounded by this analysis: it depends on how often the spilling code runs",
    )


def _ragged_block(launch: LaunchAnalysis, num_sms: int) -> Advice | None:
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    warps = -(-threads // WARP_THREADS)
    if threads % WARP_THREADS == 0:
        return None
    return Advice(
        "ragged block",
        f"{threads} threads fill {threads / (warps * WARP_THREADS):.0%} of {warps} warps",
        f"Use a multiple of {WARP_THREADS} threads.",
        f"at most {warps * WARP_THREADS / threads:.2f}x: the idle lanes of the last warp",
    )


def _small_grid(launch: LaunchAnalysis, num_sms: int) -> Advice | None:
    waves = launch.waves
    if waves is None or waves.blocks >= num_sms:
        return None
    return Advice(
        "small grid",
        f"{waves.blocks} blocks on {num_sms} SMs",
        "Split the work into more blocks, or run the kernel concurrently with another one.",
        f"at most {num_sms / waves.blocks:.2f}x: the SMs without a block",
    )


def _tail(launch: LaunchAnalysis, num_sms: int) -> Advice | None:
    waves = launch.waves
    if waves is None or waves.blocks < num_sms or waves.efficiency >= TAIL_EFFICIENCY:
        return None
    return Advice(
        "tail",
        f"{waves.waves:.2f} waves: the last one fills {waves.tail_fraction:.0%} of the GPU",
        "Choose a tile size that gives whole waves, or a persistent grid of "
        f"{waves.blocks_per_wave} blocks that share the work.",
        f"at most {1 / waves.efficiency:.2f}x if all blocks take the same time",
    )


def _access_width(launch: LaunchAnalysis, accesses: Sequence[AccessPoint]) -> Iterable[Advice]:
    if launch.memory_access is None:
        return
    for operation in ("load", "store"):
        # cp.async also loads: a kernel with 16-byte copies needs no wider loads.
        kinds = (operation, "async copy") if operation == "load" else (operation,)
        widths: Counter[int] = Counter()
        for width in launch.memory_access.widths:
            if width.operation in kinds:
                widths[width.bits] += width.instructions
        if widths and max(widths) < WIDE_BITS:
            counted = ", ".join(f"{n} of {bits} bits" for bits, n in sorted(widths.items()))
            yield Advice(
                f"narrow {operation}s",
                f"global {operation}s in the code: {counted}",
                f"{operation.capitalize()} 16 bytes a thread (float4, or 8 halves) where the data "
                "are contiguous and aligned.",
                _width_gain(operation, max(widths), accesses),
            )


def _width_gain(operation: str, bits: int, accesses: Sequence[AccessPoint]) -> str:
    """A bound from the access probe, which measures loads; without it, a count of instructions."""
    fewer = f"up to {WIDE_BITS // bits}x fewer {operation} instructions"
    rates = {point.access_bytes * 8: point.useful_gbps for point in accesses if point.stride == 1}
    if operation == "load" and bits in rates and WIDE_BITS in rates:
        gain = max(1.0, rates[WIDE_BITS] / rates[bits])
        return (
            f"at most {gain:.2f}x: the access probe reads {rates[bits]:.0f} GB/s with "
            f"{bits}-bit loads, {rates[WIDE_BITS]:.0f} with {WIDE_BITS}-bit loads"
        )
    return f"{fewer}; the time shrinks only if they are the limit"


def _low_occupancy(launch: LaunchAnalysis) -> Iterable[Advice]:
    occupancy = launch.occupancy
    if occupancy is None or occupancy.fraction >= LOW_OCCUPANCY:
        return
    for step in occupancy.next_steps:
        unit = {"registers": "registers per thread", "threads": "threads per block"}
        yield Advice(
            f"occupancy by {step.resource}",
            f"{occupancy.fraction:.0%} of the warps resident, limited by {occupancy.limiter}",
            f"{step.needed} instead of {step.current} "
            f"{unit.get(step.resource, 'bytes of shared memory per block')}.",
            f"at most {step.fraction / max(occupancy.fraction, 1e-9):.2f}x (resident warps "
            f"{occupancy.fraction:.0%} to {step.fraction:.0%}), and only if it is latency-bound"
            if occupancy.fraction
            else f"the kernel could be launched, with {step.fraction:.0%} of the warps",
        )


_CALL_RULES: tuple[Callable[[KernelAnalysis], Advice | None], ...] = (
    _roof,
    _throttled,
    _short,
)
_LAUNCH_RULES: tuple[Callable[[LaunchAnalysis, int], Advice | None], ...] = (
    _spills,
    _ragged_block,
    _small_grid,
    _tail,
)
