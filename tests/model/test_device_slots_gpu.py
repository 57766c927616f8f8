"""Expert slots on a GPU at V4-Flash's widths, in a few layers: captured steps and the tables that change under them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.bench.cases import parse_case
from engine.bench.rig import StepBench, StepOptions
from engine.core.placement import EMPTY, Placement
from engine.model.device_slots import DeviceSlotPool, DeviceSource
from engine.model.device_tables import DeviceTables
from engine.model.dummy import DummySource
from engine.model.graph import StepGraph
from engine.model.slot_form import SlotForm
from engine.model.slots import SlotTable
from engine.model.step_weights import PlacedExperts, make_step_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS, SPARE = 3, 40


def test_a_captured_step_follows_the_tables_in_stream_order() -> None:
    """Steps and tables are enqueued behind a sleep: each step has the table that was put in front of it."""
    device = torch.device("cuda", torch.cuda.current_device())
    case = parse_case("b16=16*1@1k")
    bench = StepBench(StepOptions(model="v4-flash", cases=(case,), layers=LAYERS), device)
    shape, experts = bench.shape, bench.shape.num_experts
    plain = bench.open(case)
    source = DummySource(shape, device, seed=bench.options.seed)
    form = SlotForm(shape.hidden, shape.expert_width, torch.uint8)
    slots = LAYERS * experts + SPARE
    pool = DeviceSlotPool("main", LAYERS, experts, slots, form, device)
    tables = DeviceTables(pool.info, device, routed=True)
    placed = PlacedExperts(pool.weights, tables.expert_to_slot, tables.counts)
    bench.weights = make_step_weights(shape, source, max_tokens=1024, placed=placed)
    step = bench.open(case)
    for own, other in ((step.tokens, plain.tokens), (step.rows.tables, plain.rows.tables)):
        own.copy_(other)
    before = bench.arena.clone()
    wanted = StepGraph(plain).replay()
    torch.cuda.synchronize()
    logits, greedy, ids = wanted.logits.clone(), wanted.greedy.clone(), torch.stack(wanted.ids).clone()
    bench.arena.copy_(before)
    graph = StepGraph(step)
    tables.counts.zero_()

    order = np.random.default_rng(3).permutation(slots)[: LAYERS * experts]
    table = np.full((1, slots), EMPTY, np.int32)
    table[0, order] = np.arange(LAYERS * experts)
    filler = DeviceSource(pool, "layers", source.put_expert)
    for slot in order.tolist():
        filler.load(slot, int(table[0, slot]))
    # What pushes do, here within one memory: some experts go to slots that are empty.
    moved = table.copy()
    for to, slot in zip(np.flatnonzero(table[0] == EMPTY).tolist(), order[::11].tolist(), strict=False):
        pool.bytes_of(to).copy_(pool.bytes_of(slot))
        pool.held[to] = moved[0, to] = table[0, slot]
        moved[0, slot] = EMPTY
    assert (moved != table).sum() == 2 * SPARE
    first, second = (SlotTable(Placement(LAYERS, experts, part)) for part in (table, moved))

    found = []

    def run() -> None:
        outputs = graph.replay()
        found.append((outputs.logits.clone(), outputs.greedy.clone(), torch.stack(outputs.ids)))
        bench.arena.copy_(before)

    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    tables.put(first, 0, pool)
    run()
    tables.clear()
    run()
    # A third table waits until the first has been read, which is behind the sleep.
    assert not torch.cuda.current_stream().query()
    tables.put(second, 0, pool)
    run()
    freed = np.flatnonzero((table[0] != EMPTY) & (moved[0] == EMPTY))
    for slot in freed.tolist():
        pool.bytes_of(slot).fill_(0xFF)
    run()
    torch.cuda.synchronize()
    for at in (0, 2, 3):
        assert torch.equal(found[at][0], logits) and torch.equal(found[at][1], greedy)
        assert torch.equal(found[at][2], ids)
    assert not torch.equal(found[1][0], logits)
    chosen = torch.cat([each for _, _, each in found], 1).long()
    for layer in range(LAYERS):
        counted = torch.bincount(chosen[layer].flatten(), minlength=experts)
        assert torch.equal(tables.counts[layer].long(), counted) and int(counted.sum()) == 4 * 16 * shape.top_k
