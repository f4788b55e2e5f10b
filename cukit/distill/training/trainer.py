"""The training loop: batches, gradient accumulation, clipping, AdamW, statistics.

`Trainer` trains the teacher, the distilled student and the student without a teacher. No step waits
for the GPU: schedules are evaluated on the host, the clipping factor stays on the device, and
statistics are device scalars until they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from cukit.core.arrays import Array, address_of, namespace
from cukit.distill.optimizer.adamw import AdamWState, adamw
from cukit.distill.optimizer.global_norm import clip_scale, global_norm
from cukit.distill.training._gradient_reducer import GradientReducer
from cukit.distill.training.data import BatchSource
from cukit.distill.training.distiller import IGNORE_INDEX, Objective
from cukit.distill.training.exponential_average import ExponentialAverage
from cukit.distill.training.schedule import Schedule, as_schedule
from cukit.distributed import Alone, Communicator
from cukit.errors import ConfigError, DataError
from cukit.models.parameters import Parameters, host_array

# A diverging loss is visible in its value, so NumPy's overflow warnings are suppressed.
_QUIETLY = np.errstate(over="ignore", invalid="ignore")


Batch = tuple[Any, ...]
"""(tokens, targets), or (tokens, targets, signals) with a recorded teacher."""


@dataclass(frozen=True)
class StepStatistics:
    """The statistics of a step. The values are device scalars; `read` waits for them."""

    step: int
    """Number of finished steps."""
    values: dict[str, Array]

    def read(self) -> dict[str, float]:
        """The values as floats."""
        return {name: float(value) for name, value in self.values.items()}


Callback = Callable[["Trainer", StepStatistics], None]
"""A function that `Trainer.fit` calls after every step."""


class Trainer:
    """Minimises an objective over windows of text with AdamW.

    Args:
        objective: the loss, with its model and other trained parameters.
        windows: the source of batches, a pure function of the step: `Windows`, `OfflineBatches`.
        lr: learning rate, a number or a schedule over steps.
        accumulate: batches accumulated per step, for a larger batch in the same memory.
        workers: threads that share a batch, on the CPU. The split affects the rounding of sums, so
            results are reproducible only with the same number.
        max_grad_norm: gradients with a larger global norm are scaled down to it.
        weight_decay: of matrices only, not of norm weights.
        beta1, beta2: as in :func:`adamw`.
        communicator: the processes that share the step, one GPU each: see
            `cukit.distributed.communicator`. Each process reads its own windows, created with
            `ranks=communicator`; gradients are summed over all, so n processes take the same steps
            as one with n times the batch. All start from rank 0's parameters.
        average: a moving average of the model, updated after every step.
        bucket_bytes: minimum size of the buckets in which gradients are summed.
        overlap: sum gradients concurrently with the backward pass. False for an objective with
            several backward passes per batch.
    """

    def __init__(
        self,
        objective: Objective,
        windows: BatchSource,
        *,
        lr: float | Schedule,
        accumulate: int = 1,
        workers: int = 1,
        max_grad_norm: float = 1.0,
        weight_decay: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.95,
        average: ExponentialAverage | None = None,
        communicator: Communicator | None = None,
        bucket_bytes: int = 32 << 20,
        overlap: bool = True,
    ) -> None:
        if accumulate < 1:
            raise ConfigError(f"accumulate: expected 1 or more, got {accumulate}")
        if not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm: expected a positive number, got {max_grad_norm}")
        most = windows.batch if windows.xp is np else 1
        if not 1 <= workers <= most:
            raise ConfigError(f"workers: expected 1 to {most} here, got {workers}")
        self.communicator = communicator or Alone()
        _check_ranks(windows, self.communicator)
        self.objective, self.windows = objective, windows
        self.lr, self.accumulate = as_schedule(lr), accumulate
        self.max_grad_norm = max_grad_norm
        self.beta1, self.beta2 = beta1, beta2
        self.step = 0
        """Number of finished steps; with the windows' seed, the complete position in the data."""
        self._trained = objective.trained()
        self._gradients = [_gradients_of(parameters) for parameters in self._trained]
        self._reducer: GradientReducer | None = None
        if self.communicator.size > 1:
            for parameters in self._trained:
                self.communicator.broadcast(parameters.flat)
            self._reducer = GradientReducer(self.communicator, self._gradients, bucket_bytes)
        self._overlap = overlap and workers == 1
        self._workers = _Workers(objective, self._gradients, workers)
        self._groups = [
            _Group(params, grads, AdamWState.for_params([params]), decay)
            for parameters, gradients in zip(self._trained, self._gradients, strict=True)
            for params, grads, decay in zip(
                parameters.groups(), gradients.groups(), (weight_decay, 0.0), strict=True
            )
            if params.size
        ]
        self.average = average
        own = self._trained[0].groups()
        self._masters = [group.state.master[0] for group in self._groups if group.is_one_of(own)]
        if average is not None:
            if average.model.config != objective.model.config:
                raise ConfigError("average: its model has another shape than the objective's")
            self.communicator.broadcast(average.flat)
            average.load(average.flat)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step, over all processes."""
        windows = self.windows
        return windows.batch * windows.seq_len * self.accumulate * self.communicator.size

    @_QUIETLY
    def train_step(self) -> StepStatistics:
        """Run one step, which updates all trained parameters."""
        self._workers.clear()
        totals: dict[str, Array] = {}
        batches = self._batches()
        normalizer = self._normalizer(batches)
        for part, batch in enumerate(batches):
            if self._reducer is not None and self._overlap and part == self.accumulate - 1:
                self._reducer.watch()
            _add(totals, self._workers.run(batch, self.step, normalizer))
        self._workers.join()
        if self._reducer is not None:
            totals = _reduced(totals, self._reducer)
        norm = global_norm([gradients.flat for gradients in self._gradients])
        scale = clip_scale(norm, self.max_grad_norm)
        lr = self.lr(self.step)
        self.step += 1
        for group in self._groups:
            adamw(
                [group.params],
                [group.grads],
                group.state,
                lr=lr,
                beta1=self.beta1,
                beta2=self.beta2,
                weight_decay=group.weight_decay,
                step=self.step,
                grad_scale=scale,
            )
        if self.average is not None:
            self.average.update(self._masters, self.step - 1)
        return StepStatistics(self.step, {**totals, "gradient norm": norm})

    def fit(self, steps: int, callbacks: Iterable[Callback] = ()) -> None:
        """Train until `steps` steps are finished, including those before a restored checkpoint.

        Each of `callbacks`, such as `Progress` and `Checkpoints`, is called after every step, in
        order. A callback that reads statistics waits for the GPU; the loop itself does not.
        """
        callbacks = tuple(callbacks)
        while self.step < steps:
            statistics = self.train_step()
            for callback in callbacks:
                callback(self, statistics)

    def _batches(self) -> Sequence[Batch]:
        """The batches of this step."""
        return [self.windows(self.step, part) for part in range(self.accumulate)]

    def _normalizer(self, batches: Sequence[Batch]) -> Any:
        """The number of targets in the whole step that are not ignored, over all its batches and
        processes: a number if none are ignored, else counted on the device."""
        if getattr(self.windows, "every_target_counts", False):
            return float(self.tokens_per_step)
        xp = self.windows.xp
        wide = np.promote_types(self._gradients[0].flat.dtype, np.float32)
        count = xp.zeros((), wide)
        for _, targets, *_ in batches:
            count += (targets != IGNORE_INDEX).sum(dtype=wide)
        self.communicator.all_reduce(count)
        return xp.maximum(count, wide.type(1)).reshape(())

    # -- checkpoints ---------------------------------------------------------------------------

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """Everything that the next step depends on, except `step`, as NumPy arrays by name."""
        model, *terms = self._trained
        arrays = model.to_host()
        arrays |= {f"terms.{i}": host_array(term.flat) for i, term in enumerate(terms)}
        arrays |= {name: host_array(array) for name, array in self._optimizer_arrays().items()}
        return arrays

    def restore(self, arrays: dict[str, np.ndarray[Any, Any]], step: int, source: str) -> None:
        """Continue from a `state()` taken after `step` steps, bit for bit.

        Raises DataError, which names `source`, if an array is missing or has another size; the
        trainer is then unchanged.
        """
        model, *terms = self._trained
        flats = {f"terms.{i}": term.flat for i, term in enumerate(terms)}
        flats |= self._optimizer_arrays()
        for name, flat in flats.items():
            if name not in arrays or arrays[name].shape != flat.shape:
                raise DataError(f"{source}: {name} is missing or has another size")
        model.load({name: a for name, a in arrays.items() if name not in flats}, source)
        for name, flat in flats.items():
            flat[...] = self.windows.xp.asarray(arrays[name])
        if self.average is not None:
            self.average.load(self.average.flat)
        self.step = step

    def _optimizer_arrays(self) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        for index, group in enumerate(self._groups):
            state = group.state
            if state.master[0] is not group.params:  # float32 parameters are their own master
                arrays[f"optimizer.{index}.master"] = state.master[0]
            arrays[f"optimizer.{index}.exp_avg"] = state.exp_avg[0]
            arrays[f"optimizer.{index}.exp_avg_sq"] = state.exp_avg_sq[0]
        if self.average is not None:
            arrays["average"] = self.average.flat
        return arrays


class _Workers:
    """Runs an objective on parts of a batch in parallel, each with its own gradients."""

    def __init__(self, objective: Objective, gradients: list[Parameters], count: int) -> None:
        self._objective = objective
        self._gradients = [gradients]
        for _ in range(count - 1):
            self._gradients.append([own.zeros_like() for own in gradients])
        self._pool = ThreadPoolExecutor(count) if count > 1 else None

    def clear(self) -> None:
        for gradients in self._gradients:
            for own in gradients:
                own.clear()

    def run(self, batch: Batch, step: int, normalizer: Any) -> dict[str, Array]:
        """Add the gradients of a batch; return its statistics."""

        @_QUIETLY
        def work(part: tuple[Any, ...]) -> dict[str, Array]:
            *batch, gradients = part
            tokens, targets, *signals = batch
            more = {"signals": signals[0]} if signals else {}
            return self._objective.loss_and_gradients(
                tokens, targets, gradients, step=step, normalizer=normalizer, **more
            )

        if self._pool is None:
            return work((*batch, self._gradients[0]))
        count = len(self._gradients)
        parts = (*(_split(each, count) for each in batch), self._gradients)
        totals: dict[str, Array] = {}
        for statistics in self._pool.map(work, zip(*parts, strict=True)):
            _add(totals, statistics)
        return totals

    def join(self) -> None:
        """Sum all gradients into the first worker's, in a fixed order."""
        first, *others = self._gradients
        for gradients in others:
            for total, own in zip(first, gradients, strict=True):
                total.flat += own.flat


def _split(of_batch: Any, count: int) -> list[Any]:
    """Parts of an array [batch, ...], or of each array in a named tuple."""
    if isinstance(of_batch, tuple):
        columns = zip(*(np.array_split(each, count) for each in of_batch), strict=True)
        return [type(of_batch)(*column) for column in columns]
    return list(np.array_split(of_batch, count))


def _check_ranks(windows: Any, communicator: Communicator) -> None:
    """Raises ConfigError if windows were created for another rank than this process's."""
    made_for = (getattr(windows, "rank", communicator.rank),
                getattr(windows, "num_ranks", communicator.size))  # fmt: skip
    if made_for != (communicator.rank, communicator.size):
        raise ConfigError(
            f"windows: created for rank {made_for[0]} of {made_for[1]}, but this process is rank "
            f"{communicator.rank} of {communicator.size}; pass the same communicator to the "
            "windows, as ranks, and to the trainer"
        )


def _reduced(statistics: dict[str, Array], reducer: GradientReducer) -> dict[str, Array]:
    """Statistics summed over processes, together with the gradients. Each value is one process's
    contribution to a mean over all, so the sum is the mean."""
    values = list(statistics.values())
    xp = namespace(values[0])
    wide = np.result_type(np.float32, *(value.dtype for value in values))
    packed = xp.stack([value.astype(wide).reshape(()) for value in values])
    reducer.finish(packed)
    return {name: packed[index] for index, name in enumerate(statistics)}


def _add(totals: dict[str, Array], statistics: dict[str, Array]) -> None:
    for name, value in statistics.items():
        totals[name] = totals[name] + value if name in totals else value


@dataclass(frozen=True)
class _Group:
    """Flat parameters that share a weight decay, their gradients and optimiser state."""

    params: Array
    grads: Array
    state: AdamWState
    weight_decay: float

    def is_one_of(self, parts: Iterable[Array]) -> bool:
        """Whether the parameters are one of `parts`."""
        return any(address_of(self.params) == address_of(part) for part in parts if part.size)


def _gradients_of(parameters: Parameters) -> Parameters:
    """Zeros, at least float32: 16-bit sums over many tokens would lose small terms."""
    return parameters.zeros_like(np.promote_types(parameters.flat.dtype, np.float32))
