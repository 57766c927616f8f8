"""MeshDevice: a SimDevice of a group, with expert slots in real memory and the pact in virtual time.

`Mesh` stands for the connections of the group: the words that members said in each step. A device computes nothing with
its experts, but before and after each step it looks at the bytes of every slot that the table in force names: what was
not copied, or overwritten too early, is a Violation. What a step costs is what the slowest member's rows cost.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import trio

from engine.core.group import Membership
from engine.core.pact import GroupStep, Words, agree
from engine.core.placement import EMPTY, Placement
from engine.core.plan import StepPlan, StepResult
from engine.errors import DeviceError, GroupBroken
from engine.ports import PartLoads
from engine.sim.device import SimDevice, SimTicket
from engine.sim.violation import Violation
from transport.fabric import BlockRun
from transport.messages import PartInfo

SLOT_BYTES = 64
EMPTY_COST_S = 0.001


class Mesh:
    """What the members of one group see of each other.

    Attributes:
        ran: (membership, step) -> rank -> (epochs in force, rows).
        exchange_s: limit of a wait for another member.
    """

    def __init__(self, *, idle_limit: int = 8, exchange_s: float = 10.0) -> None:
        self.idle_limit, self.exchange_s = idle_limit, exchange_s
        self.devices: dict[tuple[int, int], MeshDevice] = {}
        self.words: dict[tuple[int, int], dict[int, tuple[Words, float]]] = {}
        self.ran: dict[tuple[int, int], dict[int, tuple[tuple[int, ...], int]]] = {}
        self._lot = trio.lowlevel.ParkingLot()

    def changed(self) -> None:
        self._lot.unpark_all()

    async def wait_change(self) -> None:
        await self._lot.park()


class MeshDevice(SimDevice):
    """See the module. It is its own `ExpertSlots`."""

    def __init__(
        self, mesh: Mesh, nursery: trio.Nursery, rank: int, generation: int, parts: Sequence[PartInfo]
    ) -> None:
        super().__init__(num_pages=64, num_slabs=8, page_tokens=8)
        self.info = dataclasses.replace(self.info, mesh_address=f"mesh-{rank}-{generation}", parts=tuple(parts))
        self.experts = self
        self.mesh, self.rank, self.generation = mesh, rank, generation
        self.slow = 1.0
        self.hangs = False
        self._buffers = [ctypes.create_string_buffer(info.slots * SLOT_BYTES) for info in parts]
        self.holds = [[EMPTY] * info.slots for info in parts]
        self.steps: collections.deque[SimTicket] = collections.deque()
        self.breaks: dict[SimTicket, collections.deque[GroupBroken]] = collections.defaultdict(collections.deque)
        self.prepared: dict[int, Membership] = {}
        self.membership: Membership | None = None
        self.told = self.next_group_step = 0
        self.is_broken = self.is_stopped = False
        self.active = (0,) * len(parts)
        self.ready = [0] * len(parts)
        self._ready_before = [0] * len(parts)
        self.tables: list[dict[int, Placement]] = [{} for _ in parts]
        self.rows_counted = 0
        self.fails_to_prepare = False
        self.calls: list[str] = []
        mesh.devices[rank, generation] = self
        self.scope = trio.CancelScope()
        nursery.start_soon(self._work)

    # ------------------------------------------------------------ Device

    def block_runs(self) -> Sequence[BlockRun]:
        slots = zip(self._buffers, self.holds, strict=True)
        return (*super().block_runs(), *(BlockRun(ctypes.addressof(b), SLOT_BYTES, len(h)) for b, h in slots))

    def submit(self, plan: StepPlan) -> SimTicket:
        if self._why_dead:
            raise DeviceError(f"step {plan.step}: {self._why_dead}")
        self.calls.append("submit")
        assert len([step for step in self.steps if step.result is None]) < 2, "three steps in the queue"
        cost_s = EMPTY_COST_S if plan.is_empty else self._costs(plan) * self.slow
        ticket = SimTicket(plan.step, plan, plan.columns, [bytes(chunk.tokens) for chunk in plan.chunks], cost_s)
        self.steps.append(ticket)
        self.mesh.changed()
        return ticket

    async def wait(self, ticket: Any) -> StepResult:
        while ticket.result is None and ticket.error is None and not self.breaks[ticket]:
            await ticket.over.wait()
        if self.breaks[ticket]:
            raise self.breaks[ticket].popleft()
        if ticket.error is not None:
            raise ticket.error
        return ticket.result

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
        self.die("the device was closed")
        self.scope.cancel()
        self.mesh.devices.pop((self.rank, self.generation), None)
        self.mesh.changed()

    # ------------------------------------------------------------ ExpertSlots

    async def prepare(self, membership: Membership) -> None:
        await trio.sleep(0.05)
        if self.fails_to_prepare:
            raise DeviceError("expert 0 of layer 0 can not be loaded")
        place = membership.place_of(self.rank)
        for part, named in enumerate(membership.parts):
            for slot, key in enumerate(named.placement.table[place].tolist()):
                if key not in (EMPTY, self.holds[part][slot]):
                    if self.holds[part][slot] != EMPTY:
                        raise DeviceError(f"slot {slot} of part {part} is in use")
                    self._buffers[part][slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = weights(part, key)
                    self.holds[part][slot] = key
        self.prepared[membership.number] = membership

    def join(self, number: int) -> None:
        self.calls.append("join")
        assert number in self.prepared
        self.told = number
        self.mesh.changed()

    def load_table(self, part: int, epoch: int, placement: Placement) -> None:
        self.tables[part][epoch] = placement

    def set_ready(self, part: int, epoch: int) -> None:
        self._ready_before[part], self.ready[part] = self.ready[part], epoch

    def withdraw(self, part: int, epoch: int) -> None:
        if self.ready[part] == epoch:  # `epoch - 1` may have been withdrawn, too: it is not what was said before
            self.ready[part] = self._ready_before[part]

    def note_copied(self, part: int, slots: Mapping[int, int]) -> None:
        for slot, key in slots.items():
            if self.holds[part][slot] != EMPTY:
                raise DeviceError(f"slot {slot} of part {part} is in use")
            self.holds[part][slot] = key

    def free_slots(self, part: int, slots: Sequence[int]) -> None:
        for slot in slots:
            self.holds[part][slot] = EMPTY
            self._buffers[part][slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = bytes(SLOT_BYTES)

    def read_loads(self) -> tuple[PartLoads, ...] | None:
        rows, self.rows_counted = self.rows_counted, 0
        if not rows:
            return None
        shapes = [(info.layers, info.experts) for info in self.info.parts]
        return tuple(PartLoads(np.full(shape, rows, np.int64), 1, rows, 7) for shape in shapes)

    # ------------------------------------------------------------ the worker

    async def _work(self) -> None:
        with self.scope:
            while True:
                ticket = next((step for step in self.steps if step.result is None and step.error is None), None)
                if ticket is None or self.hangs or self.is_stopped:
                    await self.mesh.wait_change()
                    continue
                while True:
                    try:
                        await self._run(ticket)
                        break
                    except GroupBroken as error:
                        self.is_broken = True
                        self.breaks[ticket].append(error)
                        ticket.over.ring()
                self.steps.remove(ticket)
                ticket.over.ring()

    async def _run(self, ticket: SimTicket) -> None:
        while self.membership is None or self.is_broken:
            if self.told > (0 if self.membership is None else self.membership.number):
                self._enter(self.told)
            else:
                await self.mesh.wait_change()
        at, plan, active = (self.membership.number, self.next_group_step), ticket.plan, self.active
        rows = len(plan.rows) + len(plan.chunks)
        join = max(self.told, self.membership.number)
        words = Words(self.generation, rows, rows, plan.idle, join, plan.stop, plan.drafts, tuple(self.ready))
        self.mesh.words.setdefault(at, {})[self.rank] = (words, ticket.cost_s)
        self.mesh.ran.setdefault(at, {})[self.rank] = (active, rows)
        if len({epochs for epochs, _ in self.mesh.ran[at].values()}) > 1:
            raise Violation("epochs", f"step {at} runs under {self.mesh.ran[at]}")
        self.mesh.changed()
        self._check_weights(active)
        said = await self._exchange(at)
        await trio.sleep(max(cost_s for _, cost_s in said))
        self._check_weights(active)
        agreed = agree([word for word, _ in said], active, at[0], self.mesh.idle_limit)
        self.next_group_step += 1
        self.active = agreed.active
        if agreed.leave:
            self._enter(agreed.leave)
        if plan.is_empty:
            result = StepResult(plan.step, (), (), 1)
        else:
            self.queue.append(ticket)
            self.finish_first()
            if ticket.result is None:
                return
            result, self.rows_counted = ticket.result, self.rows_counted + rows
        ticket.result = dataclasses.replace(result, group=GroupStep(*at, active, agreed.park, agreed.stop))
        self.is_stopped = agreed.stop

    async def _exchange(self, at: tuple[int, int]) -> list[tuple[Words, float]]:
        assert self.membership is not None
        members = [self.membership.members[place] for place in self.membership.living]
        deadline = trio.current_time() + self.mesh.exchange_s
        while True:
            said = self.mesh.words[at]
            missing = [member for member in members if member.rank not in said]
            if not missing:
                return [said[member.rank] for member in members]
            for member in missing:
                device = self.mesh.devices.get((member.rank, member.generation))
                if device is None or (device.membership is not None and device.membership.number > at[0]):
                    raise GroupBroken(*at, member.rank, "has closed its connection", overdue=False)
            with trio.move_on_at(deadline) as wait:
                await self.mesh.wait_change()
            if wait.cancelled_caught:
                why = f"did not answer within {self.mesh.exchange_s:g} s"
                raise GroupBroken(*at, missing[0].rank, why, overdue=True)

    def _enter(self, number: int) -> None:
        self.membership, self.next_group_step, self.is_broken = self.prepared[number], 0, False
        self.active = tuple(part.epoch for part in self.membership.parts)
        for part, named in enumerate(self.membership.parts):
            self.tables[part][named.epoch] = named.placement
        self.mesh.changed()

    def _check_weights(self, active: tuple[int, ...]) -> None:
        assert self.membership is not None
        place = self.membership.place_of(self.rank)
        for part, epoch in enumerate(active):
            for slot, key in enumerate(self.tables[part][epoch].table[place].tolist()):
                held = self._buffers[part][slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]
                if key != EMPTY and (held != weights(part, key) or self.holds[part][slot] != key):
                    raise Violation("weights", f"rank {self.rank}: slot {slot} of part {part} has not expert {key}")


def weights(part: int, key: int) -> bytes:
    """What a slot with that expert has in it."""
    return bytes([1 + part, 1 + key] * (SLOT_BYTES // 2))
