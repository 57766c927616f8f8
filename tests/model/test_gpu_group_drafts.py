"""Ranks of a group that draft inside their steps, each on its own, while their rows pass one another's experts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import trio

from engine.model.device import TorchDevice
from engine.model.ops import reference_ops
from engine.model.step_loading import load_step_model
from tests.model.gpu_drafts_process import EOS, drafting_config, make_requests
from tests.model.gpu_rank_cases import PROMPT_ROWS, RankProcess
from tests.model.speculation_cases import Host, run_host
from tests.model.step_cases import write_agreeing_checkpoint
from tests.model.test_paged_drafts import small_ahead_config

STEPS = 70


class DraftingProcess(RankProcess):
    module = "tests.model.gpu_drafts_process"


def write_alone(directory: Path, seed: int) -> list[list[int]]:
    """What a rank without a group and without drafts says."""
    config = drafting_config(directory, 1)
    torch.set_num_threads(1)
    model, info = load_step_model(
        config, lambda *_: None, torch.device("cpu"), poison=True, ops=reference_ops(), prompt_rows=PROMPT_ROWS
    )

    async def run() -> list[list[int]]:
        device = TorchDevice(
            model, info, proposer=model.drafter, read_checksums=model.arena.read_checksums
        )  # fmt: skip
        requests = make_requests(seed)
        await run_host(device, Host(requests, (EOS,), [0], seed))
        await device.aclose()
        return [request.text for request in requests]

    return trio.run(run)


def test_texts_are_those_of_a_rank_alone_that_does_not_draft(tmp_path: Path) -> None:
    """Sequences that draft here, rows without drafts or none at all there; steps that the host judges between."""
    write_agreeing_checkpoint(tmp_path, small_ahead_config())
    wanted = [write_alone(tmp_path, seed) for seed in (0, 1)]
    with ExitStack() as stack:
        meeting = Path(stack.enter_context(TemporaryDirectory()))
        ranks = [
            stack.enter_context(DraftingProcess(tmp_path, place, 2, meeting=meeting)) for place in range(2)
        ]  # fmt: skip
        for rank in ranks:
            rank.await_word("ready")
        for action, options in (("join", {"number": 1, "lives": [1, 1]}), ("talk", {"steps": STEPS})):
            for place, rank in enumerate(ranks):
                rank.post(action, **options, **({"seed": place} if action == "talk" else {}))
            said = [rank.await_word(action) for rank in ranks]
    assert [each["over"] for each in said] == [True, True]
    assert [each["texts"] for each in said] == wanted
    assert all(each["launched"] > 5 and each["held"] > 1 for each in said)
