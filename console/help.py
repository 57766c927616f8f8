"""The keys that work now, with words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from textual import events
from textual.app import ComposeResult
from textual.screen import ModalScreen

from console.keys import Key, bindings
from console.linegrid import LineView
from console.lines import Line, clip, line, pad
from console.resizing import SteadyScreen

if TYPE_CHECKING:
    from console.app import ConsoleApp

_KEYS = (
    Key(("escape", "q", "?", "enter"), "dismiss", "", "Back"),
    Key(("down", "j"), "scroll(1)", "", "Down"),
    Key(("up", "k"), "scroll(-1)", "", "Up"),
    Key(("pagedown", "space"), "scroll(10)", "", "A page down"),
    Key(("pageup",), "scroll(-10)", "", "A page up"),
)


def draw_help(title: str, own: Sequence[Key], common: Sequence[Key], commands: Sequence[tuple[str, str]],
              width: int) -> list[Line]:  # fmt: skip
    """All of it, however long: the screen's keys, the console's, then the commands of `:`."""
    lines: list[Line] = [line((f" Keys of {title}", "title"), ("   Esc leaves, j and k scroll", "dim")), ()]
    lines += _block("this screen", own, width) if own else []
    lines += _block("everywhere", common, width)
    lines += [(), line((" after :", "head"))]
    lines += [clip(line((f"   {name:<12}", "key"), text), width) for name, text in commands]
    return lines


def _block(title: str, keys: Sequence[Key], width: int) -> list[Line]:
    lines: list[Line] = [line((f" {title}", "head"))]
    entries: list[Line] = []
    for key in keys:
        face = key.face or " ".join(Key((one,), "", "", "").shown_as for one in key.keys)
        caution = " (changes the cluster, asks first)" if key.changes else ""
        entries.append(line((f"   {face:<12}", "key"), key.text, (caution, "warn")))
    # Two columns where every entry fits into half a line.
    half = width // 2
    if width >= 160 and len(entries) > 6:
        rows = (len(entries) + 1) // 2
        return [
            *lines,
            *(line(pad(entries[y], half), entries[y + rows] if y + rows < len(entries) else ()) for y in range(rows)),
        ]
    return [*lines, *(clip(entry, width) for entry in entries)]


class HelpScreen(SteadyScreen[None], ModalScreen[None]):
    """Covers the screen it explains; what that shows goes on meanwhile."""

    ALLOW_SELECT = False
    BINDINGS = bindings(_KEYS)

    def __init__(self) -> None:
        super().__init__()
        self._top = 0
        self._all: list[Line] = []

    def compose(self) -> ComposeResult:
        yield LineView(id="help", theme=cast("ConsoleApp", self.app).look)

    def on_mount(self) -> None:
        self.call_after_refresh(self._show)

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self._show)

    def action_scroll(self, rows: int) -> None:
        self._top = max(0, min(self._top + rows, len(self._all) - self.size.height))
        self._show()

    def _show(self) -> None:
        app = cast("ConsoleApp", self.app)
        live = app.live
        own = [key for key in live.all_keys() if live.check_action(key.name, ())] if live else []
        common = [key for key in app.all_keys() if key not in own]
        commands = [(name, text) for name, (text, _) in app.command_table().items()]
        self._all = draw_help(live.TITLE_TEXT if live else "", own, common, commands, self.size.width)
        self.query_one("#help", LineView).set_lines(self._all[self._top : self._top + self.size.height])
