"""Checks shared by all ops: agreement with the reference on every device, and gradients.

The same test body runs on the CPU, where the op runs its reference in low precision, and in the
emulator and on the GPU, where it runs its kernel. The oracle is always the reference in float64 on
NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ml_dtypes
import numpy as np

import cukit
from cukit.core import backend
from cukit.core.arrays import address_of, namespace
from tests.tolerances import ATOL, FACTOR, FINITE_DIFFERENCE

Array = Any
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = ("float32", "float16", "bfloat16")


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a name: `"bfloat16"` or a name of NumPy's."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def random(rng: np.random.Generator, shape: Sequence[int], dtype: str, scale: float = 1.0) -> Array:
    """Return normally distributed values of `dtype`, as a NumPy array."""
    return (rng.standard_normal(tuple(shape)) * scale).astype(dtype_of(dtype))


def array_module(device: str) -> Any:
    """Return CuPy for "gpu", otherwise NumPy."""
    if device != "gpu":
        return np
    import cupy

    return cupy


def to_device(device: str, *arrays: Array | None) -> tuple[Any, ...]:
    """Return NumPy arrays unchanged, or copied to the GPU for "gpu"; None stays None."""
    if device != "gpu":
        return arrays
    import cupy

    return tuple(None if array is None else cupy.asarray(array) for array in arrays)


def to_host(array: Array) -> np.ndarray[Any, Any]:
    """Return the contents of any array as a NumPy array."""
    return np.asarray(array.get() if hasattr(array, "get") else array)


def offset_by(array: Array, offset: int) -> Array:
    """Return a contiguous copy, on the same device, `offset` bytes after a multiple of 16."""
    memory = namespace(array).zeros(array.nbytes + 32, np.uint8)
    first = -address_of(memory) % 16 + offset
    copy = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def poisoned(device: str, shape: Sequence[int], dtype: str) -> Array:
    """Return an output buffer filled with NaN, so that unwritten elements are detected."""
    return to_device(device, np.full(tuple(shape), np.nan, dtype_of(dtype)))[0]


def poison_pool(device: str, num_bytes: int = 1 << 26) -> None:
    """Fill the memory that the next GPU allocations will reuse with NaN."""
    if device == "gpu":
        import cupy

        blocks = [cupy.full(num_bytes >> shift, 0xFF, cupy.uint8) for shift in range(0, 16, 2)]
        cupy.cuda.get_current_stream().synchronize()
        del blocks


def another_order(device: str, repeat: int) -> AbstractContextManager[None]:
    """Vary the emulator's schedule: from the first repeat on, threads run in another order, and
    asynchronous operations complete as late as possible."""
    if device != "emulator" or repeat == 0:
        return nullcontext()
    here = {} if backend.active is None else {"arch": backend.active.settings.arch}
    return cukit.backend("emulator", seed=repeat, late=True, **here)


def assert_close(name: str, got: Array, low: Array, wide: Array, atol: float | None = None) -> None:
    """Check that the error of `got` is at most twice the largest error of the plain low-precision
    result `low`, plus `atol`.

    Errors are absolute differences from `wide` (float64). If `wide` has magnitudes above 1, `atol`
    is multiplied by the largest one. By default, it is the ATOL of the dtype, or 0 for integers.
    Positions of NaN and infinity must equal those of `wide`.
    """
    got, low, wide = to_host(got), to_host(low), to_host(wide)
    assert got.shape == wide.shape, f"{name}: shape {got.shape}, expected {wide.shape}"
    if atol is None:  # integer results have no tolerance
        atol = ATOL[got.dtype.name] if got.dtype.kind not in "iu" else 0.0
    exact = wide.astype(np.float64)
    result, plain = got.astype(np.float64), low.astype(np.float64)
    for predicate in (np.isnan, np.isposinf, np.isneginf):
        wrong = predicate(result) != predicate(exact)
        assert not wrong.any(), f"{name}: {predicate.__name__} differs at {np.argwhere(wrong)[0]}"
    finite = np.isfinite(exact)
    if not finite.any():
        return
    error = np.abs(np.where(finite, result - np.where(finite, exact, 0), 0))
    plain_error = np.abs(np.where(finite, plain - np.where(finite, exact, 0), 0))
    plain_error = plain_error[np.isfinite(plain_error)].max(initial=0.0)
    scale = max(1.0, float(np.abs(exact[finite]).max()))
    allowed = FACTOR * plain_error + atol * scale
    worst = np.unravel_index(int(error.argmax()), error.shape)
    assert error[worst] <= allowed, (
        f"{name}: error {error[worst]:.3e} at {worst} (got {result[worst]}, expected "
        f"{exact[worst]}), allowed {allowed:.3e}"
    )


def check_against_reference(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[Array | None],
    *,
    device: str,
    names: Sequence[str] = ("out",),
    repeats: int = 3,
    atol: float | None = None,
    **options: Any,
) -> None:
    """Run `function(*inputs, **options)` on `device` and check every result against `reference`.

    Inputs are NumPy arrays, or None or plain values that are passed on. Repeated runs must be
    bitwise equal; in the emulator, the second run has another order of threads. Freed GPU memory
    that results may reuse is filled with NaN first.
    """
    # For the CPU and the emulator, `placed` holds the inputs themselves.
    contents = [x.tobytes() if isinstance(x, np.ndarray) else None for x in inputs]
    wide = _tuple(reference(*map(_widen, inputs), **options))
    low = _tuple(reference(*inputs, **options))
    placed = [to_device(device, x)[0] if isinstance(x, np.ndarray) else x for x in inputs]
    first: list[np.ndarray[Any, Any]] = []
    for repeat in range({"gpu": repeats, "emulator": 2, "cpu": 1}[device]):
        poison_pool(device)
        with another_order(device, repeat):
            results = [to_host(result) for result in _tuple(function(*placed, **options))]
        if repeat == 0:
            first = results
            assert len(first) == len(names) == len(wide)
            for name, got, plain, exact in zip(names, first, low, wide, strict=True):
                assert got.dtype == to_host(plain).dtype, f"{name}: dtype {got.dtype}"
                assert_close(name, got, plain, exact, atol)
        for name, again, before in zip(names, results, first, strict=True):
            assert again.tobytes() == before.tobytes(), f"{name}: run {repeat} is not bitwise equal"
    for before, array in zip(contents, placed, strict=True):
        if before is not None:
            assert to_host(array).tobytes() == before, "an input was modified"


def check_gradient(
    function: Callable[..., Any],
    backward: Callable[..., Any],
    inputs: Sequence[np.ndarray[Any, Any]],
    rng: np.random.Generator,
) -> None:
    """Compare `backward(grad_out, *inputs)` with central differences of `function(*inputs)`.

    Inputs are float64, and `backward` returns one gradient per input. Each gradient is tested along
    three random directions, so that every element contributes.
    """
    out = function(*inputs)
    grad_out = rng.standard_normal(out.shape)
    gradients = _tuple(backward(grad_out, *inputs))
    assert len(gradients) == len(inputs)
    step = 1e-6
    for index, (value, gradient) in enumerate(zip(inputs, gradients, strict=True)):
        assert gradient.shape == value.shape
        for _ in range(3):
            direction = rng.standard_normal(value.shape)
            shifted = [list(inputs), list(inputs)]
            shifted[0][index] = value + step * direction
            shifted[1][index] = value - step * direction
            difference = (function(*shifted[0]) - function(*shifted[1])) / (2 * step)
            expected = float(np.sum(difference * grad_out))
            actual = float(np.sum(gradient * direction))
            scale = max(1.0, abs(expected))
            assert abs(actual - expected) <= FINITE_DIFFERENCE * scale, (
                f"gradient of input {index}: {actual} along a direction, central differences: "
                f"{expected}"
            )


def _tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _widen(value: Any) -> Any:
    floating = isinstance(value, np.ndarray) and (
        value.dtype == BFLOAT16 or np.issubdtype(value.dtype, np.floating)
    )
    return value.astype(np.float64) if floating else value
