"""The operators' sockets and the balancer behind them, over real unix sockets."""

from __future__ import annotations

import os
import pwd

import pytest
import trio

from engine.actors.head import describe_cancel
from engine.errors import EngineError
from engine.faces.admin import open_operator
from engine.faces.desk import run_operators
from tests.actors.group_rig import Rig
from tests.faces.desk_rig import make_acts, make_answers
from transport import messages as m
from transport.unix import open_unix_listener

SKEWED = [[40, 30, 1, 1, 1, 1], [1, 1, 1, 1, 30, 40]]


async def test_experts_are_read_on_both_sockets_and_moved_on_one(tmp_path) -> None:
    rig = Rig()
    rig.plan_takes_s = 0.01
    rig.start_all()
    rig.load(SKEWED)
    admin, read = str(tmp_path / "admin"), str(tmp_path / "read")
    me = pwd.getpwuid(os.getuid()).pw_name
    act = m.Rebalance("plan", "decode", 0, "main", 0, "", "ann", "here", "look")
    with trio.fail_after(20):
        async with (
            await open_unix_listener(admin, 0o600) as changes,
            await open_unix_listener(read, 0o600) as reads,
            trio.open_nursery() as nursery,
        ):
            answers = make_answers(experts=rig.balancer.report)
            nursery.start_soon(run_operators, changes, answers, make_acts(rebalance=rig.balancer.act))
            nursery.start_soon(run_operators, reads, answers, None)
            async with open_operator(read) as operator:
                (part,) = (await operator.ask_experts()).parts
                assert (part.pool, part.ranks, part.state, part.plan.plan) == ("decode", (1, 2, 3), "idle", 0)
                refused = await operator.ask(act)
                assert isinstance(refused, m.Refused) and "only reads" in refused.message
            async with open_operator(admin) as operator:
                answer = await operator.ask_rebalance(act, 10.0)
                assert answer.report.plan.plan == 1 and answer.done.startswith("plan 1: moving")
                answer = await operator.ask_rebalance(m.Rebalance("apply", *act_fields(act, plan=1)), 10.0)
                assert answer.report.state == "moving" and answer.report.history[-1].by == f"{me}@here"
                rig.pump()
                (part,) = (await operator.ask_experts()).parts
                assert part.state == "idle" and part.history[-1].result == "applied"
                with pytest.raises(EngineError, match="the placement has changed since plan 1"):
                    await operator.ask_rebalance(m.Rebalance("apply", *act_fields(act, plan=1)), 10.0)
            nursery.cancel_scope.cancel()


def act_fields(act: m.Rebalance, *, plan: int) -> tuple:
    return (act.pool, act.group, act.part, plan, act.mode, act.user, act.host, act.reason)


def test_what_became_of_a_cancel_is_said_in_one_sentence() -> None:
    assert describe_cancel((7,), (7,)) == m.ActDone("cancelled 1 request")
    assert describe_cancel((7, 8, 9, 8), (7, 9)) == m.ActDone("cancelled 2 requests; had ended before: 8")
    assert describe_cancel((8, 8), ()) == m.Refused("no such request, or it has ended: 8")
    many = describe_cancel(tuple(range(4096)), ())
    assert isinstance(many, m.Refused) and many.message.endswith("18, 19 ...")
