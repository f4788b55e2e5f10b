"""`cupy.ElementwiseKernel` and `cupy.ReductionKernel`: kernels generated from expressions.

The code around the expressions is cukit's, not CuPy's. It provides the names that CuPy documents
(`i`, `_ind.size()`, `raw` arguments, type placeholders, `loop_prep`, ...).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cukit.emulator.cupy_stand_in.array import ndarray, owner_of, wrapped
from cukit.emulator.cupy_stand_in.devices import current_settings
from cukit.emulator.cupy_stand_in.raw import compiled_by
from cukit.emulator.program import Program, Source
from cukit.emulator.settings import Settings

_MAX_AXES = 16
_THREADS = 128
_MAX_BLOCKS = 1024
_C_TYPES = {
    "bool": "bool", "int8": "signed char", "uint8": "unsigned char", "int16": "short",
    "uint16": "unsigned short", "int32": "int", "uint32": "unsigned", "int64": "long long",
    "uint64": "unsigned long long", "float16": "__half", "float32": "float", "float64": "double",
    "complex64": "complex<float>", "complex128": "complex<double>",
}  # fmt: skip

_HEADER = f"""
#include <cupy/complex.cuh>
template <typename T>
struct CArray {{
  T* data_;
  long long size_;
  long long ndim_;
  long long shape_[{_MAX_AXES}], strides_[{_MAX_AXES}];
  __device__ ptrdiff_t size() const {{ return size_; }}
  __device__ const long long* shape() const {{ return shape_; }}
  __device__ const long long* strides() const {{ return strides_; }}
  __device__ int ndim() const {{ return (int)ndim_; }}
  __device__ T* data() const {{ return data_; }}
  template <typename I>
  __device__ T& operator[](I at) const {{
    if constexpr (::std::is_integral_v<I> || ::std::is_enum_v<I>) {{
      long long left = at, offset = 0;
      for (int axis = (int)ndim_ - 1; axis > 0; --axis) {{
        offset += left % shape_[axis] * strides_[axis];
        left /= shape_[axis];
      }}
      if (ndim_ > 0) offset += left * strides_[0];
      return *(T*)((char*)data_ + offset);
    }} else {{
      return (*this)[(long long)at];
    }}
  }}
  template <typename I, size_t N>
  __device__ T& operator[](const I (&index)[N]) const {{
    long long offset = 0;
    for (size_t axis = 0; axis < N; ++axis) offset += index[axis] * strides_[axis];
    return *(T*)((char*)data_ + offset);
  }}
}};
struct CIndexer {{
  long long size_, at_;
  __device__ ptrdiff_t size() const {{ return size_; }}
  __device__ ptrdiff_t get() const {{ return at_; }}
}};
"""


@dataclass(frozen=True)
class _Parameter:
    """type: the name of a dtype, or a placeholder."""

    type: str
    name: str
    raw: bool

    @property
    def placeholder(self) -> bool:
        return re.fullmatch(r"[A-Z]\w*", self.type) is not None


@functools.cache
def _parameters(text: str) -> tuple[_Parameter, ...]:
    found = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        words = [word for word in part.split() if word not in ("const", "_non_const")]
        raw = words[0] == "raw"
        words = words[raw:]
        if len(words) < 2 or part == "...":
            raise NotImplementedError(f"the parameter {part!r} is not emulated")
        found.append(_Parameter(" ".join(words[:-1]), words[-1], raw))
    return tuple(found)


class _Generated:
    """The common part of both kinds of kernels: types, arguments and launches."""

    def __init__(self, in_params: str, out_params: str, name: str, options: Sequence[str]) -> None:
        self.in_params = _parameters(in_params)
        self.out_params = _parameters(out_params)
        self.nin, self.nout = len(self.in_params), len(self.out_params)
        self.nargs = self.nin + self.nout
        self.name = name
        self.entry = f"{name}_kernel"  # `name` may be a function of the C library
        self.options = tuple(options)

    def _bind(
        self, ins: Sequence[Any], outs: Sequence[Any]
    ) -> tuple[list[np.ndarray[Any, Any]], dict[str, np.dtype[Any]]]:
        """The inputs, as arrays of their parameters' types, and the types of the placeholders."""
        types: dict[str, np.dtype[Any]] = {}
        pairs = [*zip(self.in_params, ins, strict=True), *zip(self.out_params, outs, strict=False)]
        for parameter, value in pairs:
            if isinstance(value, np.ndarray):
                if not isinstance(value, ndarray):
                    raise TypeError(
                        f"{self.name}: {parameter.name} is a NumPy array, which a GPU cannot "
                        "access: pass cupy.asarray(...)"
                    )
                self._agree(types, parameter, value.dtype)
        for parameter, value in zip(self.in_params, ins, strict=True):
            if parameter.placeholder and parameter.type not in types:
                types[parameter.type] = np.asarray(value).dtype
        arrays = [
            value if isinstance(value, np.ndarray) else np.asarray(value, _dtype(p, types))
            for p, value in zip(self.in_params, ins, strict=True)
        ]
        return arrays, types

    def _agree(
        self, types: dict[str, np.dtype[Any]], parameter: _Parameter, dtype: np.dtype[Any]
    ) -> None:
        expected = types.setdefault(parameter.type, dtype) if parameter.placeholder else (
            _dtype(parameter, types)
        )  # fmt: skip
        if expected != dtype:
            raise TypeError(
                f"{self.name}: type is mismatched: {parameter.name} is {dtype}, expected {expected}"
            )

    def _declared(self, types: Mapping[str, np.dtype[Any]]) -> str:
        """Typedefs of the placeholders."""
        return "".join(f"typedef {_c_type(dtype)} {name};\n" for name, dtype in types.items())

    def _arguments(self, types: Mapping[str, np.dtype[Any]]) -> list[str]:
        ins = [f"CArray<const {_c_type(_dtype(p, types))}> _{p.name}_" for p in self.in_params]
        outs = [f"CArray<{_c_type(_dtype(p, types))}> _{p.name}_" for p in self.out_params]
        return ins + outs

    def _launch(
        self,
        code: str,
        arrays: Sequence[np.ndarray[Any, Any]],
        grid: int,
        numbers: Sequence[int],
        threads: int = _THREADS,
    ) -> None:
        settings = current_settings()
        program = _program(code, self.name, self.options, compiled_by(settings))
        kernel = program.kernel(self.entry, (threads,))
        arguments = [*map(_array_argument, arrays), *map(np.int64, numbers)]
        reachable = [*(owner_of(array) for array in arrays), *program.variables()]
        kernel.launch((grid, 1, 1), tuple(arguments), settings, reachable)

    def _outputs(
        self, given: Sequence[Any], shape: tuple[int, ...], types: Mapping[str, np.dtype[Any]]
    ) -> list[Any]:
        if given:
            return list(given)
        return [ndarray(shape, _dtype(p, types)) for p in self.out_params]


class ElementwiseKernel(_Generated):
    """One operation on every element of broadcast arrays."""

    def __init__(
        self,
        in_params: str,
        out_params: str,
        operation: str,
        name: str = "kernel",
        reduce_dims: bool = True,
        preamble: str = "",
        no_return: bool = False,
        return_tuple: bool = False,
        *,
        options: Sequence[str] = (),
        loop_prep: str = "",
        after_loop: str = "",
        **_: Any,
    ) -> None:
        super().__init__(in_params, out_params, name, options)
        self.operation = operation
        self.preamble = preamble
        self.no_return = no_return
        self.return_tuple = return_tuple
        self.loop_prep = loop_prep
        self.after_loop = after_loop

    def __call__(
        self, *args: Any, size: int | None = None, block_size: int = _THREADS, stream: Any = None
    ) -> Any:
        if len(args) not in (self.nin, self.nargs):
            raise TypeError(
                f"{self.name} takes {self.nin} or {self.nargs} arguments, got {len(args)}"
            )
        given = args[self.nin :]
        ins, types = self._bind(args[: self.nin], given)
        if block_size < 1:
            raise ValueError(f"{self.name}: block_size must be at least 1, got {block_size}")
        parameters = (*self.in_params, *self.out_params)
        elements = [
            value.shape
            for parameter, value in zip(parameters, args, strict=False)
            if isinstance(value, np.ndarray) and not parameter.raw
        ]
        if size is not None:
            if elements:
                raise ValueError("Specified 'size' can be used only if all arrays are raw")
            shape: tuple[int, ...] = (size,)
        elif not elements:
            raise ValueError("Loop size is undecided: all arrays are raw, pass size")
        else:
            shape = np.broadcast_shapes(*elements)
        outs = self._outputs(given, shape, types)
        spread = [
            array if parameter.raw else np.broadcast_to(array, shape, subok=False)
            for parameter, array in zip(self.in_params, ins, strict=True)
        ]
        count = math.prod(shape)
        if count:
            blocks = min(-(-count // block_size), _MAX_BLOCKS)
            self._launch(self._code(types), [*spread, *outs], blocks, [count], block_size)
        if self.no_return:
            return None
        results = [wrapped(out) for out in outs]
        return tuple(results) if self.return_tuple or len(results) != 1 else results[0]

    def _code(self, types: Mapping[str, np.dtype[Any]]) -> str:
        arguments = ", ".join([*self._arguments(types), "long long _size_"])
        prepare, elements = "", ""
        for parameter in (*self.in_params, *self.out_params):
            kind = _c_type(_dtype(parameter, types))
            const = "const " if parameter in self.in_params else ""
            name = parameter.name
            if parameter.raw:
                prepare += f"  const CArray<{const}{kind}>& {name} = _{name}_;\n"
            else:
                reference = "" if const else "&"
                elements += f"    {const}{kind} {reference}{name} = _{name}_[i];\n"
        return f"""{_HEADER}{self._declared(types)}{self.preamble}
extern "C" __global__ void {self.entry}({arguments}) {{
  CIndexer _ind{{_size_, 0}};
{prepare}  {self.loop_prep};
  for (ptrdiff_t i = (ptrdiff_t)blockIdx.x * blockDim.x + threadIdx.x; i < _size_;
       i += (ptrdiff_t)blockDim.x * gridDim.x) {{
    _ind.at_ = i;
{elements}
#line 1 "{self.name}, operation"
{self.operation};
  }}
  {self.after_loop};
}}
"""


class ReductionKernel(_Generated):
    """A map, a reduction along axes, and a map of each result. One block computes each result."""

    def __init__(
        self,
        in_params: str,
        out_params: str,
        map_expr: str,
        reduce_expr: str,
        post_map_expr: str,
        identity: Any,
        name: str = "reduce_kernel",
        reduce_type: str | None = None,
        reduce_dims: bool = True,
        preamble: str = "",
        options: Sequence[str] = (),
    ) -> None:
        super().__init__(in_params, out_params, name, options)
        self.map_expr = map_expr
        self.reduce_expr = reduce_expr
        self.post_map_expr = post_map_expr
        self.identity = identity
        self.reduce_type = reduce_type
        self.preamble = preamble

    def __call__(
        self,
        *args: Any,
        out: Any = None,
        axis: Any = None,
        keepdims: bool = False,
        stream: Any = None,
    ) -> Any:
        if len(args) not in (self.nin, self.nargs):
            raise TypeError(
                f"{self.name} takes {self.nin} or {self.nargs} arguments, got {len(args)}"
            )
        given = args[self.nin :] or (() if out is None else (out,))
        ins, types = self._bind(args[: self.nin], given)
        elements = [a for p, a in zip(self.in_params, ins, strict=True) if not p.raw]
        shape = np.broadcast_shapes(*(array.shape for array in elements))
        axes = range(len(shape)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
        reduced = {each % len(shape) for each in axes} if shape else set()
        kept = [each for each in range(len(shape)) if each not in reduced]
        order = [*kept, *sorted(reduced)]
        out_shape = tuple(shape[each] for each in kept)
        shown = tuple(1 if each in reduced else shape[each] for each in range(len(shape)))
        outs = self._outputs(given, out_shape, types)
        spread = [
            array if parameter.raw else np.broadcast_to(array, shape, subok=False).transpose(order)
            for parameter, array in zip(self.in_params, ins, strict=True)
        ]
        results, count = math.prod(out_shape), math.prod(shape)
        if results:
            flat = [np.asarray(each).reshape(out_shape) for each in outs]
            blocks = min(results, _MAX_BLOCKS)
            self._launch(
                self._code(types), [*spread, *flat], blocks, [results, count // results, count]
            )
        made = [wrapped(each.reshape(shown) if keepdims else each) for each in outs]
        return made[0] if len(made) == 1 else tuple(made)

    def _code(self, types: Mapping[str, np.dtype[Any]]) -> str:
        arguments = [
            *self._arguments(types),
            "long long _results",
            "long long _each",
            "long long _all",
        ]
        reduce_type = self.reduce_type or _c_type(_dtype(self.out_params[0], types))
        if reduce_type in _C_TYPES:
            reduce_type = _C_TYPES[reduce_type]
        identity = "0" if self.identity in ("", None) else self.identity
        raws, elements, results = "", "", ""
        for parameter in self.in_params:
            kind, name = _c_type(_dtype(parameter, types)), parameter.name
            if parameter.raw:
                raws += f"  const CArray<const {kind}>& {name} = _{name}_;\n"
            else:
                elements += f"      const {kind} {name} = _{name}_[i];\n"
        for parameter in self.out_params:
            kind, name = _c_type(_dtype(parameter, types)), parameter.name
            if parameter.raw:
                raws += f"  const CArray<{kind}>& {name} = _{name}_;\n"
            else:
                results += f"      {kind}& {name} = _{name}_[_out];\n"
        # As in CuPy, the expressions may use `a` and `b`, `_in_ind` and `_out_ind`, `_J` and `_j`.
        return f"""{_HEADER}{self._declared(types)}{self.preamble}
typedef {reduce_type} _type_reduce;
extern "C" __global__ void {self.entry}({", ".join(arguments)}) {{
  __shared__ {reduce_type} _sdata[{_THREADS}];
  __shared__ bool _has[{_THREADS}];
  const auto _REDUCE = [=](const _type_reduce& a, const _type_reduce& b) -> _type_reduce {{
    return {self.reduce_expr};
  }};
  CIndexer _in_ind{{_all, 0}}, _out_ind{{_results, 0}};
{raws}
  for (ptrdiff_t _out = blockIdx.x; _out < _results; _out += gridDim.x) {{
    _out_ind.at_ = _out;
    _type_reduce _s = _type_reduce({identity});
    bool _any = {"false" if self.identity in ("", None) else "true"};
    for (ptrdiff_t _j = threadIdx.x; _j < _each; _j += {_THREADS}) {{
      const ptrdiff_t i = _out * _each + _j, _J = _j;
      _in_ind.at_ = i;
{elements}
      const _type_reduce _a = static_cast<_type_reduce>({self.map_expr});
      _s = _any ? _REDUCE(_s, _a) : _a;
      _any = true;
    }}
    _sdata[threadIdx.x] = _s;
    _has[threadIdx.x] = _any;
    __syncthreads();
    for (int _half = {_THREADS // 2}; _half > 0; _half /= 2) {{
      if (threadIdx.x < _half && _has[threadIdx.x + _half]) {{
        const _type_reduce _other = _sdata[threadIdx.x + _half];
        _sdata[threadIdx.x] = _has[threadIdx.x] ? _REDUCE(_sdata[threadIdx.x], _other) : _other;
        _has[threadIdx.x] = true;
      }}
      __syncthreads();
    }}
    if (threadIdx.x == 0) {{
      const _type_reduce a = _sdata[0];
{results}
#line 1 "{self.name}, post_map_expr"
      {self.post_map_expr};
    }}
    __syncthreads();
  }}
}}
"""


def _dtype(parameter: _Parameter, types: Mapping[str, np.dtype[Any]]) -> np.dtype[Any]:
    if parameter.placeholder:
        if parameter.type not in types:
            raise TypeError(
                f"the type {parameter.type} of {parameter.name} cannot be determined: pass an array"
            )
        return types[parameter.type]
    return np.dtype(parameter.type)


def _c_type(dtype: np.dtype[Any]) -> str:
    try:
        return _C_TYPES[dtype.name]
    except KeyError:
        raise TypeError(f"{dtype} has no CUDA type") from None


def _array_argument(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A CArray: address, size, number of axes, shape, and strides in bytes."""
    if array.ndim > _MAX_AXES:
        raise ValueError(f"at most {_MAX_AXES} axes, got {array.ndim}")
    numbers = [array.ctypes.data, array.size, array.ndim]
    for extents in (array.shape, array.strides):
        numbers += itertools.islice(itertools.chain(extents, itertools.repeat(0)), _MAX_AXES)
    packed = np.array(numbers, np.int64)
    return packed.view(np.dtype((np.void, packed.nbytes)))


@functools.cache
def _program(code: str, name: str, options: tuple[str, ...], settings: Settings) -> Program:
    defines = (("__CUDACC_RTC__", "1"),)
    source = Source(code, f"{name}.cu", None, (), defines)
    return Program(source.with_options(options), settings)
