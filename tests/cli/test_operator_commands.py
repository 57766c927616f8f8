"""engine ranks, requests, events, drain, undrain and cancel against the head's real desk, with made-up answers."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys

import pytest

from engine.cli import main
from tests.cli.desk_thread import desk_thread
from tests.cli.terminal import environment, talk_at_terminal
from tests.faces.desk_rig import HOT_EXPERT, HOT_LAYER, make_heat
from tests.faces.experts_samples import make_part, make_status
from tests.faces.test_status import make_rank
from transport import messages as m

ME = pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture
def run(capfd):
    """Runs one command in this process; stdin is no terminal."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture
def head(tmp_path):
    with desk_thread(tmp_path) as head:
        yield head


# ---------------------------------------------------------------- ranks


def test_ranks_have_a_line_each_with_skew_and_the_hottest_expert(head, run):
    code, out, err = run("ranks", "--dir", head.directory)
    assert (code, err) == (0, "")
    heading, *rows = [line.split() for line in out.splitlines()]
    assert heading[:3] == ["rank", "group", "state"]
    assert [row[0] for row in rows] == ["p0", "d1", "d2", "d3", "d4"]
    assert rows[0][1] == "-" and rows[0][-4:-1] == ["-", "-", "-"], "a rank that has all experts has no skew"
    skew = f"{(5 + 2.5) / 6:.2f}"
    assert rows[2][1] == "decode/0" and rows[2][-5:-1] == [skew, f"L{HOT_LAYER}", f"E{HOT_EXPERT}", "2.50"]
    assert rows[1][-5] == "1.00"


def test_ranks_are_sorted_and_filtered(head, run):
    def names(*words: str) -> list[str]:
        code, out, _ = run("ranks", *words, "--dir", head.directory)
        assert code == 0
        return [line.split()[0] for line in out.splitlines()[1:]]

    assert names("--sort", "skew")[0] == "d2"
    assert names("--filter", "decode", "--filter", "!d3 ready") == ["d1", "d2", "d4"]
    assert names("--filter", "decode/0 d4") == ["d4"]
    code, out, err = run("ranks", "--filter", "lost", "--dir", head.directory)
    assert (code, out, err) == (0, "", "no rank fits --filter\n")


def test_ranks_as_json(head, run):
    data = json.loads(run("ranks", "--json", "--sort", "load", "--dir", head.directory)[1])
    assert data["schema"] == 1
    first, *_, last = data["ranks"]
    assert first["rank"] == 2 and first["group"] == "decode/0"
    assert first["heat"] == {"skew": pytest.approx(1.25), "layer": HOT_LAYER, "load": 2.5, "expert": HOT_EXPERT}
    assert first["snapshot"]["pages_total"] == 4096
    assert [one["rank"] for one in data["ranks"] if one["heat"] is None] == [0] and last["rank"] != 2


def test_loads_that_were_not_counted_yet_are_not_shown(tmp_path, run):
    def cold(ask):
        return make_heat(ask, make_part(), steps=0)

    for heat in (cold, lambda ask: m.Refused("gone")):
        with desk_thread(tmp_path, heat=heat) as head:
            data = json.loads(run("ranks", "--json", "--dir", head.directory)[1])
            assert len(data["ranks"]) == 5 and not any(one["heat"] for one in data["ranks"])


def test_eighty_columns_are_enough_for_ranks_and_requests():
    from rich.console import Console

    from engine.faces.rankrows import RankHeat, RankRow, render_rows
    from engine.faces.requestrows import render_requests
    from tests.faces.desk_rig import make_request

    row = RankRow(make_rank(117, "decode", "ready"), "decode/11", RankHeat(1.08, 41, 1.87, 255))
    requests = m.RequestsReport(1, (make_request(123_456_789, label="x\x1b[31m" * 9, client="engine batch"),))
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(render_rows([row]))
        console.print(render_requests(requests))
    text = capture.get()
    assert max(map(len, text.splitlines())) <= 80 and len(text.splitlines()) == 4
    assert "117.9ms" in text and "L41 E255" in text and "\x1b" not in text


# ---------------------------------------------------------------- requests


def test_requests_are_listed_with_their_numbers(head, run):
    code, out, err = run("requests", "--dir", head.directory)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0][:2] == ["request", "state"] and [row[0] for row in rows[1:]] == ["0", "1", "2", "3", "4"]
    assert "p0>d3" in rows[1] and "40/256" in rows[1] and rows[1][-1] == "line-0"
    code, out, err = run("requests", "--limit", "2", "--dir", head.directory)
    assert len(out.splitlines()) == 3 and err == "the oldest 2 of 5; more with --limit\n"
    data = json.loads(run("requests", "--json", "--limit", "2", "--dir", head.directory)[1])
    assert (data["schema"], data["total"], len(data["requests"])) == (1, 5, 2)
    assert data["requests"][0]["decode_rank"] == 3


def test_only_slow_requests_are_asked_for(tmp_path, run):
    asked = []

    def requests(ask):
        asked.append(ask)
        return m.RequestsReport(0, ())

    with desk_thread(tmp_path, requests=requests) as head:
        assert run("requests", "--slow", "1m30s", "--dir", head.directory) == (0, "", "no request is older than 90 s\n")
    assert asked == [m.AskRequests(limit=100, older_ms=90_000)]


# ---------------------------------------------------------------- events


def test_events_are_printed_from_a_number_on(head, run):
    head.add_event("rank.ready", "rank=3")
    head.add_event("admin.drain", "user=ada | was \x1b[2J here")
    code, out, err = run("events", "--dir", head.directory)
    lines = out.splitlines()
    assert (code, err) == (0, "") and len(lines) == 2
    assert lines[0].split()[0] == "1" and lines[0].endswith("INFO    rank.ready rank=3")
    assert lines[1].endswith("admin.drain user=ada | was ?[2J here"), "nothing in a text moves the cursor"
    code, out, _ = run("events", "--after", "1", "--json", "--dir", head.directory)
    assert json.loads(out) == {
        "schema": 1, "seq": 2, "at_ms": 1_700_000_000_123, "level": "info", "name": "admin.drain",
        "text": "user=ada | was \x1b[2J here",
    }  # fmt: skip
    assert run("events", "--after", "2", "--dir", head.directory) == (0, "", "")


def test_all_events_of_a_full_ring_are_printed_and_the_lost_ones_counted(head, run):
    for number in range(5000):
        head.answers.events.add("info", "n", f"i={number}", 1)  # nobody watches yet: the loop has no part in it
    code, out, err = run("events", "--json", "--dir", head.directory)
    numbers = [json.loads(line)["seq"] for line in out.splitlines()]
    assert code == 0 and numbers == list(range(905, 5001)) and err == "904 events before these are gone\n"


def test_events_are_followed_until_ctrl_c(head):
    head.add_event("first", "")
    process = subprocess.Popen(
        [sys.executable, "-m", "engine", "events", "--follow", "--dir", head.directory], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**environment(), "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert " first" in process.stdout.readline()
        head.add_event("second", "a=1")
        assert process.stdout.readline().rstrip().endswith("second a=1")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err) == (0, "", "")


# ---------------------------------------------------------------- acts


@pytest.fixture
def acting(tmp_path):
    """A head that notes what it is to do, and does it."""
    seen: list = []

    def do(message, user):
        seen.append((message, user))
        return m.ActDone("done so")

    with desk_thread(tmp_path, {"drain": do, "cancel": do, "reset": do}) as head:
        head.seen = seen
        yield head


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (["2"], (2,)),
        (["d2", "p0"], (0, 2)),
        (["1-3"], (1, 2, 3)),
        (["d1-d2,4"], (1, 2, 4)),
        (["decode"], (1, 2, 3, 4)),
        (["prefill", "2,2"], (0, 2)),
    ],
)
def test_ranks_are_drained_by_their_names(acting, run, words, ranks):
    code, out, err = run("drain", *words, "--yes", "--reason", "fans", "--dir", acting.directory)
    assert (code, out, err) == (0, "done so\n", "")
    [(message, user)] = acting.seen
    assert (message.ranks, message.drain, message.reason, user) == (ranks, True, "fans", ME)
    assert message.host
    code, out, _ = run("undrain", *words, "--yes", "--json", "--dir", acting.directory)
    assert json.loads(out) == {"schema": 1, "done": "done so", "ranks": list(ranks)}
    assert (acting.seen[1][0].ranks, acting.seen[1][0].drain) == (ranks, False)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["drain", "9"], "there is no rank 9; there are 0-4"),
        (["drain", "p1"], "'p1': rank 1 is a decode rank"),
        (["drain", "3-1"], "ends before it begins"),
        (["drain", "all"], "'all' is no rank: write 17, d17, 2-5, prefill or decode"),
        (["drain"], "Missing argument"),
        (["drain", "0-999999999"], "there is no rank 999999999"),
        (["cancel", "x"], "'x' is not a valid integer"),
        (["cancel", "-1"], "No such option"),
        (["cancel", *map(str, range(4097))], "4096 requests at once"),
        (["drain", "1", "--reason", "x" * 1001], "--reason may have 1000 characters"),
    ],
)
def test_usage_errors_end_with_2_and_change_nothing(acting, run, words, hint):
    code, out, err = run(*words, "--yes", "--dir", acting.directory)
    assert (code, out, acting.seen) == (2, "", []) and hint in err


@pytest.mark.parametrize("words", [["drain", "1"], ["undrain", "1"], ["cancel", "7"], ["cache", "reset"]])
def test_where_nobody_can_be_asked_consent_has_to_be_given(acting, run, words):
    code, out, err = run(*words, "--dir", acting.directory)
    assert (code, out, acting.seen) == (2, "", []) and "give --yes" in err


def test_requests_are_cancelled_by_their_numbers(acting, run):
    code, out, _ = run("cancel", "7", "8", "--yes", "--json", "--reason", "stuck", "--dir", acting.directory)
    assert code == 0 and json.loads(out) == {"schema": 1, "done": "done so", "requests": [7, 8]}
    [(message, user)] = acting.seen
    assert (message.requests, message.reason, user) == ((7, 8), "stuck", ME)


def test_caches_are_emptied(acting, run):
    code, out, _ = run("cache", "reset", "--yes", "--json", "--reason", "cold", "--dir", acting.directory)
    assert code == 0 and json.loads(out) == {"schema": 1, "done": "done so"}
    [(message, user)] = acting.seen
    assert isinstance(message, m.ResetCache) and (message.reason, user) == ("cold", ME) and message.host


def test_what_the_head_refuses_ends_with_5(tmp_path, run):
    with desk_thread(tmp_path, {"cancel": lambda *_: m.Refused("no such request")}) as head:
        assert run("cancel", "7", "--yes", "--dir", head.directory) == (5, "", "refused: no such request\n")


@pytest.mark.parametrize(
    ("words", "question"),
    [
        (["drain", "1-2"], "Drain ranks 1-2 of prod-a, 2 of 5? 8704 requests are there and will be finished."),
        (["undrain", "d2"], "Undrain rank 2 of prod-a?"),
        (["cancel", *map(str, range(12))], "Cancel request 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more?"),
    ],
)
def test_on_a_terminal_it_asks_and_enter_does_nothing(acting, words, question):
    asks = f"{question}  [y] yes  [n] no: "
    code, shown = talk_at_terminal(*words, "--dir", acting.directory, says=[(asks, "\n"), (asks, "n\n")])
    assert code == 5 and "nothing was changed" in shown and acting.seen == []
    code, shown = talk_at_terminal(*words, "--dir", acting.directory, says=[(asks, "y\n"), ("done so", "")])
    assert code == 0 and len(acting.seen) == 1


@pytest.mark.parametrize(
    "words", [["ranks"], ["requests"], ["events"], ["drain", "1", "--yes"], ["cancel", "1", "--yes"], ["relay"]]
)
def test_without_an_engine_every_command_ends_with_4(tmp_path, run, words):
    code, out, err = run(*words, "--dir", str(tmp_path))
    assert (code, out) == (4, "") and f"engine up --detach --wait ready --dir {tmp_path}" in err


def test_status_says_which_ranks_are_drained(tmp_path, run):
    rank = make_rank(3, "decode", "draining", "drained")
    status = make_status(ranks=(rank,), degraded=("rank 3 takes no new requests: drained by ada (fans)",))
    with desk_thread(tmp_path, status=lambda: status) as head:
        out = run("status", "--dir", head.directory)[1]
    assert "degraded: rank 3 takes no new requests: drained by ada (fans)" in out and "draining drained" in out
