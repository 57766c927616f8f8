"""SimGroup: how the devices of a group step together, as calls of the event clock: a few for each step of all of them.

A `Seat` is one device's place in its group, a `Circle` those who are in one membership. A step begins when all members
of the circle have *arrived*: each has a step at the head of its queue, and its words of the pact, taken at that
instant, are on their way. It ends for all together, as late as the slowest. Who dies in the middle leaves the others
with nothing, or, by chance, some of them with all they needed: those finish the step, the others run it again in the
next membership. Who is stopped or stuck is waited for, and accused when `exchange_s` is over.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from engine.core.pact import Agreement, GroupStep, Words, agree
from engine.core.plan import StepPlan
from engine.errors import DeviceError, GroupBroken
from engine.sim.circle import Circle, GroupMeters, GroupRules, Seat
from engine.sim.device import SimTicket, run_together
from engine.sim.expertchecks import ExpertAuditor
from engine.sim.gating import ExpertShape, Gate, PairCounter, find_domains

At = Callable[..., None]
"""`Clock.at`."""
_make_words: Callable[[tuple[object, ...]], Words] = functools.partial(tuple.__new__, Words)
"""For half of what its own constructor takes."""
PARTLY = 0.5
"""Share of deaths in a step's middle after which each survivor may have what it needs all the same."""


class SimGroup:
    """See the module.

    Args:
        gates: by part, shared by all groups of a world.
        rng: of the fate of survivors.
        noise: of pairs.
    """

    def __init__(
        self,
        name: str,
        shape: ExpertShape,
        rules: GroupRules,
        gates: Sequence[Gate],
        auditor: ExpertAuditor,
        at: At,
        now: Callable[[], float],
        sleep_for: Callable[[float], Awaitable[None]],
        rng: random.Random,
        noise: np.random.Generator,
    ) -> None:
        self.name, self.shape, self.rules, self.auditor = name, shape, rules, auditor
        self.meters = GroupMeters()
        self.sleep_for = sleep_for
        self._at, self._now = at, now
        self._rng = rng
        self._noise = noise
        self._counters = [PairCounter(gate, shape.chosen, noise) for gate in gates]
        self.circles: dict[int, Circle] = {}
        self.armed: tuple[float, Callable[[], None]] | None = None
        """What happens in the middle of a flip; see `Groups.arm`."""
        self._flipped_at: tuple[int, int] = (0, 0)

    def draw_counts(self, part: int, rows: np.ndarray) -> np.ndarray:
        return self._counters[part].draw(rows, self._now(), self._noise)

    # ------------------------------------------------------------ memberships

    def join(self, seat: Seat) -> None:
        """It was told of a membership: enters it unless it is in one that can still step."""
        if seat.is_dead or seat.is_hung or seat.stopped is not None:
            return
        circle = seat.circle
        if circle is None:
            self._enter(seat)
        elif not circle.is_met:
            del circle.seats[seat.place]
            self._enter(seat)

    def _enter(self, seat: Seat) -> None:
        number = seat.experts.joined
        seat.experts.enter(number)
        membership = seat.experts.present
        assert membership is not None
        seat.number, seat.place = number, membership.place_of(seat.rank)
        circle = self.circles.get(number)
        if circle is None:
            self.circles = {old: kept for old, kept in self.circles.items() if kept.seats}
            circle = self.circles[number] = Circle(membership)
        if circle.lost is not None:
            self._break(seat, circle, circle.lost)
            return
        circle.seats[seat.place] = seat
        seat.circle = circle
        seat.experts.count_in(circle.pairs, circle.expert_us, seat.place)
        if len(circle.seats) == len(circle.living):
            circle.is_met = True
            for each in [circle.seats[place] for place in circle.living]:
                self.arrive(each)
        else:
            self._at(self._now() + self.rules.group_s, self._miss, seat, circle)

    def _miss(self, seat: Seat, circle: Circle) -> None:
        """Not all have come."""
        if seat.circle is circle and not circle.is_met:
            place = next(place for place in circle.living if place not in circle.seats)
            why = f"did not join membership {circle.number} within {self.rules.group_s:g} s"
            self._lose(circle, place, why, overdue=True)

    def leave(self, seat: Seat) -> None:
        """Its device is dead: the others feel it at once."""
        seat.is_dead = True
        circle, seat.circle = seat.circle, None
        if circle is not None:
            del circle.seats[seat.place]
            if seat in circle.arrived:
                circle.arrived.remove(seat)
            self._lose(circle, seat.place, "has closed its connection", overdue=False)

    # ------------------------------------------------------------ steps

    def arrive(self, seat: Seat) -> None:
        """Begins its next step if it has one and may."""
        if seat.is_arrived and seat.stopped is None:
            return
        queue, circle = seat.device.queue, seat.circle
        while seat.stopped is not None and queue and not seat.is_dead:
            seat.device.finish_first(seat.stopped)
        if not queue or circle is None or seat.is_arrived or seat.is_dead or seat.is_hung:
            return
        if circle.lost is not None:
            self._break(seat, circle, circle.lost)
            return
        if not circle.is_met:
            return
        now, ticket = self._now(), queue[0]
        if seat.stopped_until > now:
            self._at(seat.stopped_until, self.arrive, seat)
            return
        if ticket.step and ticket.step == seat.device.hang_at_step:
            seat.is_hung = True
            return
        seat.is_arrived, seat.since = True, now
        plan = ticket.plan
        rows = passes = 0
        seat.step_rows = None
        if plan.chunks or len(ticket.columns.positions):
            passes = 1
            seat.step_rows, rows = self._count_rows(seat, ticket)
        experts = seat.experts
        join = experts.joined if experts.joined > circle.number else circle.number
        seat.words = _make_words(
            (seat.generation, rows, passes, plan.idle, join, int(plan.stop), plan.drafts, experts.ready)
        )
        circle.arrived.append(seat)
        if len(circle.arrived) == len(circle.living):
            self._begin(circle)
        elif not circle.has_patience:
            circle.has_patience = True
            self._at(now + self.rules.exchange_s, self._look, circle)

    def _count_rows(self, seat: Seat, ticket: SimTicket) -> tuple[np.ndarray, int]:
        """Rows of a step by domain, and all of them; counted once as long as the same sequences take part."""
        plan, roster = ticket.plan, ticket.columns.roster
        if plan.chunks:
            counts = _rows_by_domain(plan, self.shape.domains)
            return counts, int(counts.sum())
        counted = seat.counted
        if counted is None or counted[0] is not roster:
            counted = seat.counted = (roster, _rows_by_domain(plan, self.shape.domains), len(plan.rows))
        return counted[1], counted[2]

    def _look(self, circle: Circle) -> None:
        """Some have waited for others."""
        circle.has_patience = False
        if circle.lost is not None or circle.is_running or not circle.arrived:
            return
        due = min(seat.since for seat in circle.arrived) + self.rules.exchange_s
        if due > self._now():
            circle.has_patience = True
            self._at(due, self._look, circle)
            return
        here = {seat.place for seat in circle.arrived}
        place = next(place for place in circle.living if place not in here)
        self.auditor.overdue(self, circle, circle.seats[place])
        self._lose(circle, place, f"did not answer within {self.rules.exchange_s:g} s", overdue=True)

    def _begin(self, circle: Circle) -> None:
        circle.is_running = True
        circle.arrived.sort(key=lambda seat: seat.place)
        seats = circle.arrived
        self.auditor.begin(self, circle, is_sound=circle.sound_at == self._now())
        words = [seat.words for seat in seats if seat.words is not None]
        circle.agreed = agree(words, circle.active, circle.number, self.rules.idle_steps)
        # As if a step's exchanges waited for the copies on the same link.
        dense_s = max(seat.device.queue[0].cost_s + seat.copy_s for seat in seats)
        is_copying = any(seat.copy_s for seat in seats)
        for seat in seats:
            seat.copy_s = 0.0
        has_rows = any(word.rows for word in words)
        expert_s = self._count_pairs(circle) if has_rows else 0.0
        circle.ends_at = self._now() + dense_s + expert_s
        if has_rows:
            self.meters.step_s.add(dense_s + expert_s)
            if is_copying:
                self.meters.copying_s.add(dense_s + expert_s)
        self._at(circle.ends_at, self._end, circle)
        if circle.agreed.active != circle.active:
            self._flipped_at = (circle.number, circle.step + 1)
        if self.armed is not None:
            self._strike(circle)

    def _strike(self, circle: Circle) -> None:
        assert self.armed is not None and circle.agreed is not None
        pick, strike = self.armed
        is_flip = circle.agreed.active != circle.active
        is_first = (circle.number, circle.step) == self._flipped_at
        if is_flip if int(100 * pick) % 2 else is_first:
            self.armed = None
            self._at(self._now() + pick * (circle.ends_at - self._now()), strike)

    def _count_pairs(self, circle: Circle) -> float:
        """Expert time of the step: layer by layer, the fullest rank's."""
        shape, meters = self.shape, self.meters
        counts = [seat.step_rows for seat in circle.arrived if seat.step_rows is not None]
        rows = np.add.reduce(np.concatenate(counts).reshape(len(counts), -1), axis=0)
        spent = lost = 0.0
        for part, counter in enumerate(self._counters):
            table = circle.arrived[0].experts.tables[part][circle.active[part]]
            pairs = counter.count(rows, table.placement, self._now())
            most = float(np.add.reduce(np.maximum.reduce(pairs, axis=1)))
            mean = float(np.add.reduce(pairs, axis=None)) / len(circle.living)
            spent += shape.pair_s * (mean if shape.is_perfect else most)
            lost += 0.0 if shape.is_perfect else shape.pair_s * (most - mean)
            of_place = np.add.reduce(pairs, axis=0)
            circle.pairs[part] += of_place
            circle.expert_us[part] += 1e6 * shape.pair_s * of_place
        meters.num_steps += 1
        meters.lost_us += 1e6 * lost
        second = int(self._now())
        count, sum_us = meters.lost_by_second.get(second, (0, 0.0))
        meters.lost_by_second[second] = (count + 1, sum_us + 1e6 * lost)
        return spent

    def _end(self, circle: Circle) -> None:
        now = self._now()
        if circle.lost is None and not self._wait_for_stopped(circle, now):
            return
        seats = circle.arrived if circle.finishers is None else circle.finishers
        seats = [seat for seat in seats if not seat.is_dead]
        agreed = circle.agreed
        assert agreed is not None
        self.auditor.end(self, circle, seats)
        circle.sound_at = now if agreed.active == circle.active else -1.0
        circle.is_running, circle.finishers, circle.stalled_since = False, None, None
        circle.arrived = []
        done = GroupStep(circle.number, circle.step, circle.active, agreed.park, agreed.stop)
        self.meters.idle_steps += all(seat.words is not None and not seat.words.rows for seat in seats)
        self.meters.flips += agreed.active != circle.active
        circle.step, circle.active = circle.step + 1, agreed.active
        together = [seat for seat in seats if seat.device.runs_together]
        rows = run_together([seat.device for seat in together]) if together else []
        drawn = dict(zip(together, rows, strict=True))
        failed = [seat for seat in seats if not self._finish(seat, done, agreed, drawn.get(seat))]
        for seat in failed:
            self.leave(seat)
        for seat in seats:
            if seat.is_dead:
                continue
            if agreed.leave:
                circle.seats.pop(seat.place, None)
                seat.circle = None
                self._enter(seat)
            if seat.device.queue:
                self.arrive(seat)

    def _wait_for_stopped(self, circle: Circle, now: float) -> bool:
        """False if the step can not end yet: a member is stopped in the middle of it."""
        stopped = [seat for seat in circle.arrived if seat.stopped_until > now]
        if not stopped:
            return True
        if circle.stalled_since is None:
            circle.stalled_since = now
        limit = circle.stalled_since + self.rules.exchange_s
        if now < limit:
            self._at(min(limit, max(seat.stopped_until for seat in stopped)), self._end, circle)
            return False
        for seat in stopped:
            # It finds the connections ended when it goes on.
            circle.arrived.remove(seat)
            self._at(seat.stopped_until, self._resume, seat, circle)
        self._lose(circle, stopped[0].place, f"did not answer within {self.rules.exchange_s:g} s", overdue=True)
        return False

    def _resume(self, seat: Seat, circle: Circle) -> None:
        if seat.circle is circle and not seat.is_dead and circle.lost is not None:
            self._break(seat, circle, circle.lost)

    def _finish(self, seat: Seat, done: GroupStep, agreed: Agreement, drawn: Sequence[int] | None) -> bool:
        """The step is over for one member; False if its device failed in it. `drawn`: see `SimDevice.finish_first`."""
        experts, device = seat.experts, seat.device
        seat.is_arrived = False
        ticket, rows = device.queue[0], seat.step_rows
        device.finish_first(done, drawn)
        if ticket.error is not None:
            return False
        if rows is not None and seat.words is not None:
            self.auditor.count_rows(seat, seat.words.rows)
            experts.add_rows(rows)
            experts.steps += 1
        seat.last_step = (done.membership, done.step)
        self.latch(seat, agreed)
        if done.stop:
            seat.stopped = done
        return True

    def latch(self, seat: Seat, agreed: Agreement) -> None:
        """What was agreed is in force for this member from its next step on."""
        seat.experts.advance(agreed.active)

    # ------------------------------------------------------------ losses

    def _lose(self, circle: Circle, place: int, why: str, *, overdue: bool) -> None:
        """No step of this circle begins any more."""
        if circle.lost is not None:
            if circle.finishers is not None:
                circle.finishers = [seat for seat in circle.finishers if not seat.is_dead]
            return
        self.meters.breaks += 1
        rank = circle.membership.members[place].rank
        circle.lost = GroupBroken(circle.number, circle.step, rank, why, overdue=overdue)
        breaking = [*circle.arrived]
        if circle.is_running:
            circle.finishers = []
            if not overdue and self._rng.random() < PARTLY:
                circle.finishers = [seat for seat in breaking if self._rng.random() < 0.5]
                self.meters.partly += 0 < len(circle.finishers) < len(breaking)
            breaking = [seat for seat in breaking if seat not in circle.finishers]
        elif not circle.is_met:
            breaking = [seat for _, seat in sorted(circle.seats.items())]
        for seat in breaking:
            self._break(seat, circle, circle.lost)

    def _break(self, seat: Seat, circle: Circle, lost: GroupBroken) -> None:
        """It leaves the circle; whoever waits for its step is told once."""
        circle.seats.pop(seat.place, None)
        seat.circle, seat.is_arrived = None, False
        ticket = seat.device.queue[0] if seat.device.queue else None
        told = GroupBroken(circle.number, circle.step, lost.rank, lost.why, overdue=lost.overdue)
        seat.breaks.append((ticket, told))
        if ticket is not None:
            ticket.over.ring()
        if seat.experts.joined > seat.number:
            self._enter(seat)
        else:
            self._at(self._now() + self.rules.group_s, self._give_up, seat, seat.number)

    def _give_up(self, seat: Seat, number: int) -> None:
        if seat.number == number and seat.circle is None and seat.device.queue and not seat.is_dead:
            why = f"no membership after {number} was joined within {self.rules.group_s:g} s"
            seat.device.fail(DeviceError(why))


def _rows_by_domain(plan: StepPlan, domains: int) -> np.ndarray:
    """int64[domains]: rows of a step."""
    counts = np.zeros(domains, np.int64)
    if plan.rows:
        counts += np.bincount(find_domains(plan.columns.roster.requests, domains), minlength=domains)
    for chunk in plan.chunks:
        counts[find_domains(np.array([chunk.request]), domains)[0]] += chunk.num_tokens
    return counts
