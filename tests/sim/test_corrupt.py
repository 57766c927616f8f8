"""Faults in the bytes themselves: flipped bits, writes that land twice; the kinds came without moving other draws."""

from __future__ import annotations

import dataclasses
import random
import zlib
from pathlib import Path

import pytest

from engine.core.decode import DecodeSide
from engine.core.taking import Taker
from engine.errors import ConfigError
from engine.sim.faults import Swarm, draw_faults
from engine.sim.play import Outcome, play
from engine.sim.scenario import EXTRA_KINDS, SMALL_LIMITS, Scenario, draw_scenario, load_scenario
from engine.sim.workload import Load
from engine.sim.world import WorldShape
from transport.memory_fabric import MemoryFabric, MemoryTransfer

SHAPE = WorldShape(prefill=2, decode=2, limits=SMALL_LIMITS, checksums=True)
LOAD = Load(requests=40, clients=2, arrive_s=5.0, prompt=(1, 90), cancel_share=0.1)


def run(*kinds: str, seed: int = 1, shape: WorldShape = SHAPE, also: tuple[str, ...] = ()) -> Outcome:
    extra = Swarm(kinds=kinds, per_s=4.0, until_s=6.0)
    return play(Scenario("bytes", seed, shape, LOAD, Swarm(kinds=also, per_s=2.0, until_s=6.0), extra))


def check(outcome: Outcome) -> Outcome:
    wrong = outcome.violation or outcome.crash
    if wrong is not None:
        raise wrong
    return outcome


def test_flipped_bits_are_found_and_cost_nobody_a_token() -> None:
    answers = check(run("corrupt")).answers
    assert answers.failures["kv_corrupt"] >= 3 and answers.most_attempts > 1
    assert set(answers.failures) <= {"kv_corrupt", "cancelled"}
    assert answers.outcomes["finished"] + answers.outcomes.get("cancelled", 0) == 40


def test_flipped_bits_among_other_faults() -> None:
    answers = check(run("corrupt", "push-twice", "cut-pair", also=("crash", "slow", "push-late", "stop"))).answers
    assert answers.failures["kv_corrupt"] and answers.failures["rank_lost"]


def test_a_decode_rank_that_does_not_compare_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DecodeSide.on_pages_read

    def believe(self: DecodeSide, key: tuple[int, int], checksums: tuple[int, ...], now_us: int) -> None:
        original(self, key, tuple(told for _, _, told in self._reading[key].told), now_us)

    monkeypatch.setattr(DecodeSide, "on_pages_read", believe)
    found = {outcome.violation.checker for seed in range(3) if (outcome := run("corrupt", seed=seed)).violation}
    assert found == {"tags"}


TALK_SHAPE = dataclasses.replace(SHAPE, hand_back=True, num_slabs=16, num_pages=128)
TALK_LOAD = dataclasses.replace(LOAD, talk_share=1.0, requests=120, arrive_s=6.0, prompt=(1, 40))


def run_talk(seed: int) -> Outcome:
    extra = Swarm(kinds=("corrupt",), per_s=4.0, until_s=6.0)
    return play(Scenario("bytes", seed, TALK_SHAPE, TALK_LOAD, Swarm(), extra))


def test_turns_with_flipped_bits_do_not_come_into_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    original, corrupt = Taker.on_pages_read, []

    def count(self: Taker, key: tuple[int, int], checksums: tuple[int, ...], now_us: int) -> None:
        before = self.num_corrupt
        original(self, key, checksums, now_us)
        corrupt.append(self.num_corrupt > before)

    monkeypatch.setattr(Taker, "on_pages_read", count)
    for seed in range(3):
        check(run_talk(seed))
    assert sum(corrupt) >= 2 and corrupt.count(False) > 20

    def believe(self: Taker, key: tuple[int, int], checksums: tuple[int, ...], now_us: int) -> None:
        original(self, key, (self._reading[key].commit.checksum,), now_us)  # type: ignore[union-attr]

    monkeypatch.setattr(Taker, "on_pages_read", believe)
    assert "tags" in {outcome.violation.checker for seed in range(12) if (outcome := run_talk(seed)).violation}


def test_without_faults_checksums_change_no_answer() -> None:
    answers = check(run()).answers
    assert answers.num_attempts == 40 and not answers.failures.keys() - {"cancelled"}


def test_writes_that_land_twice_are_no_harm_while_their_end_is_told_last() -> None:
    outcome = check(run("push-twice", shape=dataclasses.replace(SHAPE, checksums=False)))
    assert outcome.answers.outcomes["finished"] and not outcome.answers.failures.keys() - {"cancelled"}
    assert outcome.landings > outcome.commits


def test_a_transport_that_says_it_is_done_before_the_second_time_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = MemoryFabric._copy

    def hurry(self: MemoryFabric, transfer: MemoryTransfer, flip_at: float | None = None) -> None:
        copy(self, transfer, flip_at)
        self._settle(transfer, None)

    monkeypatch.setattr(MemoryFabric, "_copy", hurry)
    outcome = run("push-twice", shape=dataclasses.replace(SHAPE, checksums=False))
    assert outcome.violation is not None and outcome.violation.checker == "late-write"


# ---------------------------------------------------------------- what seeds draw

SHAPE_DRAWS = (
    "prefill", "decode", "page_tokens", "num_pages", "max_model_tokens", "eos_share", "prefill_group",
    "decode_group", "link_latency_s", "fabric_latency_s", "fabric_bytes_per_s",
)  # fmt: skip
LIMIT_DRAWS = (
    "prefill_chunk_tokens", "prefill_prompts", "decode_rows", "rank_waiting", "queue_requests", "queue_prompt_tokens",
    "client_inflight", "link_out_bytes",
)  # fmt: skip


def test_what_seeds_drew_before_the_later_kinds_they_draw_still() -> None:
    """seeds.txt and the planted bugs rest on it. If this has to change, look for new seeds. Left out is what
    conversations came with: so many slabs, and their share of the requests."""
    value = 0
    for seed in range(300):
        scenario = draw_scenario(seed)
        shape, limits = scenario.shape, scenario.shape.limits
        parts = [(name, getattr(shape, name)) for name in SHAPE_DRAWS]
        parts += [(name, getattr(limits, name)) for name in LIMIT_DRAWS]
        faults = draw_faults(scenario.swarm, random.Random(seed))
        load = [value for name, value in dataclasses.asdict(scenario.load).items() if name != "talk_share"]
        drawn = (parts, load, scenario.swarm, scenario.settle_s, scenario.signals, faults)
        value = zlib.crc32(repr(drawn).encode(), value)
    assert f"{value:08x}" == "7b46d9f5"


def test_seeds_draw_the_later_kinds_too() -> None:
    extras = [draw_scenario(seed).extra for seed in range(200)]
    assert {kind for extra in extras for kind in extra.kinds} == set(EXTRA_KINDS)
    assert 60 < sum(bool(extra.kinds) for extra in extras) < 140
    assert not any("corrupt" in draw_scenario(seed).swarm.kinds for seed in range(200))


def test_flipped_bits_need_checksums(tmp_path: Path) -> None:
    path = tmp_path / "flips.toml"
    text = "[swarm]\nkinds = ['corrupt']\nper_s = 2\nuntil_s = 5\n"
    path.write_text(text)
    with pytest.raises(ConfigError, match="'corrupt' needs checksums = true"):
        load_scenario(str(path), 0)
    path.write_text("[cluster]\nchecksums = true\n" + text)
    assert check(play(load_scenario(str(path), 3))).answers.failures["kv_corrupt"]
