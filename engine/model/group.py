"""GroupWorker: the steps of a rank in a group, on the device's worker thread.

It joins memberships, agrees with the other members in each step, and after a breakage runs what was not finished again
in the next membership. A step that breaks off keeps the passes that it has finished.
"""

from __future__ import annotations

import collections
import enum
import queue
import time
from collections.abc import Callable

from engine.core.group import Membership
from engine.core.pact import Agreement, GroupStep, Words
from engine.core.plan import StepResult
from engine.errors import DeviceError, GroupBroken
from engine.model.dispatch import Dispatch, Mesh
from engine.model.exchange import MeshBroken
from engine.model.expert_slots import TorchExpertSlots
from engine.model.passes import Job, Progress, StepRunner

Connect = Callable[[Membership, int, Callable[[], bool]], Mesh]
"""(membership, own place, whether it is still wanted) to a mesh; raises MeshBroken, also when it is not wanted."""


class Signal(enum.Enum):
    """What is not a job in the worker's queue."""

    LOOK = "a membership was joined"
    CLOSE = "no more jobs"


class GroupWorker:
    """See the module. All methods belong to the worker's thread."""

    def __init__(
        self,
        runner: StepRunner,
        dispatch: Dispatch,
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
        self._runner = runner
        self._dispatch = dispatch
        self._experts = experts
        self._connect = connect
        self._group_s = group_s
        self._is_closing = is_closing
        self._mesh: Mesh | None = None
        self._membership: Membership | None = None
        self._number = 0
        self._step = 0
        self._place = 0
        self._breakage: GroupBroken | None = None
        self._stopped: GroupStep | None = None
        self._ended = False
        self._early: collections.deque[Job | Signal] = collections.deque()

    def take(self, jobs: queue.SimpleQueue[Job | Signal]) -> Job | None:
        """The next job; None when there are no more. Meanwhile joins what is to be joined without one."""
        while True:
            wanted = self._mesh is None and self._experts.joined > self._number
            if wanted and not self._ended and not self._is_closing():
                self._open()
                continue
            item = self._early.popleft() if self._early else jobs.get()
            if isinstance(item, Job):
                return item
            if item is Signal.CLOSE:
                return None

    def run(
        self, job: Job, jobs: queue.SimpleQueue[Job | Signal], on_broken: Callable[[GroupBroken], None]
    ) -> StepResult:
        """One job, in as many memberships as it takes.

        Args:
            jobs: looked into while there is no group; jobs are kept for `take`.
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
            if self._mesh is None:
                self._await_join(jobs)
                self._open()
                continue
            try:
                return self._run_step(job, progress)
            except MeshBroken as broken:
                self._note_broken(broken)

    def end(self) -> None:
        """Leaves for good; `take` only hands jobs over from now on. The others feel it at once."""
        self._ended = True
        self._leave()

    def _leave(self) -> None:
        if self._mesh is not None:
            self._mesh.close()
            self._mesh = None

    def _run_step(self, job: Job, progress: Progress) -> StepResult:
        assert self._membership is not None
        experts, active = self._experts, self._experts.active
        words = Words(
            generation=self._membership.members[self._place].generation,
            rows=progress.rows,
            passes=len(progress.waiting),
            drafts=self._runner.count_drafts(progress),
            idle=job.idle,
            join=max(experts.joined, self._number),
            stop=int(job.stop),
            ready=experts.ready,
        )
        tables = [experts.find_table(part) for part in range(len(active))]
        self._dispatch.open_step(self._step, words, tables, active)
        passes = 1
        done = 0
        while done < passes:
            began = time.perf_counter_ns()
            try:
                if progress.waiting:
                    self._runner.run_next(progress, repeatable=True)
                else:
                    self._runner.run_nothing()
            finally:
                progress.device_ns += time.perf_counter_ns() - began
            done += 1
            passes = self._dispatch.agreement.passes
        agreed = self._dispatch.agreement
        if agreed.drafts:
            # All members go along, behind the last pass of all; who wants no drafts, with no rows.
            began = time.perf_counter_ns()
            try:
                self._runner.propose(progress, agreed.drafts)
            finally:
                progress.device_ns += time.perf_counter_ns() - began
        group = GroupStep(self._number, self._step, active, agreed.park, agreed.stop)
        experts.add_loads(self._dispatch.take_loads(), steps=1 if job.chunks or job.decode else 0)
        self._latch(agreed, group)
        return self._runner.finish(job, progress, group)

    def _latch(self, agreed: Agreement, group: GroupStep) -> None:
        """What was agreed holds from the next step on."""
        self._step += 1
        self._experts.advance(agreed.active)
        if agreed.stop:
            self._stopped = group
        if agreed.leave:
            self._leave()

    def _answer_stopped(self, job: Job, progress: Progress) -> StepResult:
        """A step that was submitted before the end of the group was seen: nobody else may run it."""
        if progress.waiting:
            raise DeviceError(f"step {job.step} has rows and the group has stopped")
        return self._runner.finish(job, progress, self._stopped)

    def _await_join(self, jobs: queue.SimpleQueue[Job | Signal]) -> None:
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

    def _open(self) -> None:
        """Meets the members of the membership that was joined last; a failure is kept for the next job's waiter."""
        number = self._experts.joined
        prepared = self._experts.find_prepared(number)
        self._number, self._step, self._place = number, 0, prepared.place
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
                self._note_broken(broken)
            return
        self._mesh = mesh
        ranks = [member.rank for member in prepared.membership.members]
        self._dispatch.enter(mesh, prepared.place, ranks, number)

    def _note_broken(self, broken: MeshBroken) -> None:
        assert self._membership is not None
        self._leave()
        rank = self._membership.members[broken.place].rank
        self._breakage = GroupBroken(self._number, self._step, rank, broken.why, overdue=broken.overdue)
