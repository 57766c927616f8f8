"""The text that a simulated model writes: each token is a pure function of all ids before it.

So a request's completion follows from its prompt alone, whoever computes it and in however many attempts, and one id
that is wrong, missing or repeated anywhere in its history changes everything after it.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib

import numpy as np
import numpy.typing as npt

from transport.messages import FinishReason, Sampling

EOS = 1
"""The id that ends a simulated text. Prompts use ids from 2 on."""
_ID = struct.Struct("<i")
_WORD = struct.Struct("<I")

Words = npt.NDArray[np.uint32]


def extend_chain(chain: int, ids: bytes | memoryview) -> int:
    """Checksum over a history and then `ids` (little-endian int32). 0 is the empty history."""
    return zlib.crc32(ids, chain)


def append_chain(chain: int, token: int) -> int:
    return zlib.crc32(_ID.pack(token), chain)


def _table(shift: int) -> Words:
    """What CRC-32 makes of 16 bits of its input, the other 16 being zero: it is linear but for its complements."""
    low, high = (
        np.array([~zlib.crc32(_WORD.pack(byte << at), 2**32 - 1) & 0xFFFFFFFF for byte in range(256)], np.uint32)
        for at in (shift, shift + 8)
    )
    table: Words = np.bitwise_xor.outer(high, low).reshape(-1)
    return table


_LOW, _HIGH = _table(0), _table(16)


def append_chains(chains: Words, tokens: Words) -> Words:
    """`append_chain` for many: uint32[n] each."""
    word = ~chains ^ tokens
    chains = ~(_LOW.take(word & np.uint32(0xFFFF)) ^ _HIGH.take(word >> np.uint32(16)))
    return chains


def seed_mix(sampling: Sampling) -> int:
    """What a request's seed adds to its draws, 32 bits."""
    return sampling.seed * 0x85EBCA6B & 0xFFFFFFFF if sampling.temperature else 0


def draw_many(chains: Words, mixes: Words, vocab_size: int, eos_share: float) -> Words:
    """`draw` for many without `min_tokens`: uint32[n] each."""
    words = (chains ^ mixes) * np.uint32(0x9E3779B1)
    tokens, most = words >> np.uint32(4), np.uint32(vocab_size - 2)
    tokens -= tokens // most * most  # a quarter of what `%` costs
    tokens += np.uint32(2)
    return np.where(words < eos_share * 2**32, np.uint32(EOS), tokens) if eos_share else tokens


def draw(chain: int, sampling: Sampling, vocab_size: int, eos_share: float) -> int:
    """The token after the history `chain`.

    `min_tokens` > 0 forbids all ids that end a text, as in `core.plan.DecodeRow`.
    """
    word = (chain ^ (sampling.seed * 0x85EBCA6B if sampling.temperature else 0)) * 0x9E3779B1 & 0xFFFFFFFF
    token = EOS if word < eos_share * 2**32 else 2 + (word >> 4) % (vocab_size - 2)
    if sampling.min_tokens:
        ends = {*sampling.stop_ids, *(() if sampling.ignore_eos else (EOS,))}
        while token in ends:
            token = 2 + (token + 1) % (vocab_size - 2)
    return token


@dataclasses.dataclass(slots=True)
class ExpectedText:
    """A completion, token by token, by the rules of the API and nothing else.

    Attributes:
        count: tokens so far.
        reason: why it is over; None while it goes on.
    """

    chain: int
    sampling: Sampling
    vocab_size: int
    eos_share: float
    count: int = 0
    reason: FinishReason | None = None

    def next_token(self) -> int:
        """The next token; may be asked while `reason` is None."""
        assert self.reason is None
        sampling = self.sampling
        masked = sampling
        if sampling.min_tokens and self.count >= sampling.min_tokens:  # from here on ends are allowed
            masked = Sampling(temperature=sampling.temperature, seed=sampling.seed)
        token = draw(self.chain, masked, self.vocab_size, self.eos_share)
        self.chain = append_chain(self.chain, token)
        self.count += 1
        is_end = (token == EOS and not sampling.ignore_eos) or token in sampling.stop_ids
        if is_end and self.count > sampling.min_tokens:
            self.reason = "stop"
        elif self.count >= sampling.max_tokens:
            self.reason = "length"
        return token


def expect_text(prompt: bytes, sampling: Sampling, vocab_size: int, eos_share: float) -> tuple[list[int], FinishReason]:
    """The whole completion of a prompt and why it ends."""
    text = ExpectedText(extend_chain(0, prompt), sampling, vocab_size, eos_share)
    tokens: list[int] = []
    while text.reason is None:
        tokens.append(text.next_token())
    return tokens, text.reason
