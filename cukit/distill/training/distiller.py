"""Training objectives: cross-entropy alone, or mixed with losses against a teacher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from cukit.core.arrays import Array
from cukit.distill.losses._loss_options import LossOptions, common_vocabulary
from cukit.distill.losses.linear_cross_entropy import linear_cross_entropy
from cukit.distill.losses.linear_distillation_loss import linear_distillation_loss
from cukit.distill.losses.linear_topk_distillation_loss import linear_topk_distillation_loss
from cukit.distill.training.schedule import Schedule, as_schedule
from cukit.distill.training.signals import OfflineTeacher, TeacherSignals
from cukit.distill.training.terms import StateTerm
from cukit.errors import ConfigError
from cukit.models import Activations, Parameters, StateGradients, Transformer
from cukit.reference.losses import LinearKlResult

IGNORE_INDEX = -100


class Objective(Protocol):
    """A loss over a model, with its gradients, which `Trainer` minimises."""

    model: Transformer

    def trained(self) -> list[Parameters]:
        """The parameters that the optimiser updates, the model's first."""
        ...

    def loss_and_gradients(
        self,
        tokens: Array,
        targets: Array,
        gradients: Sequence[Parameters],
        *,
        step: int,
        normalizer: Any,
    ) -> dict[str, Array]:
        """Add the gradients on one batch to `gradients`, one entry for each of `trained()`.

        Args:
            tokens, targets: int32 [batch, seq_len]; targets of -100 are ignored.
            step: number of the step, for the schedules.
            normalizer: divisor of the mean: the number of targets that are not ignored in the whole
                step, over all its batches and processes. A number, or a float32 0-d array on the
                device.

        For batches with a teacher's signals, `Trainer` passes these as another argument, `signals`.

        Returns:
            Statistics by name, "loss" first, as float32 0-d arrays on the device. Reading one waits
            for the GPU, so callers read them only to show them.
        """
        ...


class LanguageModelling:
    """Next-token cross-entropy, for a teacher or for a student trained without one."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    def trained(self) -> list[Parameters]:
        return [self.model.parameters]

    def loss_and_gradients(
        self,
        tokens: Array,
        targets: Array,
        gradients: Sequence[Parameters],
        *,
        step: int,
        normalizer: Any,
        signals: TeacherSignals | None = None,
    ) -> dict[str, Array]:
        model = self.model
        activations = model.forward(tokens)
        result = linear_cross_entropy(
            activations.hidden,
            model.head,
            targets.reshape(-1),
            ignore_index=IGNORE_INDEX,
            normalizer=normalizer,
            grad_weight=gradients[0][model.config.head_name],
        )
        model.backward(activations, result.grad_hidden, gradients[0])
        return {"loss": result.loss}


class Distiller:
    """Trains a student on a teacher's probabilities and, with `terms`, on its internal states.

        loss = alpha T^2 divergence(teacher, student at temperature T) + (1 - alpha) cross-entropy
             + sum of weight * term over `terms`

    (Hinton et al. 2015). The factor T^2 keeps the size of the soft gradient independent of T.
    The full logits are never stored: `linear_distillation_loss` processes the tokens in chunks.

    Args:
        student, teacher: models over the same vocabulary on the same device. Only the student
            is trained. The teacher may be a recorded one, `OfflineBatches.teacher()`, with
            `OfflineBatches` as the trainer's windows. Then the divergence is the forward KL over
            the teacher's top-k tokens, and there can be no `terms`.
        alpha: weight of the soft loss, 0..1, a number or a schedule over steps.
        temperature: above 0, a number or a schedule over steps.
        divergence: "forward_kl" or another of :func:`distillation_loss`.
        beta: the divergence's parameter, a number or a schedule over steps.
        token_weights: a function from tokens and targets, int32 [batch, seq_len], to the weights of
            the losses at these positions, float32 [batch, seq_len], 0 or more.
        vocab_size: number of leading tokens in use; needed if the models' vocabularies are padded
            to different sizes.
        logit_scale, softcap, teacher_logit_scale, teacher_softcap: of both models' logits, as in
            :func:`distillation_loss`.
        terms: additional losses on internal states of the models; see `StateTerm`.
    """

    def __init__(
        self,
        student: Transformer,
        teacher: Transformer | OfflineTeacher,
        *,
        alpha: float | Schedule = 0.9,
        temperature: float | Schedule = 1.0,
        divergence: str = "forward_kl",
        beta: float | Schedule = 0.5,
        token_weights: Callable[[Array, Array], Array] | None = None,
        vocab_size: int | None = None,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_softcap: float | None = None,
        terms: Sequence[StateTerm] = (),
    ) -> None:
        of_teacher = teacher if isinstance(teacher, OfflineTeacher) else teacher.config
        sizes = {"teacher": of_teacher.vocab_size, "student": student.config.vocab_size}
        common_vocabulary("Distiller", vocab_size, **sizes)
        if isinstance(teacher, OfflineTeacher):
            _check_offline(divergence, terms, teacher_logit_scale, teacher_softcap)
        elif student.xp is not teacher.xp:
            raise ConfigError("teacher: must be on the same device as the student")
        self.model, self.teacher = student, teacher
        self.alpha, self.temperature = as_schedule(alpha), as_schedule(temperature)
        self.divergence, self.beta = divergence, as_schedule(beta)
        self.token_weights, self.vocab_size = token_weights, vocab_size
        self._logits: dict[str, Any] = {
            "logit_scale": logit_scale,
            "softcap": softcap,
            "teacher_logit_scale": teacher_logit_scale,
            "teacher_softcap": teacher_softcap,
        }
        LossOptions(divergence, **self._logits).check("Distiller", None)
        self.terms = tuple(terms)
        self._names = _unique([term.name for term in self.terms])

    def trained(self) -> list[Parameters]:
        own = [term.parameters for term in self.terms]
        return [self.model.parameters, *(p for p in own if p is not None)]

    def loss_and_gradients(
        self,
        tokens: Array,
        targets: Array,
        gradients: Sequence[Parameters],
        *,
        step: int,
        normalizer: Any,
        signals: TeacherSignals | None = None,
    ) -> dict[str, Array]:
        alpha, temperature = self.alpha(step), self.temperature(step)
        if not 0 <= alpha <= 1 or temperature <= 0:
            raise ConfigError(
                f"step {step}: alpha must be in 0..1 and temperature above 0, "
                f"got {alpha} and {temperature}"
            )
        student = self.model
        weights = None if self.token_weights is None else self.token_weights(tokens, targets)
        options: dict[str, Any] = {
            "targets": targets.reshape(-1),
            "token_weights": None if weights is None else weights.reshape(-1),
            "vocab_size": self.vocab_size,
            "temperature": temperature,
            "scale_by_temperature_squared": True,
            "soft_weight": alpha,
            "hard_weight": 1 - alpha,
            "ignore_index": IGNORE_INDEX,
            "normalizer": normalizer,
            "grad_weight": gradients[0][student.config.head_name],
        }
        teacher_activations: Activations | None = None
        if isinstance(self.teacher, OfflineTeacher):
            self.teacher.check(temperature, step)
            activations = student.forward(tokens)
            result = self._from_signals(activations, signals, options)
        else:
            teacher_activations = self.teacher.forward(tokens, keep=bool(self.terms))
            activations = student.forward(tokens)
            result = linear_distillation_loss(
                activations.hidden,
                student.head,
                teacher_activations.hidden,
                self.teacher.head,
                divergence=self.divergence,
                beta=self.beta(step),
                **self._logits,
                **options,
            )
        statistics = {"loss": result.loss, "soft": result.soft_loss, "hard": result.hard_loss}
        state_gradients = StateGradients()
        if teacher_activations is not None and self.terms:
            valid = (targets.reshape(-1) != IGNORE_INDEX).astype(np.float32)
            own_gradients = iter(gradients[1:])
            for name, term in zip(self._names, self.terms, strict=True):
                weight = term.weight(step)
                value = term(
                    activations,
                    teacher_activations,
                    valid,
                    state_gradients,
                    None if term.parameters is None else next(own_gradients),
                    weight=weight,
                    normalizer=normalizer,
                )
                statistics[name] = value
                statistics["loss"] = statistics["loss"] + weight * value
        student.backward(activations, result.grad_hidden, gradients[0], state_gradients)
        return statistics

    def _from_signals(
        self, activations: Activations, signals: TeacherSignals | None, options: dict[str, Any]
    ) -> LinearKlResult:
        """The loss from a recorded teacher's signals."""
        assert isinstance(self.teacher, OfflineTeacher)
        if signals is None:
            raise ConfigError("Distiller: an offline teacher needs OfflineBatches as the windows")
        k = signals.ids.shape[-1]
        return linear_topk_distillation_loss(
            activations.hidden,
            self.model.head,
            signals.log_probs.reshape(-1, k),
            signals.ids.reshape(-1, k),
            tail=self.teacher.tail,
            logit_scale=self._logits["logit_scale"],
            softcap=self._logits["softcap"],
            **options,
        )


def _unique(names: Sequence[str]) -> list[str]:
    """`names` with repetitions numbered: "attention", "attention 2"."""
    counts = [names[: index + 1].count(name) for index, name in enumerate(names)]
    return [f"{name} {n}" if n > 1 else name for name, n in zip(names, counts, strict=True)]


def _check_offline(
    divergence: str, terms: Sequence[StateTerm], logit_scale: float, softcap: float | None
) -> None:
    """Raises ConfigError for options that need a running teacher."""
    if divergence != "forward_kl":
        raise ConfigError(
            f"divergence: must be 'forward_kl' with an offline teacher, got {divergence!r}"
        )
    if terms:
        raise ConfigError("terms: an offline teacher has no activations to compare with")
    if logit_scale != 1.0 or softcap is not None:
        raise ConfigError(
            "teacher_logit_scale, teacher_softcap: apply them when recording an offline teacher"
        )
