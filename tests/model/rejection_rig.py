"""A decoder with rejection whose target and drafter have given logits, over a memory of two cells a slab."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.choosing import Chooser
from engine.model.decoding import Decoder
from engine.model.drafting import Pick, Proposal
from engine.model.grammars import Guides
from engine.model.penalties import add_tokens
from engine.model.rows import RowBatch
from engine.ports import DeviceInfo
from tests.model.test_exact_sampling import EOS, VOCAB

Ints = npt.NDArray[np.int64]


class Memory:
    """The two cells of each slab that the end of a pass touches."""

    def __init__(self, slabs: int) -> None:
        self.counts = torch.zeros((slabs, VOCAB), dtype=torch.int16)
        self.sampled = np.zeros(slabs, np.int64)

    def read_sampled(self, slabs: Ints) -> Ints:
        return self.sampled[slabs]

    def write_sampled(self, slabs: Ints, tokens: Ints) -> None:
        self.sampled[slabs] = tokens

    def read_counts(self, slabs: Ints) -> Tensor:
        return self.counts[slabs]

    def add_counts(self, slabs: Ints, tokens: Ints) -> None:
        add_tokens(self.counts, slabs, tokens)


@dataclasses.dataclass
class Lines:
    """A target whose logits are given by slab and place: float32[slabs or 1, places, vocab], the last for all beyond.

    Attributes:
        first: position of the first place.
    """

    arena: Memory
    logits: Tensor
    first: int
    mixture: None = None

    def forward(self, batch: RowBatch) -> Tensor:
        slabs = batch.slabs[batch.owner] % len(self.logits)
        return self.logits[slabs, (batch.positions - self.first).clip(0, self.logits.shape[1] - 1)]


@dataclasses.dataclass
class Script:
    """A drafter whose logits are given like those of the target."""

    logits: Tensor
    max_drafts: int = 5

    def keep(self, counts: Ints | None, nexts: Ints, *, reopens: bool = False) -> None: ...

    def propose(
        self, slabs: Ints, anchors: Ints, positions: Ints, count: int, *, pick: Pick | None = None, rounds: int = 0
    ) -> Proposal:
        assert pick is not None
        lines = [pick(self.logits[slabs % len(self.logits), at], positions + 1 + at) for at in range(count)]
        return Proposal(np.stack(lines, 1))


def open_decoder(memory: Memory, target: Lines, drafter: Script) -> Decoder:
    info = make_info(len(memory.sampled))
    chooser = Chooser(memory, info)  # type: ignore[arg-type]
    return Decoder(target, info, chooser, drafter, rejects=True, guides=Guides(None))  # type: ignore[arg-type]


def make_info(slabs: int) -> DeviceInfo:
    return DeviceInfo(
        name="test", layout_digest="", page_tokens=1 << 20, page_bytes=1, num_pages=1, slab_bytes=1, num_slabs=slabs,
        vocab_size=VOCAB, max_model_tokens=1 << 30, eos_ids=EOS, max_drafts=5,
    )  # fmt: skip
