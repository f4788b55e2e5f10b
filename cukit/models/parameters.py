"""Named arrays that are stored in one flat array.

With one flat array, one memset clears all gradients, one AdamW call per weight-decay group updates
all parameters, and one reduction gives the global norm, whatever the number of layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from cukit.core.device import require_cupy
from cukit.errors import DataError

# Every array starts at a multiple of this many elements: 256 bytes in BF16, enough for any vector
# load. The padding is zero and stays zero: it has no gradient.
ALIGNMENT = 128


class Parameters(Mapping[str, Any]):
    """An ordered mapping from names to views of one flat array, matrices before vectors.

    Args:
        shapes: the shape of each array by name. Order in memory: arrays of two or more axes first
            (weight decay applies to these), then the rest, each in the given order.
        dtype: dtype of all arrays.
        xp: numpy or cupy, for the memory, which is initialised to zero.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: Any, xp: ModuleType = np
    ) -> None:
        self.shapes = dict(shapes)
        self.xp = xp
        self.on_finished: Callable[[Sequence[str]], None] | None = None
        """For arrays of gradients: called with the names of completed gradients; see `finish`."""
        matrices = [name for name, shape in self.shapes.items() if len(shape) > 1]
        vectors = [name for name, shape in self.shapes.items() if len(shape) <= 1]
        offset, self._spans = 0, {}
        for name in matrices + vectors:
            size = math.prod(self.shapes[name])
            self._spans[name] = (offset, size)
            offset += -(-size // ALIGNMENT) * ALIGNMENT
            if matrices and name == matrices[-1]:
                self.num_decayed = offset
        if not matrices:
            self.num_decayed = 0
        self.flat = xp.zeros(offset, np.dtype(dtype))
        self._views = {
            name: self.flat[start : start + size].reshape(self.shapes[name])
            for name, (start, size) in self._spans.items()
        }

    def __getitem__(self, name: str) -> Any:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def zeros_like(self, dtype: Any = None) -> Parameters:
        """Zeros with the same names and shapes: gradients, or optimizer state in another dtype."""
        return Parameters(self.shapes, self.flat.dtype if dtype is None else dtype, self.xp)

    def clear(self) -> None:
        """Sets all arrays to zero, in place."""
        # All-zero bits are 0.0 in every float format, and not every fill supports bfloat16.
        self.flat.view(np.uint8).fill(0)

    def finish(self, *names: str) -> None:
        """Reports to `on_finished` that this backward pass has completed these gradients."""
        if self.on_finished is not None:
            self.on_finished(names)

    def span(self, name: str) -> tuple[int, int]:
        """The range of an array in `flat`, including its padding: first element, and end."""
        start, size = self._spans[name]
        return start, start + -(-size // ALIGNMENT) * ALIGNMENT

    def groups(self) -> tuple[Any, Any]:
        """The part of `flat` with weight decay (matrices) and the part without."""
        return self.flat[: self.num_decayed], self.flat[self.num_decayed :]

    def to_host(self) -> dict[str, np.ndarray[Any, Any]]:
        """Copies as NumPy arrays, in the order of the shapes."""
        host = host_array(self.flat)
        return {
            name: host[start : start + size].reshape(self.shapes[name]).copy()
            for name, (start, size) in ((name, self._spans[name]) for name in self.shapes)
        }

    def load(self, arrays: Mapping[str, np.ndarray[Any, Any]], source: str) -> None:
        """Copies from NumPy arrays with exactly these names and shapes.

        Raises DataError, which names `source`, before anything is changed.
        """
        if missing := [name for name in self.shapes if name not in arrays]:
            raise DataError(f"{source}: {missing[0]} is missing")
        if unknown := [name for name in arrays if name not in self.shapes]:
            raise DataError(f"{source}: {unknown[0]} is not part of this model")
        for name, shape in self.shapes.items():
            if tuple(arrays[name].shape) != tuple(shape):
                raise DataError(
                    f"{source}: {name} has shape {tuple(arrays[name].shape)}, expected {shape}"
                )
        host = np.zeros(self.flat.shape, self.flat.dtype)
        for name, (start, size) in self._spans.items():
            host[start : start + size] = arrays[name].reshape(-1).astype(host.dtype)
        self.load_flat(host)

    def load_flat(self, flat: np.ndarray[Any, Any]) -> None:
        """Copies from a flat array of the same size and dtype."""
        self.flat[...] = self.xp.asarray(flat)


def host_array(array: Any) -> np.ndarray[Any, Any]:
    """The array if it is a NumPy array, else a NumPy copy, after waiting for the GPU."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.get())


def namespace_for(device: str) -> ModuleType:
    """numpy for "cpu", cupy for "gpu"."""
    return require_cupy("device gpu") if device == "gpu" else np
