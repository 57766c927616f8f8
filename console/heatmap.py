"""A matrix of figures as lines of coloured cells: whole rows from arrays, neighbours of one look joined. Pure.

With colours two ranks can share a line, as the halves of `▀`; without, each has its own and a ramp of glyphs says the
same.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from console.lines import Line, Run
from console.marks import HEAT_BOUNDS, HEAT_GLYPHS, HEAT_STEPS, heat_name, heat_pair, heat_steps

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.uint8]

CURSOR_GLYPH = "◆"
UPPER_CURSOR, LOWER_CURSOR = "▲", "▼"
LEGEND_STEPS = (2, 3, 5, 7)
"""Steps at which the glyph changes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """Bounds of the seven steps above nothing, as `marks.heat_steps` wants them, and the unit of the legend."""

    bounds: tuple[float, ...]
    unit: str = ""

    def legend(self) -> str:
        """`·░▒▓█ 0.5 1 2 4×`: each number is where the next glyph begins."""
        numbers = " ".join(_short(self.bounds[step - 1]) for step in LEGEND_STEPS)
        glyphs = "".join(dict.fromkeys(HEAT_GLYPHS.strip()))
        return f"{glyphs} {numbers}{self.unit}"


EXPERT_SCALE = Scale(HEAT_BOUNDS, "×")
LAYER_SCALE = Scale((0.0, 1.1, 1.2, 1.35, 1.6, 2.0, 2.8), "×")
"""Ranks differ less than experts do, and only what is above the mean is waited for: all else has the first glyph."""
REPLICA_SCALE = Scale((0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0))
MOVED_SCALE = Scale((-1.0, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0))


def scale_to(values: Floats) -> Scale:
    """A scale from zero to the largest of these."""
    known = values[np.isfinite(values)]
    top = float(known.max()) if known.size else 0.0
    return Scale(tuple(top * share for share in _SHARES) if top > 0 else HEAT_BOUNDS)


_SHARES = (0.0, 0.1, 0.25, 0.4, 0.5, 0.7, 0.85)


def to_steps(values: Floats, scale: Scale) -> Steps:
    """Step 0 to 7 of each figure; 0: there is nothing."""
    return heat_steps(np.where(np.isnan(values), -np.inf, values), scale.bounds)


def single_rows(steps: Steps, cell: int, *, is_mono: bool) -> list[list[Run]]:
    """One line for each row of steps, `cell` cells wide for each figure."""
    texts = [(HEAT_GLYPHS[step] if is_mono else " ") * cell for step in range(HEAT_STEPS)]
    # Without colours the glyph says all but what is bold in the upper steps.
    styles = ["" if is_mono and step < 5 else heat_name(step) for step in range(HEAT_STEPS)]
    return _rows(steps, texts, styles)


def paired_rows(steps: Steps, cell: int) -> list[list[Run]]:
    """One line for every two rows of steps; a last odd one has an empty half below it."""
    if steps.shape[0] % 2:
        steps = np.vstack([steps, np.zeros((1, steps.shape[1]), dtype=np.uint8)])
    codes = steps[0::2] * HEAT_STEPS + steps[1::2]
    return _rows(codes, _PAIR_TEXTS[cell] if cell in _PAIR_TEXTS else ["▀" * cell] * len(_PAIR_STYLES), _PAIR_STYLES)


_PAIR_STYLES = [heat_pair(upper, lower) for upper in range(HEAT_STEPS) for lower in range(HEAT_STEPS)]
_PAIR_TEXTS = {cell: ["▀" * cell] * len(_PAIR_STYLES) for cell in (1, 2, 3, 4)}


def _rows(codes: Steps, texts: list[str], styles: list[str]) -> list[list[Run]]:
    """Rows of codes to runs, equal neighbours joined: the ends of all stretches are found in one pass."""
    height, width = codes.shape
    if not width:
        return [[] for _ in range(height)]
    is_end = np.ones((height, width), dtype=np.bool_)
    is_end[:, :-1] = codes[:, 1:] != codes[:, :-1]
    y, x = np.nonzero(is_end)
    found = codes[y, x].tolist()
    # A row's first stretch begins at 0, each other one behind its neighbour's end.
    begins = np.empty_like(x)
    begins[1:] = np.where(y[1:] == y[:-1], x[:-1] + 1, 0)
    begins[0] = 0
    lengths = (x - begins + 1).tolist()
    edges = np.searchsorted(y, np.arange(height + 1)).tolist()
    runs = [(texts[code] * length, styles[code]) for code, length in zip(found, lengths, strict=True)]
    return [runs[edges[row] : edges[row + 1]] for row in range(height)]


def put_cursor(runs: list[Run], at: int, cells: int, *, text: str = "", style: str = "") -> list[Run]:
    """The same runs with the cursor over some cells. `text` replaces what is there, `style` the look; what is empty
    stays as it was."""
    result: list[Run] = []
    x = 0
    for below, look in runs:
        begin, end = max(at - x, 0), min(at + cells - x, len(below))
        if begin >= end:
            result.append((below, look))
        else:
            said = text[x + begin - at : x + end - at] if text else below[begin:end]
            pieces = ((below[:begin], look), (said, style or look), (below[end:], look))
            result += [piece for piece in pieces if piece[0]]
        x += len(below)
    return result


def ruler(first: int, count: int, cell: int, cursor: int, *, every: int = 10) -> Line:
    """Numbers over columns, every tenth, and the cursor's column marked `▾`. `first`: number of the first column."""
    cells = [" "] * (count * cell)
    at = (cursor - first) * cell
    for number in range(first, first + count):
        label, begin = str(number), (number - first) * cell
        # A number that the mark would cut in two is left out.
        if number % every == 0 and begin + len(label) <= len(cells) and not begin - 1 <= at <= begin + len(label):
            cells[begin : begin + len(label)] = label
    if 0 <= at < len(cells):
        return (("".join(cells[:at]), "label"), ("▾", "bold"), ("".join(cells[at + 1 :]), "label"))
    return (("".join(cells), "label"),)


def window(first: int, shown: int, count: int, cursor: int) -> int:
    """Where a window of `shown` of `count` begins so that the cursor is in it: as little moved as will do."""
    first = min(first, cursor)
    first = max(first, cursor - shown + 1)
    return max(0, min(first, count - shown))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
