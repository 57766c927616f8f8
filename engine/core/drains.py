"""Drains: which ranks an operator has taken out of routing, why, and when that is refused. It outlives ranks' lives."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from transport.messages import Role

ROLES: tuple[Role, ...] = ("prefill", "decode")


class Drains:
    """See the module.

    Args:
        roles: rank to role.

    Attributes:
        reasons: of each drained rank, as given.
    """

    def __init__(self, roles: Mapping[int, Role]) -> None:
        self._roles = dict(roles)
        self.reasons: dict[int, str] = {}

    def drain(self, ranks: Sequence[int], reason: str, ready: Collection[int]) -> tuple[str, frozenset[int]]:
        """Takes ranks out. A rank that is out already has the new reason from now on.

        Args:
            ready: ranks that could take requests now.

        Returns:
            What was done, in words, and the ranks for which something has changed.

        Raises:
            ValueError: there is no such rank, or a role would be left without a rank that takes requests. Nothing was
                done.
        """
        wanted = self._check_names(ranks)
        changed = wanted - self.reasons.keys()
        for role in ROLES:
            self._check_role(role, changed, ready)
        self.reasons.update(dict.fromkeys(wanted, reason))
        done = f"{_subject(changed, 'take')} no new requests from now on" if changed else ""
        kept = wanted - changed
        return _join(done, f"{name_ranks(kept)} had been drained before" if kept else ""), changed

    def undrain(self, ranks: Sequence[int]) -> tuple[str, frozenset[int]]:
        """Puts ranks back in. Returns and raises as `drain`."""
        wanted = self._check_names(ranks)
        changed = wanted & self.reasons.keys()
        for rank in changed:
            del self.reasons[rank]
        done = f"{_subject(changed, 'take')} new requests again" if changed else ""
        kept = wanted - changed
        return _join(done, f"{name_ranks(kept)} had not been drained" if kept else ""), changed

    def _check_names(self, ranks: Sequence[int]) -> frozenset[int]:
        unknown = frozenset(ranks) - self._roles.keys()
        if unknown:
            there = "there is no" if len(unknown) == 1 else "there are no"
            raise ValueError(f"{there} {name_ranks(unknown)}; this cluster has {name_ranks(self._roles)}")
        return frozenset(ranks)

    def _check_role(self, role: Role, more: frozenset[int], ready: Collection[int]) -> None:
        """Raises ValueError if the role would be left without a rank that takes requests by draining `more`."""
        mine = [rank for rank in more if self._roles[rank] == role]
        drained = [rank for rank in self.reasons if self._roles[rank] == role]
        others = [rank for rank, its in self._roles.items() if its == role and rank not in (*mine, *drained)]
        if not mine or any(rank in ready for rank in others):
            return
        if others and not any(rank in ready for rank in mine):
            return  # nobody of the role takes requests as it is, and others will
        if others:
            way = f"wait until {_subject(others, 'be')} ready"
        elif drained:
            way = f"undrain {name_ranks(drained)} first"
        elif len(mine) > 1:
            way = "leave one of them out"
        else:
            way = f"give the pool more ranks (pools.{role}.ranks)"
        which = f"the last {role} rank that takes" if len(mine) == 1 else f"the last {role} ranks that take"
        raise ValueError(f"{_subject(mine, 'be')} {which} requests; {way}, or end the engine with engine down")

    def sentences(self) -> tuple[str, ...]:
        """One for each reason: `ranks 5, 7-9 take no new requests: drained by alice (fans)`."""
        reason_to_ranks: dict[str, list[int]] = {}
        for rank, reason in sorted(self.reasons.items()):
            reason_to_ranks.setdefault(reason, []).append(rank)
        return tuple(
            f"{_subject(ranks, 'take')} no new requests: {reason or 'drained by an operator'}"
            for reason, ranks in reason_to_ranks.items()
        )


def name_ranks(ranks: Collection[int]) -> str:
    """`rank 5`, `ranks 5, 7-9`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def _subject(ranks: Collection[int], verb: str) -> str:
    """Ranks with a verb that fits their number: `rank 5 takes`, `ranks 5-6 are`."""
    one, many = ("is", "are") if verb == "be" else (f"{verb}s", verb)
    return f"{name_ranks(ranks)} {one if len(ranks) == 1 else many}"


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
