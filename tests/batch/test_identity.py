"""Ids: found again among many, automatic ones told from explicit ones, digests that see every part."""

from __future__ import annotations

import random

from engine.batch.identity import IdTable, SeenIds, auto_id, auto_line, digest


def test_the_table_agrees_with_a_dict_over_many_ids() -> None:
    rng = random.Random(5)
    table, truth = IdTable(), {}
    for _ in range(20_000):
        custom_id = f"id-{rng.randrange(12_000)}"
        value = digest(custom_id.encode())
        assert table.add(custom_id, value) == (custom_id not in truth)
        truth.setdefault(custom_id, value)
    assert len(table) == len(truth)
    for number in range(13_000):
        assert table.get(f"id-{number}") == truth.get(f"id-{number}")
    assert table.num_bytes <= 72 * max(len(table), 1024)


def test_automatic_and_explicit_ids_can_not_be_confused() -> None:
    seen = SeenIds()
    assert seen.add_auto(1)
    assert not seen.add("line-000001"), "line 1 has this id already"
    assert seen.add("line-000003") and not seen.add_auto(3)
    assert seen.add("line-3") and seen.add("line-0000003"), "these are not how automatic ids are spelled"
    assert seen.add("a") and not seen.add("a")


def test_automatic_ids_round_trip() -> None:
    for line in (1, 999_999, 1_000_000, 123_456_789):
        assert auto_line(auto_id(line)) == line
    assert auto_line("line-0001") is None and auto_line("line-0000001") is None and auto_line("x") is None


def test_a_digest_sees_where_parts_end() -> None:
    assert digest(b"ab", b"c") != digest(b"a", b"bc")
    assert digest(b"ab") == digest(b"ab") != digest(b"ab", b"")
