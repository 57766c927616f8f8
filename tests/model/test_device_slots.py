"""Expert slots of a device: what fills them, tables that captured steps read, loads; two places' steps in one process.

A group's exchange is replaced by a sum over the places' slots in which each pair is taken from the one place that
computes it, so outputs are those of a step without a group, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config import ExpertsConfig, Limits, RankConfig
from engine.core.group import Membership, PartPlacement
from engine.core.placement import EMPTY, Placement, lay_out
from engine.errors import ConfigError, DeviceError
from engine.model.device_grouping import open_device_parts
from engine.model.device_loads import DeviceLoads
from engine.model.device_slots import DevicePart, DeviceSlotPool, DeviceSource
from engine.model.device_tables import DeviceTables, find_homes, find_slots
from engine.model.dummy import DummySource
from engine.model.expert_slots import TorchExpertSlots
from engine.model.ops import reference_ops, triton_ops
from engine.model.rows import RowBatch
from engine.model.slot_form import SlotForm
from engine.model.slots import SlotTable
from engine.model.step_forward import StepForward
from engine.model.step_loading import load_step_model
from engine.model.step_weights import PlacedExperts, make_step_weights
from engine.model.weight_sources import PlainSource, StoredSource
from kernels.forms import PairSums
from kernels.reference import keep_ids
from tests.model.conftest import Golden
from tests.model.group_cases import random_placement
from tests.model.step_cases import StepRig, decode, make_rig
from transport.memory_fabric import MemoryWorld
from transport.messages import Member

CPU = torch.device("cpu")
OPS = reference_ops()


def rank_config(directory: Path, *, group: int = 2, spare: int = 12, kv_dtype: str = "float32") -> RankConfig:
    return RankConfig(
        role="decode", model=str(directory), device="cuda", fabric="nixl", page_tokens=16, max_model_tokens=320,
        num_pages=60, num_slabs=6, kv_dtype=kv_dtype, threads=1, replay_rows=0, config_digest="0", group=group,
        limits=Limits(decode_rows=2), experts_main=ExpertsConfig(spare_slots=spare),
    )  # fmt: skip


class Place(NamedTuple):
    """One rank of a group: slots and tables, and what the loop says of them."""

    part: DevicePart
    experts: TorchExpertSlots
    close: Callable[[], None]

    @property
    def pool(self) -> DeviceSlotPool:
        return self.part.pool

    def put(self, place: int) -> None:
        """What a worker does before each step."""
        self.part.tables.put(self.experts.find_table(0), place, self.pool)


def open_places(config: RankConfig, *, routed: bool) -> list[Place]:
    places = []
    for place in range(config.group):
        (part,), close = open_device_parts(config, CPU, routed=routed)
        experts = TorchExpertSlots((part.pool,), (part.source,), f"address {place}", lambda: None)
        places.append(Place(part, experts, close))
    return places


def name_membership(places: Sequence[Place], placement: Placement, number: int = 1) -> Membership:
    members = tuple(Member(place, 1, f"address {place}", 0) for place in range(len(places)))
    return Membership(number, members, (b"",) * len(places), (PartPlacement(1, placement),))


async def join(places: Sequence[Place], placement: Placement) -> None:
    membership = name_membership(places, placement)
    for place in places:
        await place.experts.prepare(membership)
        place.experts.join(1)
        place.experts.enter(1)


class AllPlaces:
    """`Peers` of the step of one place: other places' slots compute as well; each pair is taken from the only one."""

    ids: Sequence[Tensor] = ()

    def __init__(self, places: Sequence[Place], own: int, clamp: float) -> None:
        self._places, self._own, self._clamp = places, own, clamp

    def own(self, layer: int, rows: int) -> tuple[None, None]:
        return None, None

    def join(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._rows = (x, ids, weights)
        return x, ids, weights

    def give_back(self, layer: int, sums: PairSums) -> PairSums:
        x, ids, weights = self._rows
        total, times = torch.zeros_like(sums.pairs), torch.zeros_like(ids)
        tables = [place.part.tables for place in self._places]
        for number, (place, table) in enumerate(zip(self._places, tables, strict=True)):
            asked = ids
            if table.routed:
                asked = keep_ids(ids, tables[self._own].expert_to_place[layer], number)
            found = OPS.multiply_pairs(x, asked, weights, table.expert_to_slot[layer], place.pool.weights, self._clamp)
            is_here = (asked >= 0) & (table.expert_to_slot[layer][asked.long().clamp(min=0)] >= 0)
            times += is_here
            total += torch.where(is_here.unsqueeze(-1), found.pairs, 0.0)
        assert torch.equal(times, (ids >= 0).int()), "a pair is computed by one place"
        return PairSums(total, ids, torch.zeros_like(sums.expert_to_slot), sums.base)


def open_group_step(gold: Golden, places: Sequence[Place], own: int) -> StepForward:
    """The step of one place, over an arena of its own."""
    part = places[own].part
    placed = PlacedExperts(part.pool.weights, part.tables.expert_to_slot, part.tables.counts)
    source = PlainSource(gold.weights, CPU, torch.float32)
    weights = make_step_weights(gold.shape, source, max_tokens=320, placed=placed)
    step = StepRig(gold.shape, weights, OPS, CPU).open(3, 4, "fp32")
    step.peers = AllPlaces(places, own, gold.shape.clamp)
    return step


# ---------------------------------------------------------------- slots


def test_slots_are_one_allocation_and_hold_what_arrays_do(golden: Callable[[str], Golden]) -> None:
    """MXFP4 bytes of a checkpoint: those of a slot lie together, at a multiple of a cache line."""
    gold = golden("v4-tiny-quant")
    shape = gold.shape
    source = StoredSource(gold.directory, shape, CPU)
    owned = [(layer, expert) for layer in range(shape.num_layers) for expert in range(shape.num_experts)]
    wanted = source.slots(owned)
    form = SlotForm(shape.hidden, shape.expert_width, torch.uint8)
    pool = DeviceSlotPool("main", shape.num_layers, shape.num_experts, len(owned) + 3, form, CPU)
    filler = DeviceSource(pool, "layers", source.put_expert)
    order = np.random.default_rng(5).permutation(pool.info.slots)[: len(owned)]
    for key, slot in enumerate(order.tolist()):
        filler.load(slot, key)
    source.close()
    assert pool.run.block_bytes == pool.info.slot_bytes == form.slot_bytes >= wanted.slot_bytes
    assert pool.info.slot_bytes % 128 == 0 and pool.run.count == pool.info.slots
    assert sorted(np.flatnonzero(pool.held == EMPTY)) == sorted(set(range(pool.info.slots)) - set(order.tolist()))
    where = torch.from_numpy(order)
    for name in ("up", "up_scale", "down", "down_scale"):
        part = getattr(pool.weights, name)
        assert torch.equal(part[where], getattr(wanted, name))
        assert part[1].data_ptr() - part[0].data_ptr() == pool.info.slot_bytes
        inside = part[order[3]].data_ptr() - pool.run.address - order[3] * pool.info.slot_bytes
        assert 0 <= inside < pool.info.slot_bytes and inside % 128 == 0
    with pytest.raises(
        DeviceError, match=rf"expert 2 of layer 1 can not be loaded into slot {order[0]}: it holds expert 0"
    ):
        filler.load(int(order[0]), shape.num_experts + 2)


def test_kernels_read_slots_where_they_lie(golden: Callable[[str], Golden]) -> None:
    """The products of slots in one allocation are those of arrays, bit for bit."""
    shape = golden("v4-tiny-quant").shape
    source = DummySource(shape, CPU)
    keys = [3, 0, 13, 9]
    arrays = source.slots([divmod(key, shape.num_experts) for key in keys])
    form = SlotForm(shape.hidden, shape.expert_width, torch.uint8)
    pool = DeviceSlotPool("main", shape.num_layers, shape.num_experts, 6, form, CPU)
    filler = DeviceSource(pool, "layers", source.put_expert)
    where = [5, 1, 0, 4]
    for slot, key in zip(where, keys, strict=True):
        filler.load(slot, key)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn((5, shape.hidden), generator=generator)
    ids = torch.tensor([[0, 1], [1, 3], [-1, -1], [0, 2], [2, 3]], dtype=torch.int32)
    weights = torch.rand((5, 2), generator=generator)
    kernels = triton_ops()
    found = [
        kernels.mix_experts(x, ids, weights, torch.tensor([*table, -1], dtype=torch.int32), slots, shape.clamp)
        for table, slots in (([0, 1, 2, 3], arrays), (where, pool.weights))
    ]
    assert torch.equal(*found) and found[0][0].norm() > 0 and found[0][2].norm() == 0
    wanted = OPS.mix_experts(x, ids, weights, torch.tensor(where, dtype=torch.int32), pool.weights, shape.clamp)
    assert (found[1] - wanted).norm() < 1e-5 * wanted.norm()


def test_dummy_experts_are_the_same_in_any_slot(golden: Callable[[str], Golden]) -> None:
    shape = golden("v4-tiny-quant").shape
    form = SlotForm(shape.hidden, shape.expert_width, torch.uint8)
    first, second = (DeviceSlotPool("main", shape.num_layers, shape.num_experts, 6, form, CPU) for _ in range(2))
    DeviceSource(first, "layers", DummySource(shape, CPU).put_expert).load(4, 11)
    other = DeviceSource(second, "layers", DummySource(shape, CPU).put_expert)
    other.load(0, 12)
    other.load(1, 11)
    whole = DummySource(shape, CPU).slots([divmod(11, shape.num_experts)])
    for name in ("up", "up_scale", "down", "down_scale"):
        assert torch.equal(getattr(first.weights, name)[4], getattr(second.weights, name)[1])
        assert torch.equal(getattr(first.weights, name)[4], getattr(whole, name)[0])
        assert not torch.equal(getattr(second.weights, name)[0], getattr(second.weights, name)[1])


async def test_an_expert_that_can_not_be_read_is_named(golden: Callable[[str], Golden]) -> None:
    shape = golden("v4-tiny-quant").shape
    form = SlotForm(shape.hidden, shape.expert_width, torch.uint8)
    pool = DeviceSlotPool("main", shape.num_layers, shape.num_experts, 40, form, CPU)

    def put(stack: str, expert: int, slots: object, slot: int) -> None:
        raise ConfigError(f"{stack}.{expert} is lost")

    source = DeviceSource(pool, "layers", put)
    experts = TorchExpertSlots((pool,), (source,), "address 0", lambda: None)
    part = DevicePart(pool, DeviceTables(pool.info, CPU, routed=False), source)
    membership = name_membership(
        [Place(part, experts, lambda: None)], lay_out(pool.info.layers, pool.info.experts, 1, 40)
    )
    with pytest.raises(DeviceError, match=r"expert 0 of layer 0 can not be loaded: layers\.0\.ffn\.experts\.0 is lost"):
        await experts.prepare(membership)
    assert (pool.held == EMPTY).all()


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_homes_have_their_experts_and_replicas_share_the_rows(ranks: int) -> None:
    for seed in range(20):
        base = lay_out(3, 12, ranks, 12 + 36 // ranks)
        placement = random_placement(base, seed, replicas=12)
        has = placement.count_per_rank() > 0
        replicas = has.sum(-1)
        routed = np.stack([find_homes(placement, place) for place in range(ranks)])
        fixed = find_homes(placement, None)
        slots = [find_slots(placement, place) for place in range(ranks)]
        for homes in (*routed, fixed):
            assert np.take_along_axis(has, homes[..., None], -1).all()
        for place in range(ranks):
            here = slots[place] >= 0
            assert np.array_equal(here, has[..., place])
            keys = np.arange(36).reshape(3, 12)
            assert np.array_equal(placement.table[place][slots[place][here]], keys[here])
            # Who has an expert computes its own rows; all places' rows are shared out evenly.
            assert (routed[place][here] == place).all()
        rows = np.stack([(routed == place).sum(0) for place in range(ranks)], -1)
        most, least = np.where(has, rows, -1).max(-1), np.where(has, rows, ranks).min(-1)
        assert (most - least <= 1).all() and (rows.sum(-1) == ranks).all()
        # Of rows of any place, one replica gets all; which one it is depends on the expert.
        first = has.argmax(-1)[replicas == 2]
        assert len(first) == 0 or 0 < (fixed[replicas == 2] == first).mean() < 1


def test_what_a_table_names_has_to_be_there(golden: Callable[[str], Golden]) -> None:
    shape = golden("v4-tiny-fast").shape
    pool = DeviceSlotPool("main", 5, 8, 40, SlotForm(shape.hidden, shape.expert_width, torch.float32), CPU)
    tables = DeviceTables(pool.info, CPU, routed=True)
    placement = lay_out(5, 8, 1, 40)
    pool.held[:] = placement.table[0]
    pool.held[[7, 9]] = 9, EMPTY
    with pytest.raises(DeviceError, match=r"slot 7 holds expert 1 of layer 1, the table .* says expert 7 of layer 0"):
        tables.put(SlotTable(placement), 0, pool)
    pool.held[7] = 7
    with pytest.raises(DeviceError, match=r"slot 9 holds no expert, the table .* says expert 1 of layer 1"):
        tables.put(SlotTable(placement), 0, pool)
    assert (tables.expert_to_slot == -1).all() and (tables.expert_to_place == -1).all()
    pool.held[9] = 9
    tables.put(SlotTable(placement), 0, pool)
    assert torch.equal(tables.expert_to_slot, torch.arange(40, dtype=torch.int32).view(5, 8))
    tables.clear()
    assert (tables.expert_to_slot == -1).all()


# ---------------------------------------------------------------- steps


TEXTS = ("len33", "len17", "len3")


@pytest.mark.parametrize("routed", [False, True])
async def test_moves_and_replicas_change_no_bit(golden: Callable[[str], Golden], routed: bool) -> None:
    """Two places; then an epoch with experts that a fabric has copied, and what it frees is overwritten."""
    gold = golden("v4-tiny-fast")
    texts = [gold.cases[f"{name}.ids"] for name in TEXTS]
    rig = make_rig(gold.shape, PlainSource(gold.weights, CPU, torch.float32), OPS)
    wanted = decode(rig.open(3, 4, "fp32"), texts)
    config = rank_config(gold.directory, spare=40)
    places = open_places(config, routed=routed)
    before = random_placement(lay_out(5, 8, 2, places[0].pool.info.slots), 3, replicas=10)
    after = move(before, 6)
    assert before.count_replicas().max() == 2 and len(differing(before, after)) >= 10
    await join(places, before)
    for place in places:
        place.close()
    for number, place in enumerate(places):
        place.put(number)
    steps = [open_group_step(gold, places, number) for number in range(2)]
    for step in steps:
        for got, want in zip(decode(step, texts), wanted, strict=True):
            assert torch.equal(got.logits, want.logits) and torch.equal(got.experts, want.experts)

    await copy_experts(places, before, after)
    for number, place in enumerate(places):
        place.experts.set_ready(0, 2)
        place.experts.advance((2,))
        place.put(number)
        freed = np.flatnonzero((before.table[number] != EMPTY) & (after.table[number] == EMPTY))
        place.experts.free_slots(0, freed.tolist())
        for slot in freed.tolist():
            place.pool.bytes_of(slot).fill_(0xFF)
    for step in steps:
        for got, want in zip(decode(step, texts), wanted, strict=True):
            assert torch.equal(got.logits, want.logits) and torch.equal(got.experts, want.experts)


def move(before: Placement, seed: int) -> Placement:
    """Every third replica goes to an empty slot of the other place, where that lacks the expert."""
    rng = np.random.default_rng(seed)
    table = before.table.copy()
    for place, slot in np.argwhere(before.table != EMPTY)[::3].tolist():
        key = before.table[place, slot]
        room = np.flatnonzero((table[1 - place] == EMPTY) & (before.table[1 - place] == EMPTY))
        if key not in table[1 - place] and len(room):
            table[1 - place, rng.choice(room)] = key
            table[place, slot] = EMPTY
    return Placement(before.layers, before.experts, table)


def differing(before: Placement, after: Placement) -> list[list[int]]:
    """(place, slot) of what has to be copied."""
    return np.argwhere((after.table != before.table) & (after.table != EMPTY)).tolist()


async def copy_experts(places: Sequence[Place], before: Placement, after: Placement) -> None:
    """As the ranks' loops do: load the table, push slots to slots by the fabric, note what came."""
    world = MemoryWorld(random.Random(1))
    async with world.open_fabric("0") as first, world.open_fabric("1") as second:
        fabrics = (first, second)
        for fabric, place in zip(fabrics, places, strict=True):
            await fabric.register([place.pool.run])
            place.experts.load_table(0, 2, after)
        targets = [await fabrics[1 - place].connect(fabrics[place].describe()) for place in range(2)]
        for place, slot in differing(before, after):
            key = int(after.table[place, slot])
            source, at = before.find_replicas(*divmod(key, before.experts))[0]
            assert source == 1 - place
            await fabrics[source].wait(fabrics[source].push(targets[place], [at], [slot]))
            places[place].experts.note_copied(0, {slot: key})


async def test_loads_are_what_rows_have_chosen(golden: Callable[[str], Golden]) -> None:
    gold = golden("v4-tiny-fast")
    texts = [gold.cases[f"{name}.ids"] for name in TEXTS]
    places = open_places(rank_config(gold.directory), routed=False)
    await join(places, lay_out(5, 8, 2, places[0].pool.info.slots))
    for number, place in enumerate(places):
        place.close()
        place.put(number)
    clock = [0.0]
    part, experts = places[1].part, places[1].experts
    loads = DeviceLoads((part,), dense_bytes=5 * part.pool.info.slot_bytes, every_s=1.0, now=lambda: clock[0])
    # Counts are never reset: they wrap around.
    part.tables.counts.fill_(2**31 - 3)
    loads.note_step(device_us=0, has_rows=True)
    assert loads.look() is None and loads.look() is not None
    clock[0] = 1.0
    chosen = decode(open_group_step(gold, places, 1), texts)
    counts = np.zeros((5, 8), np.int64)
    for sequence in chosen:
        for layer in range(5):
            counts[layer] += np.bincount(sequence.experts[:, layer].flatten().numpy(), minlength=8)
    assert counts.sum() == 53 * 5 * 3 and int(part.tables.counts.min()) < 0
    loads.note_step(device_us=0, has_rows=False)
    assert loads.look() is None and loads.look() is None
    for _ in range(12):
        loads.note_step(device_us=1000, has_rows=True)
    assert loads.look() is None
    taken = loads.look()
    assert taken is not None and taken[1] == 12
    (load,) = taken[0]
    assert np.array_equal(load.counts, counts) and load.pairs == counts.sum()
    # All 20 experts of this place are touched in nearly every step: four fifths of what a step reads.
    assert 0.7 * 12e6 < load.expert_ns < 0.8 * 12e6
    experts.add_loads(taken[0], steps=taken[1])
    told = experts.read_loads()
    assert told is not None and told[0].steps == 12 and np.array_equal(told[0].counts, counts)
    # Nothing more before a second has passed, and then only what has come since.
    loads.note_step(device_us=1000, has_rows=True)
    assert loads.look() is None and loads.look() is None
    part.tables.counts[2, 3] += 7
    clock[0] = 2.5
    assert loads.look() is None
    taken = loads.look()
    assert taken is not None and taken[1] == 1 and taken[0][0].counts.sum() == taken[0][0].counts[2, 3] == 7


# ---------------------------------------------------------------- a model


async def test_a_model_in_slots_is_the_model(golden: Callable[[str], Golden]) -> None:
    """All experts at one place, in slots at random: passes of it are those of a rank without a group."""
    gold = golden("v4-tiny-fast")
    plain, info = load_step_model(
        rank_config(gold.directory, group=1), lambda *_: None, CPU, ops=OPS, prompt_rows=(16, 48)
    )
    assert info.parts == () and info.mesh_address == ""
    config = rank_config(gold.directory, spare=30)
    parts, close = open_device_parts(config, CPU)
    model, info = load_step_model(
        config, lambda *_: None, CPU, ops=OPS, prompt_rows=(16, 48), parts=parts, mesh_address="here"
    )
    assert info.parts == (parts[0].pool.info,) and info.mesh_address == "here"
    ids = gold.cases["len31.ids"].long().numpy()
    batch = rows(ids)
    nothing = model.forward(batch).clone()
    table = np.full((2, parts[0].pool.info.slots), EMPTY, np.int32)
    table[0, np.random.default_rng(1).permutation(50)[:40]] = np.arange(40)
    table[1, :40] = np.arange(40)
    experts = TorchExpertSlots((parts[0].pool,), (parts[0].source,), "address 0", lambda: None)
    members = [Place(parts[0], experts, close)] * 2
    await experts.prepare(name_membership(members, Placement(5, 8, table)))
    close()
    experts.join(1)
    experts.enter(1)
    members[0].put(0)
    want = plain.forward(batch)
    # Of two replicas one computes: this place's, for every second expert.
    assert (parts[0].tables.expert_to_slot >= 0).sum() == 20
    assert not torch.equal(model.forward(batch), want)
    parts[0].tables.routed = True
    parts[0].tables.clear()
    members[0].put(0)
    assert torch.equal(model.forward(batch), want) and not torch.equal(nothing, want)


def rows(ids: np.ndarray) -> RowBatch:
    return RowBatch(np.array([1]), np.array([0]), ids[None], np.arange(20)[None])
