"""Invalid inputs to every op and creation function: each call raises a CukitError or returns a
result, never another error, and changes only arguments that it may change."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import cukit
from cukit.core.overlap import check_overlap
from cukit.core.quantized_array import QuantizedArray
from cukit.errors import ArrayLayoutError, CukitError
from cukit.gemm import PackedWeight
from cukit.memory import HostProvider
from cukit.registry import Op, get_op, ops
from tests.emulator.samples import SAMPLES

KERNEL_OPS = [op for op in ops() if op.has_kernel]


class Function(NamedTuple):
    """A public function that is not an op."""

    name: str
    function: Callable[..., Any]
    writes: frozenset[str] = frozenset()


Sample = Callable[[np.random.Generator], tuple[tuple[Any, ...], dict[str, Any]]]


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape).astype(np.float32)


TRIANGLES = (
    np.arange(7, dtype=np.int32) * 2,
    np.array([1, 2, 0, 2, 0, 1, 4, 5, 3, 5, 3, 4], np.int32),
    np.full(12, 0.5, np.float32),
)
"""Edges of two triangles: every node has edges to the other two of its triangle."""

FUNCTIONS: dict[str, Sample] = {
    "GraphDiffusionMemory": lambda rng: (
        (floats(rng, 6, 8), cukit.Transition(*TRIANGLES)),
        {},
    ),
    "LayerBank": lambda rng: ((floats(rng, 4, 8), floats(rng, 4, 8, 8), 2), {"decay": 0.5}),
    "parallel_scan": lambda rng: ((floats(rng, 4, 6),), {"axis": 1, "operation": "product"}),
    "parallel_sort": lambda rng: ((floats(rng, 4, 6),), {"return_indices": True}),
    "strided_reduction": lambda rng: ((floats(rng, 4, 6),), {"axis": 0, "operation": "mean"}),
    "histogram": lambda rng: ((floats(rng, 50), 8), {"low": -1.0, "high": 1.0}),
    "absorb_mla_projections": lambda rng: (
        (floats(rng, 10, 7), floats(rng, 9, 8), floats(rng, 2, 3, 6), floats(rng, 2, 4, 6)),
        {},
    ),
    "balance_experts": lambda rng: ((rng.random(8), 10, 2), {"num_nodes": 1, "num_groups": 2}),
    "bsr_from_mask": lambda rng: ((floats(rng, 64, 32), np.eye(4, 2, dtype=bool), 16), {}),
    "create_adaptive_depth_mask": lambda rng: ((rng.integers(1, 4, 8), 4), {}),
    "create_sparse_mask": lambda rng: (((64, 96), 16, 0.5), {}),
    "encode_mla_latents": lambda rng: ((floats(rng, 2, 1, 576),), {}),
    "mla_metadata": lambda rng: ((16,), {"seq_len_q": 2}),
    "explain_matmul": lambda rng: ((floats(rng, 8, 16), floats(rng, 16, 8)), {}),
    "matmul": lambda rng: (
        (floats(rng, 8, 16), floats(rng, 16, 8)),
        {"precision": "auto", "rtol": 1e-3},
    ),
    "pack_weight": lambda rng: ((cukit.quantize(floats(rng, 64, 64), cukit.int8),), {}),
    "quantization_report": lambda rng: (
        (cukit.quantize(x := floats(rng, 4, 64), cukit.int8), x),
        {},
    ),
    "QuantizedArray": lambda rng: (
        (np.zeros((4, 8), np.uint8), cukit.float8_e4m3, (4, 8), np.ones((4, 1), np.float32)),
        {"axis": 1, "group_size": 8},
    ),
    "BlockPattern": lambda rng: (
        (np.array([0, 1, 2], np.int32), np.array([0, 1], np.int32), (32, 32), 16),
        {},
    ),
    "MemoryPoolConfig": lambda rng: ((0, 1 << 24), {}),
    "zeros": lambda rng: (((2, 3),), {"dtype": "float16"}),
    "full": lambda rng: (((2, 3), 1.5), {}),
    "arange": lambda rng: ((0, 10, 2), {}),
    "linspace": lambda rng: ((0.0, 1.0, 5), {}),
    "asarray": lambda rng: ((floats(rng, 4, 8),), {}),
    "full_like": lambda rng: ((floats(rng, 4, 8), 2), {}),
    "xp_namespace": lambda rng: (("cpu",), {}),
    "get_kernel": lambda rng: (("rms_norm",), {"platform": "cpu"}),
    "optimize": lambda rng: ((lambda *args, **kwargs: args, floats(rng, 4, 8)), {}),
}

WRITTEN_ON_REQUEST = {"out", "grad_weight"}
"""Arguments that an op changes if they are given, in addition to those of `inplace=True`."""

SCALARS = (
    None, True, 0, -1, 7, 1 << 40, 10**400, 1.5, float("nan"), float("inf"), -0.0, "no", b"no",
    [], [1], {}, object(), np.float32(0.5), np.int64(3), np.ones(2), np.array(1.0), 1j,
    np.datetime64("now"),
)  # fmt: skip


def unaligned(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a copy at an address one byte past a multiple of the element size."""
    memory = np.zeros(a.nbytes + 1, np.uint8)
    view = np.ndarray(a.shape, a.dtype, memory, 1)
    view[...] = a
    return view


ARRAYS: tuple[Callable[[np.ndarray[Any, Any]], Any], ...] = (
    lambda a: None,
    lambda a: 3.0,
    lambda a: "text",
    lambda a: [1, 2],
    lambda a: a.tolist(),
    lambda a: a.astype(np.float32),
    lambda a: a.astype(np.float64),
    lambda a: a.astype(np.int32),
    lambda a: a.astype(np.uint8),
    lambda a: a.astype(np.float32).astype(np.complex64),
    lambda a: a.astype(bool),
    lambda a: a.astype(object),
    lambda a: a.astype(np.float32).astype(">f4"),
    lambda a: np.zeros(a.shape, "S3"),
    lambda a: np.zeros(a.shape, [("x", np.float32)]),
    lambda a: a[..., :-1] if a.ndim else a,
    lambda a: np.ascontiguousarray(a[..., :-1]) if a.ndim else a,
    lambda a: a[:-1].copy() if a.ndim else a,
    lambda a: a[None].copy(),
    lambda a: a.ravel().copy(),
    lambda a: a[:0].copy() if a.ndim else a,
    lambda a: a[..., :0].copy() if a.ndim else a,
    lambda a: a[..., ::2] if a.ndim else a,
    lambda a: a[::-1] if a.ndim else a,
    lambda a: a.T,
    np.asfortranarray,
    lambda a: a if a.dtype.hasobject else unaligned(a),
    lambda a: np.broadcast_to(a.ravel()[:1], a.shape),
    lambda a: np.array(a.ravel()[0]),
    lambda a: np.ma.masked_array(a, mask=np.zeros(a.shape, bool)),
    lambda a: np.asmatrix(a.reshape(-1, a.shape[-1])) if a.ndim else a,
    lambda a: np.full(a.shape, np.iinfo(a.dtype).max if a.dtype.kind in "iu" else np.nan, a.dtype),
    lambda a: np.lib.stride_tricks.as_strided(a, a.shape, (0,) * a.ndim, writeable=False),
)


Calls = Iterator[tuple[dict[str, Any], str]]
"""Arguments of a call, and the names of those that were replaced."""


def mutations(value: Any, rng: np.random.Generator) -> Any:
    """Return an invalid or unusual replacement of `value`."""
    if isinstance(value, np.ndarray):
        return ARRAYS[rng.integers(len(ARRAYS))](value)
    if isinstance(value, list) and value and isinstance(value[0], np.ndarray):
        changed = list(value)
        which = int(rng.integers(len(value)))
        changed[which] = mutations(value[which], rng)
        return changed if rng.random() < 0.8 else changed[:-1]
    return SCALARS[rng.integers(len(SCALARS))]


NEED_A_DEVICE = {"mla_metadata"}
"""Functions that take no arrays and need a device; all others run on the CPU."""


def a_device_for(op: Op | Function) -> contextlib.AbstractContextManager[Any]:
    """The emulator for functions that need a device; nothing is compiled or launched."""
    return cukit.backend("emulator") if op.name in NEED_A_DEVICE else contextlib.nullcontext()


def random_generator(op: Op | Function) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(op.name.encode()))


def valid_arguments(op: Op | Function, rng: np.random.Generator) -> dict[str, Any]:
    args, kwargs = (SAMPLES.get(op.name) or FUNCTIONS[op.name])(rng)
    bound = inspect.signature(op.function).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def calls(op: Op | Function, count: int) -> Calls:
    """Replace one or two arguments, at random."""
    rng = random_generator(op)
    valid = valid_arguments(op, rng)
    for _ in range(count):
        arguments = copy.deepcopy(valid)
        names = rng.choice(
            list(arguments), size=min(len(arguments), int(rng.integers(1, 3))), replace=False
        )
        for name in names:
            arguments[name] = mutations(arguments[name], rng)
        yield arguments, ", ".join(names)


def all_calls(op: Op | Function) -> Calls:
    """Replace each argument by every candidate, with valid values for the others."""
    valid = valid_arguments(op, random_generator(op))
    for name, value in valid.items():
        if isinstance(value, np.ndarray):
            wrong: Iterator[Any] = (mutate(value.copy()) for mutate in ARRAYS)
        else:
            wrong = iter(SCALARS)
        for each in wrong:
            yield {**copy.deepcopy(valid), name: each}, name


def calls_without(op: Op | Function) -> Calls:
    """Replace each array by None, alone and together with the previous one."""
    valid = valid_arguments(op, random_generator(op))
    arrays = [name for name, value in valid.items() if isinstance(value, np.ndarray)]
    for first, second in zip(arrays, arrays[-1:] + arrays[:-1], strict=True):
        for names in ([first], [first, second]):
            yield {**copy.deepcopy(valid), **dict.fromkeys(names)}, ", ".join(names)


def contents(value: Any) -> Any:
    """Return the contents of all arrays that a call could change."""
    if isinstance(value, np.ndarray):
        return (
            value.dtype.str,
            value.shape,
            value.tobytes() if value.dtype != object else str(value),
        )
    if isinstance(value, (list, tuple)):
        return [contents(each) for each in value]
    if hasattr(value, "__dict__"):
        return {key: contents(each) for key, each in vars(value).items()}
    return repr(value)


def show(arguments: dict[str, Any], names: str) -> str:
    described = {}
    for name in names.split(", "):
        value = arguments[name]
        array = isinstance(value, np.ndarray)
        described[name] = (
            f"{type(value).__name__} {value.dtype} {value.shape} {value.strides}"
            if array
            else repr(value)[:80]
        )
    return ", ".join(f"{name}={text}" for name, text in described.items())


def split(op: Op | Function, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that are passed by position, and those passed by name."""
    positional = [
        p.name
        for p in inspect.signature(op.function).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    options = {name: value for name, value in arguments.items() if name not in positional}
    return [arguments[name] for name in positional], options


def try_wrong_inputs(op: Op | Function, calls: Calls) -> None:
    """Fail if a call raises an error other than CukitError or MemoryError, or changes arguments
    that it may not change. A call that raises may change none."""
    failures = []
    for count, (arguments, names) in enumerate(calls, 1):  # noqa: B007
        before = {key: contents(value) for key, value in arguments.items()}
        args, options = split(op, arguments)
        failed = True
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                op.function(*args, **options)
            failed = False
        except (CukitError, MemoryError):
            pass
        except Exception as error:
            failures.append(f"{show(arguments, names)}: {type(error).__name__}: {str(error)[:200]}")
        allowed = op.writes | WRITTEN_ON_REQUEST
        if arguments.get("inplace") is True:
            allowed = set(arguments)
        after = {key: contents(value) for key, value in arguments.items()}
        changed = [key for key in arguments if before[key] != after[key]]
        illegal = changed if failed else [key for key in changed if key not in allowed]
        if illegal:
            failures.append(f"{show(arguments, names)}: changed {', '.join(illegal)}")
    assert not failures, f"{op.name}: {len(failures)} of {count}:\n" + "\n".join(failures[:40])


NEVER_VALID = ("no", "0.5", 1j, object())
WRONG_SCALARS: dict[type, tuple[Any, ...]] = {
    bool: (*NEVER_VALID, None, 1.5, 2),
    int: (*NEVER_VALID, 1.5, float("nan"), True),
    float: (*NEVER_VALID, None, float("nan"), True),
    str: ("zzz", 3, True),
    type(None): NEVER_VALID,
}
"""Replacements by the type of the valid value."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("op", KERNEL_OPS, ids=lambda op: op.name)
def test_options_of_a_wrong_type_are_rejected(op: Op) -> None:
    """Flags reject strings, numbers reject text."""
    args, kwargs = SAMPLES[op.name](np.random.default_rng(0))
    bound = inspect.signature(op.function).bind(*args, **kwargs)
    bound.apply_defaults()
    for name, value in list(bound.arguments.items()):
        annotation = str(bound.signature.parameters[name].annotation)
        for wrong in WRONG_SCALARS.get(type(value), ()):
            if wrong is None and "None" in annotation:
                continue
            bound.arguments[name] = wrong
            print(f"{name}={wrong!r}")
            with pytest.raises(CukitError):
                op.function(*bound.args, **bound.kwargs)
        bound.arguments[name] = value


WRITERS = [
    op
    for op in KERNEL_OPS
    if (out := inspect.signature(op.function).parameters.get("out")) is not None
    and out.default is None
    and op.name not in ("quantize", "rope", "rope_backward")  # ops with several outputs
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("op", KERNEL_OPS, ids=lambda op: op.name)
def test_unaligned_arrays_are_rejected(op: Op) -> None:
    """Misaligned arrays would fault on the GPU and end the process."""
    args, kwargs = SAMPLES[op.name](np.random.default_rng(0))
    bound = inspect.signature(op.function).bind(*args, **kwargs)
    for name, value in list(bound.arguments.items()):
        if isinstance(value, np.ndarray) and value.itemsize > 1:
            bound.arguments[name] = unaligned(value)
            with pytest.raises(ArrayLayoutError, match=r"must be aligned to"):
                op.function(*bound.args, **bound.kwargs)
            bound.arguments[name] = value


@pytest.mark.parametrize("op", WRITERS, ids=lambda op: op.name)
def test_a_read_only_output_is_rejected(op: Op) -> None:
    args, kwargs = SAMPLES[op.name](np.random.default_rng(0))
    result = op.function(*args, **kwargs)
    out = np.zeros_like(result[0] if isinstance(result, tuple) else result)
    out.flags.writeable = False
    with pytest.raises(ArrayLayoutError, match="read-only"):
        op.function(*args, **kwargs | {"out": out})
    assert not out.any()


PARTS = ("storage", "scales", "zero_points", "blocks", "row_scales")
COPIED = {("quantized_linear", "weight")}
"""QuantizedArrays that the op packs, into another array, before it writes the output."""


def rows_of_codes(dtype: cukit.NarrowDtype, *shape: int) -> QuantizedArray:
    """Values with a scale per row."""
    return cukit.quantize(np.ones(shape, np.float32), dtype, axis=-1)


def packed_linear(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    weight = cukit.pack_weight(rows_of_codes(cukit.int8, 16, 64))
    return (floats(rng, 8, 64).astype(np.float16), weight), {}


def packed_linear_of_codes(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    weight = cukit.quantize(floats(rng, 16, 64), cukit.int4, axis=-1, group_size=64)
    packed = cukit.pack_weight(weight, x_dtype=cukit.float8_e4m3)
    return (rows_of_codes(cukit.float8_e4m3, 8, 64), packed), {}


def product_of_codes(dtype: cukit.NarrowDtype) -> Sample:
    return lambda rng: ((rows_of_codes(dtype, 8, 64), rows_of_codes(dtype, 16, 64)), {})


OVERLAPPING = [
    *(pytest.param(op, SAMPLES[op.name], id=op.name) for op in WRITERS),
    *(
        pytest.param(get_op(name), sample, id=f"{name}-{kind}")
        for name, kind, sample in (
            ("matmul_int8", "scales", product_of_codes(cukit.int8)),
            ("matmul_fp8", "scales", product_of_codes(cukit.float8_e4m3)),
            ("quantized_linear", "packed", packed_linear),
            ("quantized_linear", "codes", packed_linear_of_codes),
        )
    ),
]


@pytest.mark.parametrize(("op", "sample"), OVERLAPPING)
def test_an_output_that_overlaps_an_input_is_rejected(op: Op, sample: Sample) -> None:
    args, kwargs = sample(np.random.default_rng(0))
    result = op.function(*args, **kwargs)
    model = result[0] if isinstance(result, tuple) else result
    bound = inspect.signature(op.function).bind(*args, **kwargs)
    shift = 16

    def is_rejected(name: str, array: Any, with_array: Callable[[Any], Any]) -> None:
        if not isinstance(array, np.ndarray) or array.nbytes <= shift:
            return
        memory = np.zeros(max(array.nbytes, model.nbytes) + shift, np.uint8)
        copied = np.ndarray(array.shape, array.dtype, memory)
        copied[...] = array
        value, bound.arguments[name] = bound.arguments[name], with_array(copied)
        bound.arguments["out"] = np.ndarray(model.shape, model.dtype, memory, shift)
        with pytest.raises(ArrayLayoutError, match="overlaps"):
            op.function(*bound.args, **bound.kwargs)
        bound.arguments[name] = value

    for name, value in list(bound.arguments.items()):
        is_rejected(name, value, lambda copied: copied)
        if isinstance(value, (QuantizedArray, PackedWeight)):
            if isinstance(value, QuantizedArray) and (op.name, name) in COPIED:
                continue
            for part in PARTS:

                def with_part(copied: Any, value: Any = value, part: str = part) -> Any:
                    changed = copy.copy(value)
                    vars(changed).pop("arrays", None)  # cached
                    object.__setattr__(changed, part, copied)
                    return changed

                is_rejected(name, getattr(value, part, None), with_part)


COMPARED_ELSEWHERE = {
    "flash_attention": {"q_descale", "k_descale", "v_descale"},  # only compared for float8 inputs
    "dequantize": {"array"},  # its storage, scales and zero points are compared
}


@pytest.mark.parametrize("op", WRITERS, ids=lambda op: op.name)
def test_an_output_is_compared_with_every_array(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with optional arrays that the sample does not pass."""
    compared: set[str] = set()

    def recorded(*args: Any, name: str = "out", itself: str = "", **inputs: Any) -> None:
        compared.update(inputs)

    for module in list(sys.modules.values()):
        if getattr(module, "check_overlap", None) is check_overlap:
            monkeypatch.setattr(module, "check_overlap", recorded)
    args, kwargs = SAMPLES[op.name](np.random.default_rng(0))
    result = op.function(*args, **kwargs)
    compared.clear()
    out = np.zeros_like(result[0] if isinstance(result, tuple) else result)
    op.function(*args, **kwargs | {"out": out})
    arrays = {
        parameter.name
        for parameter in inspect.signature(op.function).parameters.values()
        if "Array" in str(parameter.annotation) and parameter.name != "out"
    }
    assert arrays - COMPARED_ELSEWHERE.get(op.name, set()) <= compared


NO_ARRAYS = (None, "text", object(), {}, [[1], [1, 2]], np.array(["a"]), np.array([None]))
WRONG_SIZES = (None, "8", -1, 1.5, float("nan"), [], object())
CREATION: dict[str, tuple[dict[str, Any], ...]] = {
    **dict.fromkeys(
        ("zeros", "ones", "empty"),
        (
            *(
                {"shape": shape}
                for shape in (-1, (2, -1), 1.5, "3", None, (1,) * 65, 10**30, 10**16)
            ),
            *({"shape": 3, "dtype": dtype} for dtype in ("zzz", object, "S3", 3, "datetime64[s]")),
        ),
    ),
    "full": ({"shape": 3, "value": None}, {"shape": 3, "value": "1"}, {"shape": -1, "value": 0}),
    "arange": (
        {"start": 0, "stop": 1, "step": 0},
        {"start": float("nan")},
        {"start": 1e30},
        {"start": None},
        {"start": "3"},
    ),
    "linspace": (
        {"start": 0, "stop": 1, "num": -1},
        {"start": 0, "stop": 1, "num": 1.5},
        {"start": None, "stop": 1, "num": 3},
        {"start": 0, "stop": float("inf"), "num": 3},
    ),
    "asarray": (*({"obj": wrong} for wrong in NO_ARRAYS), {"obj": [1], "dtype": "zzz"}),
    **dict.fromkeys(
        ("to_numpy", "zeros_like", "ones_like", "empty_like"),
        tuple({"array": wrong} for wrong in NO_ARRAYS),
    ),
    "full_like": tuple({"array": wrong, "value": 0} for wrong in NO_ARRAYS),
    "get_kernel": ({"name": None}, {"name": 3}, {"name": []}, {"name": "rms_nrom"}),
    "MemoryPool": (
        *({"config": wrong} for wrong in (3, "8G", {}, cukit.MemoryPoolConfig)),
        *({"provider": wrong} for wrong in (3, "host", object(), HostProvider)),
    ),
    "MemoryPoolConfig": (
        *({name: wrong} for name in ("initial_pool_size", "block_size") for wrong in WRONG_SIZES),
        *({"max_pool_size": wrong} for wrong in ("8G", -1, 0, 1.5, float("inf"))),
        *({"growth_factor": wrong} for wrong in (None, "2", float("nan"), 0, float("inf"))),
        *({"enable_defrag": wrong} for wrong in (None, "no", 1)),
    ),
    "DeviceBuffer": ({"pool": 3, "size": 4, "holder": None},),
    "memory_pool_allocate": (
        *({"size": wrong} for wrong in (*WRONG_SIZES, 10**30)),
        *({"size": 8, "stream": wrong} for wrong in ("x", 1.5, object())),
    ),
    "memory_pool_free": tuple({"address": wrong} for wrong in (None, "x", -1, 3, [])),
    "load_quantized": tuple({"path": wrong} for wrong in (3, None, b"x", "", "a\0b", object())),
    "save_quantized": (
        *({"path": wrong, "arrays": {}} for wrong in (3, None, b"x", "", "a\0b")),
        *({"path": "never-written", "arrays": wrong} for wrong in (3, None, "x", [1])),
    ),
    "register_kernel": ({"name": 3, "function": print}, {"name": "x", "function": 3}),
}


@pytest.mark.parametrize(
    ("name", "arguments"), [(name, each) for name, calls in CREATION.items() for each in calls]
)
def test_creation_functions_reject_bad_arguments_by_name(
    name: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(CukitError):
        getattr(cukit, name)(**arguments)


@pytest.mark.parametrize("op", KERNEL_OPS, ids=lambda op: op.name)
def test_references_reject_or_work(op: Op) -> None:
    try_wrong_inputs(op, calls(op, 60))


@pytest.mark.parametrize(
    "op",
    [*KERNEL_OPS, *(Function(name, getattr(cukit, name)) for name in FUNCTIONS)],
    ids=lambda op: op.name,
)
def test_the_arguments_that_are_replaced_are_valid(op: Op | Function) -> None:
    """Otherwise every call would raise the same CukitError, whatever is replaced."""
    positional, options = split(op, valid_arguments(op, random_generator(op)))
    with a_device_for(op):
        op.function(*positional, **options)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_reject_or_work(name: str) -> None:
    function = Function(name, getattr(cukit, name))
    with a_device_for(function):
        try_wrong_inputs(function, calls(function, 60))


@pytest.mark.slow
@pytest.mark.parametrize("op", KERNEL_OPS, ids=lambda op: op.name)
def test_references_reject_or_work_with_every_argument(op: Op) -> None:
    try_wrong_inputs(op, all_calls(op))
    try_wrong_inputs(op, calls(op, 300))


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_reject_or_work_with_every_argument(name: str) -> None:
    function = Function(name, getattr(cukit, name))
    with a_device_for(function):
        try_wrong_inputs(function, all_calls(function))
        try_wrong_inputs(function, calls(function, 300))


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("op", KERNEL_OPS, ids=lambda op: op.name)
def test_kernels_reject_or_work(op: Op) -> None:
    with cukit.backend("emulator"):
        try_wrong_inputs(op, calls(op, 30))
        try_wrong_inputs(op, calls_without(op))
