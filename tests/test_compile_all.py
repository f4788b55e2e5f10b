"""Every kernel compiles for every architecture and stays within its registers.

All variants of a kernel are compiled for the architecture that it is tuned for; for the others a
few in which every value of every macro occurs, and every kernel for each of them. `cukit compile`
compiles them all. NVRTC needs no GPU. The cache is pytest's: its key covers sources, includes,
options and compiler, so a second run compiles only what changed. The quick run compiles every
kernel once, and kernels of every family for every architecture.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path

import pytest

from cukit.commands.compile import DEFAULT_ARCHS, Variant, devices, residency, variants
from cukit.core.compiler import CompiledKernel, compile_kernel
from cukit.core.source import kernels_root
from cukit.errors import CompileError
from tests.quick_run import cover

MEASURING = {f"analyzer/{name}.cu" for name in ("access_probe", "copy", "fma_rate", "spin")}
"""Sources of the analyzer, which no op launches."""

# Where kernels are tuned their loops stay in registers, and at most a few values wait in memory
# from prologue to epilogue; elsewhere a few more may.
TUNED_ARCHS = ("sm_80", "sm_90a")
SPILLS_TUNED_BYTES = 32
SPILLS_ELSEWHERE_BYTES = 128


def home(variant: Variant) -> str:
    """The architecture that a kernel is tuned for."""
    return "sm_80" if variant.spec.source.endswith("_sm80.cu") else "sm_90a"


def macro_values(variant: Variant) -> list[Hashable]:
    """What is compiled at least once for an architecture that the kernel is not tuned for."""
    kernel = (variant.spec.source, variant.spec.entry)
    return [
        (*kernel, variant.arch),
        *((*kernel, name, value) for name, value in variant.spec.defines),
    ]


def chosen_variants() -> list[Variant]:
    """All where they are tuned; a few elsewhere."""
    every = variants(devices(",".join(DEFAULT_ARCHS)))
    elsewhere = [variant for variant in every if variant.arch != home(variant)]
    few = cover([macro_values(variant) for variant in elsewhere])
    tuned = [variant for variant in every if variant.arch == home(variant)]
    return tuned + [elsewhere[index] for index in sorted(few)]


VARIANTS = chosen_variants()


def properties(variant: Variant) -> list[Hashable]:
    """What the quick run compiles at least once."""
    spec = variant.spec
    family, _, _ = spec.source.partition("/")
    return [(spec.source, spec.entry), (family, variant.arch)]


QUICK = cover([properties(variant) for variant in VARIANTS])


def facts_of_cubin(compiled: CompiledKernel) -> tuple[int, int, int]:
    """Registers, static shared memory and stack frame, as the reader finds them in the ELF file."""
    info = compiled.info
    return info.registers, info.static_shared_bytes, info.frame_bytes


def facts_of_log(compiled: CompiledKernel) -> tuple[int, int, int]:
    """The same in ptxas' own words."""
    _, _, words = compiled.log.partition(f"Function properties for {compiled.info.entry}\n")
    words, _, _ = words.partition("Function properties")
    registers, shared, frame = (
        re.search(pattern, words)
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes smem", r"(\d+) bytes stack frame")
    )
    assert registers is not None
    assert frame is not None
    return int(registers[1]), int(shared[1]) if shared else 0, int(frame[1])


def known_spills(variant: Variant) -> int:
    """Bytes that a variant may spill beyond the rule.

    Hopper's backward: the producer's threads, which have 24 registers, keep what they know of a
    block's work in memory. With more, the consumers' wgmmas are serialised (backward_walk.cuh).
    Hopper's products with quantised weights: values that the epilogue needs wait in memory while
    tiles of 128 tokens and more are summed; the main loop has no spills.
    Gradients of an indexer's queries with heads of 256 columns: a thread has 128 sums.
    Sampling with two blocks a multiprocessor: 64 registers, and three values wait in memory until
    the row has been read.
    """
    if variant.spec.entry == "weight_only_sm90":
        return 128
    if variant.spec.entry == "sample":
        return 48 if dict(variant.spec.defines)["BLOCKS_PER_SM"] == 2 else 0
    if variant.spec.entry == "indexer_kl_query_sm80":
        return 176 if dict(variant.spec.defines)["HEAD_DIM"] == 256 else 0
    return 192 if variant.spec.entry == "flash_attention_backward_sm90" else 0


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(
            variant,
            id=f"{variant.arch}-{variant.spec}",
            marks=() if index in QUICK else pytest.mark.slow,
        )
        for index, variant in enumerate(VARIANTS)
    ],
)
def test_compiles_without_spills(
    variant: Variant, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert request.config.cache is not None
    monkeypatch.setenv("CUKIT_CACHE_DIR", str(request.config.cache.mkdir("cukit-kernels")))
    result = compile_kernel(variant.spec, variant.arch)
    assert facts_of_cubin(result) == facts_of_log(result)
    assert "wgmma.mma_async instructions are serialized" not in result.log
    spilled = result.info.spill_store_bytes + result.info.spill_load_bytes
    allowed = SPILLS_TUNED_BYTES if variant.arch in TUNED_ARCHS else SPILLS_ELSEWHERE_BYTES
    allowed = max(allowed, known_spills(variant))
    assert spilled <= allowed, f"{spilled} bytes spilled"
    assert residency(variant, result).blocks >= 1, "no block of it fits on a multiprocessor"


def test_every_source_belongs_to_an_op() -> None:
    used = {variant.spec.source for variant in VARIANTS} | MEASURING | {"memory/guard_pages.cu"}
    there = {path.relative_to(kernels_root()).as_posix() for path in kernels_root().rglob("*.cu")}
    assert there - used == set(), "no op's specs compile these"


def test_a_compile_error_quotes_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cukit.core import source
    from cukit.core.compiler import KernelSpec

    (tmp_path / "broken.cu").write_text(
        'extern "C" __global__ void broken(int n) {\n  int unlucky = nowhere;\n}\n'
    )
    monkeypatch.setenv("CUKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(source, "kernels_root", lambda: tmp_path)
    with pytest.raises(CompileError, match=r"broken\.cu\(2\)[\s\S]*nowhere"):
        compile_kernel(KernelSpec("broken.cu", "broken", (), 32), "sm_90a")
