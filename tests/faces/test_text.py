"""TextCodec against the tokenizer's own decoder, character by character, and against text that spells named tokens."""

from __future__ import annotations

import array
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.errors import ConfigError
from engine.faces.text import BOS, EOS, NAMED_TOKENS, TextCodec

TOKENIZER = Path(__file__).parents[2] / "engine" / "nano" / "tokenizer.json"
codec = TextCodec.load(TOKENIZER)
truth = Tokenizer.from_file(str(TOKENIZER))
ids_strategy = st.lists(st.integers(0, codec.vocab_size - 1) | st.integers(66, 321), max_size=40)


def unpack(packed: bytes) -> list[int]:
    return array.array("i", packed).tolist()


@given(ids_strategy, st.booleans())
@settings(max_examples=300, deadline=None)
def test_decoding_agrees_with_the_tokenizer(ids: list[int], skip: bool) -> None:
    assert codec.decode(ids, skip_special=skip) == truth.decode(ids, skip_special_tokens=skip)


@given(ids_strategy, st.data())
@settings(max_examples=300, deadline=None)
def test_pieces_add_up_to_the_whole_and_are_never_taken_back(ids: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    detokenizer = codec.detokenizer()
    text = ""
    for first, last in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        text += detokenizer.push(ids[first:last])
        assert codec.decode(ids).startswith(text)
    assert text + detokenizer.finish() == codec.decode(ids)


def test_a_character_comes_out_only_when_it_is_whole() -> None:
    detokenizer = codec.detokenizer()
    raw = "a😀é".encode()
    single = {codec.bytes_of(token): token for token in range(66, 322)}
    seen = [detokenizer.push([single[raw[place : place + 1]]]) for place in range(len(raw))]
    assert seen == ["a", "", "", "", "😀", "", "é"]
    assert detokenizer.finish() == ""


def test_half_a_character_at_the_end_is_marked() -> None:
    single = {codec.bytes_of(token): token for token in range(66, 322)}
    assert codec.decode([single[b"a"], single[b"\xf0"], single[b"\x9f"]]) == "a\ufffd"


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back(text: str) -> None:
    assert codec.decode(codec.encode(text)) == text


@given(st.lists(st.sampled_from([*truth.get_added_tokens_decoder().values()]).map(str) | st.text(max_size=8)))
@settings(max_examples=200, deadline=None)
def test_text_never_becomes_a_named_token(pieces: list[str]) -> None:
    text = "".join(pieces)
    ids = codec.encode(text)
    named = {codec.named_id(token.content) for token in truth.get_added_tokens_decoder().values()}
    assert not named & set(ids)
    assert codec.decode(ids) == text


def test_every_named_token_stays_text_in_a_prompt() -> None:
    for token in truth.get_added_tokens_decoder().values():
        ids = unpack(codec.encode_document(f"x{token.content}y"))
        assert ids[0] == codec.bos_id and codec.named_id(token.content) not in ids[1:]
        assert codec.decode(ids[1:], skip_special=False) == f"x{token.content}y"


def test_ordinary_text_is_encoded_as_in_training() -> None:
    text = "In the beginning God created the heaven and the earth.\n\ndef f(x):\n    return x ** 2  # 1234567\n"
    assert unpack(codec.encode_document(text)) == truth.encode(BOS + text, add_special_tokens=False).ids
    assert unpack(codec.encode_document(text, bos=False)) == truth.encode(text, add_special_tokens=False).ids


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    ids = [codec.bos_id, *codec.encode("a"), codec.eos_id]
    assert codec.decode(ids) == "a"
    assert codec.decode(ids, skip_special=False) == f"{BOS}a{EOS}"


def test_ids_beyond_the_vocabulary_stand_for_nothing() -> None:
    assert codec.decode([codec.vocab_size, *codec.encode("a"), 10**9, -1]) == "a"


def test_the_longest_token_bounds_what_fits() -> None:
    longest = max((codec.bytes_of(token) for token in range(codec.vocab_size)), key=len)
    assert len(longest) == codec.longest_token_bytes
    assert codec.fits("x" * 100, 100) and not codec.fits("x" * (5 * codec.longest_token_bytes + 1), 5)


def test_what_is_not_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: can not read"):
        TextCodec.load(tmp_path)
    tree = json.loads(TOKENIZER.read_text(encoding="utf-8"))
    for broken in ("{", "[]", "{}", json.dumps({**tree, "model": {"type": "Unigram"}})):
        (tmp_path / "tokenizer.json").write_text(broken)
        with pytest.raises(ConfigError, match=r"tokenizer\.json: not "):
            TextCodec.load(tmp_path)
    without = [entry for entry in tree["added_tokens"] if entry["content"] not in NAMED_TOKENS[2:]]
    (tmp_path / "tokenizer.json").write_text(json.dumps({**tree, "added_tokens": without}))
    with pytest.raises(ConfigError, match="lacks the named tokens <｜User｜>, <｜Assistant｜>"):
        TextCodec.load(tmp_path)
