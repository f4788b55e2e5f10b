"""The cubin reader, compared with the log of ptxas."""

from __future__ import annotations

import re

import pytest

from cukit.core.compiler import KernelSpec, compile_kernel
from cukit.core.cubin import read_cubin
from cukit.core.device import TYPICAL_DEVICES
from cukit.errors import CompileError

cupy = pytest.importorskip("cupy", reason="the cubins are compiled with NVRTC")


@pytest.mark.parametrize("device", TYPICAL_DEVICES.values(), ids=lambda device: device.arch)
def test_agrees_with_ptxas(device):
    spec = KernelSpec(
        "common/column_sum.cu", "column_sum", (("DTYPE", "bfloat16"), ("THREADS", 512)), 512
    )
    compiled = compile_kernel(spec, device.compile_arch)
    log = compiled.log
    registers, shared = re.search(r"Used (\d+) registers.*?(\d+) bytes smem", log).groups()
    assert compiled.info.registers == int(registers)
    assert compiled.info.static_shared_bytes == int(shared) == 2048
    assert compiled.info.parameter_bytes == (8, 8, 4, 4)


def test_counts_spills():
    log = (
        "ptxas info    : Function properties for other\n"
        "ptxas         .     0 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Function properties for column_sum\n"
        "ptxas         .     0 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n"
    )
    spec = KernelSpec(
        "common/column_sum.cu", "column_sum", (("DTYPE", "float32"), ("THREADS", 512)), 512
    )
    info = read_cubin(compile_kernel(spec, "sm_80").path.read_bytes(), "column_sum", log)
    assert (info.spill_store_bytes, info.spill_load_bytes) == (12, 16)


def test_files_that_are_not_cubins_are_rejected():
    with pytest.raises(CompileError, match="not a 64-bit ELF"):
        read_cubin(b"not a cubin at all", "k")
