"""Log-probabilities as clients of the OpenAI surface know them: in a chat, in a completion, and of a prompt.

A token whose bytes are no whole text is written `bytes:\\xe2\\x80`, so that two such tokens stay two. Of equal texts of
different ids the likelier one stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.actors.told import Told
from engine.faces.text import TextCodec

_Entry = tuple[float, int, list[tuple[int, float]]]
"""Log-probability, place, and the likeliest ids with theirs."""


def token_text(codec: TextCodec, token: int) -> str:
    """A token as text of its own."""
    raw = codec.bytes_of(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(codec: TextCodec, ids: Sequence[int], told: Told, tops: int) -> dict[str, Any]:
    """`logprobs` of a chat's choice.

    Args:
        codec: the model's tokenizer.
        ids: those that the text shows.
        told: at least as many entries, from the first id on.
        tops: likeliest ids to list at each.
    """
    content = []
    for token, entry in zip(ids, _entries(told, len(ids)), strict=True):
        assert entry is not None, "the first token of a completion follows a prompt"
        logprob, _, likeliest = entry
        others = [_chat_token(codec, other, value) for other, value in likeliest[:tops]]
        content.append({**_chat_token(codec, token, logprob), "top_logprobs": others})
    return {"content": content, "refusal": None}


def completion_logprobs(
    codec: TextCodec, ids: Sequence[int], offsets: Sequence[int], told: Sequence[tuple[Told, int]], tops: int
) -> dict[str, Any]:
    """`logprobs` of a completion's choice.

    Args:
        codec: the model's tokenizer.
        ids: those that the text shows, an echoed prompt's first.
        offsets: of each, where its text begins, in characters.
        told: entries and how many of them count, in the order of `ids`.
        tops: likeliest ids to list at each, beside the token itself.
    """
    entries = [entry for each, count in told for entry in _entries(each, count)]
    top_logprobs: list[dict[str, float] | None] = []
    for token, entry in zip(ids, entries, strict=True):
        if entry is None:
            top_logprobs.append(None)
            continue
        texts: dict[str, float] = {}
        for other, value in [*entry[2][:tops], (token, entry[0])]:
            texts.setdefault(token_text(codec, other), value)
        top_logprobs.append(texts)
    return {
        "tokens": [token_text(codec, token) for token in ids],
        "token_logprobs": [None if entry is None else entry[0] for entry in entries],
        "top_logprobs": top_logprobs,
        "text_offset": list(offsets),
    }


def prompt_logprobs(codec: TextCodec, ids: Sequence[int], told: Told, tops: int) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`: for each id of the prompt but the first, by id, the likeliest ones and itself."""
    result: list[dict[str, Any] | None] = []
    for token, entry in zip(ids, _entries(told, len(ids)), strict=True):
        if entry is None:
            result.append(None)
            continue
        found = {
            other: {"logprob": value, "rank": rank, "decoded_token": token_text(codec, other)}
            for rank, (other, value) in enumerate(entry[2][:tops], 1)
        }
        own = {"logprob": entry[0], "rank": entry[1], "decoded_token": token_text(codec, token)}
        result.append({str(other): what for other, what in (found | {token: own}).items()})
    return result


def text_offsets(codec: TextCodec, ids: Sequence[int], *, skip_special: bool, start: int = 0) -> list[int]:
    """Where each token's text begins in the text of all, in characters, counted from `start`."""
    detokenizer = codec.detokenizer(skip_special=skip_special)
    offsets = []
    for token in ids:
        offsets.append(start)
        start += len(detokenizer.push((token,)))
    return offsets


def _chat_token(codec: TextCodec, token: int, logprob: float) -> dict[str, Any]:
    return {"token": token_text(codec, token), "logprob": logprob, "bytes": list(codec.bytes_of(token))}


def _entries(told: Told, count: int) -> list[_Entry | None]:
    """The first `count` entries; None for those that nobody can tell."""
    entries: list[_Entry | None] = [None] * min(told.missing, count)
    at = 0
    for row in range(count - len(entries)):
        end = at + told.counts[row]
        likeliest = list(zip(told.top_ids[at:end], told.top_logprobs[at:end], strict=True))
        entries.append((told.logprobs[row], told.places[row], likeliest))
        at = end
    return entries
