"""Every kernel compiles for every architecture, within its spill limits.

All variants of a kernel are compiled for the architecture that it is tuned for. For every other
architecture, every kernel is compiled in a few variants that cover every value of every macro.
`cukit compile` compiles all variants. NVRTC needs no GPU. The cache is in pytest's cache folder:
its key covers sources, includes, options and compiler, so a second run compiles only what changed.
The quick run compiles every kernel once, and kernels of every family for every architecture.
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

ANALYZER_SOURCES = {f"analyzer/{name}.cu" for name in ("access_probe", "copy", "fma_rate", "spin")}
"""Sources of the analyzer, which belong to no op."""

# Limits of kernels that known_spills does not list. For STRICT_ARCHS main loops do not spill, and
# at most a few values are spilled from prologue to epilogue, also in kernels that are tuned for the
# other of the two. Other architectures may spill a few more.
STRICT_ARCHS = ("sm_80", "sm_90a")
SPILLS_STRICT_BYTES = 32
SPILLS_OTHER_BYTES = 128


def tuned_arch(variant: Variant) -> str:
    """The architecture that a kernel is tuned for."""
    return "sm_80" if variant.spec.source.endswith("_sm80.cu") else "sm_90a"


def macro_values(variant: Variant) -> list[Hashable]:
    """Properties covered for an architecture that the kernel is not tuned for."""
    kernel = (variant.spec.source, variant.spec.entry)
    return [
        (*kernel, variant.arch),
        *((*kernel, name, value) for name, value in variant.spec.defines),
    ]


def chosen_variants() -> list[Variant]:
    """Return all variants for their `tuned_arch`, and a few for other architectures."""
    every = variants(devices(",".join(DEFAULT_ARCHS)))
    elsewhere = [variant for variant in every if variant.arch != tuned_arch(variant)]
    few = cover([macro_values(variant) for variant in elsewhere])
    tuned = [variant for variant in every if variant.arch == tuned_arch(variant)]
    return tuned + [elsewhere[index] for index in sorted(few)]


VARIANTS = chosen_variants()


def properties(variant: Variant) -> list[Hashable]:
    """Properties covered by the quick run."""
    spec = variant.spec
    family, _, _ = spec.source.partition("/")
    return [(spec.source, spec.entry), (family, variant.arch)]


QUICK = cover([properties(variant) for variant in VARIANTS])


def facts_of_cubin(compiled: CompiledKernel) -> tuple[int, int, int]:
    """Registers, static shared memory and stack frame, as parsed from the ELF file."""
    info = compiled.info
    return info.registers, info.static_shared_bytes, info.frame_bytes


def facts_of_log(compiled: CompiledKernel) -> tuple[int, int, int]:
    """The values of facts_of_cubin, as reported by ptxas."""
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
    """Return the spill bytes that a variant may have beyond the general limit.

    - Attention backward on Hopper: producer threads have 24 registers and spill the description of
      their work. With more registers, ptxas serialises the consumers' wgmmas
      (backward_pipelines.cuh).
    - Products with quantised weights on Hopper: values for the epilogue are spilled during the main
      loop of tiles with 128 tokens and more; the main loop itself has no spills.
    - Gradients of an indexer's queries with a head_dim of 256: a thread has 128 accumulators.
    - Sampling by one block per row, with 64 registers per thread: values that are needed after the
      row has been read are spilled until then, and so are values in the passes over candidates and
      over rows that are read again. Variants with 128 registers and without spills were not faster
      (profiling/notes/sampling.md).
    - Attention with the divergence from a teacher, 96 keys: descriptors are spilled in the loop;
      80 keys without spills were not faster under a causal mask (attention_distillation.md).
    - Divergence of two models' attention, heads of up to 64 columns, both log-sum-exps known: with
      three or four consumer warpgroups row sums are spilled in the loop; two without spills are
      slower (attention_distillation.md).
    - Latent attention on FP8: up to five values that are computed once per thread or piece, and
      loaded again once per page.
    """
    if variant.spec.entry == "weight_only_sm90":
        return 128
    if variant.spec.entry == "flash_attention_sm90":
        return 128 if dict(variant.spec.defines).get("TEACHER") else 0
    if variant.spec.entry == "attention_kl_sm90":
        defines = dict(variant.spec.defines)
        return 96 if defines["CONSUMERS"] != 2 and defines["KNOWN_T"] else 0
    if variant.spec.entry == "mla_attention_float8_sm90":
        return 80
    if variant.spec.entry == "sample":
        defines = dict(variant.spec.defines)
        few, again = (1536, 3456) if defines["VERIFIES"] else (1408, 2560)
        limits = {"Few": few, "Any": 0 if defines["RESIDENT"] else again}
        return limits.get(str(defines["DRAWS"]), 0)
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
def test_compiles_without_spills(variant: Variant) -> None:
    result = compile_kernel(variant.spec, variant.arch)
    assert facts_of_cubin(result) == facts_of_log(result)
    assert "wgmma.mma_async instructions are serialized" not in result.log
    spilled = result.info.spill_store_bytes + result.info.spill_load_bytes
    allowed = SPILLS_STRICT_BYTES if variant.arch in STRICT_ARCHS else SPILLS_OTHER_BYTES
    allowed = max(allowed, known_spills(variant))
    assert spilled <= allowed, f"{spilled} bytes spilled"
    assert residency(variant, result).blocks >= 1, "no thread block fits on an SM"


def test_every_source_belongs_to_an_op() -> None:
    used = {variant.spec.source for variant in VARIANTS}
    used |= ANALYZER_SOURCES | {"memory/guard_pages.cu"}
    there = {path.relative_to(kernels_root()).as_posix() for path in kernels_root().rglob("*.cu")}
    assert there - used == set(), "not compiled by the specs of any op"


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
