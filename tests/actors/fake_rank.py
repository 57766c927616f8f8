"""A rank without a model: a process that speaks the head's protocol and computes tokens by a rule. Used by head tests.

The completion of a prompt is `first, first + 1, first + 2 ...` modulo the vocabulary, with `first` the sum of all ids
that the prefill rank was given; so a test can tell a right answer, a repeated token and a lost one. A request with seed
STUCK_SEED is taken and never answered. The variable FAKE_RANK makes a rank fail: `exit:<rank>:<status>` at its start.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import struct
import sys

import trio

from transport.errors import EngineError
from transport.messages import (
    DECODE_FROM_PREFILL,
    PREFILL_FROM_DECODE,
    PROTOCOL_VERSION,
    RANK_FROM_HEAD,
    Abort,
    Drain,
    PeerDown,
    PeerUp,
    PrefillCommitted,
    RankHello,
    RankReady,
    RankSnapshot,
    RankStarting,
    RequestAborted,
    RequestFinished,
    RequestStarted,
    ReservePages,
    StartPrefill,
    Timings,
    TokensEmitted,
)
from transport.stream import FrameStream, run_link
from transport.unix import open_unix_listener, open_unix_stream

STUCK_SEED = 1313
STEP_S = 0.002
PAGES, PAGE_TOKENS = 64, 16


class FakeRank:
    def __init__(self, head: FrameStream, given: dict, nursery: trio.Nursery) -> None:
        self.head, self.given, self.nursery = head, given, nursery
        self.config = given["config"]
        self.peers: dict[int, FrameStream] = {}
        self.reserved: dict[int, ReservePages] = {}
        self.rows: dict[int, list[int]] = {}  # request -> next token, next index
        self.early: dict[int, int] = {}  # request -> first token; a commit may come before the head's word of it
        self.step = 0
        self.draining = False

    async def from_head(self, frames) -> None:
        for frame in frames:
            match frame.message:
                case PeerUp() as up:
                    peer = FrameStream(
                        await open_unix_stream(up.address),
                        accepts=PREFILL_FROM_DECODE,
                        out_limit_bytes=1 << 20,
                        stall_s=5,
                        name="decode",
                    )
                    self.peers[up.rank] = peer
                    self.nursery.start_soon(self.write_peer, peer)
                case PeerDown(rank=rank):
                    print(f"peer {rank} is confirmed dead", file=sys.stderr, flush=True)
                    self.peers.pop(rank, None)
                case StartPrefill() as start:
                    ids = struct.unpack(f"<{len(frame.blob) // 4}i", frame.blob)
                    peer = self.peers.get(start.decode_rank)
                    if peer is not None and start.sampling.seed != STUCK_SEED:
                        size = 64 * len(ids)
                        peer.post(PrefillCommitted(start.request, 0, len(ids), 1, sum(ids), size, 1, 1, Timings()))
                case ReservePages() as reserve:
                    self.reserved[reserve.request] = reserve
                    self.join()
                case Abort() as abort:
                    self.reserved.pop(abort.request, None)
                    self.rows.pop(abort.request, None)
                    self.head.post(RequestAborted(abort.request, abort.attempt))
                case Drain():
                    self.draining = True

    def join(self) -> None:
        for request in [request for request in self.early if request in self.reserved]:
            self.rows[request] = [self.early.pop(request), self.reserved[request].generated]

    async def write_peer(self, peer: FrameStream) -> None:
        try:
            await run_link(peer, lambda frames: None)
        except EngineError:
            await peer.aclose()

    async def serve_peer(self, stream) -> None:
        link = FrameStream(stream, accepts=DECODE_FROM_PREFILL, out_limit_bytes=1 << 20, stall_s=5, name="prefill")

        def take(frames) -> None:
            for frame in frames:
                self.early[frame.message.request] = frame.message.first_token
            self.join()

        async with link:
            try:
                await run_link(link, take)
            except EngineError:
                pass  # the prefill rank is gone; a mistake of this file still ends the process

    async def run_steps(self) -> None:
        while True:
            await trio.sleep(STEP_S)
            if self.rows:
                self.emit()
            if self.draining and not self.reserved:
                self.nursery.cancel_scope.cancel()

    def emit(self) -> None:
        self.step += 1
        vocab = self.given["vocab"]
        requests = list(self.rows)
        n = len(requests)
        for request in requests:
            reserve = self.reserved[request]
            if self.rows[request][1] == reserve.generated:
                self.head.post(
                    RequestStarted(
                        request=request,
                        attempt=reserve.attempt,
                        prompt_tokens=reserve.num_ids - reserve.generated,
                        cached_tokens=0,
                        prefill_rank=reserve.prefill_rank,
                        decode_rank=self.given["rank"],
                        pushed_bytes=64 * reserve.num_ids,
                        pushes=1,
                        post_us=1,
                        timings=Timings(),
                    )
                )
        blob = struct.pack(f"<{n}q", *requests)
        blob += struct.pack(f"<{n}i", *(self.reserved[r].attempt for r in requests))
        blob += struct.pack(f"<{n}i", *(self.rows[r][1] for r in requests))
        blob += struct.pack(f"<{n}i", *[1] * n)
        blob += struct.pack(f"<{n}i", *(self.rows[r][0] % vocab for r in requests))
        self.head.post(TokensEmitted(self.step, n, n), blob)
        for request in requests:
            row, reserve = self.rows[request], self.reserved[request]
            row[0] += 1
            row[1] += 1
            if row[1] >= reserve.sampling.max_tokens:
                self.head.post(RequestFinished(request, reserve.attempt, "length", row[1], 1))
                del self.rows[request], self.reserved[request]

    async def run_snapshots(self) -> None:
        while True:
            self.head.post(
                RankSnapshot(
                    self.given["rank"],
                    self.given["generation"],
                    self.step,
                    0,
                    len(self.rows),
                    len(self.reserved),
                    PAGES,
                    0,
                    0,
                    0,
                    PAGES,
                    8,
                    *[0] * 11,
                )
            )
            await trio.sleep(self.config["limits"]["snapshot_s"])


async def run(control: int, given: dict) -> None:
    import socket

    config = given["config"]
    rank, generation, role = given["rank"], given["generation"], config["role"]
    given["vocab"] = 288
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(socket.socket(fileno=control)))
    head = FrameStream(stream, accepts=RANK_FROM_HEAD, out_limit_bytes=1 << 24, stall_s=5, name="head")
    head.post(RankHello(PROTOCOL_VERSION, rank, generation, role, os.getpid(), config["config_digest"]))
    async with trio.open_nursery() as nursery:
        fake = FakeRank(head, given, nursery)
        address = ""
        if role == "decode":
            address = given["socket"]
            listener = await open_unix_listener(address)
            nursery.start_soon(trio.serve_listeners, fake.serve_peer, [listener])
        head.post(RankStarting("weights", 1, 1, "tensors"))
        head.post(RankReady(rank, generation, address, PAGES, PAGE_TOKENS, 1024, 8, 1024, "tcp", "fake"))
        nursery.start_soon(fake.run_steps)
        nursery.start_soon(fake.run_snapshots)
        try:
            await run_link(head, fake.from_head)
        except EngineError as error:
            print(f"head: {error}", file=sys.stderr, flush=True)
        nursery.cancel_scope.cancel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", type=int)
    parser.add_argument("--given", type=int)
    options = parser.parse_args()
    with open(options.given, "rb") as file:
        given = json.load(file)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    fault = os.environ.get("FAKE_RANK", "").split(":")
    if fault[0] == "exit" and int(fault[1]) == given["rank"]:
        print(f"fake rank {given['rank']} was told to fail", file=sys.stderr)
        sys.exit(int(fault[2]))
    trio.run(run, options.control, given)


if __name__ == "__main__":
    main()
