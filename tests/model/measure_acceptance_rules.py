"""Measures tokens of a sequence in a step by the rules of `draft.acceptance`, chat and prose apart. Run by hand:

    python -m tests.model.measure_acceptance_rules --validation validation.jsonl.xz

Requests run on the production device as a step loop runs them, two steps in its queue, to the end of their text or so
many tokens. What is counted does not hang on how fast the machine is.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import trio
from tokenizers import Tokenizer

from engine.config import NANO, model_directory
from engine.nano.acceptance import PAGE_TOKENS, openings
from tests.e2e.truth import load_nano
from tests.model.paged_cases import Source
from tests.model.speculation_cases import Host, Request, open_device, run_host
from transport.messages import Sampling

TEMPERATURE = 0.7


def make_requests(prompts: list[list[int]], new_tokens: int) -> list[Request]:
    requests, used = [], 0
    for slab, prompt in enumerate(prompts):
        count = -(-(len(prompt) + new_tokens) // PAGE_TOKENS)
        sampling = Sampling(temperature=TEMPERATURE, seed=100 + slab)
        requests.append(
            Request(slab, tuple(range(used, used + count)), np.array(prompt, np.int64), sampling, new_tokens)
        )
        used += count
    return requests


async def measure(source: Source, prompts: list[list[int]], new_tokens: int, drafts: int, rejects: bool) -> Any:
    """Rows, tokens of a row, and how often the draft at each place held if all before it did."""
    eos = source.shape.eos_token_id
    requests = make_requests(prompts, new_tokens)
    device = open_device(source, requests, "own", eos, page_tokens=PAGE_TOKENS, rejects=rejects)
    host = Host(requests, (eos,), [drafts], 1, begin=len(requests))
    await run_host(device, host)
    await device.aclose()
    # A sequence's first row has none behind it, and its last ones fewer.
    full = {held: times for (tried, held), times in host.figures.accepted.items() if tried == drafts}
    reached = np.array([sum(times for held, times in full.items() if held >= place) for place in range(drafts + 1)])
    return {
        "rows": int(reached[0]),
        "tokens_per_step": round(1 + float(reached[1:].sum() / reached[0]), 4),
        "per_position": [round(float(share), 4) for share in reached[1:] / reached[:-1]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=32, help="openings of each domain")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 3])
    options = parser.parse_args()
    source = Source(*load_nano())
    tokenizer = Tokenizer.from_file(str(model_directory(NANO) / "tokenizer.json"))
    found: dict[str, Any] = {}
    for domain, prompts in openings(options.validation, tokenizer, options.prompts).items():
        for drafts in options.drafts:
            for rule, rejects in (("equal", False), ("rejection", True)):
                result = trio.run(measure, source, prompts, options.new_tokens, drafts, rejects)
                found.setdefault(domain, {}).setdefault(rule, {})[str(drafts)] = result
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
