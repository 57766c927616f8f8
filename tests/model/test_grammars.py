"""Texts that follow grammars, on the bundled model: every finished one is valid, and it is the same text however the
steps are cut, whoever shares them, with drafts by either rule's settings and without, and when it goes on elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

import engine.nano
from engine.core.plan import DecodeRow, PrefillChunk, StepPlan
from engine.errors import DeviceError
from engine.faces.grammar import ResponseFormat, StructuredOutputs, read_grammar
from engine.faces.text import TextCodec
from engine.model.device import TorchDevice
from engine.model.grammars import COMPILED_LIMIT, Grammars, Guide
from tests.e2e.prompts import text_ids
from tests.e2e.truth import load_nano
from tests.model.paged_cases import Source
from tests.model.speculation_cases import Host, Request, open_device, run_host
from transport.messages import Sampling

PAGE = 64
NANO = Path(engine.nano.__file__).parent
CODEC = TextCodec.load(NANO)
LIMIT = 120
Check = Callable[[str], None]


class GuidedHost(Host):
    """A sequence's rows begin once its first token is known, as on a decode rank, and say which ids came before."""

    def _row(self, request: Request) -> DecodeRow | None:
        if not request.text:
            return None
        row = super()._row(request)
        if row is None:
            return None
        if not hasattr(request, "said"):
            request.said = np.array(request.text[:1], "<i4").tobytes()  # type: ignore[attr-defined]
        return dataclasses.replace(row, said=request.said)  # type: ignore[attr-defined]


def draw_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose texts end before long."""
    kinds = ["integer", "boolean", "enum", "string", "const", "null", "number"] + ["object", "array"] * (depth > 0)
    match rng.choice(kinds):
        case "integer":
            low = rng.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1000)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": rng.randrange(1, 9), "multipleOf": 0.25}
        case "enum":
            return {"enum": rng.sample(["red", "grün", 'a "quoted"\nline', 7, None, True, "x" * 9], 3)}
        case "string":
            return rng.choice(
                [{"type": "string", "maxLength": rng.randrange(1, 9)}, {"type": "string", "pattern": "^[a-z]{2,6}$"}]
            )
        case "const":
            return {"const": rng.choice(["the sea", 3, {"a": [1]}])}
        case "object":
            names = rng.sample(["name", "size", "of", "größe", "x y"], rng.randrange(1, 4))
            return {
                "type": "object",
                "properties": {name: draw_schema(rng, depth - 1) for name in names},
                "required": names[: rng.randrange(len(names) + 1)],
                "additionalProperties": False,
            }
        case "array":
            return {"type": "array", "items": draw_schema(rng, depth - 1), "maxItems": rng.randrange(1, 4)}
        case kind:
            return {"type": kind}


def draw_case(rng: random.Random) -> tuple[str, Check]:
    """A grammar, and what its texts have to satisfy."""
    match rng.choice(["schema", "schema", "schema", "regex", "choice"]):
        case "schema":
            schema = draw_schema(rng)
            values: dict[str, Any] = {
                "response_format": ResponseFormat("json_schema", json_schema=_Schema(schema))  # type: ignore[arg-type]
            }

            def check(text: str) -> None:
                jsonschema.validate(json.loads(text), schema)
        case "regex":
            pattern = rng.choice([r"\d{3}-\d{4}", r"(ab|c/d){1,5}", r"[A-Z][a-z]{2,8}( [a-z]{1,6}){0,3}\.", "ü?x+y{2}"])
            values = {"structured_outputs": StructuredOutputs(regex=pattern)}

            def check(text: str) -> None:
                assert re.fullmatch(pattern, text), (pattern, text)
        case _:
            choice = rng.sample(["yes", "no", "yes and no", 'perhaps "so"', "日本\nx"], 3)
            values = {"structured_outputs": StructuredOutputs(choice=choice)}

            def check(text: str) -> None:
                assert text in choice

    return read_grammar(values, CODEC, None, thinking=False), check


@dataclasses.dataclass
class _Schema:
    schema: dict[str, Any]


def make_requests(seed: int, count: int, **settings: Any) -> tuple[list[Request], list[Check]]:
    rng, ids = random.Random(seed), text_ids()
    requests, checks, used = [], [], 0
    for slab in range(count):
        length = rng.randrange(1, 90)
        grammar, check = draw_case(rng)
        pages = -(-(length + LIMIT) // PAGE)
        start = rng.randrange(2000)
        sampling = Sampling(temperature=1.0, seed=rng.randrange(2**40), max_tokens=LIMIT, grammar=grammar, **settings)
        prompt = np.array(ids[start : start + length], np.int64)
        requests.append(Request(slab, tuple(range(used, used + pages)), prompt, sampling, LIMIT))
        checks.append(check)
        used += pages
    return requests, checks


@pytest.fixture(scope="module")
def source() -> Source:
    torch.set_num_threads(1)
    return Source(*load_nano())


def open_nano(source: Source, requests: list[Request], proposer: str | None = None, *, rejects: bool = False) -> Any:
    eos = source.shape.eos_token_id
    grammars = Grammars(NANO, source.shape.vocab_size, eos)
    return open_device(source, requests, proposer, eos, page_tokens=PAGE, rejects=rejects, grammars=grammars)


async def answer(
    source: Source, requests: list[Request], drafts: list[int], *, rejects: bool = False, begin: int = 3
) -> GuidedHost:
    fresh = [request.again() for request in requests]
    device: TorchDevice = open_nano(source, fresh, "own" if drafts != [0] else None, rejects=rejects)
    host = GuidedHost(fresh, (source.shape.eos_token_id,), drafts, 1, begin=begin)
    await run_host(device, host)
    await device.aclose()
    return host


def check_texts(requests: list[Request], checks: list[Check], eos: int) -> int:
    """How many have ended by themselves; all of those are valid."""
    ended = 0
    for request, check in zip(requests, checks, strict=True):
        if request.text[-1] == eos:
            ended += 1
            check(CODEC.decode(request.text[:-1], skip_special=False))
        else:
            assert len(request.text) == LIMIT
    return ended


@pytest.mark.parametrize("seeds", [(0, 1), (2, 3)], ids=str)
async def test_texts_that_end_are_valid_and_are_the_same_alone_together_and_with_drafts(
    source: Source, seeds: tuple[int, ...]
) -> None:
    eos = source.shape.eos_token_id
    ended = total = 0
    for seed in seeds:
        requests, checks = make_requests(seed, 8)
        together = await answer(source, requests, [0])
        ended += check_texts(together.requests, checks, eos)
        total += len(requests)
        drafted = await answer(source, requests, [3])
        assert [request.text for request in drafted.requests] == [request.text for request in together.requests]
        if seed == 0:
            # By rejection texts are others, and as valid.
            rejected = await answer(source, requests, [3], rejects=True)
            check_texts(rejected.requests, checks, eos)
            for request, wanted in zip(requests, together.requests, strict=True):
                alone = await answer(source, [request], [0])
                assert alone.requests[0].text == wanted.text
    assert ended > 0.9 * total


async def test_a_text_goes_on_from_any_token_of_it(source: Source) -> None:
    """What a rank does with a request whose decode rank was lost: prompt and generated ids are a prompt there."""
    requests, _ = make_requests(11, 6)
    whole = (await answer(source, requests, [0])).requests
    device: TorchDevice = open_nano(source, requests)
    step = 0
    for request in whole:
        for kept in {1, len(request.text) // 2, len(request.text) - 1} - {0}:
            ids = np.array([*request.prompt, *request.text[:kept]], "<i4")
            chunk = PrefillChunk(
                1, request.slab, 0, memoryview(ids.tobytes()), request.pages, request.sampling,
                seen=memoryview(ids.tobytes()), generated=kept,
            )  # fmt: skip
            step += 1
            (token,) = (await device.wait(device.submit(StepPlan(step, (chunk,), ())))).chunk_tokens
            assert token == request.text[kept]
            if token == source.shape.eos_token_id or kept + 1 == len(request.text):
                continue
            said = np.array(request.text[: kept + 1], "<i4").tobytes()
            row = DecodeRow(1, request.slab, len(ids), token, request.pages, request.sampling, said)
            step += 1
            (token,) = (await device.wait(device.submit(StepPlan(step, (), (row,))))).row_tokens
            assert token == request.text[kept + 1]
    await device.aclose()


async def test_log_probabilities_are_those_before_the_grammar(source: Source) -> None:
    requests, _ = make_requests(3, 2, logprobs=0)
    for request in (await answer(source, requests, [0])).requests:
        # Of the model's own distribution: a token that the grammar forced was not all of it.
        told = [scores[0] for scores in request.scored.values()]
        assert min(told) < -3


async def test_a_row_with_a_grammar_needs_a_device_with_grammars(source: Source) -> None:
    requests, _ = make_requests(0, 1)
    device = open_device(source, requests, None, source.shape.eos_token_id, page_tokens=PAGE)
    ids = memoryview(requests[0].prompt.astype("<i4").tobytes())
    chunk = PrefillChunk(1, 0, 0, ids, requests[0].pages, requests[0].sampling, seen=ids)
    with pytest.raises(DeviceError, match="opened without any"):
        await device.wait(device.submit(StepPlan(1, (chunk,), ())))
    await device.aclose()


def allowed(guide: Guide, vocab: int) -> list[int]:
    logits = torch.zeros(vocab)
    guide.restrict(logits)
    return torch.nonzero(logits == 0)[:, 0].tolist()


def test_end_of_text_may_come_exactly_where_the_grammar_may_end() -> None:
    grammars = Grammars(NANO, CODEC.vocab_size + 5, CODEC.eos_id)
    guide = grammars.start("start: /a{2,3}/", np.empty(0, np.int64))
    (a,) = CODEC.encode("a")
    for taken in range(4):
        ids = allowed(guide, CODEC.vocab_size + 5)
        assert (CODEC.eos_id in ids) == (taken >= 2)
        assert all(set(CODEC.decode([token])) == {"a"} for token in ids if token != CODEC.eos_id)
        guide.take(a)
    grammars.close()


def test_ids_that_break_the_grammar_leave_nothing_but_the_end() -> None:
    grammars = Grammars(NANO, CODEC.vocab_size, CODEC.eos_id)
    guide = grammars.start('start: "a"', np.array(CODEC.encode("zebra"), np.int64))
    assert allowed(guide, CODEC.vocab_size) == [CODEC.eos_id]
    grammars.close()


def test_no_text_stands_for_a_named_token() -> None:
    grammars = Grammars(NANO, CODEC.vocab_size, CODEC.eos_id)
    guide = grammars.start(r"start: /(.|\n)*/", np.empty(0, np.int64))
    ids = allowed(guide, CODEC.vocab_size)
    named = [CODEC.named_id(name) for name in ("<think>", "</think>", "｜DSML｜", "<｜User｜>")]
    assert not set(named) & set(ids)
    grammars.close()


def test_why_a_model_has_no_grammars_is_said_before_a_step_needs_one(tmp_path: Path) -> None:
    good = Grammars(NANO, CODEC.vocab_size, CODEC.eos_id)
    assert good.find_fault() == ""
    good.close()
    with pytest.raises(DeviceError, match="no tokenizer is read any more"):
        good.find_fault()
    path = tmp_path / "tokenizer.json"
    for text in (None, "{", "{}", '{"added_tokens": [], "model": {"type": "WordLevel", "vocab": {}}}'):
        if text is not None:
            path.write_text(text)
        bad = Grammars(tmp_path, CODEC.vocab_size, CODEC.eos_id)
        assert bad.find_fault().startswith(f"{path}: grammars need the model's tokenizer (")
        bad.close()


def test_what_stays_compiled_is_bounded() -> None:
    grammars = Grammars(NANO, CODEC.vocab_size, CODEC.eos_id)
    first = grammars.foresee('start: "0"')
    assert grammars.foresee('start: "0"') is first
    for place in range(COMPILED_LIMIT):
        grammars.foresee(f'start: "x{place}"').result()
    assert grammars.foresee('start: "0"') is not first
    grammars.close()
    with pytest.raises(DeviceError, match="no grammar is compiled any more"):
        grammars.foresee('start: "after"')
