"""Lines of styled text, measured in cells of a terminal: what every screen is built of before a terminal sees it.

A line is a tuple of runs, a run is text with the NAME of a style (`console.marks` lists the names). Nothing here knows
a colour, so a screen can be tested as text and drawn in any theme. All widths are cells, not characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size

Run = tuple[str, str]
"""Text and the name of its style; "" is the terminal's own text."""
Line = tuple[Run, ...]

EMPTY: Line = ()
ELLIPSIS = "…"


def text_width(text: str) -> int:
    """Cells that `text` covers."""
    return len(text) if text.isascii() else cell_len(text)


def width_of(line: Line) -> int:
    """Cells that `line` covers."""
    if len(line) == 1:
        return text_width(line[0][0])
    # Measured as one text, which costs as much as measuring one of many runs.
    return text_width("".join([text for text, _ in line]))


def plain(line: Line) -> str:
    """Its text without styles, as tests compare it and as it is copied."""
    return "".join([text for text, _ in line])


def line(*parts: str | Run | Line, style: str = "") -> Line:
    """One line of texts (in `style`), runs and lines; neighbours of one style are joined."""
    runs: list[Run] = []
    for part in parts:
        if isinstance(part, str):
            runs.append((part, style))
        elif part and isinstance(part[0], str):
            runs.append(part)  # type: ignore[arg-type]
        else:
            runs.extend(part)  # type: ignore[arg-type]
    return joined(runs)


def joined(runs: Iterable[Run]) -> Line:
    """The same runs, where neighbours of one style are one: the terminal gets each change of style once."""
    result: list[Run] = []
    for text, style in runs:
        if not text:
            continue
        if result and result[-1][1] == style:
            result[-1] = (result[-1][0] + text, style)
        else:
            result.append((text, style))
    return tuple(result)


def clip_text(text: str, width: int) -> str:
    """`text` in at most `width` cells; what is cut off is said by an ellipsis."""
    if width <= 0:
        return ""
    if text_width(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + ELLIPSIS if width > 1 else ELLIPSIS


def fit_text(text: str, width: int, align: str = "<") -> str:
    """`text` in exactly `width` cells: cut or filled with blanks at the right (`<`), the left (`>`) or both (`^`)."""
    text = clip_text(text, width)
    gap = max(0, width) - text_width(text)
    if align == ">":
        return " " * gap + text
    if align == "^":
        return " " * (gap // 2) + text + " " * (gap - gap // 2)
    return text + " " * gap


def clip(line: Line, width: int) -> Line:
    """`line` in at most `width` cells; the last cell becomes an ellipsis if something is cut off."""
    if width <= 0:
        return ()
    if width_of(line) <= width:
        return line
    result: list[Run] = []
    room = width - 1
    for text, style in line:
        size = text_width(text)
        if size > room:
            result.append(((set_cell_size(text, room) if room else "") + ELLIPSIS, style))
            break
        result.append((text, style))
        room -= size
    return joined(result)


def pad(line: Line, width: int, style: str = "") -> Line:
    """`line` in exactly `width` cells: cut, or filled with blanks in `style` at the right."""
    gap = width - width_of(line)
    if gap <= 0:
        return clip(line, width) if gap else line
    if line and line[-1][1] == style:
        return (*line[:-1], (line[-1][0] + " " * gap, style))
    return (*line, (" " * gap, style))


def join(left: Line, right: Line, width: int, style: str = "") -> Line:
    """`left` at the left end and `right` at the right end of `width` cells. Where both do not fit, `left` is cut."""
    right = clip(right, width)
    size = width_of(right)
    # One blank between them, unless one is empty.
    room = width - size - (1 if size and size < width else 0)
    left = clip(left, room)
    gap = width - size - width_of(left)
    return joined([*left, (" " * gap, style), *right])


def restyle(line: Line, style: str) -> Line:
    """All of `line` in one style, as a cursor or stale data is drawn."""
    return joined((text, style) for text, _ in line)


def wrap(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width` cells, broken at blanks; a word longer than a line is cut into pieces."""
    width = max(2, width)  # the widest character must fit, or nothing ever would
    lines: list[str] = []
    now = ""
    for word in text.split():
        while text_width(word) > width:
            if now:
                lines.append(now)
                now = ""
            # A blank stands where a wide character did not fit.
            piece = set_cell_size(word, width).rstrip() or word[0]
            lines.append(piece)
            word = word[len(piece) :]
        if not now:
            now = word
        elif text_width(now) + 1 + text_width(word) <= width:
            now += " " + word
        else:
            lines.append(now)
            now = word
    return [*lines, now] if now or not lines else lines


def beside(blocks: Sequence[tuple[Sequence[Line], int]], gap: int = 1) -> list[Line]:
    """Blocks of lines next to each other, each with its width in cells; shorter ones are filled with blanks."""
    height = max((len(lines) for lines, _ in blocks), default=0)
    result: list[Line] = []
    for y in range(height):
        runs: list[Run] = []
        for n, (lines, width) in enumerate(blocks):
            if n:
                runs.append((" " * gap, ""))
            runs.extend(pad(lines[y] if y < len(lines) else (), width))
        result.append(joined(runs))
    return result
