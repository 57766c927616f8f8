"""Violation: a promise of the engine that a run broke, and the checker that saw it."""

from __future__ import annotations


class Violation(AssertionError):
    """`checker` is one of the names in `checks.CHECKERS` or `expertchecks.EXPERT_CHECKERS`."""

    def __init__(self, checker: str, why: str) -> None:
        super().__init__(f"[{checker}] {why}")
        self.checker = checker
