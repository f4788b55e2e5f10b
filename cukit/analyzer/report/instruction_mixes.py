"""Instruction mixes in a report: colours and order of the instruction classes."""

from __future__ import annotations

from collections.abc import Sequence

from cukit.analyzer.report import svg
from cukit.analyzer.report.layout import Figure
from cukit.analyzer.report.stacks import Part, Stack, stacked_figure
from cukit.analyzer.sass import INSTRUCTION_CLASSES
from cukit.analyzer.schema import InstructionMix

_CSS_CLASSES = (
    *(svg.colour(series) for series in (0, 2, 4, 1, 5, 3, 6, 7)),
    svg.shade(0),
)
"""The CSS class of each of `INSTRUCTION_CLASSES`, in order; "other" is faint."""


def mix_class(name: str) -> str:
    """The CSS class of an instruction class; unknown instruction classes have that of "other"."""
    known = name in INSTRUCTION_CLASSES
    return _CSS_CLASSES[INSTRUCTION_CLASSES.index(name)] if known else _CSS_CLASSES[-1]


def ordered_mix(mix: InstructionMix) -> list[tuple[str, int]]:
    """The mix's classes in the order used by every report."""
    return [(name, mix.by_class[name]) for name in INSTRUCTION_CLASSES if name in mix.by_class]


def mix_stack(label: str, mixes: Sequence[InstructionMix]) -> Stack:
    """The mean of mixes. Each mix has the same weight, whatever its code size."""
    totals = dict.fromkeys(INSTRUCTION_CLASSES, 0.0)
    for mix in mixes:
        for name, count in ordered_mix(mix):
            totals[name] += count / mix.instructions
    parts = tuple(Part(mix_class(name), name, totals[name]) for name in INSTRUCTION_CLASSES)
    detail = f"{mixes[0].instructions:,} instructions" if len(mixes) == 1 else f"{len(mixes):,}"
    return Stack(label, detail, parts)


def mix_figure(title: str, stacks: Sequence[Stack]) -> Figure:
    """One bar per stack."""
    caption = "Instructions in the code, without padding. Instructions in loops count once."
    return stacked_figure(title, caption, stacks)
