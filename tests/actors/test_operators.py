"""The operators' sockets and the balancer behind them, over real unix sockets."""

from __future__ import annotations

import pytest
import trio

from engine.errors import EngineError
from engine.faces.admin import open_operator, run_operators
from tests.actors.group_rig import Rig
from transport import messages as m
from transport.unix import open_unix_listener

SKEWED = [[40, 30, 1, 1, 1, 1], [1, 1, 1, 1, 30, 40]]


def report() -> m.StatusReport:
    return m.StatusReport(1, "c", "nano", 1, 0, True, (), 0, 0, 0, 0, ())


async def test_experts_are_read_on_both_sockets_and_moved_on_one(tmp_path) -> None:
    rig = Rig()
    rig.plan_takes_s = 0.01
    rig.start_all()
    rig.load(SKEWED)
    admin, read = str(tmp_path / "admin"), str(tmp_path / "read")
    act = m.Rebalance("plan", "decode", 0, "main", 0, "", "ann", "here", "look")
    with trio.fail_after(20):
        async with (
            await open_unix_listener(admin, 0o600) as changes,
            await open_unix_listener(read, 0o600) as reads,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(run_operators, changes, report, rig.balancer.report, lambda _: 0, rig.balancer.act)
            nursery.start_soon(run_operators, reads, report, rig.balancer.report, None, None)
            async with open_operator(read) as operator:
                (part,) = (await operator.ask_experts()).parts
                assert (part.pool, part.ranks, part.state, part.plan.plan) == ("decode", (1, 2, 3), "idle", 0)
                refused = await operator.ask(act)
                assert isinstance(refused, m.Refused) and "only reads" in refused.message
            async with open_operator(admin) as operator:
                answer = await operator.ask_rebalance(act, 10.0)
                assert answer.report.plan.plan == 1 and answer.done.startswith("plan 1: moving")
                answer = await operator.ask_rebalance(m.Rebalance("apply", *act_fields(act, plan=1)), 10.0)
                assert answer.report.state == "moving" and answer.report.history[-1].by == "ann@here"
                rig.pump()
                (part,) = (await operator.ask_experts()).parts
                assert part.state == "idle" and part.history[-1].result == "applied"
                with pytest.raises(EngineError, match="the placement has changed since plan 1"):
                    await operator.ask_rebalance(m.Rebalance("apply", *act_fields(act, plan=1)), 10.0)
            nursery.cancel_scope.cancel()


def act_fields(act: m.Rebalance, *, plan: int) -> tuple:
    return (act.pool, act.group, act.part, plan, act.mode, act.user, act.host, act.reason)
