"""Every kernel variant of every op compiles for every architecture, and keeps to its registers.

NVRTC needs no GPU. The cache lives in pytest's own folder: its key covers sources, includes,
options and compiler, so that a second run only compiles what changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from cukit.commands.compile import (
    DEFAULT_ARCHS,
    Variant,
    compile_variant,
    devices,
    residency,
    variants,
    worker_pool,
)
from cukit.core.compiler import CompiledKernel
from cukit.core.source import kernels_root
from cukit.errors import CompileError

MEASURING = {f"analyzer/{name}.cu" for name in ("access_probe", "copy", "fma_rate", "spin")}
"""Sources of the analyzer, which no op launches."""

VARIANTS = variants(devices(",".join(DEFAULT_ARCHS)))

# Where kernels are tuned their loops stay in registers, and at most a few values wait in memory
# from prologue to epilogue; elsewhere a few more may.
TUNED_ARCHS = ("sm_80", "sm_90a")
SPILLS_TUNED_BYTES = 32
SPILLS_ELSEWHERE_BYTES = 128

Compiled = dict[Variant, "Future[tuple[Variant, CompiledKernel | CompileError]]"]


@pytest.fixture(scope="session")
def compiled(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    """A promise for every variant that this run asks for; all cores work on them in order."""
    cache = request.config.cache
    assert cache is not None
    asked = [
        item.callspec.params["variant"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_compiles_without_spills"
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUKIT_CACHE_DIR", str(cache.mkdir("cukit-kernels")))
        pool = worker_pool()
        yield {variant: pool.submit(compile_variant, variant) for variant in asked}
        pool.shutdown(cancel_futures=True)


def facts_of_cubin(compiled: CompiledKernel) -> tuple[int, int, int]:
    """Registers, static shared memory and stack frame, as the reader finds them in the ELF file."""
    info = compiled.info
    return info.registers, info.static_shared_bytes, info.frame_bytes


def facts_of_log(compiled: CompiledKernel) -> tuple[int, int, int]:
    """The same in ptxas' own words."""
    log = json.loads(compiled.path.with_suffix(".json").read_text())["log"]
    _, _, words = log.partition(f"Function properties for {compiled.info.entry}\n")
    words, _, _ = words.partition("Function properties")
    registers, shared, frame = (
        re.search(pattern, words)
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes smem", r"(\d+) bytes stack frame")
    )
    assert registers is not None
    assert frame is not None
    return int(registers[1]), int(shared[1]) if shared else 0, int(frame[1])


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v.arch}-{v.spec}")
def test_compiles_without_spills(variant: Variant, compiled: Compiled) -> None:
    _, result = compiled[variant].result()
    assert isinstance(result, CompiledKernel), str(result)
    assert facts_of_cubin(result) == facts_of_log(result)
    spilled = result.info.spill_store_bytes + result.info.spill_load_bytes
    allowed = SPILLS_TUNED_BYTES if variant.arch in TUNED_ARCHS else SPILLS_ELSEWHERE_BYTES
    assert spilled <= allowed, f"{spilled} bytes spilled"
    assert residency(variant, result).blocks >= 1, "no block of it fits on a multiprocessor"


def test_every_source_belongs_to_an_op() -> None:
    used = {variant.spec.source for variant in VARIANTS} | MEASURING | {"memory/guard_pages.cu"}
    there = {path.relative_to(kernels_root()).as_posix() for path in kernels_root().rglob("*.cu")}
    assert there - used == set(), "no op's specs compile these"


def test_a_compile_error_quotes_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cukit.core import source
    from cukit.core.compiler import KernelSpec, compile_kernel

    (tmp_path / "broken.cu").write_text(
        'extern "C" __global__ void broken(int n) {\n  int unlucky = nowhere;\n}\n'
    )
    monkeypatch.setenv("CUKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(source, "kernels_root", lambda: tmp_path)
    with pytest.raises(CompileError, match=r"broken\.cu\(2\)[\s\S]*nowhere"):
        compile_kernel(KernelSpec("broken.cu", "broken", (), 32), "sm_90a")
