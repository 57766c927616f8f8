"""Held-out text: documents that are in no shard, cut into rows whose bytes are known."""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor


def read_validation(path: Path) -> dict[str, list[str]]:
    """Held-out documents by domain."""
    documents: dict[str, list[str]] = {}
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            documents.setdefault(row["domain"], []).append(row["text"])
    return documents


@dataclass(frozen=True)
class HeldOut:
    """Rows of one held-out domain.

    Attributes:
        tokens: int64[rows, length + 1], right-padded; a document longer than a row goes on in the next one.
        counts: int64[rows], real tokens of each row, of which all but the first are predicted.
        num_bytes: int64[rows], UTF-8 bytes of the predicted tokens.
    """

    tokens: Tensor
    counts: Tensor
    num_bytes: Tensor

    def first(self, rows: int) -> HeldOut:
        """The first `rows` rows, or all."""
        return HeldOut(self.tokens[:rows], self.counts[:rows], self.num_bytes[:rows])


def token_bytes(tokenizer: Tokenizer) -> Tensor:
    """int64[vocab], UTF-8 bytes of text that each id stands for. Start, end and padding stand for none."""
    added = tokenizer.get_added_tokens_decoder()
    sizes = []
    for token in range(tokenizer.get_vocab_size()):
        if token in added:
            sizes.append(0 if added[token].special else len(added[token].content.encode()))
        else:
            # The byte-level alphabet spells every byte as one character.
            sizes.append(len(tokenizer.id_to_token(token) or ""))
    return torch.tensor(sizes)


def held_out_rows(documents: list[str], tokenizer: Tokenizer, length: int, pad: int) -> HeldOut:
    """Cut documents into rows that start at a document's start or where the row before ended."""
    rows, counts = [], []
    for text in documents:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        # Rows share one token: it is the last target of one and the first input of the next.
        for at in range(0, max(1, len(ids) - 1), length):
            piece = ids[at : at + length + 1]
            counts.append(len(piece))
            rows.append(piece + [pad] * (length + 1 - len(piece)))
    tokens, held = torch.tensor(rows), torch.tensor(counts)
    predicted = torch.arange(1, length + 1) < held.unsqueeze(1)
    return HeldOut(tokens, held, (token_bytes(tokenizer)[tokens[:, 1:]] * predicted).sum(1))
