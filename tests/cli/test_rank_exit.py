"""A rank that can not work says why and ends with the code for it, before the supervisor loses patience."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import trio

from engine.actors.supervisor import CONFIG_STATUS, EXIT_S
from engine.settings import resolve_config
from engine.spawn import rank_command, spawn_rank


@pytest.mark.parametrize("rank", [0, 1], ids=["prefill", "decode"])
async def test_a_rank_with_an_unusable_configuration_says_so_and_ends_with_status_2(tmp_path: Path, rank: int) -> None:
    config = resolve_config(None, flags={}, sets=["replay_rows=1"], environ={}).config
    lines: list[str] = []
    ended_at: list[float] = []
    given = {
        "rank": rank,
        "generation": 1,
        "place": config.place_of(rank),
        "parent": os.getpid(),
        "socket": str(tmp_path / "rank.sock"),
        "log_format": "text",
        "log_level": "info",
        "config": dataclasses.asdict(config.rank_config(rank)),
    }
    process = spawn_rank(rank_command(), given, threads=1, say=lines.append)
    with trio.fail_after(90):
        async with trio.open_nursery() as nursery:

            async def read_control() -> None:
                async for _ in process.control:  # what it says while it loads
                    pass
                ended_at.append(trio.current_time())

            nursery.start_soon(process.run_output)
            nursery.start_soon(read_control)
            status = await process.wait()
            gone_at = trio.current_time()
        await process.control.aclose()
    assert status == CONFIG_STATUS
    assert "replay_rows must be 0 or at least the window" in lines[-1]
    assert not (tmp_path / "rank.sock").exists()
    # The supervisor ends a rank that stays longer, and would take its code for that of a crash.
    assert gone_at - ended_at[0] < EXIT_S
