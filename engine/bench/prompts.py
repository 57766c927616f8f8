"""Prompts of random ids, the same on every machine."""

from __future__ import annotations

import random

FIRST_ID = 16
"""Lower ids are the vocabulary's special tokens; prompts of this bench have none."""


def make_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random ids, the same for the same arguments."""
    chance = random.Random(seed)
    return [[chance.randrange(min(FIRST_ID, vocab_size - 1), vocab_size) for _ in range(length)] for _ in range(count)]
