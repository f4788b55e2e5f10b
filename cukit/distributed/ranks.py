"""Rank of this process and number of processes, as set by a launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from cukit.errors import ConfigError

_LAUNCHERS = (
    # torchrun, and launchers that set the same names
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    # mpirun of Open MPI; mpirun of MPICH and Intel MPI
    (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES"),  # srun
)  # fmt: skip
"""Variables with the rank, the number of processes, the rank on this host, and the number of
processes on this host (of srun: the number of hosts)."""
_DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Ranks:
    """One process among `size`.

    Attributes:
        rank: 0 .. size - 1.
        size: number of processes.
        local_rank: rank among the processes of this host, and index of the process's GPU.
        address, port: where rank 0 listens. If the port is in use, rank 0 takes one of the next 15.
        job: an identifier of the run, so that two runs on a host do not connect to each other.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = "127.0.0.1"
    port: int = _DEFAULT_PORT
    job: str = ""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(f"Ranks: rank must be in 0..size - 1, got {self.rank} of {self.size}")
        if self.local_rank < 0:
            raise ConfigError(f"Ranks: local_rank must be 0 or more, got {self.local_rank}")
        if not 0 < self.port < 65536:
            raise ConfigError(f"Ranks: port must be in 1..65535, got {self.port}")


def ranks_from_environment(environment: Mapping[str, str] | None = None) -> Ranks:
    """The ranks set by torchrun, mpirun or srun; a single process without a launcher.

    MASTER_ADDR and MASTER_PORT name the host and port of rank 0, by default this host and 29500.
    Under torchrun the launcher itself listens on MASTER_PORT, so rank 0 uses the next port.

    Raises:
        ConfigError: a variable is not a number, or the launcher reports processes on several hosts
            and MASTER_ADDR is not set.
    """
    env = os.environ if environment is None else environment
    for launcher in _LAUNCHERS:
        rank_name, size_name, local_name, spread_name = launcher
        if rank_name in env and size_name in env:
            break
    else:
        return Ranks()
    rank, size = _number(env, rank_name), _number(env, size_name)
    local_rank = _number(env, local_name) if local_name in env else rank
    port = _number(env, "MASTER_PORT") if "MASTER_PORT" in env else _DEFAULT_PORT
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1
    one_host = "1" if rank_name == "SLURM_PROCID" else str(size)
    if size > 1 and "MASTER_ADDR" not in env and env.get(spread_name, one_host) != one_host:
        raise ConfigError(
            f"MASTER_ADDR: {size} processes on several hosts need the name of rank 0's host "
            "(mpirun -x MASTER_ADDR=..., or export it before srun)"
        )
    job = "/".join(
        env[name]
        for name in ("TORCHELASTIC_RUN_ID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE",
                     "SLURM_JOB_ID", "MASTER_PORT")
        if name in env
    )  # fmt: skip
    return Ranks(rank, size, local_rank, env.get("MASTER_ADDR", "127.0.0.1"), port, job)


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ConfigError(f"{name}: expected a number, got {env[name]!r}") from None
