"""Losses on tensors, compared with those on arrays for every option."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is an extra: pip install 'cukit[torch]'")

import cukit  # noqa: E402
import cukit.torch as ckt  # noqa: E402
from cukit.errors import ArrayError, ConfigError  # noqa: E402
from cukit.torch._operator_definitions import HEAD_LOSSES, LOSSES, NOT_OPTIONS  # noqa: E402

ALL = [*LOSSES, *HEAD_LOSSES]
by_name = pytest.mark.parametrize("loss", ALL, ids=lambda each: each.name)

# For each option, a value that all losses with this option are tested with.
VALUES = {
    "ignore_index": 3, "reduction": "sum", "normalizer": 7.0, "temperature": 1.7,
    "scale_by_temperature_squared": True, "divergence": "reverse_kl", "beta": 0.3,
    "soft_weight": 0.4, "hard_weight": 0.6, "tail": "bucket", "chunk_tokens": 2,
    "logit_scale": 0.7, "softcap": 3.0, "teacher_logit_scale": 0.6, "teacher_softcap": 2.0,
    "vocab_size": 8, "token_weights": np.linspace(0.5, 1.5, 5), "bias": np.linspace(-1, 1, 9),
    "teacher_bias": np.linspace(1, -1, 9), "workspace_bytes": 1 << 20,
}  # fmt: skip
TOGETHER = {
    "beta": {"divergence": "jsd"},
    "scale_by_temperature_squared": {"temperature": 1.7},
}


def arrays(loss) -> tuple[list[np.ndarray], np.ndarray]:
    """The arguments of the loss, and targets."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 9, 5)
    targets[targets == 8] = 0  # VALUES sets vocab_size to 8
    targets[:2] = 3  # VALUES sets ignore_index to 3
    names = list(inspect.signature(loss.function).parameters)
    if loss.result is not None:
        made = [rng.standard_normal(shape) for shape in ((5, 8), (9, 8))]
        if "teacher_hidden" in loss.teachers:
            made += [rng.standard_normal(shape) for shape in ((5, 12), (9, 12))]
    else:
        made = [rng.standard_normal((5, 9))]
        if "teacher_logits" in names:
            made.append(rng.standard_normal((5, 9)))
    top, ids = cukit.teacher_top_k(rng.standard_normal((5, 8)), 3)
    if "sample_ids" in names:
        made += ids, np.exp(top)
    elif "teacher_log_probs" in names:
        made += top, ids
    return made, targets


@by_name
def test_arguments_equal_those_of_the_array_function(loss) -> None:
    own = inspect.signature(getattr(ckt, loss.name)).parameters
    theirs = inspect.signature(loss.function).parameters
    assert list(own) == [name for name in theirs if name not in NOT_OPTIONS]
    assert inspect.getdoc(getattr(ckt, loss.name))


@by_name
def test_every_option_is_passed_on(loss) -> None:
    made, targets = arrays(loss)
    parameters = inspect.signature(loss.function).parameters
    options = [
        name for name, each in parameters.items()
        if each.kind is each.KEYWORD_ONLY and name not in (*NOT_OPTIONS, "targets")
    ]  # fmt: skip
    unknown = [
        name for name in options
        if name not in VALUES and parameters[name].default is not None
        and not isinstance(parameters[name].default, bool)
    ]  # fmt: skip
    assert not unknown, f"add values for {unknown} to VALUES"
    for name in options:
        if name not in VALUES:
            continue
        chosen = {**TOGETHER.get(name, {}), name: VALUES[name], "targets": targets}
        result = loss.function(*made, **chosen)
        want = result[0] if loss.result is not None else result
        tensors = [torch.from_numpy(np.array(each)) for each in made]
        tensors[0].requires_grad_()
        given = {
            each: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for each, value in chosen.items()
        }
        got = getattr(ckt, loss.name)(*tensors, **given)
        np.testing.assert_allclose(got.detach().numpy(), want, rtol=1e-12, err_msg=name)
        got.sum().backward()
        if loss.result is None:
            grad = loss.function(*made, **chosen, return_grad=True)[1]
        else:
            grad = result.grad_hidden
        np.testing.assert_allclose(tensors[0].grad.numpy(), grad, rtol=1e-9, atol=1e-14)


@by_name
def test_a_teacher_that_requires_grad_is_rejected(loss) -> None:
    made, _ = arrays(loss)
    names = list(inspect.signature(loss.function).parameters)
    function = getattr(ckt, loss.name)
    for teacher in loss.teachers:
        if names.index(teacher) >= len(made):
            continue
        tensors = {
            name: torch.from_numpy(np.array(each)) for name, each in zip(names, made, strict=False)
        }
        tensors[loss.student].requires_grad_()
        tensors[teacher].requires_grad_()
        message = f"{loss.name}: {teacher} requires grad, but a teacher gets no gradient"
        with pytest.raises(ConfigError, match=message):
            function(*tensors.values())
        with pytest.raises(ConfigError, match=message):
            function(**tensors)
        with torch.no_grad():
            function(**tensors)


def test_parts_of_a_fused_loss() -> None:
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(9, 8)
    teacher, head = torch.randn(4, 6), torch.randn(9, 6)
    total, soft, hard = ckt.linear_distillation_loss(
        hidden, weight, teacher, head, targets=torch.arange(4), soft_weight=0.3, hard_weight=0.7,
        return_parts=True,
    )  # fmt: skip
    torch.testing.assert_close(total, 0.3 * soft + 0.7 * hard)
    assert total.requires_grad
    assert not soft.requires_grad


def test_a_normalizer_may_be_a_tensor_on_the_device() -> None:
    logits, targets = torch.randn(4, 9), torch.arange(4)
    by_number = ckt.cross_entropy(logits, targets, normalizer=8)
    torch.testing.assert_close(
        ckt.cross_entropy(logits, targets, normalizer=torch.tensor(8.0)), by_number
    )


def test_errors_name_the_argument() -> None:
    logits = torch.randn(2, 5)
    with pytest.raises(TypeError, match="cross_entropy: no argument 'label_smoothing'; expected"):
        ckt.cross_entropy(logits, torch.zeros(2, dtype=torch.long), label_smoothing=0.1)
    with pytest.raises(ArrayError, match=r"5.*6|6.*5"):
        ckt.kl_divergence(logits, torch.randn(2, 6))
    with pytest.raises(ConfigError, match="temperature must be a finite number above 0"):
        ckt.kl_divergence(logits, logits, temperature=0.0)


def test_cross_entropy_equals_that_of_torch() -> None:
    logits, targets = torch.randn(6, 11, requires_grad=True), torch.tensor([0, 3, -100, 1, 10, 2])
    want = torch.nn.functional.cross_entropy(logits, targets)
    got = ckt.cross_entropy(logits, targets)
    torch.testing.assert_close(got, want)
    for one, other in zip(
        torch.autograd.grad(got, logits), torch.autograd.grad(want, logits), strict=True
    ):
        torch.testing.assert_close(one, other)
