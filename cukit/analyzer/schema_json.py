"""Converts dataclasses to JSON and back, and derives the JSON Schema of the format.

Both follow from the type hints of `cukit.analyzer.schema`, so fields are listed only there.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from cukit.analyzer.schema import SCHEMA_VERSION, AnalysisReport
from cukit.errors import DataError

T = TypeVar("T")

_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean"}


def to_json(report: AnalysisReport) -> str:
    """One JSON document; numbers are exact, NaN and infinity raise ValueError."""
    return json.dumps(dataclasses.asdict(report), indent=1, allow_nan=False) + "\n"


def from_json(text: str) -> AnalysisReport:
    """Reads what :func:`to_json` wrote. Raises DataError for other content or another version."""
    try:
        document = json.loads(text)
        version = document["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"this is not an analysis file: {error!r}") from None
    if version != SCHEMA_VERSION:
        raise DataError(f"analysis schema {version}; this cukit reads {SCHEMA_VERSION}")
    try:
        return build(AnalysisReport, document)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"this analysis file is damaged: {error!r}") from None


def build(kind: type[T], document: Mapping[str, Any]) -> T:
    """Builds a dataclass from a mapping of its fields; unknown fields are ignored."""
    hints = typing.get_type_hints(kind)
    values = {
        field.name: _value(hints[field.name], document[field.name])
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.name in document or _required(field)
    }
    return kind(**values)


def json_schema(kind: type[Any] = AnalysisReport) -> dict[str, Any]:
    """The JSON Schema (2020-12) of `kind`, with every nested dataclass under `$defs`."""
    definitions: dict[str, Any] = {}
    root = _schema(kind, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"cukit analysis, version {SCHEMA_VERSION}",
        **root,
        "$defs": definitions,
    }


def _required(field: dataclasses.Field[Any]) -> bool:
    unset = dataclasses.MISSING
    return field.default is unset and field.default_factory is unset


def _value(hint: Any, value: Any) -> Any:
    """`value`, from JSON, converted to the type `hint`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (hint,) = (argument for argument in arguments if argument is not type(None))
        return _value(hint, value)
    if origin is tuple:
        each = arguments if arguments[-1] is not ... else (arguments[0],) * len(value)
        return tuple(_value(item, part) for item, part in zip(each, value, strict=True))
    if origin is Mapping:
        return {key: _value(arguments[1], part) for key, part in value.items()}
    if dataclasses.is_dataclass(hint):
        return build(typing.cast("type[Any]", hint), value)
    accepted = (int, float) if hint is float else hint
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise TypeError(f"expected {hint.__name__}, got {value!r}")
    return value


def _schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None):
        return {"type": "null"}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_schema(argument, definitions) for argument in arguments]}
    if origin is tuple and arguments[-1] is ...:
        return {"type": "array", "items": _schema(arguments[0], definitions)}
    if origin is tuple:
        items = [_schema(argument, definitions) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _schema(arguments[1], definitions)}
    if dataclasses.is_dataclass(hint):
        return _dataclass_schema(typing.cast("type[Any]", hint), definitions)
    return {"type": _SCALARS[hint]}


def _dataclass_schema(kind: type[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}  # reserves its place before those of the fields' types
        hints = typing.get_type_hints(kind)
        fields = dataclasses.fields(kind)
        definitions[kind.__name__] = {
            "type": "object",
            "properties": {f.name: _schema(hints[f.name], definitions) for f in fields},
            "required": [f.name for f in fields if _required(f)],
        }
    return {"$ref": f"#/$defs/{kind.__name__}"}
