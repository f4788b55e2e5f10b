"""`cukit list`: every op, its implementation, and what runs it on this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from cukit.commands._console import print_json, stdout, table
from cukit.core.arrays import FLOAT_DTYPES
from cukit.core.device import Device, current_device, gpu_available, typical_device
from cukit.registry import Op, ops


@dataclass(frozen=True)
class Row:
    """One op, as the table shows it."""

    family: str
    name: str
    status: str
    """"kernel" or "vendor library"; every op has a reference, too."""
    minimum_arch: str
    dtypes: tuple[str, ...]
    here: str


def list_ops(
    family: Annotated[str | None, typer.Option(help="Only this family.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show every op: family, implementation, dtypes, and what runs it on this machine."""
    rows = [describe(op) for op in ops() if family in (None, op.family)]
    if not rows:
        known = ", ".join(sorted({op.family for op in ops()}))
        raise typer.BadParameter(f"no family {family!r}; expected one of {known}")
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    report = table("family", "op", "status", "from", "dtypes", "here")
    for row in rows:
        dtypes = " ".join(row.dtypes)
        report.add_row(row.family, row.name, row.status, row.minimum_arch, dtypes, row.here)
    stdout().print(report)


def describe(op: Op) -> Row:
    """The table row of an op on this machine."""
    device = current_device() if gpu_available() else None
    return Row(
        family=op.family,
        name=op.name,
        status="kernel" if op.has_kernel else "vendor library",
        minimum_arch=op.support.minimum_arch,
        dtypes=_dtypes(op),
        here=_here(op, device),
    )


def _dtypes(op: Op) -> tuple[str, ...]:
    """Element types of the op's kernels."""
    specs = (spec for arch in ("sm_80", "sm_90") for spec in op.specs(typical_device(arch)))
    found = {str(value) for spec in specs for name, value in spec.defines if name == "DTYPE"}
    return tuple(dtype.name for dtype in FLOAT_DTYPES if dtype.name in found)


def _here(op: Op, device: Device | None) -> str:
    if device is None:
        return "reference (no GPU)"
    reason = op.support.reason_against(device)
    if reason is not None:
        return f"reference ({reason})"
    return f"{'kernel' if op.has_kernel else 'vendor library'} ({device.compile_arch})"
