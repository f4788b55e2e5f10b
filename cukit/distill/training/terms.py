"""Distillation losses on internal states: residual streams, queries, keys and values.

A term reads the activations of both models and computes gradients with respect to states of the
student's layers, which are added in the student's backward pass. A term is any object with the
interface of `StateTerm`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from cukit.attention import attention_kl, attention_kl_backward
from cukit.core.arrays import Array
from cukit.core.scalars import check_choice
from cukit.distill.losses.attention import relation_kl
from cukit.distill.training.schedule import Schedule, as_schedule
from cukit.errors import ConfigError
from cukit.gemm import matmul
from cukit.models import Activations, Parameters, StateGradients, TransformerConfig
from cukit.models.transformer import LayerActivations


class StateTerm(Protocol):
    """An additional loss between the activations of a student and a teacher.

    Attributes:
        name: name of the term in the statistics; further terms of that name are numbered from 2.
        parameters: trained parameters of the term, such as a projection, or None. The trainer
            updates them like the student's and saves them in its checkpoints.
        weight: weight of the term in the total loss, by step.
    """

    name: str
    parameters: Parameters | None
    weight: Schedule

    def __call__(
        self,
        student: Activations,
        teacher: Activations,
        valid: Array | None,
        state_gradients: StateGradients,
        gradients: Parameters | None,
        *,
        weight: float,
        normalizer: Any,
    ) -> Array:
        """Add weight * gradients of the term to `state_gradients` and `gradients`; return the loss
        without the weight.

        Args:
            student, teacher: activations of forward passes with keep=True on the same tokens.
            valid: float32 [rows], 0 for rows to ignore; None if there are none.
            state_gradients: gradients with respect to states of the student's layers.
            gradients: gradients of `parameters`.
            normalizer: number of rows that the mean is over, which may be more than in this batch:
                a number, or a float32 0-d array on the device.

        Returns:
            float32 0-d array, without synchronising.
        """
        ...


def _squared(a: Array, t: Array) -> tuple[Array, Array]:
    """Mean squared error of every row, and its gradient with respect to a."""
    error = a - t
    return (error * error).mean(axis=-1), error * (2 / t.shape[-1])


def _cosine(a: Array, t: Array) -> tuple[Array, Array]:
    """1 - cos(a, t) of every row, and its gradient with respect to a; 1 and 0 if a row is zero."""
    lengths = [(x * x).sum(axis=-1, keepdims=True) ** 0.5 for x in (a, t)]
    inverse_a, inverse_t = (1 / (x + (x == 0)) for x in lengths)
    cosine = (a * t).sum(axis=-1, keepdims=True) * inverse_a * inverse_t
    gradient = a * (cosine * inverse_a * inverse_a) - t * (inverse_a * inverse_t)
    gradient *= (lengths[0] > 0) & (lengths[1] > 0)
    return 1 - cosine[:, 0], gradient


_ERRORS = {"mse": _squared, "cosine": _cosine}


def _check_layers(
    layer_map: Mapping[int, int],
    student: TransformerConfig,
    teacher: TransformerConfig,
    *,
    first: int,
) -> None:
    """Raises ConfigError if the map is empty or has a layer outside first..num_layers."""
    if not layer_map:
        raise ConfigError("layer_map: expected at least one pair of layers")
    for student_layer, teacher_layer in layer_map.items():
        for whose, layer, count in (
            ("student", student_layer, student.num_layers),
            ("teacher", teacher_layer, teacher.num_layers),
        ):
            if not first <= layer <= count:
                raise ConfigError(
                    f"layer_map: the {whose} has layers {first}..{count}, got {layer}"
                )


class HiddenStateTerm:
    """Error of the student's projected residual streams against the teacher's (FitNets), summed
    over the mapped layers.

        a = h W^T;   "mse": mean (a - t)^2;   "cosine": mean over rows of 1 - a t / (|a| |t|)
        dL/dh = dL/da W,   dL/dW = (dL/da)^T h

    The projection W [teacher_size, student_size] of each mapped layer is trained with the student
    and is not part of the resulting model.

    Args:
        layer_map: student layer -> teacher layer; n means the residual stream after n layers.
        student, teacher: configs of the two models.
        weight: weight of the term in the total loss, a number or a schedule.
        error: "mse" or "cosine", which ignores the norms of the vectors (DistilBERT).
        seed: of the projections' initial values.
        xp: numpy or cupy, as for the models.
    """

    name = "hidden states"

    def __init__(
        self,
        layer_map: Mapping[int, int],
        student: TransformerConfig,
        teacher: TransformerConfig,
        *,
        weight: float | Schedule = 1.0,
        error: str = "mse",
        seed: int = 0,
        xp: ModuleType = np,
    ) -> None:
        check_choice("HiddenStateTerm", "error", error, tuple(_ERRORS))
        self._error = _ERRORS[error]
        _check_layers(layer_map, student, teacher, first=0)
        self.layer_map = dict(layer_map)
        self.weight = as_schedule(weight)
        shape = (teacher.hidden_size, student.hidden_size)
        shapes = {f"projection.{layer}.weight": shape for layer in self.layer_map}
        rng = np.random.default_rng(seed)
        host = Parameters(shapes, student.array_dtype)
        for name in shapes:
            host[name][...] = rng.standard_normal(shape, np.float32) / np.sqrt(shape[1])
        self.parameters: Parameters | None = Parameters(shapes, student.array_dtype, xp)
        self.parameters.load_flat(host.flat)

    def __call__(
        self,
        student: Activations,
        teacher: Activations,
        valid: Array | None,
        state_gradients: StateGradients,
        gradients: Parameters | None,
        *,
        weight: float,
        normalizer: Any,
    ) -> Array:
        assert self.parameters is not None
        assert gradients is not None
        loss = None
        for student_layer, teacher_layer in self.layer_map.items():
            name = f"projection.{student_layer}.weight"
            h, t = student.residual_stream(student_layer), teacher.residual_stream(teacher_layer)
            wide = np.promote_types(h.dtype, np.float32)
            projected = matmul(h, self.parameters[name], transpose_b=True, out_dtype=wide)
            rows, grad_projected = self._error(projected, t.astype(wide))
            if valid is not None:
                rows *= valid
                grad_projected *= valid[:, None]
            part = rows.sum() / normalizer
            loss = part if loss is None else loss + part
            grad_projected = (grad_projected * (weight / normalizer)).astype(h.dtype)
            grad_h = matmul(grad_projected, self.parameters[name], out_dtype=wide)
            state_gradients.add(state_gradients.residual, student_layer, grad_h)
            matmul(grad_projected, h, transpose_a=True, out=gradients[name], accumulate=True)
        return loss


class AttentionTerm:
    """Divergence of the student's attention distributions (attention_kl) and relations
    (relation_kl) from the teacher's, summed over the mapped layers, averaged over heads and tokens.

    Args:
        layer_map: student layer -> teacher layer, 1 .. num_layers.
        student, teacher: configs of the two models.
        weight: weight of the term in the total loss, a number or a schedule.
        attention: whether to compare attention distributions.
        relations: which of the relations "q", "k", "v" to compare (MiniLM: "v", MiniLMv2: all
            three).
        temperature: T of the attention distributions and the relations.
        head_map: for the attention distributions, as in attention_kl.
        relation_heads: for the relations, as in relation_kl.
    """

    name = "attention"
    parameters: Parameters | None = None

    def __init__(
        self,
        layer_map: Mapping[int, int],
        student: TransformerConfig,
        teacher: TransformerConfig,
        *,
        weight: float | Schedule = 1.0,
        attention: bool = True,
        relations: Sequence[str] = (),
        temperature: float = 1.0,
        head_map: Sequence[int] | None = None,
        relation_heads: int | None = None,
    ) -> None:
        _check_layers(layer_map, student, teacher, first=1)
        if not set(relations) <= set("qkv"):
            raise ConfigError(f"relations: expected some of 'q', 'k', 'v', got {relations!r}")
        if not attention and not relations:
            raise ConfigError("AttentionTerm: expected attention, relations or both, got neither")
        self.layer_map = dict(layer_map)
        self.weight = as_schedule(weight)
        self._attention = attention
        self._relations = tuple(relations)
        self._temperature = temperature
        self._head_map = head_map
        self._relation_heads = relation_heads

    def __call__(
        self,
        student: Activations,
        teacher: Activations,
        valid: Array | None,
        state_gradients: StateGradients,
        gradients: Parameters | None,
        *,
        weight: float,
        normalizer: Any,
    ) -> Array:
        loss = None
        for student_layer, teacher_layer in self.layer_map.items():
            s, t = student.layers[student_layer - 1], teacher.layers[teacher_layer - 1]
            options: dict[str, Any] = {
                "causal": True,
                "temperature": self._temperature,
                "normalizer": normalizer,
            }
            if valid is not None:
                dtype = np.float64 if s.q.dtype == np.float64 else np.float32
                options["row_weights"] = valid.reshape(s.q.shape[:2]).astype(dtype)
            parts = []
            if self._attention:
                part, grad_q, grad_k = self._of_distributions(s, t, weight, options)
                parts.append(part)
                self._add_gradient(state_gradients, "q", student_layer, grad_q)
                self._add_gradient(state_gradients, "k", student_layer, grad_k)
            for name in self._relations:
                part, gradient = relation_kl(
                    getattr(t, name), getattr(s, name), relation_heads=self._relation_heads,
                    return_grad=True, grad_loss=weight, deterministic=True, **options,
                )  # fmt: skip
                parts.append(part)
                self._add_gradient(state_gradients, name, student_layer, gradient)
            for part in parts:
                loss = part if loss is None else loss + part
        return loss

    def _of_distributions(
        self, s: LayerActivations, t: LayerActivations, weight: float, options: dict[str, Any]
    ) -> tuple[Array, Array, Array]:
        """The loss of one layer, and the weighted gradients of q and k."""
        known: dict[str, Array] = {}
        if self._temperature == 1:
            known["lse_s"] = s.lse
            if self._head_map is None and t.lse.shape == s.lse.shape:
                known["lse_t"] = t.lse
        loss, *both = attention_kl(
            t.q, t.k, s.q, s.k, head_map=self._head_map, return_lse=True, **known, **options
        )
        gradients = attention_kl_backward(
            t.q,
            t.k,
            s.q,
            s.k,
            *both,
            head_map=self._head_map,
            grad_loss=weight,
            deterministic=True,
            **options,
        )
        return loss, *gradients

    @staticmethod
    def _add_gradient(into: StateGradients, name: str, layer: int, gradient: Array) -> None:
        wide = np.promote_types(gradient.dtype, np.float32)
        into.add(getattr(into, name), layer - 1, gradient.astype(wide))


def evenly_spaced_map(student_layers: int, teacher_layers: int) -> dict[int, int]:
    """Maps student layer n = 1..student_layers to the teacher layer at the same relative depth, at
    least 1."""
    return {
        layer: max(1, round(layer * teacher_layers / student_layers))
        for layer in range(1, student_layers + 1)
    }
