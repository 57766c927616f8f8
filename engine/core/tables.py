"""Transition tables: what each of them is, how one is followed, and how one is drawn.

A table says for (phase, event) where that leads and what is to be done. A pair that it does not have can not happen
by the protocol: where a message of another process caused the event it is a RemoteProtocolError, else a
LocalProtocolError.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import Generic, NamedTuple, TypeVar

from engine.errors import LocalProtocolError, RemoteProtocolError

P = TypeVar("P", bound="Term")
E = TypeVar("E", bound="Term")
A = TypeVar("A", bound=enum.Enum)


class Term(enum.Enum):
    """A phase or an event. Each is one object, so its hash need not be that of its name, which Python code makes."""

    __hash__ = object.__hash__


class Transition(NamedTuple, Generic[P, A]):
    """Where an event leads, and what a side does about it, in order."""

    phase: P
    actions: tuple[A, ...]


class Table(dict[tuple[P, E], Transition[P, A]]):
    """`remote`: the events that a message of another process causes directly."""

    def __init__(self, remote: Collection[E], rows: Mapping[tuple[P, E], Transition[P, A]]) -> None:
        super().__init__(rows)
        self.remote = frozenset(remote)

    def follow(self, phase: P, event: E, *what: object) -> Transition[P, A]:
        """The transition for `event` in `phase`; the words of `what` name the request or the epoch in the error.

        Raises:
            RemoteProtocolError: the table has no such pair and a message caused the event.
            LocalProtocolError: the table has no such pair and this side caused the event.
        """
        transition = self.get((phase, event))
        if transition is None:
            kind = RemoteProtocolError if event in self.remote else LocalProtocolError
            raise kind(f"{' '.join(map(str, what))}: {event.value} in state {phase.value}")
        return transition

    def draw(self, title: str) -> list[str]:
        """The lines of a Mermaid state diagram under a heading. `new` and `closed` are the diagram's [*]."""
        lines = [f"### {title}", "", "```mermaid", "stateDiagram-v2"]
        for (source, event), (target, actions) in self.items():
            label = event.value + (" / " + ", ".join(action.value for action in actions) if actions else "")
            left = "[*]" if source.value == "new" else source.value
            right = "[*]" if target.value == "closed" else target.value
            lines.append(f"    {left} --> {right}: {label}")
        return [*lines, "```", ""]


def go(phase: P, *actions: A) -> Transition[P, A]:
    """A row's right side."""
    return Transition(phase, actions)
