"""docs/protocol.md says what the code does: the diagrams, every message, its route, and whether it has a blob."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.core import epochs, handback, handoff
from transport import messages, wire

DOC = Path(__file__).parents[2] / "docs" / "protocol.md"
MODULES = {"handoff": handoff, "handback": handback, "epochs": epochs}
"""Whose tables are drawn."""
END = "<!-- end of diagram -->"
ROW = re.compile(r"^\| (\d+) \| `(\w+)` \| ([^|]*) \| ([^|]*)\|", re.MULTILINE)
ROUTE_TO_ACCEPTED = {
    "client → head": messages.HEAD_FROM_CLIENT,
    "head → client": messages.CLIENT_FROM_HEAD,
    "rank → head": messages.HEAD_FROM_RANK,
    "head → rank": messages.RANK_FROM_HEAD,
    "prefill → decode": messages.DECODE_FROM_PREFILL,
    "decode → prefill": messages.PREFILL_FROM_DECODE,
    "operator → head": messages.HEAD_FROM_OPERATOR,
    "head → operator": messages.OPERATOR_FROM_HEAD,
}


def split_doc(text: str, module: str) -> tuple[str, str, str]:
    """What stands before, between and after the marks of a module's diagrams."""
    begin = re.search(rf"<!-- diagram: .*engine\.core\.{module} .*-->\n", text)
    assert begin is not None, f"the mark before the diagrams of {module} is gone"
    end = text.index(END, begin.end())
    return text[: begin.end()], text[begin.end() : end], text[end:]


def read_rows() -> list[tuple[int, str, set[str], bool]]:
    """Of the table of messages: kind, name, routes, whether it names a blob."""
    rows = ROW.findall(DOC.read_text(encoding="utf-8"))
    return [(int(kind), name, set(routes.split(", ")), bool(blob.strip())) for kind, name, routes, blob in rows]


@pytest.mark.parametrize("module", MODULES)
def test_the_diagrams_are_those_of_the_tables(module: str) -> None:
    assert split_doc(DOC.read_text(encoding="utf-8"), module)[1] == MODULES[module].diagram() + "\n", (
        f"the tables of {module} changed: run python tests/core/test_protocol_doc.py"
    )


def test_every_message_has_its_row() -> None:
    wanted = [(kind, message.__name__) for kind, message in sorted(messages.KIND_TO_MESSAGE.items())]
    assert [(kind, name) for kind, name, _, _ in read_rows()] == wanted


def test_routes_are_those_that_readers_accept() -> None:
    route_to_names = {
        route: {name for _, name, routes, _ in read_rows() if route in routes} for route in ROUTE_TO_ACCEPTED
    }
    assert route_to_names == {
        route: {message.__name__ for message in accepted} for route, accepted in ROUTE_TO_ACCEPTED.items()
    }
    assert set().union(*(routes for _, _, routes, _ in read_rows())) == set(ROUTE_TO_ACCEPTED)


def test_blobs_are_named_where_there_are_some() -> None:
    assert {name for _, name, _, blob in read_rows() if blob} == {message.__name__ for message in wire.BLOB_LIMITS}


if __name__ == "__main__":
    for name, drawn in MODULES.items():
        before, _, after = split_doc(DOC.read_text(encoding="utf-8"), name)
        DOC.write_text(f"{before}{drawn.diagram()}\n{after}", encoding="utf-8")
