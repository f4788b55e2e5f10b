"""optimize: swaps, verification, report, restoring."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is an extra: pip install 'cukit[torch]'")

from torch import nn  # noqa: E402

import cukit.torch as ckt  # noqa: E402
from cukit.core.device import gpu_available  # noqa: E402
from cukit.errors import ConfigError  # noqa: E402
from cukit.torch import _swaps  # noqa: E402
from tests.torch.small import FAMILIES, small_model  # noqa: E402


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.rms = nn.RMSNorm(32)
        self.mlp = nn.Sequential(
            nn.Linear(32, 64), nn.GELU(approximate="tanh"), nn.Linear(64, 64), nn.SiLU(),
            nn.Dropout(0.5), nn.Linear(64, 32),
        )  # fmt: skip
        self.unused = nn.LayerNorm(8)

    def forward(self, x):
        return x + self.mlp(self.rms(self.norm(x)))


def test_reports_possible_swaps_without_a_gpu() -> None:
    model, x = Block(), torch.randn(4, 32)
    result = ckt.optimize(model, x)
    outcomes = {row.name: row.outcome for row in result.report}
    assert outcomes == {
        "norm": "would swap", "rms": "would swap", "mlp": "would swap",
        "unused": "kept: the sample does not reach it",
    }  # fmt: skip
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(module.training for module in model.modules())
    place = "the model is on the CPU" if gpu_available() else "this machine has no GPU"
    assert place in result.note
    printed = str(result)
    assert "would swap" in printed
    assert place in printed


def test_swaps_and_restores() -> None:
    model, x = Block().eval(), torch.randn(4, 32)
    want, state = model(x), list(model.state_dict())
    with ckt.optimize(model, x, dry_run=False) as result:
        assert "forward" in model.norm.__dict__
        assert list(model.state_dict()) == state
        got = result(x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert result.error < 1e-5
        got.sum().backward()
        assert all(
            each.grad is not None for name, each in model.named_parameters()
            if not name.startswith("unused")
        )  # fmt: skip
    assert "forward" not in model.norm.__dict__
    assert torch.equal(model(x), want)
    assert result.restore() is model


def test_a_swap_of_a_swapped_model_is_restored_to_the_first() -> None:
    model, x = Block().eval(), torch.randn(4, 32)
    outer = ckt.optimize(model, x, dry_run=False, kinds=["norm"])
    before = model.norm.__dict__["forward"]
    ckt.optimize(model, x, dry_run=False).restore()
    assert model.norm.__dict__["forward"] is before
    outer.restore()
    assert "forward" not in model.norm.__dict__


def test_use_cuda_kernels_false_swaps_nothing() -> None:
    model = Block()
    result = ckt.optimize(model, torch.randn(4, 32), use_cuda_kernels=False, dry_run=False)
    assert result.report == []
    assert "forward" not in model.norm.__dict__
    assert "use_cuda_kernels=False" in str(result)


class OddRMSNorm(nn.Module):
    """Has the attributes of RMSNorm and a similar name, but another formula."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6

    def forward(self, x):
        return x / x.abs().mean(-1, keepdim=True) * self.weight


def test_modules_with_other_results_are_kept() -> None:
    model = nn.Sequential(OddRMSNorm(), nn.Linear(32, 8))
    (row,) = ckt.optimize(model, torch.randn(4, 32), dry_run=False).report
    assert row.outcome.startswith("kept: error above")
    assert row.error > row.tolerance
    assert "forward" not in model[0].__dict__


class TupleRMSNorm(nn.RMSNorm):
    def forward(self, x):
        return (super().forward(x),)


class ComplexRMSNorm(nn.RMSNorm):
    def forward(self, x):
        return torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))


@pytest.mark.parametrize("module", [TupleRMSNorm, ComplexRMSNorm])
def test_modules_with_another_structure_of_outputs_are_kept(module: type[nn.RMSNorm]) -> None:
    model = nn.Sequential(module(32, eps=1e-6))
    (row,) = ckt.optimize(model, torch.randn(4, 32), dry_run=False).report
    assert row.outcome.startswith("kept: error above")
    assert row.error == math.inf


def test_modules_whose_replacement_fails_are_kept_with_the_reason() -> None:
    model = nn.Sequential(nn.RMSNorm(32, eps=-1.0, elementwise_affine=True))
    (row,) = ckt.optimize(model, 2 + torch.rand(4, 32)).report
    assert row.outcome == "kept: rms_norm: eps must be a finite number of 0 or more, got -1.0"
    assert math.isnan(row.error)


def test_an_error_in_the_model_restores_everything() -> None:
    class Broken(Block):
        def forward(self, x):
            super().forward(x)
            raise ValueError("broken")

    model = Broken()
    with pytest.raises(ValueError, match="broken"):
        ckt.optimize(model, torch.randn(4, 32), dry_run=False)
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert model.training


def test_errors_name_the_option() -> None:
    model, x = Block(), torch.randn(4, 32)
    with pytest.raises(ConfigError, match=r"kinds must be among attention, .*, got 'norms'"):
        ckt.optimize(model, x, kinds=["norms"])
    with pytest.raises(ConfigError, match="cuda_graph=True needs a model on a GPU"):
        ckt.optimize(model, x, cuda_graph=True)
    with pytest.raises(ConfigError, match=r"model must be an nn.Module, got function"):
        ckt.optimize(lambda x: x, x)
    with pytest.raises(ConfigError, match="repeats must be an integer of 1 or more, got 0"):
        ckt.optimize(model, x, repeats=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers(family: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    model = small_model(family)
    tokens = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(tokens).logits
    with ckt.optimize(model, {"input_ids": tokens}, dry_run=False) as result:
        kinds = {row.kind for row in result.report if row.outcome == "swapped"}
        # Gemma 3 normalises before the residual addition; Gemma 3 and Qwen 3 also normalise
        # queries and keys.
        own = {"llama": {"residual", "projection"}, "qwen3": {"residual"}}.get(family, set())
        assert kinds == {"attention", "rope", "norm", "mlp"} | own
        assert not [row for row in result.report if row.outcome != "swapped"]
        assert model.config._attn_implementation == "cukit"
        with torch.no_grad():
            torch.testing.assert_close(model(tokens).logits, want, rtol=1e-4, atol=1e-5)
            cached = model.generate(tokens, max_new_tokens=4, do_sample=False)
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, want)
        assert torch.equal(model.generate(tokens, max_new_tokens=4, do_sample=False), cached)


def test_a_modelling_file_is_restored_with_the_last_model_that_uses_it() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.llama import modeling_llama

    original = modeling_llama.apply_rotary_pos_emb
    tokens = torch.ones(1, 4, dtype=torch.long)
    first, second = (
        ckt.optimize(small_model("llama"), tokens, kinds=["rope"], dry_run=False) for _ in range(2)
    )
    first.restore()
    assert modeling_llama.apply_rotary_pos_emb is not original
    second.restore()
    assert modeling_llama.apply_rotary_pos_emb is original


def test_a_projection_is_verified_with_few_tokens_too(monkeypatch) -> None:
    """With few tokens the swapped layer calls the original, so the replacement is called
    directly."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    tokens = torch.ones(1, 4, dtype=torch.long)
    linear_rope = torch.ops.cukit.linear_rope
    monkeypatch.setattr(torch.ops.cukit, "linear_rope", lambda *args: 1.1 * linear_rope(*args))
    report = ckt.optimize(small_model("llama"), tokens, kinds=["projection"], dry_run=False).report
    assert len(report) == 2
    assert all(row.outcome.startswith("kept: error above") for row in report)


def test_only_attention_that_rotates_halves_has_a_fused_projection() -> None:
    """Helium's attention is Llama's, but its rotary function rotates adjacent elements. The rotary
    function is that of the file that defines the forward."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.llama.modeling_llama import LlamaAttention

    class OtherFile(LlamaAttention):
        """Inherits its forward; this file has neither a rotary function nor attention."""

    tokens = torch.ones(1, 4, dtype=torch.long)
    options = {"kinds": ["projection"], "dry_run": False}
    assert ckt.optimize(small_model("helium"), tokens, **options).report == []
    model = small_model("llama")
    with torch.no_grad():
        want = model(tokens).logits
        for layer in model.model.layers:
            layer.self_attn.__class__ = OtherFile
        with ckt.optimize(model, tokens, **options) as result:
            assert [row.outcome for row in result.report] == ["swapped", "swapped"]
            torch.testing.assert_close(model(tokens).logits, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_has_the_same_gradients(family, backend, device, monkeypatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr(_swaps, "_MIN_TOKENS", 16)
    dtype, tolerance = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 0.1)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 97, (2, 13), generator=generator).to(device)
    gradients = []
    for swapped in (False, True):
        model = small_model(family).to(device, dtype)
        if swapped:
            sample = {"input_ids": tokens, "use_cache": False}
            options = {"only_faster": False, "dry_run": False, "tolerance": 5e-2}
            report = ckt.optimize(model, sample, **options).report
            assert {row.outcome for row in report} == {"swapped"}
            if backend is not None:
                torch._dynamo.reset()
                for layer in model.model.layers:
                    layer.compile(backend=backend, fullgraph=True)
        model(tokens, use_cache=False).logits.square().mean().backward()
        gradients.append([each.grad.float() for each in model.parameters()])
    for want, got in zip(*gradients, strict=True):
        assert (got - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("case", ["checkpointed", "frozen projections", "twice"])
def test_gradients_in_other_steps(case: str, monkeypatch) -> None:
    """Recomputed forwards, weights without a gradient, a second backward of the same graph."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr(_swaps, "_MIN_TOKENS", 16)
    tokens = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(1))
    gradients = []
    for swapped in (False, True):
        model = small_model("llama").train()
        if swapped:
            sample = {"input_ids": tokens, "use_cache": False}
            report = ckt.optimize(model, sample, dry_run=False).report
            assert {row.outcome for row in report} == {"swapped"}
        if case == "checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if case == "frozen projections":
            for name, weight in model.named_parameters():
                weight.requires_grad = "_proj" not in name
        loss = model(tokens, use_cache=False).logits.square().mean()
        loss.backward(retain_graph=case == "twice")
        if case == "twice":
            loss.backward()
        gradients.append([each.grad for each in model.parameters()])
    for want, got in zip(*gradients, strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            assert (got - want).norm() <= 1e-5 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_training_step_with_fused_kernels(compiled, weights, head_dim) -> None:
    """Layers and batches large enough for the kernels that compute rope and the activation's
    gradient in an epilogue; grouped queries; an odd number of tokens; autocast."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    size = {
        "hidden_size": 4 * head_dim, "head_dim": head_dim, "intermediate_size": 1024,
        "max_position_embeddings": 2049,
    }  # fmt: skip
    tokens = torch.randint(3, 97, (3, 2049), generator=torch.Generator().manual_seed(1)).cuda()
    gradients = []
    for swapped in (None, False, True):  # in float32, in bfloat16, with swaps
        model = small_model("llama", **size).cuda()
        model.to(torch.float32 if swapped is None else weights)
        with torch.autocast("cuda", torch.bfloat16, enabled=swapped is not None):
            if swapped:
                sample = {"input_ids": tokens, "use_cache": False}
                options = {"only_faster": False, "dry_run": False, "tolerance": 5e-2}
                report = ckt.optimize(model, sample, **options).report
                assert {row.outcome for row in report} == {"swapped"}
                if compiled:
                    torch._dynamo.reset()
                    for layer in model.model.layers:
                        layer.compile(fullgraph=True)
            logits = model(tokens, use_cache=False).logits
        logits.float().square().mean().backward()
        gradients.append([each.grad.float() for each in model.parameters()])
    for exact, plain, got in zip(*gradients, strict=True):
        assert (got - exact).norm() <= 2 * (plain - exact).norm() + 2e-2 * exact.norm()


@pytest.mark.parametrize("norms", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kinds", [["residual"], ["residual", "norm"]], ids="+".join)
def test_a_fused_residual_trains_under_autocast(kinds, weights, norms) -> None:
    """Attention returns bfloat16; residuals and norms have the dtypes of the weights."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    tokens = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(1))
    results = []
    for swapped in (False, True):
        model = small_model("llama").to(weights)
        generator = torch.Generator().manual_seed(2)
        for name, module in model.named_modules():
            if name.endswith("norm"):
                module.to(norms)
                module.weight.data.uniform_(0.5, 1.5, generator=generator)
        with torch.autocast("cpu", torch.bfloat16):
            if swapped:
                ckt.optimize(model, tokens, kinds=kinds, dry_run=False, tolerance=1e-2)
            logits = model(tokens).logits
            logits.float().square().mean().backward()
        results.append([logits, *(each.grad for each in model.parameters())])
    # The larger tolerance is for norms computed by a kernel, alone or fused with the addition.
    tolerance = 2e-2 if "norm" in kinds or weights == norms == torch.bfloat16 else 1e-5
    for want, got in zip(*results, strict=True):
        assert got.dtype == want.dtype
        assert (got - want).float().norm() <= tolerance * want.float().norm()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_swap_trains_under_autocast(dtype, device, monkeypatch) -> None:
    """transformers' rope returns float32 queries and keys, but values have autocast's dtype."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr(_swaps, "_MIN_TOKENS", 16)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 97, (2, 13), generator=generator).to(device)
    results = []
    for swapped in (False, True):
        model = small_model("llama").to(device)
        if swapped:
            with torch.autocast(device, dtype):
                sample = {"input_ids": tokens, "use_cache": False}
                options = {"only_faster": False, "dry_run": False, "tolerance": 5e-2}
                report = ckt.optimize(model, sample, **options).report
            assert {row.outcome for row in report} == {"swapped"}
        with torch.autocast(device, dtype):
            logits = model(tokens, use_cache=False).logits
        logits.float().square().mean().backward()
        results.append([logits, *(each.grad for each in model.parameters())])
    for want, got in zip(*results, strict=True):
        assert got.dtype == want.dtype
        assert (got - want).float().norm() <= 0.1 * want.float().norm()


class LikeLlama(nn.Module):
    """A decoder layer whose children have the names of Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Doubled(), Gated()
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(8, eps=1e-6) for _ in range(2)
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states + self.residual(self.input_layernorm(hidden_states))
        return x + self.mlp(self.post_attention_layernorm(x))

    def residual(self, x: torch.Tensor) -> torch.Tensor:
        return self.self_attn(x)[0]


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (2 * x,)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(8, 8, bias=False) for _ in range(3)
        )
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Scaled(LikeLlama):
    """The residual has a learned scale, 1 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def residual(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * super().residual(x)


def test_layers_that_only_look_like_llamas_are_kept() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    options = {"kinds": ["residual"], "dry_run": False}
    with ckt.optimize(nn.Sequential(Scaled()), x, **options) as result:
        assert result.report == []
    # The attention of LikeLlama has no argument `hidden_states`.
    with ckt.optimize(nn.Sequential(LikeLlama()), x, **options) as result:
        (row,) = result.report
        assert row.outcome.startswith("kept: ")
        assert "hidden_states" in row.outcome


@pytest.mark.gpu
def test_times_verifies_and_captures_on_the_gpu() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    model = small_model("llama").to("cuda", torch.bfloat16)
    tokens = torch.randint(3, 97, (2, 32), device="cuda")
    options = {"input_ids": tokens, "use_cache": False}
    with torch.no_grad():
        want = model(**options).logits.float()
    result = ckt.optimize(model, options, only_faster=False, cuda_graph=True, repeats=3)
    assert all(row.outcome == "swapped" for row in result.report), str(result)
    assert all(row.before_us > 0 and row.after_us > 0 for row in result.report)
    assert result.before_us > 0
    assert math.isfinite(result.error)
    with torch.no_grad():
        for _ in range(2):
            got = result(**options).logits.float()
            assert (got - want).abs().max() <= 0.1 * want.abs().max()
        other = torch.randint(3, 97, (2, 32), device="cuda")
        graphed = result(input_ids=other, use_cache=False).logits
        torch.testing.assert_close(graphed, model(input_ids=other, use_cache=False).logits)
    result.restore()
    assert model.config._attn_implementation == "sdpa"
