"""Collectives through sockets: threads of one process as ranks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cukit.distributed import Alone, HostCommunicator, Ranks, communicator, ranks_from_environment
from cukit.errors import ArrayError, CommunicationError, ConfigError
from tests.contract import DTYPES, dtype_of
from tests.distributed.ranks import free_port, run_ranks


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [*DTYPES, "float64", "int32", "int8", "bool"])
@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_all_reduce(size: int, dtype: str, op: str) -> None:
    inputs = [(np.random.default_rng(r).standard_normal((5, 3)) * 60) for r in range(size)]
    arrays = [each.astype(dtype_of(dtype)) for each in inputs]
    fold: Any = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op]
    whole = dtype in ("int32", "int8", "bool")
    wide = np.float32 if arrays[0].dtype.itemsize < 4 and not whole else arrays[0].dtype
    expected = fold.reduce(np.stack(arrays).astype(wide), axis=0, dtype=wide)
    expected = expected.astype(arrays[0].dtype)

    def work(comm: HostCommunicator) -> Any:
        array = arrays[comm.rank].copy()
        comm.all_reduce(array, op)
        return array

    results = run_ranks(size, work)
    assert len({result.tobytes() for result in results}) == 1
    np.testing.assert_allclose(
        results[0].astype(np.float64), expected.astype(np.float64), rtol=1e-2
    )
    if op != "sum" or whole:  # sums of int8 wrap
        assert results[0].tobytes() == expected.tobytes()


def test_gather_broadcast_exchange_and_empty_arrays() -> None:
    def work(comm: HostCommunicator) -> Any:
        gathered = comm.all_gather(np.full((2, 2), comm.rank, np.float32))
        scalars = comm.all_gather(np.array(comm.rank + 0.5))
        assert scalars.tolist() == [0.5, 1.5, 2.5]
        scalar = np.array(float(comm.rank))
        comm.all_reduce(scalar)
        comm.all_reduce(np.zeros((0, 4)))
        roots = []
        for root in range(3):
            array = np.arange(4) + 10 * comm.rank
            comm.broadcast(array, root)
            roots.append(int(array[0]))
        with comm.beside():
            messages = comm.exchange(b"x" * comm.rank)
        comm.join()
        comm.barrier()
        return gathered[:, 0, 0].tolist(), float(scalar), roots, messages

    for result in run_ranks(3, work):
        assert result == ([0, 1, 2], 3.0, [0, 10, 20], [b"", b"x", b"xx"])


def test_ranks_in_different_collectives_are_reported() -> None:
    def work(comm: HostCommunicator) -> None:
        comm.all_reduce(np.zeros(2 + comm.rank, np.float32))

    with pytest.raises(CommunicationError, match="different collectives"):
        run_ranks(2, work)


def test_a_closed_connection_is_reported() -> None:
    def work(comm: HostCommunicator) -> None:
        if comm.rank == 0:
            comm.all_reduce(np.zeros(2))

    with pytest.raises(CommunicationError, match="closed its connection"):
        run_ranks(2, work)


def test_ranks_connect_although_another_program_uses_the_port() -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        threading.Thread(target=_hang_up, args=(taken,), daemon=True).start()
        results = run_ranks(2, lambda comm: comm.exchange(b"%d" % comm.rank), port=port)
    assert results == [[b"0", b"1"]] * 2


def _hang_up(server: socket.socket) -> None:
    while True:
        try:
            server.accept()[0].close()
        except OSError:
            return


def test_errors_name_the_missing_rank() -> None:
    ranks = Ranks(0, 2, port=free_port())
    with pytest.raises(CommunicationError, match=r"waited 0.05 s for rank 1 of 2"):
        HostCommunicator(ranks, timeout_seconds=0.05)
    ranks = Ranks(1, 2, 1, port=free_port())
    with pytest.raises(CommunicationError, match="rank 1 found no rank 0"):
        HostCommunicator(ranks, timeout_seconds=0.05)


@pytest.mark.parametrize("make", [Alone, lambda: HostCommunicator(Ranks())])
def test_a_single_process_leaves_arrays_unchanged(make: Callable[[], Any]) -> None:
    comm = make()
    array = np.arange(3.0)
    comm.all_reduce(array)
    comm.broadcast(array)
    assert array.tolist() == [0, 1, 2]
    assert comm.all_gather(array).shape == (1, 3)
    assert comm.exchange(b"a") == [b"a"]
    comm.barrier()
    comm.close()
    with pytest.raises(ArrayError, match="op must be one of"):
        comm.all_reduce(array, "mean")
    with pytest.raises(ArrayError, match="C-contiguous"):
        comm.all_reduce(np.zeros((4, 4))[:, ::2])
    for out in (np.zeros((1, 2)), np.zeros((1, 3), np.float32), np.zeros((1, 6))[:, ::2]):
        with pytest.raises(ArrayError, match=r"all_gather: out must be float64 \(1, 3\)"):
            comm.all_gather(array, out)
    with pytest.raises(ArrayError, match="root must be in"):
        comm.broadcast(array, 1)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Ranks()),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a",
             "MASTER_PORT": "7"},
            Ranks(3, 4, 1, "a", 7, "7"),
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "7", "TORCHELASTIC_RUN_ID": "r",
             "TORCHELASTIC_USE_AGENT_STORE": "True"},
            Ranks(1, 2, 1, "127.0.0.1", 8, "r/7"),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
             "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_MCA_ess_base_jobid": "9"},
            Ranks(1, 2, 1, job="9"),
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}, Ranks(0, 2, 0)),
    ],
)  # fmt: skip
def test_launchers(environment: dict[str, str], expected: Ranks) -> None:
    assert ranks_from_environment(environment) == expected


def test_errors_name_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE: expected a number, got 'two'"):
        ranks_from_environment({"RANK": "0", "WORLD_SIZE": "two"})
    with pytest.raises(ConfigError, match="rank must be in"):
        ranks_from_environment({"RANK": "2", "WORLD_SIZE": "2"})
    hosts = {"SLURM_STEP_NUM_NODES": "2"}
    for rank, size, name, several in (
        ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "1"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "1"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_NODES", "2"),
    ):
        two = {rank: "0", size: "2"}
        with pytest.raises(ConfigError, match="MASTER_ADDR"):
            ranks_from_environment({**hosts, **two, name: several})
        assert ranks_from_environment({**two, name: several, "MASTER_ADDR": "a"}).address == "a"
        # mpirun on each host of a job that Slurm spreads over several
        assert ranks_from_environment({**hosts, **two, name: str(3 - int(several))}).size == 2
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(communicator(), Alone)
