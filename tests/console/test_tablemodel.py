"""A table that stands still under the cursor, whatever comes in; and lines that fit, whatever the width."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.columns import Column
from console.filters import FilterError
from console.lines import Line, plain, width_of
from console.marks import style_of
from console.tablemodel import TableModel


@dataclass(frozen=True)
class Row:
    name: str
    value: float | None = 0.0
    note: str = ""


shown: list[str] = []


def show_name(row: Row) -> str:
    shown.append(row.name)
    return row.name


def make_table(sort: str = "value") -> TableModel[Row]:
    columns = [
        Column[Row]("name", "name", 4, lambda row: row.name, show_name, align="<", kind="text", is_descending=False),
        Column[Row]("value", "value", 6, lambda row: row.value, lambda row: (f"{row.value}", "warn")),
        Column[Row]("twice", "×2", 4, lambda row: row.value and row.value * 2, lambda row: "2", priority=2),
        Column[Row](
            "note", "note", 5, lambda row: row.note, lambda row: (("a", ""), (row.note, "dim")),
            align="<", priority=1, kind="text", grow=10, is_descending=False,
        ),
    ]  # fmt: skip
    return TableModel(columns, lambda row: row.name, sort)


def names(table: TableModel[Row], width: int = 40, height: int = 30) -> list[str]:
    return [plain(line)[1:5].strip() for line in table.lines(width, height)[1:]]


def cursor_line(table: TableModel[Row], width: int = 40, height: int = 30) -> int:
    (at,) = [y for y, line in enumerate(table.lines(width, height)) if plain(line).startswith("▸")]
    return at


def test_rows_are_sorted_and_what_has_no_value_is_last() -> None:
    table = make_table()
    rows = [Row("a", 1.0), Row("b", 3.0), Row("c", None), Row("d", 3.0), Row("e", math.nan), Row("f", 2.0)]
    table.set_rows(rows)
    assert names(table) == ["b", "d", "f", "a", "c", "e"]
    table.reverse()
    assert names(table) == ["a", "f", "b", "d", "c", "e"]
    table.sort_by("name")
    assert names(table) == ["a", "b", "c", "d", "e", "f"]
    table.sort_next(40)
    assert table.sort == "value" and names(table)[0] == "b"


def test_sorting_goes_through_the_columns_that_are_seen() -> None:
    table = make_table("name")
    table.set_rows([Row("a")])
    seen = []
    for _ in range(3):
        table.sort_next(20)
        seen.append(table.sort)
    assert [at.column.name for at in table.placed(20)] == ["name", "value", "note"]
    assert seen == ["value", "note", "name"]


def test_nothing_moves_under_the_cursor() -> None:
    table = make_table()
    table.set_rows([Row("a", 3), Row("b", 2), Row("c", 1)])
    assert not table.is_frozen and "frozen" not in plain(table.caption())
    table.move(1)
    table.move(1)
    assert table.cursor == "b" and table.is_frozen
    assert plain(table.caption()) == "sort value ▼  3  ▼ frozen"
    # a sinks, d is new and the largest, c is gone: b stays where it is.
    table.set_rows([Row("d", 9), Row("a", 0), Row("b", 2.5)])
    assert names(table) == ["a", "b", "c", "d"]
    assert cursor_line(table) == 2
    assert table.is_gone("c") and table.current == Row("b", 2.5) and table.row("c") == Row("c", 1)
    assert all(style == "gone" for text, style in table.lines(40, 9)[3] if text.strip())
    assert plain(table.caption()) == "sort value ▼  3  ▼ frozen"
    # It comes back before anyone left: it is at its place.
    table.set_rows([Row("d", 9), Row("a", 0), Row("b", 2.5), Row("c", 8)])
    assert names(table) == ["a", "b", "c", "d"] and not table.is_gone("c")
    assert table.leave() and not table.leave()
    assert names(table) == ["d", "c", "b", "a"]


def test_what_is_gone_goes_when_one_looks_from_the_top() -> None:
    table = make_table()
    table.set_rows([Row("a", 3), Row("b", 2)])
    table.move(1)
    table.set_rows([Row("b", 2), Row("c", 5)])
    assert names(table) == ["a", "b", "c"]
    table.go_top()
    assert names(table) == ["c", "b"] and table.cursor == "c" and table.is_frozen
    assert table.row("a") is None
    table.go_end()
    assert table.cursor == "b"


def test_asking_for_an_order_sorts_at_once() -> None:
    table = make_table()
    table.set_rows([Row("a", 1), Row("b", 2)])
    table.move(1)
    table.set_rows([Row("a", 9), Row("b", 2)])
    assert names(table) == ["b", "a"]
    table.sort_by("value")
    assert names(table) == ["a", "b"] and table.cursor == "b" and table.is_frozen


def test_filters_hide_rows_but_never_the_one_under_the_cursor_by_itself() -> None:
    table = make_table()
    table.set_rows([Row("a", 1, "red"), Row("b", 2, "blue"), Row("c", 3, "red")])
    table.set_filter("note=red")
    assert names(table) == ["c", "a"]
    assert plain(table.caption()) == "sort value ▼  filter note=red  2 of 3"
    with pytest.raises(FilterError, match="No column `colour`"):
        table.set_filter("colour=red")
    assert table.filter.text == "note=red" and names(table) == ["c", "a"]
    table.move(1)
    table.set_rows([Row("a", 1, "red"), Row("b", 2, "red"), Row("c", 3, "blue"), Row("d", 0, "blue")])
    # c matches no more and stays while the cursor is on it; b matches now and is put at the end; d does not match.
    assert names(table) == ["c", "a", "b"] and table.cursor == "c"
    table.set_filter("note=red")
    assert names(table) == ["b", "a"] and table.cursor == "b"
    table.set_filter("note=green")
    assert names(table) == [] and table.cursor is None
    table.move(1)
    assert table.cursor is None


def test_the_window_follows_the_cursor() -> None:
    table = make_table("name")
    table.set_rows([Row(f"r{n:02}", n) for n in range(30)])
    assert names(table, height=6) == ["r00", "r01", "r02", "r03", "r04"]
    table.move(-1)
    assert table.cursor == "r04"
    table.move(2)
    assert names(table, height=6) == ["r02", "r03", "r04", "r05", "r06"]
    table.move_page(1)
    assert table.cursor == "r10" and names(table, height=6)[-1] == "r10"
    table.move_page(-10)
    assert table.cursor == "r00" and names(table, height=6)[0] == "r00"
    table.go_end()
    assert names(table, height=6) == ["r25", "r26", "r27", "r28", "r29"]
    # A window that grows shows as much as there is.
    assert len(names(table, height=40)) == 30
    assert table.point(3) and table.cursor == "r02"
    assert not table.point(0) and not table.point(31)


def test_cells_can_be_chosen_and_copied() -> None:
    table = make_table()
    table.set_rows([Row("a", 1.5, "x")])
    assert table.cell_text(40) == ""
    table.move(1)
    assert table.cell_text(40) == "a"
    table.lines(40, 5)
    table.move_column(1)
    assert table.cell_text(40) == "1.5"
    assert ("   1.5", "warn chosen") in table.lines(40, 5)[1]
    table.move_column(9)
    assert table.cell_text(40) == "ax"
    table.move_column(-9)
    assert table.cell_text(40) == "a"
    assert table.record(Row("a", math.nan, "x")) == {"name": "a", "value": None, "twice": None, "note": "x"}


def test_columns_give_way_by_priority_and_grow_where_there_is_room() -> None:
    table = make_table()
    assert [(at.column.name, at.x, at.width) for at in table.placed(12)] == [("name", 1, 4), ("value", 7, 6)]
    assert [at.column.name for at in table.placed(20)] == ["name", "value", "note"]
    assert [at.width for at in table.placed(26)] == [4, 6, 4, 5]
    assert [at.width for at in table.placed(30)] == [4, 6, 4, 9]
    assert [at.width for at in table.placed(99)] == [4, 6, 4, 15]


def test_thousands_of_rows_cost_what_is_seen() -> None:
    table = make_table()
    table.set_rows([Row(f"{n}", n) for n in range(4096)])
    shown.clear()
    lines = table.lines(80, 24)
    assert len(lines) == 24 and len(shown) == 23
    assert plain(table.caption()) == "sort value ▼  4,096"


ROWS = st.lists(
    st.builds(
        Row,
        st.sampled_from([f"r{n}" for n in range(12)]),
        st.one_of(st.none(), st.floats(-5, 5), st.just(math.nan)),
        st.sampled_from(["", "red", "blau und mehr", "日本語"]),
    ),
    max_size=12,
    unique_by=lambda row: row.name,
)
ACTS = st.one_of(
    st.tuples(st.just("rows"), ROWS),
    st.tuples(st.sampled_from(["move", "page", "column"]), st.integers(-20, 20)),
    st.tuples(st.sampled_from(["top", "end", "leave", "reverse", "next"]), st.none()),
    st.tuples(st.just("filter"), st.sampled_from(["", "red", "value>0", "!red"])),
)


def act(table: TableModel[Row], kind: str, value: object) -> None:
    match kind, value:
        case "rows", list():
            table.set_rows(value)
        case "move", int():
            table.move(value)
        case "page", int():
            table.move_page(value)
        case "column", int():
            table.move_column(value)
        case "filter", str():
            table.set_filter(value)
        case _:
            {
                "top": table.go_top,
                "end": table.go_end,
                "leave": table.leave,
                "reverse": table.reverse,
                "next": lambda: table.sort_next(40),
            }[kind]()


def check_lines(lines: list[Line], width: int, height: int) -> None:
    assert len(lines) <= height
    for line in lines:
        assert width_of(line) == width
        for _, style in line:
            style_of(style, "dark")


@settings(max_examples=150, deadline=None)
@given(st.lists(ACTS, max_size=14), st.integers(12, 70), st.integers(2, 9))
def test_whatever_happens_the_cursor_stays_on_its_row_and_lines_fit(
    acts: list[tuple[str, object]], width: int, height: int
) -> None:
    table = make_table()
    for kind, value in acts:
        cursor, above = table.cursor, list(table.keys)
        act(table, kind, value)
        lines = table.lines(width, height)
        check_lines(lines, width, height)
        assert len(lines) == 1 + min(height - 1, len(table.keys))
        if table.cursor is not None:
            assert table.cursor in table.keys and table.current is not None
            assert 1 <= cursor_line(table, width, height) < height
        if kind == "rows" and cursor is not None:
            assert table.cursor == cursor
            assert list(table.keys)[: len(above)] == above
