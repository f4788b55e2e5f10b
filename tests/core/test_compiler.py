"""Compiling and caching without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from cukit.core import compiler, source
from cukit.core.compiler import KernelSpec, compile_kernel
from cukit.errors import CacheError, CompileError, CukitError

pytest.importorskip("cupy", reason="compiling needs NVRTC, which comes with CuPy")

SPEC = KernelSpec("k.cu", "k", (("N", 3),), threads=32)


@pytest.fixture
def sources(tmp_path, monkeypatch, kernel_cache) -> Path:
    """A separate kernels_cu folder: k.cu includes a.cuh, which includes deep/b.cuh."""
    root = tmp_path / "kernels"
    (root / "deep").mkdir(parents=True)
    (root / "k.cu").write_text(
        '#include "a.cuh"\nextern "C" __global__ void k(float* x) { x[0] = value() + N; }\n'
    )
    (root / "a.cuh").write_text('#include "deep/b.cuh"\n')
    (root / "deep" / "b.cuh").write_text("__device__ float value() { return 1.0f; }\n")
    for module in (source, compiler):
        monkeypatch.setattr(module, "kernels_root", lambda: root)
    return root


def test_second_compile_comes_from_the_cache(sources):
    assert not compile_kernel(SPEC, "sm_80").cached
    assert compile_kernel(SPEC, "sm_80").cached


def test_an_edit_of_a_nested_include_recompiles(sources):
    before = compile_kernel(SPEC, "sm_80")
    (sources / "deep" / "b.cuh").write_text("__device__ float value() { return 2.0f; }\n")
    after = compile_kernel(SPEC, "sm_80")
    assert not after.cached
    assert after.path != before.path


@pytest.mark.parametrize(
    ("spec", "arch"),
    [(SPEC, "sm_90a"), (KernelSpec("k.cu", "k", (("N", 4),), threads=32), "sm_80")],
    ids=["arch", "macro"],
)
def test_arch_and_macros_are_part_of_the_key(sources, spec, arch):
    assert compile_kernel(SPEC, "sm_80").path != compile_kernel(spec, arch).path


def test_a_damaged_cubin_is_compiled_again(sources):
    path = compile_kernel(SPEC, "sm_80").path
    path.write_bytes(b"damaged")
    again = compile_kernel(SPEC, "sm_80")
    assert not again.cached
    assert again.path.read_bytes()[:4] == b"\x7fELF"


def test_a_compile_error_quotes_the_source_line(sources):
    (sources / "a.cuh").write_text("__device__ float value() { return undefined_name; }\n")
    with pytest.raises(CompileError) as error:
        compile_kernel(SPEC, "sm_80")
    message = str(error.value)
    assert "a.cuh(1): error" in message
    assert "return undefined_name;" in message
    assert "k(N=3)" in message


def test_a_missing_entry_lists_the_existing_ones(sources):
    with pytest.raises(CompileError, match=r"no extern \"C\" entry 'other'.*\['k'\]"):
        compile_kernel(KernelSpec("k.cu", "other", (("N", 3),), threads=32), "sm_80")


def test_an_unwritable_cache_names_the_variable_to_set(sources, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUKIT_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(CacheError, match="CUKIT_CACHE_DIR"):
        compile_kernel(SPEC, "sm_80")


def test_first_compile_is_visible_and_can_be_silenced(sources, capsys, monkeypatch):
    monkeypatch.delenv("CUKIT_QUIET", raising=False)
    compiler.compile_with_message(SPEC, "sm_80")
    assert "compiled k(N=3) for sm_80" in capsys.readouterr().err
    compiler.compile_with_message(SPEC, "sm_80")
    assert capsys.readouterr().err == "", "from the cache"
    monkeypatch.setenv("CUKIT_QUIET", "1")
    compiler.compile_with_message(SPEC, "sm_86")
    assert capsys.readouterr().err == ""


def test_include_closure_is_transitive(sources):
    assert source.include_closure("k.cu") == ("a.cuh", "deep/b.cuh", "k.cu")


def test_a_missing_source_is_named(sources):
    with pytest.raises(CukitError, match=r"'gone\.cu' not found"):
        source.read_source("gone.cu")
