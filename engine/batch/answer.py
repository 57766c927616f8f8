"""Records: the lines that a batch writes, in the OpenAI Batch shape plus `engine`, for answers and for errors alike."""

from __future__ import annotations

import array
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.batch.job import Job, Refusal, Source
from engine.faces.calls import CallReader
from engine.faces.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs, text_offsets
from engine.faces.text import END_THINK, TextCodec

_encoder = msgspec.json.Encoder()


def render_answer(jobs: Sequence[Job], *, model: str) -> tuple[bytes, int]:
    """The record of a line whose jobs have all ended, with its line end, and the tokens of all completions.

    Args:
        jobs: of one line, in the order of their answers; no id of any follows.
        model: the served model's name.
    """
    job = jobs[0]
    choices, completions = [], []
    for index, each in enumerate(jobs):
        choice, completion = _render_choice(each, jobs[0], index)
        choices.append(choice)
        completions.append(completion)
    engine = _account(job, completions[0])
    if len(jobs) > 1:
        engine["choices"] = [_account(*each) for each in zip(jobs, completions, strict=True)]
    engine["digest"] = job.source.digest
    if job.ignored:
        engine["ignored_fields"] = job.ignored
    token = secrets.token_hex(8)
    started = job.row.started
    assert started is not None, "an answer without a token"
    total = sum(completions)
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if job.kind == 'chat' else 'cmpl'}-{token}",
        "object": "chat.completion" if job.kind == "chat" else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": job.row.num_prompt,
            "completion_tokens": total,
            "total_tokens": job.row.num_prompt + total,
            "prompt_tokens_details": {"cached_tokens": started.cached_tokens},
        },
    }
    told = job.row.prompt_told
    if job.kind == "chat" and job.wishes.prompt_logprobs >= 0 and told is not None and job.codec is not None:
        body["prompt_logprobs"] = prompt_logprobs(job.codec, _prompt_ids(job), told, job.wishes.prompt_logprobs)
    if job.kind == "chat" and job.wishes.token_ids:
        body["prompt_token_ids"] = _prompt_ids(job)
    response = {"status_code": 200, "request_id": f"req-{token}", "body": body}
    record = _record(job.source, response, None, engine)
    return _encoder.encode(record) + b"\n", total


def render_refusal(refusal: Refusal) -> bytes:
    """The record of a line without an answer, with its line end."""
    source = refusal.source
    error = {
        "type": refusal.kind,
        "code": refusal.code,
        "message": str(refusal.message),
        "retryable": refusal.retryable,
    }
    engine = {"line": source.line, "attempts": refusal.attempts, "digest": source.digest}
    record = _record(source, None, error, engine)
    record |= {"line": source.line, "offset": source.offset, "raw": source.raw.decode("utf-8", "replace")}
    return _encoder.encode(record) + b"\n"


def _record(source: Source, response: Any, error: Any, engine: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"batch_req_{secrets.token_hex(8)}",
        "custom_id": source.custom_id,
        "response": response,
        "error": error,
        "meta": msgspec.Raw(source.meta),
        "engine": engine,
    }


def _account(job: Job, completion: int) -> dict[str, Any]:
    """Where an answer was computed and how long that took."""
    row, ending, started = job.row, job.ending, job.row.started
    assert started is not None and ending is not None, "an answer without a token"
    timings = started.timings
    return {
        "line": job.source.line,
        "attempts": row.attempt,
        "prefill_rank": started.prefill_rank,
        "decode_rank": started.decode_rank,
        "pushed_bytes": started.pushed_bytes,
        "pushes": started.pushes,
        "post_us": started.post_us,
        "prompt_tokens": row.num_prompt,
        "completion_tokens": completion,
        "cached_tokens": started.cached_tokens,
        "queue_ms": timings.queue_us / 1000,
        "prefill_ms": timings.prefill_us / 1000,
        "push_ms": timings.push_us / 1000,
        "handoff_ms": None if ending.handoff_us is None else ending.handoff_us / 1000,
        "ttft_ms": _ms(job.answered_at - job.started_at) if job.answered_at else None,
        "total_ms": _ms(ending.at - job.started_at),
        "seed": row.sampling.seed,
    }


def _render_choice(job: Job, first: Job, index: int) -> tuple[dict[str, Any], int]:
    """A choice of the body, and its tokens. `first`: the job that asked for the prompt's log-probabilities."""
    ending = job.ending
    assert ending is not None, "an answer that has not ended"
    text = job.end_text(drop_last=ending.drop_last)
    completion = len(job.row.generated) if job.stopped_at is None else job.stopped_at
    reason: str = "stop" if job.stopped_at is not None else ending.reason
    shown = completion - (ending.drop_last and job.stopped_at is None)
    choice: dict[str, Any] = {"index": index}
    if job.kind == "chat":
        message = _message(job, text)
        if "tool_calls" in message and reason == "stop":
            reason = "tool_calls"
        choice |= {"message": message, "logprobs": _chat_logprobs(job, text, shown)}
    else:
        echoed = _echo(job)
        choice |= {"text": echoed + text, "logprobs": _completion_logprobs(job, first, echoed, text, shown)}
        told, tops = first.row.prompt_told, job.wishes.prompt_logprobs
        if tops >= 0 and told is not None and job.codec is not None:
            choice["prompt_logprobs"] = prompt_logprobs(job.codec, _prompt_ids(job), told, tops)
        if job.wishes.token_ids:
            choice["prompt_token_ids"] = _prompt_ids(job)
    if job.wishes.token_ids:
        choice["token_ids"] = job.row.generated[:completion].tolist()
    return {**choice, "finish_reason": reason}, completion


def _message(job: Job, text: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if job.thinking:
        # The prompt opened the reasoning; an answer that never closed it is reasoning to its end.
        thought, mark, rest = text.partition(END_THINK)
        message |= {"content": rest if mark else "", "reasoning_content": thought}
    if job.may_call:
        reader = CallReader()
        text = reader.push(message["content"]) + reader.finish()
        if reader.calls:
            message |= {"content": text or None, "tool_calls": [call.render() for call in reader.calls]}
    return message


def _echo(job: Job) -> str:
    if not job.wishes.echo or job.codec is None:
        return ""
    return job.codec.decode(_prompt_ids(job), skip_special=job.wishes.skip_special)


def _chat_logprobs(job: Job, text: str, shown: int) -> dict[str, Any] | None:
    told, codec = job.row.told, job.codec
    if job.wishes.logprobs < 0 or told is None or codec is None:
        return None
    ids, _ = _shown_ids(job, codec, text, shown)
    return chat_logprobs(codec, ids, told, job.wishes.logprobs)


def _completion_logprobs(job: Job, first: Job, echoed: str, text: str, shown: int) -> dict[str, Any] | None:
    told, codec, wishes = job.row.told, job.codec, job.wishes
    if wishes.logprobs < 0 or told is None or codec is None:
        return None
    ids, offsets = _shown_ids(job, codec, text, shown)
    parts = [(told, len(ids))]
    if wishes.echo and first.row.prompt_told is not None:
        prompt = _prompt_ids(job)
        offsets = [len(echoed) + offset for offset in offsets]
        offsets = [*text_offsets(codec, prompt, skip_special=wishes.skip_special), *offsets]
        ids, parts = [*prompt, *ids], [(first.row.prompt_told, len(prompt)), *parts]
    return completion_logprobs(codec, ids, offsets, parts, wishes.logprobs)


def _shown_ids(job: Job, codec: TextCodec, text: str, shown: int) -> tuple[list[int], list[int]]:
    """The ids that the text shows, and where each begins in it. A stop string ends both."""
    ids = job.row.generated[:shown].tolist()
    offsets = text_offsets(codec, ids, skip_special=job.wishes.skip_special)
    if job.stopped_at is not None:
        shown = sum(offset < len(text) for offset in offsets)
    return ids[:shown], offsets[:shown]


def _prompt_ids(job: Job) -> list[int]:
    ids = array.array("i")
    ids.frombytes(job.row.prompt)
    return ids.tolist()


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
