"""Rejection sampling of drafts in whole steps: golden tables, texts by the chain rule, devices, a group that breaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
import trio
from safetensors.torch import load_file
from torch import Tensor

from engine.config import DraftConfig
from engine.errors import GroupBroken
from engine.model import rejection, sampling
from engine.model.decoding import Decode, Decoded, Decoder
from engine.model.device import TorchDevice, open_torch_device
from engine.model.dispatch import Dispatch
from engine.model.exchange import Key
from engine.model.penalties import count_ids
from engine.model.sampling import LANE_ACCEPT, LANE_DRAFT, LANE_SAMPLE, process_logits
from tests.model.group_cases import Group, Hub, group_config, ignore
from tests.model.paged_cases import Source, random_model, small_config, smallest_page, write_checkpoint
from tests.model.rejection_rig import Lines, Memory, Script, open_decoder
from tests.model.speculation_cases import Host, Request, open_device, run_host
from tests.model.test_exact_sampling import CASES, EOS, SEEN, VOCAB, logits_of
from tests.model.test_group_drafts import make_requests as make_group_requests
from tests.model.test_group_drafts import run_group
from tests.model.test_paged_drafts import small_ahead_config
from tests.model.test_speculation import make_requests, run_plain
from transport.messages import Sampling

Ints = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]
TABLES = load_file(str(Path(__file__).parents[1] / "oracle" / "spec" / "tables.safetensors"))
FALSE_ALARM = 1e-6
"""Of each chi-square; seeds are fixed, so what passes once passes always."""


def run_steps(decoder: Decoder, rows: tuple[Sampling, ...], schedule: Sequence[int]) -> list[Decoded]:
    """Steps with so many drafts each; the first row stands at position 1."""
    slabs, zeros = np.arange(len(rows)), np.zeros(len(rows), np.int64)
    found = []
    for at, drafts in enumerate(schedule):
        told = zeros + 1 if at == 0 else zeros - 1
        tokens = zeros if at == 0 else zeros - 1
        decoded = decoder.run(Decode(slabs, told, tokens, zeros[:, None], zeros + 1, rows, None, drafts))
        if decoded.wanted is not None:
            decoder.propose(decoded.wanted, drafts)
        found.append(decoded)
    return found


@pytest.mark.parametrize("k", range(1, 6))
def test_steps_judge_drafts_as_the_tables_do(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What q draws and what p accepts goes through the decoder; the tables' numbers take the place of drawn ones."""
    p, q, drafts = (TABLES[f"k{k}.{name}"] for name in ("p", "q", "draft"))
    n, share = len(p), q.double().gather(2, drafts.long().unsqueeze(2))[:, :, 0]
    middle = (q.double().cumsum(2).gather(2, drafts.long().unsqueeze(2))[:, :, 0] - share / 2).numpy()
    accept, final = TABLES[f"k{k}.u"].double().numpy(), TABLES[f"k{k}.u_final"].double().numpy()

    def uniform(seeds: Any, positions: Any, lane: int = LANE_SAMPLE) -> Any:
        rows, places = np.asarray(seeds, np.int64), (np.asarray(positions) - 3).clip(0, k - 1)
        if lane == LANE_DRAFT:
            return middle[rows, places]
        return accept[rows, places] if lane == LANE_ACCEPT else final[rows]

    monkeypatch.setattr(rejection, "draw_uniform", uniform)
    monkeypatch.setattr(sampling, "draw_uniform", uniform)
    rows = tuple([Sampling(temperature=1.0, seed=row) for row in range(n)])
    memory = Memory(n)
    target = Lines(memory, p.double().log().float(), 2)
    decoder = open_decoder(memory, target, Script(q.double().log().float()))
    judged = run_steps(decoder, rows, [k, k])[1]
    assert judged.counts is not None and judged.proposed == (k,) * n
    assert [count - 1 for count in judged.counts] == TABLES[f"k{k}.sampled.accepted"].tolist()
    wanted = TABLES[f"k{k}.sampled.tokens"]
    assert list(judged.tokens) == wanted[wanted >= 0].tolist()


# ---------------------------------------------------------------- texts by the chain rule


def expected_texts(settings: Sampling, logits: Tensor, places: int) -> Doubles:
    """Probabilities of texts of so many tokens behind SEEN, one token after the other: float64[vocab, vocab, ...]."""
    joint, texts = np.ones(1), np.zeros((1, 0), np.int64)
    for _ in range(places):
        counts = torch.stack([count_ids(np.append(SEEN[0], text), SEEN[1] + len(text), VOCAB) for text in texts])
        share = process_logits(
            logits.repeat(len(texts), 1), [settings] * len(texts), counts if settings.has_penalties else None, EOS
        )
        joint = (joint[:, None] * share.numpy()).ravel()
        texts = np.concatenate((texts.repeat(VOCAB, 0), np.tile(np.arange(VOCAB), len(texts))[:, None]), 1)
    return joint.reshape((VOCAB,) * places)


def chance(observed: Doubles, expected: Doubles) -> float:
    """Of a chi-square at least this large; rare cells are joined, and one that must not occur makes it 0."""
    observed, expected = observed.ravel(), expected.ravel()
    if observed[expected == 0].any():
        return 0.0
    rare = expected < 8
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    halves = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


SEQUENCES, PLACES = 20_000, 4
CHAINED = {
    "plain": CASES["plain"],
    "cold": CASES["cold"],
    "all cuts": CASES["all cuts"],
    "frequency": CASES["frequency"],
    "penalties and a cut": Sampling(
        temperature=0.8, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.5
    ),
}


def pair_chances(name: str, schedule: Sequence[int]) -> list[float]:
    """Of each pair of neighbours among the first tokens of many texts."""
    settings = CHAINED[name]
    rows = tuple([msgspec.structs.replace(settings, seed=seed) for seed in range(SEQUENCES)])
    logits = torch.from_numpy(logits_of(name))[None]
    memory = Memory(SEQUENCES)
    memory.counts[:] = count_ids(*SEEN, VOCAB)
    theirs = torch.from_numpy(np.random.default_rng(9).normal(0, 1, (1, 5, VOCAB)).astype(np.float32))
    decoder = open_decoder(memory, Lines(memory, logits[None], 0), Script(theirs))
    texts: list[list[int]] = [[] for _ in rows]
    for decoded in run_steps(decoder, rows, schedule):
        counts = (1,) * SEQUENCES if decoded.counts is None else decoded.counts
        at = 0
        for text, count in zip(texts, counts, strict=True):
            text += decoded.tokens[at : at + count]
            at += count
    came = np.array([text[:PLACES] for text in texts])
    joint = expected_texts(settings, logits, PLACES)
    found = []
    for place in range(PLACES - 1):
        others = tuple([axis for axis in range(PLACES) if axis not in (place, place + 1)])
        observed = np.bincount(came[:, place] * VOCAB + came[:, place + 1], minlength=VOCAB**2)
        found.append(chance(observed.astype(np.float64), joint.sum(others) * SEQUENCES))
    return found


@pytest.mark.parametrize("name", CHAINED)
def test_texts_follow_the_chain_rule_where_steps_draft_and_do_not(name: str) -> None:
    """Each token with the counts of those before it, and none that hangs on numbers that were used before."""
    chances = pair_chances(name, [3, 1, 0, 2, 2])
    assert min(chances) > FALSE_ALARM, chances


@pytest.mark.parametrize("mistake", ["counts stand still", "one number for two purposes"])
def test_a_mistake_shows_in_the_pairs(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake == "counts stand still":
        monkeypatch.setattr(Memory, "add_counts", lambda *_: None)
    else:
        monkeypatch.setattr(rejection, "LANE_ACCEPT", LANE_DRAFT)
    assert min(pair_chances("frequency", [2, 2, 1, 0])) < FALSE_ALARM


# ---------------------------------------------------------------- devices


@pytest.fixture(scope="module", params=["v4.1 blocks", "v4 ahead"])
def source(request: pytest.FixtureRequest) -> Source:
    return random_model(seed=3, config=small_config() if "v4.1" in request.param else small_ahead_config())


async def run_rejecting(source: Source, requests: Sequence[Request], drafts: list[int]) -> Host:
    device = open_device(source, requests, "own", 7, rejects=True)
    host = Host([request.again() for request in requests], (7,), drafts, 5)
    await run_host(device, host)
    await device.aclose()
    return host


async def test_greedy_texts_are_as_ever_and_drawn_ones_the_same_twice(source: Source) -> None:
    lengths = [1, 3, 13, 2, 31, 19, 62, 64]
    requests = make_requests(source, lengths, 20, smallest_page(source.shape))
    plain = await run_plain(source, requests)
    once, again = await run_rejecting(source, requests, [3]), await run_rejecting(source, requests, [3])
    assert sum(tried > 0 for tried, _ in once.figures.accepted.elements()) > 20
    for first, second, without in zip(once.requests, again.requests, plain, strict=True):
        assert first.text == second.text and first.scored == second.scored
        if first.sampling.temperature == 0:
            assert first.text == without.text and first.scored == without.scored
        # The prompt's pass tells of the first.
        assert len(first.scored) == (len(first.text) - 1 if first.sampling.logprobs >= 0 else 0)
    assert any(a.text != b.text for a, b in zip(once.requests, plain, strict=True))


async def test_without_drafts_texts_are_those_of_the_other_rule(source: Source) -> None:
    requests = make_requests(source, [1, 13, 31, 19], 12, smallest_page(source.shape))
    plain = await run_plain(source, requests)
    host = await run_rejecting(source, requests, [0])
    assert [request.text for request in host.requests] == [request.text for request in plain]


async def open_rejecting(directory: Path, hub: Hub) -> Group:
    devices: list[TorchDevice] = []
    for place in range(2):
        config = dataclasses.replace(group_config(directory, 2), draft=DraftConfig(acceptance="rejection"))
        address = str(directory / f"rejecting-{place}.mesh")
        devices.append(await open_torch_device(config, ignore, poison=True, mesh_address=address, connect=hub.connect))
    return Group(devices)


async def test_a_group_that_breaks_off_finds_the_same(tmp_path: Path) -> None:
    """In passes of the target and of the drafter, found by either member."""
    write_checkpoint(tmp_path, config=small_config())
    texts = []
    for is_broken in (False, True):
        hub, told = Hub(), [0, 0]
        group = await open_rejecting(tmp_path, hub)
        main, parts = group.lay_out()[0], group.devices[0].info.parts
        ends = [(part, layer, phase) for part in (1, 0, 1) for layer in (0, parts[part].layers - 1) for phase in (1, 2)]
        hit: list[tuple[int, ...]] = []

        def breaks(number: int, key: Key, place: int, group: Group = group, ends: Any = ends, hit: Any = hit) -> bool:
            dispatch = group.devices[place].model.mixture
            if number > len(ends) or place != number % 2 or key[0] < number % 3:
                return False
            assert isinstance(dispatch, Dispatch)
            if (dispatch._part, *key[2:]) != ends[number - 1]:
                return False
            hit.append(ends[number - 1])
            return True

        if is_broken:
            hub.breaks = breaks
        await group.join(group.name(main))
        async with trio.open_nursery() as nursery:

            def on_broken(
                place: int, broken: GroupBroken, group: Group = group, told: Any = told, main: Any = main,
                nursery: trio.Nursery = nursery,
            ) -> None:  # fmt: skip
                told[place] += 1
                if told == [group.number] * 2:
                    nursery.start_soon(group.join, group.name(main))

            hosts = await run_group(group, on_broken)
        for device in group.devices:
            await device.aclose()
        assert hit == (ends if is_broken else [])
        assert all(host.is_done for host in hosts)
        assert all(any(tried for tried, _ in host.figures.accepted) for host in hosts)
        texts.append([(request.text, request.scored) for host in hosts for request in host.requests])
    assert texts[0] == texts[1]
    drawn = [request for place in range(2) for request in make_group_requests(place) if request.sampling.temperature]
    assert drawn
