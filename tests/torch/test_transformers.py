"""Models of the transformers library with cukit's attention."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is an extra: pip install 'cukit[torch]'")
pytest.importorskip("transformers", reason="transformers is not installed")

import cukit.torch as ckt  # noqa: E402
from cukit.errors import ConfigError, MissingDependencyError  # noqa: E402
from cukit.torch.transformers import attention_forward  # noqa: E402
from tests.torch.small import FAMILIES, small_model  # noqa: E402


@pytest.fixture(autouse=True)
def registered() -> None:
    ckt.register_attention()


def ids(batch: int = 2, length: int = 13) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 97, (batch, length), generator=generator)


def with_attention(model, name: str, *args, **kwargs):
    model.set_attn_implementation(name)
    with torch.no_grad():
        return model(*args, **kwargs).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", ["plain", "padded left", "padded right", "packed", "custom mask"])
def test_logits_equal_those_of_sdpa(family: str, batch: str) -> None:
    model, tokens = small_model(family).double(), ids()
    options = {}
    visible = torch.ones_like(tokens, dtype=torch.bool)
    if batch == "padded left":
        visible[0, :4] = False
    elif batch == "padded right":
        visible[1, -3:] = False
    if batch.startswith("padded"):
        options["attention_mask"] = visible.long()
    elif batch == "packed":
        options["position_ids"] = torch.cat((torch.arange(6), torch.arange(7)))[None].expand(2, -1)
    elif batch == "custom mask":
        options["attention_mask"] = torch.ones(2, 1, 13, 13, dtype=torch.bool).tril(1)
        if family == "gemma3":
            names = ("sliding_attention", "full_attention")
            options["attention_mask"] = dict.fromkeys(names, options["attention_mask"])
    want, got = (with_attention(model, name, tokens, **options) for name in ("sdpa", "cukit"))
    torch.testing.assert_close(got[visible], want[visible], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generated_tokens_equal_those_of_sdpa(family: str, cache: str) -> None:
    """Prefill, then steps of one query over a growing, sliding or static cache."""
    model, tokens = small_model(family), ids(length=7)
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    options = {
        "attention_mask": mask, "max_new_tokens": 6, "do_sample": False,
        "cache_implementation": cache, "disable_compile": True,
    }  # fmt: skip
    model.set_attn_implementation("sdpa")
    want = model.generate(tokens, **options)
    model.set_attn_implementation("cukit")
    assert torch.equal(model.generate(tokens, **options), want)


def test_a_prompt_in_two_parts() -> None:
    model, tokens = small_model("llama").double(), ids()
    model.set_attn_implementation("cukit")
    with torch.no_grad():
        whole = model(tokens).logits
        first = model(tokens[:, :8], use_cache=True)
        rest = model(tokens[:, 8:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(rest, whole[:, 8:], rtol=1e-6, atol=1e-6)


def test_gradients_equal_those_of_sdpa() -> None:
    model, tokens = small_model("gemma3").double().train(), ids()
    gradients = []
    for name in ("sdpa", "cukit"):
        model.set_attn_implementation(name)
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        gradients.append([each.grad.clone() for each in model.parameters()])
    for want, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def test_compiles_without_a_graph_break() -> None:
    ckt.register_attention("cukit-plain", plain_batches=True)
    model, tokens = small_model("llama", num_hidden_layers=1), ids()
    want = with_attention(model, "sdpa", tokens)
    for name in ("cukit", "cukit-plain"):
        model.set_attn_implementation(name)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            torch.testing.assert_close(compiled(tokens).logits, want)


def test_dropout_is_rejected() -> None:
    q = torch.randn(1, 2, 3, 16)
    with pytest.raises(ConfigError, match=r"no dropout, got 0\.1; set attention_dropout"):
        attention_forward(torch.nn.Identity(), q, q, q, None, dropout=0.1)


def test_a_floating_point_mask_is_added() -> None:
    q = torch.randn(1, 2, 3, 16)
    mask = torch.zeros(1, 1, 3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -1e9)
    by_mask, _ = attention_forward(torch.nn.Identity(), q, q, q, mask)
    by_flag, _ = attention_forward(torch.nn.Identity(), q, q, q, None, is_causal=True)
    torch.testing.assert_close(by_mask, by_flag)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
def test_logits_are_near_those_of_sdpa_on_the_gpu(family: str, padded: bool) -> None:
    """Compares the bfloat16 errors of both with float32 logits as the reference."""
    model, tokens = small_model(family).cuda(), ids(length=40).cuda()
    visible = torch.ones_like(tokens, dtype=torch.bool)
    if padded:
        visible[0, :9] = False
    options = {"attention_mask": visible.long()} if padded else {}
    exact = with_attention(model, "sdpa", tokens, **options)[visible]
    model.bfloat16()
    errors = {
        name: float((with_attention(model, name, tokens, **options)[visible] - exact).abs().max())
        for name in ("sdpa", "cukit")
    }
    assert errors["cukit"] <= 1.5 * errors["sdpa"] + 1e-3 * float(exact.abs().max()), errors


def test_an_older_transformers_is_named(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.3.0")
    with pytest.raises(MissingDependencyError, match=r"5\.4 or newer, 5\.3\.0 is installed"):
        ckt.register_attention()
