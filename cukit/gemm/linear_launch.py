"""Which kernel computes a dense product, for arrays that were checked."""

from __future__ import annotations

import itertools

from cukit.core.arrays import ACCESS_BYTES, Array, address_of
from cukit.core.device import Device, current_device
from cukit.core.kernel import KernelSpec
from cukit.gemm.linear_plan import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    ITEM_BYTES,
    Product,
    Sm90Config,
    candidates,
    configure,
    plan_sm90,
    representative_configs,
)
from cukit.gemm.linear_sm80 import LinearSm80, Sm80Config, plan_sm80
from cukit.gemm.linear_sm90 import LinearSm90

HOPPER = "sm_90"
DTYPES = ("float16", "bfloat16")
_ROW_ELEMENTS = ACCESS_BYTES // ITEM_BYTES


def plan_linear(product: Product, aligned: bool, device: Device) -> Sm90Config | Sm80Config:
    """The kernel and its tiles. `aligned`: all arrays begin at multiples of 16 bytes.

    TMA needs strides of 16 bytes, so that products with odd extents go to the sm80 class on Hopper
    too.
    """
    strides = {
        product.k if product.major_a == "K" else product.m,
        product.k if product.major_b == "K" else product.n,
    }
    copies = aligned and not any(extent % _ROW_ELEMENTS for extent in strides)
    if device.arch == HOPPER and copies and product.n % _ROW_ELEMENTS == 0:
        return plan_sm90(product, device.num_sms)
    return plan_sm80(product, copies, device.num_sms)


def prepare_linear(product: Product, *arrays: Array | None) -> LinearSm90 | LinearSm80:
    """A launch for `arrays` of this description on the current device."""
    aligned = all(array is None or address_of(array) % ACCESS_BYTES == 0 for array in arrays)
    config = plan_linear(product, aligned, current_device())
    return LinearSm90(config) if isinstance(config, Sm90Config) else LinearSm80(config)


def linear_specs(device: Device, *, gated: bool = False) -> list[KernelSpec]:
    """Every tiling that is planned, and each option with some of them."""
    activations = GATED_ACTIVATIONS if gated else tuple(ACTIVATIONS)
    products = [
        Product(4096, 4096, 4096, dtype, activation=activation, gated=gated, keeps=keeps)
        for dtype, activation in zip(itertools.cycle(DTYPES), activations, strict=False)
        for keeps in (False, True)
    ]
    specs = [Sm80Config(product, 128, aligned=True).spec() for product in products]
    specs += [Sm80Config(products[0], tile, aligned=False).spec() for tile in (128, 64)]
    if device.arch == HOPPER:
        first = products[0]
        specs += [configure(first, each, device.num_sms).spec() for each in candidates(first)]
        specs += _representative(products, device)
    return list(dict.fromkeys(specs))


def product_specs(device: Device) -> list[KernelSpec]:
    """Variants of the backward's products: operands MN-major."""
    products = [
        Product(4096, 4096, 4096, dtype, major_a=major_a, major_b="MN")
        for dtype in DTYPES
        for major_a in ("K", "MN")
    ]
    specs = [
        Sm80Config(product, 128, aligned).spec()
        for product in products
        for aligned in (True, False)
    ]
    return specs + (_representative(products, device) if device.arch == HOPPER else [])


def _representative(products: list[Product], device: Device) -> list[KernelSpec]:
    return [
        config.spec()
        for product in products
        for config in representative_configs(product, device.num_sms)
    ]
