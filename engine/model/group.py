"""GroupWorker: where a rank stands in its group, on the device's worker thread: memberships, steps, breakages.

It joins memberships, agrees with the other members in each step, and after a breakage runs what was not finished again
in the next membership. A step that breaks off keeps the passes that it has finished. How rows meet experts is another's
matter (`Steps`): `DispatchSteps` here on a CPU, `gpu_group.GraphSteps` on GPUs.
"""

from __future__ import annotations

import collections
import enum
import queue
import time
from collections.abc import Callable
from typing import Protocol

from engine.core.group import Membership
from engine.core.pact import Agreement, GroupStep, Words
from engine.core.plan import StepResult
from engine.errors import DeviceError, GroupBroken
from engine.model.dispatch import Dispatch, Mesh
from engine.model.exchange import MeshBroken
from engine.model.expert_slots import Prepared, TorchExpertSlots
from engine.model.passes import Job, Progress, StepRunner
from transport.timed_queue import TimedQueue

Connect = Callable[[Membership, int, Callable[[], bool]], Mesh]
"""(membership, own place, whether it is still wanted) to a mesh; raises MeshBroken, also when it is not wanted."""
OnBroken = Callable[[GroupBroken], None]


class Signal(enum.Enum):
    """What is not a job in the worker's queue."""

    LOOK = "a membership was joined"
    CLOSE = "no more jobs"


Jobs = TimedQueue[Job | Signal]


class StepVoid(MeshBroken):
    """A step in which rows did not come, found when it was over: nothing of it counts. `step`: which one."""

    def __init__(self, place: int, why: str, *, step: int, overdue: bool) -> None:
        super().__init__(place, why, overdue=overdue)
        self.step = step


class Steps(Protocol):
    """How the steps of a group are run."""

    def enter(self, mesh: Mesh, prepared: Prepared) -> None:
        """A membership begins, all of whose members are connected. Nothing of the last one is under way."""
        ...

    def run(self, group: GroupWorker, job: Job, progress: Progress) -> StepResult:
        """One step, as far as `progress` has not come. Raises MeshBroken if it breaks off."""
        ...


class GroupWorker:
    """See the module. All methods belong to the worker's thread.

    Attributes:
        mesh: to the members of the present membership; None where it is over, or was never met.
        place: the own one in it.
        step: the next one in it.
    """

    def __init__(
        self,
        runner: StepRunner,
        steps: Steps,
        experts: TorchExpertSlots,
        connect: Connect,
        *,
        group_s: float,
        is_closing: Callable[[], bool],
    ) -> None:
        """Args:
        group_s: how long a job waits for the next membership, seconds.
        is_closing: whether the device is being closed: then nothing is waited for.
        """
        self.mesh: Mesh | None = None
        self.place = 0
        self.step = 0
        self._runner = runner
        self._steps = steps
        self._experts = experts
        self._connect = connect
        self._group_s = group_s
        self._is_closing = is_closing
        self._membership: Membership | None = None
        self._number = 0
        self._breakage: GroupBroken | None = None
        self._stopped: GroupStep | None = None
        self._ended = False
        self._early: collections.deque[Job | Signal] = collections.deque()

    @property
    def number(self) -> int:
        """Of the present membership, 0 before the first."""
        return self._number

    @property
    def is_stopped(self) -> bool:
        """All members have agreed that there is nothing left to do."""
        return self._stopped is not None

    @property
    def has_news(self) -> bool:
        """A breakage that nobody was told of. `run` tells it, before a step of the next membership."""
        return self._breakage is not None

    @property
    def can_meet(self) -> bool:
        """Another membership is to be joined, which `meet` does."""
        is_wanted = self.mesh is None and self._experts.joined > self._number
        return is_wanted and not self._ended and not self._is_closing()

    def next_item(self, jobs: Jobs, timeout_s: float | None) -> Job | Signal | None:
        """What comes next, in order; None if nothing has within the time."""
        if self._early:
            return self._early.popleft()
        return jobs.get_nowait() if jobs.wait(timeout_s) else None

    def run(self, job: Job, jobs: Jobs, on_broken: OnBroken) -> StepResult:
        """One job, in as many memberships as it takes.

        Args:
            jobs: looked into while there is no group; jobs are kept for `next_item`.
            on_broken: told of each breakage once.

        Raises:
            DeviceError: no membership came within `group_s`; or a step failed for good.
        """
        progress = self._runner.begin(job)
        if self._stopped is not None:
            return self._answer_stopped(job, progress)
        while True:
            if self._breakage is not None:
                on_broken(self._breakage)
                self._breakage = None
            if self.mesh is None:
                self._await_join(jobs)
                self.meet()
                continue
            try:
                return self._steps.run(self, job, progress)
            except MeshBroken as broken:
                self.note_broken(broken)

    def say(self, job: Job, *, rows: int, passes: int, drafts: int) -> Words:
        """This rank's words for the step, one snapshot of what its loop has set."""
        assert self._membership is not None
        return Words(
            generation=self._membership.members[self.place].generation,
            rows=rows,
            passes=passes,
            drafts=drafts,
            idle=job.idle,
            join=max(self._experts.joined, self._number),
            stop=int(job.stop),
            ready=self._experts.ready,
        )

    def latch(self, agreed: Agreement) -> GroupStep:
        """What was agreed holds from the next step on. Returns what the result of this one says of it."""
        group = GroupStep(self._number, self.step, self._experts.active, agreed.park, agreed.stop)
        self.step += 1
        self._experts.advance(agreed.active)
        if agreed.stop:
            self._stopped = group
        if agreed.leave:
            self.leave()
        return group

    def leave(self) -> None:
        """Ends the connections, if there are any: the others feel it at once."""
        if self.mesh is not None:
            self.mesh.close()
            self.mesh = None

    def end(self) -> None:
        """Leaves for good."""
        self._ended = True
        self.leave()

    def note_broken(self, broken: MeshBroken) -> None:
        """The membership is over; it is told to whoever waits for the job that is run next."""
        assert self._membership is not None
        self.leave()
        # One of an earlier membership that nobody was told of says nothing any more: this one was joined behind it.
        if self._breakage is None or self._breakage.membership < self._number:
            rank = self._membership.members[broken.place].rank
            step = broken.step if isinstance(broken, StepVoid) else self.step
            self._breakage = GroupBroken(self._number, step, rank, broken.why, overdue=broken.overdue)

    def meet(self) -> None:
        """Meets the members of the membership that was joined last; a failure is kept for the next job's waiter."""
        number = self._experts.joined
        prepared = self._experts.find_prepared(number)
        self._number, self.step, self.place = number, 0, prepared.place
        self._membership = prepared.membership
        self._experts.enter(number)
        try:
            mesh = self._connect(
                prepared.membership,
                prepared.place,
                lambda: self._experts.joined == number and not self._is_closing(),
            )
        except MeshBroken as broken:
            if self._experts.joined == number:
                self.note_broken(broken)
            return
        self.mesh = mesh
        self._steps.enter(mesh, prepared)

    def _answer_stopped(self, job: Job, progress: Progress) -> StepResult:
        """A step that was submitted before the end of the group was seen: nobody else may run it."""
        if progress.waiting:
            raise DeviceError(f"step {job.step} has rows and the group has stopped")
        return self._runner.finish(job, progress, self._stopped)

    def _await_join(self, jobs: Jobs) -> None:
        """Until another membership than the last one is joined."""
        due = time.monotonic() + self._group_s
        while self._experts.joined <= self._number:
            if self._is_closing():
                raise DeviceError(f"the device was closed when membership {self._number} was broken")
            try:
                item = jobs.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                raise DeviceError(
                    f"no membership after {self._number} was joined within {self._group_s:g} s (limits.group_s)"
                ) from None
            if item is not Signal.LOOK:
                self._early.append(item)


class DispatchSteps:
    """Steps whose rows go to their experts by `dispatch`, whose first exchange carries the words."""

    def __init__(self, runner: StepRunner, dispatch: Dispatch, experts: TorchExpertSlots) -> None:
        """All are borrowed; `dispatch` is the mixture of the runner's model."""
        self._runner = runner
        self._dispatch = dispatch
        self._experts = experts

    def enter(self, mesh: Mesh, prepared: Prepared) -> None:
        """See `Steps.enter`."""
        ranks = [member.rank for member in prepared.membership.members]
        self._dispatch.enter(mesh, prepared.place, ranks, prepared.membership.number)

    def run(self, group: GroupWorker, job: Job, progress: Progress) -> StepResult:
        """See `Steps.run`."""
        runner, dispatch, experts = self._runner, self._dispatch, self._experts
        words = group.say(
            job, rows=progress.rows, passes=len(progress.waiting), drafts=runner.count_drafts(progress)
        )
        active = experts.active
        tables = [experts.find_table(part) for part in range(len(active))]
        dispatch.open_step(group.step, words, tables, active)
        passes = 1
        done = 0
        while done < passes:
            began = time.perf_counter_ns()
            try:
                if progress.waiting:
                    runner.run_next(progress, repeatable=True)
                else:
                    runner.run_nothing()
            finally:
                progress.device_ns += time.perf_counter_ns() - began
            done += 1
            passes = dispatch.agreement.passes
        agreed = dispatch.agreement
        if agreed.drafts:
            # All members go along, behind the last pass of all; who wants no drafts, with no rows.
            began = time.perf_counter_ns()
            try:
                runner.propose(progress, agreed.drafts)
            finally:
                progress.device_ns += time.perf_counter_ns() - began
        experts.add_loads(dispatch.take_loads(), steps=1 if job.chunks or job.decode else 0)
        return runner.finish(job, progress, group.latch(agreed))
