"""Preparer: lines of input to requests that can be submitted, or to refusals.

It runs in the reading thread, in slices of a few lines, because tokenising is CPU work. It owns which ids were seen; it
knows what an earlier run has done. It never waits and writes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.actors.client import Row
from engine.batch.envelope import Envelope, LineRefused, read_envelope
from engine.batch.fields import TREATMENT, FieldRefused, read_fields, says_nothing
from engine.batch.identity import SeenIds, auto_id, digest
from engine.batch.job import Choices, Job, Refusal, Source
from engine.batch.lines import RAW_BYTES, RawLine
from engine.batch.resume import Earlier
from engine.errors import ConfigError, RequestRefused
from engine.faces.body import (
    BodyRefused,
    Bounds,
    encode_messages,
    encode_prompt,
    list_stops,
    read_sampling,
    read_treatment,
    read_wishes,
    spread_seeds,
    wants_thinking,
)
from engine.faces.grammar import read_grammar
from engine.faces.stops import StopSearch
from engine.faces.text import TextCodec
from engine.faces.tools import read_tools

DEFAULT_MAX_TOKENS = 256


class InputChanged(ConfigError):
    """A line has the id of one that is already answered, but asks for something else."""


@dataclasses.dataclass(frozen=True, slots=True)
class PrepareLimits:
    """What the served model allows. `model_names`: all names by which a body may ask for it."""

    vocab_size: int
    max_model_tokens: int
    model_names: tuple[str, ...]


@dataclasses.dataclass(slots=True)
class Slice:
    """What some lines of input came to, in their order. `skipped` were done by an earlier run."""

    items: list[Job | Refusal]
    skipped: int = 0


class Preparer:
    """Prepares the lines of one input, in order. One thread at a time.

    Args:
        codec: the model's tokenizer.
        limits: of the model.
        defaults: body field to JSON.
        earlier: what an earlier run has done.
        seed: see BatchOptions.
        any_model: see BatchOptions.
        priority: of every request; what a line says of its own is added.
    """

    def __init__(
        self,
        codec: TextCodec,
        limits: PrepareLimits,
        *,
        defaults: Mapping[str, bytes],
        earlier: Earlier,
        seed: int | None = None,
        any_model: bool = False,
        priority: int = 0,
    ) -> None:
        self.expired = False
        """Set when the deadline is over: lines are no longer tokenised, but refused as `batch_expired`."""
        self._codec = codec
        self._limits = limits
        self._bounds = Bounds(limits.vocab_size, limits.max_model_tokens)
        self._defaults = defaults
        self._earlier = earlier
        self._seed = seed
        self._any_model = any_model
        self._priority = priority
        self._seen = SeenIds()
        self._places = 0

    def prepare(self, lines: Sequence[RawLine]) -> Slice:
        """Prepares the next lines.

        Raises:
            InputChanged: see there.
        """
        slice_ = Slice([])
        for line in lines:
            item = self._prepare_line(line)
            if item is None:
                slice_.skipped += 1
            else:
                self._places += 1
                slice_.items.append(item)
        return slice_

    def _prepare_line(self, line: RawLine) -> Job | Refusal | None:
        raw_digest = digest(b"raw", line.data, line.num_bytes.to_bytes(8, "little"))
        source = Source(auto_id(line.number), line.number, line.offset, raw_digest, b"{}", line.data[:RAW_BYTES])
        try:
            if line.too_long:
                raise LineRefused("bad_line", "line_too_long", f"a line of {line.num_bytes} bytes (limit 64 MiB)")
            envelope = read_envelope(line.data)
            source = dataclasses.replace(source, custom_id=envelope.custom_id or source.custom_id, meta=envelope.meta)
            self._check_repeated(envelope, source)
            values, ignored = self._read_body(envelope)
            source = dataclasses.replace(source, digest=self._digest(envelope, values))
            if self._is_done(source):
                return None
            if self.expired:
                raise LineRefused("batch_expired", "batch_expired", "the batch's deadline was over before it began")
            return self._make_job(source, envelope, values, ignored)
        except LineRefused as refused:
            if self._earlier.is_failed(source.custom_id, source.digest):
                return None
            return Refusal(source, self._places, refused.kind, refused.code, str(refused))

    def _check_repeated(self, envelope: Envelope, source: Source) -> None:
        fresh = self._seen.add_auto(source.line) if envelope.custom_id is None else self._seen.add(envelope.custom_id)
        if not fresh:
            raise LineRefused(
                "bad_line", "duplicate_id", f"the id {source.custom_id[:128]!r} is on an earlier line too"
            )

    def _read_body(self, envelope: Envelope) -> tuple[dict[str, Any], tuple[str, ...]]:
        try:
            values, ignored = read_fields(envelope.body, self._defaults, chat=envelope.kind == "chat")
        except FieldRefused as error:
            raise LineRefused("bad_request", error.field_code, str(error)) from error
        model = values.get("model")
        if model is not None and not self._any_model and model not in self._limits.model_names:
            raise LineRefused(
                "bad_request",
                "model_not_found",
                f"model: {model[:128]!r} is not served here, {self._limits.model_names[0]!r} is (or pass --any-model)",
            )
        return values, ignored

    def _digest(self, envelope: Envelope, values: dict[str, Any]) -> str:
        asked = {
            name: value
            for name, value in values.items()
            if name != "model" and name not in TREATMENT and not says_nothing(name, value)
        }
        return digest(
            self._limits.model_names[0].encode(), envelope.kind.encode(), msgspec.json.encode(asked, order="sorted")
        )

    def _is_done(self, source: Source) -> bool:
        before = self._earlier.answered(source.custom_id)
        if before is None:
            return self._earlier.is_failed(source.custom_id, source.digest)
        if before != source.digest:
            raise InputChanged(
                f"input changed: line {source.line} has the id {source.custom_id[:128]!r} of an answer in the output,"
                " but asks for something else (its body, the defaults or the model differ)"
            )
        return True

    def _make_job(self, source: Source, envelope: Envelope, values: dict[str, Any], ignored: tuple[str, ...]) -> Job:
        try:
            prompt = self._encode(envelope, values)
            is_chat = envelope.kind == "chat"
            wishes = read_wishes(values, chat=is_chat)
            thinking = is_chat and wants_thinking(values)
            tools = read_tools(values) if is_chat else None
            sampling = read_sampling(
                values,
                len(prompt) // 4,
                wishes,
                self._bounds,
                seed=self._own_seed(source),
                default_max_tokens=DEFAULT_MAX_TOKENS,
                shorten=True,
                grammar=read_grammar(values, self._codec, tools, thinking=thinking),
            )
        except BodyRefused as error:
            raise LineRefused(error.code, error.field_code, str(error)) from error
        except RequestRefused as error:
            raise LineRefused("bad_request", "invalid_field", str(error)) from error
        stops = list_stops(values)
        treatment = read_treatment(values, priority=self._priority)
        jobs = [
            Job(
                source=source,
                place=self._places,
                kind=envelope.kind,
                row=Row(
                    prompt,
                    each,
                    label=source.custom_id[:256],
                    priority=treatment.priority,
                    cache_salt=treatment.cache_salt,
                ),
                detokenizer=self._codec.detokenizer(skip_special=wishes.skip_special),
                stops=StopSearch(stops) if stops else None,
                thinking=thinking,
                may_call=tools is not None,
                ignored=ignored,
                codec=self._codec,
                wishes=wishes,
            )
            for each in spread_seeds(sampling, values.get("n", 1))
        ]
        if len(jobs) > 1:
            choices = Choices(jobs)
            for job in jobs:
                job.choices = choices
        return jobs[0]

    def _encode(self, envelope: Envelope, values: dict[str, Any]) -> bytes:
        if envelope.kind == "chat":
            return encode_messages(self._codec, values, self._bounds)
        return encode_prompt(
            self._codec, _single_prompt(values), self._bounds, add_special=values.get("add_special_tokens", True)
        )

    def _own_seed(self, source: Source) -> int:
        """In force for a line that has none."""
        if self._seed is None:
            return secrets.randbits(53)
        text = f"{self._seed}:{source.custom_id}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _single_prompt(values: dict[str, Any]) -> str | list[int]:
    """The one prompt of a completion, in any of the four forms of the OpenAI surface."""
    if "prompt" not in values:
        raise RequestRefused("bad_request", "prompt: missing")
    prompt = values["prompt"]
    if isinstance(prompt, str):
        return prompt
    if all(isinstance(token, int) for token in prompt):
        return list(prompt)
    if len(prompt) > 1:
        raise RequestRefused("bad_request", f"prompt: {len(prompt)} prompts in one line; write one a line")
    only: str | list[int] = prompt[0]
    return only
