"""Sums gradients over the processes of a data-parallel run, overlapped with the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cukit.core.arrays import Array
from cukit.distributed import Communicator
from cukit.errors import ConfigError
from cukit.models.parameters import Parameters


@dataclass
class _Bucket:
    """A contiguous part of the gradients that is reduced in one call."""

    gradients: Array
    names: frozenset[str]
    missing: set[str]


class GradientReducer:
    """Reduces gradients bucket by bucket, each as soon as the backward pass has filled it.

    Gradients are stored in one flat array, the matrices in the order of the forward pass, so a
    bucket is a slice and nothing is copied. Buckets are formed from the last matrix to the first,
    the order in which the backward pass completes them. On a GPU they are summed on a separate
    stream, concurrently with the backward pass.

    Args:
        communicator: the processes.
        gradients: of all trained parameters; the first, the model's, reports completed gradients.
        bucket_bytes: minimum size of a bucket of matrices, except the last.
    """

    def __init__(
        self, communicator: Communicator, gradients: Sequence[Parameters], bucket_bytes: int
    ) -> None:
        self._communicator = communicator
        self._first, *self._others = gradients
        self._buckets = plan_buckets(self._first, bucket_bytes)
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}

    def watch(self) -> None:
        """Start reducing gradients as the backward pass reports them complete."""
        for bucket in self._buckets:
            bucket.missing = set(bucket.names)
        self._first.on_finished = self._finished

    def _finished(self, names: Sequence[str]) -> None:
        for name in names:
            bucket = self._bucket_of[name]
            if name not in bucket.missing:
                raise ConfigError(
                    f"the gradient of {name} was already complete: an objective with several "
                    "backward passes per batch needs Trainer(overlap=False)"
                )
            bucket.missing.discard(name)
            if not bucket.missing:
                self._reduce(bucket.gradients)

    def finish(self, *more: Array) -> None:
        """Reduce the remaining buckets and the arrays `more`. Later work on the current stream
        waits for all of them."""
        watched = self._first.on_finished is not None
        self._first.on_finished = None
        for bucket in self._buckets:
            if bucket.missing or not watched:
                self._reduce(bucket.gradients)
                bucket.missing = set()
        for each in (*(other.flat for other in self._others), *more):
            self._reduce(each)
        self._communicator.join()

    def _reduce(self, array: Array) -> None:
        with self._communicator.beside():
            self._communicator.all_reduce(array)


def plan_buckets(gradients: Parameters, bucket_bytes: int) -> list[_Bucket]:
    """One bucket of the vectors, which are small and stored after all matrices, then buckets of at
    least `bucket_bytes` with the matrices, from the last to the first."""
    buckets: list[_Bucket] = []
    pending: list[str] = []

    def close() -> None:
        if pending:
            spans = [gradients.span(name) for name in pending]
            part = gradients.flat[min(spans)[0] : max(spans)[1]]
            buckets.append(_Bucket(part, frozenset(pending), set(pending)))
            pending.clear()

    matrices = [name for name, shape in gradients.shapes.items() if len(shape) > 1]
    pending += [name for name in gradients if name not in set(matrices)]
    close()
    size = 0
    for name in reversed(matrices):
        pending.append(name)
        start, end = gradients.span(name)
        size += (end - start) * gradients.flat.itemsize
        if size >= bucket_bytes:
            close()
            size = 0
    close()
    return buckets
