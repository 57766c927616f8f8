"""EngineSource: where the engine of a batch comes from, and what it says that it serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from engine.batch.options import BatchOptions
from engine.batch.prepare import PrepareLimits
from engine.errors import RequestRefused
from engine.faces.text import TextCodec
from transport.messages import HeadHello
from transport.wire import IDS_LIMIT


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSource:
    """Where the engine comes from.

    Attributes:
        open: gives the path of a request socket for as long as the block lasts.
        shared: it is a daemon that may come back, not an engine of this run's own.
        load_codec: the tokenizer of the model that a head serves; blocks.
        advice: what to do if nobody answers.
    """

    open: Callable[[], AbstractAsyncContextManager[str]]
    shared: bool
    load_codec: Callable[[HeadHello], TextCodec]
    advice: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """What an engine serves.

    Attributes:
        model: as the head names it.
        name: as answers name it.
        limits: of what lines may ask for.
        codec: the model's tokenizer.
    """

    model: str
    name: str
    limits: PrepareLimits
    codec: TextCodec


def load_served(hello: HeadHello, options: BatchOptions, source: EngineSource) -> Served:
    """What an engine serves, by its first word; loads the tokenizer. Blocks.

    Raises:
        RequestRefused: it is not the model that was asked for.
        ConfigError: the tokenizer is not there or not usable.
    """
    name = Path(hello.model).name
    names = tuple(dict.fromkeys((name, hello.model)))
    if options.model is not None and options.model not in names:
        raise RequestRefused("bad_request", f"--model {options.model}: this engine serves {name}")
    codec = source.load_codec(hello)
    limits = PrepareLimits(
        vocab_size=min(hello.vocab_size, codec.vocab_size),
        max_model_tokens=min(hello.max_model_tokens, IDS_LIMIT // 4),
        model_names=names,
    )
    return Served(hello.model, name, limits, codec)
