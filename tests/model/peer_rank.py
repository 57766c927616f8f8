"""A process that is one rank of a group with a mailbox in shared memory: `python -m tests.model.peer_rank DEVICE`.

Commands as `mesh_rank.py` has them. See `test_peer_memory.py`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.core.group import Membership
from engine.model.mesh import Mesh, MeshListener, open_mesh
from engine.model.nvlink import NvlinkExchange, NvlinkRows
from engine.model.peer_memory import PeerMapping, SharedMemory, allocate
from kernels import exchange, reference
from kernels.exchange import ExchangeConfig
from kernels.forms import PairSums
from kernels.mailbox import MailboxLayout
from tests.kernels.test_exchange import draw_rows
from tests.model.mesh_rank import serve
from tests.model.quick_interpreter import hurry
from transport.messages import Member

EXPERTS = 8
WHOLE_ROWS = ExchangeConfig()
"""One program for each row: the interpreter runs them one after another."""


class Rank:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.listener: MeshListener | None = None
        self.mesh: Mesh | None = None
        self.share: SharedMemory | None = None
        self.peers: dict[int, PeerMapping] = {}
        self.exchange: NvlinkExchange | None = None
        self.layout = MailboxLayout(2, 2, 1, 64, 1)
        self.place = -1
        self.living: set[int] = set()

    def listen(self, address: str) -> dict[str, Any]:
        if self.listener is not None:
            self.listener.close()
        self.listener = MeshListener(address)
        return {}

    def open(
        self, number: int, members: list[Any], place: int, limit_s: float, wanted_s: float,
        sizes: dict[str, Any] | None = None, shares: bool = True,
    ) -> dict[str, Any]:  # fmt: skip
        """Joins a membership, with a mailbox of `sizes`, and makes its exchanges ready."""
        assert self.listener is not None
        self.close()
        self.layout = MailboxLayout(**{"ranks": len(members), "dtype": torch.float32, **(sizes or {})})
        if shares and (self.share is None or self.share.layout != repr(self.layout)):
            self.drop()
            self.share = allocate(self.layout.num_bytes, self.device, repr(self.layout))
        if shares and self.share is not None:
            self.exchange = NvlinkExchange(self.layout, place, self.share.memory, limit_s=limit_s)
        membership = Membership(number, tuple(Member(*one, 0) for one in members), (b"",) * len(members), ())
        self.place, end = place, time.monotonic() + wanted_s
        self.mesh = open_mesh(
            self.listener, membership, place, limit_s=limit_s, is_wanted=lambda: time.monotonic() < end,
            share=self.share if shares else None,
        )  # fmt: skip
        old, self.peers = self.peers, dict(self.mesh.peers)
        for peer in old.values():
            peer.close()
        if shares:
            self._enter(number, self.peers)
        return {"places": self.mesh.places, "mapped": sorted(self.peers)}

    def enter(self, number: int, places: list[int]) -> dict[str, Any]:
        """A membership of so many of those that are mapped, dead or alive."""
        self._enter(number, {place: self.peers[place] for place in places})
        return {}

    def step(self, seed: int, counts: list[int], steps: int = 1, pause_s: float = 0.0) -> dict[str, Any]:
        """Steps with rows that all ranks draw alike; counts numbers that are others than what must come.

        Args:
            seed: of the first step.
            counts: rows of each rank.
            steps: at most; fewer if a wait expires.
            pause_s: before each.
        """
        assert self.exchange is not None
        rows = self.exchange.rows(self.layout.capacity, WHOLE_ROWS)
        wrong = done = 0
        while done < steps and self.exchange.find_expiry() is None:
            time.sleep(pause_s)
            for layer in range(self.layout.layers):
                own = draw_rows(self.layout, counts, EXPERTS, seed + done * self.layout.layers + layer, self.device)
                found = self._run_layer(rows, layer, own[self.place])
                expected = self._expect(own)
                here = expected[1][:, 0] >= 0
                differ = [found[1] != expected[1], (found[0] != expected[0]) & here[:, None], found[2] != expected[2]]
                wrong += sum(int(part.sum()) for part in differ)
            done += 1
        expiry = self.exchange.find_expiry()
        # What was computed in a step that has expired is void.
        return {"wrong": wrong if expiry is None else None, "steps": done, "expiry": expiry}

    def put(self, seconds: float) -> dict[str, Any]:
        """Puts rows for so long and awaits none; how often."""
        assert self.exchange is not None
        layout, box, puts = self.layout, self.exchange.mailbox, 0
        own = draw_rows(layout, [layout.capacity], EXPERTS, 0, self.device)[0]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for layer in range(layout.layers):
                exchange.send_rows(box, layer, layout.capacity, *own, WHOLE_ROWS)
            puts += 1
            if self.device.type == "cuda" and puts % 64 == 0:
                torch.cuda.synchronize(self.device)
        return {"puts": puts, "expiry": self.exchange.find_expiry()}

    def count_descriptors(self) -> dict[str, Any]:
        return {"descriptors": len(os.listdir("/proc/self/fd"))}

    def close(self) -> dict[str, Any]:
        """Leaves the mesh; what is mapped stays."""
        if self.mesh is not None:
            self.mesh.close()
            self.mesh = None
        return {}

    def drop(self) -> dict[str, Any]:
        """Everything that is mapped."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for peer in self.peers.values():
            peer.close()
        self.peers = {}
        if self.share is not None:
            self.share.close()
            self.share = self.exchange = None
        return {}

    def _enter(self, number: int, peers: dict[int, PeerMapping]) -> None:
        assert self.share is not None and self.exchange is not None
        addresses = {self.place: self.share.address, **{place: peer.address for place, peer in peers.items()}}
        self.living = set(addresses)
        self.exchange.enter(number, addresses)

    def _run_layer(self, rows: NvlinkRows, layer: int, own: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """What came with a layer's dispatch, which the combine lets be read, and the sums."""
        joined = rows.join(layer, *own)
        seen = joined[0].clone(), joined[1].clone()
        return (*seen, rows.give_back(layer, self._sums(joined, self.place, own[0])))

    def _expect(self, own: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        """The same from the rows of all."""
        xs, ids, weights = zip(*own, strict=True)
        joined = reference.dispatch_rows(xs, ids, weights, self.layout.capacity, narrow=self.layout.narrow)
        at = slice(self.place * self.layout.capacity, self.place * self.layout.capacity + len(xs[self.place]))
        parts = [reference.add_pairs(self._sums(joined, place, None))[at] for place in range(self.layout.ranks)]
        # Nobody has computed the experts of a place that is lost.
        parts = [part if place in self.living else torch.zeros_like(part) for place, part in enumerate(parts)]
        sums = reference.combine_rows(
            parts, self.place, ids[self.place], xs[self.place], self.layout.dtype, self.layout.part_type
        )
        return joined[0], joined[1], sums

    def _sums(self, joined: Sequence[Tensor], place: int, base: Tensor | None) -> PairSums:
        """In place of experts: products that tell by their bits which row, expert and place they are of."""
        x, ids, weights = joined
        table = torch.where(torch.arange(EXPERTS, device=x.device) % self.layout.ranks == place, 0, -1).int()
        factor = torch.where(ids >= 0, weights * (1.0 + ids.float() / 64.0), 0.0)
        rows = torch.where((ids >= 0).any(1, keepdim=True), x.float(), 0.0)
        return PairSums(rows.unsqueeze(1) * factor.unsqueeze(-1), ids, table, base)


if __name__ == "__main__":
    torch.set_num_threads(1)
    its_device = torch.device(sys.argv[1])
    if its_device.type == "cuda":
        torch.cuda.set_device(its_device)
    else:
        hurry()
    serve(Rank(its_device))
