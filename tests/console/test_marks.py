"""Styles in every theme, and heat ramps whose order is seen: measured as lightness, not believed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from rich.cells import cell_len
from rich.color import Color, ColorType

from console import marks

CUBE = {0, 95, 135, 175, 215, 255}


def lightness(colour: str) -> float:
    """CIE L* of a colour: 0 is black, 100 is white."""
    triplet = Color.parse(colour).get_truecolor()
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in triplet.normalized]
    y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * (y ** (1 / 3) if y > 0.008856 else 7.787 * y + 16 / 116) - 16


@pytest.mark.parametrize("theme", marks.THEMES)
def test_every_name_has_a_look_in_every_theme(theme: marks.Theme) -> None:
    names = [*marks.STYLE_NAMES, *map(marks.heat_name, range(marks.HEAT_STEPS))]
    names += [marks.heat_pair(u, w) for u in range(marks.HEAT_STEPS) for w in range(marks.HEAT_STEPS)]
    names += [mark.style for mark in [*marks.STATE_MARKS.values(), *marks.LEVEL_MARKS.values()]]
    for name in names:
        style = marks.style_of(name, theme)
        if theme == "mono":
            assert style.color is None and style.bgcolor is None, name
        if theme == "ansi" and not name.startswith("heat"):
            assert all(colour is None or colour.type is ColorType.STANDARD for colour in (style.color, style.bgcolor))


def test_a_misspelt_name_is_an_error() -> None:
    with pytest.raises(KeyError, match="wran"):
        marks.style_of("wran", "dark")
    with pytest.raises(KeyError):
        marks.style_of("heat8", "dark")


def test_names_combine() -> None:
    style = marks.style_of("warn cursor", "dark")
    assert style.color == marks.style_of("warn", "dark").color
    assert style.bgcolor == marks.style_of("cursor", "dark").bgcolor


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_text_can_be_read(theme: marks.Theme) -> None:
    background = {"dark": "#121212", "light": "#ffffff"}[theme]
    for name in ("dim", "label", "value", "good", "warn", "bad", "hot", "stale", "info", "head"):
        colour = marks.style_of(name, theme).color
        assert colour is not None
        assert abs(lightness(colour.name) - lightness(background)) > 40, name


@pytest.mark.parametrize(("theme", "sign"), [("dark", 1), ("light", -1)])
def test_the_heat_ramp_is_ordered_by_lightness_and_lies_in_the_cube(theme: marks.Theme, sign: int) -> None:
    colours = marks.heat_colours(theme)
    assert len(colours) == marks.HEAT_STEPS
    steps = [sign * (lightness(b) - lightness(a)) for a, b in itertools.pairwise(colours)]
    assert min(steps) > 5, steps
    for colour in colours[1:]:
        assert set(Color.parse(colour).get_truecolor()) <= CUBE, colour
    # Not red against green: green never leads.
    assert all(t.green <= max(t.red, t.blue) for t in (Color.parse(c).get_truecolor() for c in colours))


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_text_on_a_filled_cell_can_be_read(theme: marks.Theme) -> None:
    for step in range(marks.HEAT_STEPS):
        style = marks.style_of(marks.heat_name(step), theme)
        assert style.color is not None and style.bgcolor is not None
        assert abs(lightness(style.color.name) - lightness(style.bgcolor.name)) > 33, step


def test_the_glyph_ramp_says_the_same_as_the_colours() -> None:
    ratios = [0, 1e-9, 0.4999, 0.5, 0.99, 1, 1.39, 1.4, 1.99, 2, 2.79, 2.8, 3.99, 4, 40]
    steps = marks.heat_steps(np.array(ratios))
    assert steps.tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    for ratio, step in zip(ratios, steps, strict=True):
        assert marks.HEAT_GLYPHS[step] == marks.RAMP[marks.ramp_index(ratio)], ratio
    assert marks.ramp_index(30, 10) == 4 and marks.ramp_index(30, 0) == 0 and marks.ramp_index(math.nan) == 0
    assert marks.heat_steps([[math.nan, 5.0]]).tolist() == [[0, 7]]
    assert len(marks.ASCII_RAMP) == len(marks.RAMP)


def test_glyphs_are_one_cell_and_differ() -> None:
    for table in (marks.STATE_MARKS, marks.LEVEL_MARKS):
        assert all(cell_len(mark.glyph) == 1 and mark.ascii.isascii() for mark in table.values())
        assert (
            len({mark.glyph for mark in table.values()}) == len({mark.ascii for mark in table.values()}) == len(table)
        )


def test_what_a_newer_head_says_is_shown_as_it_said_it() -> None:
    assert marks.state_mark("hibernating").word == "hibernating"
    assert marks.state_mark("lost").word == "LOST"
    assert marks.level_mark("warn") is marks.LEVEL_MARKS["warning"] and marks.level_mark("odd").glyph == "?"
