"""Memories whose rows are the nodes of a graph: retrieval, diffusion, reads and writes."""

from cukit.graph_memory.diffusion import graph_diffusion, graph_diffusion_backward
from cukit.graph_memory.module import GraphDiffusionMemory
from cukit.graph_memory.read import memory_read, memory_read_backward
from cukit.graph_memory.retrieve import retrieve_top_k
from cukit.graph_memory.transition import (
    transition_from_adjacency,
    transition_from_similarity,
    transition_from_similarity_backward,
)
from cukit.graph_memory.write import memory_write, memory_write_backward
from cukit.reference.graph_memory import Retrieved, Transition, transpose

__all__ = [
    "GraphDiffusionMemory",
    "Retrieved",
    "Transition",
    "graph_diffusion",
    "graph_diffusion_backward",
    "memory_read",
    "memory_read_backward",
    "memory_write",
    "memory_write_backward",
    "retrieve_top_k",
    "transition_from_adjacency",
    "transition_from_similarity",
    "transition_from_similarity_backward",
    "transpose",
]
