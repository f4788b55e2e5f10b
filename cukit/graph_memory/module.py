"""A memory and its graph as one object."""

from __future__ import annotations

from typing import Any

from cukit.core.arrays import FLOAT_DTYPES, Array, adopt, check_array
from cukit.errors import ArrayError, ArrayShapeError
from cukit.graph_memory.diffusion import graph_diffusion
from cukit.graph_memory.read import memory_read
from cukit.graph_memory.retrieve import retrieve_top_k
from cukit.graph_memory.transition import transition_from_adjacency, transition_from_similarity
from cukit.graph_memory.write import memory_write
from cukit.reference.graph_memory import Retrieved, Transition


class GraphDiffusionMemory:
    """A memory that is diffused over a graph, read by attention and written through gates.

    memory: float16|bfloat16 [num_nodes, dim]; float32 and float64 on the CPU only.
    transition: the edges between its rows.

    Each method calls one op of `cukit.graph_memory`; the package also has ops for their gradients.

    >>> import numpy as np, cukit as ck
    >>> memory = np.random.default_rng(0).standard_normal((100, 16)).astype(np.float32)
    >>> bank = ck.GraphDiffusionMemory.from_similarity(memory, k=8, steps=4)
    >>> bank.read(memory[:3]).shape, bank.retrieve_top_k(memory[:3], 5).indices.shape
    ((3, 16), (3, 5))
    """

    def __init__(self, memory: Array, transition: Transition, **diffusion: Any) -> None:
        """diffusion: options of :func:`graph_diffusion`: steps, restart, method, time.

        Raises ArrayError if the sizes of memory and transition differ.
        """
        op = "GraphDiffusionMemory"
        (memory,) = adopt(op, memory)
        check_array(op, "memory", memory, dtypes=FLOAT_DTYPES, ndim=2)
        if not isinstance(transition, Transition):
            kind = type(transition).__name__
            raise ArrayError(f"{op}: transition must be a Transition, got {kind}")
        if len(transition.row_offsets) != len(memory) + 1:
            raise ArrayShapeError(
                f"{op}: transition.row_offsets must have num_nodes + 1 = {len(memory) + 1} "
                f"elements, got {len(transition.row_offsets)}"
            )
        self.memory, self.transition, self.diffusion = memory, transition, diffusion
        self._diffused: Array | None = None

    @classmethod
    def from_similarity(
        cls,
        memory: Array,
        k: int,
        *,
        scale: float | None = None,
        normalize: str = "softmax",
        **diffusion: Any,
    ) -> GraphDiffusionMemory:
        """Connects each row to the `k` most similar ones: :func:`transition_from_similarity`."""
        transition = transition_from_similarity(memory, k, scale=scale, normalize=normalize)
        return cls(memory, transition, **diffusion)

    @classmethod
    def from_adjacency(
        cls, memory: Array, adjacency: Any, *, normalize: str = "row", **diffusion: Any
    ) -> GraphDiffusionMemory:
        """Connects rows by the given edges: :func:`transition_from_adjacency`."""
        transition = transition_from_adjacency(adjacency, normalize=normalize)
        return cls(memory, transition, **diffusion)

    @property
    def diffused(self) -> Array:
        """The diffused memory; cached until the next write."""
        if self._diffused is None:
            self._diffused = graph_diffusion(self.memory, self.transition, **self.diffusion)
        return self._diffused

    def read(self, queries: Array, *, scale: float | None = None) -> Array:
        """:func:`memory_read` from the diffused memory."""
        return memory_read(queries, self.diffused, scale=scale)

    def retrieve_top_k(self, queries: Array, k: int) -> Retrieved:
        """:func:`retrieve_top_k` from the diffused memory."""
        return retrieve_top_k(queries, self.diffused, k)

    def write(self, indices: Array, values: Array, gates: Array) -> None:
        """:func:`memory_write` to the memory; the graph is not changed."""
        self.memory = memory_write(self.memory, indices, values, gates)
        self._diffused = None
