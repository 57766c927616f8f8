"""How many drafted tokens hold, by rule, temperature and number of drafts; the command that measures it.

`python -m engine.nano.acceptance --validation FILE` continues held-out openings with the engine's own paged path and
drafter, step by step as a decode rank does: verify, keep, propose. What is measured:

- `equal`: a draft holds while it is the token that the target draws there itself, the engine's rule. The drafter
  proposes its likeliest token, or draws with the uniform number that the target will use (`coupled`).
- `rejection`: drafts are drawn from the drafter's own distribution, or are its likeliest token, and verified by
  `engine.model.verification`.
- `whole block`: the drafter always runs a block of full length, of which the first so many rows are used.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.errors import ConfigError
from engine.model.checkpoint import load_checkpoint
from engine.model.drafting import Pick, Proposer
from engine.model.engram import load_tables
from engine.model.kv import Arena, plan_layout
from engine.model.proposers import make_proposer
from engine.model.rows import RowBatch
from engine.model.sampling import LANE_DRAFT, draw_uniform, process_logits, sample_tokens
from engine.model.transformer import PagedTransformer
from engine.model.verification import Verdict, draw_uniforms, verify_drawn, verify_greedy, verify_point
from engine.nano.data import BOS
from engine.nano.heldout import read_validation
from engine.nano.measure import ASSISTANT, SAMPLE_PROMPTS, USER, chat_prompts
from transport.messages import Sampling

Ints = npt.NDArray[np.int64]
PROSE = ("austen", "bible_web", "chitchat", "jargon", "postgres_docs", "apache_docs")
OPENING = 96
"""Tokens of a prose document that are continued."""
PAGE_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Rule:
    """One way to draft and to verify; see the module."""

    name: str
    verifies: Literal["equal", "rejection"]
    picks: Literal["likeliest", "drawn"]
    whole_block: bool = False


GREEDY = (
    Rule("equal, likeliest", "equal", "likeliest"),
    Rule("equal, likeliest, whole block", "equal", "likeliest", whole_block=True),
)
DRAWN = (
    *GREEDY,
    Rule("equal, coupled", "equal", "drawn"),
    Rule("rejection, drawn", "rejection", "drawn"),
    Rule("rejection, likeliest", "rejection", "likeliest"),
)


@dataclasses.dataclass
class Tally:
    """Sums over steps of sequences.

    Attributes:
        reached, held: per place of a draft, how often all before it held, and how often it did as well.
        steps, tokens: steps of a sequence, and what they brought.
    """

    reached: Ints
    held: Ints
    steps: int = 0
    tokens: int = 0

    def add(self, held: int, tokens: int) -> None:
        """One step of a sequence; with as many tokens as drafts that held, it ended in one of these."""
        self.reached[: min(held + 1, tokens)] += 1
        self.held[:held] += 1
        self.steps += 1
        self.tokens += tokens

    def report(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "tokens_per_step": round(self.tokens / max(self.steps, 1), 4),
            "per_position": [
                round(h / max(r, 1), 4) for h, r in zip(self.held.tolist(), self.reached.tolist(), strict=True)
            ],
            "steps": self.steps,
        }


class Bench:
    """Prompts on a model of their own, computed once for each temperature and continued as often as wanted."""

    def __init__(self, directory: Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        """Loads the model.

        Raises:
            ConfigError: the checkpoint can not be used or has no drafter.
        """
        shape, weights = load_checkpoint(directory)
        longest = max(map(len, prompts)) + new_tokens + 16
        each = -(-longest // PAGE_TOKENS)
        arena = Arena(plan_layout(shape, PAGE_TOKENS), each * len(prompts), len(prompts), longest + shape.window)
        self.model = PagedTransformer(shape, weights, load_tables(directory, shape), arena, max_tokens=longest)
        proposer = make_proposer(self.model, weights)
        if proposer is None:
            raise ConfigError(f"{directory} has no drafter")
        self.proposer: Proposer = proposer
        self.prompts = [np.array(prompt, np.int64) for prompt in prompts]
        self.tables = np.arange(each * len(prompts)).reshape(len(prompts), each)
        self.new_tokens = new_tokens

    def fill(self, temperature: float) -> tuple[list[Sampling], Ints, Tensor]:
        """Computes the prompts: settings and first token of each, and the slabs as they are then."""
        settings = [Sampling(temperature=temperature, seed=100 + at) for at in range(len(self.prompts))]
        firsts = []
        for at, prompt in enumerate(self.prompts):
            batch = RowBatch(np.array([at]), np.zeros(1, np.int64), prompt[None], self.tables[at : at + 1])
            logits = self.model.forward(batch, [len(prompt) - 1])
            firsts.append(int(sample_tokens(logits, [settings[at]], [len(prompt)], ())[0]))
            self.proposer.keep(None, np.array(firsts[-1:]))
        return settings, np.array(firsts), self.model.arena.slabs.clone()

    def run(self, rule: Rule, drafts: int, settings: list[Sampling], firsts: Ints, slabs: Tensor) -> Tally:
        """Continues all prompts by one rule."""
        self.model.arena.slabs.copy_(slabs)
        tally = Tally(np.zeros(drafts, np.int64), np.zeros(drafts, np.int64))
        eos = self.model.shape.eos_token_id
        which = np.flatnonzero(firsts != eos)
        anchors, positions = firsts[which], np.array([len(prompt) for prompt in self.prompts])[which]
        ends = positions + self.new_tokens
        while len(which):
            rows = [settings[at] for at in which.tolist()]
            tokens, shares = self._draft(rule, drafts, which, anchors, positions, rows)
            batch = RowBatch(which, positions, np.concatenate((anchors[:, None], tokens), 1), self.tables[which])
            logits = self.model.forward(batch).view(len(which), drafts + 1, -1)
            verdict = judge(rule, logits, shares, tokens, positions, rows)
            held = verdict.accepted.numpy()
            anchors = verdict.tokens.numpy()[np.arange(len(which)), held]
            self.proposer.keep(held + 1, anchors)
            goes_on = np.ones(len(which), bool)
            for row, line in enumerate(verdict.tokens.tolist()):
                found = line[: int(held[row]) + 1]
                if eos in found:
                    found, goes_on[row] = found[: found.index(eos) + 1], False
                tally.add(min(int(held[row]), len(found)), len(found))
            positions = positions + held + 1
            goes_on &= positions < ends
            which, anchors, positions, ends = which[goes_on], anchors[goes_on], positions[goes_on], ends[goes_on]
        return tally

    def _draft(
        self, rule: Rule, drafts: int, which: Ints, anchors: Ints, positions: Ints, rows: list[Sampling]
    ) -> tuple[Ints, Tensor | None]:
        """Drafts int64[n, drafts]; if drawn for rejection, the distributions float64[n, drafts, vocab] of them too."""
        shares: list[Tensor] = []

        def draw(logits: Tensor, places: Ints) -> Ints:
            if rule.verifies == "equal":
                return sample_tokens(logits.clone(), rows, places.tolist(), ())
            shares.append(process_logits(logits, rows))
            uniform = torch.from_numpy(draw_uniform([row.seed for row in rows], places, LANE_DRAFT)).unsqueeze(1)
            chosen: Ints = (shares[-1].cumsum(1) <= uniform).sum(1).clamp(max=logits.shape[1] - 1).numpy()
            return chosen

        pick: Pick | None = draw if rule.picks == "drawn" else None
        count = self.proposer.max_drafts if rule.whole_block else drafts
        tokens = self.proposer.propose(which, anchors, positions, count, pick=pick).tokens[:, :drafts]
        return tokens, torch.stack(shares, 1) if shares else None


def judge(
    rule: Rule, logits: Tensor, shares: Tensor | None, tokens: Ints, positions: Ints, rows: list[Sampling]
) -> Verdict:
    """What of the drafts holds: float32[n, drafts + 1, vocab] logits of the target, int64[n, drafts] drafts."""
    n, count = logits.shape[:2]
    each = [row for row in rows for _ in range(count)]
    drafts = torch.from_numpy(tokens)
    if rule.verifies == "rejection":
        target = process_logits(logits.flatten(0, 1), each).view(n, count, -1)
        uniforms = draw_uniforms([row.seed for row in rows], positions + 1, count - 1)
        if shares is None:
            return verify_point(target, drafts, uniforms)
        return verify_drawn(target, shares, drafts, uniforms)
    places = (positions[:, None] + 1 + np.arange(count)).ravel().tolist()
    own = torch.from_numpy(sample_tokens(logits.flatten(0, 1), each, places, ())).view(n, count)
    # What the target draws, as a point mass in each row: then the greedy rule is that of equal draws.
    return verify_greedy(torch.nn.functional.one_hot(own, logits.shape[2]).float(), drafts)


def openings(validation: Path | None, tokenizer: Tokenizer, count: int) -> dict[str, list[list[int]]]:
    """What is continued, by domain; without held-out text, what the repository has."""
    if validation is None:
        chat = [f"{BOS}{USER}{prompt}{ASSISTANT}" for prompt in SAMPLE_PROMPTS]
        return {"chat": [tokenizer.encode(text, add_special_tokens=False).ids for text in chat[:count]]}
    documents = read_validation(validation)
    prose = []
    for texts in zip(*[documents[name] for name in PROSE if name in documents], strict=False):
        encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        prose += [ids[:OPENING] for ids in encoded if len(ids) > OPENING]
    return {"chat": chat_prompts(documents, tokenizer, count, 256), "prose": prose[:count]}


def measure(
    directory: Path, domains: dict[str, list[list[int]]], new_tokens: int, lengths: Sequence[int]
) -> dict[str, Any]:
    """Everything, by domain, temperature, rule and number of drafts."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for domain, prompts in domains.items():
        bench = Bench(directory, prompts, new_tokens)
        for temperature, rules in ((0.0, GREEDY), (0.7, DRAWN)):
            filled = bench.fill(temperature)
            found = results.setdefault(domain, {}).setdefault(f"T={temperature:g}", {})
            for rule in rules:
                began = time.monotonic()
                tallies = {
                    str(drafts): bench.run(rule, drafts, *filled).report()
                    for drafts in lengths
                    if not (rule.whole_block and drafts == bench.proposer.max_drafts)
                }
                found[rule.name] = tallies
                brief = {drafts: tally["tokens_per_step"] for drafts, tally in tallies.items()}
                print(f"{domain}, T={temperature:g}, {rule.name}: {brief}, {time.monotonic() - began:.0f} s",
                      file=sys.stderr, flush=True)  # fmt: skip
    return results


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m engine.nano.acceptance", description=main.__doc__)
    parser.add_argument(
        "--validation", type=Path, help="validation.jsonl.xz of the corpus; sample prompts unless given"
    )
    parser.add_argument("--model", type=Path, default=Path(__file__).parent, help="checkpoint folder with tokenizer")
    parser.add_argument("--prompts", type=int, default=24, help="openings of each domain")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens to continue each by")
    parser.add_argument("--drafts", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 3, 4, 5])
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure on a CPU how many drafted tokens hold: JSON on stdout."""
    options = parse(arguments)
    try:
        tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
        domains = openings(options.validation, tokenizer, options.prompts)
        results = measure(options.model, domains, options.new_tokens, options.drafts)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    counts = {domain: len(prompts) for domain, prompts in domains.items()}
    print(json.dumps({"prompts": counts, "new_tokens": options.new_tokens, "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
