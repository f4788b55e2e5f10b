"""Placement of experts on devices with balanced loads: replicate, then pack."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cukit.core.scalars import check_integer
from cukit.errors import ArrayError, ArrayShapeError, ConfigError

Loads = np.ndarray[Any, np.dtype[np.float64]]
Ids = np.ndarray[Any, np.dtype[np.int32]]


class ExpertPlacement(NamedTuple):
    """Experts assigned to the slots of devices; each device has the same number of slots.

    experts: int32 [..., num_slots], the expert in each slot; the slots of device 0 come first.
    replicas: int32 [..., num_experts], number of slots of each expert, at least 1.
    slots: int32 [..., num_experts, most replicas], these slots in ascending order, padded with -1.
    device_loads: float64 [..., num_devices]; an expert's load is divided evenly over its replicas.

    A token routed to expert e may be sent to any replica, such as `slots[e, token % replicas[e]]`.
    """

    experts: Ids
    replicas: Ids
    slots: Ids
    device_loads: Loads


def balance_experts(
    loads: npt.ArrayLike,
    num_slots: int,
    num_devices: int,
    *,
    num_nodes: int = 1,
    num_groups: int = 1,
) -> ExpertPlacement:
    """Places experts on devices with balanced loads; experts with high loads are replicated.

    First, each spare slot gets a replica of the expert with the highest load per replica. Then
    slots are packed onto devices, heaviest first, each onto the least loaded device. With several
    nodes, groups of experts are packed onto nodes first, and a node's experts are replicated only
    on its own devices: if a router limits a token to few groups, the token is sent to few nodes.

    Args:
        loads: [num_experts] or [num_layers, num_experts], not negative: e.g. sums of
            `Routing.expert_counts` over recent batches. Layers are placed independently.
        num_slots: total slots of all devices: at least num_experts, a multiple of num_devices.
        num_devices: a multiple of num_nodes.
        num_nodes, num_groups: num_groups must divide num_experts and be a multiple of num_nodes.

    Returns:
        The :class:`ExpertPlacement`, with a leading axis of layers if `loads` has one.

    Raises:
        ArrayError: `loads` are not numbers, are empty, or do not have one or two axes.
        ConfigError: a load that is negative or not finite, or inconsistent numbers.

    Pure NumPy on the host; the same loads give the same placement. Method: DeepSeek-V3's expert
    parallelism load balancer, arXiv:2412.19437.

    >>> placement = balance_experts([90, 10, 20, 40], num_slots=6, num_devices=2)
    >>> placement.replicas, placement.experts, placement.device_loads
    (array([3, 1, 1, 1], dtype=int32), array([3, 0, 1, 0, 0, 2], dtype=int32), array([80., 80.]))
    """
    for name, value in (
        ("num_slots", num_slots),
        ("num_devices", num_devices),
        ("num_nodes", num_nodes),
        ("num_groups", num_groups),
    ):
        check_integer("balance_experts", name, value, least=1, most=2**24)
    try:
        array = np.asarray(loads, np.float64)
    except (TypeError, ValueError) as error:
        raise ArrayError(f"balance_experts: loads must be numbers: {error}") from None
    if array.ndim not in (1, 2) or array.shape[-1] == 0:
        raise ArrayShapeError(
            f"balance_experts: loads must have shape [num_experts] or [num_layers, num_experts], "
            f"got {array.shape}"
        )
    _check(array, num_slots, num_devices, num_nodes, num_groups)
    layers = np.atleast_2d(array)
    placed = [_place(layer, num_slots, num_devices, num_nodes, num_groups) for layer in layers]
    experts = np.stack([each for each, _ in placed]).astype(np.int32)
    device_loads = np.stack([each for _, each in placed])
    counts = [np.bincount(each, minlength=array.shape[-1]) for each in experts]
    replicas = np.stack(counts).astype(np.int32)
    result = ExpertPlacement(experts, replicas, _slots(experts, replicas), device_loads)
    return result if array.ndim == 2 else ExpertPlacement(*(part[0] for part in result))


def pack_evenly(loads: npt.ArrayLike, num_packs: int) -> Ids:
    """The pack of each item: equal numbers of items per pack, with balanced loads.

    Items are packed heaviest first, each into the least loaded pack that has room; ties go to the
    first pack.

    >>> pack_evenly([8, 1, 7, 2], 2)
    array([0, 0, 1, 1], dtype=int32)
    """
    items = np.asarray(loads, np.float64)
    if num_packs < 1 or items.size % num_packs:
        raise ConfigError(
            f"pack_evenly: num_packs must divide the {items.size} items, got {num_packs}"
        )
    packs = np.empty(items.size, np.int32)
    totals, room = np.zeros(num_packs), np.full(num_packs, items.size // num_packs)
    for item in np.argsort(-items, kind="stable"):
        pack = int(np.argmin(np.where(room > 0, totals, np.inf)))
        packs[item] = pack
        totals[pack] += items[item]
        room[pack] -= 1
    return packs


def replicate(loads: npt.ArrayLike, num_slots: int) -> Ids:
    """Replicas of each expert: one each, then one at a time for the highest load per replica.

    >>> replicate([90, 10, 20, 40], 6)
    array([3, 1, 1, 1], dtype=int32)
    """
    experts = np.asarray(loads, np.float64)
    replicas = np.ones(experts.size, np.int32)
    for _ in range(num_slots - experts.size):
        replicas[np.argmax(experts / replicas)] += 1
    return replicas


def _place(
    loads: Loads, num_slots: int, num_devices: int, num_nodes: int, num_groups: int
) -> tuple[Ids, Loads]:
    """One layer: the expert in each slot, and the load of each device."""
    node_of_group = pack_evenly(loads.reshape(num_groups, -1).sum(axis=1), num_nodes)
    node_of = np.repeat(node_of_group, loads.size // num_groups)
    slots_each, devices_each = num_slots // num_devices, num_devices // num_nodes
    slots, totals = [], []
    for node in range(num_nodes):
        experts = np.flatnonzero(node_of == node)
        replicas = replicate(loads[experts], num_slots // num_nodes)
        copies = np.repeat(experts, replicas)
        shares = np.repeat(loads[experts] / replicas, replicas)
        devices = pack_evenly(shares, devices_each)
        # Heaviest first within a device.
        order = np.lexsort((-shares, devices))
        slots.append(copies[order])
        totals.append(shares[order].reshape(devices_each, slots_each).sum(axis=1))
    return np.concatenate(slots).astype(np.int32), np.concatenate(totals)


def _slots(experts: Ids, replicas: Ids) -> Ids:
    """The slots of each expert, [layers, num_experts, most replicas], from [layers, num_slots]."""
    slots = np.full((*replicas.shape, int(replicas.max())), -1, np.int32)
    for layer, own in enumerate(experts):
        order = np.argsort(own, kind="stable")
        first = np.concatenate([[0], np.cumsum(replicas[layer])[:-1]])
        rank = np.arange(own.size) - np.repeat(first, replicas[layer])
        slots[layer, own[order], rank] = order
    return slots


def _check(loads: Loads, num_slots: int, num_devices: int, num_nodes: int, num_groups: int) -> None:
    op, num_experts = "balance_experts", loads.shape[-1]
    if not np.isfinite(loads).all() or (loads < 0).any():
        raise ConfigError(f"{op}: loads must be finite and not negative")
    if num_devices < 1 or num_slots < num_experts or num_slots % num_devices:
        raise ConfigError(
            f"{op}: num_slots must be a multiple of num_devices and at least the {num_experts} "
            f"experts, got {num_slots} slots and {num_devices} devices"
        )
    if num_nodes < 1 or num_devices % num_nodes:
        raise ConfigError(
            f"{op}: num_nodes must divide num_devices ({num_devices}), got {num_nodes}"
        )
    if num_groups < 1 or num_experts % num_groups or num_groups % num_nodes:
        raise ConfigError(
            f"{op}: num_groups must divide num_experts ({num_experts}) and be a multiple of "
            f"num_nodes ({num_nodes}), got {num_groups}"
        )
