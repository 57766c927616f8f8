"""docs/operations.md says what the commands take: every key with its default, every option, every exit code."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import engine.config
from engine import cli, keys
from engine.batch.ending import STOP_TO_EXIT
from engine.batch.fields import FIELD_TO_NEUTRAL, FIELD_TO_TYPE

DOC = Path(__file__).parents[2] / "docs" / "operations.md"
BEGIN, END = "<!-- keys: python tests/cli/test_operations_doc.py -->\n", "<!-- end of keys -->"


def describe_limits() -> dict[str, str]:
    """What `Limits` says of its fields: their names and the strings below them in the source."""
    source = Path(engine.config.__file__).read_text(encoding="utf-8")
    body = next(
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Limits"
    ).body
    return {
        f"limits.{field.target.id}": text.value.value
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def key_table() -> str:
    """The table of all keys, in Markdown."""
    limits = describe_limits()
    lines = ["| key | kind | default | what |", "|---|---|---|---|"]
    for key in keys.KEYS:
        default = "derived" if key.default is None else f"`{json.dumps(key.default)}`"
        kind = " \\| ".join(key.choices) if key.choices else key.kind
        what = limits[key.name] if key.name.startswith("limits.") else key.doc
        lines.append(f"| `{key.name}` | {kind} | {default} | {' '.join(what.split())} |")
    return "\n".join(lines) + "\n"


def commands(group: click.Group, path: str = "engine") -> Iterator[tuple[str, click.Command]]:
    """All commands that people see, with the words that call them."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if command.hidden:
            continue
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def read_doc() -> str:
    return DOC.read_text(encoding="utf-8")


def test_every_limit_is_described() -> None:
    assert {key.name for key in keys.KEYS if key.name.startswith("limits.")} == set(describe_limits())


def test_the_table_of_keys_is_current() -> None:
    found = read_doc().split(BEGIN, 1)[1].split(END, 1)[0]
    assert found == key_table(), "the keys changed: run PYTHONPATH=. python tests/cli/test_operations_doc.py"


@pytest.mark.parametrize(
    ("words", "command"), commands(cli.cli), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_command_and_option_is_named(words: str, command: click.Command) -> None:
    text = read_doc()
    assert f"`{words}`" in text
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden and "--help" not in option.opts:
            name = max(option.opts, key=len)
            assert re.search(rf"`(-\w, )?{name}\b", text), f"{words} {name}"


def test_every_exit_code_is_in_the_table() -> None:
    codes = {value for name, value in vars(cli).items() if name.startswith("EXIT_")}
    table = {int(code) for code in re.findall(r"^\| (\d+) \|", read_doc(), re.MULTILINE)}
    assert codes == table
    assert set(STOP_TO_EXIT.values()) <= table


def test_every_body_field_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", read_doc()))
    assert set(FIELD_TO_TYPE) | set(FIELD_TO_NEUTRAL) <= named


if __name__ == "__main__":
    before, rest = read_doc().split(BEGIN, 1)
    DOC.write_text(f"{before}{BEGIN}{key_table()}{rest[rest.index(END) :]}", encoding="utf-8")
