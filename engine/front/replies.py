"""Answers that are no stream, and errors in the envelope that clients of the OpenAI surface know."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.front.ask import Failure

encoder = msgspec.json.Encoder()
Headers = list[tuple[bytes, bytes]]
JSON_TYPE: Headers = [(b"content-type", b"application/json")]


class HttpError(Exception):
    """A request that gets an error.

    Attributes:
        status: of HTTP.
        code: for programs.
        param: the body's field that it is about.
        retry_after_s: when to try again, where that makes sense.
        closes: the connection is of no further use.
        more: headers of its own.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        closes: bool = False,
        more: Headers | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.closes = closes
        self.more = more or []

    def body(self) -> bytes:
        """The envelope as JSON."""
        return encoder.encode(
            {
                "error": {
                    "message": self.message,
                    "type": _type_of(self.status),
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def headers(self) -> Headers:
        headers = [*JSON_TYPE, *self.more]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.closes:
            headers.append((b"connection", b"close"))
        return headers


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def refuse_field(code: str, message: str) -> HttpError:
    """400; the field is what stands before the first colon of the message, if that is one."""
    name = message.partition(":")[0]
    is_name = name.isidentifier()
    return HttpError(400, code, message, param=name if is_name else None)


def error_of(failure: Failure, retry_after_s: int) -> HttpError:
    """What a client is told of a request that the engine did not answer."""
    match failure.code:
        case "too_long":
            return HttpError(400, "context_length_exceeded", failure.message)
        case "bad_request":
            return HttpError(400, "invalid_field", failure.message)
        case "queue_full":
            return HttpError(429, "queue_full", failure.message, retry_after_s=retry_after_s)
        case _:
            wait = retry_after_s if failure.retryable else None
            return HttpError(503, failure.code, failure.message, retry_after_s=wait)


async def send_response(send: Any, status: int, body: bytes, headers: Headers) -> None:
    """A whole response: two ASGI messages."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Any, value: object, *, status: int = 200, headers: Headers | None = None) -> None:
    await send_response(send, status, encoder.encode(value), [*JSON_TYPE, *(headers or [])])
