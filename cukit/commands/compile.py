"""`cukit compile`: compiles every kernel into the kernel cache, for any architecture."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer
from rich.markup import escape

from cukit.analyzer.occupancy import Occupancy, occupancy
from cukit.analyzer.sass import instruction_mix, memory_access
from cukit.commands._console import print_json, stdout, table, tracked
from cukit.core.compiler import CompiledKernel, KernelSpec, compile_kernel
from cukit.core.cubin import kernel_code
from cukit.core.device import (
    Device,
    current_device,
    gpu_available,
    typical_device,
)
from cukit.core.workers import run_in_workers
from cukit.errors import CompileError
from cukit.registry import get_op, ops

DEFAULT_ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")


@dataclass(frozen=True)
class Variant:
    """One kernel variant to compile, for one GPU."""

    spec: KernelSpec
    device: Device
    op: str = field(default="", compare=False)
    """The first op that launches it; others may, too."""

    @property
    def arch(self) -> str:
        """The compilation target of launches on this GPU."""
        return self.device.compile_arch


def compile_kernels(
    arch: Annotated[
        str | None,
        typer.Option(
            help="Architectures, separated by commas: sm_80,sm_90a,... "
            "Default: this machine's GPU, or sm_80, sm_90a, sm_100a and sm_120a without one."
        ),
    ] = None,
    op: Annotated[list[str] | None, typer.Option(help="Only this op; may be repeated.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="Parallel processes. Default: one per core."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compile every kernel variant, with or without a GPU, and show registers, spills, occupancy.

    Fills the cache that launches read, so that first calls are quick. Exit code 1 if a kernel does
    not compile.
    """
    requested = variants(devices(arch), op)
    compiled, errors = build(requested, jobs, quiet=as_json)
    if as_json:
        print_json(facts(compiled, errors))
    else:
        _show(list(compiled.items()), errors)
    raise typer.Exit(1 if errors else 0)


def build(
    requested: Sequence[Variant], jobs: int | None = None, *, quiet: bool = False
) -> tuple[dict[Variant, CompiledKernel], dict[Variant, str]]:
    """Compiles with progress on stderr; returns the kernels in the order of `requested`, and the
    NVRTC log of each variant that does not compile."""
    # In random order, so that the finished variants predict the time of the rest.
    order = random.Random(0).sample(requested, len(requested))
    doing = f"compiling for {', '.join(dict.fromkeys(variant.arch for variant in requested))}"
    progress = tracked(compile_all(order, jobs), len(requested), doing, quiet=quiet)
    with contextlib.closing(progress):  # on Ctrl-C, too: remove the bar before any message
        results = dict(progress)
    compiled: dict[Variant, CompiledKernel] = {}
    errors: dict[Variant, str] = {}
    for variant in requested:
        result = results[variant]
        if isinstance(result, CompileError):
            errors[variant] = str(result)
        else:
            compiled[variant] = result
    return compiled, errors


def facts(
    compiled: Mapping[Variant, CompiledKernel], errors: Mapping[Variant, str]
) -> dict[str, list[dict[str, Any]]]:
    """The content of `--json`, which is also the source of a report."""
    return {
        "kernels": [_record(variant, kernel) for variant, kernel in compiled.items()],
        "errors": [
            {"kernel": str(variant.spec), "arch": variant.arch, "log": log}
            for variant, log in errors.items()
        ],
    }


def devices(arch: str | None) -> list[Device]:
    """GPUs to plan for: one per architecture in `arch`; without it, this machine's; without a GPU,
    one per default architecture."""
    if arch is None:
        if gpu_available():
            return [current_device()]
        return [typical_device(name) for name in DEFAULT_ARCHS]
    found = []
    for name in filter(None, (part.strip() for part in arch.split(","))):
        typical = typical_device(name)
        here = current_device() if gpu_available() else None
        found.append(here if here is not None and here.arch == typical.arch else typical)
    if not found:
        raise typer.BadParameter("--arch names no architecture; for example sm_80,sm_90a")
    return list(dict.fromkeys(found))


def variants(on: Sequence[Device], names: Sequence[str] | None = None) -> list[Variant]:
    """Every distinct kernel variant of the named ops, by default of all ops, for each GPU."""
    chosen = [get_op(name) for name in names] if names else list(ops())
    return list(
        dict.fromkeys(
            Variant(spec, device, op.name)
            for device in on
            for op in chosen
            if op.supports(device)
            for spec in op.specs(device)
        )
    )


def compile_all(
    requested: Iterable[Variant], jobs: int | None = None
) -> Iterator[tuple[Variant, CompiledKernel | CompileError]]:
    """Compiles in parallel processes; yields results as they complete."""
    tasks = list(requested)
    workers = min(jobs or len(os.sched_getaffinity(0)), len(tasks))
    if workers <= 1:
        yield from map(compile_variant, tasks)
    else:
        yield from run_in_workers(compile_variant, tasks, workers)


def compile_variant(variant: Variant) -> tuple[Variant, CompiledKernel | CompileError]:
    """Compiles one variant into the kernel cache; a CompileError is returned, not raised."""
    try:
        return variant, compile_kernel(variant.spec, variant.arch)
    except CompileError as error:
        return variant, error


def residency(variant: Variant, compiled: CompiledKernel) -> Occupancy:
    """Theoretical occupancy of a compiled variant."""
    return occupancy(
        variant.device,
        threads=variant.spec.threads,
        registers=compiled.info.registers,
        shared_bytes=compiled.info.static_shared_bytes + variant.spec.shared_bytes,
    )


def _record(variant: Variant, compiled: CompiledKernel) -> dict[str, Any]:
    info, resident = compiled.info, residency(variant, compiled)
    code = kernel_code(compiled.path.read_bytes(), variant.spec.entry)
    capability = variant.device.compute_capability
    return {
        "op": variant.op,
        "kernel": variant.spec.entry,
        "source": variant.spec.source,
        "defines": dict(variant.spec.defines),
        "arch": variant.arch,
        "threads": variant.spec.threads,
        "registers": info.registers,
        "spill_bytes": info.spill_store_bytes + info.spill_load_bytes,
        "spill_store_bytes": info.spill_store_bytes,
        "spill_load_bytes": info.spill_load_bytes,
        "static_shared_bytes": info.static_shared_bytes,
        "dynamic_shared_bytes": variant.spec.shared_bytes,
        "blocks_per_sm": resident.blocks,
        "occupancy": resident.fraction,
        "limiter": resident.limiter,
        "memory_access": asdict(memory_access(code, capability)),
        "instruction_mix": asdict(instruction_mix(code, capability)),
        "compile_ms": round(compiled.compile_ms, 1),
        "cached": compiled.cached,
    }


COLUMNS = ("kernel", "variant", "arch", "threads", "registers", "spills", "shared", "occupancy")


def _show(rows: Sequence[tuple[Variant, CompiledKernel]], errors: Mapping[Variant, str]) -> None:
    console = stdout()
    numbers = ("threads", "registers", "spills", "shared", "ms")
    report = table(*COLUMNS, "limited by", "ms", right=numbers)
    for variant, compiled in rows:
        info, resident = compiled.info, residency(variant, compiled)
        spills = info.spill_store_bytes + info.spill_load_bytes
        shared = f"{info.static_shared_bytes} + {variant.spec.shared_bytes}"
        report.add_row(
            variant.spec.entry,
            " ".join(f"{name}={value}" for name, value in variant.spec.defines),
            variant.arch,
            str(variant.spec.threads),
            str(info.registers),
            f"[red]{spills}[/]" if spills else "0",
            shared,
            f"{100 * resident.fraction:3.0f}% {resident.blocks}x{variant.spec.threads}",
            resident.limiter,
            "cached" if compiled.cached else f"{compiled.compile_ms:.0f}",
        )
    console.print(report)
    fresh = sum(not compiled.cached for _, compiled in rows)
    console.print(
        f"\n{len(rows)} kernels ready, {fresh} compiled now, {len(errors)} failed", style="bold"
    )
    for variant, log in errors.items():
        console.print(f"\n[bold red]{variant.arch}[/] {escape(log)}")
