"""What people type to filter: what it lets through, and what it says of mistakes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.filters import Field, FilterError, compile_filter


@dataclass(frozen=True)
class Rank:
    name: str
    pool: str
    skew: float | None = None
    age: float = 0.0
    label: str | None = None


FIELDS = (
    Field[Rank]("rank", "text", lambda row: row.name),
    Field[Rank]("pool", "text", lambda row: row.pool),
    Field[Rank]("skew", "number", lambda row: row.skew),
    Field[Rank]("age", "seconds", lambda row: row.age),
    Field[Rank]("label", "text", lambda row: row.label),
    Field[Rank]("tok/s", "number", lambda row: 5000),
)
ROWS = (
    Rank("d17", "decode", 1.83, 0.2),
    Rank("d04", "decode", 0.97, 90),
    Rank("d05", "decode", None, 1, "two words a=b"),
    Rank("p03", "prefill", 1.0, 30),
    Rank("p13", "prefill", math.nan, 7200),
)


def found(text: str) -> list[str]:
    wanted = compile_filter(text, FIELDS)
    return [row.name for row in ROWS if wanted.matches(row)]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ["d17", "d04", "d05", "p03", "p13"]),
        ("   ", ["d17", "d04", "d05", "p03", "p13"]),
        ("pool=decode skew>1.4", ["d17"]),
        ("pool=decode", ["d17", "d04", "d05"]),
        ("POOL=Decode", ["d17", "d04", "d05"]),
        ("pool!=decode", ["p03", "p13"]),
        ("pool=dec", []),
        ("pool=dec*", ["d17", "d04", "d05"]),
        ("rank=*3", ["p03", "p13"]),
        ("rank=?03", []),
        ("skew>=1", ["d17", "p03"]),
        ("skew>1", ["d17"]),
        ("skew<1", ["d04"]),
        ("skew<=1", ["d04", "p03"]),
        ("skew=1", ["p03"]),
        # What is not known is neither more nor less, and is not equal to anything.
        ("skew!=1", ["d17", "d04", "d05", "p13"]),
        ("skew>0", ["d17", "d04", "p03"]),
        ("!skew>0", ["d05", "p13"]),
        ("tok/s>4.9k", ["d17", "d04", "d05", "p03", "p13"]),
        ("tok/s>5,000", []),
        ("age>1m", ["d04", "p13"]),
        ("age>=2h", ["p13"]),
        ("age<500ms", ["d17"]),
        ("17", ["d17"]),
        ("DECODE", ["d17", "d04", "d05"]),
        ("!decode", ["p03", "p13"]),
        ("!decode !13", ["p03"]),
        ("p 3", ["p03", "p13"]),
        ('"two words"', ["d05"]),
        ('!"two words" decode', ["d17", "d04"]),
        ('"a=b"', ["d05"]),
        ('label="two words a=b"', ["d05"]),
        ("label=", None),
    ],
)
def test_what_is_let_through(text: str, names: list[str] | None) -> None:
    if names is None:
        with pytest.raises(FilterError, match="a value is missing after `label=`"):
            found(text)
    else:
        assert found(text) == names


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("skwe>1", r"No column `skwe`. Did you mean `skew`\? Columns: rank, pool, skew, age, label, tok/s"),
        ("zzz=1", r"No column `zzz`. Columns: rank, pool"),
        ("skew>abc", "`skew` is a number, and `abc` is none"),
        ("skew>1parsec", "`skew` knows no unit `parsec`; units: k, K, M, G, %"),
        ("age>1parsec", "`age` knows no unit `parsec`; units: us, ms, s"),
        ("pool>decode", "`pool` is text: it takes = and !=, not >"),
        ("skew>", "a value is missing after `skew>`"),
        ("!", "a word is missing after !"),
        ('""', "a word is missing"),
        ('"open', "a quote is not closed"),
        ('17 !"open', "a quote is not closed"),
        ('d"open', "a quote is not closed"),
    ],
)
def test_mistakes_are_named(text: str, error: str) -> None:
    with pytest.raises(FilterError, match=error):
        compile_filter(text, FIELDS)


@given(st.text(max_size=30))
def test_anything_typed_is_a_filter_or_an_error_in_words(text: str) -> None:
    try:
        wanted = compile_filter(text, FIELDS)
    except FilterError as error:
        assert str(error)
    else:
        assert all(isinstance(wanted.matches(row), bool) for row in ROWS)


TERMS = st.sampled_from(["pool=decode", "!decode", "skew>1", "!17", "age<1m", "3", "rank=d*"])


@given(st.lists(TERMS, max_size=4))
def test_terms_are_all_asked_for(terms: list[str]) -> None:
    apart = [set(found(term)) for term in terms]
    assert set(found(" ".join(terms))) == set.intersection({row.name for row in ROWS}, *apart)


@given(st.sampled_from(["pool=decode", "skew>1", "rank=*3"]))
def test_not_is_the_rest(term: str) -> None:
    assert sorted(found(term) + found(f"!{term}")) == sorted(row.name for row in ROWS)


@given(st.floats(0, 1e6, allow_nan=False))
def test_numbers_are_read_as_they_are_said(value: float) -> None:
    row = Rank("d00", "decode", value)
    assert compile_filter(f"skew>={value:.3f}", FIELDS).matches(row) == (value >= float(f"{value:.3f}"))
