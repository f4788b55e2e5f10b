"""Every op has a function, reference, kernels, docstring, test and bench case."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

import cukit
from cukit.core.device import TYPICAL_DEVICES
from cukit.core.source import kernels_root
from cukit.errors import ConfigError
from cukit.registry import Op, get_kernel, ops
from profiling.run import load_cases

ROOT = Path(__file__).parents[1]
OPS = list(ops())

# Kernels behind the array API: called as `ck.asarray(x, dtype=ck.int4)` and `array.decode()`.
INTERNAL = {"encode", "decode"}

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def test_there_are_ops() -> None:
    assert len(OPS) > 10


@every_op
def test_the_function_is_public(op: Op) -> None:
    if op.name in INTERNAL:
        assert not hasattr(cukit, op.name)
        return
    family = importlib.import_module(f"cukit.{op.family}")
    assert op.name in family.__all__, f"cukit.{op.family}.__all__ lacks {op.name}"
    assert getattr(family, op.name) is op.function
    assert getattr(cukit, op.name) is op.function, f"cukit.{op.name} is missing"
    assert get_kernel(op.name) is op.function


@every_op
def test_the_reference_is_plain_array_code(op: Op) -> None:
    assert op.reference.__module__.startswith("cukit.reference."), op.reference.__module__
    assert get_kernel(op.name, platform="cpu") is op.reference


@every_op
def test_the_docstring_describes_arguments_and_results(op: Op) -> None:
    """A backward may refer to its forward with `:func:`."""
    text = inspect.getdoc(op.function) or ""
    assert "[" in text or ":func:" in text, f"{op.name}: the docstring has no shapes"
    if op.name not in INTERNAL:
        for word in ("return", "raises"):
            assert word in text.lower() or ":func:" in text, f"{op.name}: `{word}` is missing"


@every_op
def test_the_kernels_exist(op: Op) -> None:
    for device in TYPICAL_DEVICES.values():
        if not op.supports(device):
            continue
        specs = op.specs(device)
        assert bool(specs) == op.has_kernel
        for spec in specs:
            assert (kernels_root() / spec.source).is_file(), spec.source
            assert Path(spec.source).stem, spec.source
            assert spec.threads % 32 == 0 or spec.threads == 1
            assert spec.shared_bytes <= device.shared_bytes_per_block, f"{spec} on {device.name}"


@every_op
def test_there_is_a_test_file(op: Op) -> None:
    stem = op.name.removesuffix("_backward")
    module = op.function.__module__.rpartition(".")[2]
    wanted = {f"tests/{op.family}/test_{name}.py" for name in (stem, module)}
    assert any((ROOT / path).is_file() for path in wanted), (
        f"missing: {' or '.join(sorted(wanted))}"
    )


@every_op
def test_there_is_a_bench_case(op: Op) -> None:
    ours = [case for case in load_cases() if case.op == op.name and case.clock == "device"]
    assert ours, f"profiling/cases/{op.family}.py has no case of {op.name}"
    assert {case.family for case in ours} == {op.family}


def test_an_unknown_op_names_the_closest() -> None:
    with pytest.raises(ConfigError, match="did you mean rms_norm"):
        get_kernel("rms_nrom")
