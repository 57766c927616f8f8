"""Whether a submission can be computed at all: lengths, ids and sampling against the model's bounds."""

from __future__ import annotations

import numpy as np

from engine.core.request import find_unfit_sampling
from engine.errors import RequestRefused
from transport.messages import Submit


def check_submission(message: Submit, blob: bytes | memoryview, *, vocab_size: int, max_model_tokens: int) -> None:
    """Refuses what no rank could serve. Ids are looked at as columns: 13 us for 128 K of them.

    Args:
        blob: int32[num_ids], prompt and generated ids.

    Raises:
        RequestRefused: `bad_request` or `too_long`, with the numbers.
    """
    prompt = len(blob) // 4 - message.generated
    asked = message.sampling.max_tokens
    if len(blob) % 4 or prompt < 1:
        raise RequestRefused("bad_request", "the prompt is empty")
    if message.generated >= asked:
        raise RequestRefused("bad_request", f"{message.generated} of max_tokens {asked} are generated already")
    if message.sampling.min_tokens > asked:
        raise RequestRefused("bad_request", f"min_tokens {message.sampling.min_tokens} is more than max_tokens {asked}")
    unfit = find_unfit_sampling(message.sampling, vocab_size)
    if unfit is not None:
        raise RequestRefused("bad_request", unfit)
    if prompt + asked > max_model_tokens:
        # Clients of benchmarks look for the words "maximum context length".
        raise RequestRefused(
            "too_long",
            f"maximum context length is {max_model_tokens} tokens, but {prompt} prompt tokens and max_tokens {asked}"
            f" make {prompt + asked}",
        )
    ids = np.frombuffer(blob, "<i4")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise RequestRefused(
            "bad_request", f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}"
        )
