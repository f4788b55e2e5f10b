"""Two ranks take the same steps as one process with twice the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cukit.distill import (
    Distiller,
    HiddenStateTerm,
    LanguageModelling,
    Trainer,
    Windows,
    restore_checkpoint,
    save_checkpoint,
)
from cukit.distill.training._gradient_reducer import plan_buckets
from cukit.distributed import Alone, HostCommunicator, Ranks
from cukit.errors import ConfigError
from tests.distributed.ranks import run_ranks
from tests.models.small import small_model

TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 40, np.uint8) % 23
TEACHER = {"hidden_size": 24, "num_layers": 3, "num_heads_q": 2}


def make_trainer(comm: Any, batch: int, *, seed: int = 0, **options: Any) -> Trainer:
    student = small_model(seed, tie_embeddings=options.pop("tied", False))
    teacher = small_model(1, **TEACHER)
    term = HiddenStateTerm({1: 2, 2: 3}, student.config, teacher.config, weight=0.3, seed=seed)
    objective = Distiller(student, teacher, alpha=0.7, temperature=2.0, terms=[term])
    kind = options.pop("windows", Windows)
    windows = kind(TEXT, batch=batch, seq_len=8, seed=5, ranks=comm)
    return Trainer(objective, windows, lr=1e-2, communicator=comm, **options)


def steps(trainer: Trainer, count: int) -> tuple[list[dict[str, float]], Any]:
    losses = [trainer.train_step().read() for _ in range(count)]
    return losses, trainer.state()


class SomeIgnored(Windows):
    """Rows with different numbers of valid targets."""

    every_target_counts = False

    def __call__(self, step: int, part: int = 0) -> tuple[Any, Any]:
        tokens, targets = super().__call__(step, part)
        return tokens, np.where(targets % 3 == 1, -100, targets)


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_bytes": 4096},
        {"tied": True, "accumulate": 2},
        {"overlap": False},
        {"workers": 2},
        {"windows": SomeIgnored, "accumulate": 2},
    ],
    ids=str,
)
def test_two_ranks_equal_twice_the_batch(options: dict[str, Any]) -> None:
    one = dict(options)
    if "workers" in one:
        one["workers"] = 4
    expected_losses, expected = steps(make_trainer(Alone(), 4, **one), 3)
    # Rank 1 is initialised differently, but starts from the parameters of rank 0.
    results = run_ranks(2, lambda comm: steps(make_trainer(comm, 2, seed=comm.rank, **options), 3))
    for losses, state in results:
        for ours, theirs in zip(losses, expected_losses, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9)
        for name, array in state.items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-7, atol=1e-10, err_msg=name)
    for name, array in results[0][1].items():
        assert array.tobytes() == results[1][1][name].tobytes(), name


def test_buckets_cover_everything_from_the_end() -> None:
    gradients = small_model(tie_embeddings=False).parameters
    for least in (1, 2000, 1 << 30):
        buckets = plan_buckets(gradients, least)
        assert sorted(name for b in buckets for name in b.names) == sorted(gradients)
        assert sum(bucket.gradients.size for bucket in buckets) == gradients.flat.size
        vectors, *matrices = buckets
        assert all(gradients.shapes[name] == (16,) for name in vectors.names)
        assert "lm_head.weight" in matrices[0].names
        assert "embed_tokens.weight" in matrices[-1].names
        for bucket in matrices[:-1]:
            assert bucket.gradients.nbytes >= least


def test_gradients_are_reported_from_last_to_first() -> None:
    """The backward pass reports each gradient once, from the head down to the embeddings."""
    comm = HostCommunicator(Ranks())  # one rank, for which the trainer has no reducer
    trainer = make_trainer(comm, 2)
    gradients = trainer._gradients[0]
    reported: list[str] = []
    gradients.on_finished = reported.extend
    tokens, targets = trainer.windows(0)
    trainer.objective.loss_and_gradients(
        tokens, targets, trainer._gradients, step=0, normalizer=16.0
    )
    assert sorted(reported) == sorted(gradients)
    assert reported[:2] == ["lm_head.weight", "norm.weight"]
    assert reported[-1] == "embed_tokens.weight"
    assert reported.index("layers.1.qkv_proj.weight") < reported.index("layers.0.qkv_proj.weight")


def test_buckets_are_reduced_before_the_backward_pass_ends() -> None:
    def work(comm: HostCommunicator) -> tuple[int, int]:
        trainer = make_trainer(comm, 1, bucket_bytes=1)
        reducer, reduced = trainer._reducer, []
        assert reducer is not None
        reduce, finish = reducer._reduce, reducer.finish

        def counting_reduce(array: Any) -> None:
            reduced.append(array.size)
            reduce(array)

        before_end: list[int] = []

        def counting_finish(*more: Any) -> None:
            before_end.append(len(reduced))
            finish(*more)

        reducer._reduce = counting_reduce  # type: ignore[method-assign]
        reducer.finish = counting_finish  # type: ignore[method-assign]
        trainer.train_step()
        return before_end[0], len(reducer._buckets)

    for early, buckets in run_ranks(2, work):
        assert early == buckets > 3


def test_an_objective_with_two_backward_passes_is_rejected_or_correct() -> None:
    class Twice(LanguageModelling):
        def loss_and_gradients(self, *args: Any, **options: Any) -> Any:
            super().loss_and_gradients(*args, **options)
            return super().loss_and_gradients(*args, **options)

    def work(comm: HostCommunicator, overlap: bool) -> float:
        windows = Windows(TEXT, batch=1, seq_len=8, seed=5, ranks=comm)
        trainer = Trainer(
            Twice(small_model()), windows, lr=1e-2, communicator=comm, overlap=overlap
        )
        return trainer.train_step().read()["loss"]

    with pytest.raises(ConfigError, match=r"overlap=False"):
        run_ranks(2, lambda comm: work(comm, True))
    first, second = run_ranks(2, lambda comm: work(comm, False))
    assert first == second


def test_windows_of_another_rank_are_rejected() -> None:
    windows = Windows(TEXT, batch=1, seq_len=8, seed=5, ranks=Ranks(1, 2))
    with pytest.raises(ConfigError, match=r"windows: created for rank 1 of 2.*rank 0 of 1"):
        Trainer(LanguageModelling(small_model()), windows, lr=1e-3)


def test_a_run_of_two_processes_resumes_to_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"

    def unbroken(comm: HostCommunicator) -> Any:
        trainer = make_trainer(comm, 2)
        steps(trainer, 2)
        save_checkpoint(path, trainer)
        return steps(trainer, 2)

    def resumed(comm: HostCommunicator) -> Any:
        trainer = make_trainer(comm, 2, seed=7)
        restore_checkpoint(path, trainer)
        return steps(trainer, 2)

    for (losses, state), (again, state_again) in zip(
        run_ranks(2, unbroken), run_ranks(2, resumed), strict=True
    ):
        assert losses == again
        for name, array in state.items():
            assert array.tobytes() == state_again[name].tobytes(), name
