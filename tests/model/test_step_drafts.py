"""Drafting in a device's steps: proposals as on a CPU, and the texts of a device that does not draft."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config import DraftConfig, Limits, RankConfig
from engine.core.plan import StepPlan
from engine.errors import DeviceError
from engine.model.ahead_weights import join_columns
from engine.model.device import TorchDevice
from engine.model.ops import Ops, reference_ops
from engine.model.pipeline import Pipeline
from engine.model.rows import RowBatch
from engine.model.step_ahead import Entered
from engine.model.step_drafter import StepDrafter
from engine.model.step_loading import load_step_model
from engine.model.step_model import StepModel
from engine.ports import DeviceInfo
from kernels import reference
from kernels.forms import DraftState, Judged, Weight
from tests.model.paged_cases import Source, random_ids, random_model, write_checkpoint
from tests.model.speculation_cases import Host, Request, run_host
from tests.model.step_cases import write_agreeing_checkpoint
from tests.model.test_paged_drafts import compute, small_ahead_config
from tests.model.test_speculation import SETTINGS, rows_of
from tests.model.test_step_model import DEVICES
from transport.messages import Sampling

LIMIT = 1e-4
"""As for the step itself, `test_step_forward.py`."""
SEED, EOS, PAGE, DRAFTS = 3, 7, 16, 3
LENGTHS_ON = {"cpu": [1, 13, 2, 31, 19, 45], "cuda": [13, 1, 31, 45]}
PROMPT_ROWS = {"cpu": (16, 48), "cuda": (16,)}
"""Each more of a size is compiled once more on a device."""
MIXED = [Sampling(), SETTINGS[2], Sampling(ignore_eos=True), SETTINGS[5], SETTINGS[1], SETTINGS[6]]
GREEDY = [Sampling(), Sampling(ignore_eos=True), Sampling(stop_ids=tuple(range(11, 43)))]


@pytest.fixture(scope="module")
def source() -> Source:
    return random_model(seed=SEED, config=small_ahead_config())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ahead")
    write_checkpoint(directory, seed=SEED, config=small_ahead_config())
    return directory


def load(
    directory: Path, device: str, *, drafts: int = DRAFTS, rows: int = 8, ops: Ops | None = None, role: str = "decode"
) -> tuple[StepModel, DeviceInfo]:
    config = RankConfig(
        role=role, model=str(directory), device="cuda", fabric="nixl", page_tokens=PAGE, max_model_tokens=128,
        num_pages=64, num_slabs=10, kv_dtype="float32", threads=1, replay_rows=0, config_digest="0",
        limits=Limits(decode_rows=len(LENGTHS_ON[device])), draft=DraftConfig(tokens=drafts, max_rows=rows),
    )  # fmt: skip
    ops = ops or (None if device == "cuda" else reference_ops())
    model, info = load_step_model(
        config, lambda *_: None, torch.device(device), poison=True, ops=ops, prompt_rows=PROMPT_ROWS[device]
    )
    return model, dataclasses.replace(info, eos_ids=(EOS,))


def start(model: StepModel, info: DeviceInfo) -> TorchDevice:
    return TorchDevice(
        model,
        info,
        proposer=model.drafter,
        read_checksums=model.arena.read_checksums,
        gpu=model.arena.bytes.device.index,
    )


def make_requests(settings: Sequence[Sampling], device: str = "cpu", limit: int = 14) -> list[Request]:
    requests, used = [], 0
    for slab, length in enumerate(LENGTHS_ON[device]):
        own = limit - slab % 3
        if settings[slab % len(settings)] not in GREEDY:
            own //= 2  # so that steps come that have none of them
        count = -(-(length + own) // PAGE)
        pages = tuple(range(used, used + count))
        used += count
        requests.append(
            Request(slab, pages[::-1], random_ids(length, 320, seed=slab), settings[slab % len(settings)], own)
        )
    return requests


# Proposals


@dataclasses.dataclass
class OnDevice:
    """A sequence on a device's model, run as `test_paged_drafts.Drafted` runs one on the CPU's."""

    model: StepModel
    slab: int

    @property
    def drafter(self) -> StepDrafter:
        assert self.model.drafter is not None
        return self.model.drafter

    def run(
        self, ids: np.ndarray, start: int, following: int, kept: int | None = None, *, reopens: bool = False
    ) -> None:
        batch = RowBatch(np.array([self.slab]), np.array([start]), ids[None], np.arange(5, 13)[None])
        self.model.forward(batch) if kept is not None else self.model.forward_prompt(batch, last=True)
        self.drafter.keep(None if kept is None else np.array([kept]), np.array([following]), reopens=reopens)

    def run_prompt(self, ids: np.ndarray, sizes: Sequence[int]) -> None:
        at, left = 0, list(sizes)
        while at < len(ids) - 1:
            end = min(at + left[0], len(ids) - 1)
            left = [*left[1:], left[0]]
            self.run(ids[at:end], at, int(ids[end]) if end == len(ids) - 1 else -1, reopens=True)
            at = end

    def propose(self, anchor: int, position: int, count: int) -> tuple[list[int], Tensor]:
        seen: list[Tensor] = []

        def pick(logits: Tensor, positions: np.ndarray) -> np.ndarray:
            assert positions.tolist() == [position + 1 + len(seen)]
            seen.append(logits[0].clone())
            return logits.argmax(-1).numpy()

        where = np.array([self.slab]), np.array([anchor]), np.array([position])
        tokens = self.drafter.propose(*where, count, pick=pick).tokens
        assert np.array_equal(self.drafter.propose(*where, count).tokens, tokens)
        return tokens[0].tolist(), torch.stack(seen)


def windows(arena: Tensor, data: int, stride: int, slab: int, rows: int, width: int) -> Tensor:
    at = data + slab * stride
    return arena[at : at + rows * width * 4].cpu().view(torch.float32).view(rows, width)


@pytest.fixture(scope="module", params=DEVICES)
def drafting(request: pytest.FixtureRequest, checkpoint: Path) -> StepModel:
    return load(checkpoint, request.param)[0]


WAYS = ["one pass", "chunks", "single rows", "rejected rows"]


@pytest.mark.parametrize(
    ("drafting", "way", "length"),
    [("cpu", way, length) for way in WAYS for length in (2, 9, 70)]
    + [pytest.param("cuda", way, 70, marks=DEVICES[1].marks) for way in ("chunks", "rejected rows")],
    indirect=["drafting"],
)
def test_proposals_and_the_ring_are_those_of_the_cpu(
    source: Source, drafting: StepModel, way: str, length: int
) -> None:
    ids = random_ids(length, 320, seed=length)
    anchor, last = int(ids[-1]), length - 1
    truth = compute(source, ids, "one pass")
    proposal, logits = truth.propose(anchor, last, DRAFTS)
    drafting.arena.poison()
    found = OnDevice(drafting, 4)
    if way == "one pass":
        found.run_prompt(ids, [len(ids)])
    elif way == "chunks":
        found.run_prompt(ids, [19, 1, 4, 2])
    else:
        first = min(3, length)
        found.run_prompt(ids[:first], [20])
        at, step = first - 1, 0
        while at < last:
            held = min(1 + step % (1 + DRAFTS), last - at) if way == "rejected rows" else 1
            rows = random_ids(1 + DRAFTS, 320, seed=step) if way == "rejected rows" else ids[at : at + 1].copy()
            rows[:held] = ids[at : at + held]
            found.run(rows, at, int(ids[at + held]), held)
            at, step = at + held, step + 1
    tokens, got = found.propose(anchor, last, DRAFTS)
    assert tokens == proposal.tokens[0].tolist()
    assert (got - logits).abs().max() < LIMIT
    records, shape = drafting.arena.records, drafting.shape
    plane = records.stages[0]
    ring = windows(drafting.arena.bytes, plane.data, plane.stride, 4, plane.rows, plane.width)
    row, stride = truth.model.arena.window_row(shape.num_layers)
    at = row + truth.sequence.slab * stride
    held = torch.arange(max(0, last - shape.window), last + DRAFTS - 1) % plane.rows
    assert (ring[held] - truth.model.arena.rows[at : at + plane.rows][held]).abs().max() < LIMIT
    assert records.streams is not None
    streams = windows(drafting.arena.bytes, records.streams.data, records.streams.stride, 4, 1, shape.stream_width)
    assert (streams - truth.model.arena.streams[truth.sequence.slab]).abs().max() < LIMIT


def test_the_streams_at_a_prompts_end_outlive_the_next_prompt(drafting: StepModel) -> None:
    """A graph writes those of both into the same memory, also where they are float32 already."""
    drafter, shape, device = drafting.drafter, drafting.shape, drafting.arena.bytes.device
    assert drafter is not None and drafting.arena.records.streams is not None
    ones, slabs = np.ones((2, 1), np.int64), np.array([1, 3])
    streams = torch.zeros((2, shape.num_streams, shape.hidden), device=device)
    drafter.see_prompts(RowBatch(slabs, np.zeros(2, np.int64), ones, ones))
    for number in range(2):
        streams.fill_(10 + number)
        drafter.see_prompt(streams, 1)
    drafter.keep(None, np.full(2, -1))
    place = drafting.arena.records.streams
    for number, slab in enumerate(slabs.tolist()):
        found = windows(drafting.arena.bytes, place.data, place.stride, slab, 1, shape.stream_width)
        assert (found == 10 + number).all()


def test_a_prefill_rank_keeps_the_context_without_experts(checkpoint: Path, drafting: StepModel) -> None:
    """Its slab, pushed, is one that a decode rank drafts from."""
    device = drafting.arena.bytes.device.type
    prefill, info = load(checkpoint, device, role="prefill")
    assert info.max_drafts == 0 and prefill.drafter is not None
    ids = random_ids(60, 320, seed=1)
    drafting.arena.poison()
    here, there = OnDevice(prefill, 2), OnDevice(drafting, 6)
    for each in (here, there):
        each.run_prompt(ids, [25, 40])
    wanted = there.propose(int(ids[-1]), 59, DRAFTS)
    assert prefill.drafter.propose(np.array([2]), ids[-1:], np.array([59]), 1).tokens.shape == (1, 0)
    drafting.arena.slab_bytes_of(6).copy_(prefill.arena.slab_bytes_of(2))
    got = there.propose(int(ids[-1]), 59, DRAFTS)
    assert got[0] == wanted[0] and torch.equal(got[1], wanted[1])


def test_rows_are_picked_with_all_that_they_bring() -> None:
    tables = [torch.randn(shape) for shape in ((5, 4, 8), (5, 4), (5, 4, 4), (5, 6))]
    found = Entered(*tables).pick(torch.tensor([3, 0], dtype=torch.int32), reference_ops())
    for got, table in zip((found.streams, found.post, found.combination, found.low), tables, strict=True):
        assert torch.equal(got, table[[3, 0]])


def test_both_halves_of_the_entrance_keep_their_scales() -> None:
    generator = torch.Generator().manual_seed(1)

    def draw() -> Weight:
        data = torch.randn((40, 32), generator=generator).to(torch.float8_e4m3fn)
        scale = torch.randint(120, 130, (3, 2), generator=generator).to(torch.uint8)
        return Weight(data, scale, (16, 16))

    left, right, x = draw(), draw(), torch.randn((5, 64), generator=generator)
    joined = join_columns(left, right)
    apart = reference.linear(x[:, :32], left) + reference.linear(x[:, 32:], right)
    assert (reference.linear(x, joined) - apart).abs().max() < 1e-5 * apart.abs().max()
    assert joined.num_bytes == left.num_bytes + right.num_bytes


# Texts


@pytest.fixture
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps end some looks after they were launched, as on a GPU; how many were under way at each look."""
    looks: collections.Counter[int] = collections.Counter()
    under_way: list[int] = []

    def has_ended(pipeline: Pipeline) -> bool:
        under_way.append(len(pipeline))
        looks[pipeline._launched[0].step] += 1
        return looks[pipeline._launched[0].step] > 20

    monkeypatch.setattr(Pipeline, "has_ended", property(has_ended))
    return under_way


@dataclasses.dataclass
class Plain:
    """Requests, and what comes of them on a device that does not draft."""

    requests: list[Request]
    texts: dict[int, list[int]]


async def run_plain(directory: Path, device: str, settings: Sequence[Sampling]) -> Plain:
    done = make_requests(settings, device)
    ranks = start(*load(directory, device, drafts=0))
    assert ranks.info.max_drafts == 0
    for request in done:
        await run_host(ranks, Host([request], (EOS,), [0], 1), queued=1)
    await ranks.aclose()
    return Plain(make_requests(settings, device), {request.slab: request.text for request in done})


class Decoding(Host):
    """Prompts in steps of their own, as on a rank that decodes, which has none."""

    def plan(self) -> StepPlan | None:
        others, self._running = self._running, [] if self._prompts else self._running
        plan = super().plan()
        if others is not self._running:
            self._running = [*others, *self._running]
        return plan


class KnowingOps:
    """Operations whose drafts are what the text will be, up to a place, each place in its turn."""

    def __init__(self, plain: Plain) -> None:
        self._lines = {
            request.slab: [*request.prompt.tolist(), *plain.texts[request.slab]] for request in plain.requests
        }
        self._turns = collections.Counter[int]()
        self._rng = random.Random(5)
        self.ops = reference_ops()
        self.ops.keep_drafts = self.keep_drafts

    def keep_drafts(self, found: Tensor, told: Tensor, judged: Judged, state: DraftState) -> None:
        known = found.clone()
        for b, slab in enumerate(told[2].tolist()):
            if slab not in self._lines or int(judged.slots[0, b]) < 0:
                continue
            self._turns[slab] += 1
            right = self._turns[slab] % (len(found) + 1)
            for k in range(len(found)):
                place = int(judged.slots[0, b]) + k + 2
                truth = self._lines[slab][place] if place < len(self._lines[slab]) else 3
                known[k, b] = truth if k < right else (truth + 1 + self._rng.randrange(319)) % 320
        reference.keep_drafts(known, told, judged, state)


def count_launches(device: TorchDevice, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    launched: list[int] = []
    pipeline = device._pipeline
    assert pipeline is not None
    launch = pipeline.launch

    def count(job, *given) -> None:
        launched.append(job.step)
        launch(job, *given)

    monkeypatch.setattr(pipeline, "launch", count)
    return launched


async def test_steps_that_draft_ahead_change_no_text(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, late: list[int]
) -> None:
    """Drafts that hold up to any place; sequences that come, go, sit out, and end in the middle of a step's tokens."""
    plain = await run_plain(checkpoint, "cpu", GREEDY)
    early = [len(plain.texts[request.slab]) < request.limit for request in plain.requests]
    assert any(early) and not all(early)
    seen: collections.Counter[tuple[int, int]] = collections.Counter()
    late.clear()
    for seed, drafts in enumerate([[DRAFTS], [0, DRAFTS, DRAFTS]]):
        model, info = load(checkpoint, "cpu", ops=KnowingOps(plain).ops)
        device = start(model, info)
        launched = count_launches(device, monkeypatch)
        host = Decoding([request.again() for request in plain.requests], (EOS,), drafts, seed)
        await run_host(device, host, queued=2)
        await device.aclose()
        assert {request.slab: request.text for request in host.requests} == plain.texts
        assert len(launched) >= host.figures.steps - 2 > 5  # others begin a prompt, too
        seen += host.figures.accepted
    assert max(late) == 2
    assert all(seen[DRAFTS, held] for held in range(DRAFTS + 1)), seen


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token is nearly a function of the present one, and whose drafter has nearly the same one."""
    directory = tmp_path_factory.mktemp("agreeing")
    write_agreeing_checkpoint(directory, small_ahead_config())
    return directory


@pytest.mark.parametrize("place", DEVICES)
async def test_drafts_that_a_drafter_makes_hold_and_change_no_text(
    agreeing: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = await run_plain(agreeing, place, GREEDY)
    model, info = load(agreeing, place)
    device = start(model, info)
    launched = count_launches(device, monkeypatch)
    seen: collections.Counter[tuple[int, int]] = collections.Counter()
    for seed, queued in ((0, 1), (1, 2)):
        host = Decoding([request.again() for request in plain.requests], (EOS,), [DRAFTS, DRAFTS, 0], seed)
        await run_host(device, host, queued=queued)
        assert {request.slab: request.text for request in host.requests} == plain.texts
        seen += host.figures.accepted
    await device.aclose()
    assert len(launched) > 10
    held = sum(held * count for (_, held), count in seen.items())
    verified = sum(tried * count for (tried, _), count in seen.items())
    # A third on the CPU, 27 % of the prompts that a GPU has.
    assert verified * 0.2 < held < verified, seen


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("drafts", [0, DRAFTS])
async def test_a_graph_is_its_eager_run_bit_for_bit(agreeing: Path, drafts: int) -> None:
    """What it tells, what it leaves of slabs, and the state by slab; some sequences are padding."""
    model, info = load(agreeing, "cuda")
    device = start(model, info)
    host = Decoding(make_requests(GREEDY, "cuda"), (EOS,), [drafts], 2)
    for _ in range(12):
        plan = host.plan()
        assert plan is not None
        host.apply(await device.wait(device.submit(plan)))
    await device.aclose()
    assert model.drafter is not None
    steps = model.drafter.steps
    assert steps is not None
    sized = steps.drafting[4 * (1 + DRAFTS)] if drafts else steps.plain[4]
    state = steps.state
    tensors = (model.arena.bytes, state.stands, state.tokens, state.counts, state.drafts)
    before = [tensor.clone() for tensor in tensors]
    found = []
    for run in (sized.replay, sized.whole.run, sized.replay):
        for tensor, saved in zip(tensors, before, strict=True):
            tensor.copy_(saved)
        outputs = run()
        used = sized.step.rows.positions >= 0
        live = used.view(4, -1)[:, 0]
        found.append([outputs.result[live], outputs.logits[used], *(tensor.clone() for tensor in tensors)])
    assert len(found[0][0])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("place", DEVICES)
async def test_all_ways_of_choosing_take_turns(checkpoint: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are drawn, scored or penalised are judged by the host, with drafts from steps that were not."""
    plain = await run_plain(checkpoint, place, MIXED)
    model, info = load(checkpoint, place)
    device = start(model, info)
    launched = count_launches(device, monkeypatch)
    for seed, drafts in enumerate([[0, 2, DRAFTS, DRAFTS]]):
        host = Decoding([request.again() for request in plain.requests], (EOS,), drafts, seed)
        await run_host(device, host, queued=2)
        assert {request.slab: request.text for request in host.requests} == plain.texts
        assert sum(tried > 0 for tried, _ in host.figures.accepted.elements()) > 5
    assert 0 < len(launched) < host.figures.steps * 2
    await device.aclose()


async def test_drafts_of_a_step_are_those_that_are_proposed_on_its_state(checkpoint: Path) -> None:
    model, info = load(checkpoint, "cpu")
    device = start(model, info)
    drafter, decoder = model.drafter, device._runner.decoder
    assert drafter is not None and drafter.steps is not None
    host = Decoding(make_requests(GREEDY), (EOS,), [DRAFTS], 2)
    compared = 0
    while not host.is_done:
        plan = host.plan()
        assert plan is not None
        result = await device.wait(device.submit(plan))
        host.apply(result)
        if plan.chunks or not plan.rows:
            continue
        slabs = plan.columns.roster.slabs[np.array(result.row_counts) > 0]
        stands, counts, drafts = decoder.recall(slabs)
        assert drafter.steps.state.stands[torch.from_numpy(slabs)].tolist() == stands.tolist()
        wanted = drafter.propose(slabs, model.arena.read_sampled(slabs), stands, DRAFTS).tokens
        for line, (count, found) in enumerate(zip(counts.tolist(), drafts.tolist(), strict=True)):
            assert found[:count] == wanted[line, :count].tolist()
            compared += count
    assert compared > 30
    await device.aclose()


async def test_what_a_row_may_not_have_is_refused_or_brings_nothing(checkpoint: Path) -> None:
    model, info = load(checkpoint, "cpu", rows=2)
    assert info.max_drafts == DRAFTS
    request = make_requests(GREEDY)[1]
    device = start(model, info)
    with pytest.raises(DeviceError, match="where slab 1 stands, and no pass of this device has left it anywhere"):
        await device.wait(device.submit(StepPlan(1, (), rows_of(request, -1, None, Sampling(), 20), drafts=DRAFTS)))
    await device.aclose()
    device = start(model, info)
    done = request.again()
    await run_host(device, Host([done], (EOS,), [DRAFTS], 1))
    before = model.arena.slabs.clone()
    rows = rows_of(request, -1, None, Sampling(), request.end - 15)
    result = await device.wait(device.submit(StepPlan(90, (), rows, drafts=DRAFTS)))
    assert (list(result.row_counts or ()), list(result.row_proposed or ()), list(result.row_tokens)) == ([0], [0], [])
    assert torch.equal(model.arena.slabs, before)
    # A place that is not the slab's, or another token there: a fresh sequence on a used slab.
    position, token = len(request.prompt) + len(done.text) - 2, done.text[-2]
    for place, first in ((position, (token + 1) % 320), (position - 1, token)):
        rows = rows_of(request, place, first, Sampling(), request.end)
        result = await device.wait(device.submit(StepPlan(99, (), rows, drafts=DRAFTS)))
        assert list(result.row_proposed or ()) == [0] and list(result.row_counts or ()) == [1]
    rows = rows_of(request, request.end, 5, Sampling(), 400)
    with pytest.raises(DeviceError, match="400 tokens need more pages than the 2 given"):
        await device.wait(device.submit(StepPlan(100, (), rows, drafts=DRAFTS)))
    await device.aclose()
