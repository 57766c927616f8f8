"""LineView: a widget that shows lines as they are. What changed is found by comparison, and only that is drawn again.

One of these fills each screen. A widget for each number would cost more than all the rest of the console together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from console.lines import EMPTY, Line, plain, text_width
from console.marks import Theme, style_of
from console.words import safe

_PAPER: dict[Theme, Style] = {
    "dark": Style(color="#d0d0d0", bgcolor="#121212"),
    "light": Style(color="#1c1c1c", bgcolor="#ffffff"),
    "mono": Style.null(),
    "ansi": Style.null(),
}
"""Text and ground where a style name says nothing of them."""


@lru_cache(maxsize=4096)
def ink(name: str, theme: Theme) -> Style:
    """The full look of a style name: its own over the paper's."""
    return _PAPER[theme] + style_of(name, theme)


def make_strip(line: Line, width: int, theme: Theme) -> Strip:
    """A line as Textual draws it. Not cached here: Textual keeps the strips of rows that were not refreshed."""
    whole = plain(line)
    if not whole.isprintable():
        # Labels and events are written by others: nothing in them may reach the terminal as a command.
        line = tuple((safe(text), style) for text, style in line)
        whole = plain(line)
    # All of it at once: a row of a heat map has hundreds of runs, and measuring each is what would cost most here.
    cells = text_width(whole)
    if cells < width:
        rest = " " * (width - cells)
        line = (*line[:-1], (line[-1][0] + rest, "")) if line and line[-1][1] == "" else (*line, (rest, ""))
    segments = [Segment(text, ink(style, theme)) for text, style in line]
    strip = Strip(segments, max(cells, width))
    return strip.crop(0, width) if cells > width else strip


class LineView(Widget):
    """Lines, one for each row of the widget; rows without a line are blank.

    `set_lines` may be called as often as wanted: equal lines cost a comparison of tuples and nothing else.
    """

    ALLOW_SELECT = False
    # Nothing of Textual's own looks: what is drawn is what the lines say.
    DEFAULT_CSS = "LineView { width: 1fr; height: 1fr; }"

    def __init__(self, *, id: str, theme: Theme) -> None:
        super().__init__(id=id)
        self._lines: tuple[Line, ...] = ()
        self._theme: Theme = theme

    @property
    def lines(self) -> tuple[Line, ...]:
        """What is shown."""
        return self._lines

    def set_theme(self, theme: Theme) -> None:
        if theme != self._theme:
            self._theme = theme
            self.refresh()

    def set_lines(self, lines: Sequence[Line]) -> int:
        """Shows these instead; draws only rows that differ. Returns how many did."""
        old, new = self._lines, tuple(lines)
        self._lines = new
        width = self.size.width
        if not width:
            return len(new)
        rows = [
            y
            for y in range(max(len(old), len(new)))
            if (old[y] if y < len(old) else EMPTY) != (new[y] if y < len(new) else EMPTY)
        ]
        if rows:
            self.refresh(*_regions(rows, width))
        return len(rows)

    def render_line(self, y: int) -> Strip:
        line = self._lines[y] if y < len(self._lines) else EMPTY
        return make_strip(line, self.size.width, self._theme)


def _regions(rows: Sequence[int], width: int) -> list[Region]:
    """Rows as few regions: neighbours together."""
    regions: list[Region] = []
    start = before = rows[0]
    for y in [*rows[1:], -1]:
        if y != before + 1:
            regions.append(Region(0, start, width, before - start + 1))
            start = y
        before = y
    return regions
