"""Kernel parameter structs, passed by value: defined once in CUDA, packed by field name in Python.

A file `parameters.cuh` holds the structs of a kernel family. Python parses its definitions, so
there is no second definition to keep in sync, and every compilation asserts that the compiler's
layout equals Python's.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from cukit.core.source import include_closure, read_source
from cukit.errors import LaunchError

PARAMETER_FILE = "parameters.cuh"
_NAMESPACE = "cukit"

_SCALARS = {
    "int": np.int32,
    "unsigned": np.uint32,
    "long long": np.int64,
    "unsigned long long": np.uint64,
    "float": np.float32,
    "double": np.float64,
}
# NumPy's type characters, and those of `struct` in its standard, platform-independent sizes.
_CHARACTERS = {"i": "i", "I": "I", "l": "q", "q": "q", "L": "Q", "Q": "Q", "f": "f", "d": "d"}
_COMMENT = re.compile(r"//[^\n]*")
_STRUCT = re.compile(r"\bstruct\s+(\w+)\s*\{([^{}]*)\};")
_FIELDS = re.compile(r"([\w ]+?)\s+(\w+(?:\s*,\s*\w+)*)$")


class ParameterStruct:
    """One struct of a `parameters.cuh`."""

    __slots__ = ("_layout", "_names", "_nested", "_pick", "_places", "_raw", "dtype", "name")
    _places: dict[str, tuple[int, Callable[..., None], ParameterStruct | None]]

    def __init__(self, name: str, fields: Mapping[str, np.dtype[Any] | ParameterStruct]) -> None:
        """fields: dtypes or previously defined structs by name, in order of declaration."""
        self.name: str = name
        self._names = fields.keys()
        self._pick = _picker(*fields)
        self._nested = [
            (index, field)
            for index, field in enumerate(fields.values())
            if isinstance(field, ParameterStruct)
        ]
        types = [
            (key, field.dtype if isinstance(field, ParameterStruct) else field)
            for key, field in fields.items()
        ]
        self.dtype: np.dtype[Any] = np.dtype(types, align=True)
        self._raw = np.dtype((np.void, self.dtype.itemsize))
        self._layout = struct.Struct(_format(self.dtype))
        self._places = {}
        """By field name ("outer.inner" in a nested struct): offset, packing function, and the
        ParameterStruct of a field that is itself a struct, else None."""
        for key, field in fields.items():
            nested = field if isinstance(field, ParameterStruct) else None
            assert self.dtype.fields is not None
            kind, offset = self.dtype.fields[key][:2]
            layout = f"<{kind.itemsize}s" if nested else f"<{_CHARACTERS[kind.char]}"
            self._places[key] = offset, struct.Struct(layout).pack_into, nested
            for name, (inner, pack_into, within) in (nested._places if nested else {}).items():
                self._places[f"{key}.{name}"] = offset + inner, pack_into, within

    def pack(self, **values: Any) -> np.ndarray[Any, Any]:
        """The struct as a kernel argument: an array of one element of type void.

        values: each field by name: a number, or for a nested struct the result of its `pack` or a
        sequence of its fields. Raises LaunchError if a field is missing, unknown or out of range.
        """
        names = self._names
        try:
            fields = self._pick(values)
        except KeyError:
            fields = ()
        if len(values) != len(names) or not fields:
            missing = [name for name in names if name not in values]
            unknown = [name for name in values if name not in names]
            raise LaunchError(
                f"{self.name}: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}; "
                f"the fields are {', '.join(names)}"
            )
        # void: CuPy reads the array interface on every launch, which is slow with named fields.
        return np.frombuffer(self._bytes(fields), self._raw)

    def changed(self, packed: np.ndarray[Any, Any], **values: Any) -> np.ndarray[Any, Any]:
        """A copy of a packed struct with some fields replaced; faster than packing all fields."""
        data = bytearray(packed)
        self.write(data, values)
        return np.frombuffer(data, self._raw)

    def write(self, memory: Any, values: Mapping[str, Any]) -> None:
        """Sets fields of a packed struct in `memory`, a writable buffer.

        values: by name; a field of a nested struct is "outer.inner".
        """
        places = self._places
        try:
            for name, value in values.items():
                offset, pack_into, nested = places[name]
                pack_into(memory, offset, value if nested is None else nested._as_bytes(value))
        except KeyError:
            raise LaunchError(
                f"{self.name}: unknown {[name]}; the fields are {', '.join(self._places)}"
            ) from None
        except (struct.error, OverflowError) as error:  # OverflowError: float out of range
            raise LaunchError(f"{self.name}: {error}, got {name}={value!r}") from None

    def _bytes(self, values: Sequence[Any]) -> bytes:
        """The bytes of the struct with these field values, in order."""
        flat = list(values)
        for index, nested in self._nested:
            flat[index] = nested._as_bytes(flat[index])
        try:
            return self._layout.pack(*flat)
        except (struct.error, OverflowError) as error:  # OverflowError: float out of range
            raise LaunchError(
                f"{self.name}: {error}, got {dict(zip(self._names, flat, strict=True))}"
            ) from None

    def _as_bytes(self, value: Any) -> bytes:
        return value.tobytes() if type(value) is np.ndarray else self._bytes(value)

    def assertions(self) -> str:
        """A static_assert that fails if the compiler's layout differs from Python's."""
        full = f"{_NAMESPACE}::{self.name}"
        offsets = [
            f"CUKIT_OFFSET({full}, {name}) == {offset}"
            for name, (_, offset, *_) in (self.dtype.fields or {}).items()
        ]
        conditions = " && ".join((f"sizeof({full}) == {self.dtype.itemsize}", *offsets))
        return f'static_assert({conditions}, "{self.name}: laid out as in Python");\n'


def _picker(*names: str) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """A function that returns the values of `names`, as a tuple, from a mapping by name."""
    if len(names) == 1:  # itemgetter of one name returns no tuple
        return lambda values: (values[names[0]],)
    return itemgetter(*names)


def _format(dtype: np.dtype[Any]) -> str:
    """The format of a `struct.Struct` with the layout of `dtype`; nested structs are bytes."""
    parts, end = ["<"], 0
    for name in dtype.names or ():
        assert dtype.fields is not None
        field, offset = dtype.fields[name][:2]
        parts.append("x" * (offset - end))
        parts.append(f"{field.itemsize}s" if field.names else _CHARACTERS[field.char])
        end = offset + field.itemsize
    return "".join([*parts, "x" * (dtype.itemsize - end)])


@functools.cache
def parameter_structs(source: str) -> Mapping[str, ParameterStruct]:
    """The structs of a file below `kernels_cu/`, e.g. `"attention/parameters.cuh"`, and of the
    parameter files that it includes, by name.

    Fields are numbers (int, unsigned, long long, unsigned long long, float, double) or previously
    defined structs in namespace cukit. Raises LaunchError for any other type.
    """
    known: dict[str, ParameterStruct] = {}
    for file in _parameter_files(source):
        if file != source:
            known |= parameter_structs(file)
    for name, body in _STRUCT.findall(_COMMENT.sub("", read_source(source))):
        fields: dict[str, np.dtype[Any] | ParameterStruct] = {}
        for declaration in filter(None, map(str.strip, body.split(";"))):
            match = _FIELDS.match(" ".join(declaration.split()))
            kind = match[1] if match else ""
            if match is None or (kind not in _SCALARS and kind not in known):
                raise LaunchError(
                    f"{source}: field {declaration!r} of {name} is neither a number "
                    f"({', '.join(_SCALARS)}) nor a previously defined struct"
                )
            field = known[kind] if kind in known else np.dtype(_SCALARS[kind])
            fields |= {each.strip(): field for each in match[2].split(",")}
        known[name] = ParameterStruct(name, fields)
    return known


def layout_assertions(source: str) -> str:
    """C++ appended to `source` when it is compiled: layout assertions for its parameter structs."""
    structs = {
        k: v for file in _parameter_files(source) for k, v in parameter_structs(file).items()
    }
    return "".join(struct.assertions() for struct in structs.values())


def _parameter_files(source: str) -> list[str]:
    return [name for name in include_closure(source) if name.endswith(f"/{PARAMETER_FILE}")]
