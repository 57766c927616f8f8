"""Train the bundled model from the corpus: `python -m engine.nano.train --corpus DIR`.

Owns the command line and the order of a call: tokenise what is not tokenised yet, go on from the stored state, train
the main model, then the drafter, export, measure. A call is given a number of minutes and ends within them; several
calls make one run (`--until`). `--smoke` runs a few steps of every phase instead, on the same code.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from engine.model.checkpoint import load_checkpoint
from engine.model.engram import load_tables
from engine.model.shapes import shape_from_config
from engine.nano.build import TOKENIZER, make_config, make_tables, miniature_sizes
from engine.nano.data import Corpus, Sampler, prepare
from engine.nano.export import export
from engine.nano.forward import Forward
from engine.nano.journal import stage
from engine.nano.loop import LONG_FROM, Loop
from engine.nano.measure import Extent, measure
from engine.nano.part import Recipe
from engine.nano.plan import print_budget
from engine.nano.sinkhorn import check_sinkhorn

# Seconds kept back at the end of a call.
SAVE_SECONDS = 20.0
MEASURE_SECONDS = 80.0

MINIATURE = Recipe(
    step_tokens=512,
    micro_tokens=256,
    length=64,
    long_length=128,
    index_tokens=128,
    warm_steps=4,
    anchors=4,
    draft_tokens=256,
)


def configure(device: torch.device) -> None:
    """Process-wide settings of torch for training."""
    torch.set_float32_matmul_precision("high")
    dynamo: Any = torch._dynamo.config
    # One region serves many layer shapes, each compiled for its own sizes.
    for name, value in (
        ("cache_size_limit", 64),
        ("recompile_limit", 64),
        ("accumulated_recompile_limit", 1024),
        ("accumulated_cache_size_limit", 1024),
        ("automatic_dynamic_shapes", False),
    ):
        if hasattr(dynamo, name):
            setattr(dynamo, name, value)
    if device.type == "cuda":
        print(f"sinkhorn kernels differ from plain torch by {check_sinkhorn(device):.1e}", flush=True)


def report(loop: Loop, tokenizer: Tokenizer, work: Path, out: Path, digests: dict[str, str], extent: Extent) -> None:
    """Measure the exported file and write evaluation.json."""
    shape, weights = load_checkpoint(out)
    forward = Forward(shape, load_tables(out, shape), loop.device, compiled=False)
    weights = {name: weight.to(loop.device) for name, weight in weights.items()}
    result: dict[str, Any] = {"run": loop.counters(), "shards_sha256": digests}
    result |= measure(forward, weights, tokenizer, work / "validation.jsonl.xz", extent)
    (out / "evaluation.json").write_text(json.dumps(result, indent=1, ensure_ascii=False), encoding="utf-8")


def smoke(loop: Loop, corpus: Corpus, config: dict[str, Any], tokenizer: Tokenizer, work: Path, steps: int) -> None:
    """A few steps of every phase, each on its own, with rate and memory, then export and report."""
    for name, progress in (
        ("dense", 0.0),
        ("dense and indexer", 0.1),
        ("selected", 0.5),
        ("long and rounded", 0.95),
    ):
        length = loop.recipe.length if progress < LONG_FROM else loop.recipe.long_length
        sampler = Sampler(corpus, length, 1)
        begin = time.monotonic()
        loop.main_step(sampler, progress)
        _synchronise(loop.device)
        first = time.monotonic() - begin
        begin = time.monotonic()
        for _ in range(steps):
            figures = loop.main_step(sampler, progress)
        _synchronise(loop.device)
        rate = steps * loop.recipe.step_tokens / (time.monotonic() - begin)
        memory = torch.cuda.max_memory_allocated() / 2**30 if loop.device.type == "cuda" else 0.0
        values = {key: round(float(value), 3) for key, value in figures.items()}
        print(f"smoke {name}: first step {first:.1f} s, {rate:,.0f} tokens/s, {memory:.1f} GiB, {values}", flush=True)
    for count in (1, steps):
        loop.draft_progress = 0.0
        with stage(f"smoke drafter, {count} steps"):
            loop.run_drafter(corpus, 0.0, max_steps=count)
            _synchronise(loop.device)
    with stage("smoke export and report"):
        out = work / "smoke"
        export(loop, config, tokenizer, out)
        report(loop, tokenizer, work, out, corpus.digests, Extent(rows_per_domain=4, prompts=6, new_tokens=12))


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m engine.nano.train", description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, help="folder of shards; may be left out once everything is tokenised")
    parser.add_argument("--work", type=Path, default=Path("nano-work"), help="tokens, state and journal")
    parser.add_argument("--out", type=Path, default=Path("nano-out"), help="what the run is for")
    parser.add_argument("--minutes", type=float, default=30.0, help="wall clock of this call, all included")
    parser.add_argument("--until", type=float, default=1.0, help="stop the main model at this progress (0 to 1)")
    parser.add_argument("--drafter-minutes", type=float, default=2.0, help="of the last call, for the drafter")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="tokenising processes")
    parser.add_argument("--micro", type=int, help="tokens per forward, where memory asks for less than the recipe's")
    parser.add_argument("--plain", action="store_true", help="do not compile the forward")
    parser.add_argument("--prepare", action="store_true", help="tokenise and stop")
    parser.add_argument("--smoke", action="store_true", help="a few steps of every phase, then stop")
    parser.add_argument("--miniature", action="store_true", help="a tiny model and tiny batches (tests)")
    parser.add_argument("--parts", type=Path, help="go on from masters-*.safetensors in this folder")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """One call of a run; see the module text."""
    begin = time.monotonic()
    options = parse(arguments)
    end = begin + 60 * options.minutes
    work, out = options.work, options.out
    if options.corpus is not None:
        with stage("tokenise"):
            prepare(options.corpus, work, TOKENIZER, workers=options.workers)
    if options.prepare:
        return
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device(options.device)
    configure(device)
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    config = make_config(tokenizer, miniature_sizes() if options.miniature else None)
    shape = shape_from_config(config)
    if not options.miniature:
        print_budget(shape, TOKENIZER.stat().st_size)
    recipe = MINIATURE if options.miniature else Recipe()
    if options.micro:
        recipe = dataclasses.replace(recipe, micro_tokens=options.micro)
    with stage("load"):
        corpus = Corpus(work, device)
        compiled = device.type == "cuda" and not options.plain
        loop = Loop(shape, make_tables(shape, tokenizer), recipe, device, work, compiled=compiled)
    names = [domain.name for domain in corpus.domains]
    print(f"{corpus.num_tokens:,} tokens of {len(names)} domains: {' '.join(names)}", flush=True)
    if options.smoke:
        smoke(loop, corpus, config, tokenizer, work, 2 if options.miniature else 8)
        return
    if loop.resume() or (options.parts is not None and loop.resume_parts(options.parts)):
        print(f"going on from {loop.counters()}", flush=True)
    last = options.until >= 1
    finish = SAVE_SECONDS + (MEASURE_SECONDS + 60 * options.drafter_minutes if last else 0)
    if loop.progress < options.until:
        with stage("main model"):
            loop.run_main(corpus, options.until, end - finish)
        with stage("save"):
            loop.save()
            loop.save_parts(out)
    if last:
        with stage("first export"):
            export(loop, config, tokenizer, out)
        if loop.draft_progress < 1:
            with stage("drafter"):
                loop.run_drafter(corpus, end - SAVE_SECONDS - MEASURE_SECONDS)
        with stage("export"):
            export(loop, config, tokenizer, out)
            loop.save()
            loop.save_parts(out)
        shutil.copy(work / "journal.jsonl", out / "journal.jsonl")
        extent = (
            Extent(rows=8, length=64, rows_per_domain=2, prompts=3, new_tokens=8) if options.miniature else Extent()
        )
        with stage("report"):
            report(loop, tokenizer, work, out, corpus.digests, extent)
    shutil.copy(work / "journal.jsonl", out / "journal.jsonl")
    print(f"done at {loop.counters()} after {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
