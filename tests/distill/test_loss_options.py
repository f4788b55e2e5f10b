"""Options of all losses on logits: on logits, fused with a head, and in the reference."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

from cukit import distill
from cukit.distill.losses._linear_loss import Head, HeadOptions, plan_linear_loss
from cukit.distill.losses._loss_options import DIVERGENCES, REDUCTIONS
from cukit.errors import ArrayError, ArrayShapeError, ConfigError
from cukit.gemm import matmul
from cukit.reference import losses as reference
from tests.contract import poison_pool, random, to_device, to_host
from tests.distill.gradients import assert_gradient
from tests.quick_run import emulated

IGNORE = -100
ROWS, KNOWN = 10, 6
WIDTH, TEACHER_WIDTH, VOCAB = 61, 65, 53
"""Columns of student and teacher, and vocab_size."""

KINDS = ("cross_entropy", *DIVERGENCES, "renormalise", "bucket", "sampled")

CHOICES = {
    "token_weights": (False, True),
    "transform": ({}, {"logit_scale": 0.6}, {"softcap": 2.5}, {"logit_scale": 1.7, "softcap": 4.0}),
    "teacher": ({}, {"teacher_softcap": 3.0}, {"teacher_logit_scale": 0.5}),
    "padded": (False, True),
    "reduction": REDUCTIONS,
    "normalizer": (None, 7.5),
    "temperature": (1.0, 2.0),
    "square": (False, True),
    "weights": ({}, {"soft_weight": 0.3, "hard_weight": 1.5}),
    "upstream": (False, True),
    "bias": (False, True),
}


def sampled_options(count, kinds=KINDS):
    """A random sample of `count` combinations of options, with about equal numbers of each
    kind of loss."""
    rng = np.random.default_rng(5)
    found = []
    for index in range(count):
        chosen = {name: values[rng.integers(len(values))] for name, values in CHOICES.items()}
        chosen["index"] = index
        found.append(pytest.param(kinds[index % len(kinds)], chosen, id=f"{index}"))
    return found


# In the emulator once per kind, because every case compiles a kernel.
FEW = emulated(lambda chosen: chosen["index"] < len(KINDS))


class Problem:
    """A loss with options: on whole logits, fused with a head, and by the reference."""

    def __init__(self, kind, chosen, dtype="float32", rows=ROWS, hidden=16, seed=1):
        rng = np.random.default_rng(seed)
        self.kind, self.rows = kind, rows
        width, teacher_width = (WIDTH, TEACHER_WIDTH) if chosen["padded"] else (VOCAB, VOCAB)
        self.hidden = random(rng, (rows, hidden), dtype)
        self.weight = random(rng, (width, hidden), dtype, scale=0.5)
        self.bias = random(rng, (width,), dtype) if chosen["bias"] else None
        self.teacher_hidden = random(rng, (rows, hidden + 8), dtype)
        self.teacher_weight = random(rng, (teacher_width, hidden + 8), dtype, scale=0.4)
        self.teacher_bias = random(rng, (teacher_width,), dtype) if chosen["bias"] else None
        self.targets = rng.integers(0, VOCAB, rows)
        self.targets[::4] = IGNORE
        self.token_weights = None
        if chosen["token_weights"]:
            self.token_weights = rng.uniform(0.1, 2, rows).astype(np.float32)
            self.token_weights[1] = 0
        teacher_logits = random(rng, (rows, VOCAB), "float32")
        self.log_probs, self.ids = distill.teacher_top_k(teacher_logits, KNOWN)
        self.samples = rng.integers(0, VOCAB, (rows, KNOWN)).astype(np.int32)
        self.samples[:, 3] = self.samples[:, 0]
        self.sample_weights = rng.uniform(0, 1, (rows, KNOWN)).astype(np.float32)
        self.sample_weights[:, 1] = 0
        self.options = {"reduction": chosen["reduction"], **chosen["transform"]}
        if chosen["padded"]:
            self.options["vocab_size"] = VOCAB
        if chosen["reduction"] in ("mean", "tokens"):
            self.options["normalizer"] = chosen["normalizer"]
        if kind != "cross_entropy":
            self.options |= {"temperature": chosen["temperature"], **chosen["weights"]}
            self.options["scale_by_temperature_squared"] = chosen["square"]
        if kind in DIVERGENCES:
            self.options |= {"divergence": kind, "beta": 0.3, **chosen["teacher"]}
        if kind in ("renormalise", "bucket"):
            self.options["tail"] = kind
        self.grad_loss = None
        if chosen["upstream"]:
            shape = (rows,) if chosen["reduction"] == "none" else ()
            self.grad_loss = np.asarray(rng.standard_normal(shape), np.float32)

    def arrays(self, names, device, wide):
        found = {name: getattr(self, name) for name in names}
        if wide:
            found = {
                name: a.astype(np.float64) if a is not None and a.dtype.kind != "i" else a
                for name, a in found.items()
            }
        return dict(zip(found, to_device(device, *found.values()), strict=True))

    def teacher(self, device, wide):
        if self.kind in ("renormalise", "bucket"):
            found = self.arrays(("log_probs", "ids"), device, wide)
            return {"teacher_log_probs": found["log_probs"], "teacher_ids": found["ids"]}
        if self.kind == "sampled":
            found = self.arrays(("samples", "sample_weights"), device, wide)
            return {"sample_ids": found["samples"], "sample_weights": found["sample_weights"]}
        return {}

    def common(self, device, wide):
        names = ("targets", "token_weights", "grad_loss")
        return self.options | self.arrays(names, device, wide) | self.teacher(device, wide)

    @property
    def name(self):
        if self.kind in DIVERGENCES:
            return "distillation_loss"
        return {"cross_entropy": "cross_entropy", "sampled": "sampled_distillation_loss"}.get(
            self.kind, "topk_distillation_loss"
        )

    def logits(self, which=""):
        hidden, weight, bias = (
            getattr(self, f"{which}{name}") for name in ("hidden", "weight", "bias")
        )
        wide = hidden.astype(np.float64) @ weight.astype(np.float64).T
        return (wide if bias is None else wide + bias.astype(np.float64)).astype(hidden.dtype)

    def on_logits(self, device, *, module=distill, wide=False, **extra):
        """(loss, gradient of the logits)."""
        given = {"student_logits": self.logits()}
        if self.kind == "cross_entropy":
            given = {"logits": self.logits()}
        if self.kind in DIVERGENCES:
            given["teacher_logits"] = self.logits("teacher_")
        if wide:
            given = {name: array.astype(np.float64) for name, array in given.items()}
        given = dict(zip(given, to_device(device, *given.values()), strict=True))
        function = getattr(module, self.name)
        return function(**given, **self.common(device, wide), return_grad=True, **extra)

    def fused(self, device, *, module=distill, wide=False, **extra):
        names = ["hidden", "weight", "bias"]
        if self.kind in DIVERGENCES:
            names += ["teacher_hidden", "teacher_weight", "teacher_bias"]
        function = getattr(module, f"linear_{self.name}")
        return function(**self.arrays(names, device, wide), **self.common(device, wide), **extra)


def check_close(got, exact, name, tolerance=2e-5):
    got, exact = to_host(got).astype(np.float64), to_host(exact)
    scale = max(np.abs(exact).max(initial=0.0), 1e-6)
    np.testing.assert_allclose(got, exact, rtol=tolerance, atol=tolerance * scale, err_msg=name)


@FEW
@pytest.mark.parametrize(("kind", "chosen"), sampled_options(60))
def test_on_logits(device, kind, chosen):
    problem = Problem(kind, chosen)
    loss, grad = problem.on_logits("cpu", module=reference, wide=True)
    poison_pool(device)
    got_loss, got_grad = problem.on_logits(device)
    check_close(got_loss, loss, "loss")
    check_close(got_grad, grad, "grad")
    assert not to_host(got_grad)[problem.targets == IGNORE].any()
    assert not to_host(got_grad)[:, VOCAB:].any()


@FEW
@pytest.mark.parametrize(("kind", "chosen"), sampled_options(40))
@pytest.mark.parametrize("chunk_tokens", [4])
def test_fused_equals_unfused(device, kind, chosen, chunk_tokens):
    """Compared with the loss on the head's logits, and its gradient through them."""
    problem = Problem(kind, chosen)
    poison_pool(device)
    got = problem.fused(device, chunk_tokens=chunk_tokens)
    loss, grad = problem.on_logits("cpu", module=reference, wide=True)
    check_close(got.loss, loss, "loss")
    hidden, weight = (a.astype(np.float64) for a in (problem.hidden, problem.weight))
    check_close(got.grad_hidden, grad @ weight, "grad_hidden")
    check_close(got.grad_weight, grad.T @ hidden, "grad_weight")
    assert (got.grad_bias is None) == (problem.bias is None)
    if problem.bias is not None:
        check_close(got.grad_bias, grad.sum(0), "grad_bias")
    if kind != "cross_entropy":
        wide = problem.fused("cpu", module=reference, wide=True)
        check_close(got.soft_loss, wide.soft_loss, "soft_loss")
        check_close(got.hard_loss, wide.hard_loss, "hard_loss")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transform", CHOICES["transform"][1:], ids=str)
def test_gradients_through_scale_and_cap(rng, kind, transform):
    chosen = {name: values[0] for name, values in CHOICES.items()}
    chosen |= {"transform": transform, "token_weights": True, "reduction": "none", "square": True}
    chosen |= {"temperature": 1.5, "weights": {"soft_weight": 0.7, "hard_weight": 0.4}}
    problem = Problem(kind, chosen, rows=3)
    given = problem.common("cpu", wide=True)
    given.pop("grad_loss")
    if kind in DIVERGENCES:
        given["teacher_logits"] = problem.logits("teacher_").astype(np.float64)
    function = getattr(reference, problem.name)

    def gradient(grad_loss, z):
        return function(z, **given, return_grad=True, grad_loss=grad_loss)[1]

    logits = problem.logits().astype(np.float64)
    assert_gradient(lambda z: function(z, **given), gradient, logits, rng)


@emulated(lambda kind, reduction: (KINDS.index(kind) + REDUCTIONS.index(reduction)) % 6 == 0)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["mean", "tokens"])
def test_micro_batches_equal_one_batch(device, kind, reduction):
    """The normalizer is the token count or the total token weight of the whole batch."""
    chosen = {name: values[-1] for name, values in CHOICES.items()}
    chosen |= {"reduction": reduction, "normalizer": None, "upstream": False}
    problem = Problem(kind, chosen)
    whole = problem.fused(device)
    kept = problem.targets != IGNORE
    total = problem.token_weights[kept].sum() if reduction == "mean" else kept.sum()
    problem.options["normalizer"] = float(total)
    grad_weight = to_device(device, np.zeros(problem.weight.shape, np.float32))[0]
    grad_bias = to_device(device, np.zeros(problem.bias.shape, np.float32))[0]
    per_row = ("hidden", "teacher_hidden", "targets", "token_weights", "log_probs", "ids",
               "samples", "sample_weights")  # fmt: skip
    everything = {name: getattr(problem, name) for name in per_row}
    parts = []
    for rows in (slice(0, 3), slice(3, ROWS)):
        for name, array in everything.items():
            setattr(problem, name, array[rows])
        parts.append(problem.fused(device, grad_weight=grad_weight, grad_bias=grad_bias))
    assert parts[1].grad_weight is grad_weight
    assert parts[1].grad_bias is grad_bias
    check_close(sum(to_host(part.loss) for part in parts), whole.loss, "loss")
    grad_hidden = np.concatenate([to_host(part.grad_hidden) for part in parts])
    check_close(grad_hidden, whole.grad_hidden, "grad_hidden")
    check_close(grad_weight, whole.grad_weight, "grad_weight")
    check_close(grad_bias, whole.grad_bias, "grad_bias")


@pytest.mark.parametrize("kind", ["cross_entropy", "forward_kl", "jsd", "bucket", "sampled"])
def test_the_contents_of_padding_do_not_matter(device, kind):
    chosen = {name: values[0] for name, values in CHOICES.items()} | {"padded": True}
    problem = Problem(kind, chosen, "bfloat16")
    plain = problem.on_logits(device)
    student, teacher = problem.logits(), problem.logits("teacher_")
    student[:, VOCAB:], teacher[:, VOCAB:] = np.nan, np.inf
    problem.logits = partial(
        lambda known, which="": known[which], {"": student, "teacher_": teacher}
    )
    for before, after in zip(plain, problem.on_logits(device), strict=True):
        assert to_host(before).tobytes() == to_host(after).tobytes()
    apart = to_host(plain[1]).copy()
    _, grad = problem.on_logits(device, inplace=True)
    assert to_host(grad).tobytes() == apart.tobytes()


def test_padded_vocabularies_of_two_sizes(device, rng):
    """Vocabularies of student and teacher with different padding: the loss is over the first
    vocab_size tokens of both."""
    size, wide = 1519 * 8, 1520 * 8 + 64
    student, teacher = random(rng, (2, size), "bfloat16"), random(rng, (2, wide), "bfloat16")
    options = {"divergence": "jsd", "reduction": "none", "return_grad": True}
    placed = to_device(device, student, teacher)
    loss, grad = distill.distillation_loss(*placed, vocab_size=size, **options)
    placed = to_device(device, student, teacher[:, :size].copy())
    short_loss, short = distill.distillation_loss(*placed, **options)
    assert to_host(loss).tobytes() == to_host(short_loss).tobytes()
    assert to_host(grad).tobytes() == to_host(short).tobytes()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("scale", [0.3, 3.0, 40.0])
def test_softcap_is_accurate_near_and_beyond_the_cap(device, rng, mixed, scale):
    """Logits far below the cap, and far beyond it."""
    student = random(rng, (4, 300), "float32", scale=scale)
    teacher = random(rng, (4, 300), "float32", scale=scale)
    options = {"softcap": 5.0, "teacher_softcap": 7.0, "reduction": "none", "return_grad": True}
    if mixed:
        options |= {"targets": np.arange(4), "hard_weight": 0.5}
    wide = student.astype(np.float64), teacher.astype(np.float64)
    exact_loss, exact = reference.distillation_loss(*wide, **options)
    if "targets" in options:
        options["targets"] = to_device(device, options["targets"])[0]
    loss, grad = distill.distillation_loss(*to_device(device, student, teacher), **options)
    np.testing.assert_allclose(to_host(loss), exact_loss, rtol=1e-5)
    np.testing.assert_allclose(to_host(grad), exact, rtol=2e-4, atol=2e-7)


@emulated(lambda divergence: divergence in ("forward_kl", "jsd"))
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_capped_bfloat16_is_never_negative(device, rng, divergence):
    student = random(rng, (16, 501), "bfloat16", scale=4)
    nearly = student.copy()
    nearly[:, ::7] = np.nextafter(nearly[:, ::7], np.array(9, student.dtype))
    options = {"divergence": divergence, "softcap": 6.0, "teacher_softcap": 6.0}
    for teacher in (student, nearly):
        placed = to_device(device, student, teacher)
        loss = to_host(distill.distillation_loss(*placed, reduction="none", **options))
        assert (loss >= 0).all()
        assert loss.any() == (teacher is nearly)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_bias_is_rounded_with_the_product(device, rng, dtype):
    hidden, weight, bias = random(rng, (8, 16), dtype), random(rng, (40, 16), dtype), None
    bias = random(rng, (40,), dtype, scale=3)
    placed = to_device(device, hidden, weight, bias)
    ids = to_device(device, rng.integers(0, 40, 8))[0]
    fused = distill.linear_cross_entropy(*placed[:2], ids, bias=placed[2])
    logits = matmul(hidden.astype(np.float32), weight.astype(np.float32), transpose_b=True)
    logits = (logits + bias.astype(np.float32)).astype(hidden.dtype)
    loss, grad = distill.cross_entropy(logits, to_host(ids), return_grad=True)
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(to_host(fused.loss), to_host(loss), rtol=tolerance)
    sums = grad.astype(np.float64).sum(0)
    np.testing.assert_allclose(to_host(fused.grad_bias), sums, atol=tolerance)


@pytest.mark.parametrize("tokens", [100, 4096, 8192])
@pytest.mark.parametrize("vocab_size", [32768, 128256, 256000])
def test_chunks_fit_the_workspace_limit(tokens, vocab_size):
    hidden, weight = (np.broadcast_to(np.float32(0), (rows, 64)) for rows in (tokens, vocab_size))
    for limit in (1 << 30, 1 << 28, 2 * 4 * vocab_size):
        config = HeadOptions(workspace_bytes=limit).plan("op", Head(hidden, weight, None), 2)
        assert 2 * 4 * vocab_size * config.chunk_tokens <= limit
        covered = [t for chunk in config.chunks() for t in range(chunk.start, chunk.stop)]
        assert covered == list(range(tokens))
    assert plan_linear_loss(4096, 2304, 2 * 256000, None, 1048).chunk_tokens == 1024


LOGITS = np.ones((2, 4), np.float32)
IDS = np.zeros((2, 1), np.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"token_weights": np.ones(3, np.float32)}, ArrayShapeError, "token_weights must have"),
        ({"token_weights": np.array([1, -1], np.float32)}, ArrayError, "token_weights must be 0"),
        ({"token_weights": np.array([1, np.nan], np.float32)}, ArrayError, "token_weights must be"),
        ({"softcap": 0.0}, ConfigError, "softcap must be a finite number above 0"),
        ({"logit_scale": -1.0}, ConfigError, "logit_scale must be a finite number above 0"),
        ({"vocab_size": 5}, ArrayShapeError, "vocab_size must be at most 4"),
        ({"vocab_size": 0}, ConfigError, "vocab_size must be an integer of 1 or more"),
        ({"reduction": "tokens", "normalizer": 0}, ConfigError, "normalizer must be above 0"),
        ({"reduction": "sum", "normalizer": 2}, ConfigError, "normalizer needs reduction"),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    calls = {
        "cross_entropy": (LOGITS, np.zeros(2, np.int32)),
        "distillation_loss": (LOGITS, LOGITS),
        "kl_divergence": (LOGITS, LOGITS),
        "topk_distillation_loss": (LOGITS, -np.ones((2, 1), np.float32), IDS),
        "sampled_distillation_loss": (LOGITS, IDS),
        "linear_cross_entropy": (LOGITS, LOGITS.repeat(2, 0), np.zeros(2, np.int32)),
        "linear_distillation_loss": (LOGITS, LOGITS.repeat(2, 0)) * 2,
        "linear_kl_divergence": (LOGITS, LOGITS.repeat(2, 0)) * 2,
        "linear_sampled_distillation_loss": (LOGITS, LOGITS.repeat(2, 0), IDS),
    }
    for name, given in calls.items():
        with pytest.raises(error, match=f"{name}: {message}"):
            getattr(distill, name)(*given, **arguments)


@pytest.mark.parametrize("name", ["kl_divergence", "linear_kl_divergence"])
def test_a_mismatch_of_vocabularies_names_its_fix(name):
    wide = np.ones((2, 6), np.float32)
    given = (LOGITS, wide)
    if name.startswith("linear"):
        given = (LOGITS, np.ones((4, 4), np.float32), LOGITS, np.ones((6, 4), np.float32))
    with pytest.raises(ArrayShapeError, match=r"vocabularies must be the same.* pass vocab_size=4"):
        getattr(distill, name)(*given)
    getattr(distill, name)(*given, vocab_size=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_tokens": 2, "workspace_bytes": 99}, "mutually exclusive"),
        ({"grad_bias": np.zeros(4, np.float32)}, "grad_bias needs a bias"),
    ],
)
def test_errors_of_heads(options, message):
    with pytest.raises(ConfigError, match=message):
        distill.linear_cross_entropy(LOGITS, np.ones((4, 4), np.float32), IDS[:, 0], **options)


def test_the_options_are_sampled_widely():
    chosen = [param.values[1] for param in sampled_options(60)]
    for name, values in CHOICES.items():
        assert all(any(each[name] == value for each in chosen) for value in values), name
    assert {param.values[0] for param in sampled_options(60)} == set(KINDS)
    assert len(list(itertools.product(*CHOICES.values()))) > 1000
