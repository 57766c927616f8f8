"""Recall: the prompts that a prefill rank has handed off lately, for the turns that come back to it.

A decode rank knows what it generated, and only the length of the prompt before it. So the ids stay here until the turn
is offered, within bounds: those of requests that never come back, as failed ones, go when others come.
"""

from __future__ import annotations

import collections
import dataclasses

from engine.core.fingerprint import Digests
from engine.core.request import RequestKey

MOST_PROMPTS = 4096
MOST_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """A prompt as it was handed off.

    Attributes:
        ids: little-endian int32.
        digests: of them.
    """

    ids: bytes
    digests: Digests


class Recall:
    """See the module: the last `most_prompts` of `most_bytes` bytes of ids together."""

    def __init__(self, *, most_prompts: int = MOST_PROMPTS, most_bytes: int = MOST_BYTES) -> None:
        self._most_prompts, self._most_bytes = most_prompts, most_bytes
        self._told: collections.OrderedDict[RequestKey, Told] = collections.OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._told)

    def add(self, key: RequestKey, told: Told) -> None:
        self._told[key] = told
        self.num_bytes += len(told.ids)
        while len(self._told) > self._most_prompts or self.num_bytes > self._most_bytes:
            _, old = self._told.popitem(last=False)
            self.num_bytes -= len(old.ids)

    def take(self, key: RequestKey) -> Told | None:
        """The prompt of a request, which is recalled once; None if it is not known any more."""
        told = self._told.pop(key, None)
        if told is not None:
            self.num_bytes -= len(told.ids)
        return told

    def clear(self) -> None:
        self._told.clear()
        self.num_bytes = 0
