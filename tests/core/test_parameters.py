"""Parameter structs: read from CUDA, packed by name, laid out as the compiler lays them out."""

from __future__ import annotations

import numpy as np
import pytest

import cukit
from cukit.attention.flash._flash_plan import plan_flash_attention
from cukit.attention.flash._problem import AttentionProblem
from cukit.core.compiler import compile_kernel
from cukit.core.device import typical_device
from cukit.core.kernel import changed_by_value
from cukit.core.parameters import layout_assertions, parameter_structs
from cukit.errors import CompileError, LaunchError

SOURCES = {
    "family/inner/parameters.cuh": """
        namespace cukit {
        struct Inner { long long row; int head; };  // 4 bytes of padding at the end
        }""",
    "family/parameters.cuh": """
        #include "family/inner/parameters.cuh"
        namespace cukit {
        // Structs in comments are ignored: struct Not { int here; };
        struct Outer {
          int batch,  // and another
              heads;
          Inner q, k;
          unsigned flags;
          float scale;
        };
        }""",
    "family/kernel.cu": '#include "family/parameters.cuh"\n',
}


@pytest.fixture
def sources(tmp_path, monkeypatch):
    for name, text in SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr("cukit.core.source.kernels_root", lambda: tmp_path)
    parameter_structs.cache_clear()
    yield tmp_path
    parameter_structs.cache_clear()


def test_structs_of_included_headers_are_read_too(sources):
    structs = parameter_structs("family/parameters.cuh")
    assert list(structs) == ["Inner", "Outer"]
    assert structs["Inner"].dtype.itemsize == 16
    outer = structs["Outer"].dtype
    assert outer.names == ("batch", "heads", "q", "k", "flags", "scale")
    assert [outer.fields[name][1] for name in outer.names] == [0, 4, 8, 24, 40, 44]


def test_values_are_packed_by_name(sources):
    structs = parameter_structs("family/parameters.cuh")
    inner = structs["Inner"].pack(row=1 << 40, head=7)
    packed = structs["Outer"].pack(
        scale=0.5, flags=9, k=inner, q=(np.int64(3), 4), heads=2, batch=1
    )
    assert packed.dtype.type is np.void
    assert packed.size == 1
    (value,) = packed.view(structs["Outer"].dtype)
    assert (value["batch"], value["heads"], value["flags"], value["scale"]) == (1, 2, 9, 0.5)
    assert (value["q"]["row"], value["q"]["head"]) == (3, 4)
    assert (value["k"]["row"], value["k"]["head"]) == (1 << 40, 7)


def test_missing_and_unknown_names_are_reported(sources):
    inner = parameter_structs("family/parameters.cuh")["Inner"]
    with pytest.raises(LaunchError, match=r"Inner: missing \['head'\], unknown \['haed'\]"):
        inner.pack(row=1, haed=2)


def test_values_that_overflow_a_field_are_rejected(sources):
    inner = parameter_structs("family/parameters.cuh")["Inner"]
    with pytest.raises(LaunchError, match=r"Inner: .*'head': 2147483648"):
        inner.pack(row=1, head=1 << 31)
    with pytest.raises(LaunchError, match=r"Inner: .*'head': None"):
        inner.pack(row=1, head=None)


def test_every_kind_of_number_is_packed(sources):
    (sources / "family/parameters.cuh").write_text(
        "struct Kinds { int a; unsigned b; long long c; unsigned long long d; float e; double f; };"
    )
    given = {"a": -1, "b": 2, "c": -(1 << 40), "d": 1 << 63, "e": 0.5, "f": 1e300}
    kinds = parameter_structs("family/parameters.cuh")["Kinds"]
    (value,) = kinds.pack(**given).view(kinds.dtype)
    assert {name: value[name] for name in given} == given


@pytest.mark.parametrize("field", ["short x", "int x[2]", "Later x", "int* x"])
def test_fields_of_unsupported_types_are_rejected(sources, field):
    (sources / "family/parameters.cuh").write_text(f"struct Odd {{ {field}; }};")
    with pytest.raises(LaunchError, match=r"family/parameters\.cuh: field .* of Odd"):
        parameter_structs("family/parameters.cuh")


def test_a_source_without_parameters_asserts_nothing():
    assert layout_assertions("layers/gelu.cu") == ""


def test_every_compilation_asserts_the_layout(monkeypatch, kernel_cache):
    pytest.importorskip("cupy", reason="compiling needs NVRTC, which comes with CuPy")
    problem = AttentionProblem(1, 64, 64, 1, 1, 64, "bfloat16", False)
    spec = plan_flash_attention(problem, typical_device("sm_80")).spec()
    compile_kernel(spec, "sm_80")
    correct = layout_assertions(spec.source)
    wrong = correct.replace("window_left) == 64", "window_left) == 68")
    assert wrong != correct
    monkeypatch.setattr("cukit.core.compiler.layout_assertions", lambda source: wrong)
    with pytest.raises(CompileError, match="ScoreSettings: laid out as in Python"):
        compile_kernel(spec, "sm_80")


def test_replaced_fields_are_packed_like_the_others(sources):
    outer = parameter_structs("family/parameters.cuh")["Outer"]
    given = {"batch": 1, "heads": 2, "q": (3, 4), "k": (5, 6), "flags": 7, "scale": 0.5}
    packed = outer.pack(**given)
    other = {"heads": 9, "k": (8, 1), "scale": 2.0}
    assert outer.changed(packed, **other).tobytes() == outer.pack(**given | other).tobytes()
    assert packed.tobytes() == outer.pack(**given).tobytes()
    with pytest.raises(LaunchError, match=r"Outer: .*heads=4294967296"):
        outer.changed(packed, heads=1 << 32)
    with pytest.raises(LaunchError, match=r"Outer: .*scale=1e\+300"):
        outer.changed(packed, scale=1e300)
    with pytest.raises(LaunchError, match=r"Outer: .*'scale': 1e\+300"):
        outer.pack(**given | {"scale": 1e300})
    with pytest.raises(
        LaunchError, match=r"Outer: unknown \['haeds'\]; the fields are batch, heads"
    ):
        outer.changed(packed, haeds=1)


def test_a_field_of_a_nested_struct_is_replaced(sources):
    structs = parameter_structs("family/parameters.cuh")
    outer, (_, last) = structs["Outer"], structs["Inner"].dtype.names
    given = {"batch": 1, "heads": 2, "q": (3, 4), "k": (5, 6), "flags": 7, "scale": 0.5}
    expected = outer.pack(**given | {"k": (5, 8)}).tobytes()
    changes = {f"k.{last}": 8}
    packed = outer.pack(**given)
    assert outer.changed(packed, **changes).tobytes() == expected
    assert changed_by_value(outer, packed, changes).storage.raw == expected
    assert packed.tobytes() == outer.pack(**given).tobytes()
    with cukit.backend("emulator"):
        assert changed_by_value(outer, packed, changes).tobytes() == expected
    with pytest.raises(LaunchError, match=rf"Outer: .*k.{last}='8'"):
        changed_by_value(outer, packed, {f"k.{last}": "8"})
