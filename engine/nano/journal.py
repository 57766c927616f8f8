"""The journal of a run: a line of figures every few seconds, and how long each stage took."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor


class Journal:
    """One line of figures every few seconds: to stdout and, as JSON, to a file."""

    def __init__(self, path: Path, every: float) -> None:
        self.path, self.every = path, every
        self.last = time.monotonic()
        self.tokens = 0
        self.sums: dict[str, Tensor] = {}
        self.count = 0

    def note(self, tokens: int, values: Mapping[str, Tensor]) -> None:
        """Adds one step's figures without waiting for the device."""
        self.tokens += tokens
        self.count += 1
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach().float()

    def due(self) -> bool:
        """Time for a line."""
        return time.monotonic() - self.last >= self.every and self.count > 0

    def write(self, **fields: Any) -> None:
        """Print the means since the last line."""
        means = {name: round(float(value) / max(self.count, 1), 4) for name, value in self.sums.items()}
        now = time.monotonic()
        line = {
            **{k: round(v, 5) if isinstance(v, float) else v for k, v in fields.items()},
            **means,
            "tokens_per_s": round(self.tokens / max(now - self.last, 1e-9)),
        }
        self.last, self.tokens, self.sums, self.count = now, 0, {}, 0
        text = json.dumps(line)
        print(text, flush=True)
        with self.path.open("a") as file:
            file.write(text + "\n")


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Prints how long a stage took."""
    begin = time.monotonic()
    print(f"{name} ..", flush=True)
    yield
    print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)
