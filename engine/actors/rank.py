"""run_rank: the nursery that wires one rank, and the only place where its channels are made.

A rank's life: hello, open the device (told in phases), open the fabric and register the arena, ready, then serve
until the head's stream ends, a Drain is done, or the device fails. The head's stream is read from the start on, so a
rank whose head is gone does not load to the end.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from engine.actors.copies import Members, run_copies
from engine.actors.intake import Inbox, run_head
from engine.actors.links import Links
from engine.actors.lockstep import Lockstep, Preparing, run_loads, run_prepare
from engine.actors.pair import Callers, PairSettings, run_dialler, serve_pairs
from engine.actors.push import Pushing
from engine.actors.report import UNREAD_BYTES, run_lag, run_report
from engine.actors.step import Garbage, Side, StepLoop
from engine.actors.verify import run_verify
from engine.core.decode import DecodeSide
from engine.core.effects import ReadBack, StartCopy
from engine.core.experts import ExpertSide
from engine.core.prefill import PrefillSide
from engine.core.pushes import PushMeter
from engine.core.schedule import HandBack, SideSizes, StepLimits
from engine.core.switch import COPIES_RUNNING
from engine.core.telemetry import Meters
from engine.errors import ConfigError, EngineError, PeerGone
from engine.ports import Device, DeviceInfo, RankIdentity, RankPorts
from transport.fabric import Fabric
from transport.messages import (
    PROTOCOL_VERSION,
    RANK_FROM_HEAD,
    PairCounts,
    PeerDown,
    PeerUp,
    RankHello,
    RankReady,
    RankStarting,
)
from transport.stream import FrameStream

PEER_ORDERS = 1024
"""PeerUp and PeerDown that may wait for the dialler before the head's reader waits."""
CLOSE_S = 10.0
"""For device and fabric to close, each. A device that hangs is ended with the process."""


async def run_rank(ports: RankPorts, identity: RankIdentity) -> None:
    """One rank, from hello to its end. Returns when the head's stream ended or a Drain is done.

    Raises:
        ConfigError: limits and device do not fit each other.
        DeviceError: the device could not be opened or failed; open requests were answered first.
        FabricError: the fabric could not be opened, or refused the arena.
        RemoteProtocolError: the head broke the protocol.
    """
    limits = identity.config.limits
    head = FrameStream(
        ports.head,
        accepts=RANK_FROM_HEAD,
        out_limit_bytes=limits.link_out_bytes,
        stall_s=limits.link_stall_s,
        name="head",
    )
    inbox, callers, members = Inbox(), Callers(), Members(identity.rank)
    send_order, orders = trio.open_memory_channel[PeerUp | PeerDown](PEER_ORDERS)
    failure: EngineError | None = None
    config = identity.config
    hello = RankHello(
        version=PROTOCOL_VERSION,
        rank=identity.rank,
        generation=identity.generation,
        role=config.role,
        pid=ports.process.pid,
        config_digest=config.config_digest,
    )
    head.post(hello)
    async with head, send_order, orders:
        async with trio.open_nursery() as nursery:

            async def tell_pairs(message: PeerUp | PeerDown) -> None:
                if isinstance(message, PeerDown):
                    await members.bury(message)
                    await callers.bury(message)
                if config.role == "prefill":
                    await send_order.send(message)

            async def listen() -> None:
                nonlocal failure
                try:
                    await run_head(head, inbox, tell_pairs)
                except EngineError as error:
                    failure = failure or error
                nursery.cancel_scope.cancel()

            async def serve() -> None:
                nonlocal failure
                try:
                    await _serve(ports, identity, head, inbox, callers, members, orders)
                except* EngineError as group:
                    failure = _first_leaf(group)
                # The head's writer flushes what is queued before it lets itself be cancelled.
                nursery.cancel_scope.cancel()

            nursery.start_soon(listen)
            nursery.start_soon(serve)
    if failure is not None and not isinstance(failure, PeerGone):
        raise failure


def _first_leaf(group: BaseExceptionGroup[EngineError]) -> EngineError:
    """What went wrong first: nurseries wrap it once each, and add what its cancellation brought to light."""
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first


async def _serve(
    ports: RankPorts,
    identity: RankIdentity,
    head: FrameStream,
    inbox: Inbox,
    callers: Callers,
    members: Members,
    orders: trio.MemoryReceiveChannel[PeerUp | PeerDown],
) -> None:
    token = trio.lowlevel.current_trio_token()

    def tell_phase(phase: str, done: int, total: int, unit: str) -> None:
        # May be called from the loading thread, and only the loop may touch the stream.
        token.run_sync_soon(_post_phase, head, RankStarting(phase, done, total, unit))

    device = await ports.open_device(tell_phase)
    fabric: Fabric | None = None
    try:
        fabric = await ports.open_fabric()
        await fabric.register(device.block_runs())
        with _tended_garbage(ports.process.is_own):
            await _run_side(ports, identity, head, inbox, callers, members, orders, device, fabric)
    finally:
        with trio.CancelScope(shield=True):
            if fabric is not None:
                with trio.move_on_after(CLOSE_S):
                    await fabric.aclose()
            with trio.move_on_after(CLOSE_S):
                await device.aclose()


def _post_phase(head: FrameStream, phase: RankStarting) -> None:
    try:
        head.post(phase)
    except EngineError:
        pass  # the stream's own tasks find out, and end the rank


async def _run_side(
    ports: RankPorts,
    identity: RankIdentity,
    head: FrameStream,
    inbox: Inbox,
    callers: Callers,
    members: Members,
    orders: trio.MemoryReceiveChannel[PeerUp | PeerDown],
    device: Device,
    fabric: Fabric,
) -> None:
    info, limits = device.info, identity.config.limits
    sizes = side_sizes(identity, info)
    takes_turns = sizes.hand_back is not None
    settings = PairSettings(
        identity.rank, identity.generation, info, limits.link_out_bytes, limits.link_stall_s, takes_turns
    )
    callers.fabric = fabric
    links, meters, pushed = Links(), Meters(), PushMeter()
    side: Side
    # What is read back holds its slab until it was read.
    send_reading, readings = trio.open_memory_channel[ReadBack](info.num_slabs)

    async with trio.open_nursery() as nursery:
        pushing = Pushing(
            fabric,
            links,
            inbox,
            pushed,
            nursery,
            num_pages=info.num_pages,
            transfer_s=limits.transfer_s,
            reader=device if sizes.checksums else None,
            connect=callers.connect if identity.config.role == "decode" else None,
        )
        if identity.config.role == "prefill":
            side = PrefillSide(sizes)
            nursery.start_soon(run_dialler, orders, ports.dial, fabric, callers, settings, inbox, links)
            if takes_turns and sizes.checksums:
                nursery.start_soon(run_verify, readings, device, inbox)
        else:
            if ports.peer_listener is None:
                raise ConfigError(f"decode rank {identity.rank} has no listener for prefill ranks")
            side = DecodeSide(sizes)
            nursery.start_soon(run_verify, readings, device, inbox)
            nursery.start_soon(serve_pairs, ports.peer_listener, fabric, callers, settings, inbox, links)

        members.fabric = fabric
        group = open_group(identity, head, inbox, members, device, fabric, nursery)

        def count_pairs() -> tuple[PairCounts, bytes]:
            return pushed.build(identity.rank, identity.generation, links.list_ranks())

        async def report() -> None:
            await run_report(
                head,
                inbox,
                side.gauges,
                meters,
                rank=identity.rank,
                generation=identity.generation,
                snapshot_s=limits.snapshot_s,
                step_s=limits.step_s,
                read_rss_bytes=ports.process.read_rss_bytes,
                is_stalled=lambda: group is not None and group.is_stalled,
                count_pairs=count_pairs if identity.config.role == "prefill" else None,
            )

        head.post(_ready(identity, info, fabric, ports.peer_address), b"" if group is None else fabric.describe())
        nursery.start_soon(report)
        if ports.process.is_own:  # else the lag is not this rank's
            nursery.start_soon(run_lag, meters)
        nursery.start_soon(inbox.run_alarm)
        garbage = Garbage(is_own=ports.process.is_own)
        loop = StepLoop(
            side,
            device,
            head,
            inbox,
            links,
            pushing,
            send_reading,
            meters,
            garbage,
            ports.audit,
            group,
            expect_push=fabric.expect_push,
        )
        nursery.start_soon(loop.run_waiter)
        await loop.run()
        nursery.cancel_scope.cancel()


def open_group(
    identity: RankIdentity,
    head: FrameStream,
    inbox: Inbox,
    members: Members,
    device: Device,
    fabric: Fabric,
    nursery: trio.Nursery,
) -> Lockstep | None:
    """The rank's part in its group, with its tasks; None for a group of one.

    Raises:
        ConfigError: the configuration and the device do not say the same about a group.
    """
    config, slots = identity.config, device.experts
    if (slots is not None) != (config.group > 1):
        has = "has no expert slots" if slots is None else "has expert slots for a group"
        raise ConfigError(f"rank {identity.rank} is in a group of {config.group}, and device {device.info.name} {has}")
    if slots is None:
        return None
    limits, preparing = config.limits, Preparing()
    send_copy, copies = trio.open_memory_channel[StartCopy](len(device.info.parts) * COPIES_RUNNING)
    experts = ExpertSide(identity.rank, identity.generation, device.info.parts)

    async def copy() -> None:
        await run_copies(copies, fabric, members, device.info, inbox, copy_s=limits.copy_s)

    async def prepare() -> None:
        await run_prepare(preparing, slots, inbox, prepare_s=limits.start_s)

    async def load() -> None:
        await run_loads(slots, head, loads_s=config.experts_main.loads_s, unread_bytes=UNREAD_BYTES)

    for task in (copy, prepare, load):
        nursery.start_soon(task)
    return Lockstep(experts, slots, members, preparing, send_copy, head)


def side_sizes(identity: RankIdentity, info: DeviceInfo) -> SideSizes:
    """What the sides of a rank need to know of it and of its device. Raises ConfigError where limits do not fit it."""
    limits, draft, back = identity.config.limits, identity.config.draft, identity.config.hand_back
    hands_back = back.enabled and identity.config.prefix_cache
    if limits.prefill_chunk_tokens < info.page_tokens or limits.prefill_chunk_tokens % info.page_tokens:
        raise ConfigError(
            f"prefill_chunk_tokens {limits.prefill_chunk_tokens} is not a whole number of pages "
            f"of {info.page_tokens} tokens: make it a multiple"
        )
    return SideSizes(
        rank=identity.rank,
        num_pages=info.num_pages,
        num_slabs=info.num_slabs,
        vocab_size=info.vocab_size,
        max_model_tokens=min(info.max_model_tokens, identity.config.max_model_tokens),
        max_waiting=limits.rank_waiting,
        grant_us=int(limits.grant_s * 1e6),
        quarantine_share=limits.quarantined_pages,
        cap_us=int(limits.abort_s * 1e6),
        room_us=int(limits.transfer_s * 1e6),
        step=StepLimits(
            chunk_tokens=limits.prefill_chunk_tokens,
            page_tokens=info.page_tokens,
            rows=limits.decode_rows,
            eos_ids=frozenset(info.eos_ids),
            prompts=limits.prefill_prompts,
            drafts=min(draft.tokens, info.max_drafts) if identity.config.role == "decode" else 0,
            draft_rows=draft.max_rows,
        ),
        checksums=identity.config.checksum_pushes,
        prefix_cache=identity.config.prefix_cache,
        why_no_grammar=info.why_no_grammar,
        hand_back=HandBack(back.tokens, back.share, int(back.wait_s * 1e6)) if hands_back else None,
    )


def _ready(identity: RankIdentity, info: DeviceInfo, fabric: Fabric, address: str) -> RankReady:
    return RankReady(
        rank=identity.rank,
        generation=identity.generation,
        address=address,
        num_pages=info.num_pages,
        page_tokens=info.page_tokens,
        page_bytes=info.page_bytes,
        num_slabs=info.num_slabs,
        slab_bytes=info.slab_bytes,
        fabric=fabric.engine,
        device=info.name,
        mesh_address=info.mesh_address,
        parts=info.parts,
    )


@contextmanager
def _tended_garbage(is_own: bool) -> Iterator[None]:
    """What was loaded is never looked at again by the collector, which from here on runs only when the loop says so."""
    if not is_own:
        yield
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
