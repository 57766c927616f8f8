"""One `engine rebalance` command under way: what it asks of the head and of the person, what it prints, how it ends.

stdout has what was asked for, stderr the questions and the progress. A question is asked only where somebody can
answer: with a terminal at stdin and at stderr. No connection to the head is held while a person thinks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pwd
import socket
from collections.abc import Callable
from typing import Any, Literal

import click
import trio

from engine import cli
from engine.errors import PeerGone
from engine.faces.admin import ActRefused, open_operator
from engine.faces.follow import follow_rebalance
from engine.faces.question import Progress, ask_name, ask_yes, can_ask
from engine.faces.rebalance import (
    NO_GROUPS,
    Aim,
    aim_of,
    describe_past,
    describe_plan,
    is_worth_applying,
    list_risks,
    step_seconds,
)
from engine.faces.status import message_json
from engine.runtime import RuntimeDirectory
from transport.messages import ExpertsReport, PartReport, Rebalance, RebalanceAnswer, StatusReport

REASON_CHARACTERS = 1000
"""Of --reason: it is repeated in the log and in every history."""
Action = Literal["plan", "apply", "rollback", "pause", "resume", "abort", "mode"]
Mode = Literal["", "off", "manual", "auto"]


def print_json(**values: Any) -> None:
    click.echo(json.dumps({"schema": 1, **values}))


@dataclasses.dataclass(slots=True)
class Errand:
    """One command. The fields are its options; those that a command lacks keep their defaults.

    Attributes:
        verdict: the exit code, where `may_change` said no.
    """

    path: str
    aim: Aim = dataclasses.field(default_factory=lambda: Aim("decode", 0, "main"))
    as_json: bool = False
    reason: str = ""
    timeout: float = 120.0
    dry_run: bool = False
    yes: bool = False
    patience: float = 600.0
    no_wait: bool = False
    verdict: int = cli.EXIT_OK

    @classmethod
    def of(cls, options: dict[str, Any]) -> Errand:
        """From the options of a command."""
        path = cli.runtime_path(options.pop("config_file"), options.pop("directory"))
        aim = Aim(options.pop("pool"), options.pop("group"), options.pop("part"))
        if len(options.get("reason", "")) > REASON_CHARACTERS:
            raise click.UsageError(f"--reason may have {REASON_CHARACTERS} characters")
        return cls(path, aim, **options)

    def run(self, action: Callable[[Errand], int]) -> int:
        """Does it; what the head refuses, or this user may not do, is exit code 5."""
        try:
            return action(self)
        except ActRefused as error:
            return self.refuse(str(error))
        except PeerGone as error:
            if isinstance(error.__cause__, PermissionError):
                return self.refuse(f"{error}: what a user may do is decided by the modes of the sockets")
            return cli.tell_unreachable(self.path, error)

    def refuse(self, why: str) -> int:
        click.echo(f"refused: {why}", err=True)
        return cli.EXIT_REFUSED

    # -- the head

    def read(self) -> tuple[StatusReport, ExpertsReport]:
        async def ask() -> tuple[StatusReport, ExpertsReport]:
            async with open_operator(RuntimeDirectory(self.path).read_socket) as head:
                return await head.ask_status(), await head.ask_experts()

        return trio.run(ask)

    def act(self, action: Action, *, plan: int = 0, mode: Mode = "") -> tuple[RebalanceAnswer, StatusReport]:
        """Has the head do it, and asks how the cluster is then."""
        pool, group, part = dataclasses.astuple(self.aim)
        order = Rebalance(action, pool, group, part, plan, mode, _user(), socket.gethostname()[:256], self.reason)

        async def ask() -> tuple[RebalanceAnswer, StatusReport]:
            async with open_operator(RuntimeDirectory(self.path).admin_socket) as head:
                return await head.ask_rebalance(order, self.timeout), await head.ask_status()

        return trio.run(ask)

    def part(self, report: ExpertsReport) -> PartReport:
        """The part that the options name.

        Raises:
            UsageError: there is none; the message says which there are.
        """
        part = self.aim.find(report)
        if part is None:
            there = "; ".join(str(aim_of(part)) for part in report.parts)
            raise click.UsageError(f"there is no {self.aim}; " + (f"there is {there}" if there else NO_GROUPS))
        return part

    # -- the person

    def want_consent(self, *, is_given: bool = False) -> None:
        """Refuses at once what nobody has agreed to and nobody can be asked about.

        Args:
            is_given: by another option than --yes.
        """
        if not (self.yes or self.dry_run or is_given or can_ask()):
            raise click.UsageError("nobody can be asked here: give --yes, or for apply --plan ID")

    def may_change(self, words: str) -> bool:
        """Whether to do what `words` say; if not, `verdict` has the exit code."""
        if self.dry_run:
            self.verdict = self.show_dry_run(words)
            return False
        if self.yes or ask_yes(f"{self.aim}: {words}?"):
            return True
        self.verdict = self._declined()
        return False

    def may_apply(self, part: PartReport, status: StatusReport) -> bool:
        """Whether to apply the part's last plan: shows its bill and asks, in proportion to what may go wrong."""
        if self.yes:
            return True
        risks = list_risks(part, status)
        if not can_ask():  # --plan was given
            if risks:
                self.refuse(f"plan {part.plan.plan} is risky ({'; '.join(risks)}): add --yes")
            return not risks
        for line in [*describe_plan(part, step_seconds(part, status)), *(f"risk   {risk}" for risk in risks)]:
            click.echo(line, err=True)
        question = f"Apply plan {part.plan.plan} to {status.cluster}/{self.aim.pool}?"
        agreed = ask_name(question, self.aim.pool) if risks else ask_yes(question)
        if not agreed:
            self._declined()
        return agreed

    def _declined(self) -> int:
        click.echo("nothing was changed", err=True)
        return cli.EXIT_REFUSED

    # -- what is printed

    def show_plan(self, part: PartReport, status: StatusReport, done: str) -> None:
        if self.as_json:
            print_json(done=done, risks=list_risks(part, status), part=message_json(part))
            return
        for line in describe_plan(part, step_seconds(part, status)):
            click.echo(line)
        if is_worth_applying(part):
            risks = list_risks(part, status)
            click.echo(f"risk   {'; '.join(risks) if risks else 'low'}")

    def show_dry_run(self, words: str) -> int:
        part = self.part(self.read()[1])
        if self.as_json:
            print_json(dry_run=True, would=words, part=message_json(part))
        else:
            click.echo(f"{self.aim} is {part.state}, mode {part.mode}; would {words}")
        return cli.EXIT_OK

    def show_answer(self, answer: RebalanceAnswer) -> int:
        if self.as_json:
            print_json(done=answer.done, part=message_json(answer.report))
        else:
            click.echo(answer.done)
        return cli.EXIT_OK

    def follow(self, answer: RebalanceAnswer) -> int:
        """Shows what has begun until it has ended; 1 if it failed."""
        if self.no_wait:
            return self.show_answer(answer)
        click.echo(answer.done, err=True)
        running = next((past.plan for past in answer.report.history if past.result == "running"), None)
        plan = answer.report.plan.plan if running is None else running
        progress = Progress()
        try:
            past, part = trio.run(
                follow_rebalance, RuntimeDirectory(self.path).read_socket, self.aim, plan, progress.tell, self.patience
            )
        except (KeyboardInterrupt, BaseExceptionGroup) as error:
            if not cli.is_interrupt(error):
                raise
            progress.end()
            click.echo(f"plan {plan} goes on without a watcher; see engine rebalance status", err=True)
            return cli.EXIT_INTERRUPTED
        progress.end()
        if past is None:
            click.echo(f"plan {plan} has not ended after {self.patience:g} s and goes on", err=True)
            return cli.EXIT_UNREACHABLE
        if self.as_json:
            print_json(result=past.result, plan=plan, part=message_json(part))
        else:
            click.echo(describe_past(past))
        good = ("applied", "rolled_back") if answer.report.plan.is_rollback else ("applied",)
        return cli.EXIT_OK if past.result in good else cli.EXIT_SOME_FAILED


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name[:256]
    except KeyError:  # a container's user need not have a name
        return f"uid {os.getuid()}"
