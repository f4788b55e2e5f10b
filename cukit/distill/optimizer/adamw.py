"""AdamW for many tensors per launch."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    Array,
    address_of,
    adopt_arrays,
    check_array,
    float32,
    float64,
    identify,
    namespace,
    runs_kernel,
)
from cukit.core.device import Device
from cukit.core.kernel import NULL, KernelSpec, load_kernel
from cukit.core.scalars import (
    adopt_scalars,
    arrays_among,
    check_integer,
    check_number,
    check_scalar,
)
from cukit.distill.optimizer._tensor_table import CHUNK, TableCache
from cukit.errors import ArrayShapeError, ConfigError
from cukit.reference import optimizer as reference
from cukit.registry import register

_THREADS = 256
_OP = "adamw"


@dataclass(frozen=True)
class AdamWState:
    """Master copy and moments of each parameter, float32 (float64 for float64 parameters).

    A float32 or float64 parameter is its own master: `master[i] is params[i]`.
    """

    master: list[Array]
    exp_avg: list[Array]
    exp_avg_sq: list[Array]

    @classmethod
    def for_params(cls, params: Sequence[Array]) -> AdamWState:
        """Master copies of `params`, and moments of zero."""
        wide = [float64 if param.dtype == float64 else float32 for param in params]
        return cls(
            [p.astype(dtype, copy=False) for p, dtype in zip(params, wide, strict=True)],
            [namespace(p).zeros(p.shape, dtype) for p, dtype in zip(params, wide, strict=True)],
            [namespace(p).zeros(p.shape, dtype) for p, dtype in zip(params, wide, strict=True)],
        )


def adamw(
    params: Sequence[Array],
    grads: Sequence[Array],
    state: AdamWState,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    step: int,
    grad_scale: Any = None,
) -> None:
    """One step of Adam with decoupled weight decay, in place; many tensors per launch.

    `m = beta1 m + (1 - beta1) g`, `v = beta2 v + (1 - beta2) g^2`,
    `w -= lr (m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + eps) + weight_decay w)`.

    Args:
        params: float32|float16|bfloat16 arrays [...], C-contiguous; float64 on the CPU only.
            Each is set to its updated master copy, rounded.
        grads: one per parameter, of the same shape; float32|float16|bfloat16.
        state: from :meth:`AdamWState.for_params` of the same parameters; updated in place.
        lr, beta1, beta2, eps, weight_decay: as in the equations.
        step: number of this step, from 1.
        grad_scale: factor on every gradient: a number or a float32 0-d array, such as the result of
            :func:`clip_scale`.

    Returns:
        Nothing.

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument.
        ConfigError: an option outside its range.

    There is one launch for each combination of dtypes. Its table of addresses on the GPU is cached
    for later calls with the same arrays. Runs on CuPy's current stream; deterministic.
    Paper: Loshchilov and Hutter, arXiv:1711.05101.

    >>> import numpy as np
    >>> weight, grad = np.ones(3, np.float32), np.full(3, 0.5, np.float32)
    >>> adamw([weight], [grad], AdamWState.for_params([weight]), lr=0.1, step=1)
    >>> weight.round(3)
    array([0.9, 0.9, 0.9], dtype=float32)
    """
    (grad_scale,) = adopt_scalars(_OP, grad_scale)
    _check_options(lr, beta1, beta2, eps, weight_decay, step, grad_scale)
    if not isinstance(state, AdamWState):
        raise ConfigError(f"{_OP}: state must be an AdamWState, got {type(state).__name__}")
    params = adopt_arrays(_OP, "params", params)
    grads = adopt_arrays(_OP, "grads", grads)
    state = AdamWState(
        *(
            adopt_arrays(_OP, f"state.{name}", getattr(state, name))
            for name in ("master", "exp_avg", "exp_avg_sq")
        )
    )
    lists = (params, grads, state.master, state.exp_avg, state.exp_avg_sq)
    if len({len(arrays) for arrays in lists}) != 1:
        raise ArrayShapeError(
            f"{_OP}: params, grads and state must have the same length, got "
            f"{[len(column) for column in lists]}"
        )
    arrays = [array for column in lists for array in column]
    if not runs_kernel(_OP, *arrays, *arrays_among(grad_scale)):
        _check_arrays(lists)
        reference.adamw(
            params,
            grads,
            state,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            step=step,
            grad_scale=grad_scale,
        )
        return
    on_gpu = grad_scale is not None and not isinstance(grad_scale, numbers.Real)
    scalars = (
        beta1,
        beta2,
        eps,
        1.0 - lr * weight_decay,
        lr / (1.0 - beta1**step),
        1.0 / math.sqrt(1.0 - beta2**step),
        1.0 if on_gpu or grad_scale is None else grad_scale,
    )
    for spec, table in _TABLES.tables(identify(*arrays), partial(_grouped, lists)):
        load_kernel(spec)(
            (table.num_blocks,),
            (
                table.tensors,
                table.tensor_of_block,
                grad_scale if on_gpu else NULL,
                *map(np.float32, scalars),
            ),
            reachable=arrays,
        )


_Lists = tuple[Sequence[Array], ...]
_TABLES = TableCache()


def _grouped(lists: _Lists) -> dict[KernelSpec, list[tuple[Array, ...]]]:
    """The arrays of each parameter by kernel variant, checked."""
    _check_arrays(lists, KERNEL_DTYPES)
    groups: dict[KernelSpec, list[tuple[Array, ...]]] = {}
    for row in zip(*lists, strict=True):
        param, grad, master, *_ = row
        if param.size:
            own = address_of(param) == address_of(master)
            spec = plan_adamw(param.dtype.name, grad.dtype.name, has_master=not own)
            groups.setdefault(spec, []).append(row)
    return groups


@cache
def plan_adamw(dtype: str, grad_dtype: str, *, has_master: bool) -> KernelSpec:
    """The variant for parameters of `dtype` and gradients of `grad_dtype`."""
    defines = (
        ("DTYPE", dtype),
        ("GRAD", grad_dtype),
        ("MASTER", has_master),
        ("THREADS", _THREADS),
        ("CHUNK", CHUNK),
    )
    return KernelSpec("distill/adamw.cu", "adamw", defines, _THREADS)


def _check_options(
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: Any,
) -> None:
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        check_number(_OP, name, value, least=0, most=1)
        if value == 1:
            raise ConfigError(f"{_OP}: {name} must be below 1, got {value}")
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        check_number(_OP, name, value, least=0)
    check_integer(_OP, "step", step, least=1, most=1 << 53)
    if grad_scale is not None:
        check_scalar(_OP, "grad_scale", grad_scale)


def _check_arrays(lists: _Lists, dtypes: Sequence[np.dtype[Any]] = FLOAT_DTYPES) -> None:
    for index, (param, grad, *states) in enumerate(zip(*lists, strict=True)):
        check_array(_OP, f"params[{index}]", param, dtypes=dtypes)
        check_array(_OP, f"grads[{index}]", grad, dtypes=dtypes, shape=param.shape)
        wide = float64 if param.dtype == float64 else float32
        for name, array in zip(("master", "exp_avg", "exp_avg_sq"), states, strict=True):
            check_array(_OP, f"state.{name}[{index}]", array, dtypes=(wide,), shape=param.shape)


def _specs(device: Device) -> list[KernelSpec]:
    return [
        plan_adamw(param.name, grad.name, has_master=param != float32)
        for param in KERNEL_DTYPES
        for grad in dict.fromkeys((param, float32))
    ]


register(
    name="adamw",
    family="distill",
    function=adamw,
    reference=reference.adamw,
    specs=_specs,
    writes=("params", "state"),
)
