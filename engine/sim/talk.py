"""Talk: requests that begin as earlier ones did, as those of conversations do. By a generator of its own, so that all
else of a seed stays what it was."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from engine.sim.text import expect_text

if TYPE_CHECKING:
    from engine.sim.workload import Ask, Load
    from engine.sim.world import WorldShape

REMEMBERED = 12
"""Requests that a later one may begin as."""
SYSTEMS = 3
"""Texts that many requests begin with."""


def draw_talk(shape: WorldShape, load: Load, seed: int) -> tuple[WorldShape, Load]:
    """Half of the seeds have conversations, and slabs that can keep some of their states; most of those hand turns
    back, by a generator of its own."""
    rng = random.Random(f"{seed}:talks")
    share = rng.choice((0.3, 0.7, 1.0))
    if rng.random() >= 0.5:
        return shape, load
    num_slabs = max(shape.num_slabs, rng.choice((2, 3, 4, 8, 16)))
    hands_back = random.Random(f"{seed}:turns").random() < 0.8
    shape = dataclasses.replace(shape, num_slabs=num_slabs, hand_back=hands_back)
    return shape, dataclasses.replace(load, talk_share=share)


def talk(asks: Iterator[Ask], load: Load, rng: random.Random, shape: WorldShape) -> Iterator[Ask]:
    """The same requests; `load.talk_share` of them with another prompt, no longer than the longest."""
    longest = 4 * load.prompt[1]
    systems = [_draw_ids(rng, rng.randint(1, load.prompt[1]), shape.vocab_size) for _ in range(SYSTEMS)]
    earlier: collections.deque[Ask] = collections.deque(maxlen=REMEMBERED)
    for ask in asks:
        if rng.random() < load.talk_share:
            begin = _draw_begin(rng, earlier, systems, shape)
            kept = max(4, longest - len(begin))
            ask = dataclasses.replace(ask, prompt=(begin + ask.prompt[:kept])[:longest])
        if earlier and rng.random() < 0.1 * load.talk_share:
            ask = dataclasses.replace(ask, prompt=rng.choice(earlier).prompt)
        earlier.append(ask)
        yield ask


def _draw_begin(rng: random.Random, earlier: collections.deque[Ask], systems: list[bytes], shape: WorldShape) -> bytes:
    kind = rng.random()
    if not earlier or kind < 0.3:
        return rng.choice(systems)
    before = rng.choice(earlier)
    if kind < 0.5:  # leaves it somewhere
        return before.prompt[: 4 * rng.randint(0, len(before.prompt) // 4)]
    tokens, _ = expect_text(before.prompt, before.sampling, shape.vocab_size, shape.eos_share)
    if kind < 0.6:  # a part of the answer only
        tokens = tokens[: rng.randint(0, len(tokens))]
    return before.prompt + np.array(tokens, "<i4").tobytes()


def _draw_ids(rng: random.Random, count: int, vocab_size: int) -> bytes:
    words = np.frombuffer(rng.randbytes(4 * count), "<u4")
    return (2 + words % (vocab_size - 2)).astype("<i4").tobytes()
