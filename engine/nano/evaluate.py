"""Bits per byte of held-out text, and the command that measures the model card's again.

`python -m engine.nano.evaluate --validation FILE` reads a checkpoint folder as it is shipped, with the engine's own
reader, and runs it through `engine.model.reference`: code that had no part in training or in the card's figures, which
come from the training forward on the training device. It needs a CPU and about a second for 500 tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from engine.errors import ConfigError
from engine.model import reference
from engine.model.checkpoint import load_checkpoint
from engine.model.engram import load_tables
from engine.model.layers import linear
from engine.nano.heldout import HeldOut, held_out_rows, read_validation

# Tokens per row of the card's figures: a longer context would lower them.
LENGTH = 1024
# Largest difference to a recorded figure, in bits per byte. The card's run used TensorFloat32 products.
TOLERANCE = 0.02

# The normed hidden states of a forward: int64[B, L] to float[B, L, hidden].
Hidden = Callable[[Tensor], Tensor]


@torch.no_grad()
def bits_per_byte(hidden_of: Hidden, head: Tensor, held_out: HeldOut, rows: int, multiple: int) -> float:
    """Bits that a model needs for a byte of text.

    Args:
        hidden_of: the model up to its head; called with `rows` rows or fewer, on the head's device.
        head: float[vocab, hidden].
        held_out: the text. Its row length must be a multiple of `multiple`.
        rows: rows per forward.
        multiple: the length of every forward is a multiple of it.
    """
    # Rows of like length together: everything is causal, so a batch is cut behind its longest row.
    order = held_out.counts.argsort()
    nats = 0.0
    for part in order.split(rows):
        counts = held_out.counts[part]
        length = max(1, math.ceil((int(counts.max()) - 1) / multiple)) * multiple
        tokens = held_out.tokens[part, : length + 1].to(head.device)
        logits = linear(hidden_of(tokens[:, :-1]), head).float()
        nll = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(part), length)
        real = torch.arange(length, device=head.device) < (counts.to(head.device) - 1).unsqueeze(1)
        nats += float((nll * real).sum(dtype=torch.float64))
    return nats / math.log(2) / int(held_out.num_bytes.sum())


def evaluate(
    model: Path, validation: Path, *, selection: reference.Selection, domains: list[str] | None, max_rows: int | None
) -> dict[str, float]:
    """Bits per byte by domain, one line on stderr for each.

    Args:
        model: checkpoint folder with tokenizer.json.
        validation: `validation.jsonl.xz` of the corpus.
        selection: "topk" for the trained indexer's choice, or "dense".
        domains: which of them; None for all.
        max_rows: first rows of each domain; None for all.

    Raises:
        ConfigError: the checkpoint is not readable, or a domain is not in the file.
    """
    shape, weights = load_checkpoint(model)
    tables = load_tables(model, shape)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    documents = read_validation(validation)
    for name in domains or ():
        if name not in documents:
            raise ConfigError(f"{validation} has no domain {name}; it has {', '.join(documents)}")

    def hidden_of(tokens: Tensor) -> Tensor:
        return reference.forward(weights, shape, tokens, engram=tables, selection=selection, with_logits=False).hidden

    result = {}
    for name in domains or documents:
        begin = time.monotonic()
        held_out = held_out_rows(documents[name], tokenizer, LENGTH, shape.pad_token_id)
        if max_rows is not None:
            held_out = held_out.first(max_rows)
        result[name] = bits_per_byte(hidden_of, weights["head.weight"], held_out, 4, 1)
        tokens = int((held_out.counts - 1).sum())
        seconds = time.monotonic() - begin
        print(
            f"{name}: {result[name]:.4f} bits per byte, {tokens} tokens, {seconds:.0f} s", file=sys.stderr, flush=True
        )
    return result


def compare(figures: dict[str, float], recorded: dict[str, float]) -> dict[str, float]:
    """New figure minus recorded one, by domain; domains without a record are left out."""
    return {name: value - recorded[name] for name, value in figures.items() if name in recorded}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m engine.nano.evaluate", description=main.__doc__)
    parser.add_argument("--validation", type=Path, required=True, help="validation.jsonl.xz of the corpus")
    parser.add_argument(
        "--model", type=Path, default=Path(__file__).parent, help="checkpoint folder with tokenizer.json"
    )
    parser.add_argument("--selection", choices=("trained", "dense"), default="trained")
    parser.add_argument("--domains", type=lambda text: text.split(","), help="comma-separated; all unless given")
    parser.add_argument("--rows", type=int, help=f"first rows of {LENGTH} tokens of each domain; all unless given")
    parser.add_argument("--against", type=Path, help="recorded measurement; exit code 1 where a figure differs from it")
    options = parser.parse_args(arguments)
    if options.against and options.rows:
        parser.error("--against compares whole domains: leave out --rows, choose --domains instead")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure a checkpoint's bits per byte on a CPU: JSON on stdout."""
    options = parse(arguments)
    selection: reference.Selection = "topk" if options.selection == "trained" else "dense"
    try:
        figures = evaluate(
            options.model, options.validation, selection=selection, domains=options.domains, max_rows=options.rows
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    report: dict[str, Any] = {"selection": options.selection, "length": LENGTH, "bits_per_byte": figures}
    worst = 0.0
    if options.against:
        results = json.loads(options.against.read_text(encoding="utf-8"))["results"]
        report["difference"] = compare(figures, results["held_out_bits_per_byte"][options.selection])
        worst = max(map(abs, report["difference"].values()), default=math.inf)
    print(json.dumps(report, indent=1))
    return 1 if worst > TOLERANCE else 0


if __name__ == "__main__":
    sys.exit(main())
