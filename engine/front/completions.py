"""Completions: POST /v1/chat/completions and /v1/completions, from the body to the last byte of the answer.

A stream's headers go out with its first token, or once a second has passed without a refusal: the head refuses at once
or not at all. From then on a stream that has nothing to say says so every `http.keepalive`, because proxies cut silent
ones. A task of its own waits for the client to hang up, in every state; whatever runs for it is then cancelled at the
head.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from engine.front.app import Exchange, Front, exchange_of, logger
from engine.front.ask import Ask
from engine.front.bodies import COMPILED_FIELDS, ClientLeft, Wanted, ignored_header, read_body, read_wanted
from engine.front.choice import Choice
from engine.front.frames import Renderer, error_frame
from engine.front.generation import Generation
from engine.front.replies import JSON_TYPE, error_of, send_response
from engine.log import log_event

VERDICT_S = 1.0
"""A head that has not refused a request after so long has taken it."""
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]  # fmt: skip


class Completions:
    """See the module."""

    def __init__(self, front: Front, *, is_chat: bool) -> None:
        self._front = front
        self._is_chat = is_chat

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        front, exchange = self._front, exchange_of(scope)
        exchange.route = "chat" if self._is_chat else "completions"
        exchange.facts = {}
        front.check_open()
        with front.seat() as leave_queue, contextlib.ExitStack() as room:
            room.enter_context(front.body_room(exchange.headers))
            data = await read_body(receive, exchange.headers, front.http.body_bytes)
            async with _presence(receive) as presence:
                read = functools.partial(read_wanted, data, front.served, front.http, is_chat=self._is_chat)
                size = math.inf if any(name in data for name in COMPILED_FIELDS) else len(data)
                wanted = await front.prepare(size, read)
                del data, read
                room.close()
                exchange.facts = {"stream": wanted.stream, "tokens_in": wanted.num_prompt_tokens}
                if presence.is_gone:
                    front.counts.add("gone queued")
                    raise ClientLeft
                front.check_open()
                await self._generate(wanted, exchange, presence, send, leave_queue)

    async def _generate(
        self, wanted: Wanted, exchange: Exchange, presence: _Presence, send: Any, leave_queue: Callable[[], None]
    ) -> None:
        front = self._front
        generation = Generation(
            front.link,
            _choices(wanted, front, exchange),
            lag_limit=front.http.stream_tokens if wanted.stream else math.inf,
            first_came=leave_queue,
            stalled=exchange.connection.abort,
        )
        presence.tell = generation.hang_up
        renderer = Renderer(wanted, generation, front.served, secrets.token_hex(12), int(time.time()))
        writer = _Writer(front, exchange, send)
        try:
            with front.running(generation):
                await generation.submit()
                if wanted.stream:
                    await self._stream(wanted, generation, renderer, writer, exchange)
                else:
                    await self._whole(wanted, generation, renderer, writer, exchange)
        finally:
            generation.withdraw()
            _account(exchange, generation, front)

    async def _whole(
        self, wanted: Wanted, generation: Generation, renderer: Renderer, writer: _Writer, exchange: Exchange
    ) -> None:
        while not generation.is_over:
            await generation.wait_news(self._front.http.keepalive_s)
        if generation.is_gone:
            raise ClientLeft
        if generation.failure is not None:
            raise error_of(generation.failure, self._front.retry_after_s)
        headers = [*ignored_header(wanted.ignored), *_rank_headers(exchange, generation)]
        await writer.send_whole(generation, renderer.body(), headers)

    async def _stream(
        self, wanted: Wanted, generation: Generation, renderer: Renderer, writer: _Writer, exchange: Exchange
    ) -> None:
        keepalive_s = self._front.http.keepalive_s
        headers = [*_STREAM_HEADERS, *ignored_header(wanted.ignored)]
        is_begun = False
        while True:
            has_news = await generation.wait_news(keepalive_s if is_begun else VERDICT_S)
            if generation.is_gone or generation.is_stalled:
                raise ClientLeft
            failure = generation.failure
            if failure is not None and not is_begun:
                raise error_of(failure, self._front.retry_after_s)
            data = renderer.chunks()
            is_last = failure is not None or generation.is_answered
            if failure is not None:
                data += error_frame(error_of(failure, self._front.retry_after_s).body())
            elif is_last:
                data += renderer.last_chunks()
            elif not data:
                if has_news:
                    continue
                data = b": waiting\n\n" if is_begun else b": queued\n\n"
            if not is_begun:
                is_begun = True
                await writer.begin([*headers, *_rank_headers(exchange, generation)])
            await writer.write(generation, data, is_last=is_last)
            if is_last:
                return


class _Writer:
    """Writes one answer, and gives up on a client who takes nothing."""

    def __init__(self, front: Front, exchange: Exchange, send: Any) -> None:
        self._front = front
        self._connection = exchange.connection
        self._send = send

    async def begin(self, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, generation: Generation, data: bytes, *, is_last: bool) -> None:
        """One write for all that is new."""
        self._front.counts.add("frames")
        message = {"type": "http.response.body", "body": data, "more_body": not is_last}
        if self._connection.is_congested:
            await self._patiently(generation, self._send(message))
        else:
            await self._send(message)

    async def send_whole(self, generation: Generation, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        await self._patiently(generation, send_response(self._send, 200, body, [*JSON_TYPE, *headers]))

    async def _patiently(self, generation: Generation, sending: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._front.http.stall_s):
                await sending
        except TimeoutError:
            generation.stall()
        if generation.is_gone or generation.is_stalled:
            raise ClientLeft


class _Presence:
    """Whether the client is still there. `tell` is called once he is not."""

    def __init__(self) -> None:
        self.is_gone = False
        self.tell: Callable[[], None] | None = None


@contextlib.asynccontextmanager
async def _presence(receive: Any) -> AsyncIterator[_Presence]:
    """Waits beside the block for the client to hang up, which `receive` says once the body is read."""
    presence = _Presence()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        presence.is_gone = True
        if presence.tell is not None:
            presence.tell()

    task = asyncio.get_running_loop().create_task(watch())
    try:
        yield presence
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _rank_headers(exchange: Exchange, generation: Generation) -> list[tuple[bytes, bytes]]:
    """For a client who asks: the ranks that computed the answer, as far as they are known; of several choices all."""
    if exchange.headers.get(b"engine-show-ranks") != b"1":
        return []
    started = [choice.ask.started for choice in generation.choices if choice.ask.started is not None]
    prefills = ",".join(str(rank) for rank in dict.fromkeys(each.prefill_rank for each in started))
    decodes = ",".join(str(rank) for rank in dict.fromkeys(each.decode_rank for each in started))
    if not started:
        return []
    return [(b"engine-prefill-rank", prefills.encode()), (b"engine-decode-rank", decodes.encode())]


def _choices(wanted: Wanted, front: Front, exchange: Exchange) -> list[Choice]:
    """One for each answer, prompt by prompt."""
    choices: list[Choice] = []
    treatment = wanted.treatment
    for prompt, samplings in zip(wanted.prompts, wanted.samplings, strict=True):
        for sampling in samplings:
            choices.append(
                Choice(
                    len(choices),
                    Ask(
                        prompt,
                        sampling,
                        exchange.label,
                        None,
                        affinity=exchange.affinity,
                        cache_salt=treatment.cache_salt,
                        priority=treatment.priority,
                    ),
                    front.served.codec,
                    stops=wanted.stops,
                    skip_special=wanted.wishes.skip_special,
                    thinking=wanted.thinking,
                    wants_scores=wanted.wishes.logprobs >= 0,
                    may_call=wanted.may_call,
                )
            )
    return choices


def _account(exchange: Exchange, generation: Generation, front: Front) -> None:
    """What the log says of a generation; clients who left are counted by what they left behind."""
    facts, exchange.generation = exchange.facts, generation
    assert facts is not None
    started = next((choice.ask.started for choice in generation.choices if choice.ask.started is not None), None)
    if started is not None:
        front.note_queue(started.timings.queue_us / 1e6)
        facts |= {
            "tokens_cached": started.cached_tokens,
            "queue_ms": started.timings.queue_us / 1e3,
            "prefill_rank": started.prefill_rank,
            "decode_rank": started.decode_rank,
        }
    facts["tokens_out"] = sum(choice.tokens for choice in generation.choices)
    if generation.first_token_at:
        facts["ttft_ms"] = 1e3 * (generation.first_token_at - exchange.began_at)
    if generation.is_stalled:
        exchange.status = 499
        front.counts.add("stalled")
        facts["finish"] = "dropped"
        log_event(
            logger, "warning", "stream.dropped", request_id=exchange.request_id,
            msg=f"its client is {front.http.stream_tokens} tokens behind (http.stream_tokens), or took nothing for"
            f" {front.http.stall_s:g} s (http.stall)",
        )  # fmt: skip
    elif generation.is_gone:
        exchange.status = 499
        facts["finish"] = "hang_up"
        facts["stage"] = generation.stage
        front.counts.add(f"gone {generation.stage}")
    elif generation.failure is not None:
        facts["finish"] = facts["code"] = generation.failure.code
    else:
        facts["finish"] = generation.choices[0].reason
