"""Grammars and Guides: which ids may come next in texts that have to follow a grammar, compiled once and kept.

A guide is one sequence's place in its grammar. It lives on the device and is moved on by each token that is drawn,
where it is drawn: so plans may be made before anybody else knows the token. Whoever goes on with a sequence elsewhere
makes a guide of its own from the ids that are there.

Compiling takes milliseconds, and up to a second for a hostile grammar; the library's limits bound it. A thread of its
own does that as soon as the request is heard of (`foresee`); a step waits only if it needs the grammar before.
"""

from __future__ import annotations

import collections
import concurrent.futures
import json
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from engine.errors import DeviceError

Ints = npt.NDArray[np.int64]
COMPILED_LIMIT = 32
"""Grammars that stay compiled, those that were asked for last."""
LIMITS = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
"""Of one grammar, beside the library's own; a lexer state is 1 to 2 kB."""


class Guide:
    """A sequence's place in its grammar. Belongs to the device's worker thread."""

    def __init__(self, matcher: LLMatcher, eos_id: int) -> None:
        """Takes the matcher."""
        self._matcher = matcher
        self._eos_id = eos_id

    @torch.inference_mode()
    def restrict(self, logits: Tensor) -> None:
        """-inf for ids that may not come next. End of text may come exactly where the grammar may end; where it can not
        be followed further, for want of the library's budget or after ids that break it, nothing else may.

        Args:
            logits: float32[vocab].
        """
        allowed = np.zeros(len(logits), np.bool_)
        if not self._matcher.is_error():
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
            count = min(len(bits), len(allowed))
            allowed[:count] = bits[:count]
        if self._matcher.is_error() or not allowed.any():
            allowed[:] = False
            allowed[self._eos_id] = True
        logits.masked_fill_(torch.from_numpy(~allowed), -torch.inf)

    def take(self, token: int) -> None:
        """The token was drawn."""
        self._matcher.consume_token(token)


class Grammars:
    """See the module. `foresee` and `close` may be called by any thread, `start` by the worker."""

    def __init__(self, directory: Path, vocab_size: int, eos_id: int) -> None:
        """Args:
        directory: the model's, with its `tokenizer.json`, which is read when the first grammar comes.
        vocab_size: of the logits; ids that the tokenizer lacks are never allowed.
        """
        self._directory = directory
        self._vocab_size = vocab_size
        self._eos_id = eos_id
        self._lock = threading.Lock()
        self._compiled: collections.OrderedDict[str, concurrent.futures.Future[LLMatcher]] = collections.OrderedDict()
        self._compiler = concurrent.futures.ThreadPoolExecutor(1, "grammars")
        self._tokenizer: LLTokenizer | None = None

    def foresee(self, grammar: str) -> concurrent.futures.Future[LLMatcher]:
        """Compiles it unless it is compiled. Never waits.

        Raises:
            DeviceError: after `close`.
        """
        with self._lock:
            future = self._compiled.get(grammar)
            if future is None:
                try:
                    future = self._compiled[grammar] = self._compiler.submit(self._compile, grammar)
                except RuntimeError as error:
                    raise DeviceError(f"no grammar is compiled any more: {error}") from error
                if len(self._compiled) > COMPILED_LIMIT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return future

    def start(self, grammar: str, said: Ints) -> Guide:
        """A guide for a text of which these ids are there.

        Raises:
            DeviceError: the tokenizer can not be used.
        """
        guide = Guide(self.foresee(grammar).result().deep_copy(), self._eos_id)
        for token in said.tolist():
            guide.take(token)
        return guide

    def find_fault(self) -> str:
        """Why no text can follow a grammar here; empty if they can. Waits until the tokenizer is read.

        Raises:
            DeviceError: after `close`.
        """
        try:
            self._compiler.submit(self._read_tokenizer).result()
        except RuntimeError as error:
            raise DeviceError(f"no tokenizer is read any more: {error}") from error
        except DeviceError as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Compiles nothing from now on."""
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._read_tokenizer(), grammar, log_level=0, limits=LIMITS)

    def _read_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return self._tokenizer

    def _load_tokenizer(self) -> LLTokenizer:
        path = self._directory / "tokenizer.json"
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            for entry in tree["added_tokens"]:
                # No text stands for a named token: a grammar has to name it.
                entry["special"] = True
            return LLTokenizer(json.dumps(tree), n_vocab=self._vocab_size, eos_token=self._eos_id)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DeviceError(f"{path}: grammars need the model's tokenizer ({error})") from error


class Guides:
    """The guides of decode rows by slab. Belongs to the device's worker thread."""

    def __init__(self, grammars: Grammars | None) -> None:
        """`grammars`: borrowed; None where no row has one."""
        self._grammars = grammars
        self._slab_to_guide: dict[int, tuple[bytes, Guide]] = {}

    def find(self, slab: int, grammar: str, said: bytes) -> Guide:
        """The guide of a sequence on its way; `said` as in `core.plan.DecodeRow`."""
        known = self._slab_to_guide.get(slab)
        if known is None or known[0] is not said:
            known = self._slab_to_guide[slab] = said, self.start(grammar, np.frombuffer(said, "<i4").astype(np.int64))
        return known[1]

    def start(self, grammar: str, said: Ints) -> Guide:
        """See `Grammars.start`.

        Raises:
            DeviceError: this device has no grammars.
        """
        if self._grammars is None:
            raise DeviceError("a row has a grammar, and this device was opened without any")
        return self._grammars.start(grammar, said)

    def forget(self, slabs: Ints) -> None:
        """The slabs are somebody else's now."""
        for slab in slabs.tolist():
            self._slab_to_guide.pop(slab, None)
