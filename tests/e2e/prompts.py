"""Prompts of the acceptance tests: random ids and text, at lengths around every boundary of the bundled model.

Seeds are fresh on every run and printed, so pytest shows them with a failure; ENGINE_SEED repeats a run.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Sequence
from pathlib import Path

from engine.config import NANO, model_directory

FIRST_ID, LAST_ID = 66, 8191
"""Ids that are text: below are special ones."""
WINDOW = 64
RING = 72


def fresh_seed() -> int:
    """A seed nobody has seen, or the one asked for."""
    seed = int(os.environ.get("ENGINE_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"ENGINE_SEED={seed}")
    return seed


def random_ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(length)]


@functools.cache
def text_ids() -> tuple[int, ...]:
    """A few thousand ids of English that the repository holds anyway."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_directory(NANO) / "tokenizer.json"))
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def cut(rng: random.Random, text: Sequence[int], length: int) -> list[int]:
    """A stretch of a text, from anywhere."""
    first = rng.randrange(len(text) - length + 1)
    return list(text[first : first + length])


def boundary_lengths(page_tokens: int, *, pages: int = 5) -> list[int]:
    """1, 2, 3 and the lengths around the window, its ring and the ends of pages."""
    edges = [WINDOW, RING, *(page_tokens * count for count in range(1, pages + 1))]
    return sorted({1, 2, 3} | {edge + step for edge in edges for step in (-1, 0, 1)})


def page_sizes(rng: random.Random, page_tokens: int) -> list[int]:
    """Chunk sizes in whole pages, of one to four, different ones in a row."""
    return [page_tokens * rng.randint(1, 4) for _ in range(8)]
