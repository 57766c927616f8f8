"""The engine as people start it, with HTTP: the official client, fronts that die, clients that leave, the end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.cli.test_commands import engine

ROOT = Path(__file__).parents[2]
KEY = {"Authorization": "Bearer first-key"}


class Engine:
    """A running one, and its log."""

    def __init__(self, place: Path, *more: str, asks_keys: bool = True) -> None:
        self.directory = str(place / "run")
        self._log = place / "log"
        keys = place / "keys"
        keys.write_text("# clients\nfirst-key\n")
        guard = ["--set", f"http.keys_file={keys}"] if asks_keys else []
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ENGINE_")}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine", "up", "--http", "127.0.0.1:0", "--dir", self.directory,
                 *guard, *more],
                stderr=log, cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self.url = self.wait(r"http\.listen url=(\S+)")

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait(self, pattern: str, *, count: int = 1, within_s: float = 60) -> str:
        """Until the log has it so many times; the first group of the last one."""
        deadline = time.monotonic() + within_s
        while len(found := re.findall(pattern, self.log)) < count:
            assert time.monotonic() < deadline and self.process.poll() is None, self.log
            time.sleep(0.05)
        return found[-1]

    def get(self, path: str) -> tuple[int, bytes]:
        request = urllib.request.Request(self.url + path, headers=KEY)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def status(self) -> dict[str, object]:
        return json.loads(engine("status", "--json", "--dir", self.directory).stdout)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    sets = ("http.fronts=2", "limits.drain_s=1s", "num_pages=600", "num_slabs=8")
    started = Engine(tmp_path_factory.mktemp("engine"), *(word for one in sets for word in ("--set", one)))
    try:
        started.wait("head.ready")
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        started.process.wait()


def test_the_official_client_is_content(running):
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "front" / "sdk_calls.py", running.url], capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    text, usage = said["chat"]
    assert said["models"] == ["nano"] and said["stream"][0] == text and "capital" in text
    assert usage["completion_tokens"] == 12 and usage["prompt_tokens_details"]["cached_tokens"] is not None
    assert said["stream"][1]["prompt_tokens"] == usage["prompt_tokens"]
    assert said["completion"].startswith("The capital")
    logprobs = said["logprobs"]
    assert logprobs["token_logprobs"][0] is None and all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == 3 + 12
    assert said["several"] == [0, 1, 2, 3] and said["request_id"] == "mine"
    assert said["stopped"] == [text.partition(" is")[0], "stop"]
    assert said["errors"] == [
        ["NotFoundError", 404, "model_not_found"],
        ["BadRequestError", 400, "context_length_exceeded"],
        ["BadRequestError", 400, "invalid_field"],
        ["AuthenticationError", 401, "invalid_api_key"],
    ]
    for text, reason in said["formed"]:
        place = json.loads(text)
        assert reason == "stop" and set(place) == {"city", "people"}
        assert len(place["city"]) <= 12 and isinstance(place["people"], int) and place["people"] <= 9999
    assert said["formed stream"] == said["formed"][0][0]
    reason, name, arguments = said["called"]
    assert (reason, name) == ("tool_calls", "look_up") and set(json.loads(arguments)) == {"city", "people"}
    assert said["called stream"] == [[name, arguments]]
    assert set(said["chosen"]) <= {"yes", "no", "perhaps"}
    running.wait(r"h\d .*request.finish.*status=499.*finish=hang_up stage=decode")
    assert running.get("/ready")[0] == 200
    metrics = running.get("/metrics")[1].decode()
    assert 'engine:http_requests_total{code="499",route="chat"} 1.0' in metrics and "engine:up 1.0" in metrics
    ends = {reason: int(float(count)) for reason, count in re.findall(
        r'vllm:request_success_total\{engine="0",finished_reason="(\w+)",model_name="nano"\} (\S+)', metrics
    )}  # fmt: skip
    assert ends.keys() == {"stop", "length", "abort", "error"} and ends["stop"] and ends["length"] and ends["abort"]
    whole = re.search(r'vllm:e2e_request_latency_seconds_count\{engine="0",model_name="nano"\} (\S+)', metrics)
    assert whole is not None and float(whole[1]) == ends["stop"] + ends["length"] and not ends["error"]
    assert "first-key" not in running.log


def test_a_request_has_the_answer_that_a_batch_gives_it(running, tmp_path):
    body = {
        "messages": [{"role": "user", "content": "Tell me about the sea."}], "max_tokens": 16, "temperature": 0.9,
        "seed": 5, "n": 2, "stop": ["."], "logprobs": True, "top_logprobs": 1,
    }  # fmt: skip
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps(body) + "\n")
    done = engine("batch", "-i", str(file), "-o", "-", "--connect", running.directory)
    assert done.returncode == 0, done.stderr
    batch = json.loads(done.stdout)["response"]["body"]
    request = urllib.request.Request(running.url + "/v1/chat/completions", json.dumps(body).encode(), KEY)
    with urllib.request.urlopen(request, timeout=30) as answer:
        http = json.loads(answer.read())
    assert http["choices"] == batch["choices"] and http["usage"] == batch["usage"]


def test_a_client_who_leaves_during_his_prompt_frees_the_ranks(running):
    words = json.dumps({"prompt": [7] * 8000, "max_tokens": 8, "stream": True}).encode()
    before = running.status()["cancelled"]
    for pause_s in (0.0, 0.05, 0.3, 0.6):
        request = urllib.request.Request(running.url + "/v1/completions", words, KEY)
        with contextlib.suppress(TimeoutError), contextlib.closing(_sent(request)):
            time.sleep(pause_s)
    deadline = time.monotonic() + 20
    while (
        (status := running.status())["running"]
        or status["waiting"]
        or status["cancelled"] < before + 3
        or any(
            rank["snapshot"][f"pages_{state}"]
            for rank in status["ranks"]
            for state in ("granted", "owned", "quarantined")
        )
    ):
        assert time.monotonic() < deadline, status
        time.sleep(0.1)


def _sent(request):
    """The connection of a request that was sent, its answer unread."""
    import http.client

    host = request.host
    connection = http.client.HTTPConnection(host, timeout=10)
    connection.request("POST", request.selector, request.data, dict(request.headers))
    return connection


def test_a_decode_rank_that_dies_is_a_pause_in_the_stream_and_no_more(running):
    body = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(running.url + "/v1/completions", json.dumps(body).encode(), KEY)
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = json.loads(answer.read())["choices"][0]["text"]
    pid = running.wait(r"rank\.start rank=1 role=decode generation=1 pid=(\d+)")
    request = urllib.request.Request(
        running.url + "/v1/completions", json.dumps(body | {"stream": True}).encode(), KEY | {"X-Request-Id": "goes-on"}
    )
    with urllib.request.urlopen(request, timeout=60) as stream:
        lines = [stream.readline()]
        os.kill(int(pid), signal.SIGKILL)
        lines += stream.readlines()
    events = [line[6:].strip() for line in lines if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == text
    running.wait(r"h\d .*request\.again label=goes-on attempt=(1) code=rank_lost")


def test_a_front_that_dies_is_started_again_and_none_outlives_its_head(running):
    place_to_pid = dict(re.findall(r"front\.start front=(\d) pid=(\d+)", running.log))
    os.kill(int(place_to_pid["0"]), signal.SIGKILL)
    running.wait(r"front\.lost front=0 .*code=(-9)")
    fresh = running.wait(r"front\.start front=0 pid=(\d+)", count=2)
    running.wait(r"h0 .*front.linked", count=2)
    assert all(running.get("/health")[0] == 200 for _ in range(5))
    words = json.dumps({"prompt": "x", "max_tokens": 4000, "stream": True, "ignore_eos": True}).encode()
    request = urllib.request.Request(running.url + "/v1/completions", words, KEY)
    with urllib.request.urlopen(request, timeout=30) as stream:
        assert stream.readline().startswith(b"data: ")
        running.process.send_signal(signal.SIGTERM)
        running.wait("head.drain")
        time.sleep(0.6)  # what a status may be old
        status, body = running.get("/ready")
        assert status == 503 and json.loads(body)["reasons"][0]["code"] == "draining"
        rest = stream.read()
    last = rest.rstrip().split(b"\n\n")[-1]
    assert json.loads(last[6:])["error"]["code"] == "draining" and b"[DONE]" not in rest
    assert running.process.wait(30) == 0, running.log
    assert not is_alive(int(place_to_pid["1"])) and not is_alive(int(fresh))


def test_a_simulated_rack_serves_too_and_no_front_outlives_a_head_that_is_killed(tmp_path):
    started = Engine(tmp_path, "--device", "sim")
    try:
        started.wait("front.linked")
        deadline = time.monotonic() + 30
        while started.get("/ready")[0] != 200:
            assert time.monotonic() < deadline, started.log
            time.sleep(0.05)
        assert "(simulated)" in json.loads(started.get("/v1/models")[1])["data"][0]["id"]
        words = json.dumps({"prompt": "x", "max_tokens": 5, "ignore_eos": True}).encode()
        with urllib.request.urlopen(urllib.request.Request(started.url + "/v1/completions", words, KEY)) as answer:
            assert json.loads(answer.read())["usage"]["completion_tokens"] == 5
        pid = int(started.wait(r"front\.start front=0 pid=(\d+)"))
        started.process.kill()
        started.process.wait()
        deadline = time.monotonic() + 10
        while is_alive(pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        started.process.kill()
        started.process.wait()


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that nobody waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_port_that_is_taken_is_found_before_anything_else(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        done = engine("up", "--http", address, "--dir", str(tmp_path / "run"))
    assert done.returncode == 2 and f"http.listen: {address}: Address already in use" in done.stderr
    assert "rank." not in done.stderr


def test_where_to_listen_is_read_as_people_write_it():
    for given, meant in (("8000", "127.0.0.1:8000"), ("[::1]:80", "[::1]:80"), ("localhost:1", "localhost:1")):
        shown = engine("config", "show", "--json", "--set", f"http.listen={given}")
        assert json.loads(shown.stdout)["values"]["http.listen"] == meant
    for wrong in ("host", "::1:80", "h:99999"):
        done = engine("config", "check", "--set", f"http.listen={wrong}")
        assert done.returncode == 2 and "is not an address" in done.stderr
