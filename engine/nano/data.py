"""The training text: from the corpus folder to tokens, and from tokens to batches.

Owns the domains and how often each is drawn. `prepare` writes one flat uint16 file per domain with the document
starts; `Sampler` draws rows as a pure function of (seed, step). Rows of chats begin at the start of a conversation;
rows of long works follow each other. A row never mixes domains.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

BOS = "<｜begin▁of▁sentence｜>"


@dataclass(frozen=True)
class Domain:
    """One shard of the corpus.

    Attributes:
        name: the shard's file name without `.txt.xz`.
        share: relative weight of its rows in a batch.
        is_chat: documents are conversations; they are shuffled once.
    """

    name: str
    share: float
    is_chat: bool


# Shares: conversations and tool transcripts 56 %, real text 44 %. `chat_short` and `verse` are drawn at about half of
# what their size asks for; small prose shards are seen more often than their size says.
DOMAINS = (
    Domain("bible_web", 1.2, False),
    Domain("bible_kjv", 0.8, False),
    Domain("austen", 1.3, False),
    Domain("shakespeare_milton", 1.8, False),
    Domain("verse", 3.2, False),
    Domain("chitchat", 2.0, True),
    Domain("python_docs", 2.4, False),
    Domain("python_source", 2.4, False),
    Domain("postgres_docs", 1.4, False),
    Domain("sqlite_docs", 1.3, False),
    Domain("nodejs_docs", 0.7, False),
    Domain("apache_docs", 0.6, False),
    Domain("jargon", 0.5, False),
    Domain("chat_main", 12.5, True),
    Domain("chat_short", 8.5, True),
    Domain("chat_code", 1.4, True),
    Domain("templated", 2.6, True),
)


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def read_documents(path: Path) -> list[str]:
    """Documents of one shard, each with its start token."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        text = file.read()
    return [BOS + document.rstrip("\n") for document in text.split(BOS)[1:]]


_tokenizer: Tokenizer | None = None


def _start_worker(path: str) -> None:
    global _tokenizer  # One tokenizer per worker process: it is costly to send with every task.
    _tokenizer = Tokenizer.from_file(path)


def _encode(documents: list[str]) -> tuple[bytes, list[int]]:
    assert _tokenizer is not None
    encoded = [np.array(_tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint16) for text in documents]
    return np.concatenate(encoded).tobytes(), [len(ids) for ids in encoded]


def prepare(corpus: Path, work: Path, tokenizer: Path, *, workers: int, seed: int = 1) -> None:
    """Tokenise every shard of `corpus` that `work` does not hold yet.

    Args:
        corpus: folder with `<domain>.txt.xz` and `validation.jsonl.xz`; shards may arrive in several calls.
        work: receives `<domain>.bin`, `<domain>.json` (document lengths, digest) and the validation file.
        tokenizer: tokenizer.json.
        workers: processes.
        seed: of the order of conversations.
    """
    work.mkdir(parents=True, exist_ok=True)
    held_out = corpus / "validation.jsonl.xz"
    if held_out.exists():
        (work / held_out.name).write_bytes(held_out.read_bytes())
    todo = [d for d in DOMAINS if (corpus / f"{d.name}.txt.xz").exists() and not (work / f"{d.name}.json").exists()]
    if not todo:
        return
    begin = time.monotonic()
    context = multiprocessing.get_context("fork")
    with context.Pool(workers, initializer=_start_worker, initargs=(str(tokenizer),)) as pool:
        for domain in sorted(todo, key=lambda d: -(corpus / f"{d.name}.txt.xz").stat().st_size):
            source = corpus / f"{domain.name}.txt.xz"
            documents = read_documents(source)
            if domain.is_chat:
                order = np.random.default_rng(seed).permutation(len(documents))
                documents = [documents[i] for i in order]
            size = max(1, min(512, len(documents) // (4 * workers) + 1))
            parts = [documents[i : i + size] for i in range(0, len(documents), size)]
            lengths: list[int] = []
            with (work / f"{domain.name}.part").open("wb") as file:
                for data, counts in pool.imap(_encode, parts):
                    file.write(data)
                    lengths.extend(counts)
            (work / f"{domain.name}.part").rename(work / f"{domain.name}.bin")
            # Written last: its presence says that the shard is complete.
            entry = {"lengths": lengths, "sha256": sha256(source)}
            (work / f"{domain.name}.json").write_text(json.dumps(entry))
            print(
                f"prepared {domain.name}: {len(documents)} documents, {sum(lengths):,} tokens, "
                f"{time.monotonic() - begin:.0f} s",
                flush=True,
            )


def row_starts(lengths: np.ndarray, row: int, is_chat: bool) -> np.ndarray:
    """First tokens of the rows that cover a domain.

    Args:
        lengths: int64[documents], tokens per document; documents lie one after the other.
        row: tokens per row.
        is_chat: begin every row at the start of a document (the one that the row before cut off, if it is short).

    Returns:
        int64[rows], ascending; the last rows still fit.
    """
    ends = np.cumsum(lengths)
    begins = ends - lengths
    total = int(ends[-1])
    starts = []
    at = 0
    while at + row <= total:
        starts.append(at)
        after = at + row
        if is_chat:
            cut = int(np.searchsorted(ends, after, side="right"))
            begin = int(begins[cut]) if cut < len(begins) else total
            # A document longer than the row is not started over: its rest is lost to this row length.
            after = begin if begin > at else int(ends[cut])
        at = after
    return np.array(starts or [0], dtype=np.int64)


class Corpus:
    """All prepared domains as one flat tensor on the training device.

    Args:
        work: folder written by `prepare`.
        device: where batches are made; the tokens of the whole corpus take two bytes each there.
    """

    def __init__(self, work: Path, device: torch.device) -> None:
        self.domains = [d for d in DOMAINS if (work / f"{d.name}.json").exists()]
        if not self.domains:
            raise FileNotFoundError(f"{work} holds no prepared domain")
        self.device = device
        self.lengths: list[np.ndarray] = []
        self.digests: dict[str, str] = {}
        self.bases: list[int] = []
        pieces = []
        base = 0
        for domain in self.domains:
            entry = json.loads((work / f"{domain.name}.json").read_text())
            tokens = np.fromfile(work / f"{domain.name}.bin", dtype=np.uint16)
            self.lengths.append(np.array(entry["lengths"], dtype=np.int64))
            self.digests[domain.name] = entry["sha256"]
            self.bases.append(base)
            base += len(tokens)
            pieces.append(tokens.astype(np.int16))
        self.flat = torch.from_numpy(np.concatenate(pieces)).to(device)

    @property
    def num_tokens(self) -> int:
        """Tokens of all domains together."""
        return self.flat.numel()


class Sampler:
    """Rows of one length, drawn with the domains' shares.

    Args:
        corpus: the tokens.
        length: input tokens per row; a row holds one more, the last target.
        seed: of the draws.
    """

    def __init__(self, corpus: Corpus, length: int, seed: int) -> None:
        self.corpus, self.length, self.seed = corpus, length, seed
        self.starts = [
            base + row_starts(lengths, length + 1, domain.is_chat)
            for base, lengths, domain in zip(corpus.bases, corpus.lengths, corpus.domains, strict=True)
        ]
        # A small domain can be shorter than one row.
        fits = np.array([float(lengths.sum() > length + 1) for lengths in corpus.lengths])
        shares = np.array([domain.share for domain in corpus.domains]) * fits
        self.shares = shares / shares.sum()

    def batch(self, step: int, rows: int) -> Tensor:
        """int64[rows, length + 1] on the corpus device; equal arguments give equal rows."""
        rng = np.random.default_rng([self.seed, self.length, step])
        picks = rng.choice(len(self.shares), size=rows, p=self.shares)
        places = rng.random(rows)
        starts = np.array([self.starts[d][int(u * len(self.starts[d]))] for d, u in zip(picks, places, strict=True)])
        at = torch.from_numpy(starts).to(self.corpus.device).unsqueeze(1)
        return self.corpus.flat[at + torch.arange(self.length + 1, device=self.corpus.device)].long()
