"""lm-eval scores what the engine says, to the last bit, and generates what it generates."""

from __future__ import annotations

import json

import pytest

from engine.faces.text import EOS
from tests.clients.running import Client, post, running_engine

pytestmark = pytest.mark.clients
SURE = {"model": "nano", "max_tokens": 12, "temperature": 0, "seed": 1234, "stop": ["\n\n"]}


def evaluate(client, place, model, tasks, *more):
    """The table's numbers by task, and the samples of each task."""
    kind, arguments = model
    said = client.run(
        "lm_eval", "run", "--model", kind, "--model_args", f"model=nano,{arguments}", "--tasks", ",".join(tasks),
        "--include_path", "tests/clients/tasks", "--output_path", place, "--log_samples", *more,
        within_s=240, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OPENAI_API_KEY="none",
    )  # fmt: skip
    assert "WARNING" not in said and "ERROR" not in said, said
    (results,) = place.glob("*/results_*.json")
    samples = {}
    for task in tasks:
        (file,) = place.glob(f"*/samples_{task}_*.jsonl")
        samples[task] = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    return json.loads(results.read_text())["results"], samples, said


def test_lm_eval_has_the_likelihoods_and_the_texts_that_the_engine_gives_by_hand(tmp_path):
    client = Client("lm-eval", tmp_path)
    with running_engine(tmp_path) as engine:
        model = ("local-completions", f"base_url={engine.url}/v1/completions")
        numbers, samples, said = evaluate(client, tmp_path / "out", model, ["capitals", "continue"])
        assert "Using remote tokenizer backend" in said  # ours, over /tokenizer_info and /tokenize
        right = 0
        for sample in samples["capitals"]:
            pairs = [(call["arg_0"], call["arg_1"]) for call in sample["arguments"].values()]
            by_hand = [likelihood(engine, *pair) for pair in pairs]
            told = [(float(value), greedy == "True") for value, greedy in sample["filtered_resps"]]
            assert told == by_hand and len(pairs) == 2
            right += max((0, 1), key=lambda choice: by_hand[choice][0]) == sample["doc"]["answer"]
        assert len(samples["capitals"]) == 4 and numbers["capitals"]["acc,none"] == right / 4
        for sample in samples["continue"]:
            body = SURE | {"prompt": sample["arguments"]["gen_args_0"]["arg_0"], "add_special_tokens": False}
            assert sample["filtered_resps"] == [post(engine, "/v1/completions", body)["choices"][0]["text"]]
        model = ("local-chat-completions", f"base_url={engine.url}/v1/chat/completions,eos_string={EOS}")
        _, samples, _ = evaluate(client, tmp_path / "chat", model, ["continue"], "--apply_chat_template")
        assert len(samples["continue"]) == 4
        for sample in samples["continue"]:
            body = SURE | {"messages": json.loads(sample["arguments"]["gen_args_0"]["arg_0"][0])}
            text = post(engine, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
            assert text and sample["filtered_resps"] == [text]


def likelihood(engine, context, continuation):
    """Of a continuation, and whether it is what greedy decoding says. By text, where the client sends ids."""
    body = {
        "prompt": context + continuation, "add_special_tokens": False, "max_tokens": 1, "temperature": 0,
        "echo": True, "logprobs": 1,
    }  # fmt: skip
    told = post(engine, "/v1/completions", body)["choices"][0]["logprobs"]
    first = told["text_offset"].index(len(context))
    values, best = told["token_logprobs"][first:-1], told["top_logprobs"][first:-1]
    assert values and None not in values
    return sum(values), all(value == max(top.values()) for value, top in zip(values, best, strict=True))
