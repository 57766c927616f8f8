"""Records: the lines that a batch writes, in the OpenAI Batch shape plus `engine`, for answers and for errors alike."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from engine.batch.job import Job, Refusal, Source
from engine.faces.text import END_THINK

_encoder = msgspec.json.Encoder()


def render_answer(
    job: Job, *, model: str, reason: str, drop_last: bool, handoff_us: int | None, now: float
) -> tuple[bytes, int]:
    """The record of a finished request, with its line end, and the tokens of its completion.

    Args:
        job: no id of it follows.
        model: the served model's name.
        reason: `stop` or `length`, as the engine said; a stop string overrides it.
        drop_last: the last id ended the text and stands for nothing.
        handoff_us: as RequestFinished told it; None if the request ended on this side.
        now: trio time.
    """
    text = job.end_text(drop_last=drop_last)
    row = job.row
    completion = len(row.generated) if job.stopped_at is None else job.stopped_at
    started = row.started
    assert started is not None, "an answer without a token"
    cached, timings = started.cached_tokens, started.timings
    reason = "stop" if job.stopped_at is not None else reason
    engine: dict[str, Any] = {
        "line": job.source.line,
        "attempts": row.attempt,
        "prefill_rank": started.prefill_rank,
        "decode_rank": started.decode_rank,
        "pushed_bytes": started.pushed_bytes,
        "pushes": started.pushes,
        "post_us": started.post_us,
        "prompt_tokens": row.num_prompt,
        "completion_tokens": completion,
        "cached_tokens": cached,
        "queue_ms": timings.queue_us / 1000,
        "prefill_ms": timings.prefill_us / 1000,
        "push_ms": timings.push_us / 1000,
        "handoff_ms": None if handoff_us is None else handoff_us / 1000,
        "ttft_ms": _ms(job.answered_at - job.started_at) if job.answered_at else None,
        "total_ms": _ms(now - job.started_at),
        "seed": row.sampling.seed,
        "digest": job.source.digest,
    }
    if job.ignored:
        engine["ignored_fields"] = job.ignored
    token = secrets.token_hex(8)
    body = _chat_body(job, text, reason) if job.kind == "chat" else _completion_body(text, reason)
    body = {
        "id": f"{'chatcmpl' if job.kind == 'chat' else 'cmpl'}-{token}",
        "object": "chat.completion" if job.kind == "chat" else "text_completion",
        "created": int(time.time()),
        "model": model,
        **body,
        "usage": {
            "prompt_tokens": row.num_prompt,
            "completion_tokens": completion,
            "total_tokens": row.num_prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }
    response = {"status_code": 200, "request_id": f"req-{token}", "body": body}
    record = _record(job.source, response, None, engine)
    return _encoder.encode(record) + b"\n", completion


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


def _chat_body(job: Job, text: str, reason: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    if job.thinking:
        # The prompt opened the reasoning; an answer that never closed it is reasoning to its end.
        thought, mark, rest = text.partition(END_THINK)
        message |= {"content": rest if mark else "", "reasoning_content": thought}
    return {"choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}]}


def _completion_body(text: str, reason: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
