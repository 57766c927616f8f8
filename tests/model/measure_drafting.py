"""Measures tokens per second of one rank's decode steps by sequences and drafts. Run by hand, on a quiet machine:

    python -m tests.model.measure_drafting --validation validation.jsonl.xz [--output FILE]

Plans are those of the production planner and run on the production device's step runner, one after the other in one
thread: no loop, no head. Seconds are of the thread's processor time. All numbers of drafts take turns, so that what
else the machine does hits all of them alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from engine.config import NANO, DraftConfig, Limits, RankConfig, model_directory
from engine.core.plan import PrefillChunk, StepPlan
from engine.core.request import Sequence
from engine.core.running import Running
from engine.core.schedule import Schedule, StepLimits, apply_result, plan_step
from engine.model.device import _load
from engine.model.passes import StepRunner, copy_plan
from engine.nano.acceptance import OPENING, PROSE
from engine.nano.data import BOS
from engine.nano.heldout import read_validation
from engine.nano.measure import chat_prompts
from transport.messages import ReservePages, Sampling

PAGE_TOKENS, PAGES = 64, 8
ROWS = (1, 2, 4, 8, 32)
DRAFTS = (0, 1, 2, 3, 5)
BY_REJECTION = (2, 3)
"""Drafts with which the other rule is measured as well, where texts are drawn."""
MOST_ROWS, SETS = max(ROWS), 4


def read_prompts(path: Path) -> list[list[int]]:
    """Held-out openings, half chat and half prose, in turns."""
    tokenizer = Tokenizer.from_file(str(model_directory(NANO) / "tokenizer.json"))
    bos = tokenizer.token_to_id(BOS)
    documents = read_validation(path)
    prose = [text for domain in PROSE for text in documents[domain][:4]]
    opened = [[bos, *tokenizer.encode(text, add_special_tokens=False).ids[:OPENING]] for text in prose]
    chat = chat_prompts(documents, tokenizer, MOST_ROWS, OPENING)
    return [prompt for pair in zip(chat, opened, strict=False) for prompt in pair]


class Rank:
    """One device, without its thread."""

    def __init__(self) -> None:
        limits = Limits(decode_rows=MOST_ROWS)
        config = RankConfig(
            "decode", NANO, "cpu", "tcp", PAGE_TOKENS, PAGE_TOKENS * PAGES, PAGES * MOST_ROWS, MOST_ROWS, "float32", 1,
            0, "", limits, draft=DraftConfig(max(DRAFTS), MOST_ROWS),
        )  # fmt: skip
        model, self.info, _, proposer = _load(config, lambda *_: None, False, "", None)
        self.runners = {rejects: StepRunner(model, self.info, proposer, rejects=rejects) for rejects in (False, True)}

    def measure(
        self, prompts: list[list[int]], drafts: int, rejects: bool, temperature: float, tokens: int
    ) -> tuple[float, float]:
        """(tokens per second, tokens of a sequence in a step) until so many have come for each sequence."""
        runner = self.runners[rejects]
        limits = StepLimits(512, PAGE_TOKENS, MOST_ROWS, frozenset(), drafts=drafts, draft_rows=MOST_ROWS)
        state = Schedule(running=Running(drafts, MOST_ROWS))
        for at, prompt in enumerate(prompts):
            sampling = Sampling(max_tokens=350, temperature=temperature, seed=100 + at, ignore_eos=True)
            pages = tuple(range(at * PAGES, (at + 1) * PAGES))
            chunk = PrefillChunk(at, at, 0, memoryview(array("i", prompt).tobytes()), pages, sampling)
            (first,) = runner.run(copy_plan(StepPlan(1, (chunk,), ()))).chunk_tokens
            assert first is not None
            sequence = Sequence((at, 1), ReservePages(at, 1, 0, len(prompt), 0, sampling), 350, 0, at)
            sequence.pages, sequence.slab, sequence.sampling = pages, at, sampling
            sequence.count, sequence.next_token = 1, first
            state.running.join(sequence)
        came = steps = 0
        began = time.thread_time()
        while came < tokens * len(prompts):
            plan = plan_step(state, limits)
            assert plan is not None
            rows = apply_result(state, runner.run(copy_plan(plan)), limits).rows
            assert rows is not None and not rows.ended
            came += len(rows.tokens)
            steps += 1
        return came / (time.thread_time() - began), came / steps / len(prompts)


def run(options: argparse.Namespace) -> dict[str, Any]:
    prompts = read_prompts(options.validation)
    rank = Rank()
    found: dict[str, Any] = {}
    for temperature in (0.0, 0.7):
        ways = {str(drafts): (drafts, False) for drafts in DRAFTS}
        if temperature:
            ways |= {f"{drafts} by rejection": (drafts, True) for drafts in BY_REJECTION}
        for rows in options.rows:
            speeds: dict[str, list[float]] = {way: [] for way in ways}
            brought: dict[str, list[float]] = {way: [] for way in ways}
            groups = [prompts[at : at + rows] for at in range(0, max(rows, SETS * rows), rows)][: -(-8 // rows)]
            for _ in range(options.repeats):
                for way, rule in ways.items():
                    measured = [rank.measure(group, *rule, temperature, options.tokens) for group in groups]
                    speeds[way].append(statistics.harmonic_mean([speed for speed, _ in measured]))
                    brought[way].append(statistics.mean([count for _, count in measured]))
            plain = np.array(speeds["0"])
            for way in ways:
                ratios = np.array(speeds[way]) / plain
                found.setdefault(f"T={temperature:g}", {}).setdefault(str(rows), {})[way] = {
                    "tokens_per_s": [round(speed, 1) for speed in speeds[way]],
                    "tokens_per_step": round(statistics.mean(brought[way]), 3),
                    "ratio": [round(float(f), 3) for f in (np.median(ratios), ratios.min(), ratios.max())],
                }
                print(temperature, rows, way, found[f"T={temperature:g}"][str(rows)][way], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24, help="of each sequence in a sample")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, choices=ROWS, help="sequences in a step")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    record = {
        "what": "tokens per second of a decode rank's steps, by sequences and drafts; the bundled model",
        "command": "python -m tests.model.measure_drafting --validation validation.jsonl.xz"
        f" --repeats {options.repeats} --tokens {options.tokens}",
        "notes": [
            "tokens_per_s: of the thread's processor time, one figure for each repeat",
            "ratio: median, least and largest of those to 0 drafts in the same repeat",
            "prompts: held-out openings, half chat and half prose; of 1, 2 and 4 sequences several sets in turn",
        ],
        "results": run(options),
    }
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
