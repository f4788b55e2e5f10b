"""torch.compile without graph breaks; CUDA graphs and streams on the GPU."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is an extra: pip install 'cukit[torch]'")

from torch import nn  # noqa: E402

import cukit.torch as ckt  # noqa: E402
from cukit.errors import ConfigError  # noqa: E402


class Student(nn.Module):
    """A model with every kind of block and a fused loss."""

    def __init__(self, hidden: int = 32, heads: int = 2, vocab: int = 48) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.norm, self.last = ckt.RMSNorm(hidden), ckt.RMSNorm(hidden)
        self.mlp = ckt.SwiGLU(hidden, 2 * hidden)
        self.side = ckt.LinearGELU(hidden, hidden)
        self.attention = ckt.FlashAttention(causal=True)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, x, teacher, teacher_weight):
        batch, seq, hidden = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, seq, 3, self.heads, -1).unbind(2)
        mixed = self.attention(q, k, v).reshape(batch, seq, hidden)
        y, x = self.last(mixed, x)
        x = x + self.mlp(y) + self.side(y)
        return ckt.linear_distillation_loss(
            x, self.head.weight, teacher, teacher_weight, divergence="jsd", temperature=2.0
        )


def inputs(device: str, dtype, seq: int = 8) -> tuple:
    torch.manual_seed(seq)
    shapes = (2, seq, 32), (2, seq, 64), (48, 64)
    return tuple(torch.randn(shape).to(device=device, dtype=dtype) for shape in shapes)


def losses_and_gradients(function, module, args) -> tuple:
    module.zero_grad()
    loss = function(*args)
    loss.backward()
    return loss.detach(), [each.grad.clone() for each in module.parameters()]


@pytest.mark.parametrize("kind", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(kind: str) -> None:
    torch.manual_seed(0)
    student, args = Student(), inputs("cpu", torch.float32)
    compiled = torch.compile(student, backend=kind, fullgraph=True)
    want, gradients = losses_and_gradients(student, student, args)
    got, again = losses_and_gradients(compiled, student, args)
    torch.testing.assert_close(got, want)
    for one, other in zip(again, gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_lengths_may_be_dynamic() -> None:
    torch.manual_seed(0)
    student = Student()
    compiled = torch.compile(student, backend="aot_eager", fullgraph=True, dynamic=True)
    counter = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for seq in (5, 8, 11):
        args = inputs("cpu", torch.float32, seq)
        torch.testing.assert_close(compiled(*args), student(*args))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == counter + 1


@pytest.mark.slow
def test_inductor_on_the_cpu() -> None:
    torch.manual_seed(0)
    student, args = Student(), inputs("cpu", torch.float32)
    compiled = torch.compile(student, fullgraph=True)
    want, gradients = losses_and_gradients(student, student, args)
    got, again = losses_and_gradients(compiled, student, args)
    torch.testing.assert_close(got, want)
    for one, other in zip(again, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_teacher_that_requires_grad_is_rejected_when_compiling() -> None:
    logits = torch.randn(3, 8, requires_grad=True)
    for function in (ckt.kl_divergence, torch.compile(ckt.kl_divergence, backend="eager")):
        with pytest.raises((ConfigError, RuntimeError), match="teacher_logits requires grad"):
            function(logits, logits)


# --- On the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_inductor() -> None:
    torch.manual_seed(0)
    student = Student().to("cuda", torch.bfloat16)
    args = inputs("cuda", torch.bfloat16)
    compiled = torch.compile(student, fullgraph=True)
    want, gradients = losses_and_gradients(student, student, args)
    got, again = losses_and_gradients(compiled, student, args)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-3)
    for one, other in zip(again, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-3)


@pytest.mark.gpu
def test_a_training_step_in_a_cuda_graph() -> None:
    """Replays of one captured step with new inputs give the losses and weights of eager steps."""
    torch.manual_seed(0)
    plain = Student().to("cuda", torch.bfloat16)
    graphed = copy.deepcopy(plain)
    batches = [inputs("cuda", torch.bfloat16, 8)]
    batches += [tuple(torch.roll(each, 1, 0) for each in batches[0]) for _ in range(2)]
    static = tuple(each.clone() for each in batches[0])

    def step(student, args):
        loss = student(*args)
        loss.backward()
        with torch.no_grad():
            for weight in student.parameters():
                weight -= 0.1 * weight.grad
                weight.grad.zero_()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(graphed, static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(graphed, static)
    for _ in range(3):
        step(plain, batches[0])
    for args in batches:
        for own, given in zip(static, args, strict=True):
            own.copy_(given)
        graph.replay()
        want = step(plain, args)
        torch.testing.assert_close(captured, want, rtol=2e-2, atol=1e-3)
    for one, other in zip(graphed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=2e-2)


@pytest.mark.gpu
def test_work_is_ordered_on_torchs_current_stream() -> None:
    """A long chain on a side stream: an op on another stream would read data too early."""
    x = torch.randn(4096, 4096, device="cuda")
    weight = torch.ones(4096, device="cuda")
    want = ckt.rms_norm(x * 3 + 1, weight)
    torch.cuda.synchronize()
    for _ in range(5):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            late = x * 3 + 1
            got = ckt.rms_norm(late, weight)
            total = got.sum()
            late.fill_(float("nan"))
            del late
            reused = torch.full_like(x, float("nan"))
        torch.cuda.current_stream().wait_stream(side)
        torch.testing.assert_close(got, want)
        assert torch.isfinite(total)
        del reused


@pytest.mark.gpu
def test_results_live_in_torchs_memory() -> None:
    x = torch.randn(1024, 1024, device="cuda", dtype=torch.float16)
    ckt.gelu(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = ckt.gelu(x)
    assert torch.cuda.memory_allocated() - before == y.nbytes
    y.record_stream(torch.cuda.Stream())  # an error for memory that torch does not own
    del y
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_ops_do_not_synchronise() -> None:
    q = torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    ckt.flash_attention(q, q, q, causal=True).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ckt.flash_attention(q, q, q, causal=True).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
