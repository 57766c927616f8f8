"""engine rebalance against a scripted head on real sockets: what is asked, what is printed, and every exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from engine.cli import main
from tests.cli.scripted_head import ScriptedHead, scripted_head
from tests.cli.terminal import environment, talk_at_terminal
from tests.faces.experts_samples import make_part, make_past, make_plan, make_status
from transport.messages import Message, Rebalance, RebalanceAnswer, Refused


@pytest.fixture
def head(tmp_path):
    with scripted_head(tmp_path) as head:
        yield head


@pytest.fixture
def run(head, capfd):
    """Runs one command in this process; stdin is no terminal."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["rebalance", *arguments, "--dir", head.directory])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def script_move(head: ScriptedHead, result: str, *, plan: int = 18, action: str = "apply", **changes: object) -> None:
    """The head plans, begins what `action` asks for, and has done it after two looks."""
    figures = make_plan(plan, is_rollback=action == "rollback", **changes)
    before = make_part(plan=figures)
    running = make_part(
        plan=figures, state="moving", copied_slots=1, total_slots=3, history=(make_past(plan, "running"),)
    )
    past = make_past(plan, result, reason="rank 3 was lost")
    ended = make_part(plan=figures, history=(past, make_past(3, "applied")))
    head.answer("plan", before, "planned")
    head.answer(action, running, f"plan {plan} begins")
    head.parts = [(running,), (running,), (ended,)]


# ---------------------------------------------------------------- looking


@pytest.mark.parametrize("words", [(), ("status",)])
def test_status_says_how_every_part_is(head, run, words):
    moving = make_part(state="moving", copied_slots=12, total_slots=40, progress_age_ms=7000, plan=make_plan())
    draft = make_part(part="draft", steps=0, mode="auto", history=(make_past(3, "failed", reason="rank 2 was lost"),))
    head.parts = [(moving, draft)]
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "decode group 0, part main: moving, mode manual"
    assert "ranks 1-4   membership 2   epoch 7   6 layers x 32 experts in 256 slots (64 empty)" in lines[1]
    assert lines[2].strip() == (
        "skew 2.00 over 3,210 steps: costs 610 us per step; worst is layer 4 on rank 2"
    )  # fmt: skip
    assert lines[3].strip() == "moving 12 of 40 slots (30 %), no progress for 7.0s"
    assert lines[4].strip() == "last plan 18, 0.2s old: pays: moving 3 slots saves 460.0 us per step"
    assert lines[5] == "decode group 0, part draft: idle, mode auto"
    assert lines[7].strip() == "skew not known: no steps yet"
    assert lines[8].strip().startswith("history: plan 3 failed") and lines[8].endswith("rank 2 was lost")


def test_status_as_json_has_every_figure_by_name(head, run):
    head.parts = [(make_part(plan=make_plan(), history=(make_past(3, "applied"),)),)]
    code, out, _ = run("--json")
    data = json.loads(out)
    assert code == 0 and data["schema"] == 1
    [part] = data["parts"]
    assert part["ranks"] == [1, 2, 3, 4] and part["plan"]["before"]["max_over_mean"] == 2.0
    assert part["history"][0]["result"] == "applied" and part["skew"]["layer"] == 4


def test_an_engine_without_groups_says_so(run):
    assert run("status")[:2] == (0, "every rank has all experts: pools.*.group is 1\n")


def test_the_history_is_a_table_newest_first(head, run):
    applied = make_past(17, "applied", after=1.31, realised=0.92, by="ada@north")
    head.parts = [(make_part(history=(make_past(16, "skipped", reason="no gain", ended_ago_ms=9000), applied)),)]
    code, out, _ = run("history")
    rows = [line.split() for line in out.splitlines()]
    assert code == 0
    assert " ".join(rows[0]) == "plan ended result before predicted after came slots bytes took by why"
    assert " ".join(rows[1]) == "17 4.0s ago applied 2.00 1.25 1.31 92% 3 3.0MiB 0.74s ada@north"
    assert rows[2][:1] == ["16"] and rows[2][3] == "skipped" and rows[2][6:8] == ["-", "-"]
    assert rows[2][-2:] == ["no", "gain"]
    data = json.loads(run("history", "--json")[1])
    assert [past["plan"] for past in data["history"]] == [17, 16] and data["schema"] == 1


def test_an_empty_history_is_told_to_people_only(head, run):
    head.parts = [(make_part(),)]
    code, out, err = run("history")
    assert (code, out) == (0, "") and "nothing was moved for decode group 0, part main" in err


def test_a_part_that_is_not_there_is_a_usage_error_that_says_what_is(head, run):
    head.parts = [(make_part(),)]
    code, out, err = run("history", "--pool", "prefill", "--group", "2")
    assert (code, out) == (2, "")
    assert "there is no prefill group 2, part main; there is decode group 0, part main" in err


# ---------------------------------------------------------------- planning


def test_a_plan_comes_with_its_bill(head, run):
    head.answer("plan", make_part(plan=make_plan()), "planned in 0.2 s")
    code, out, err = run("plan", "--reason", "evening traffic")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "plan 18: a plan for decode group 0, part main, 0.2s old",
        "skew   now 2.00 -> predicted 1.25   saves 460 us per step   pays back after 20 steps (2.4s)",
        "moves  3 of 256 slots   3.0MiB (0 slots between hosts)   2 stages",
        "why    moving 3 slots saves 460.0 us per step",
        "risk   low",
    ]
    [act] = head.acts
    assert (act.action, act.pool, act.group, act.part, act.plan) == ("plan", "decode", 0, "main", 0)
    assert act.user and act.host and act.reason == "evening traffic"


def test_options_choose_the_part(head, run):
    head.answer("plan", make_part(pool="prefill", group=3, part="draft", plan=make_plan()))
    assert run("plan", "--pool", "prefill", "--group", "3", "--part", "draft")[0] == 0
    assert (head.acts[0].pool, head.acts[0].group, head.acts[0].part) == ("prefill", 3, "draft")


def test_a_plan_to_stay_says_why(head, run):
    head.answer("plan", make_part(plan=make_plan(pays=False, reason="moves do not pay", moved_slots=0)))
    code, out, _ = run("plan")
    assert code == 0 and "stay: moves do not pay" in out and "costs 610 us per step" in out and "risk" not in out


def test_a_plan_as_json_has_bill_and_risks(head, run):
    head.status = make_status(degraded=("group 0 of decode has lost rank 3",))
    head.answer("plan", make_part(plan=make_plan(far_slots=2)), "planned")
    data = json.loads(run("plan", "--json")[1])
    assert data["schema"] == 1 and data["done"] == "planned" and data["part"]["plan"]["plan"] == 18
    assert data["risks"] == [
        "2 slots move between hosts",
        "the cluster is degraded: group 0 of decode has lost rank 3",
    ]


def test_a_head_that_does_not_answer_in_time_is_not_reachable(head, run):
    head.answers["plan"] = lambda _: None
    code, out, err = run("plan", "--timeout", "50ms")
    assert (code, out) == (4, "") and "did not answer within 0.05 s" in err


# ---------------------------------------------------------------- applying


def test_apply_plans_applies_that_plan_and_follows_it_to_its_end(head, run):
    script_move(head, "applied")
    code, out, err = run("apply", "--yes")
    assert code == 0 and head.actions() == [("plan", 0), ("apply", 18)]
    assert out == "plan 18 applied   skew 2.00 -> predicted 1.25   3 slots, 3.0MiB in 0.74 s\n"
    assert err.splitlines() == ["plan 18 begins", "moving 1 of 3 slots (33 %)"]


def test_a_plan_that_is_named_is_applied_as_it_is(head, run):
    script_move(head, "applied")
    head.parts.insert(0, (make_part(plan=make_plan()),))
    assert run("apply", "--plan", "18")[0] == 0 and head.actions() == [("apply", 18)]


@pytest.mark.parametrize(("last", "hint"), [(19, "the last one is 19"), (0, "none was made yet")])
def test_another_plan_than_the_last_is_refused(head, run, last, hint):
    head.parts = [(make_part(plan=make_plan(last)),)]
    code, out, err = run("apply", "--plan", "18")
    assert (code, out, head.acts) == (5, "", []) and hint in err


def test_the_end_as_json(head, run):
    script_move(head, "applied")
    data = json.loads(run("apply", "--yes", "--json")[1])
    assert (data["schema"], data["result"], data["plan"]) == (1, "applied", 18)
    assert [past["plan"] for past in data["part"]["history"]] == [18, 3]


@pytest.mark.parametrize("result", ["failed", "rolled_back", "skipped"])
def test_an_apply_that_came_to_nothing_ends_with_1(head, run, result):
    script_move(head, result)
    code, out, _ = run("apply", "--yes")
    assert code == 1 and f"plan 18 {result.replace('_', ' ')}" in out
    assert ("rank 3 was lost" in out) == (result != "rolled_back")


@pytest.mark.parametrize("changes", [{"pays": False}, {"stages": 0}])
def test_nothing_is_applied_if_nothing_pays(head, run, changes):
    head.answer("plan", make_part(plan=make_plan(reason="moves do not pay", **changes)))
    code, out, _ = run("apply", "--yes")
    assert code == 0 and "stay: moves do not pay" in out and head.actions() == [("plan", 0)]


def test_a_dry_run_shows_the_bill_and_applies_nothing(head, run):
    script_move(head, "applied")
    code, out, _ = run("apply", "--dry-run")
    assert code == 0 and "saves 460 us" in out and head.actions() == [("plan", 0)]


def test_no_wait_returns_once_it_has_begun(head, run):
    script_move(head, "applied")
    code, out, err = run("apply", "--yes", "--no-wait")
    assert (code, out, err) == (0, "plan 18 begins\n", "") and len(head.parts) == 3


def test_a_watch_has_an_end_though_the_move_has_none(head, run):
    script_move(head, "applied")
    head.parts = head.parts[:1]
    code, out, err = run("apply", "--yes", "--wait", "300ms")
    assert (code, out) == (4, "") and "plan 18 has not ended after 0.3 s and goes on" in err


def test_a_plan_that_the_head_has_forgotten_is_no_success(head, run):
    script_move(head, "applied")
    head.parts = [(make_part(),)]
    code, out, err = run("apply", "--yes")
    assert (code, out) == (1, "") and "knows no plan 18 of decode group 0, part main any more" in err


def test_what_the_head_refuses_ends_with_5_and_its_reason(head, run):
    script_move(head, "applied")
    head.answers["apply"] = lambda _: Refused("plan 18 is 61 s old (limits.plan_age_s is 60 s)")
    code, out, err = run("apply", "--yes")
    assert (code, out) == (5, "") and err == "refused: plan 18 is 61 s old (limits.plan_age_s is 60 s)\n"


RISKS = [
    (make_status(), {"far_slots": 2}, "2 slots move between hosts"),
    (make_status(degraded=("rank 9 is slow",)), {}, "the cluster is degraded: rank 9 is slow"),
    (make_status(ready=False, reasons=("no prefill rank",)), {}, "the cluster is not ready: no prefill rank"),
]


@pytest.mark.parametrize(("status", "changes", "risk"), RISKS, ids=["far", "degraded", "not ready"])
def test_naming_a_risky_plan_is_not_enough_where_nobody_can_be_asked(head, run, status, changes, risk):
    script_move(head, "applied", **changes)
    head.parts.insert(0, (make_part(plan=make_plan(**changes)),))
    head.status = status
    code, out, err = run("apply", "--plan", "18")
    assert (code, out, head.acts) == (5, "", []) and f"plan 18 is risky ({risk}): add --yes" in err
    assert run("apply", "--yes")[0] == 0


@pytest.mark.parametrize("words", [("apply",), ("rollback",), ("abort",), ("mode", "auto")])
def test_a_change_needs_consent(head, run, words):
    code, out, err = run(*words)
    assert (code, out, head.acts) == (2, "", []) and "nobody can be asked here: give --yes" in err


# ---------------------------------------------------------------- other acts


@pytest.mark.parametrize("result", ["applied", "rolled_back"])
def test_a_rollback_is_followed_to_its_end(head, run, result):
    script_move(head, result, plan=19, action="rollback")
    code, out, _ = run("rollback", "--yes", "--reason", "worse than before")
    assert code == 0 and head.actions() == [("rollback", 0)] and head.acts[0].reason == "worse than before"
    assert out.startswith(f"plan 19 {result.replace('_', ' ')}")


def test_a_rollback_that_failed_ends_with_1(head, run):
    script_move(head, "failed", plan=19, action="rollback")
    assert run("rollback", "--yes")[0] == 1


@pytest.mark.parametrize(
    ("words", "action"),
    [
        (("pause",), "pause"),
        (("resume",), "resume"),
        (("abort", "--yes"), "abort"),
        (("mode", "auto", "--yes"), "mode"),
    ],
)
def test_short_acts_say_what_was_done(head, run, words, action):
    head.answer(action, make_part(state="paused"), "paused after 12 of 40 slots")
    assert run(*words) == (0, "paused after 12 of 40 slots\n", "")
    assert head.actions() == [(action, 0)] and head.acts[0].mode == ("auto" if action == "mode" else "")
    data = json.loads(run(*words, "--json")[1])
    assert data["schema"] == 1 and data["part"]["state"] == "paused"
    head.answers.clear()
    assert run(*words)[0] == 5


@pytest.mark.parametrize("words", [("pause",), ("resume",), ("abort",), ("rollback",), ("mode", "off")])
def test_a_dry_run_changes_nothing(head, run, words):
    head.parts = [(make_part(state="moving"),)]
    code, out, _ = run(*words, "--dry-run")
    assert (code, head.acts) == (0, []) and out.startswith("decode group 0, part main is moving, mode manual; would ")
    assert json.loads(run(*words, "--dry-run", "--json")[1])["dry_run"] is True


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("mode", "automatic"), "'automatic' is not one of"),
        (("mode",), "Missing argument"),
        (("aply",), "No such command 'aply'"),
        (("plan", "--group", "-1"), "-1 is not in the range"),
        (("plan", "--part", "tail"), "'tail' is not one of"),
        (("apply", "--plan", "0"), "0 is not in the range"),
        (("plan", "--reason", "x" * 1001), "--reason may have 1000 characters"),
    ],
)
def test_usage_errors_end_with_2(head, run, words, hint):
    code, out, err = run(*words)
    assert (code, out, head.acts) == (2, "", []) and hint in err


@pytest.mark.parametrize("words", [("status",), ("history",), ("plan",), ("apply", "--yes"), ("pause",)])
def test_without_an_engine_every_command_ends_with_4(tmp_path, capsys, words):
    assert main(["rebalance", *words, "--dir", str(tmp_path)]) == 4
    assert f"engine up --detach --wait ready --dir {tmp_path}" in capsys.readouterr().err


# ---------------------------------------------------------------- terminals, users, signals: processes of their own

ENGINE = [sys.executable, "-m", "engine", "rebalance"]


def talk(head: ScriptedHead, *words: str, says: list[tuple[str, str]]) -> tuple[int, str]:
    return talk_at_terminal("rebalance", *words, "--dir", head.directory, says=says)


ASKS = "Apply plan 18 to prod-a/decode?  [y] yes  [n] no: "
ASKS_NAME = "Apply plan 18 to prod-a/decode?  Type decode to do it, n to leave: "


def test_on_a_terminal_enter_does_nothing_and_y_applies(head):
    script_move(head, "applied")
    code, shown = talk(head, "apply", says=[(ASKS, "\n"), (ASKS, "y\n"), ("plan 18 applied", "")])
    assert code == 0 and head.actions() == [("plan", 0), ("apply", 18)]
    assert "pays back after 20 steps" in shown and "moving 1 of 3 slots" in shown


def test_on_a_terminal_n_and_the_end_of_input_leave_all_as_it_is(head):
    script_move(head, "applied")
    for answer in ("n\n", "\x04"):
        head.acts.clear()
        code, shown = talk(head, "apply", says=[(ASKS, answer)])
        assert code == 5 and head.actions() == [("plan", 0)] and "nothing was changed" in shown


def test_a_risky_plan_wants_the_pools_name(head):
    script_move(head, "applied", far_slots=2)
    code, shown = talk(head, "apply", says=[(ASKS_NAME, "y\n"), (ASKS_NAME, "\n"), (ASKS_NAME, "decode\n")])
    assert code == 0 and head.actions() == [("plan", 0), ("apply", 18)]
    assert "risk   2 slots move between hosts" in shown
    head.acts.clear()
    assert talk(head, "apply", says=[(ASKS_NAME, "n\n")])[0] == 5 and head.actions() == [("plan", 0)]


def test_a_rollback_asks_too(head):
    script_move(head, "applied", plan=19, action="rollback")
    question = "where they were before the last re-placement?"
    assert talk(head, "rollback", says=[(question, "no\n")])[0] == 5 and head.acts == []
    assert talk(head, "rollback", says=[(question, "yes\n")])[0] == 0 and head.actions() == [("rollback", 0)]


def test_ctrl_c_ends_the_watch_and_not_the_move(head):
    script_move(head, "applied")
    head.parts = head.parts[:1]
    process = subprocess.Popen(
        [*ENGINE, "apply", "--yes", "--dir", head.directory], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(),
        # A shell that runs tests in the background has its children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        assert process.stderr is not None
        assert [process.stderr.readline() for _ in range(2)][1].startswith("moving 1 of 3")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and "plan 18 goes on without a watcher" in err and "Traceback" not in err


_AS_ANOTHER_USER = """
import json, os, sys
from engine.cli import main
words = ["rebalance", "plan", "--dir", sys.argv[1]]
codes = [main(words)]  # everything is imported while it can be read
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
os.chdir("/")
codes += [main(words), main(["rebalance", "status", "--dir", sys.argv[1]])]
print(json.dumps(codes))
"""


def test_a_user_who_may_only_read_is_refused(head):
    """The modes of the sockets decide. Root passes all of them, so as root the command goes on as somebody else."""
    head.parts = [(make_part(),)]
    admin = os.path.join(head.directory, "admin.sock")

    def answer(act: Rebalance) -> Message:
        os.chmod(admin, 0o000)
        return RebalanceAnswer("planned", make_part(plan=make_plan()))

    head.answers["plan"] = answer
    os.chmod(os.path.join(head.directory, "read.sock"), 0o666)
    parents = [head.directory]
    while os.path.dirname(parents[-1]) not in ("/", "/tmp"):
        parents.append(os.path.dirname(parents[-1]))
    modes = {path: os.stat(path).st_mode for path in parents}
    try:
        for path in parents:
            os.chmod(path, 0o755)
        done = subprocess.run(
            [sys.executable, "-c", _AS_ANOTHER_USER, head.directory], capture_output=True, text=True, timeout=30,
            check=False, env=environment(),
        )  # fmt: skip
    finally:
        for path, mode in modes.items():
            os.chmod(path, mode)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0, 5, 0], done.stderr
    assert f"refused: {admin}: Permission denied" in done.stderr and len(head.acts) == 1


def test_the_answers_type_is_checked(head, run):
    wrong: Message = make_status()
    head.answers["plan"] = lambda act: wrong
    code, _, err = run("plan")
    assert code == 1 and "the head answered StatusReport" in err
