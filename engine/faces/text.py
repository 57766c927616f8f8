"""TextCodec: text to token ids and back, for byte-level BPE tokenizers with DeepSeek-V4's named tokens.

Owns the tokenizer and the incremental detokeniser. The chat format is `faces.chat`, stop strings are `faces.stops`.

Two invariants. Text that a user wrote never becomes a named token: it is encoded by a second tokenizer that does not
know them, so `<think>` in a question is six ordinary characters. And text comes out only when it is settled: a token
may end inside a UTF-8 character, whose bytes then wait for the next token.
"""

from __future__ import annotations

import array
import codecs
import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
NAMED_TOKENS = (BOS, EOS, USER, ASSISTANT, THINK, END_THINK)
"""Tokens that the chat format can not do without."""


class TextCodec:
    """Encodes and decodes. Immutable, so that one may serve several threads.

    Attributes:
        vocab_size: ids are in [0, vocab_size).
        bos_id, eos_id: begin and end of a text.
        longest_token_bytes: no token stands for more UTF-8 bytes than this, so text of n bytes has at least
            n / longest_token_bytes tokens: a cheap proof that a prompt is too long.
    """

    def __init__(self, document: str, *, source: str) -> None:
        """Builds the codec from the text of a `tokenizer.json`; `source` names it in errors.

        Raises:
            ConfigError: not a tokenizer, not byte-level BPE, or without the named tokens.
        """
        from tokenizers import Tokenizer

        try:
            tree = json.loads(document)
            if tree["model"]["type"] != "BPE" or tree["decoder"]["type"] != "ByteLevel":
                raise ConfigError(f"{source}: not byte-level BPE; no other kind of tokenizer is supported")
            added = {entry["content"]: entry for entry in tree["added_tokens"]}
            self._plain: Tokenizer = Tokenizer.from_str(json.dumps({**tree, "added_tokens": []}))
            vocabulary: dict[str, int] = Tokenizer.from_str(document).get_vocab(with_added_tokens=True)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{source}: not a tokenizer.json ({error})") from error
        missing = [name for name in NAMED_TOKENS if name not in added]
        if missing:
            raise ConfigError(f"{source}: the tokenizer lacks the named tokens {', '.join(missing)}")
        self._name_to_id: dict[str, int] = {name: vocabulary[name] for name in added}
        self._special_ids = frozenset(vocabulary[name] for name, entry in added.items() if entry.get("special"))
        self._id_to_bytes = _token_bytes(vocabulary, added, source)
        self.vocab_size = len(self._id_to_bytes)
        self.longest_token_bytes = max(map(len, self._id_to_bytes))
        self.bos_id = self._name_to_id[BOS]
        self.eos_id = self._name_to_id[EOS]

    @classmethod
    def load(cls, path: Path) -> TextCodec:
        """Reads `path`, a `tokenizer.json` or a model directory that holds one. Blocks on the file system.

        Raises:
            ConfigError: it can not be read, or see the constructor.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            document = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: can not read the tokenizer ({error})") from error
        return cls(document, source=str(file))

    def named_id(self, name: str) -> int | None:
        """The id of a named token such as `<think>`, or None if this tokenizer has no such token."""
        return self._name_to_id.get(name)

    def is_special(self, token: int) -> bool:
        """Whether output normally leaves the token out (begin and end of text, padding, image marks)."""
        return token in self._special_ids

    def encode(self, text: str) -> list[int]:
        """Ids of `text` alone: no begin of text, and no named token whatever it spells."""
        if not text:
            return []
        ids: list[int] = self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_document(self, text: str, *, bos: bool = True) -> bytes:
        """A plain prompt as the model saw documents in training: begin of text, then the text. int32[num_ids]."""
        ids = self.encode(text)
        return pack_ids([self.bos_id, *ids] if bos else ids)

    def encode_segments(self, segments: Iterable[str | int]) -> bytes:
        """Joins user text (str, encoded plainly) and named tokens (int, taken as they are). int32[num_ids]."""
        ids: list[int] = []
        for segment in segments:
            if isinstance(segment, int):
                ids.append(segment)
            else:
                ids.extend(self.encode(segment))
        return pack_ids(ids)

    def fits(self, text: str, max_tokens: int) -> bool:
        """False if `text` has more than `max_tokens` tokens for certain, without encoding it."""
        return len(text) <= max_tokens * self.longest_token_bytes

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for. Ids outside the vocabulary (padding rows of the head) stand for nothing."""
        return self._id_to_bytes[token] if 0 <= token < self.vocab_size else b""

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        """A fresh incremental detokeniser."""
        return Detokenizer(self, skip_special=skip_special)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of all ids at once."""
        detokenizer = self.detokenizer(skip_special=skip_special)
        return detokenizer.push(ids) + detokenizer.finish()


class Detokenizer:
    """Ids in, settled text out. Bytes that can not be UTF-8 become U+FFFD, as the tokenizer's own decoder does."""

    __slots__ = ("_codec", "_skip_special", "_utf8")

    def __init__(self, codec: TextCodec, *, skip_special: bool) -> None:
        self._codec = codec
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids; returns the text that no later id can change."""
        codec = self._codec
        if self._skip_special:
            raw = b"".join(codec.bytes_of(token) for token in ids if not codec.is_special(token))
        else:
            raw = b"".join(map(codec.bytes_of, ids))
        return self._utf8.decode(raw)

    def finish(self) -> str:
        """No id follows: what is left of a character that never became whole."""
        return self._utf8.decode(b"", final=True)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Ids as the wire carries them: int32[num_ids], little-endian."""
    packed = array.array("i", ids)
    if packed.itemsize != 4:
        raise AssertionError("array('i') is not 32 bits wide here")
    return packed.tobytes()


@functools.cache
def _character_to_byte() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, other bytes for characters from U+0100 on.

    Source: the byte-level pre-tokenizer of GPT-2, which `tokenizers` calls ByteLevel.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _token_bytes(vocabulary: dict[str, int], added: dict[str, object], source: str) -> list[bytes]:
    """`bytes[vocab_size]`: what each id stands for. Ids that the vocabulary skips stand for nothing."""
    alphabet = _character_to_byte()
    id_to_bytes = [b""] * (max(vocabulary.values()) + 1)
    for token, number in vocabulary.items():
        if token in added:
            id_to_bytes[number] = token.encode()
            continue
        try:
            id_to_bytes[number] = bytes([alphabet[character] for character in token])
        except KeyError:
            raise ConfigError(
                f"{source}: token {number} is not byte-level BPE; no other kind of tokenizer is supported"
            ) from None
    return id_to_bytes
