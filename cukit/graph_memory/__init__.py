"""Memories whose rows are nodes of a graph: retrieval, diffusion, reads and writes."""

from cukit.graph_memory.diffusion import graph_diffusion, graph_diffusion_backward
from cukit.graph_memory.retrieve import retrieve_top_k
from cukit.reference.graph_memory import Retrieved, Transition, transpose

__all__ = [
    "Retrieved",
    "Transition",
    "graph_diffusion",
    "graph_diffusion_backward",
    "retrieve_top_k",
    "transpose",
]
