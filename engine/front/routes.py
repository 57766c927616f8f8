"""Routes: what can be asked beside completions: models, health, metrics, tokens; and the list of all routes."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.routing import Route

from engine.batch.fields import FieldRefused, read_fields
from engine.errors import RequestRefused
from engine.faces.body import BodyRefused, encode_messages, encode_prompt
from engine.faces.logprobs import token_text
from engine.faces.text import BOS, EOS
from engine.front.app import Front, exchange_of
from engine.front.bodies import Served, check_model, ignored_header, read_body, read_object
from engine.front.completions import Completions
from engine.front.desk import why_not_ready
from engine.front.replies import HttpError, refuse_field, send_json, send_response
from engine.version import VERSION

METRICS_TYPE = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
Handler = Callable[[Front, Any, Any, Any], Awaitable[None]]
_as_ids = msgspec.json.Decoder(list[int])
_as_bool = msgspec.json.Decoder(bool)


class _Endpoint:
    """A function as an ASGI application; a bare one the router would take for a view of its own kind."""

    def __init__(self, front: Front, name: str, handler: Handler) -> None:
        self._front = front
        self._name = name
        self._handler = handler

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange_of(scope).route = self._name
        await self._handler(self._front, scope, receive, send)


def list_routes(front: Front) -> list[Route]:
    """Every route. Nothing here changes the engine; that is for operators, on their own socket."""
    plain: tuple[tuple[str, str, str, Handler], ...] = (
        ("/v1/models", "models", "GET", _models),
        ("/v1/models/{model:path}", "models", "GET", _model),
        ("/health", "health", "GET", _health),
        ("/ready", "ready", "GET", _ready),
        ("/metrics", "metrics", "GET", _metrics),
        ("/version", "version", "GET", _version),
        ("/tokenize", "tokenize", "POST", _tokenize),
        ("/detokenize", "detokenize", "POST", _detokenize),
        ("/tokenizer_info", "tokenizer_info", "GET", _tokenizer_info),
    )
    routes = [
        Route("/v1/chat/completions", Completions(front, is_chat=True), methods=["POST"]),
        Route("/v1/completions", Completions(front, is_chat=False), methods=["POST"]),
    ]
    routes += [Route(path, _Endpoint(front, name, handler), methods=[method]) for path, name, method, handler in plain]
    return routes


def _describe_model(front: Front) -> dict[str, Any]:
    served = front.served
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "engine",
        "root": served.names[-1],
        "parent": None,
        "max_model_len": served.bounds.max_model_tokens,
    }


async def _models(front: Front, scope: Any, receive: Any, send: Any) -> None:
    await send_json(send, {"object": "list", "data": [_describe_model(front)]})


async def _model(front: Front, scope: Any, receive: Any, send: Any) -> None:
    asked = scope["path_params"]["model"]
    if asked not in front.served.names:
        raise HttpError(404, "model_not_found", f"the model {asked[:128]!r} does not exist", param="model")
    await send_json(send, _describe_model(front))


async def _health(front: Front, scope: Any, receive: Any, send: Any) -> None:
    await send_json(send, {"status": "ok"})


async def _ready(front: Front, scope: Any, receive: Any, send: Any) -> None:
    report = None if front.is_draining else await front.desk.status()
    reasons = why_not_ready(report, is_draining=front.is_draining, progress_s=front.progress_s)
    if not reasons and front.link.hello is None:
        reasons = [{"code": "unreachable", "message": "this front has no connection to the engine's head"}]
    degraded = [] if report is None else list(report.degraded)
    answer = {"ready": not reasons, "reasons": reasons, "degraded": degraded}
    await send_json(send, answer, status=503 if reasons else 200)


async def _metrics(front: Front, scope: Any, receive: Any, send: Any) -> None:
    text = await front.desk.metrics() + front.counts.metrics_text()
    await send_response(send, 200, text.encode(), METRICS_TYPE)


async def _version(front: Front, scope: Any, receive: Any, send: Any) -> None:
    await send_json(send, {"version": VERSION})


async def _tokenize(front: Front, scope: Any, receive: Any, send: Any) -> None:
    exchange = exchange_of(scope)
    with front.body_room(exchange.headers):
        data = await read_body(receive, exchange.headers, front.http.body_bytes)
        answer, ignored = await front.prepare(len(data), functools.partial(_tokens_of, data, front.served))
    await send_json(send, answer, headers=ignored_header(ignored))


def _tokens_of(data: bytes, served: Served) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Ids of a `prompt` or of `messages`."""
    fields = read_object(data)
    check_model(fields, served)
    wants_texts = _flag(fields, "return_token_strs")
    is_chat = "messages" in fields
    try:
        values, ignored = read_fields(fields, {}, chat=is_chat)
        if is_chat:
            prompt = encode_messages(served.codec, values, served.bounds)
        elif isinstance(values.get("prompt"), str):
            add_special = values.get("add_special_tokens", True)
            prompt = encode_prompt(served.codec, values["prompt"], served.bounds, add_special=add_special)
        else:
            raise RequestRefused("bad_request", "prompt: a text is needed, or messages")
    except (BodyRefused, FieldRefused) as error:
        raise refuse_field(error.field_code, str(error)) from None
    except RequestRefused as error:
        raise refuse_field("invalid_field", str(error)) from None
    ids = memoryview(prompt).cast("i").tolist()
    texts = [token_text(served.codec, token) for token in ids] if wants_texts else None
    answer = {
        "count": len(ids), "max_model_len": served.bounds.max_model_tokens, "tokens": ids, "token_strs": texts,
    }  # fmt: skip
    return answer, ignored


async def _detokenize(front: Front, scope: Any, receive: Any, send: Any) -> None:
    exchange = exchange_of(scope)
    with front.body_room(exchange.headers):
        data = await read_body(receive, exchange.headers, front.http.body_bytes)
        answer = await front.prepare(len(data), functools.partial(_text_of, data, front.served))
    await send_json(send, answer)


def _text_of(data: bytes, served: Served) -> dict[str, Any]:
    """The text of `tokens`, named ones included."""
    fields = read_object(data)
    check_model(fields, served)
    if "tokens" not in fields:
        raise refuse_field("invalid_field", "tokens: missing")
    try:
        ids = _as_ids.decode(fields["tokens"])
    except msgspec.DecodeError as error:
        raise refuse_field("invalid_field", f"tokens: {error}") from None
    if not all(0 <= token < served.bounds.vocab_size for token in ids):
        raise refuse_field("invalid_field", f"tokens: ids must be in [0, {served.bounds.vocab_size})")
    return {"prompt": served.codec.decode(ids, skip_special=False)}


async def _tokenizer_info(front: Front, scope: Any, receive: Any, send: Any) -> None:
    """What clients who tokenize here have to know of the tokenizer. Chats are put together by the engine's own code,
    so there is no template to give away."""
    codec = front.served.codec
    answer = {
        "bos_token": BOS, "bos_token_id": codec.bos_id, "eos_token": EOS, "eos_token_id": codec.eos_id,
        "add_bos_token": True, "add_eos_token": False, "vocab_size": codec.vocab_size,
        "model_max_length": front.served.bounds.max_model_tokens, "chat_template": None,
    }  # fmt: skip
    await send_json(send, answer)


def _flag(fields: Mapping[str, msgspec.Raw], name: str) -> bool:
    raw = fields.get(name)
    if raw is None or bytes(raw) == b"null":
        return False
    try:
        return _as_bool.decode(raw)
    except msgspec.DecodeError as error:
        raise refuse_field("invalid_field", f"{name}: {error}") from None
