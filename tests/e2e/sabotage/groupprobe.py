"""Group probe: what a rank of a group did, seen from within it; `sitecustomize` takes it in where GROUP_PROBE is set.

It changes nothing. Every awaited step of the group is a record of `steps-<rank>-<generation>.bin` (see `STEP`). With
"ask" in GROUP_PROBE, when a file `ask-<n>` appears, `told-<n>-<rank>-<generation>.json` says, of each part, which
expert each slot holds and a digest of its bytes, and how many (row, expert) pairs were computed here in each layer.
"""

from __future__ import annotations

import collections
import ctypes
import hashlib
import json
import os
import struct
import threading
import time

POLL_S = 0.1
STEP = struct.Struct("<7q")
"""membership, step, epochs in force of both parts, park, stop, monotonic ns."""


class Probe:
    """Of one rank process."""

    def __init__(self, place, given):
        self.place, self.rank, self.generation = place, given["rank"], given["generation"]
        self.wanted = os.environ["GROUP_PROBE"].split(",")
        self.pools = []
        self.pairs = collections.Counter()
        """Layer of the main model to the pairs that were computed here."""
        self.steps = os.open(
            f"{place}/steps-{self.rank}-{self.generation}.bin", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
        )

    def note_step(self, group):
        active = (*group.active, 0)[:2]
        os.write(
            self.steps, STEP.pack(group.membership, group.step, *active, group.park, group.stop, time.monotonic_ns())
        )

    def answer(self):
        """For ever, in a thread of its own: questions come while the loop sleeps."""
        told = set()
        while True:
            for name in os.listdir(self.place):
                if name.startswith("ask-") and name not in told:
                    told.add(name)
                    number = name.removeprefix("ask-")
                    path = f"{self.place}/told-{number}-{self.rank}-{self.generation}.json"
                    with open(path + ".new", "w") as file:
                        json.dump({"parts": self.look(), "pairs": dict(self.pairs)}, file)
                    os.replace(path + ".new", path)
            time.sleep(POLL_S)

    def look(self):
        parts = {}
        for pool in self.pools:
            run, held = pool.run, pool.held.tolist()
            digests = {
                slot: hashlib.blake2b(
                    ctypes.string_at(run.address + slot * run.block_bytes, run.block_bytes), digest_size=16
                ).hexdigest()
                for slot, key in enumerate(held)
                if key >= 0
            }
            parts[pool.info.name] = {"held": held, "digests": digests}
        return parts

    def note_pairs(self, pool, keys):
        if pool.info.name == "main":
            for layer in (keys // pool.info.experts).tolist():
                self.pairs[layer] += 1


def patches(place, given):
    """Module name to what is done to it once it is imported."""
    probe = Probe(place, given)

    def patch_experts(module):
        real = module.ExpertSide.on_result

        def on_result(self, group):
            is_over = self.is_stopped  # then it is none of the group's: two are queued when the group stops
            real(self, group)
            if not is_over:
                probe.note_step(group)

        module.ExpertSide.on_result = on_result

    def patch_pools(module):
        begin, check = module.SlotPool.__init__, module.SlotPool.check_pairs

        def begin_probed(self, *given, **named):
            begin(self, *given, **named)
            probe.pools.append(self)
            if len(probe.pools) == 1 and "ask" in probe.wanted:
                threading.Thread(target=probe.answer, name="group-probe", daemon=True).start()

        def check_pairs(self, slots, keys, *who):
            check(self, slots, keys, *who)  # all of them are computed next
            probe.note_pairs(self, keys)

        module.SlotPool.__init__, module.SlotPool.check_pairs = begin_probed, check_pairs

    return {
        "engine.core.experts": patch_experts,
        "engine.model.slots": patch_pools,
    }
