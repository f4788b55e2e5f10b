"""Named arrays that live side by side in one flat array.

One flat array means one memset clears all gradients, one AdamW call per weight-decay group updates
everything, and one reduction gives the global norm, however many layers there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from cukit.core.device import require_cupy
from cukit.errors import DataError

# Every array starts on a multiple of this many elements: 256 bytes in bfloat16, enough for any
# vector load. The gaps hold zeros, which no gradient, norm or decay can change.
ALIGNMENT = 128


class Parameters(Mapping[str, Any]):
    """An ordered mapping from names to views of one flat array, matrices before vectors.

    Args:
        shapes: the shape of each array by name. Order in memory: two or more axes first (the part
            that weight decay applies to), then the rest; the given order within each.
        dtype: of every array.
        xp: numpy or cupy, which holds the memory. Everything starts at zero.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: Any, xp: ModuleType = np
    ) -> None:
        self.shapes = dict(shapes)
        self.xp = xp
        self.on_finished: Callable[[Sequence[str]], None] | None = None
        """Of gradients: told what a backward pass will not add to any more; see `finish`."""
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
        """The same names and shapes, zero: gradients, or optimizer state in another dtype."""
        return Parameters(self.shapes, self.flat.dtype if dtype is None else dtype, self.xp)

    def clear(self) -> None:
        """Set everything to zero, in place."""
        # All-zero bits are 0.0 in every float format, and not every fill knows bfloat16.
        self.flat.view(np.uint8).fill(0)

    def finish(self, *names: str) -> None:
        """Tell `on_finished` that the gradients of these names are complete in this pass."""
        if self.on_finished is not None:
            self.on_finished(names)

    def span(self, name: str) -> tuple[int, int]:
        """Where an array lies in `flat`: its first element, and the one behind it and its gap."""
        start, size = self._spans[name]
        return start, start + -(-size // ALIGNMENT) * ALIGNMENT

    def groups(self) -> tuple[Any, Any]:
        """The flat part that weight decay applies to (matrices) and the part it does not."""
        return self.flat[: self.num_decayed], self.flat[self.num_decayed :]

    def to_host(self) -> dict[str, np.ndarray[Any, Any]]:
        """Copies in NumPy arrays, in the order of the shapes."""
        host = host_array(self.flat)
        return {
            name: host[start : start + size].reshape(self.shapes[name]).copy()
            for name, (start, size) in ((name, self._spans[name]) for name in self.shapes)
        }

    def load(self, arrays: Mapping[str, np.ndarray[Any, Any]], source: str) -> None:
        """Take over `arrays` (NumPy), all names and shapes as here, or raise DataError.

        `source` names where they come from in the error. Nothing changes if anything is amiss.
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
        """Take over a whole flat array of the same size and dtype."""
        self.flat[...] = self.xp.asarray(flat)


def host_array(array: Any) -> np.ndarray[Any, Any]:
    """The array in NumPy: itself if it is already there, else a copy (this waits for the GPU)."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.get())


def namespace_for(device: str) -> ModuleType:
    """numpy for "cpu", cupy for "gpu"."""
    return require_cupy("device gpu") if device == "gpu" else np
