"""Drafts on the paged path against golden ones, however their context came about, and the same bits in any company."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.errors import ConfigError
from engine.model.drafting import Proposal, Proposer
from engine.model.proposers import make_proposer
from engine.model.transformer import PagedTransformer
from tests.model import paged_cases
from tests.model.conftest import ORACLE, Golden
from tests.model.paged_cases import Source, join, make_model, open_sequence, random_ids, random_model, small_config

LIMIT = 1e-4
Ints = npt.NDArray[np.int64]
BLOCKS = {"v41": "v41-tiny", "v4": "v4-tiny-fast"}
WAYS = ["one pass", "chunks", "single rows", "rejected rows", "moved"]


@dataclasses.dataclass
class Drafted:
    """A model that drafts, and where one of its sequences is."""

    model: PagedTransformer
    proposer: Proposer
    sequence: paged_cases.Sequence

    def run(self, ids: Ints, start: int, following: int, kept: int | None = None, *, reopens: bool = False) -> None:
        """One pass over ids at positions start.., of which the first `kept` rows hold."""
        self.model.forward(self.sequence.batch(ids, start))
        counts = None if kept is None else np.array([kept])
        self.proposer.keep(counts, np.array([following]), reopens=reopens)

    def run_prompt(self, ids: Ints, sizes: Sequence[int]) -> None:
        """All but the last of ids, in chunks of these sizes over and over; the last is the anchor."""
        start, left = 0, list(sizes)
        while start < len(ids) - 1:
            end = min(start + left[0], len(ids) - 1)
            left = [*left[1:], left[0]]
            self.run(ids[start:end], start, int(ids[end]) if end == len(ids) - 1 else -1, reopens=True)
            start = end

    def propose(self, anchor: int, position: int, count: int) -> tuple[Proposal, Tensor]:
        """The proposal, and the logits float32[count, vocab] that it was chosen from."""
        seen: list[Tensor] = []

        def pick(logits: Tensor, positions: Ints) -> Ints:
            assert positions.tolist() == [position + 1 + len(seen)]
            seen.append(logits[0].clone())
            return logits.argmax(-1).numpy()

        slab = np.array([self.sequence.slab])
        proposal = self.proposer.propose(slab, np.array([anchor]), np.array([position]), count, pick=pick)
        return proposal, torch.stack(seen)


def open_drafted(source: Source, length: int, *, slab: int = 0, seed: int = 0, slabs: int = 8) -> Drafted:
    pages = 4 * -(-length // paged_cases.smallest_page(source.shape)) + 4
    model = make_model(source, pages=pages, slabs=slabs)
    proposer = make_proposer(model, source.weights)
    assert proposer is not None
    return Drafted(model, proposer, open_sequence(model, length, slab=slab, seed=seed))


def move(drafted: Drafted, source: Source, length: int) -> Drafted:
    """The sequence on another model, at another slab and other pages; only bytes of pages and slab go there."""
    there = open_drafted(source, length, slab=1, seed=1, slabs=3)
    for at, target in zip(drafted.sequence.pages.tolist(), there.sequence.pages.tolist(), strict=True):
        there.model.arena.page_bytes_of(target).copy_(drafted.model.arena.page_bytes_of(at))
    there.model.arena.slab_bytes_of(1).copy_(drafted.model.arena.slab_bytes_of(drafted.sequence.slab))
    return there


def compute(source: Source, ids: Ints, way: str) -> Drafted:
    """A sequence whose last id is the anchor, everything before it computed."""
    drafted = open_drafted(source, len(ids) + 8, slab=5)
    if way == "one pass":
        drafted.run_prompt(ids, [len(ids)])
    elif way == "chunks":
        drafted.run_prompt(ids, [9, 1, 4, 13])
    elif way == "rejected rows":
        # Seven noise ids behind every id or two.
        vocab, at, step = source.shape.vocab_size, 0, 0
        while at < len(ids) - 1:
            held = min(1 + step % 3, len(ids) - 1 - at)
            noise = random_ids(8, vocab, seed=step)
            noise[:held] = ids[at : at + held]
            drafted.run(noise, at, int(ids[at + held]), held)
            at, step = at + held, step + 1
    else:
        prompt = len(ids) if way == "moved" else min(3, len(ids))
        drafted.run_prompt(ids[:prompt], [20])
        if way == "moved":
            drafted = move(drafted, source, len(ids) + 8)
        for at in range(prompt - 1, len(ids) - 1):
            drafted.run(ids[at : at + 1], at, int(ids[at + 1]), 1)
    return drafted


def source_of(gold: Golden) -> Source:
    return Source(gold.shape, gold.weights, gold.tables)


@functools.cache
def stored_blocks(form: str) -> dict[str, Tensor]:
    return load_file(ORACLE / "dspark" / f"{form}.safetensors")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", BLOCKS)
def test_golden_blocks(golden: Callable[[str], Golden], form: str, way: str) -> None:
    source, stored = source_of(golden(BLOCKS[form])), stored_blocks(form)
    ids = stored["s0.ids"].numpy().astype(np.int64)
    found = sorted({(int(key.split(".")[1][1:]), int(key.split(".")[2][1:])) for key in stored if ".hidden" in key})
    assert len(found) >= 16
    for anchor in sorted({anchor for anchor, _ in found}):
        drafted = compute(source, ids[: anchor + 1], way)
        for block in [block for a, block in found if a == anchor]:
            proposal, logits = drafted.propose(int(ids[anchor]), anchor, block)
            name = f"s0.a{anchor}.b{block}"
            assert proposal.tokens[0].tolist() == stored[f"{name}.tokens"].tolist(), (anchor, block)
            assert (logits - stored[f"{name}.logits"]).abs().max() < LIMIT
            assert proposal.confidence is not None
            assert np.abs(proposal.confidence[0] - stored[f"{name}.confidence"].numpy()).max() < LIMIT


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["L5", "L16", "L40"])
def test_golden_drafts_of_the_layer_that_predicts_ahead(golden: Callable[[str], Golden], case: str, way: str) -> None:
    gold = golden("v4-tiny")
    stored = load_file(ORACLE / "v4-mtp" / "cases.safetensors")
    ids = np.append(stored[f"{case}.ids"].numpy(), int(stored[f"{case}.next_token"])).astype(np.int64)
    anchors = range(1, len(ids)) if way in ("chunks", "single rows") and len(ids) < 20 else [1, len(ids) // 2]
    for anchor in [*anchors, len(ids) - 1]:
        drafted = compute(source_of(gold), ids[: anchor + 1], way)
        proposal, logits = drafted.propose(int(ids[anchor]), anchor, 3)
        assert proposal.tokens[0].tolist() == stored[f"{case}.drafts_at"][anchor - 1].tolist(), anchor
        assert (logits[0] - stored[f"{case}.slot_logits"][anchor - 1]).abs().max() < LIMIT
        if anchor == len(ids) - 1:
            assert (logits - stored[f"{case}.draft_logits"]).abs().max() < LIMIT


def small_ahead_config() -> dict[str, object]:
    """V4 with the layer that predicts ahead, else as `small_v4_config`."""
    config = paged_cases.small_v4_config()
    config.update(num_nextn_predict_layers=1, compress_ratios=[*config["compress_ratios"], 0])
    for name in [name for name in config if name.startswith("dspark")]:
        del config[name]
    return config


def small_v4_block_config() -> dict[str, object]:
    """V4 with a block drafter, else as `small_v4_config`."""
    config = paged_cases.small_v4_config()
    config.update(
        num_nextn_predict_layers=2, compress_ratios=[*config["compress_ratios"], 0, 0], dspark_noise_token_id=319
    )
    return config


@pytest.fixture(scope="module", params=["v4.1 blocks", "v4 blocks", "v4 ahead"])
def source(request: pytest.FixtureRequest) -> Source:
    make = {"v4.1 blocks": small_config, "v4 blocks": small_v4_block_config, "v4 ahead": small_ahead_config}
    return random_model(seed=3, config=make[request.param]())


LENGTHS = [2, 21, 22, 30, 67]


@pytest.mark.parametrize("count", [1, 5])
def test_drafts_have_the_same_bits_in_any_company_and_however_the_context_came(source: Source, count: int) -> None:
    texts = [random_ids(length, source.shape.vocab_size, seed=length) for length in LENGTHS]
    alone = {}
    for text in texts:
        ways = [compute(source, text, way).propose(int(text[-1]), len(text) - 1, count) for way in WAYS]
        for proposal, logits in ways[1:]:
            assert torch.equal(logits, ways[0][1])
            assert np.array_equal(proposal.tokens, ways[0][0].tokens)
            if proposal.confidence is not None:
                assert np.array_equal(proposal.confidence, ways[0][0].confidence)
        alone[len(text)] = ways[0]
    model = make_model(source, pages=400, slabs=len(texts) * 4)
    proposer = make_proposer(model, source.weights)
    assert proposer is not None
    slabs = np.random.default_rng(count).permutation(len(texts) * 3)[: len(texts)]
    sequences = [open_sequence(model, len(text), slab=int(slab)) for text, slab in zip(texts, slabs, strict=True)]
    used = 0
    for sequence in sequences:
        sequence.pages = np.arange(used, used + len(sequence.pages))
        used += len(sequence.pages)
    # All prompts in one pass.
    model.forward(join([s.batch(text[:-1], 0) for s, text in zip(sequences, texts, strict=True)]))
    anchors, positions = np.array([text[-1] for text in texts]), np.array(LENGTHS) - 1
    proposer.keep(None, anchors)
    for size in (2, 5, len(texts)):
        order = np.random.default_rng(size).permutation(len(texts))[:size]
        proposal = proposer.propose(slabs[order], anchors[order], positions[order], count)
        for line, at in enumerate(order.tolist()):
            wanted = alone[LENGTHS[at]][0]
            assert np.array_equal(proposal.tokens[line], wanted.tokens[0])
            if wanted.confidence is not None and proposal.confidence is not None:
                assert np.array_equal(proposal.confidence[line], wanted.confidence[0])


def test_what_is_kept_depends_on_no_rejected_draft(source: Source) -> None:
    """Ring rows of everything that holds are the same bytes with and without drafts behind them."""
    ids = random_ids(70, source.shape.vocab_size, seed=1)
    plain, noisy = compute(source, ids, "single rows"), compute(source, ids, "rejected rows")
    ring, layout = plain.model.arena.layout.ring, plain.model.arena.layout
    for layer in range(source.shape.num_layers, layout.window_layers):
        lines = []
        for drafted in (plain, noisy):
            first, stride = drafted.model.arena.window_row(layer)
            at = first + 5 * stride
            lines.append(drafted.model.arena.rows[at : at + ring])
        held = torch.arange(69 - source.shape.window, 69) % ring
        assert torch.equal(lines[0][held], lines[1][held])
        assert lines[0][held].isfinite().all() and lines[0][held].abs().sum() > 0


def test_a_pass_is_kept_once_and_nobody_keeps_what_was_not_seen(source: Source) -> None:
    ids = random_ids(12, source.shape.vocab_size, seed=1)
    drafted = compute(source, ids, "one pass")
    before = drafted.model.arena.slabs.clone()
    drafted.proposer.keep(None, np.array([5]))
    assert torch.equal(drafted.model.arena.slabs, before)


def test_a_model_without_drafter_has_no_proposer() -> None:
    plain = random_model(config=paged_cases.small_v4_config())
    assert make_proposer(make_model(plain), plain.weights) is None


def test_a_bounded_replay_keeps_the_context_of_the_rows_that_it_replays() -> None:
    """As many rows as make it exact: then the drafts are those of a whole forward."""
    source = random_model(seed=5)
    ids = random_ids(131, source.shape.vocab_size, seed=6)
    wanted, _ = compute(source, ids, "one pass").propose(int(ids[-1]), 130, 4)
    replayed = source.shape.num_layers - max(source.shape.kv_sources)
    model = make_model(source, replay_rows=replayed * (source.shape.window - 1) + 1)
    proposer = make_proposer(model, source.weights)
    assert proposer is not None
    sequence = open_sequence(model, 140)
    for start, end in ((0, 50), (50, 100), (100, 130)):
        model.forward_prompt(sequence.batch(ids[start:end], start), last=end == 130, wanted=[])
        proposer.keep(None, np.array([int(ids[-1]) if end == 130 else -1]), reopens=True)
    found = proposer.propose(np.array([0]), ids[-1:], np.array([130]), 4)
    assert np.array_equal(found.tokens, wanted.tokens)
    assert np.array_equal(found.confidence, wanted.confidence)


def test_a_replay_without_the_features_of_its_rows_is_refused() -> None:
    config = small_config()
    config["text_config"]["dspark_target_layer_ids"] = [1, 6, 7]
    source = random_model(config=config)
    model = make_model(source, replay_rows=40)
    with pytest.raises(ConfigError, match=r"features at or after layer 5, they are of layers \[1, 6, 7\]"):
        make_proposer(model, source.weights)
