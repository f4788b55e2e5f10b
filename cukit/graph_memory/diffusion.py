"""Diffusion over a sparse graph: personalised PageRank and the heat kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from cukit.core.arrays import (
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    Array,
    access_width,
    adopt,
    check_array,
    check_same_dtype,
    empty,
    float32,
    float64,
    int32,
    namespace,
    runs_kernel,
)
from cukit.core.compiler import MacroValue
from cukit.core.device import Device, current_device
from cukit.core.kernel import NULL, KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.core.scalars import check_choice, check_flag, check_integer, check_number
from cukit.errors import ArrayError, ArrayShapeError
from cukit.reference import graph_memory as reference
from cukit.reference.graph_memory import METHODS, Transition, step_weights
from cukit.registry import register

_PARAMETERS = parameter_structs("graph_memory/parameters.cuh")["DiffuseParameters"]
_THREADS = 256
_WARP = 32
_LANES = (8, 16, 32)
_L2_SHARE = 0.7
"""Share of L2 for the data that the steps on a slice of columns access."""
_MAX_STEPS = 1000


def graph_diffusion(
    memory: Array,
    transition: Transition,
    *,
    steps: int = 10,
    restart: float = 0.15,
    method: str = "pagerank",
    time: float = 1.0,
) -> Array:
    """Diffuses the rows of a memory over the graph that connects them.

    `"pagerank"`: personalised PageRank, `z <- (1 - restart) T z + restart memory`, starting from
    z = memory. `"heat"`: `exp(-time (I - T)) memory`, the series truncated after `T^steps` and its
    weights normalised to a sum of 1. Both are convex combinations of `T^s memory`: if the rows
    of T sum to 1, a constant memory is unchanged; if its columns do, the sum over the nodes is
    preserved.

    Args:
        memory: float32|float16|bfloat16 [num_nodes, dim], C-contiguous; float64 on the CPU only.
        transition: `Transition(row_offsets, columns, values)`: int32 [num_nodes + 1], int32
            [num_edges], float32 [num_edges] (float64 on the CPU only). The contents of offsets and
            columns are validated on the CPU only.
        steps: number of products with T, 0 to 1000.
        restart: 0 to 1, for `"pagerank"`.
        method: `"pagerank"` or `"heat"`.
        time: at least 0, for `"heat"`.

    Returns:
        The diffused memory, shape and dtype of `memory`; every step rounds to this dtype.

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument.
        ConfigError: an option out of range.

    All steps are applied to one slice of columns before the next slice, so that the gathered rows
    stay in L2. Runs on CuPy's current stream without synchronisation. Accumulates in float32 in the
    order of the edges: deterministic. Papers: Gasteiger et al., arXiv:1810.05997 (PageRank) and
    arXiv:1911.05485 (heat).

    >>> import numpy as np, cukit as ck
    >>> swap = ck.Transition(np.arange(3), np.array([1, 0]), np.ones(2))
    >>> swap = ck.Transition(*(a.astype(d) for a, d in zip(swap, ("i4", "i4", "f4"))))
    >>> ck.graph_diffusion(np.array([[1.0], [0.0]]), swap, steps=1, restart=0.25).ravel()
    array([0.25, 0.75])
    """
    op = "graph_diffusion"
    memory, transition = _adopt(op, memory, transition)
    options = _options(op, steps, restart, method, time)
    on_kernel = runs_kernel(op, memory, *transition)
    check_transition(op, memory, transition)
    if not on_kernel:
        return reference.graph_diffusion(memory, transition, **options)
    return _diffuse(op, memory, transition, step_weights(**options))


def graph_diffusion_backward(
    grad_out: Array,
    memory: Array,
    transition: Transition,
    *,
    transposed: Transition | None = None,
    steps: int = 10,
    restart: float = 0.15,
    method: str = "pagerank",
    time: float = 1.0,
    values: bool = True,
) -> tuple[Array, Array | None]:
    """Gradients of :func:`graph_diffusion` with respect to the memory and the transition's values.

    The diffusion is a polynomial in T, so the gradient of the memory is the same diffusion of
    `grad_out` with T transposed.

    Args:
        grad_out: shape and dtype of `memory`.
        memory, transition, steps, restart, method, time: as in the forward.
        transposed: :func:`transpose` of the transition, or the transition itself if it is
            symmetric; computed by default.
        values: compute the gradient of the values, which needs the states of all steps: a workspace
            of steps * num_nodes * dim elements.

    Returns:
        `(grad_memory, grad_values)`: shape and dtype of `memory`; [num_edges] in the dtype of the
        transition's values, or None unless `values`.

    Raises:
        ArrayError, ConfigError: as :func:`graph_diffusion`.
    """
    op = "graph_diffusion_backward"
    memory, transition = _adopt(op, memory, transition)
    if transposed is not None:
        _check_kind(op, "transposed", transposed)
        transposed = Transition(*adopt(op, *transposed))
    (grad_out,) = adopt(op, grad_out)
    check_flag(op, "values", values)
    options = _options(op, steps, restart, method, time)
    others = () if transposed is None else transposed
    on_kernel = runs_kernel(op, grad_out, memory, *transition, *others)
    check_transition(op, memory, transition)
    check_array(op, "grad_out", grad_out, dtypes=FLOAT_DTYPES, shape=memory.shape)
    check_same_dtype(op, memory=memory, grad_out=grad_out)
    if transposed is not None:
        check_transition(op, memory, transposed, "transposed")
    if not on_kernel:
        return reference.graph_diffusion_backward(
            grad_out, memory, transition, values=values, **options
        )
    backwards = reference.transpose(transition) if transposed is None else transposed
    weights = step_weights(**options)
    grad_memory = _diffuse(op, grad_out, backwards, weights)
    if not values:
        return grad_memory, None
    grad_values = empty(transition.values, transition.values.shape)
    if not weights or not memory.size:
        grad_values.fill(0)
        return grad_memory, grad_values
    states = [memory]
    for weight in weights[:-1]:
        states.append(_steps(op, states[-1], memory, transition, (weight,), True))
    grad = grad_out
    for number, (weight, state) in enumerate(zip(reversed(weights), reversed(states), strict=True)):
        gradient = _prepare_gradient(grad, state, transition.values, weight, number == 0)
        gradient(transition.row_offsets, transition.columns, grad, state, grad_values)
        if number + 1 < len(weights):
            grad = _steps(op, grad, grad, backwards, (weight,), False)
    return grad_memory, grad_values


def _diffuse(op: str, memory: Array, transition: Transition, weights: tuple[float, ...]) -> Array:
    if not weights or not memory.size:
        return memory.copy()
    return _steps(op, memory, memory, transition, weights, True)


def apply_transition(op: str, z: Array, transition: Transition, *, on_kernel: bool) -> Array:
    """`T z`, with each row summed in the order of its edges."""
    if not on_kernel:
        reference.check_edges(op, transition, len(z))
        return reference.apply_transition(transition, z)
    if not z.size:
        return z.copy()
    return _steps(op, z, z, transition, (1.0,), False)


def row_sums(op: str, transition: Transition, *, on_kernel: bool) -> Array:
    """Sums of the values of each row, in the order of its edges."""
    offsets, _, values = transition
    ones = namespace(values).ones((len(offsets) - 1, 1), values.dtype)
    return apply_transition(op, ones, transition, on_kernel=on_kernel)[:, 0]


def _steps(
    op: str,
    state: Array,
    memory: Array,
    transition: Transition,
    weights: tuple[float, ...],
    add_memory: bool,
) -> Array:
    """`state` after one step per element of `weights`.

    add_memory: whether a step with weight w adds `(1 - w) memory`.
    """
    launches = _prepare(op, state, memory, *transition, weights, add_memory)
    out = empty(state, state.shape)
    scratch = empty(state, state.shape) if len(weights) > 1 else out
    added = memory if add_memory else NULL
    for of_slice in launches:
        before = state
        for number, launch in enumerate(of_slice):
            after = out if (len(of_slice) - number) % 2 else scratch
            launch(*transition, before, added, after)
            before = after
    return out


@dataclass(frozen=True)
class DiffuseConfig:
    """The launch configuration of diffusion steps."""

    dtype: str
    vec: int
    lanes: int
    slices_per_launch: int

    @property
    def columns(self) -> int:
        """Columns per slice."""
        return self.lanes * self.vec

    def spec(self, add_memory: bool) -> KernelSpec:
        """The kernel of a step."""
        defines: tuple[tuple[str, MacroValue], ...] = (
            ("DTYPE", self.dtype),
            ("VEC", self.vec),
            ("LANES", self.lanes),
            ("ADD_MEMORY", add_memory),
            ("THREADS", _THREADS),
        )
        return KernelSpec("graph_memory/diffuse_step.cu", "diffuse_step", defines, _THREADS)


@cache
def plan_diffusion(
    num_nodes: int, num_edges: int, dim: int, dtype: str, itemsize: int, vec: int, device: Device
) -> DiffuseConfig:
    """Chooses the widest slices of columns whose two states, memory and edges fit in L2, because
    wider slices read the edges less often; the narrowest slices if none fit."""
    lanes = next((lanes for lanes in _LANES if lanes * vec >= dim), _LANES[-1])
    room = _L2_SHARE * device.l2_bytes - 8 * num_edges
    most = room / max(3 * num_nodes * itemsize, 1)  # columns
    total = -(-dim // (lanes * vec))
    if most >= dim:
        return DiffuseConfig(dtype, vec, lanes, total)
    fitting = [each for each in _LANES if each <= lanes and each * vec <= most]
    lanes = max(fitting, default=_LANES[0])
    return DiffuseConfig(dtype, vec, lanes, max(1, int(most) // (lanes * vec)))


@launch_plan
def _prepare(
    op: str,
    state: Array,
    memory: Array,
    offsets: Array,
    columns: Array,
    values: Array,
    weights: tuple[float, ...],
    add_memory: bool,
) -> list[list[Launch]]:
    """The launches of all steps, per slice of columns."""
    check_transition(op, memory, Transition(offsets, columns, values))
    check_array(op, "memory", memory, dtypes=KERNEL_DTYPES)
    check_array(op, "transition.values", values, dtypes=(float32,))
    num_nodes, dim = memory.shape
    vec = access_width(dim, state, memory)
    config = plan_diffusion(
        num_nodes, len(columns), dim, memory.dtype.name, memory.itemsize, vec, current_device()
    )
    kernel = load_kernel(config.spec(add_memory))
    blocks = -(-num_nodes // (_THREADS // config.lanes))
    width = config.columns * config.slices_per_launch
    launches: list[list[Launch]] = []
    for first in range(0, dim, width):
        grid = (blocks, min(config.slices_per_launch, -(-(dim - first) // config.columns)))
        of_slice: list[Launch] = []
        for weight in weights:
            scalars = _PARAMETERS.pack(
                num_rows=num_nodes, dim=dim, first=first,
                transition_weight=weight, memory_weight=1 - weight,
            )  # fmt: skip
            # Not the first launch: the kernel before it may write the transition.
            dependent = bool(launches or of_slice)
            of_slice.append(Launch(kernel, grid, (scalars,), dependent=dependent))
        launches.append(of_slice)
    return launches


@launch_plan
def _prepare_gradient(
    grad: Array, state: Array, values: Array, weight: float, first: bool
) -> Launch:
    num_nodes, dim = grad.shape
    spec = _gradient_spec(grad.dtype.name, access_width(dim, grad, state), first)
    scalars = _PARAMETERS.pack(
        num_rows=num_nodes, dim=dim, first=0, transition_weight=weight, memory_weight=0.0
    )
    return Launch(load_kernel(spec), (-(-num_nodes // (_THREADS // _WARP)),), (scalars,))


def _gradient_spec(dtype: str, vec: int, first: bool) -> KernelSpec:
    defines: tuple[tuple[str, MacroValue], ...] = (
        ("DTYPE", dtype),
        ("VEC", vec),
        ("FIRST", first),
        ("THREADS", _THREADS),
    )
    return KernelSpec("graph_memory/edge_gradient.cu", "edge_gradient", defines, _THREADS)


def _check_kind(op: str, name: str, value: Any) -> None:
    if not isinstance(value, Transition):
        raise ArrayError(f"{op}: {name} must be a Transition, got {type(value).__name__}")


def _adopt(op: str, memory: Any, transition: Any) -> tuple[Array, Transition]:
    _check_kind(op, "transition", transition)
    memory, *parts = adopt(op, memory, *transition)
    return memory, Transition(*parts)


def _options(op: str, steps: Any, restart: Any, method: Any, time: Any) -> dict[str, Any]:
    check_integer(op, "steps", steps, least=0, most=_MAX_STEPS)
    check_number(op, "restart", restart, least=0, most=1)
    check_choice(op, "method", method, METHODS)
    check_number(op, "time", time, least=0)
    return {
        "steps": int(steps),
        "restart": float(restart),
        "method": method,
        "time": float(time),
    }


def check_transition(
    op: str, memory: Array, transition: Transition, name: str = "transition"
) -> None:
    """Raises ArrayError unless memory and transition are valid and match."""
    check_array(op, "memory", memory, dtypes=FLOAT_DTYPES, ndim=2)
    offsets, columns, values = transition
    check_array(op, f"{name}.row_offsets", offsets, dtypes=(int32,), shape=(len(memory) + 1,))
    check_array(op, f"{name}.columns", columns, dtypes=(int32,), ndim=1)
    check_array(op, f"{name}.values", values, dtypes=(float32, float64), shape=columns.shape)
    if len(memory) == 0 and len(columns):
        raise ArrayShapeError(f"{op}: a memory without rows must have no edges, got {len(columns)}")


def _specs(device: Device) -> list[KernelSpec]:
    configs = [
        DiffuseConfig(dtype.name, vec, lanes, 1)
        for dtype, vec in zip(KERNEL_DTYPES, (4, 8, 8), strict=True)
        for lanes in _LANES
    ]
    return [config.spec(add_memory=True) for config in configs]


def _backward_specs(device: Device) -> list[KernelSpec]:
    specs = []
    for dtype, vec in zip(KERNEL_DTYPES, (4, 8, 8), strict=True):
        specs.append(DiffuseConfig(dtype.name, vec, 32, 1).spec(add_memory=False))
        specs += [_gradient_spec(dtype.name, vec, first) for first in (False, True)]
    return [*_specs(device), *specs]


register(
    name="graph_diffusion",
    family="graph_memory",
    function=graph_diffusion,
    reference=reference.graph_diffusion,
    specs=_specs,
)
register(
    name="graph_diffusion_backward",
    family="graph_memory",
    function=graph_diffusion_backward,
    reference=reference.graph_diffusion_backward,
    specs=_backward_specs,
)
