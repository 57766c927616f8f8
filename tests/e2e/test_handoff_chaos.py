"""Real ranks are killed and stopped in every state of a hand-off, and a write lands too late: no token is wrong.

What holds in every run: all requests are answered once, with the tokens of an undisturbed run; only requests that
needed the victim failed on the way; all memory of all ranks is free at the end; no process is left. The times of the
whole matrix are recorded by `handoff_chaos_table.py`; here are a few seconds of it, and the rest is marked slow.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.faults import (
    CHECKING,
    CHECKING_SETS,
    DOUBLES,
    KILLS,
    MAX_TOKENS,
    POINTS,
    STOPS,
    Fault,
    check_times,
    make_prompts,
    run_fault,
)
from tests.e2e.faulty import open_cluster
from tests.e2e.latewrites import CONDEMNED_SETS, LATE_SETS, run_cancelled_write, run_condemned_write
from tests.e2e.prompts import fresh_seed
from transport.nixl_fabric import is_available

pytestmark = pytest.mark.skipif(not is_available(), reason="no nixl wheel is installed")

NAME_TO_POINT = {point.name: point for point in POINTS}
WORKING, WRITTEN = NAME_TO_POINT["prefill working (CHUNK)"], NAME_TO_POINT["decode granted (PUSHED)"]
FEW_STOPS = [Fault(point, action="stop") for point in (WORKING, WRITTEN)]
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("ucx_tls", "sets", "faults"),
    [
        pytest.param("", (), [Fault(WORKING), Fault(WRITTEN)], id="kill-few"),
        pytest.param("", (), [*KILLS, *DOUBLES], id="kill-all", marks=slow),
        pytest.param("", CHECKING_SETS, CHECKING, id="kill-checking", marks=slow),
        pytest.param("tcp", (), [*KILLS, *DOUBLES], id="kill-all-tcp", marks=slow),
        pytest.param("", (), STOPS, id="stop-all", marks=slow),
        pytest.param("tcp", (), FEW_STOPS, id="stop-tcp", marks=slow),
    ],
)
async def test_a_rank_lost_in_a_state_of_the_handoff_harms_nobody(
    ucx_tls: str, sets: tuple[str, ...], faults: Sequence[Fault], tmp_path: Path
) -> None:
    rng = random.Random(fresh_seed())
    async with open_cluster(tmp_path / "log", ucx_tls=ucx_tls, sets=sets) as cluster:
        prompts = make_prompts(rng)
        await cluster.learn(prompts, MAX_TOKENS)
        for fault in faults:
            check_times(await run_fault(cluster, fault, prompts, rng))


@pytest.mark.parametrize("ucx_tls", [pytest.param("", marks=slow), "tcp"], ids=["default", "tcp"])
async def test_a_write_of_a_cancelled_request_lands_in_quarantine(ucx_tls: str, tmp_path: Path) -> None:
    async with open_cluster(tmp_path / "log", decode=1, ucx_tls=ucx_tls, sets=LATE_SETS) as cluster:
        late = await run_cancelled_write(cluster, random.Random(fresh_seed()))
    assert late.num_bytes > 0 and late.running


@slow
async def test_without_quarantine_that_write_spoils_another_request(tmp_path: Path) -> None:
    """The proof that the test above can fail: a decode rank that frees what it granted as soon as a request is over."""
    with pytest.RaisesGroup(pytest.RaisesExc(AssertionError, match="have other tokens"), flatten_subgroups=True):
        async with open_cluster(tmp_path / "log", decode=1, plant="free_at_abort", sets=LATE_SETS) as cluster:
            await run_cancelled_write(cluster, random.Random(7), quarantined=0)


@slow
async def test_a_write_of_a_rank_that_was_given_up_lands_in_quarantine(tmp_path: Path) -> None:
    async with open_cluster(tmp_path / "log", decode=1, sets=CONDEMNED_SETS) as cluster:
        late = await run_condemned_write(cluster, random.Random(fresh_seed()))
    assert late.num_bytes > 0
