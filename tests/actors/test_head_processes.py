"""The head and its ranks as real processes: what happens when they are killed, stopped, started twice, asked to go."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
import trio

from engine.config import config_from_json
from engine.errors import RemoteProtocolError
from engine.faces.admin import open_operator
from engine.spawn import give_json
from tests.actors.fake_rank import STUCK_SEED
from tests.actors.head_process import VOCAB, head_process, is_gone, make_config, talking_client, wait_for
from transport.messages import (
    CancelRequest,
    Refused,
    RequestFailed,
    RequestFinished,
    Shutdown,
    ShutdownAccepted,
)


def answer(ids: list[int], count: int) -> list[int]:
    return [(sum(ids) + index) % VOCAB for index in range(count)]


async def test_requests_of_two_clients_are_answered_exactly(tmp_path):
    with head_process(tmp_path, prefill=1, decode=2) as head:
        await head.wait_ready()
        async with talking_client(head) as one, talking_client(head) as two:
            for request in range(1, 41):
                one.submit(request, [request, 1], max_tokens=1 + request % 7)
                two.submit(request, [request, 2], max_tokens=1 + request % 5)
            ranks = set()
            for client, last, modulus in ((one, 1, 7), (two, 2, 5)):
                for request in range(1, 41):
                    end = await client.end_of(request)
                    assert isinstance(end, RequestFinished)
                    ranks.add(client.starts[request].decode_rank)
                    assert client.tokens[request] == answer([request, last], 1 + request % modulus)
            assert one.hello.max_model_tokens == 1000 and one.hello.config_digest == head.config.digest
        report = await head.status()
        assert (report.finished, report.failed, report.running, report.waiting) == (80, 0, 0, 0)
        assert ranks == {1, 2}, "both decode ranks worked"


async def test_a_killed_rank_fails_its_requests_at_once_and_comes_back(tmp_path):
    with head_process(tmp_path) as head:
        before = await head.wait_ready()
        async with talking_client(head) as client:
            client.submit(1, [1, 2], seed=STUCK_SEED)
            await wait_for(lambda: len(head.named("client.join")) or None, 5)
            await trio.sleep(0.1)
            victim = before.ranks[1].pid
            killed_at = trio.current_time()
            os.kill(victim, signal.SIGKILL)
            end = await client.end_of(1)
            assert trio.current_time() - killed_at < 1.0
            assert isinstance(end, RequestFailed)
            assert end.code == "rank_lost" and end.retryable and end.definite
            after = await head.wait_ready(generations={1: 2})
            assert after.ranks[1].pid != victim and after.ranks[1].restarts == 1
            assert after.ranks[0].generation == 1
            client.submit(2, [5], max_tokens=3)
            assert isinstance(await client.end_of(2), RequestFinished)
            assert client.tokens[2] == answer([5], 3)
        await wait_for(lambda: "peer 1 is confirmed dead" in head.log.read_text() or None, 2)
        assert "SIGKILL" in head.named("rank.down")[0]["msg"]


async def test_a_stopped_rank_is_found_by_its_silence(tmp_path):
    with head_process(tmp_path, heartbeat_s=0.6) as head:
        report = await head.wait_ready()
        os.kill(report.ranks[0].pid, signal.SIGSTOP)
        after = await head.wait_ready(generations={0: 2})
        assert after.ranks[1].generation == 1
        assert "silent for limits.heartbeat_s" in head.named("rank.down")[0]["msg"]


async def test_a_killed_head_takes_its_ranks_along_and_leaves_nothing_in_the_way(tmp_path):
    with head_process(tmp_path, prefill=2, decode=2) as head:
        report = await head.wait_ready()
        os.kill(head.pid, signal.SIGKILL)
        for rank in report.ranks:
            await wait_for(lambda pid=rank.pid: is_gone(pid), 1.0)
        head.process.wait(5)
        assert {"admin.sock", "head.json"} <= set(os.listdir(head.directory.path))
    with head_process(tmp_path) as second:
        await second.wait_ready()


async def test_a_second_head_is_refused_and_does_not_disturb_the_first(tmp_path):
    with head_process(tmp_path) as head:
        await head.wait_ready()
        descriptor = give_json(dataclasses.asdict(head.config))
        command = [sys.executable, "-m", "engine", "up", "--given", str(descriptor)]
        done = await trio.run_process(
            command, pass_fds=[descriptor], capture_stdout=True, capture_stderr=True, check=False,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )  # fmt: skip
        os.close(descriptor)
        assert done.returncode == 5
        assert f"pid {head.pid}" in done.stderr.decode()
        assert (await head.status()).ready


async def test_the_first_signal_drains_and_the_sockets_are_gone_afterwards(tmp_path):
    with head_process(tmp_path) as head:
        await head.wait_ready()
        async with talking_client(head) as client:
            client.submit(1, [1], max_tokens=150)
            await wait_for(lambda: client.tokens.get(1), 5)
            os.kill(head.pid, signal.SIGTERM)
            await wait_for(lambda: head.named("head.drain") or None, 5)
            client.submit(2, [1])
            refused = await client.end_of(2)
            assert isinstance(refused, RequestFailed) and refused.code == "draining"
            assert isinstance(await client.end_of(1), RequestFinished)
            assert client.tokens[1] == answer([1], 150)
        assert await head.wait_end() == 0
        assert [name for name in os.listdir(head.directory.path) if name != "head.lock"] == []


async def test_the_second_signal_stops_at_once(tmp_path):
    with head_process(tmp_path) as head:
        await head.wait_ready()
        async with talking_client(head) as client:
            client.submit(1, [1], seed=STUCK_SEED)
            await trio.sleep(0.1)
            os.kill(head.pid, signal.SIGINT)
            await wait_for(lambda: head.named("head.drain") or None, 5)
            os.kill(head.pid, signal.SIGINT)
            end = await client.end_of(1)
            assert isinstance(end, RequestFailed) and end.code == "draining" and end.retryable
        assert await head.wait_end() == 130


async def test_a_rank_that_keeps_dying_ends_the_head_with_its_last_words(tmp_path):
    with head_process(tmp_path, env={"FAKE_RANK": "exit:1:1"}, restarts=2) as head:
        assert await head.wait_end() == 4
        [failed] = head.named("head.failed")
        assert "rank 1 is lost: 3 deaths" in failed["msg"] and "fake rank 1 was told to fail" in failed["msg"]


async def test_a_rank_that_refuses_its_configuration_ends_the_head_at_once(tmp_path):
    with head_process(tmp_path, env={"FAKE_RANK": "exit:0:2"}) as head:
        assert await head.wait_end() == 2
        [failed] = head.named("head.failed")
        assert failed["msg"] == "rank 0 can not start: fake rank 0 was told to fail"
        assert len([event for event in head.named("rank.start") if event["rank"] == 0]) == 1


async def test_not_ready_in_time_is_an_end_of_its_own(tmp_path):
    with head_process(tmp_path, env={"FAKE_RANK": "exit:0:1"}, restarts=1000, options={"ready_within_s": 0.5}) as head:
        assert await head.wait_end() == 4
        assert "not ready within 0.5 s: no prefill rank is ready" in head.named("head.failed")[0]["msg"]


async def test_a_cancelled_request_ends_on_both_ranks(tmp_path):
    with head_process(tmp_path) as head:
        await head.wait_ready()
        async with talking_client(head) as client:
            client.submit(1, [1], seed=STUCK_SEED)
            client.submit(2, [1], max_tokens=900)
            await wait_for(lambda: client.tokens.get(2), 5)
            for request in (1, 2):
                client.link.post(CancelRequest(request))
                end = await client.end_of(request)
                assert isinstance(end, RequestFailed) and end.code == "cancelled"
        report = await head.status()
        assert (report.running, report.cancelled, report.failed) == (0, 2, 0)
        assert [rank.snapshot.waiting for rank in report.ranks if rank.role == "decode"] in ([0], [1], [2])


async def test_a_client_that_hangs_up_frees_its_ranks(tmp_path):
    with head_process(tmp_path, rank_waiting=1) as head:
        await head.wait_ready()
        async with talking_client(head) as client:
            client.submit(1, [1], seed=STUCK_SEED)
            await trio.sleep(0.1)
            assert (await head.status()).running == 1
        async with talking_client(head) as client:
            client.submit(1, [4], max_tokens=2)
            assert isinstance(await client.end_of(1), RequestFinished)


@pytest.mark.parametrize("kind", ["garbage", "version", "silence"])
async def test_a_broken_client_ends_nothing_but_its_connection(tmp_path, kind):
    with head_process(tmp_path, clients=2) as head:
        await head.wait_ready()
        async with talking_client(head) as good:
            if kind == "version":
                async with talking_client(head, version=99) as bad:
                    await wait_for(lambda: bad.gone, 5)
                    assert isinstance(bad.others[0], Refused) and "99" in bad.others[0].message
            else:
                stream = await trio.open_unix_socket(head.directory.requests_socket)
                if kind == "garbage":
                    await stream.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                    with trio.fail_after(5):
                        while await stream.receive_some():
                            pass
                else:
                    async with talking_client(head) as third:
                        await wait_for(lambda: third.gone, 5)
                        assert "limits.clients" in third.others[0].message
                await stream.aclose()
            good.submit(1, [3], max_tokens=2)
            assert isinstance(await good.end_of(1), RequestFinished)


async def test_the_socket_for_reading_takes_no_changes(tmp_path):
    with head_process(tmp_path) as head:
        await head.wait_ready()
        modes = {entry.name: entry.stat().st_mode & 0o777 for entry in os.scandir(head.directory.path)}
        assert (modes["read.sock"], modes["admin.sock"], modes["requests.sock"]) == (0o660, 0o600, 0o600)
        async with open_operator(head.directory.read_socket) as operator:
            assert operator.head_pid == head.pid
            with pytest.raises(RemoteProtocolError, match=r"admin\.sock"):
                await operator.ask_shutdown(0, "no")
        async with open_operator(head.directory.admin_socket) as operator:
            assert isinstance(await operator.ask(Shutdown(1000, "test")), ShutdownAccepted)
            assert await head.wait_end() == 0


@pytest.mark.parametrize("how", ["close", "kill"])
async def test_a_private_cluster_ends_with_its_owner(tmp_path, how):
    """The lifeline: whoever started the head for himself goes away, in order or not."""
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    ours, theirs = socket.socketpair()
    owner_code = (
        "import os, sys, time, subprocess\n"
        "fd = int(sys.argv[1]); r, w = os.pipe()\n"
        "import json; sys.path.insert(0, os.getcwd())\n"
        "from tests.actors.head_process import HeadProcess, make_config\n"
        "from pathlib import Path\n"
        "os.set_inheritable(r, True)\n"
        "real = subprocess.Popen\n"
        "subprocess.Popen = lambda *a, **k: real(*a, pass_fds=[r], **k)\n"
        "head = HeadProcess(make_config(Path(sys.argv[2])), Path(sys.argv[3]), {}, lifeline=r, parent=os.getpid())\n"
        "os.close(r); os.write(fd, str(head.pid).encode())\n"
        "os.read(fd, 1); os.close(w); sys.exit(head.process.wait(10))\n"
    )
    owner = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", owner_code, str(theirs.fileno()), str(directory), str(tmp_path / "log")],
        pass_fds=[theirs.fileno()],
    )  # fmt: skip
    theirs.close()
    with ours:
        ours.settimeout(10)
        head_pid = int(ours.recv(100))
        ranks = await wait_for(lambda: _rank_pids(tmp_path / "log", 2), 10)
        if how == "close":
            ours.send(b"x")
            assert owner.wait(10) == 0
        else:
            owner.kill()
            owner.wait(10)
        for pid in [head_pid, *ranks]:
            await wait_for(lambda pid=pid: is_gone(pid), 5.0)
    assert "run" not in os.listdir(tmp_path), "the private directory goes with the head"


def _rank_pids(log, count: int) -> list[int] | None:
    if not log.exists():
        return None
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    pids = [line["pid"] for line in lines if line["event"] == "rank.start"]
    return pids if len(pids) == count and any(line["event"] == "head.ready" for line in lines) else None


def test_the_configuration_of_these_tests_is_what_a_child_reads_back(tmp_path):
    config = make_config(tmp_path)
    assert config_from_json(json.dumps(dataclasses.asdict(config)).encode()) == config
