"""The seams of a rank: the Device protocol, and RankPorts, all that a rank is given.

`engine.compose` fills RankPorts with the real things, `engine.sim.world` with simulated ones; `actors.rank.run_rank`
can not tell the difference. Bulk bytes have their own seam, `transport.fabric.Fabric`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import trio

from engine.config import RankConfig
from engine.core.effects import Stretch
from engine.core.group import Membership
from engine.core.placement import Placement
from engine.core.plan import StepPlan, StepResult
from transport.fabric import BlockRun, Fabric
from transport.messages import PartInfo


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What the rest of a rank needs to know of its device.

    Attributes:
        name: for people (`cpu`, `cuda:0 NVIDIA H200`, `sim`).
        layout_digest: hex digest over everything two devices must share to exchange KV (record format, page tokens,
            ring sizes, layer roles). Differing digests refuse each other.
        page_tokens: tokens a page holds.
        page_bytes, num_pages: size and number of pages of the arena.
        slab_bytes, num_slabs: size and number of state slabs.
        vocab_size, max_model_tokens: bounds for validation.
        eos_ids: ids that end a text.
        mesh_address: where a device of a group meets the others; empty for a group of one.
        parts: the parts of the model whose experts have slots here; empty for a group of one.
        max_drafts: drafts that it proposes for a row at most; 0 for a model without drafter.
        why_no_grammar: of a prefill rank: why no text can follow a grammar; empty if they can.
    """

    name: str
    layout_digest: str
    page_tokens: int
    page_bytes: int
    num_pages: int
    slab_bytes: int
    num_slabs: int
    vocab_size: int
    max_model_tokens: int
    eos_ids: tuple[int, ...]
    mesh_address: str = ""
    parts: tuple[PartInfo, ...] = ()
    max_drafts: int = 0
    why_no_grammar: str = ""


class Ticket(Protocol):
    """A submitted step."""

    @property
    def step(self) -> int: ...


class Device(Protocol):
    """One accelerator, or a CPU share, with the model loaded. Called from the rank's trio loop only.

    Steps run one after another in submission order. At most two are queued; a third `submit` is a bug of the caller.
    """

    @property
    def info(self) -> DeviceInfo: ...

    @property
    def experts(self) -> ExpertSlots | None:
        """The device's part in a group; None for a group of one."""
        ...

    def block_runs(self) -> Sequence[BlockRun]:
        """The arena for the fabric: the run of pages, the run of slabs, then for each part of a group's device the run
        of its slots. Lives as long as the device."""
        ...

    def submit(self, plan: StepPlan) -> Ticket:
        """Enqueues the step and returns before it ran. The plan's token views are read before this returns.

        Raises:
            DeviceError: the device has failed; nothing was enqueued.
        """
        ...

    async def wait(self, ticket: Ticket) -> StepResult:
        """Until the step is done. Cancelling stops the waiting; the step runs on and may be waited for again.

        Raises:
            DeviceError: the step failed; the device takes no more.
            GroupBroken: a member of the group did not answer. The step will run again in the next membership: wait
                again for its result.
        """
        ...

    def foresee(self, grammar: str) -> None:
        """Rows with this grammar (`Sampling.grammar`) will come. Returns at once; what there is to prepare is done
        beside the steps."""
        ...

    async def checksums(self, stretches: Sequence[Stretch]) -> tuple[int, ...]:
        """Of each stretch, the CRC-32 over the bytes of its pages in order, then those of its slab unless it is -1.

        Steps may run beside it as long as they write nothing of it; the loop runs on meanwhile.
        """
        ...

    async def aclose(self) -> None:
        """Waits for queued steps and frees the device."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class PartLoads:
    """What one part's gates and experts did since it was last asked.

    Attributes:
        counts: int64[layers, experts], this rank's rows sent to each expert. Idle and padded rows do not count.
        steps: steps with rows in which they were counted.
        pairs, expert_us: (row, expert) pairs computed here for any rank, and what that took, microseconds.
    """

    counts: npt.NDArray[np.int64]
    steps: int
    pairs: int
    expert_us: int


class ExpertSlots(Protocol):
    """The expert slots of a device, and its place in a group. Called from the rank's trio loop only.

    Parts are given by index into `core.pact.PARTS`, slots by number on this rank. The device keeps what each slot
    holds, refuses to compute with another expert than a table names, and refuses to have a live slot overwritten.
    """

    async def prepare(self, membership: Membership) -> None:
        """Loads from the checkpoint what this rank's row of each placement names and no slot holds yet, beside running
        steps. A later call may replace one that was never joined.

        Raises:
            DeviceError: an expert can not be loaded, or would have to go into a slot that is in use.
        """
        ...

    def join(self, number: int) -> None:
        """Steps with the members of the prepared membership from the step on that the pact agrees on; at once where
        the present group is broken or there is none. The result's `group` says when it has happened."""
        ...

    def load_table(self, part: int, epoch: int, placement: Placement) -> None:
        """Into a buffer that is not active; `epoch` may become active once all ranks are ready for it."""
        ...

    def set_ready(self, part: int, epoch: int) -> None:
        """The ready word, from the next step's snapshot on."""
        ...

    def withdraw(self, part: int, epoch: int) -> None:
        """The ready word back to the epoch before, from the next step's snapshot on; and should `epoch` have become
        active in a step that was not awaited because the group broke, forgets that."""
        ...

    def note_copied(self, part: int, slots: Mapping[int, int]) -> None:
        """Slot to `layer * experts + expert`: a peer's writes into these empty slots are complete."""
        ...

    def free_slots(self, part: int, slots: Sequence[int]) -> None:
        """They are empty. No queued step's table names them."""
        ...

    def read_loads(self) -> tuple[PartLoads, ...] | None:
        """By part, since the last call; None if no step had rows. Never waits."""
        ...


StreamHandler = Callable[[trio.abc.Stream], Awaitable[None]]


def read_rss_bytes() -> int:
    """Resident memory of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@dataclasses.dataclass(frozen=True, slots=True)
class HostProcess:
    """The process that a rank lives in.

    Attributes:
        pid: its number.
        is_own: the rank is alone in it, and may decide when garbage is collected.
        read_rss_bytes: its resident memory.
    """

    pid: int = dataclasses.field(default_factory=os.getpid)
    is_own: bool = True
    read_rss_bytes: Callable[[], int] = read_rss_bytes


class Audited(Protocol):
    """A side of the hand-off that can count its memory: DecodeSide or PrefillSide."""

    def check(self) -> None:
        """Raises LocalProtocolError unless every page and slab is accounted for."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class RankPorts:
    """All that a rank is given.

    Attributes:
        head: connected control stream to the head; its end is the rank's end.
        open_device: makes the device (loads weights); reports phases through its argument
            `(phase, done, total, unit)`, may run in a worker thread.
        open_fabric: makes the fabric.
        peer_listener: decode ranks accept prefill ranks here; None on prefill ranks.
        peer_address: what `dial` of another rank needs to reach `peer_listener`.
        dial: opens a stream to a decode rank's address.
        process: the process around it.
        audit: called after every turn of the step loop with the rank's side; for runs that watch its invariants.
    """

    head: trio.abc.Stream
    open_device: Callable[[Callable[[str, int, int, str], None]], Awaitable[Device]]
    open_fabric: Callable[[], Awaitable[Fabric]]
    peer_listener: trio.abc.Listener[trio.abc.Stream] | None
    peer_address: str
    dial: Callable[[str], Awaitable[trio.abc.Stream]]
    process: HostProcess = dataclasses.field(default_factory=HostProcess)
    audit: Callable[[Audited], None] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RankIdentity:
    """Which rank this process is, in which of its lives."""

    rank: int
    generation: int
    config: RankConfig
