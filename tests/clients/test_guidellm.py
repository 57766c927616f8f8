"""guidellm, which sends messages in parts and asks for usage in every chunk, has all its answers, and counts alike."""

from __future__ import annotations

import json

import pytest

from engine.faces.text import TextCodec
from tests.clients.running import CHAT_TOKENS, TOKENIZER, Client, running_engine

pytestmark = pytest.mark.clients


def test_guidellm_has_whole_answers_of_the_tokens_that_it_asked_for(tmp_path):
    client = Client("guidellm", tmp_path)
    with running_engine(tmp_path) as engine:
        client.run(
            "guidellm", "run", "--backend", f"kind=openai_http,target={engine.url},model=nano",
            "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=8",
            "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
            "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
            "--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-console-interactive", within_s=180,
        )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals == {"successful": 8, "errored": 0, "incomplete": 0, "total": 8}
    codec = TextCodec.load(TOKENIZER)
    for request in benchmark["requests"]["successful"]:
        body = json.loads(request["request_args"])["body"]
        assert body["ignore_eos"] and body["stream_options"]["continuous_usage_stats"]
        (message,) = body["messages"]
        (part,) = message["content"]
        assert request["input_metrics"]["text_tokens"] == len(codec.encode(part["text"])) + CHAT_TOKENS
        assert request["output_metrics"]["text_tokens"] == 16 and request["output"]
