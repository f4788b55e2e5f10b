"""QuantizedLinear and replace_linear_with_quantized."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is an extra: pip install 'cukit[torch]'")

from torch import nn  # noqa: E402

import cukit.torch as ckt  # noqa: E402
from cukit.errors import ConfigError  # noqa: E402

# Relative to the largest output, for sums of 200 products: each weight is rounded by up to half of
# 1/127 or 1/7 of the largest weight.
ERROR = {8: 0.02, 4: 0.15}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group_size", [None, 64])
def test_is_near_the_linear_layer(bits: int, group_size, device: str, place: str) -> None:
    if device == "emulator":
        pytest.skip("the kernel has its own tests, which take the emulator minutes to compile")
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    linear = nn.Linear(200, 96).to(place, dtype)
    quantized = ckt.QuantizedLinear.from_linear(linear, bits, group_size)
    x = torch.randn(2, 5, 200, device=place, dtype=dtype, requires_grad=True)
    want, got = linear(x), quantized(x)
    assert (got - want).abs().max() <= ERROR[bits] * want.abs().max()
    exact = x.double() @ quantized.dequantize().double().T + linear.bias.double()
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    assert (got.double() - exact).abs().max() <= rounding * exact.abs().max()
    got.sum().backward()
    sums = quantized.dequantize().sum(0).expand(2, 5, -1)
    assert (x.grad.float() - sums).abs().max() <= rounding * sums.abs().max()
    assert quantized.bias.grad.shape == (96,)
    assert quantized.blocks.nbytes < linear.weight.nbytes


def test_gradients_by_finite_differences() -> None:
    torch.manual_seed(0)
    quantized = ckt.QuantizedLinear.from_linear(nn.Linear(64, 6).double(), 4)
    x = torch.randn(3, 64, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(quantized, (x,), fast_mode=True)


def test_state_dict_dtype_and_compilation() -> None:
    quantized = ckt.QuantizedLinear.from_linear(nn.Linear(64, 32), 8)
    other = ckt.QuantizedLinear.from_linear(nn.Linear(64, 32), 8)
    other.load_state_dict(quantized.state_dict())
    x = torch.randn(2, 64)
    torch.testing.assert_close(other(x), quantized(x))
    scales = quantized.row_scales.clone()
    half = copy.deepcopy(quantized).to(torch.bfloat16)
    assert half.row_scales.dtype == scales.dtype
    assert half.bias.dtype == torch.bfloat16
    assert half(x.bfloat16()).dtype == torch.bfloat16
    compiled = torch.compile(quantized, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), quantized(x))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        self.again = self.body[0]
        self.lm_head = nn.Linear(32, 8)

    def forward(self, x):
        return self.lm_head(self.again(self.body(x)))


def test_replaces_all_layers_except_excluded_ones() -> None:
    model = ckt.replace_linear_with_quantized(Shared())
    assert isinstance(model.body[0], ckt.QuantizedLinear)
    assert model.again is model.body[0]
    assert type(model.lm_head) is nn.Linear
    model = ckt.replace_linear_with_quantized(Shared(), bits=4, exclude_layers=["body.*", "again"])
    assert type(model.body[0]) is nn.Linear
    assert model.lm_head.bits == 4
    assert model(torch.randn(3, 32)).shape == (3, 8)


def test_errors_name_the_option() -> None:
    with pytest.raises(ConfigError, match="bits must be 8 or 4, got 3"):
        ckt.replace_linear_with_quantized(Shared(), bits=3)
    with pytest.raises(ConfigError, match="group_size must be 32, 64, 128 or None, got 48"):
        ckt.QuantizedLinear.from_linear(nn.Linear(8, 8), 8, 48)
    with pytest.raises(ConfigError, match="must be a list of names, got the string 'lm_head'"):
        ckt.replace_linear_with_quantized(Shared(), exclude_layers="lm_head")
    with pytest.raises(ConfigError, match="must contain linear layers, but is one itself"):
        ckt.replace_linear_with_quantized(nn.Linear(8, 8))
