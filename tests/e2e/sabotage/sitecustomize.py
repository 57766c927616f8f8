"""Sabotage: kills or stops a rank in a chosen state of a hand-off, from within; put on PYTHONPATH by `faults.py`.

Python imports a module of this name at its start. Without `HANDOFF_FAULTS` in the environment it does nothing. With it,
a process that is a rank follows the transitions of its own hand-offs (the methods of the production tables, wrapped as
soon as they are imported) and looks at `armed.json` in that directory for what to do. The state is entered and none of
its actions is carried out yet when the signal is sent: the most awkward moment that it has.

Everything that happened is a line of `marks.jsonl`; its clock is the monotonic one, the same in all processes.
"""

from __future__ import annotations

import collections
import importlib.abc
import json
import os
import signal
import sys
import threading
import time

PLACE = os.environ.get("HANDOFF_FAULTS", "")


def read_given():
    """What the head gave this rank, without moving the offset at which the rank itself will read it."""
    words = sys.orig_argv
    if "rank" not in words or "--given" not in words:
        return None
    descriptor = int(words[words.index("--given") + 1])
    return json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))


class Saboteur:
    """Of one rank process."""

    def __init__(self, given):
        self.rank, self.generation = given["rank"], given["generation"]
        self.side = given["config"]["role"]
        self.peers = {}
        """Request to the rank at the other end of its hand-off."""
        self.writes = collections.deque()
        """Requests of the pushes that were decided and not begun; they begin in the order of the decisions."""
        self.stamp, self.faults, self.counts = 0, [], collections.Counter()

    def armed(self):
        try:
            stamp = os.stat(f"{PLACE}/armed.json").st_mtime_ns
        except FileNotFoundError:
            return []
        if stamp != self.stamp:
            with open(f"{PLACE}/armed.json") as file:
                self.faults = json.load(file)
            self.stamp = stamp
        return [fault for fault in self.faults if fault["rank"] == self.rank]

    def mark(self, what, **fields):
        line = {"what": what, "rank": self.rank, "generation": self.generation, **fields, "at_ns": time.monotonic_ns()}
        descriptor = os.open(f"{PLACE}/marks.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, json.dumps(line).encode() + b"\n")
        os.close(descriptor)

    def strike(self, fault, request):
        """Once for each fault, by its rank's first life that comes so far. False if it was done, or has no victim."""
        peer = self.peers.get(request, -1)
        pid = os.getpid() if fault["victim"] == "self" else fault["pids"].get(str(peer))
        if pid is None:
            return False
        try:
            os.close(os.open(f"{PLACE}/struck-{fault['id']}", os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        self.mark("struck", id=fault["id"], request=request, peer=peer, pid=pid)
        signum = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault["action"]]
        if pid == os.getpid():
            # To this very thread, which then does not take one more step; `kill` may let it go on for a moment.
            signal.pthread_kill(threading.get_ident(), signum)
        else:
            os.kill(pid, signum)
        return True

    def passed(self, phase, event, request):
        """A hand-off of this rank went into `phase` by `event`."""
        for fault in self.armed():
            if fault["phase"] == phase and fault["event"] in ("", event):
                self.counts[fault["id"]] += 1
                if self.counts[fault["id"]] >= fault["nth"]:
                    self.strike(fault, request)

    def begins_write(self):
        """A write is about to be posted: all checks are behind it. True if this process was stopped meanwhile."""
        if self.side != "prefill":
            return False  # a finished turn on its way back: no hand-off
        request = self.writes.popleft()
        struck = False
        for fault in self.armed():
            if fault["phase"] == "post":
                self.counts[fault["id"]] += 1
                struck |= self.counts[fault["id"]] >= fault["nth"] and self.strike(fault, request)
        return struck


def patch_tables(module):
    real = type(module.PREFILL).follow

    def follow(table, phase, event, *what):
        transition = real(table, phase, event, *what)
        if table is not module.PREFILL and table is not module.DECODE:
            return transition
        request = int(" ".join(map(str, what)).partition("(")[2].partition(",")[0])
        if any(action.name == "PUSH" for action in transition.actions):
            SABOTEUR.writes.append(request)
        SABOTEUR.passed(transition.phase.value, event.name, request)
        return transition

    type(module.PREFILL).follow = follow
    if os.environ.get("HANDOFF_PLANT") == "free_at_abort":
        # The bug that quarantine is there against: memory is used again although its writer did not say that it ended.
        phase, event = module.DecodePhase, module.DecodeEvent
        row = module.DECODE[(phase.GRANTED, event.ABORT)]
        actions = (module.Action.ACK, module.Action.FREE)
        dict.__setitem__(module.DECODE, (phase.GRANTED, event.ABORT), type(row)(phase.CLOSED, actions))


def patch_side(name):
    def patch(module):
        side = getattr(module, name)
        real = side.on_head

        def on_head(self, message, blob, now_us):
            peer = getattr(message, "decode_rank", getattr(message, "prefill_rank", None))
            if peer is not None:
                SABOTEUR.peers[message.request] = peer
            real(self, message, blob, now_us)

        side.on_head = on_head

    return patch


def patch_writes(module):
    transfer = module.NixlTransfer
    real_start, real_poll = transfer.start, transfer.poll
    late = set()

    def tell(work):
        if work in late and (work.report is not None or work.failure is not None):
            late.discard(work)
            SABOTEUR.mark("landed" if work.report is not None else "failed", why=work.failure, bytes=work.num_bytes)

    def start(self, agent):
        if SABOTEUR.begins_write():
            late.add(self)
            SABOTEUR.mark("continued")
        over = real_start(self, agent)
        tell(self)
        return over

    def poll(self, agent):
        over = real_poll(self, agent)
        tell(self)
        return over

    transfer.start, transfer.poll = start, poll


PATCHES = {
    "engine.core.handoff": patch_tables,
    "engine.core.prefill": patch_side("PrefillSide"),
    "engine.core.decode": patch_side("DecodeSide"),
    "transport.nixl_fabric": patch_writes,
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Patches a module as soon as it has run, so that whoever imports from it gets the patched names."""

    def find_spec(self, name, path, target=None):
        patch = PATCHES.pop(name, None)
        if patch is None:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None:
                break
        else:
            return None
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


if PLACE and (_given := read_given()) is not None:
    SABOTEUR = Saboteur(_given)
    if os.environ.get("GROUP_PROBE"):
        import groupprobe

        del PATCHES["transport.nixl_fabric"]  # it takes every write for one of a hand-off; copies of experts are none
        PATCHES.update(groupprobe.patches(PLACE, _given))
    sys.meta_path.insert(0, AfterImport())
