"""Defines torch operators, for autograd and torch.compile, from a table of schemas.

A schema names its arguments and results. A backward is connected to its forward by these names
alone:

    rms_norm(Tensor x, Tensor weight, float eps=1e-6) -> Tensor out
    rms_norm_backward(Tensor grad_out, Tensor x, Tensor weight, float eps=1e-6)
        -> (Tensor grad_x, Tensor grad_weight)

In the backward, an argument `grad_<result of the forward>` is that result's gradient, and any other
is the forward's argument or result of that name. A result `grad_<argument>` is the gradient of that
argument for autograd.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cukit.torch._arrays import as_array, as_tensor, on_current_stream

NAMESPACE = "cukit"
_DEVICES = ("CPU", "CUDA")
_GRAD = "grad_"

# A fragment, because a library can be defined only once per process. A reload can define a fragment
# again.
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


@dataclass(frozen=True)
class Operator:
    """A row of the table: one torch operator.

    schema: as in the module's docstring, without the namespace. Results have names.
    run: maps the schema's arguments, with tensors as arrays, to the results; called by keyword.
    shapes: the fake implementation for torch.compile: maps the arguments to empty results. Not
        needed if every result is the gradient of an argument.
    strided: arguments that `run` accepts with any strides and a contiguous last axis.
    backward: the operator that computes the gradients, or a function that returns them by argument
        name; it is called with the keywords in `needs`, named as in a backward schema. If a result
        has no gradient, `grad_<result>` is zeros, or None if the operator's argument is optional or
        the function's parameter has the default None.
    unless: maps the arguments to the names in `needs` that this call need not save; the backward
        gets None for them.
    constants: results without a gradient.
    shared: maps arguments to other arguments with the same gradient.
    """

    schema: str
    run: Callable[..., Any]
    shapes: Callable[..., Any] | None = None
    strided: tuple[str, ...] = ()
    backward: str | Callable[..., dict[str, Tensor | None]] | None = None
    needs: tuple[str, ...] = ()
    unless: Callable[[Mapping[str, Any]], tuple[str, ...]] | None = None
    constants: tuple[str, ...] = ()
    shared: Mapping[str, str] | None = None

    @property
    def name(self) -> str:
        """The operator's name."""
        return self.schema.partition("(")[0].strip()


def define(operators: Iterable[Operator]) -> None:
    """Defines the operators of a table: `torch.ops.cukit.<name>`."""
    rows = list(operators)
    for row in rows:
        _library.define(row.schema)
    for row in rows:
        overload = getattr(getattr(torch.ops, NAMESPACE), row.name).default
        schema = _Schema.of(overload._schema)
        implementation = _implementation(row, schema)
        for device in _DEVICES:
            _library.impl(row.name, implementation, device)
        torch.library.register_fake(f"{NAMESPACE}::{row.name}", _fake(row, schema), lib=_library)
        if row.backward is not None:
            setup, backward = _autograd(row, schema)
            torch.library.register_autograd(
                f"{NAMESPACE}::{row.name}", backward, setup_context=setup, lib=_library
            )


@dataclass(frozen=True)
class _Schema:
    """A parsed schema."""

    arguments: tuple[str, ...]
    defaults: Mapping[str, Any]
    tensors: tuple[str, ...]
    results: tuple[str, ...]

    @staticmethod
    def of(schema: Any) -> _Schema:
        arguments = schema.arguments
        return _Schema(
            tuple(each.name for each in arguments),
            {each.name: each.default_value for each in arguments if each.has_default_value()},
            tuple(each.name for each in arguments if "Tensor" in str(each.type)),
            tuple(each.name for each in schema.returns),
        )

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Every argument by name: the dispatcher omits arguments that equal their default."""
        return {**self.defaults, **dict(zip(self.arguments, args, strict=False)), **kwargs}


def _implementation(row: Operator, schema: _Schema) -> Callable[..., Any]:
    name, run, strided = row.name, row.run, frozenset(row.strided)
    single = len(schema.results) == 1

    def implementation(*args: Any, **kwargs: Any) -> Any:
        values = schema.named(args, kwargs)
        like = next(value for each in schema.tensors if (value := values[each]) is not None)
        with on_current_stream(like):
            for each in schema.tensors:
                if values[each] is not None:
                    values[each] = as_array(name, each, values[each], strided=each in strided)
            result = run(**values)
            if single:
                return as_tensor(result, like)
            return tuple([as_tensor(each, like) for each in result])

    return implementation


def _fake(row: Operator, schema: _Schema) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        values = schema.named(args, kwargs)
        if row.shapes is not None:
            return row.shapes(**values)
        gradients = tuple(_empty(values[each.removeprefix(_GRAD)]) for each in schema.results)
        return gradients[0] if len(gradients) == 1 else gradients

    return fake


def _empty(like: Tensor) -> Tensor:
    """An empty contiguous tensor with the shape, dtype and device of `like`."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _autograd(row: Operator, schema: _Schema) -> tuple[Callable[..., None], Callable[..., Any]]:
    """(setup_context, backward) for torch.library.register_autograd."""
    results = schema.results
    constants = frozenset(row.constants)
    shared = dict(row.shared or {})

    if isinstance(row.backward, str):
        overload = getattr(getattr(torch.ops, NAMESPACE), row.backward).default
        backward_schema = _Schema.of(overload._schema)

        def gradients(**values: Any) -> dict[str, Tensor | None]:
            out = overload(*[values[each] for each in backward_schema.arguments])
            out = (out,) if isinstance(out, Tensor) else out
            return {
                each.removeprefix(_GRAD): value
                for each, value in zip(backward_schema.results, out, strict=True)
            }

        needed = frozenset(backward_schema.arguments)
        optional = {
            each.name
            for each in overload._schema.arguments
            if str(each.type).startswith("Optional")
        }
    else:
        assert row.backward is not None
        gradients, needed = row.backward, frozenset(row.needs)
        parameters = inspect.signature(row.backward).parameters.values()
        optional = {each.name for each in parameters if each.default is None}
    saved_arguments = [each for each in schema.arguments if each in needed]
    saved_results = [each for each in results if each in needed]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        values = dict(zip(schema.arguments, inputs, strict=True))
        outputs = dict(zip(results, (output,) if len(results) == 1 else output, strict=True))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[outputs[each] for each in results if each in constants])
        tensors = {each: values[each] for each in saved_arguments if each in schema.tensors}
        tensors.update({each: outputs[each] for each in saved_results})
        for each in row.unless(values) if row.unless is not None else ():
            tensors[each] = None
        ctx.save_for_backward(*tensors.values())
        ctx.saved_names = tuple(tensors)
        ctx.options = {each: values[each] for each in saved_arguments if each not in schema.tensors}
        ctx.like = {
            each: (outputs[each].shape, outputs[each].dtype, outputs[each].device)
            for each in results
            if each not in constants
        }

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        values = dict(zip(ctx.saved_names, ctx.saved_tensors, strict=True)) | ctx.options
        for each, grad in zip(results, grads, strict=True):
            name = _GRAD + each
            if name not in needed:
                continue
            if grad is None and name not in optional:
                shape, dtype, device = ctx.like[each]
                grad = torch.zeros(shape, dtype=dtype, device=device)
            values[name] = grad
        found = gradients(**{each: values[each] for each in needed})
        for each, other in shared.items():
            found[each] = found[other]
        # The dispatcher omits trailing arguments that equal their defaults.
        return tuple(
            found.get(each) if is_needed else None
            for each, is_needed in zip(schema.arguments, ctx.needs_input_grad, strict=False)
        )

    return setup, backward


_SCHEMA_TYPES = {
    "Array": "Tensor",
    "Array | None": "Tensor?",
    "float": "float",
    "float | None": "float?",
    "int": "SymInt",
    "int | None": "SymInt?",
    "bool": "bool",
    "str": "str",
    "str | None": "str?",
}


def arguments_of(
    function: Callable[..., Any],
    *,
    drop: Iterable[str] = (),
    types: Mapping[str, str] | None = None,
) -> str:
    """The arguments of a function of arrays in schema syntax, with defaults.

    drop: arguments that the operator does not have. types: schema types of arguments whose
    annotation is not specific enough. New options of the function automatically become options of
    the operator.
    """
    dropped = frozenset(drop)
    parts = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in dropped:
            continue
        kind = (types or {}).get(name) or _SCHEMA_TYPES.get(str(parameter.annotation))
        if kind is None:
            raise TypeError(
                f"{function.__name__}: no schema type for {name}: {parameter.annotation}"
            )
        part = f"{kind} {name}"
        if parameter.default is not inspect.Parameter.empty:
            part += f"={_default(parameter.default)}"
        parts.append(part)
    return ", ".join(parts)


def names_of(arguments: str) -> tuple[str, ...]:
    """The names in a result of `arguments_of`."""
    return tuple(each.partition("=")[0].split()[-1] for each in arguments.split(", "))


def _default(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
