"""Small graphs of text: sparklines and bars in eighths of a cell, lines of dots for wide screens; all of them in ASCII
too, where a terminal has nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from console.lines import Line, joined

EIGHTHS = "▁▂▃▄▅▆▇█"
ASCII_EIGHTHS = "_.-:=+*#"
BAR_EIGHTHS = " ▏▎▍▌▋▊▉█"
GAP = " "
"""Where a series has no value."""

Values = Sequence[float] | NDArray[np.float64]


def resample(values: Values, width: int) -> list[float]:
    """The values as `width` means of equal stretches, newest last. A shorter series is put at the right end and nothing
    is made up: the left is not a number."""
    given = np.asarray(values, dtype=np.float64)
    if width <= 0:
        return []
    if given.size <= width:
        return [math.nan] * (width - given.size) + [float(value) for value in given]
    edges = np.linspace(0, given.size, width + 1).round().astype(int)
    known = np.isfinite(given)
    sums = np.add.reduceat(np.where(known, given, 0.0), edges[:-1])
    counts = np.add.reduceat(known.astype(np.int64), edges[:-1])
    return [float(total) / int(n) if n else math.nan for total, n in zip(sums, counts, strict=True)]


def spark(values: Values, width: int, *, low: float = 0.0, high: float | None = None, ascii: bool = False) -> str:
    """A sparkline of exactly `width` cells. `high`: the value of a full cell; None: the largest one there is, and then
    a series of zeros is a line at the bottom. Values beyond the scale are drawn at its ends, a gap is a blank."""
    glyphs = ASCII_EIGHTHS if ascii else EIGHTHS
    points = resample(values, width)
    top = high if high is not None else max((value for value in points if math.isfinite(value)), default=low)
    span = top - low
    cells = []
    for value in points:
        if not math.isfinite(value):
            cells.append(GAP)
        elif span <= 0:
            cells.append(glyphs[0])
        else:
            cells.append(glyphs[_step((value - low) / span, 8)])
    return "".join(cells)


def _step(share: float, steps: int) -> int:
    """0 to `steps` - 1; a share that is beyond the scale is at its end."""
    return min(steps - 1, int(min(1.0, max(0.0, share)) * steps))


def level(value: float, high: float, *, low: float = 0.0, ascii: bool = False) -> str:
    """One cell of a sparkline."""
    return spark([value], 1, low=low, high=high, ascii=ascii)


def bar(share: float, width: int, *, ascii: bool = False) -> str:
    """A bar over `share` (0 to 1) of exactly `width` cells, in eighths; something that is more than nothing is seen."""
    if not math.isfinite(share) or share <= 0 or width <= 0:
        return " " * max(0, width)
    share = min(1.0, share)
    if ascii:
        return ("#" * max(1, round(share * width))).ljust(width)
    eighths = max(1, round(share * width * 8))
    full, rest = divmod(eighths, 8)
    return ("█" * full + (BAR_EIGHTHS[rest] if rest else "")).ljust(width)


def bar_line(share: float, width: int, *, style: str = "bar", ascii: bool = False) -> Line:
    """A bar whose empty part is seen as well."""
    text = bar(share, width, ascii=ascii)
    filled = len(text.rstrip())
    return joined([(text[:filled], style), (("." if ascii else "·") * (len(text) - filled), "rest")])


# Dots of a braille cell by column and by row from the top.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def braille(
    first: Values, second: Values, width: int, height: int, *, high: float | None = None, ascii: bool = False
) -> list[Line]:
    """Two series as lines of dots, two points in a cell and four levels in a row; from zero to `high` (None: the
    largest value of both). Runs have the styles `first`, `second` and `both`."""
    columns = 2 * width
    series = [resample(first, columns), resample(second, columns)]
    known = [value for points in series for value in points if math.isfinite(value)]
    top = high if high is not None else max(known, default=0.0)
    levels = 4 * height
    cells = np.zeros((2, height, width), dtype=np.int64)
    for n, points in enumerate(series):
        before: int | None = None
        for x, value in enumerate(points):
            if not math.isfinite(value):
                before = None
                continue
            at = 0 if top <= 0 else _step(value / top, levels)
            # A jump is drawn as a stroke from the last level, so that a line stays one line.
            start = at if before is None else before + (1 if at > before else -1 if at < before else 0)
            for dot in range(min(start, at), max(start, at) + 1):
                row, line = divmod(levels - 1 - dot, 4)
                cells[n, row, x // 2] |= _DOTS[x % 2][line]
            before = at
    return [_braille_row(cells[0, y], cells[1, y], ascii) for y in range(height)]


def _braille_row(first: NDArray[np.int64], second: NDArray[np.int64], ascii: bool) -> Line:
    runs = []
    for one, two in zip(first, second, strict=True):
        style = "both" if one and two else "first" if one else "second" if two else ""
        if ascii:
            glyph = {"both": "#", "first": "*", "second": "+", "": " "}[style]
        else:
            glyph = chr(0x2800 + (int(one) | int(two))) if style else " "
        runs.append((glyph, style))
    return joined(runs)
