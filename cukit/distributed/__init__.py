"""Collectives between processes with one device each: NCCL between GPUs, sockets between CPUs,
no communication for a single process."""

from cukit.distributed.communicator import Alone, Communicator, communicator
from cukit.distributed.host import HostCommunicator
from cukit.distributed.nccl import NcclCommunicator, nccl_available
from cukit.distributed.ranks import Ranks, ranks_from_environment

__all__ = [
    "Alone",
    "Communicator",
    "HostCommunicator",
    "NcclCommunicator",
    "Ranks",
    "communicator",
    "nccl_available",
    "ranks_from_environment",
]
