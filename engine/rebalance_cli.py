"""The commands `engine rebalance ...`: look at the experts of a group, plan a re-placement, carry it out, watch it.

What a command asks of people and of the head is `errand`'s business.
"""

from __future__ import annotations

from typing import Any

import click

from engine import cli
from engine.errand import Action, Errand, Mode, print_json


class _StatusFirst(click.Group):
    """Without a command it is `status`, with or without options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["status", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_StatusFirst)
def rebalance() -> None:
    """Place the experts of a group anew while it serves. Without a command: status."""


def _aim_options(command: cli.F) -> cli.F:
    """Options of every command about one part of one group."""
    options = [
        click.option("--pool", type=click.Choice(["prefill", "decode"]), default="decode", show_default=True,
                     help="Pool of the group."),
        click.option("--group", type=click.IntRange(0), default=0, show_default=True, help="Its number in the pool."),
        click.option("--part", type=click.Choice(["main", "draft"]), default="main", show_default=True,
                     help="Part of the model."),
        click.option("--json", "as_json", is_flag=True, help="One JSON object."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return cli.reach_options(command)


def _act_options(command: cli.F) -> cli.F:
    """Options of every command that has the head do something."""
    options = [
        click.option("--reason", default="", metavar="TEXT", help="Why, for the log and the history."),
        click.option("--timeout", type=cli.Duration(), default="2m", show_default=True,
                     help="For the head's answer; a plan may take limits.balance_s."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return _aim_options(command)


def _change_options(command: cli.F) -> cli.F:
    """Options of every command that changes something."""
    options = [
        click.option("--dry-run", is_flag=True, help="Say what would be done; change nothing."),
        click.option("--yes", is_flag=True, help="Do not ask."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return _act_options(command)


def _follow_options(command: cli.F) -> cli.F:
    """Options of the commands that start moving."""
    options = [
        click.option("--wait", "patience", type=cli.Duration(), default="10m", show_default=True,
                     help="Follow it for so long at most."),
        click.option("--no-wait", is_flag=True, help="Return once it has begun."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return _change_options(command)


@rebalance.command("status")
@cli.reach_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def status_command(config_file: str | None, directory: str | None, as_json: bool) -> int:
    """Show the state of every part of every group."""
    from engine.faces.rebalance import describe_parts
    from engine.faces.status import message_json

    def show(errand: Errand) -> int:
        report = errand.read()[1]
        if as_json:
            print_json(parts=message_json(report.parts))
        else:
            click.echo("\n".join(describe_parts(report)))
        return cli.EXIT_OK

    return Errand(cli.runtime_path(config_file, directory)).run(show)


@rebalance.command()
@_aim_options
def history(**options: Any) -> int:
    """List the re-placements that ended, newest first."""
    from engine.faces.rebalance import newest_first, print_history
    from engine.faces.status import message_json

    def show(errand: Errand) -> int:
        part = errand.part(errand.read()[1])
        if errand.as_json:
            print_json(part=str(errand.aim), history=message_json(tuple(newest_first(part))))
        elif part.history:
            print_history(part)
        else:
            click.echo(f"nothing was moved for {errand.aim} since the engine started", err=True)
        return cli.EXIT_OK

    return Errand.of(options).run(show)


@rebalance.command()
@_act_options
def plan(**options: Any) -> int:
    """Plan a placement and print its bill. Changes nothing."""

    def act(errand: Errand) -> int:
        answer, status = errand.act("plan")
        errand.show_plan(answer.report, status, answer.done)
        return cli.EXIT_OK

    return Errand.of(options).run(act)


@rebalance.command()
@_follow_options
@click.option("--plan", "number", type=click.IntRange(1), metavar="ID", help="This one; it must be the last made.")
def apply(number: int | None, **options: Any) -> int:
    """Carry a plan out: a fresh one, or the one named with --plan.

    Asks on a terminal; elsewhere --yes or --plan is the consent. A plan that moves slots between hosts, or that comes
    while the cluster is degraded, wants --yes or the pool's name typed.
    """
    from engine.faces.rebalance import is_worth_applying

    errand = Errand.of(options)
    errand.want_consent(is_given=number is not None)

    def act(errand: Errand) -> int:
        if number is None:
            answer, status = errand.act("plan")
            part = answer.report
            if not is_worth_applying(part):
                errand.show_plan(part, status, answer.done)
                return cli.EXIT_OK
        else:
            status, report = errand.read()
            part = errand.part(report)
            if part.plan.plan != number:
                last = f"the last one is {part.plan.plan}" if part.plan.plan else "none was made yet"
                return errand.refuse(f"plan {number} of {errand.aim} can not be applied: {last}")
        if errand.dry_run:
            errand.show_plan(part, status, "")
            return cli.EXIT_OK
        if not errand.may_apply(part, status):
            return cli.EXIT_REFUSED
        answer, _ = errand.act("apply", plan=part.plan.plan)
        return errand.follow(answer)

    return errand.run(act)


@rebalance.command()
@_follow_options
def rollback(**options: Any) -> int:
    """Go back to the placement before the last re-placement."""
    errand = Errand.of(options)
    errand.want_consent()

    def act(errand: Errand) -> int:
        if not errand.may_change("move the experts back to where they were before the last re-placement"):
            return errand.verdict
        return errand.follow(errand.act("rollback")[0])

    return errand.run(act)


@rebalance.command()
@_change_options
def pause(**options: Any) -> int:
    """Start no more copies of the re-placement that runs. Does not ask: `resume` undoes it."""
    return _change_at_once("pause", "start no more copies", options)


@rebalance.command()
@_change_options
def resume(**options: Any) -> int:
    """Go on with a paused re-placement. Does not ask: `pause` undoes it."""
    return _change_at_once("resume", "go on copying", options)


@rebalance.command()
@_change_options
def abort(**options: Any) -> int:
    """Give the re-placement that runs up; stages that are done stay."""
    errand = Errand.of(options)
    errand.want_consent()

    def act(errand: Errand) -> int:
        if not errand.may_change("give the re-placement that runs up"):
            return errand.verdict
        return errand.show_answer(errand.act("abort")[0])

    return errand.run(act)


@rebalance.command()
@click.argument("value", metavar="off|manual|auto", type=click.Choice(["off", "manual", "auto"]))
@_change_options
def mode(value: Mode, **options: Any) -> int:
    """Choose who starts re-placements, until the engine ends: nobody, operators, or the engine too."""
    errand = Errand.of(options)
    errand.want_consent()

    def act(errand: Errand) -> int:
        if not errand.may_change(f"set the mode to {value}"):
            return errand.verdict
        return errand.show_answer(errand.act("mode", mode=value)[0])

    return errand.run(act)


def _change_at_once(action: Action, words: str, options: dict[str, Any]) -> int:
    """An act that another one undoes: nobody is asked."""

    def act(errand: Errand) -> int:
        if errand.dry_run:
            return errand.show_dry_run(words)
        return errand.show_answer(errand.act(action)[0])

    return Errand.of(options).run(act)
