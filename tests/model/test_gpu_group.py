"""Groups whose ranks exchange rows inside their steps, as on GPUs: processes on the CPU, mailboxes in shared memory.

What is told, by whom, in which membership; that tokens are those of a rank alone, whatever breaks or moves meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import trio

from engine.model.device import TorchDevice
from engine.model.ops import reference_ops
from engine.model.step_loading import load_step_model
from tests.model.gpu_rank_cases import ROWS_TO_PROMPT_ROWS, RankProcess, draw_plans, rank_config
from tests.model.paged_cases import small_v4_config, write_checkpoint

STEPS, FEW_STEPS = 14, 6
SEEDS = (1, 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    # The vocabulary of `tests/e2e/test_gpu_groups.py`: kernels are compiled once for both.
    write_checkpoint(directory, config=small_v4_config() | {"vocab_size": 8192})
    return directory


ON_GPUS = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")],
)


@pytest.fixture(scope="module", params=["plain", ON_GPUS])
def rows(request: pytest.FixtureRequest) -> str:
    """How ranks exchange rows."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def alone(checkpoint: Path, rows: str) -> dict[int, list[Any]]:
    return run_alone(checkpoint, rows, STEPS)


def run_alone(directory: Path, rows: str, steps: int) -> dict[int, list[Any]]:
    """By seed, what a rank without a group tells."""
    torch.set_num_threads(1)
    on_gpu = rows == "cuda"
    model, info = load_step_model(
        rank_config(directory, 1), lambda *_: None, torch.device("cuda", 0) if on_gpu else torch.device("cpu"),
        poison=True, ops=None if on_gpu else reference_ops(), prompt_rows=ROWS_TO_PROMPT_ROWS[rows],
    )  # fmt: skip

    async def run(seed: int) -> list[Any]:
        device = TorchDevice(
            model, info, read_checksums=model.arena.read_checksums, gpu=0 if on_gpu else None
        )
        found = []
        for plan in draw_plans(seed, steps):
            result = await device.wait(device.submit(plan))
            found.append([list(result.chunk_tokens), list(result.row_tokens)])
        await device.aclose()
        return found

    return {seed: trio.run(run, seed) for seed in SEEDS}


@pytest.fixture(scope="module")
def pair(checkpoint: Path, rows: str) -> Iterator[list[RankProcess]]:
    """For tests after which the group goes on."""
    with open_ranks(checkpoint, rows=rows) as ranks:
        yield ranks


@contextmanager
def open_ranks(checkpoint: Path, size: int = 2, **options: Any) -> Iterator[list[RankProcess]]:
    """In membership 1."""
    with ExitStack() as stack:
        meeting = Path(stack.enter_context(TemporaryDirectory()))
        ranks = [
            stack.enter_context(RankProcess(checkpoint, place, size, meeting=meeting, **options))
            for place in range(size)
        ]
        for rank in ranks:
            rank.await_word("ready")
        call_all(ranks, "join", number=1, lives=[1] * size)
        yield ranks


def call_all(ranks: Sequence[RankProcess], action: str, **options: Any) -> list[Any]:
    """All at once; their answers."""
    for rank in ranks:
        rank.post(action, **options)
    return [rank.await_word(action) for rank in ranks]


def check_words(runs: Sequence[dict[str, Any]]) -> None:
    """All ranks counted the same steps, and agreed about them."""
    groups = [run["groups"] for run in runs]
    assert all(group == groups[0] for group in groups)
    steps = [group[:2] for group in groups[0]]
    assert steps == [[steps[0][0], steps[0][1] + at] for at in range(len(steps))]


def test_tokens_are_those_of_a_rank_alone(pair: list[RankProcess], alone: dict[int, list[Any]]) -> None:
    """Prompts here while rows decode there, many rows beside few; greedy steps are launched ahead."""
    for rank, seed in zip(pair, SEEDS, strict=True):
        rank.post("run", seed=seed, steps=STEPS)
    runs = [rank.await_word("run") for rank in pair]
    assert [run["outcomes"] for run in runs] == [alone[seed] for seed in SEEDS]
    assert all(run["launched"] > 3 for run in runs)
    check_words(runs)
    assert all(sum(rank.call("loads")["counts"]) > 0 for rank in pair)


def test_a_model_that_shares_entries_steps_in_a_group(tmp_path: Path, rows: str) -> None:
    """V4.1's layers, without its drafter."""
    write_checkpoint(tmp_path)
    alone = run_alone(tmp_path, rows, FEW_STEPS)
    with open_ranks(tmp_path, rows=rows) as ranks:
        for rank, seed in zip(ranks, SEEDS, strict=True):
            rank.post("run", seed=seed, steps=FEW_STEPS)
        assert [rank.await_word("run")["outcomes"] for rank in ranks] == [alone[seed] for seed in SEEDS]


@pytest.mark.slow
def test_interpreted_kernels_do_the_same(checkpoint: Path, pair: list[RankProcess], rows: str) -> None:
    """The exchange's own kernels between two processes: a prompt of a few rows here, none there."""
    if rows != "plain":
        pytest.skip("compiled kernels are in all the others")
    with open_ranks(checkpoint, rows="interpreted") as ranks:
        runs = call_all(ranks, "run", seed=0, steps=2, few=True)
    plain = call_all(pair, "run", seed=0, steps=2, few=True)
    assert runs[0]["outcomes"] == plain[0]["outcomes"] and runs[0]["outcomes"][1][1]
    assert [run["launched"] for run in runs] == [1, 2]


def test_an_idle_rank_goes_along_and_all_park_at_the_same_step(
    checkpoint: Path, alone: dict[int, list[Any]], rows: str
) -> None:
    with open_ranks(checkpoint, rows=rows) as ranks:
        ranks[0].post("run", seed=SEEDS[0], steps=STEPS)
        ranks[1].post("run", seed=0, steps=STEPS, idle=True)
        runs = [rank.await_word("run") for rank in ranks]
        assert runs[0]["outcomes"] == alone[SEEDS[0]]
        # All steps of the rank without rows were launched, since nothing in them needs the host.
        assert runs[1]["launched"] == STEPS
        check_words(runs)
        idle = call_all(ranks, "run", seed=0, steps=6, idle=True)
        check_words(idle)
        assert [group[3] for group in idle[0]["groups"]] == [False] * 3 + [True] * 3
        # Woken: the same two have rows again.
        for rank, seed in zip(ranks, SEEDS, strict=True):
            rank.post("run", seed=seed, steps=STEPS)
        runs = [rank.await_word("run") for rank in ranks]
        assert [run["outcomes"] for run in runs] == [alone[seed] for seed in SEEDS]
        ends = call_all(ranks, "run", seed=0, steps=3, idle=True, stop=True)
        assert [group[4] for group in ends[0]["groups"]] == [True] * 3


def test_experts_move_while_steps_run(pair: list[RankProcess], alone: dict[int, list[Any]]) -> None:
    """Half of the layers go to one rank, in a step between; no token changes, and both flip at the same step."""
    for rank, seed in zip(pair, SEEDS, strict=True):
        rank.post("run", seed=seed, steps=STEPS)
    for rank in pair:
        rank.post("flip", epoch=11, target=1)
    runs = [rank.await_word("run") for rank in pair]
    assert [run["outcomes"] for run in runs] == [alone[seed] for seed in SEEDS]
    check_words(runs)
    epochs = [group[2] for group in runs[0]["groups"]]
    assert epochs == sorted(epochs) and set(epochs) == {10, 11}


def test_a_killed_rank_is_named_and_its_next_life_joins(
    checkpoint: Path, alone: dict[int, list[Any]], rows: str
) -> None:
    with ExitStack() as stack:
        ranks = stack.enter_context(open_ranks(checkpoint, limit_s=5.0 if rows == "plain" else 60.0, rows=rows))
        ranks[0].post("run", seed=SEEDS[0], steps=STEPS)
        ranks[1].post("run", seed=SEEDS[1], steps=STEPS, die_at=6)
        ranks[1].await_word("dying")
        began = time.monotonic()
        membership, step, rank, why, overdue = ranks[0].await_word("broken")
        assert (membership, rank, overdue) == (1, 11, False) and 4 <= step <= 9
        assert "connection" in why
        # On a CPU a step ends before its rank looks at connections, so this takes the limit; on a GPU, no limit.
        assert time.monotonic() - began < 20.0
        ranks[0].call("join", number=2, lives=[1, 0], lost=1)
        run = ranks[0].await_word("run")
        assert run["outcomes"] == alone[SEEDS[0]]
        assert {group[0] for group in run["groups"]} == {1, 2}
        ranks[1] = stack.enter_context(RankProcess(checkpoint, 1, 2, generation=2, rows=rows, meeting=ranks[0].meeting))
        ranks[1].await_word("ready")
        call_all(ranks, "join", number=3, lives=[1, 2])
        # The step in which the survivor agrees with itself to leave membership 2.
        assert ranks[0].call("run", seed=0, steps=1, idle=True)["groups"][0][0] == 2
        for each, seed in zip(ranks, SEEDS, strict=True):
            each.post("run", seed=seed, steps=STEPS)
        runs = [each.await_word("run") for each in ranks]
        assert [each["outcomes"] for each in runs] == [alone[seed] for seed in SEEDS]
        assert runs[0]["groups"][0][:2] == [3, 0]
        check_words(runs)


@pytest.mark.parametrize(("phase", "name"), [(0, "dispatch"), (1, "combine")])
def test_a_silent_rank_is_accused_within_the_limit(
    checkpoint: Path, alone: dict[int, list[Any]], rows: str, phase: int, name: str
) -> None:
    """It has said its words, and stops in the middle of a step: who waits says the layer, and runs that step again."""
    layer, on_gpu = 2, rows == "cuda"
    if on_gpu:
        layer, phase, name = 0, 0, "dispatch"
    with open_ranks(checkpoint, limit_s=2.0, rows=rows) as ranks:
        ranks[1].call("hang", exchange=[phase, layer])
        for rank, seed in zip(ranks, SEEDS, strict=True):
            rank.post("run", seed=seed, steps=STEPS)
        membership, _, rank_number, why, overdue = ranks[0].await_word("broken")
        assert (membership, rank_number, overdue) == (1, 11, True)
        assert why == f"sent no rows in the {name} of layer {layer} within 2 s"
        ranks[0].call("join", number=2, lives=[1, 0], lost=1)
        assert ranks[0].await_word("run")["outcomes"] == alone[SEEDS[0]]
