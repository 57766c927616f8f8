"""make_lines: a generator of batch input that is partly hostile, with the fate that each line must meet.

Good lines come in all three forms and in the spellings that real clients use. Bad ones are bad in ways that were seen
or are easy to make: broken JSON, wrong types, wishes that can not be met, prompts that do not fit, ids that repeat.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class HostileLine:
    """A line of input, without its line end.

    Attributes:
        data: its bytes.
        custom_id: the id that its record must have.
        fate: `answer`, or the error record's type, or `blank` for a line that gets no record.
        why: what is special about it.
    """

    data: bytes
    custom_id: str
    fate: str
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    data: bytes
    custom_id: str | None
    fate: str


WORDS = ("the", "sea", "and", "old", "king", "of", "light", "said", "his", "daughter", "garden", "was", "full", "stars")


def make_lines(
    count: int, bad_share: float, seed: int, *, max_model_tokens: int = 2048, max_tokens: int = 8
) -> list[HostileLine]:
    """Makes `count` lines, the bad ones at random places and in equal parts of every kind; equal arguments give equal
    lines.

    Args:
        count: lines, blank ones included.
        bad_share: 0 to 1; where that makes fewer lines than there are kinds, one of each kind if they fit.
        seed: of all choices.
        max_model_tokens: context of the engine that will see them.
        max_tokens: largest `max_tokens` of good lines.
    """
    rng = random.Random(seed)
    maker = _Maker(rng, max_model_tokens, max_tokens)
    num_bad = round(count * bad_share)
    if 0 < num_bad < len(maker.bad) <= count:
        num_bad = len(maker.bad)
    kinds = [maker.bad[number % len(maker.bad)] for number in range(num_bad)]
    rng.shuffle(kinds)
    place_to_kind = dict(zip(rng.sample(range(count), num_bad), kinds, strict=True))
    lines: list[HostileLine] = []
    for place in range(count):
        why, make = place_to_kind.get(place) or rng.choice(maker.good)
        made = make(f"{why}-{place}")
        if made is None:  # nothing to repeat yet
            why, make = maker.good[0]
            made = make(f"{why}-{place}")
            assert made is not None
        custom_id = f"line-{place + 1:06d}" if made.custom_id is None else made.custom_id
        lines.append(HostileLine(made.data, custom_id, made.fate, why))
        if made.fate == "answer" and made.custom_id is not None:
            maker.used.append(made.custom_id)
    return lines


class _Maker:
    def __init__(self, rng: random.Random, max_model_tokens: int, max_tokens: int) -> None:
        self.used: list[str] = []
        self._rng = rng
        self._context = max_model_tokens
        self._max_tokens = max_tokens
        self.good: list[tuple[str, Callable[[str], _Made | None]]] = [
            ("batch-chat", self._batch_chat),
            ("batch-completion", self._batch_completion),
            ("bare-chat", self._bare_chat),
            ("bare-prompt", self._bare_prompt),
            ("string", self._string),
            ("token-ids", self._token_ids),
            ("parts", self._parts),
            ("carriage-return", self._carriage_return),
            ("spaces", self._spaces),
            ("labels", self._labels),
            ("unknown-fields", self._unknown_fields),
            ("nulls", self._nulls),
            ("neutral", self._neutral),
            ("integer-id", self._integer_id),
            ("unicode", self._unicode),
            ("special-names", self._special_names),
            ("nul-escape", self._nul_escape),
            ("duplicate-keys", self._duplicate_keys),
            ("empty-prompt", self._empty_prompt),
            ("huge-max-tokens-with-room", self._stops),
        ]
        self.bad: list[tuple[str, Callable[[str], _Made | None]]] = [
            ("blank", self._blank),
            ("repeated-id", self._repeated_id),
            *((f"raw-{place}", self._raw(data)) for place, data in enumerate(BAD_LINES)),
            *((f"field-{place}", self._field(body)) for place, body in enumerate(BAD_FIELDS)),
            *((f"body-{place}", self._body(body)) for place, body in enumerate(BAD_BODIES)),
            ("too-long", self._too_long),
            ("far-too-long", self._far_too_long),
            ("too-long-chat", self._too_long_chat),
            ("invalid-utf8", self._invalid_utf8),
            ("deep", self._deep),
        ]

    # ------------------------------------------------------------ good

    def _text(self) -> str:
        return " ".join(self._rng.choice(WORDS) for _ in range(self._rng.randrange(1, 12)))

    def _limits(self) -> dict[str, Any]:
        limits: dict[str, Any] = {"max_tokens": self._rng.randrange(1, self._max_tokens + 1)}
        if self._rng.random() < 0.5:
            limits["temperature"] = self._rng.choice([0, 0.7, 1.0])
            limits["seed"] = self._rng.randrange(2**40)
        return limits

    def _batch(self, custom_id: str, url: str, body: dict[str, Any], **more: Any) -> _Made:
        line = {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more}
        return _Made(_json(line), custom_id, "answer")

    def _batch_chat(self, name: str) -> _Made:
        messages = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": self._text()}]
        return self._batch(name, "/v1/chat/completions", {"messages": messages, **self._limits()})

    def _batch_completion(self, name: str) -> _Made:
        return self._batch(name, "/v1/completions", {"prompt": self._text(), **self._limits()})

    def _bare_chat(self, name: str) -> _Made:
        messages = [
            {"role": "user", "content": self._text()},
            {"role": "assistant", "content": self._text()},
            {"role": "user", "content": self._text()},
        ]
        body = {"messages": messages, "max_completion_tokens": self._rng.randrange(1, self._max_tokens + 1)}
        return _Made(_json(body), None, "answer")

    def _bare_prompt(self, name: str) -> _Made:
        return _Made(_json({"id": name, "prompt": [self._text()], **self._limits()}), name, "answer")

    def _string(self, name: str) -> _Made:
        return _Made(_json(self._text()), None, "answer")

    def _token_ids(self, name: str) -> _Made:
        ids = [self._rng.randrange(66, 2000) for _ in range(self._rng.randrange(1, 20))]
        prompt = ids if self._rng.random() < 0.5 else [ids]
        return self._batch(name, "/v1/completions", {"prompt": prompt, **self._limits()})

    def _parts(self, name: str) -> _Made:
        content = [{"type": "text", "text": self._text()}, {"type": "text", "text": "."}]
        body = {"messages": [{"role": "user", "content": content}], **self._limits()}
        return self._batch(name, "/v1/chat/completions", body)

    def _carriage_return(self, name: str) -> _Made:
        return _Made(_json({"prompt": self._text(), "custom_id": name, **self._limits()}) + b"\r", name, "answer")

    def _spaces(self, name: str) -> _Made:
        return _Made(b" \t" + _json({"prompt": self._text(), "custom_id": name}) + b"  ", name, "answer")

    def _labels(self, name: str) -> _Made:
        return self._batch(
            name, "/v1/completions", {"prompt": self._text(), **self._limits()}, topic="x", weight=[1, {"a": None}]
        )

    def _unknown_fields(self, name: str) -> _Made:
        body = {"prompt": self._text(), "future_field": {"a": 1}, "store": True, **self._limits()}
        return self._batch(name, "/v1/completions", body)

    def _nulls(self, name: str) -> _Made:
        body = {"prompt": self._text(), "seed": None, "stop": None, "logprobs": None, "user": None, "max_tokens": 2}
        return self._batch(name, "/v1/completions", body)

    def _neutral(self, name: str) -> _Made:
        body = {
            "messages": [{"role": "user", "content": self._text()}],
            "n": 1,
            "stream": False,
            "tools": [],
            "response_format": {"type": "text"},
            "frequency_penalty": 0,
            **self._limits(),
        }
        return self._batch(name, "/v1/chat/completions", body)

    def _integer_id(self, name: str) -> _Made:
        number = 10**9 + int(name.rpartition("-")[2])
        return _Made(_json({"id": number, "prompt": self._text(), **self._limits()}), str(number), "answer")

    def _unicode(self, name: str) -> _Made:
        return self._batch(name, "/v1/completions", {"prompt": "Grüße 😀 \u2028 ﷽ e\u0301 日本", **self._limits()})

    def _special_names(self, name: str) -> _Made:
        text = "<｜User｜>a<｜Assistant｜></think><｜end▁of▁sentence｜>"
        return self._batch(
            name, "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **self._limits()}
        )

    def _nul_escape(self, name: str) -> _Made:
        return self._batch(name, "/v1/completions", {"prompt": "a\x00b", **self._limits()})

    def _duplicate_keys(self, name: str) -> _Made:
        return _Made(b'{"custom_id":"%s","prompt":"a","prompt":"b","max_tokens":1}' % name.encode(), name, "answer")

    def _empty_prompt(self, name: str) -> _Made:
        return self._batch(name, "/v1/completions", {"prompt": "", **self._limits()})

    def _stops(self, name: str) -> _Made:
        body = {"prompt": self._text(), "stop": ["\n\n", "zzz"], **self._limits()}
        return self._batch(name, "/v1/completions", body)

    # ------------------------------------------------------------ bad

    def _blank(self, name: str) -> _Made:
        return _Made(self._rng.choice([b"", b" ", b"\t", b"\r", b"  \r"]), None, "blank")

    def _repeated_id(self, name: str) -> _Made | None:
        if not self.used:
            return None
        custom_id = self._rng.choice(self.used)
        return _Made(_json({"custom_id": custom_id, "prompt": self._text()}), custom_id, "bad_line")

    def _raw(self, data: bytes) -> Callable[[str], _Made]:
        return lambda name: _Made(data, None, "bad_line")

    def _field(self, body: dict[str, Any]) -> Callable[[str], _Made]:
        return lambda name: _Made(
            _json({"custom_id": name, "url": "/v1/completions", "body": {"prompt": "a", **body}}), name, "bad_request"
        )

    def _body(self, body: dict[str, Any]) -> Callable[[str], _Made]:
        return lambda name: _Made(_json({"custom_id": name, "body": body}), name, "bad_request")

    def _too_long(self, name: str) -> _Made:
        return _Made(_json({"custom_id": name, "prompt": " sea" * (self._context + 1)}), name, "too_long")

    def _far_too_long(self, name: str) -> _Made:
        return _Made(_json({"custom_id": name, "prompt": "x" * (200 * self._context)}), name, "too_long")

    def _too_long_chat(self, name: str) -> _Made:
        messages = [{"role": "user", "content": " sea" * (self._context // 2)} for _ in range(3)]
        return _Made(_json({"custom_id": name, "messages": messages}), name, "too_long")

    def _invalid_utf8(self, name: str) -> _Made:
        bad = self._rng.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xc0\xaf"])
        return _Made(b'{"custom_id":"x","prompt":"a' + bad + b'b"}', None, "bad_line")

    def _deep(self, name: str) -> _Made:
        depth = self._rng.choice([2_000, 100_000])
        return _Made(b'{"prompt":"a","x":' + b"[" * depth + b"]" * depth + b"}", None, "bad_line")


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


BAD_LINES: tuple[bytes, ...] = (
    b"{",
    b"}",
    b'{"prompt": "a"',
    b'{"prompt": "a"} {"prompt": "b"}',
    b'{"prompt": "a",}',
    b"{'prompt': 'a'}",
    b"not json",
    b"null",
    b"true",
    b"12",
    b"1e999",
    b"NaN",
    b"[]",
    b'[{"prompt": "a"}]',
    b"{}",
    b'{"custom_id": "x"}',
    b'{"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {"prompt": "a"}}',
    b'{"custom_id": "x", "method": "POST", "url": "/v1/embeddings", "body": {"prompt": "a"}}',
    b'{"custom_id": "x", "method": "POST", "url": 5, "body": {"prompt": "a"}}',
    b'{"custom_id": "x", "body": "prompt"}',
    b'{"custom_id": "x", "body": {}}',
    b'{"custom_id": 1.5, "prompt": "a"}',
    b'{"custom_id": ["x"], "prompt": "a"}',
    b'{"custom_id": "", "prompt": "a"}',
    b'{"custom_id": "' + b"y" * 2000 + b'", "prompt": "a"}',
    b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}',
    b'{"prompt": "a\\ud800"}',
    b'{"prompt": "a\x00b"}',
    b'{"prompt": "a\tb"}',
    b'{"prompt": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'"unfinished',
    b'"a" "b"',
    b'"\\x41"',
    b"\x00",
    b"\xef\xbb\xbf\xef\xbb\xbf{}",
)
"""Lines whose form is wrong; none of their ids counts."""
BAD_FIELDS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": "8"},
    {"max_tokens": 1.5},
    {"max_tokens": 10**30},
    {"max_tokens": True},
    {"temperature": "hot"},
    {"temperature": -0.1},
    {"temperature": 1e6},
    {"top_p": 0},
    {"top_p": 1.5},
    {"top_k": -2},
    {"seed": 2**70},
    {"seed": "a"},
    {"stop": ""},
    {"stop": [1]},
    {"stop": ["a"] * 17},
    {"stop_token_ids": [-1]},
    {"ignore_eos": 1},
    {"min_tokens": 9, "max_tokens": 8},
    {"n": 0},
    {"n": 129},
    {"stream": True},
    {"logprobs": 21},
    {"logprobs": True},
    {"logprobs": -1},
    {"top_logprobs": 2},
    {"prompt_logprobs": -1},
    {"echo": 1},
    {"best_of": 3},
    {"suffix": "x"},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"5": 101}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"99999999": 1}},
    {"logit_bias": {"5": 1, "05": 1}},
    {"logit_bias": {str(token): 1 for token in range(301)}},
    {"frequency_penalty": 2.5},
    {"presence_penalty": "much"},
    {"repetition_penalty": 0},
    {"repetition_penalty": 101},
    {"min_p": 1.5},
    {"functions": [{"name": "f"}]},
    {"response_format": {"type": "yaml"}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
    {"structured_outputs": {"regex": "(a"}},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"structured_outputs": {"choice": ["b"]}, "min_tokens": 1},
    {"guided_regex": "a+"},
    {"model": "some-other-model"},
    {"prompt": 5},
    {"prompt": []},
    {"prompt": ["a", "b"]},
    {"prompt": [1, "a"]},
    {"prompt": [-1]},
    {"prompt": [10**9]},
    {"prompt": [[1], [2]]},
    {"prompt": {"text": "a"}},
    {"prompt": None},
)
"""Completions with a field that can not be honoured."""
BAD_BODIES: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]},
    {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"},
    {"messages": []},
    {"messages": "hi"},
    {"messages": ["hi"]},
    {"messages": [{}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "wizard", "content": "a"}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": [{"role": "user", "content": "a"}], "continue_final_message": True},
    {"messages": [{"role": "user", "content": "a"}], "logprobs": 3},
    {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 3},
    {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 21},
    {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"thinking": "yes"}},
    {"messages": None},
)
"""Chats that can not be rendered."""
