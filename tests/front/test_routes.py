"""What is refused and in which words; models, tokens, health, metrics, keys."""

from __future__ import annotations

import pytest

from engine.config import HttpConfig
from tests.front.rig import ids_of, run, running_front, served
from tests.front.scripted_head import rank_status, status_report

CHAT = {"model": "nano", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
TEXT = {"prompt": "Once", "max_tokens": 50}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


REFUSED = {
    "no JSON": (CHAT_PATH, b"{", 400, "invalid_json", "JSON"),
    "not UTF-8": (CHAT_PATH, b'{"a":"\xff"}', 400, "invalid_json", "UTF-8"),
    "a list": (CHAT_PATH, [], 400, "invalid_json", "object"),
    "no messages": (CHAT_PATH, {}, 400, "invalid_field", "messages"),
    "no prompt": (TEXT_PATH, {}, 400, "invalid_field", "prompt"),
    "empty prompt": (TEXT_PATH, {"prompt": []}, 400, "invalid_field", "prompt"),
    "mixed prompts": (TEXT_PATH, {"prompt": ["a", 5]}, 400, "invalid_field", "not both"),
    "foreign id": (TEXT_PATH, {"prompt": [9999]}, 400, "invalid_field", "8192"),
    "model": (CHAT_PATH, CHAT | {"model": "gpt"}, 404, "model_not_found", "'gpt' does not exist"),
    "tools": (CHAT_PATH, CHAT | {"tools": [{"type": "function"}]}, 400, "invalid_field", "`function`"),
    "functions": (CHAT_PATH, CHAT | {"functions": [{"name": "f"}]}, 400, "unsupported_field", "not supported"),
    "a call without tools": (CHAT_PATH, CHAT | {"tool_choice": "required"}, 400, "invalid_field", "there are no tools"),
    "format": (CHAT_PATH, CHAT | {"response_format": {"type": "yaml"}}, 400, "invalid_field", "'yaml'"),
    "no schema": (
        CHAT_PATH, CHAT | {"response_format": {"type": "json_schema"}}, 400, "invalid_field", "schema: missing"
    ),
    "schema": (
        CHAT_PATH, CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
        400, "invalid_field", "Invalid type: strin",
    ),
    "schema of nothing": (
        TEXT_PATH, TEXT | {"structured_outputs": {"json": {"type": "string", "minLength": 5, "maxLength": 2}}},
        400, "invalid_field", "minLength (5) is greater than maxLength (2)",
    ),
    "regex": (TEXT_PATH, TEXT | {"structured_outputs": {"regex": "(a"}}, 400, "invalid_field", "invalid regex"),
    "grammar": (
        TEXT_PATH, TEXT | {"structured_outputs": {"grammar": "start: b"}}, 400, "invalid_field", "unknown name"
    ),
    "long choice": (
        TEXT_PATH, TEXT | {"structured_outputs": {"choice": ["a" * 40000, "b" * 40000]}}, 400, "invalid_field",
        "(limit 65536)",
    ),
    "two forms": (
        TEXT_PATH, TEXT | {"structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "invalid_field", "only one of",
    ),
    "form and no end": (
        TEXT_PATH, TEXT | {"structured_outputs": {"regex": "a"}, "ignore_eos": True}, 400, "invalid_field",
        "says where the text ends",
    ),
    "scores of a prompt in a stream": (
        TEXT_PATH, TEXT | {"prompt_logprobs": 1, "stream": True}, 400, "unsupported_field", "not supported in a stream"
    ),
    "n": (CHAT_PATH, CHAT | {"n": 129}, 400, "invalid_field", "n: "),
    "choices": (TEXT_PATH, {"prompt": ["a"] * 65, "n": 2}, 400, "invalid_field", "limit 128, http.choices"),
    "logprobs": (TEXT_PATH, TEXT | {"logprobs": 21}, 400, "invalid_field", "20"),
    "stop": (TEXT_PATH, TEXT | {"stop": ["a"] * 17}, 400, "invalid_field", "16"),
    "stream": (TEXT_PATH, TEXT | {"stream": "yes"}, 400, "invalid_field", "stream: "),
    "too long": (TEXT_PATH, {"prompt": [5] * 3000}, 400, "context_length_exceeded", "maximum context length is 2048 t"),
    "no room": (
        TEXT_PATH, TEXT | {"max_tokens": 2048}, 400, "context_length_exceeded", "maximum context length is 2048 tokens"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_done_is_refused_by_name(case):
    path, body, status, code, words = REFUSED[case]

    async def main():
        async with running_front() as rig:
            answer = await rig.post(path, body)
            assert not rig.head.seen
        assert (answer.status, answer.error["code"]) == (status, code)
        assert words in answer.error["message"] and answer.error["type"] == "invalid_request_error"

    run(main)


def test_models_tokens_and_version():
    async def main():
        async with running_front() as rig:
            models = (await rig.get("/v1/models")).json
            one = (await rig.get("/v1/models/nano")).json
            none = await rig.get("/v1/models/deep/seek")
            text = (await rig.post("/tokenize", {"prompt": "Hello wörld", "return_token_strs": True})).json
            chat = (await rig.post("/tokenize", {"messages": CHAT["messages"]})).json
            parts = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]
            assert (await rig.post("/tokenize", {"messages": parts})).json == chat
            back = (await rig.post("/detokenize", {"tokens": text["tokens"]})).json
            bad = await rig.post("/detokenize", {"tokens": [-1]})
            version = (await rig.get("/version")).json
            info = (await rig.get("/tokenizer_info")).json
        assert models["object"] == "list" and models["data"] == [one]
        assert one["id"] == one["root"] == "nano" and one["max_model_len"] == 2048
        assert (none.status, none.error["code"]) == (404, "model_not_found")
        assert text["count"] == len(text["tokens"]) == len(text["token_strs"]) and text["token_strs"][1] == "Hello"
        assert back["prompt"].endswith("Hello wörld") and chat["count"] > 1
        assert bad.status == 400 and version.keys() == {"version"}
        assert (info["bos_token_id"], info["add_bos_token"]) == (text["tokens"][0], True)
        assert info["eos_token"] == served().codec.decode([info["eos_token_id"]], skip_special=False)
        assert info["vocab_size"] == served().codec.vocab_size and info["model_max_length"] == 2048

    run(main)


def test_ready_says_why_not():
    reports = {
        "draining": status_report(is_stopping=True),
        "starting": status_report(rank_status(0, "prefill", state="starting"), rank_status(1, "decode")),
        "no_prefill_rank": status_report(rank_status(0, "prefill", state="lost"), rank_status(1, "decode")),
        "decode_stalled": status_report(rank_status(0, "prefill"), rank_status(1, "decode", step_age_ms=13_000)),
    }

    async def main():
        async with running_front() as rig:
            good = await rig.get("/ready")
            assert good.status == 200 and good.json == {"ready": True, "reasons": [], "degraded": []}
            assert (await rig.get("/ready", "HEAD")).status == 200
            assert rig.head.asked == 1, "asked a moment ago"
            for code, report in reports.items():
                rig.head.status = report
                rig.front.desk.forget()
                answer = await rig.get("/ready")
                assert answer.status == 503 and [each["code"] for each in answer.json["reasons"]] == [code], code
            rig.head.status = status_report(degraded=("the balancer got nowhere for 61 s",))
            rig.front.desk.forget()
            answer = await rig.get("/ready")
            assert answer.status == 200 and answer.json["degraded"] == ["the balancer got nowhere for 61 s"]
            assert (await rig.get("/health")).status == 200

    run(main)


def test_a_scrape_has_the_head_and_the_front():
    async def main():
        async with running_front() as rig:
            rig.head.auto = ids_of("x")
            await rig.post(CHAT_PATH, CHAT)
            await rig.post(CHAT_PATH, {})
            answer = await rig.get("/metrics")
            assert (await rig.get("/metrics", "HEAD")).body == b""
        text = answer.body.decode()
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "engine:up 1.0" in text and "engine:requests_accepted_total 3.0" in text
        assert 'engine:http_requests_total{code="200",route="chat"} 1.0' in text
        assert 'engine:http_requests_total{code="400",route="chat"} 1.0' in text
        assert "# TYPE engine:http_requests_total counter" in text

    run(main)


def test_keys_are_asked_for_everywhere_but_where_it_is_health():
    async def main():
        async with running_front(keys=(b"secret-1", b"secret-2")) as rig:
            rig.head.auto = ids_of("x")
            for header in ("", "Bearer", "Bearer wrong", "Basic secret-1", "secret-1", "Bearer secret-1x"):
                answer = await rig.post(CHAT_PATH, CHAT, Authorization=header)
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
                assert b"secret" not in answer.body and answer.headers["www-authenticate"] == "Bearer"
            assert (await rig.get("/v1/models")).status == (await rig.get("/metrics")).status == 401
            assert (await rig.post(CHAT_PATH, CHAT, Authorization="Bearer secret-2")).status == 200
            assert (await rig.get("/health")).status == (await rig.get("/ready")).status == 200

    run(main)


def test_metrics_can_be_open_to_scrapers_without_a_key():
    async def main():
        async with running_front(keys=(b"secret-1",), http=HttpConfig(metrics_need_key=False)) as rig:
            assert (await rig.get("/metrics")).status == (await rig.get("/metrics?x=1")).status == 200
            assert (await rig.get("/metrics", "POST")).status == 405
            for path in ("/v1/models", "/metrics/", "//metrics", "/version"):
                assert (await rig.get(path)).status == 401, path

    run(main)


def test_routes_and_methods_that_are_none():
    async def main():
        async with running_front() as rig:
            nothing = await rig.get("/v1/files")
            wrong = await rig.get(CHAT_PATH)
            for path in ("/admin/shutdown", "/v1/rebalance", "/drain"):
                assert (await rig.post(path, {})).status == 404
        assert (nothing.status, nothing.error["code"]) == (404, "not_found")
        assert (wrong.status, wrong.error["code"], wrong.headers["allow"]) == (405, "method_not_allowed", "POST")

    run(main)
