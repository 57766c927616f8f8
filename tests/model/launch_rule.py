"""Launch rule: what a kernel of a step may read before it has waited for those in front of it, and who breaks it.

**The rule.** A kernel that is launched early (programmatic dependent launch) starts as soon as all programs of the one
in front of it have let it in, or ended. That one may have done so before it had itself waited; then the kernels in
front of it may still run, and so on. So before its wait a kernel may only read what is there when *some* kernel between
the writer and it starts or lets others in: one that is not launched early, for it starts after the end of all before
it, or one that waits before it lets the next one in. The kernel directly in front of a reader is never such a one for
what it writes itself, even if it lets nobody in: that all of its programs have ended does not say that others see what
they wrote. Behind a wait all that came before is there, if each kernel waits for the one in front of it, or else is not
launched early. So each of them has to, on some way at least, and none may write before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

Buffer = int
"""Memory that kernels share, by any number."""
MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel in a step.

    Attributes:
        name: of the kernel.
        front: launches directly in front of it, by their numbers; several where a branch joins.
        is_early: launched early.
        waits: it waits for their end.
        lets_in_ahead: it lets the next one in before it has waited.
        reads_ahead: buffers that it reads before it has waited.
        writes_ahead: the same, written.
        writes: all that it writes.
        names: of buffers, for people.
        whole: programs that need a multiprocessor each, or 0.
    """

    name: str
    front: tuple[int, ...]
    is_early: bool
    waits: bool = True
    lets_in_ahead: bool = False
    reads_ahead: frozenset[Buffer] = frozenset()
    writes_ahead: frozenset[Buffer] = frozenset()
    writes: frozenset[Buffer] = frozenset()
    names: dict[Buffer, str] = dataclasses.field(default_factory=dict)
    whole: int = 0


def find_breaks(launches: Sequence[Launch]) -> list[str]:
    """Who breaks the rule, in a step's launches in order; nothing if nobody does."""
    breaks = []
    # As sets of bits: launches whose end comes before this one's end, and those whose end comes before its start.
    before: list[int] = []
    at_start: list[int] = []
    for number, launch in enumerate(launches):
        behind = _join(before[front] | 1 << front for front in launch.front)
        seen = behind
        if launch.is_early:
            seen = _join(_at_letting_in(launches, front, before, at_start) for front in launch.front)
            if not launch.waits:
                breaks.append(f"{number} {launch.name} is launched early, and never waits")
            for buffer in sorted(launch.writes_ahead):
                breaks.append(f"{number} {launch.name} writes {launch.names.get(buffer, buffer)} before it waits")
            for writer, other in enumerate(launches[:number]):
                if not seen >> writer & 1:
                    for buffer in sorted(launch.reads_ahead & other.writes):
                        breaks.append(
                            f"{number} {launch.name} reads {launch.names.get(buffer, buffer)} before it waits, and"
                            f" {writer} {other.name}, {number - writer} in front, may not have ended"
                        )
        before.append(behind)
        at_start.append(seen)
    return breaks


def _at_letting_in(launches: Sequence[Launch], number: int, before: Sequence[int], at_start: Sequence[int]) -> int:
    """Whose end is certain when a launch lets the next one in."""
    launch = launches[number]
    if not launch.is_early or not launch.lets_in_ahead:
        return before[number]
    crowded = (each for each in launch.front if launch.whole and launches[each].whole + launch.whole > MULTIPROCESSORS)
    return at_start[number] | _join(before[each] for each in crowded if launches[each].whole and launches[each].waits)


def _join(sets: Iterable[int]) -> int:
    found = 0
    for each in sets:
        found |= each
    return found
