"""Balancer: all groups with more than one rank, and what operators and `auto` do with the experts in them.

The supervisor brings it what ranks say; operators and one task per part and group have plans made and carried out.
Planning is the only thing here that waits: in between anything may have happened, and is looked at again.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

import trio

from engine.actors.group import Group, Wire
from engine.actors.partreport import is_stuck, list_troubles, report_part
from engine.config import ExpertsConfig, PoolConfig
from engine.core.heat import Heat, HeatInput
from engine.core.pact import PARTS
from engine.core.parts import MadePlan, MoveRefused, PartBalance, PartRules
from engine.core.planning import PlannedMoves, PlanRequest
from engine.errors import EngineError
from engine.log import log_event
from transport.messages import (
    AskHeat,
    ExpertsReport,
    HeatReport,
    PartReport,
    RankReady,
    Rebalance,
    RebalanceAnswer,
    Refused,
    Role,
)
from transport.wire import Frame

logger = logging.getLogger("engine.balancer")

MakePlan = Callable[[PlanRequest], Awaitable[PlannedMoves]]
"""Raises EngineError if no plan comes."""
AUTO = "auto"
REASONS = 256
"""StatusReport has room for so many."""
REASON_LIMIT = 1024
FENCE_AFTER = 2.0
"""Times `balance_s` without progress, after which ranks whose copies do not end are ended."""


@dataclasses.dataclass(frozen=True, slots=True)
class BalanceLimits:
    """The numbers of `Limits` that balancing needs."""

    balance_s: float
    plan_age_s: float


class Balancer:
    """See the module.

    Args:
        pools: by role; groups of one rank are not looked after.
        experts: of each part, in the order of `pact.PARTS`.
        plan: makes a plan, elsewhere.
    """

    def __init__(
        self,
        pools: Mapping[Role, PoolConfig],
        experts: tuple[ExpertsConfig, ...],
        plan: MakePlan,
        limits: BalanceLimits,
    ) -> None:
        self._experts, self._plan, self._limits = experts, plan, limits
        rules = tuple(PartRules(one.spare_slots, one.mode, one.horizon_steps, one.link_bytes_per_s) for one in experts)
        step_bytes = tuple(one.max_bytes_per_step for one in experts)
        self.groups = [
            Group(role, number, ranks, rules, step_bytes)
            for role, pool in pools.items()
            for number, ranks in enumerate(pool.groups)
            if pool.group > 1
        ]
        self._rank_to_group = {rank: group for group in self.groups for rank in group.ranks}
        self._num_plans = 0
        self._stuck: set[int] = set()
        self._checks: dict[tuple[Role, int, int], float] = {}
        self._heats: dict[tuple[Role, int, int], Heat] = {}

    # ------------------------------------------------------------ what the supervisor brings

    def has_group(self, rank: int) -> bool:
        """Whether requests for this rank wait until its group has joined."""
        return rank in self._rank_to_group

    def rank_ready(self, ready: RankReady, description: bytes, wire: Wire) -> None:
        """Raises RemoteProtocolError if it does not fit its group."""
        self._rank_to_group[ready.rank].rank_ready(ready, description, wire)

    def rank_frames(self, rank: int, frames: Iterable[Frame]) -> None:
        """Raises RemoteProtocolError if the rank broke the protocol."""
        self._rank_to_group[rank].rank_frames(rank, frames)

    def rank_down(self, rank: int, generation: int) -> None:
        """Its process is confirmed dead; called before its next life is started."""
        self._rank_to_group[rank].rank_down(rank, generation)

    def stop(self) -> None:
        """The head ends: ranks go, and no group is named anew."""
        for group in self.groups:
            group.stop()

    # ------------------------------------------------------------ what others may know

    def report(self) -> ExpertsReport:
        return ExpertsReport(tuple(self._report(group, part) for group in self.groups for part in group.parts))

    def _report(self, group: Group, part: PartBalance) -> PartReport:
        check_at = self._checks.get((group.pool, group.number, part.part))
        return report_part(group, part, plan_age_s=self._limits.plan_age_s, check_at=check_at)

    def heat(self, ask: AskHeat) -> tuple[HeatReport, bytes] | Refused:
        """Where the load of a part's experts is, with its blob; Refused if there is no such part or layer."""
        try:
            group, part = self._find(ask)
        except MoveRefused as refusal:
            return Refused(str(refusal)[:4096])
        info, window, placement = part.info, part.measured.window, part.placement
        if ask.layer >= info.layers:
            return Refused(f"part {info.name} has layers 0 to {info.layers - 1}, there is no layer {ask.layer}")
        heat = self._heats.setdefault((group.pool, group.number, part.part), Heat())
        absent = frozenset(range(len(group.ranks))) - group.roster.living
        loads, rank_loads, after = window.expected(), part.sum_rank_loads(), part.expected_placement
        blob = heat.pack(ask.layer, HeatInput(loads, rank_loads, placement, after, part.moved, absent))
        report = HeatReport(
            pool=group.pool,
            group=group.number,
            part=info.name,
            layer=ask.layer,
            layers=info.layers,
            experts=info.experts,
            ranks=len(group.ranks),
            slots_per_rank=info.slots,
            has_plan=after is not None,
            steps=window.total_steps,
            us_per_row=part.measured.us_per_token,
            rows_per_step=float(rank_loads.mean()),
        )
        return report, blob

    def degraded(self) -> tuple[str, ...]:
        """One sentence for each thing that is not as it should be, though requests are served."""
        balance_s = self._limits.balance_s
        reasons = (reason[:REASON_LIMIT] for group in self.groups for reason in list_troubles(group, balance_s))
        return tuple(reasons)[:REASONS]

    # ------------------------------------------------------------ operators

    async def act(self, message: Rebalance) -> RebalanceAnswer | Refused:
        """What an operator wants; waits only for plans, at most `balance_s`. Cancelled, it leaves nothing half done."""
        by = f"{message.user}@{message.host}"
        try:
            group, part = self._find(message)
            done = await self._act(group, part, by, message)
        except MoveRefused as refusal:
            log_event(
                logger, "info", "rebalance.refuse", pool=message.pool, group=message.group, part=message.part,
                action=message.action, by=by, msg=str(refusal),
            )  # fmt: skip
            return Refused(str(refusal)[:4096])
        return RebalanceAnswer(done[:4096], self._report(group, part))

    def _find(self, message: Rebalance | AskHeat) -> tuple[Group, PartBalance]:
        for group in self.groups:
            if (group.pool, group.number) == (message.pool, message.group):
                for part in group.parts:
                    if part.info.name == message.part:
                        return group, part
                if group.parts:
                    names = " and ".join(part.info.name for part in group.parts)
                    raise MoveRefused(f"the model has no part {message.part}, it has {names}")
                raise MoveRefused(f"no rank of {group.name} is ready yet")
        known = ", ".join(group.name for group in self.groups)
        others = f"there is {known}" if known else "no group does"
        raise MoveRefused(
            f"there is no {message.pool} group {message.group} that shares experts between ranks; {others}"
        )

    async def _act(self, group: Group, part: PartBalance, by: str, message: Rebalance) -> str:
        reason = message.reason
        match message.action:
            case "plan":
                made = await self._make_plan(group, part, by)
                return f"plan {made.number}: {made.moves.plan.reason}"
            case "apply" if message.plan:
                group.check_complete()
                made = part.choose_plan(message.plan, self._limits.plan_age_s, trio.current_time())
                return self._begin(group, part, made, by, reason)
            case "apply":
                made = await self._make_plan(group, part, by)
                if not made.moves.stages:
                    self._skip(group, part, made, by, made.moves.plan.reason)
                    return f"plan {made.number} moves nothing: {made.moves.plan.reason}"
                return self._begin_fresh(group, part, made, by, reason)
            case "rollback":
                made = await self._make_plan(group, part, by, is_rollback=True)
                return self._begin_fresh(group, part, made, by, reason or made.moves.plan.reason)
            case "mode":
                return self._set_mode(group, part, by, message)
            case _:
                return self._steer(group, part, by, message)

    def _steer(self, group: Group, part: PartBalance, by: str, message: Rebalance) -> str:
        if part.migration is None:
            raise MoveRefused(f"nothing is being moved in part {part.info.name} of {group.name}")
        was_paused, run = part.migration.paused, part.describe_run()
        if message.action == "pause":
            if was_paused:
                raise MoveRefused(f"{run}, and is paused already")
            group.pause(part)
            done = f"paused: {run}; copies that run end, and a stage that is complete is still switched"
        elif message.action == "resume":
            if not was_paused:
                raise MoveRefused(f"{run}, and is not paused")
            group.resume(part)
            done = f"goes on: {run}"
        else:
            group.abort(part, message.reason or f"given up by {by}")
            done = f"given up: {run}; what is in force already stays so, and rollback undoes it"
        event = {"pause": "rebalance.paused", "resume": "rebalance.resumed"}.get(message.action, "rebalance.give_up")
        self._log(event, group, part, by, message.reason)
        return done

    def _set_mode(self, group: Group, part: PartBalance, by: str, message: Rebalance) -> str:
        if not message.mode:
            raise MoveRefused("say which mode: off, manual or auto")
        was, part.mode = part.mode, message.mode
        self._log("rebalance.mode", group, part, by, message.reason, mode=part.mode, was=was)
        running = f"; {part.describe_run()} to its end" if part.migration is not None else ""
        return f"mode {part.mode}, was {was}{running}"

    # ------------------------------------------------------------ plans

    async def _make_plan(self, group: Group, part: PartBalance, by: str, *, is_rollback: bool = False) -> MadePlan:
        """Raises MoveRefused if nothing can be planned, or no plan comes."""
        group.check_complete()
        request = part.begin_plan(by, is_rollback=is_rollback)
        started = trio.current_time()
        why = f"the planner did not answer within limits.balance ({self._limits.balance_s:g} s)"
        moves: PlannedMoves | None = None
        try:
            with trio.move_on_after(self._limits.balance_s):
                try:
                    moves = await self._plan(request)
                except EngineError as error:
                    why = str(error)
        finally:
            part.planning_for = ""  # also if whoever asked has gone
        if moves is None:
            part.trouble = why
            self._log("rebalance.no_plan", group, part, by, why, level="warning")
            raise MoveRefused(f"no plan was made: {why}")
        self._num_plans += 1
        now = trio.current_time()
        made = part.end_plan(self._num_plans, request, moves, now)
        plan = moves.plan
        self._log(
            "rebalance.plan", group, part, by, plan.reason, plan=made.number, pays=plan.pays,
            slots=plan.bill.moved_slots, saved_us=plan.bill.saved_us_per_step, took_ms=1e3 * (now - started),
        )  # fmt: skip
        return made

    def _begin_fresh(self, group: Group, part: PartBalance, made: MadePlan, by: str, reason: str) -> str:
        """After planning, in which others may have acted."""
        group.check_complete()
        made = part.choose_plan(made.number, self._limits.plan_age_s, trio.current_time())
        return self._begin(group, part, made, by, reason)

    def _begin(self, group: Group, part: PartBalance, made: MadePlan, by: str, reason: str) -> str:
        bill = made.moves.plan.bill
        self._log(
            "rebalance.apply", group, part, by, reason, plan=made.number, is_rollback=made.is_rollback,
            slots=bill.moved_slots, stages=len(made.moves.stages), saved_us=bill.saved_us_per_step,
        )  # fmt: skip
        group.begin(part, made, by, reason)
        stages = f"{len(made.moves.stages)} stages" if len(made.moves.stages) > 1 else "one stage"
        return f"plan {made.number} begins: {bill.moved_slots} slots in {stages}"

    def _skip(self, group: Group, part: PartBalance, made: MadePlan, by: str, reason: str) -> None:
        part.ledger.skip(made.number, made.moves.plan.bill, by, reason, trio.current_time())
        self._log("rebalance.skip", group, part, by, reason, plan=made.number)

    def _log(
        self, event: str, group: Group, part: PartBalance, by: str, msg: str, level: str = "info", **fields: object
    ) -> None:
        log_event(
            logger, level, event, pool=group.pool, group=group.number, part=part.info.name, by=by, msg=msg or None,
            **fields,
        )  # fmt: skip

    # ------------------------------------------------------------ without anybody asking

    async def run(self) -> None:
        """`auto` for each part of each group, and the watch over progress, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            for group in self.groups:
                for index in range(len(PARTS)):
                    nursery.start_soon(self._run_auto, group, index)

    async def _run_auto(self, group: Group, index: int) -> None:
        config = self._experts[index]
        while True:
            self._checks[group.pool, group.number, index] = trio.current_time() + config.interval_s
            await trio.sleep(config.interval_s)
            if index < len(group.parts) and group.parts[index].mode == "auto" and not group.is_stopping:
                await self._balance(group, group.parts[index], config.min_gain_us)

    async def _balance(self, group: Group, part: PartBalance, min_gain_us: float) -> None:
        """One round of `auto`; whatever keeps it from planning now may be gone at the next."""
        try:
            made = await self._make_plan(group, part, AUTO)
            plan = made.moves.plan
            saved = plan.bill.saved_us_per_step
            if not plan.pays or not made.moves.stages:
                self._skip(group, part, made, AUTO, plan.reason)
            elif saved < min_gain_us:
                self._skip(group, part, made, AUTO, f"saves {saved:.1f} us per step, min_gain is {min_gain_us:.1f} us")
            elif part.mode == "auto":
                self._begin_fresh(group, part, made, AUTO, plan.reason)
        except MoveRefused as refusal:
            self._log("rebalance.wait", group, part, AUTO, str(refusal), level="debug")

    async def _watch(self) -> None:
        """Says once of each stretch without progress that it is one; ends who keeps a burned epoch from its end."""
        while True:
            await trio.sleep(self._limits.balance_s / 8)
            now = trio.current_time()
            for group in self.groups:
                for part in group.parts:
                    if not is_stuck(part, self._limits.balance_s):
                        self._stuck.discard(id(part))
                    elif id(part) not in self._stuck:
                        self._stuck.add(id(part))
                        self._log("rebalance.stuck", group, part, part.runner, part.describe_run(), level="warning")
                    if now - part.progress_at > FENCE_AFTER * self._limits.balance_s:
                        group.fence(part)
