"""The measurements of a finished run: bits per byte, selection, expert load, draft acceptance, samples.

Owns the report that the trainer writes beside the weights and that the model card quotes. Runs the training forward on
the training device; evaluate.py measures the bits per byte again without it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.model.layers import WeightMap
from engine.model.shapes import ModelShape
from engine.nano.data import BOS
from engine.nano.evaluate import bits_per_byte
from engine.nano.forward import Forward
from engine.nano.heldout import HeldOut, held_out_rows, read_validation

USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜></think>"
SAMPLE_PROMPTS = (
    "Hello! How are you today?",
    "Write a short story about a lighthouse keeper.",
    "How do I make a cup of tea?",
    'Describe a cat as a JSON object with the keys "name", "category" and "description". Answer with JSON only.',
    "Write a Python function that returns the largest number in a list.",
    "What is a database?",
)


@dataclass(frozen=True)
class Extent:
    """How much to measure.

    Attributes:
        rows: rows per forward.
        length: tokens per row.
        rows_per_domain: most rows of a domain.
        prompts: conversations for draft acceptance.
        new_tokens: tokens generated for each of them, and for a sample.
    """

    rows: int = 32
    length: int = 1024
    rows_per_domain: int = 10_000
    prompts: int = 64
    new_tokens: int = 160


@torch.no_grad()
def expert_load(
    forward: Forward, weights: WeightMap, held_out: Mapping[str, HeldOut], extent: Extent
) -> dict[str, Any]:
    """Max / mean of the expert load per domain and for all pooled: the mean and the worst over layers."""
    domain_to_load: dict[str, Tensor] = {}
    for domain, rows in held_out.items():
        # Documents end to end, cut into whole rows: padding would count as load.
        flat = torch.cat([row[:count] for row, count in zip(rows.tokens, rows.counts.tolist(), strict=True)])
        length = min(extent.length, len(flat) // forward.shape.window * forward.shape.window)
        whole = flat[: len(flat) // length * length].view(-1, length)[: extent.rows_per_domain]
        parts = [
            forward.trunk(weights, tokens.to(forward.device), select=True).loads.cpu()
            for tokens in whole.split(extent.rows)
        ]
        domain_to_load[domain] = torch.stack(parts).sum(0)
    # Every domain has the same weight in the pool.
    domain_to_load["pooled"] = torch.stack([load / load.sum() for load in domain_to_load.values()]).sum(0)
    result = {}
    for domain, load in domain_to_load.items():
        skew = load.max(1).values / load.mean(1)
        result[domain] = {"mean_over_layers": float(skew.mean()), "worst_layer": float(skew.max())}
    return result


def selection_bites(shape: ModelShape, length: int) -> dict[str, float]:
    """Share of the queries of a `length`-token text for which a choice is really made: entries by layer, and blocks."""
    shares = {}
    for role in shape.layer_roles:
        if role.is_index_source:
            limited = sum((t + 1) // role.ratio > shape.index_topk for t in range(length))
            shares[f"top-k of layer {role.index}"] = limited / length
        if role.is_candidate_source:
            size = shape.candidate_block_size
            limited = sum(-(-((t + 1) // role.ratio) // size) > shape.candidate_blocks for t in range(length))
            shares[f"candidate blocks of layer {role.index}"] = limited / length
    return shares


@torch.no_grad()
def generate(
    forward: Forward, weights: WeightMap, prompts: list[list[int]], new_tokens: int, temperature: float, seed: int
) -> list[list[int]]:
    """Continue prompts by running the whole sequence again for each token (no cache; small models only).

    Args:
        forward: the model's forward.
        weights: its tensors.
        prompts: token ids.
        new_tokens: tokens to add to each.
        temperature: 0 takes the likeliest token.
        seed: of the draws.

    Returns:
        prompt + continuation, cut after the first end token.
    """
    shape, device = forward.shape, forward.device
    generator = torch.Generator(device=device).manual_seed(seed)
    window = shape.window
    longest = max(map(len, prompts)) + new_tokens
    tokens = torch.full((len(prompts), math.ceil(longest / window) * window), shape.pad_token_id, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    rows = torch.arange(len(prompts), device=device)
    for _ in range(new_tokens):
        used = math.ceil(int(lengths.max()) / window) * window
        hidden = forward.trunk(weights, tokens[:, :used], select=True).hidden.view(len(prompts), used, -1)
        logits = (hidden[rows, lengths - 1] @ weights["head.weight"].T).float()
        if temperature:
            probabilities = (logits / temperature).softmax(-1)
            drawn = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
        else:
            drawn = logits.argmax(-1)
        tokens[rows, lengths] = drawn
        lengths += 1
    results = []
    for row, prompt in enumerate(prompts):
        ids = tokens[row, : len(prompt) + new_tokens].tolist()
        stop = next((i for i in range(len(prompt), len(ids)) if ids[i] == shape.eos_token_id), len(ids) - 1)
        results.append(ids[: stop + 1])
    return results


@torch.no_grad()
def draft_acceptance(
    forward: Forward, weights: WeightMap, prompts: list[list[int]], extent: Extent, temperature: float
) -> dict[str, Any]:
    """Acceptance of each draft position, given that all before it were accepted.

    The target continues the prompts; then a block is drafted at every generated position. At temperature 0 a draft
    counts when it is the target's own next token. Otherwise position i counts sum(min(p, q)), the chance that the
    verification accepts, with the target's text as the drafts before it.
    """
    shape, device = forward.shape, forward.device
    assert shape.drafter is not None
    block = shape.drafter.block_size
    texts = generate(forward, weights, prompts, extent.new_tokens, temperature, seed=11)
    reached = torch.zeros(block, dtype=torch.float64)
    accepted = torch.zeros(block, dtype=torch.float64)
    blocks = 0
    for text, prompt in zip(texts, prompts, strict=True):
        if len(text) - block - 1 <= len(prompt):
            continue  # ended too soon to hold one whole block
        anchors = torch.arange(len(prompt), len(text) - block - 1, device=device).unsqueeze(0)
        padded = math.ceil(len(text) / shape.window) * shape.window
        tokens = torch.tensor([text + [shape.pad_token_id] * (padded - len(text))], device=device)
        out = forward.trunk(weights, tokens, select=True, features=True)
        draft = forward.draft(weights, out.features, tokens, anchors)
        at = anchors.view(-1, 1) + torch.arange(block, device=device)
        if temperature:
            q = (draft.logits.float() / temperature).softmax(-1)
            p = ((out.hidden[at.view(-1)] @ weights["head.weight"].T).float() / temperature).softmax(-1)
            chance = torch.minimum(p, q).sum(-1).view(-1, block).double().cpu()
        else:
            chance = (draft.logits.argmax(-1).view(-1, block) == tokens[0, at + 1]).double().cpu()
        before = torch.cat((torch.ones(len(chance), 1, dtype=torch.float64), chance.cumprod(1)[:, :-1]), 1)
        reached += before.sum(0)
        accepted += (before * chance).sum(0)
        blocks += len(chance)
    return {
        "per_position": [float(a / max(r, 1e-9)) for a, r in zip(accepted, reached, strict=True)],
        "accepted_of_block": float(accepted.sum() / max(blocks, 1)),
        "blocks": blocks,
    }


def chat_prompts(held_out: Mapping[str, list[str]], tokenizer: Tokenizer, count: int, longest: int) -> list[list[int]]:
    """Openings of held-out conversations, up to the first answer, from all chat domains in turn."""
    prompts = []
    domains = [held_out[name] for name in ("chat_main", "chat_short", "chat_code", "templated") if name in held_out]
    for documents in zip(*domains, strict=False):
        for text in documents:
            cut = text.find("<｜Assistant｜>")
            head = text[: cut + len("<｜Assistant｜>")]
            if text[len(head) :].startswith("</think>"):
                head += "</think>"
            ids = tokenizer.encode(head, add_special_tokens=False).ids
            if cut > 0 and len(ids) <= longest:
                prompts.append(ids)
    return prompts[:count]


def measure(
    forward: Forward, weights: WeightMap, tokenizer: Tokenizer, validation: Path, extent: Extent | None = None
) -> dict[str, Any]:
    """Everything the card reports, as JSON values."""
    extent = extent or Extent()
    shape = forward.shape
    documents = read_validation(validation)
    begin = time.monotonic()
    held_out = {
        name: held_out_rows(texts, tokenizer, extent.length, shape.pad_token_id) for name, texts in documents.items()
    }

    def bits(selection: str) -> dict[str, float]:
        def hidden_of(tokens: Tensor) -> Tensor:
            random = selection == "random"
            out = forward.trunk(weights, tokens, select=selection != "dense", random_index=random)
            return out.hidden.view(*tokens.shape, -1)

        figures = {
            name: bits_per_byte(
                hidden_of, weights["head.weight"], rows.first(extent.rows_per_domain), extent.rows, shape.window
            )
            for name, rows in held_out.items()
        }
        return figures | {"mean": sum(figures.values()) / len(figures)}

    report: dict[str, Any] = {
        "held_out_bits_per_byte": {selection: bits(selection) for selection in ("trained", "random", "dense")}
    }
    print(
        f"measure: bits per byte {report['held_out_bits_per_byte']['trained']} {time.monotonic() - begin:.0f} s",
        flush=True,
    )
    report["selection_bites_at_1024"] = selection_bites(shape, 1024)
    report["expert_load_max_over_mean"] = expert_load(forward, weights, held_out, extent)
    prompts = chat_prompts(documents, tokenizer, extent.prompts, 256)
    report["draft_acceptance"] = {
        f"T={temperature}": draft_acceptance(forward, weights, prompts, extent, temperature)
        for temperature in (0.0, 0.7)
    }
    print(f"measure: acceptance {report['draft_acceptance']} {time.monotonic() - begin:.0f} s", flush=True)
    ids = [
        tokenizer.encode(f"{BOS}{USER}{prompt}{ASSISTANT}", add_special_tokens=False).ids for prompt in SAMPLE_PROMPTS
    ]
    report["samples"] = []
    texts = {t: generate(forward, weights, ids, extent.new_tokens, t, seed=5) for t in (0.0, 0.7)}
    for row, prompt in enumerate(SAMPLE_PROMPTS):
        answers = {f"T={t}": tokenizer.decode(texts[t][row][len(ids[row]) :], skip_special_tokens=False) for t in texts}
        report["samples"].append({"prompt": prompt, **answers})
    report["seconds"] = time.monotonic() - begin
    return report
