"""The chapter on compiled kernels: all that a cubin tells, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cukit.analyzer.occupancy import MAX_THREADS_PER_BLOCK, WARP_THREADS, occupancy
from cukit.analyzer.report import numbers
from cukit.analyzer.report.layout import (
    Block,
    Cell,
    Code,
    Column,
    Fold,
    Gallery,
    Paragraph,
    Section,
    Table,
    Thumbnail,
    Tile,
    Tiles,
)
from cukit.analyzer.report.lines import occupancy_curve
from cukit.core.device import Device, typical_device

Kernel = dict[str, Any]
"""One entry of `cukit compile --json`."""

COLUMNS = (
    "kernel",
    "variant",
    "threads",
    "registers",
    "spills",
    "shared",
    "occupancy",
    "limited by",
)
NUMERIC = {"threads", "registers", "spills", "shared", "occupancy"}


def kernel_section(compiled: dict[str, Any]) -> Section:
    """`compiled`: `{"kernels": [...], "errors": [...]}`, as `cukit compile --json` prints it."""
    kernels, errors = compiled["kernels"], compiled["errors"]
    archs = tuple(dict.fromkeys(kernel["arch"] for kernel in kernels))
    spilling = sum(kernel["spill_bytes"] > 0 for kernel in kernels)
    names = {kernel["kernel"] for kernel in kernels}
    tiles = Tiles(
        (
            Tile(str(len(names)), "kernels"),
            Tile(str(len(kernels)), "compiled variants"),
            Tile(str(spilling), "variants that spill registers"),
            Tile(str(len(errors)), "that do not compile", "bad" if errors else ""),
        )
    )
    blocks: list[Block] = [tiles]
    if errors:
        logs = tuple(Code(error["log"], f"{error['kernel']}, {error['arch']}") for error in errors)
        blocks.append(Fold("What does not compile", logs, open=True))
    for number, arch in enumerate(archs):
        chosen = [kernel for kernel in kernels if kernel["arch"] == arch]
        blocks.append(_arch_fold(arch, chosen, open_=number == 0))
    return Section("Kernels", f"As compiled for {', '.join(archs) or 'nothing'}", tuple(blocks))


def _arch_fold(arch: str, kernels: Sequence[Kernel], *, open_: bool) -> Fold:
    device = typical_device(arch)
    facts = (
        f"Occupancy on {device.name}: {device.registers_per_sm:,} registers, "
        f"{numbers.num_bytes(device.shared_bytes_per_sm)} of shared memory and "
        f"{device.max_threads_per_sm // WARP_THREADS} warps in each of {device.num_sms} "
        "multiprocessors."
    )
    summary = f"{arch}: {len(kernels)} variants"
    return Fold(summary, (Paragraph(facts), _table(kernels), _gallery(device, kernels)), open_)


def _table(kernels: Sequence[Kernel]) -> Table:
    rows = []
    for kernel in kernels:
        shared = kernel["static_shared_bytes"] + kernel["dynamic_shared_bytes"]
        spills = kernel["spill_bytes"]
        variant = " ".join(f"{name}={value}" for name, value in kernel["defines"].items())
        rows.append(
            (
                Cell(kernel["kernel"], tone="code"),
                Cell(variant, tone="quiet"),
                Cell(str(kernel["threads"]), kernel["threads"]),
                Cell(str(kernel["registers"]), kernel["registers"]),
                Cell(numbers.num_bytes(spills), spills, "bad" if spills else ""),
                Cell(numbers.num_bytes(shared), shared),
                Cell(numbers.percent(kernel["occupancy"]), kernel["occupancy"]),
                Cell(kernel["limiter"]),
            )
        )
    return Table(tuple(Column(name, name in NUMERIC) for name in COLUMNS), tuple(rows))


def _gallery(device: Device, kernels: Sequence[Kernel]) -> Gallery:
    """One curve a kernel: of its variant that leaves the most room empty."""
    chosen: dict[str, Kernel] = {}
    for kernel in kernels:
        best = chosen.setdefault(kernel["kernel"], kernel)
        if kernel["occupancy"] < best["occupancy"]:
            chosen[kernel["kernel"]] = kernel
    return Gallery(
        "Occupancy over threads in a block",
        "Of each kernel the variant with the lowest occupancy, with its own registers and shared "
        "memory; the rule marks the block size in use. Another block size may compile to other "
        "registers.",
        tuple(_thumbnail(device, kernel) for kernel in chosen.values()),
    )


def _thumbnail(device: Device, kernel: Kernel) -> Thumbnail:
    shared = kernel["static_shared_bytes"] + kernel["dynamic_shared_bytes"]
    values = []
    for threads in range(WARP_THREADS, MAX_THREADS_PER_BLOCK + 1, WARP_THREADS):
        found = occupancy(
            device, threads=threads, registers=kernel["registers"], shared_bytes=shared
        )
        values.append((threads, found.fraction))
    detail = f"{numbers.percent(kernel['occupancy'])} at {kernel['threads']} threads"
    title = f"{kernel['kernel']}: occupancy over threads in a block"
    markup = occupancy_curve(values, kernel["threads"], title=title)
    return Thumbnail(kernel["kernel"], f"{detail}, limited by {kernel['limiter']}", markup)
