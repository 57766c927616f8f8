"""Check: every operation of a step at full size beside its plain form, on the same inputs.

Tests compare operations one by one on small inputs; this finds what only real sizes, real weights' bytes and a device
bring to light. The step goes on with the kernels' results, so each operation is judged by itself. Plain forms loop over
rows: a few layers, a few rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from engine.model.ops import Ops, reference_ops, wrap_ops
from kernels.forms import PairSums
from kernels.reference import add_pairs

LIMITS = {
    "linear": 6e-3,
    "paired_linear": 6e-3,
    "grouped_linear": 6e-3,
    "gated_linear": 1e-2,
    "multiply_pairs": 1e-2,
    "attend": 1e-2,
}
"""Relative error of the norm, for bf16: one or two roundings of 2^-9, and sums in another order."""
LIMIT = 5e-3
CHANGED_LIMIT = 0.02
"""Share of stored bytes that differ: a value near the middle of two e4m3 codes may fall on either side."""
CHOICE_LIMIT = 0.02
"""Share of chosen entries or experts that differ: near-ties."""


@dataclasses.dataclass
class Finding:
    """The worst of one operation's calls.

    Attributes:
        calls: how many.
        error: relative norm of the difference of floating results.
        choices: share of integers in the results that differ.
        stored: share of the bytes written into the arena that differ.
    """

    calls: int = 0
    error: float = 0.0
    choices: float = 0.0
    stored: float = 0.0

    def is_fine(self, name: str) -> bool:
        """Within the limits; NaN is not."""
        return self.error <= LIMITS.get(name, LIMIT) and self.choices <= CHOICE_LIMIT and self.stored <= CHANGED_LIMIT


def check_ops(ops: Ops, arena: Tensor, findings: dict[str, Finding]) -> Ops:
    """Operations that compare themselves; filled into `findings` by name."""
    plain = vars(reference_ops())

    def around(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*arguments: Any, **more: Any) -> Any:
            finding = findings.setdefault(name, Finding())
            finding.calls += 1
            before = arena.clone()
            # In the arena itself, then set back: its size is a gigabyte or two for a check.
            wanted = plain[name](*arguments, **more)
            stored = arena.clone()
            arena.copy_(before)
            found = call(*arguments, **more)
            written = (stored != before) | (arena != before)
            if bool(written.any()):
                share = float((arena != stored).sum() / written.sum())
                finding.stored = max(finding.stored, share)
            for mine, other in zip(_tensors(found), _tensors(wanted), strict=True):
                _compare(finding, mine, other)
            return found

        return checked

    return wrap_ops(ops, around)


def _compare(finding: Finding, found: Tensor, wanted: Tensor) -> None:
    if found.dtype.is_floating_point:
        error = float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-30))
        finding.error = error if error != error else max(finding.error, error)
    else:
        finding.choices = max(finding.choices, _share_of_strangers(found, wanted))


def _share_of_strangers(found: Tensor, wanted: Tensor) -> float:
    """Of all that was chosen in a row, how much is not in the other's row."""
    missing = total = 0
    for mine, other in zip(found.view(len(found), -1).tolist(), wanted.view(len(wanted), -1).tolist(), strict=True):
        missing += len(set(mine) ^ set(other))
        total += len(set(mine) | set(other))
    return missing / max(total, 1)


def _tensors(result: Any) -> Sequence[Tensor]:
    if result is None:
        return ()
    if isinstance(result, PairSums):
        return (add_pairs(result),)
    return (result,) if isinstance(result, Tensor) else tuple(result)


def describe_findings(findings: dict[str, Finding]) -> list[str]:
    """A line for each operation, those that are wrong marked."""
    return [
        f"{'ok   ' if finding.is_fine(name) else 'WRONG'} {name:16s} {finding.calls:4d} calls: error"
        f" {finding.error:.1e}, choices {finding.choices:.1e}, stored {finding.stored:.1e}"
        for name, finding in findings.items()
    ]
