"""What things look like: the style names that lines use and their looks in each theme, glyphs of states, heat ramps.

Colour says a state and nothing else, and a glyph says the same beside it, so that nothing is lost without colour. A
style NAME is one of `STYLE_NAMES`, `heatN`, `heatN/M`, or several of these with blanks between, the later ones on top
(`warn cursor`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich.style import Style

Theme = Literal["dark", "light", "mono", "ansi"]
"""`mono`: no colour at all, as NO_COLOR asks for; `ansi`: the sixteen colours as the terminal's owner has set them."""
THEMES: tuple[Theme, ...] = ("dark", "light", "mono", "ansi")

# name: dark, light, mono, ansi
_LOOKS: dict[str, tuple[str, str, str, str]] = {
    # text
    "dim": ("#8a8a8a", "#6c6c6c", "dim", "bright_black"),
    "bold": ("bold", "bold", "bold", "bold"),
    "title": ("bold #ffffff", "bold #000000", "bold", "bold"),
    "label": ("#9e9e9e", "#5f5f5f", "", "bright_black"),
    "value": ("#e4e4e4", "#121212", "", ""),
    "head": ("#9e9e9e", "#5f5f5f", "underline", "bright_black"),
    "sorted": ("bold #e4e4e4", "bold #121212", "bold underline", "bold"),
    "rule": ("#585858", "#a8a8a8", "dim", "bright_black"),
    "key": ("bold #e4e4e4", "bold #121212", "bold", "bold"),
    "match": ("underline", "underline", "underline", "underline"),
    # levels
    "info": ("#5fafff", "#005faf", "", "blue"),
    "good": ("#5fd787", "#00703c", "", "green"),
    "warn": ("#ffaf00", "#8f5600", "bold", "yellow"),
    "bad": ("bold #ff6b6b", "bold #b00020", "bold reverse", "bold red"),
    # states; `hot` is a rank or a layer that others wait for
    "hot": ("bold #ff8700", "bold #a84300", "bold reverse", "bold yellow"),
    "stale": ("italic #8a8a8a", "italic #6c6c6c", "dim italic", "italic bright_black"),
    "gone": ("#6c6c6c", "#8a8a8a", "dim", "bright_black"),
    # who may do what, in the header
    "readonly": ("bold #ffffff on #005faf", "bold #ffffff on #005faf", "bold reverse", "bold white on blue"),
    "admin": ("bold #000000 on #ffaf00", "bold #000000 on #ffaf00", "bold reverse", "bold black on yellow"),
    # where one is
    "cursor": ("on #303a4a", "on #d0dcec", "reverse", "reverse"),
    "chosen": ("bold on #303a4a", "bold on #d0dcec", "bold reverse", "bold reverse"),
    "ask": ("bold #000000 on #ffd75f", "bold #000000 on #ffd75f", "bold reverse", "bold black on yellow"),
    "field": ("on #262626", "on #eeeeee", "underline", "underline"),
    # series
    "spark": ("#87afd7", "#3a6ea5", "", "cyan"),
    "first": ("#87afd7", "#3a6ea5", "", "cyan"),
    "second": ("#d7af87", "#8f5600", "dim", "magenta"),
    "both": ("#d7d7d7", "#3a3a3a", "bold", ""),
    "bar": ("#87afd7", "#3a6ea5", "", "cyan"),
    "rest": ("#3a3a3a", "#c6c6c6", "dim", "bright_black"),
}
STYLE_NAMES: tuple[str, ...] = ("", *_LOOKS)

HEAT_STEPS = 8
HEAT_BOUNDS: tuple[float, ...] = (0.0, 0.5, 1.0, 1.4, 2.0, 2.8, 4.0)
"""Load / mean: step 0 is none at all, step 1 is up to a half, 7 is four times and more."""
HEAT_GLYPHS = " ·░▒▒▓▓█"
"""The glyph of each step: the same ramp, as far as glyphs tell it apart."""
RAMP = " ·░▒▓█"
RAMP_BOUNDS: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0)
RAMP_LEGEND = "·░▒▓█ <0.5 0.5 1 2 4×"
ASCII_RAMP = " .:+#@"

# From the cube of 256 colours, so that a terminal without 24 bits shows the same. Lightness changes by about the same
# from step to step, away from the background, and hue goes from blue over magenta to yellow: told apart with every kind
# of colour blindness. tests/console/test_marks.py measures it.
_HEAT: dict[Theme, tuple[str, ...]] = {
    "dark": ("#1c1c1c", "#0000af", "#8700af", "#d7005f", "#ff5f5f", "#ffaf5f", "#ffd787", "#ffffd7"),
    "light": ("#eeeeee", "#ffd787", "#ffaf5f", "#ff5f5f", "#d7005f", "#8700af", "#5f0087", "#00005f"),
}
_ANSI_HEAT = ("black", "blue", "blue", "magenta", "red", "bright_red", "yellow", "bright_white")


@dataclass(frozen=True, slots=True)
class Mark:
    """How a state is drawn. `ascii` stands for the glyph where the terminal has no others."""

    glyph: str
    style: str
    word: str
    ascii: str


STATE_MARKS: dict[str, Mark] = {
    "ready": Mark("●", "good", "ok", "*"),
    "starting": Mark("◔", "warn", "starting", "s"),
    "joining": Mark("◑", "warn", "joining", "j"),
    "draining": Mark("◌", "warn", "draining", "d"),
    "drained": Mark("○", "dim", "drained", "o"),
    "lost": Mark("✖", "bad", "LOST", "X"),
    "restarting": Mark("↻", "bad", "restarting", "r"),
    "stale": Mark("◷", "stale", "stale", "?"),
    "hot": Mark("▲", "hot", "HOT", "!"),
}
LEVEL_MARKS: dict[str, Mark] = {
    "info": Mark("·", "", "info", "."),
    "good": Mark("●", "good", "good", "*"),
    "warning": Mark("▲", "warn", "warning", "!"),
    "error": Mark("✖", "bad", "error", "X"),
}
_UNKNOWN = Mark("?", "warn", "unknown", "?")

FROZEN = "▼ frozen"
LOW = "▼"
"""Far below the others."""


def state_mark(state: str) -> Mark:
    """Its mark; of a state that this console does not know, a question mark with the word that the head said."""
    mark = STATE_MARKS.get(state)
    return mark if mark is not None else Mark(_UNKNOWN.glyph, _UNKNOWN.style, state, _UNKNOWN.ascii)


def level_mark(level: str) -> Mark:
    """The mark of an event's or a sentence's level; `warn` and `bad` are understood too."""
    mark = LEVEL_MARKS.get({"warn": "warning", "bad": "error"}.get(level, level))
    return mark if mark is not None else _UNKNOWN


def ramp_index(load: float, mean: float = 1.0) -> int:
    """Index into RAMP of a load against its mean: thresholds 0.5, 1, 2, 4; 0 for nothing."""
    value = load / mean if mean > 0 else 0.0
    if not value > 0 or math.isnan(value):
        return 0
    return 1 + sum(value >= bound for bound in RAMP_BOUNDS[1:])


def heat_steps(ratios: ArrayLike, bounds: tuple[float, ...] = HEAT_BOUNDS) -> NDArray[np.uint8]:
    """Steps 0 to 7 of an array of loads over their mean; what is not a number is step 0. `bounds`: seven, rising; the
    first one is exceeded, the others are reached."""
    values = np.nan_to_num(np.asarray(ratios, dtype=np.float64), nan=0.0)
    steps = np.searchsorted(np.asarray(bounds[1:]), values, side="right") + 1
    return np.where(values > bounds[0], steps, 0).astype(np.uint8)


def heat_name(step: int) -> str:
    """Style name of a cell that is filled with one step's colour; its text is readable on it."""
    return _HEAT_NAMES[step]


def heat_pair(upper: int, lower: int) -> str:
    """Style name of a half block `▀`: the upper half has one step's colour, the lower half another's."""
    return _PAIR_NAMES[upper * HEAT_STEPS + lower]


_HEAT_NAMES = tuple(f"heat{step}" for step in range(HEAT_STEPS))
_PAIR_NAMES = tuple(f"heat{upper}/{lower}" for upper in range(HEAT_STEPS) for lower in range(HEAT_STEPS))


def heat_colours(theme: Theme) -> tuple[str, ...]:
    """The eight colours of the ramp; none in `mono`, where glyphs say it."""
    if theme == "mono":
        return ()
    return _ANSI_HEAT if theme == "ansi" else _HEAT[theme]


@lru_cache(maxsize=4096)
def style_of(name: str, theme: Theme) -> Style:
    """The look of a style name. Raises KeyError with a name that is not listed: a misspelt style is a bug."""
    parts = name.split()
    if not parts:
        return Style.null()
    style = _single(parts[0], theme)
    for part in parts[1:]:
        style = style + _single(part, theme)
    return style


def _single(name: str, theme: Theme) -> Style:
    if name in _HEAT_NAMES:
        return _heat_style(int(name[4:]), None, theme)
    if name in _PAIR_NAMES:
        upper, _, lower = name[4:].partition("/")
        return _heat_style(int(upper), int(lower), theme)
    return Style.parse(_LOOKS[name][THEMES.index(theme)])


def _heat_style(upper: int, lower: int | None, theme: Theme) -> Style:
    colours = heat_colours(theme)
    if not colours:
        return Style(bold=upper >= 5 or None)
    if lower is not None:
        return Style(color=colours[upper], bgcolor=colours[lower])
    # Text on a filled cell: black on the light half of the ramp, white on the dark one.
    is_light = upper < 4 if theme == "light" else upper >= 4
    return Style(color="#000000" if is_light else "#ffffff", bgcolor=colours[upper])
