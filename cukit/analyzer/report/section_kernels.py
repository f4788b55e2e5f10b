"""The report section on compiled kernels: contents of their cubins, read without a GPU."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cukit.analyzer.advice import WIDE_BITS, advise_launch
from cukit.analyzer.occupancy import WARP_THREADS
from cukit.analyzer.report import numbers, svg
from cukit.analyzer.report.bars import Bar, Group, bar_chart
from cukit.analyzer.report.instruction_mixes import (
    mix_class,
    mix_figure,
    mix_stack,
    ordered_mix,
)
from cukit.analyzer.report.layout import (
    Block,
    Cell,
    Code,
    Collapsible,
    Column,
    Detail,
    Entry,
    Facts,
    Figure,
    FigureGrid,
    Index,
    SampledCurve,
    Section,
    Shares,
    Table,
    Tile,
    Tiles,
)
from cukit.analyzer.report.stacks import Part, Stack, stacked_figure
from cukit.analyzer.residency import analyze_occupancy
from cukit.analyzer.schema import (
    Advice,
    InstructionMix,
    LaunchAnalysis,
    MemoryAccess,
    OccupancyAnalysis,
    Resources,
)
from cukit.analyzer.schema_json import build
from cukit.core.device import Device, typical_device

Kernel = Mapping[str, Any]
"""One entry of `cukit compile --json`."""

COLUMNS = (
    Column("kernel"),
    Column("threads", numeric=True, minor=True),
    Column("registers", numeric=True),
    Column("spills", numeric=True),
    Column("shared", numeric=True, minor=True),
    Column("occupancy", numeric=True),
    Column("limited by", minor=True),
    Column("instructions", numeric=True, minor=True),
    Column("16-byte", numeric=True, minor=True),
    Column("advice", minor=True),
)

FACETS = ("op", "family", "kernel", "architecture", "limited by")

FLAGS = (
    ("spills", "spills registers"),
    ("advice", "has advice"),
    ("narrow", "no 16-byte access"),
    ("tensor", "tensor cores"),
    ("tma", "TMA"),
)

BANDS = ("up to 25%", "25 to 50%", "50 to 75%", "75% and more")

WIDTHS = (8, 16, 32, 64, 128)
GLOBAL = ("load", "store", "async copy")
"""Operations of `AccessWidth` on global memory."""

MAX_SPILLING = 10


@dataclass(frozen=True)
class Variant:
    """One compiled variant: its record, and values derived from it."""

    record: Kernel
    launch: LaunchAnalysis
    device: Device

    @property
    def op(self) -> str:
        return str(self.record.get("op") or self.record["kernel"])

    @property
    def family(self) -> str:
        """The folder of its source."""
        return str(self.record["source"]).partition("/")[0]

    @property
    def defines(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.record["defines"].items())

    @property
    def shared_bytes(self) -> int:
        return int(self.record["static_shared_bytes"] + self.record["dynamic_shared_bytes"])

    @functools.cached_property
    def advice(self) -> tuple[Advice, ...]:
        return advise_launch(self.launch, self.device.num_sms)

    @functools.cached_property
    def widths(self) -> dict[int, int]:
        """Number of instructions that access global memory, by bits per thread."""
        found = dict.fromkeys(WIDTHS, 0)
        access = self.launch.memory_access
        for width in access.widths if access else ():
            if width.operation in GLOBAL:
                found[width.bits] += width.instructions
        return found

    @property
    def uses_tma(self) -> bool:
        access = self.launch.memory_access
        return access is not None and access.bulk_copies > 0

    @property
    def wide_share(self) -> float | None:
        """Share of 16-byte accesses among all to global memory; None if there are none."""
        whole = sum(self.widths.values())
        return self.widths[WIDE_BITS] / whole if whole else None

    @property
    def flags(self) -> tuple[str, ...]:
        mix = self.launch.instruction_mix
        found = {
            "spills": self.record["spill_bytes"] > 0,
            "advice": bool(self.advice),
            "narrow": self.wide_share == 0 and not self.uses_tma,
            "tensor": mix is not None and mix.by_class.get("tensor core", 0) > 0,
            "tma": self.uses_tma,
        }
        return tuple(flag for flag, holds in found.items() if holds)


def kernel_section(compiled: Mapping[str, Any], anchor: str = "variants") -> Section:
    """The figures, then a searchable table of all variants.

    compiled: `{"kernels": [...], "errors": [...]}`, as `cukit compile --json` prints it.
    anchor: of the table, unique in a report.
    """
    variants = [_variant(record) for record in compiled["kernels"]]
    errors = compiled["errors"]
    archs = tuple(dict.fromkeys(variant.record["arch"] for variant in variants))
    blocks: list[Block] = [_tiles(variants, len(errors), anchor)]
    if errors:
        logs = tuple(Code(error["log"], f"{error['kernel']}, {error['arch']}") for error in errors)
        blocks.append(Collapsible("Kernels that do not compile", logs, open=True))
    if variants:
        blocks.append(FigureGrid(tuple(_figures(variants))))
        blocks.append(_table(variants, anchor))
        blocks.append(_architectures(variants))
    return Section("Kernels", f"As compiled for {', '.join(archs) or 'nothing'}", tuple(blocks))


def _variant(record: Kernel) -> Variant:
    device = typical_device(record["arch"])
    shared = record["static_shared_bytes"] + record["dynamic_shared_bytes"]
    access, mix = record.get("memory_access"), record.get("instruction_mix")
    launch = LaunchAnalysis(
        name=str(record["kernel"]),
        grid=(0, 0, 0),
        block=(int(record["threads"]), 1, 1),
        resources=Resources(
            registers=int(record["registers"]),
            static_shared_bytes=int(record["static_shared_bytes"]),
            dynamic_shared_bytes=int(record["dynamic_shared_bytes"]),
            # Records of older versions only contain the sum of both.
            spill_store_bytes=record.get("spill_store_bytes"),
            spill_load_bytes=record.get("spill_load_bytes"),
            local_bytes=0,
            max_threads_per_block=None,
        ),
        occupancy=_occupancy(device, int(record["threads"]), int(record["registers"]), int(shared)),
        waves=None,
        memory_access=build(MemoryAccess, access) if access else None,
        instruction_mix=build(InstructionMix, mix) if mix else None,
    )
    return Variant(record, launch, device)


@functools.lru_cache(maxsize=1 << 14)
def _occupancy(device: Device, threads: int, registers: int, shared: int) -> OccupancyAnalysis:
    return analyze_occupancy(device, threads=threads, registers=registers, shared_bytes=shared)


def _tiles(variants: Sequence[Variant], num_errors: int, anchor: str) -> Tiles:
    flagged = Counter(flag for variant in variants for flag in variant.flags)

    def flag_tile(flag: str, label: str) -> Tile:
        address = f"#{anchor}?flag={flag}" if flagged[flag] else ""
        return Tile(f"{flagged[flag]:,}", label, leads_to=address)

    kernels = {variant.record["kernel"] for variant in variants}
    return Tiles(
        (
            Tile(f"{len(kernels):,}", "kernels", leads_to=f"#{anchor}" if variants else ""),
            Tile(f"{len(variants):,}", "compiled variants"),
            flag_tile("spills", "variants that spill registers"),
            flag_tile("advice", "variants with advice"),
            Tile(f"{num_errors:,}", "that do not compile", "bad" if num_errors else ""),
        )
    )


# Figures ------------------------------------------------------------------------------------------


def _figures(variants: Sequence[Variant]) -> list[Figure]:
    found = [_occupancy_figure(variants)]
    if any(variant.launch.instruction_mix for variant in variants):
        found.append(_mix_figure(variants))
    if any(sum(variant.widths.values()) for variant in variants):
        found.append(_width_figure(variants))
    if any(variant.record["spill_bytes"] for variant in variants):
        found.append(_spill_figure(variants))
    return found


def _by(
    variants: Sequence[Variant], key: Callable[[Variant], str]
) -> Mapping[str, Sequence[Variant]]:
    groups: dict[str, list[Variant]] = {}
    for variant in variants:
        groups.setdefault(key(variant), []).append(variant)
    return groups


def _occupancy_figure(variants: Sequence[Variant]) -> Figure:
    def stack(arch: str, chosen: Sequence[Variant]) -> Stack:
        counts = Counter(
            min(int(4 * variant.record["occupancy"]), len(BANDS) - 1) for variant in chosen
        )
        parts = tuple(
            Part(svg.shade(band + 1), name, counts[band]) for band, name in enumerate(BANDS)
        )
        return Stack(arch, f"{len(chosen):,} variants", parts)

    groups = _by(variants, lambda variant: str(variant.record["arch"]))
    return stacked_figure(
        "Theoretical occupancy of the variants",
        "Share of the variants. Kernels fed by TMA keep few warps resident by design: their "
        "pipelines hide the latency.",
        [stack(arch, chosen) for arch, chosen in groups.items()],
    )


def _mix_figure(variants: Sequence[Variant]) -> Figure:
    stacks = []
    for family, chosen in _by(variants, lambda variant: variant.family).items():
        mixes = [mix for variant in chosen if (mix := variant.launch.instruction_mix)]
        if mixes:
            stacks.append(mix_stack(family, mixes))
    return mix_figure("Instruction mix, mean of each family", stacks)


def _width_figure(variants: Sequence[Variant]) -> Figure:
    def stack(family: str, chosen: Sequence[Variant]) -> Stack:
        counts = {bits: sum(variant.widths[bits] for variant in chosen) for bits in WIDTHS}
        parts = tuple(
            Part(svg.shade(place), _num_bytes(bits), counts[bits])
            for place, bits in enumerate(WIDTHS)
        )
        return Stack(family, f"{sum(counts.values()):,}", parts)

    families = _by([v for v in variants if sum(v.widths.values())], lambda v: v.family)
    return stacked_figure(
        "Width of global accesses per thread",
        "Share of the loads, stores and asynchronous copies in the code, without TMA, which moves "
        "whole tiles.",
        [stack(family, chosen) for family, chosen in families.items()],
    )


def _num_bytes(bits: int) -> str:
    return f"{bits // 8} byte{'s' if bits > 8 else ''}"


def _spill_figure(variants: Sequence[Variant]) -> Figure:
    worst: dict[str, Variant] = {}
    counts: Counter[str] = Counter()
    for variant in variants:
        if spilled := variant.record["spill_bytes"]:
            name = str(variant.record["kernel"])
            counts[name] += 1
            if name not in worst or spilled > worst[name].record["spill_bytes"]:
                worst[name] = variant
    ranked = sorted(worst.items(), key=lambda item: -item[1].record["spill_bytes"])
    groups = []
    for name, variant in ranked[:MAX_SPILLING]:
        spilled = variant.record["spill_bytes"]
        note = numbers.num_bytes(spilled)
        about = f"{name}, {variant.record['arch']} {variant.defines}: {note}"
        bar = Bar(0, spilled, note, about)
        groups.append(Group(name, f"{counts[name]} spill", (bar,)))
    title = "Bytes spilled per thread, worst variant"
    more = len(ranked) - MAX_SPILLING
    return Figure(
        title,
        lambda width: bar_chart(groups, title=title, unit="bytes per thread", width=width),
        "Stores plus loads, as ptxas counts them."
        + (f" {more} further kernels spill less." if more > 0 else ""),
    )


# The table ----------------------------------------------------------------------------------------


def _table(variants: Sequence[Variant], anchor: str) -> Table:
    counted = Counter(flag for variant in variants for flag in variant.flags)
    index = Index(
        anchor,
        "variants",
        FACETS,
        tuple((flag, title) for flag, title in FLAGS if counted[flag]),
        tuple(
            Entry(
                (
                    variant.op,
                    variant.family,
                    str(variant.record["kernel"]),
                    str(variant.record["arch"]),
                    str(variant.record["limiter"]),
                ),
                variant.flags,
                tuple(_details(variant)),
            )
            for variant in variants
        ),
    )
    return Table(COLUMNS, tuple(map(_row, variants)), "Every variant", index=index)


def _row(variant: Variant) -> tuple[Cell, ...]:
    record, mix = variant.record, variant.launch.instruction_mix
    spills, share = record["spill_bytes"], variant.wide_share
    if variant.uses_tma:
        accesses = Cell("TMA", 1.0)
    else:
        accesses = Cell("") if share is None else Cell(numbers.percent(share), share)
    shares = (
        tuple((mix_class(name), count / mix.instructions) for name, count in ordered_mix(mix))
        if mix
        else ()
    )
    return (
        Cell(record["kernel"], tone="code", note=f"{record['arch']} {variant.defines}"),
        Cell(str(record["threads"]), record["threads"]),
        Cell(str(record["registers"]), record["registers"]),
        Cell(numbers.num_bytes(spills), spills, "bad" if spills else ""),
        Cell(numbers.num_bytes(variant.shared_bytes), variant.shared_bytes),
        Cell(numbers.percent(record["occupancy"]), record["occupancy"]),
        Cell(record["limiter"]),
        Cell(f"{mix.instructions:,}", mix.instructions, shares=shares) if mix else Cell(""),
        accesses,
        Cell(", ".join(advice.rule for advice in variant.advice)),
    )


def _details(variant: Variant) -> list[Detail]:
    """The expandable details below a row."""
    found: list[Detail] = []
    if variant.advice:
        rows = tuple((a.suggestion, a.expected_gain, a.evidence) for a in variant.advice)
        found.append(Facts("Advice", rows, ("suggestion", "expected gain", "evidence")))
    if mix := variant.launch.instruction_mix:
        parts = tuple((mix_class(name), name, count) for name, count in ordered_mix(mix))
        found.append(Shares("Instructions in the code", parts))
    if accesses := _accesses(variant.launch.memory_access):
        found.append(Facts("Memory accesses in the code", accesses, ("access per thread", "count")))
    if resident := variant.launch.occupancy:
        first, second = resident.by_threads[:2]
        found.append(
            SampledCurve(
                "Occupancy over threads per block",
                first.value,
                second.value - first.value,
                tuple(round(100 * point.fraction) for point in resident.by_threads),
                int(variant.record["threads"]),
                f"{numbers.percent(resident.fraction)}, limited by {resident.limiter}; with "
                "another block size, the compiler may use a different number of registers",
            )
        )
    found.append(Facts("Compiled from", _origin(variant)))
    return found


def _accesses(access: MemoryAccess | None) -> tuple[tuple[str, ...], ...]:
    if access is None:
        return ()
    rows = [
        (f"{width.operation}, {_num_bytes(width.bits)}", f"{width.instructions:,}")
        for width in access.widths
    ]
    for what, count in (("bulk copy (TMA)", access.bulk_copies), ("atomic", access.atomics)):
        if count:
            rows.append((what, f"{count:,}"))
    return tuple(rows)


def _origin(variant: Variant) -> tuple[tuple[str, ...], ...]:
    record = variant.record
    defines = tuple((str(name), str(value)) for name, value in record["defines"].items())
    return (
        ("source", str(record["source"])),
        ("compiled in", f"{record['compile_ms']:,.0f} ms"),
        *defines,
    )


def _architectures(variants: Sequence[Variant]) -> Table:
    names = ("SMs", "registers/SM", "shared/SM", "warps/SM")
    counts = ("variants", "that spill", "median registers", "median occupancy")
    rows = []
    for arch, chosen in _by(variants, lambda variant: str(variant.record["arch"])).items():
        device = chosen[0].device
        spilling = sum(variant.record["spill_bytes"] > 0 for variant in chosen)
        registers = sorted(variant.record["registers"] for variant in chosen)[len(chosen) // 2]
        resident = sorted(variant.record["occupancy"] for variant in chosen)[len(chosen) // 2]
        warps = device.max_threads_per_sm // WARP_THREADS
        rows.append(
            (
                Cell(arch, tone="code"),
                Cell(device.name),
                Cell(str(device.num_sms), device.num_sms),
                Cell(f"{device.registers_per_sm:,}", device.registers_per_sm),
                Cell(numbers.num_bytes(device.shared_bytes_per_sm), device.shared_bytes_per_sm),
                Cell(str(warps), warps),
                Cell(f"{len(chosen):,}", len(chosen)),
                Cell(str(spilling), spilling),
                Cell(str(registers), registers),
                Cell(numbers.percent(resident), resident),
            )
        )
    header = (Column("architecture"), Column("reference GPU"))
    numeric = tuple(Column(name, numeric=True) for name in (*names, *counts))
    return Table((*header, *numeric), tuple(rows), "Architectures")
