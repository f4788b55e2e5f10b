"""The moving average of a model during its training, for use as a teacher or as the result."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cukit.core.arrays import Array
from cukit.distill.optimizer.ema_update import ema_update
from cukit.distill.training.schedule import Schedule, as_schedule
from cukit.errors import ConfigError
from cukit.models import Parameters, Transformer


class ExponentialAverage:
    """The exponential moving average of a model's parameters (Polyak; mean teacher).

        average += (1 - decay(step)) (parameters - average)    after every step

    The average is kept in float32 and rounded into `model`, in one launch for all parameters. It
    starts from the current parameters. Pass it to `Trainer(average=...)`, which updates it and
    stores it in checkpoints; pass its `model` to `Distiller` as the teacher.

    Args:
        model: the model to average.
        decay: 0..1, a number or a schedule over steps: `Constant`, or `WarmupDecay`, whose smaller
            values in the first steps reduce the weight of the initial parameters.
    """

    def __init__(self, model: Transformer, decay: float | Schedule = 0.999) -> None:
        self.decay = as_schedule(decay)
        parameters = Parameters(model.parameters.shapes, model.parameters.flat.dtype, model.xp)
        parameters.flat[...] = model.parameters.flat
        self.model = Transformer(model.config, parameters)
        wide = np.promote_types(parameters.flat.dtype, np.float32)
        self._average = parameters
        if wide != parameters.flat.dtype:
            self._average = parameters.zeros_like(wide)
            self._average.flat[...] = parameters.flat.astype(wide)

    @property
    def flat(self) -> Array:
        """The average, float32 or wider, as stored in a checkpoint."""
        return self._average.flat

    def update(self, values: Sequence[Array], step: int) -> None:
        """Move the average towards `values`: the parameters, or their float32 masters, as
        `Parameters.groups` splits them. step: from 0."""
        decay = self.decay(step)
        if not 0 <= decay <= 1:
            raise ConfigError(f"step {step}: decay must be in 0..1, got {decay}")
        averages = [each for each in self._average.groups() if each.size]
        copies = [each for each in self.model.parameters.groups() if each.size]
        ema_update(
            averages, values, decay, None if self._average is self.model.parameters else copies
        )

    def load(self, flat: Array) -> None:
        """Replace the average by a saved one."""
        self.flat[...] = flat
        if self._average is not self.model.parameters:
            parameters = self.model.parameters.flat
            parameters[...] = self.flat.astype(parameters.dtype)
