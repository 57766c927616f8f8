"""LiveScreen: what all seven screens have in common. A screen says only in what it differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from textual import events
from textual.app import ComposeResult

from console.confirm import Question
from console.draw_state import draw_state
from console.entry import Entry
from console.footer import Footer, Typed, draw_footer
from console.keys import Key, bindings
from console.linegrid import LineView
from console.lines import Line, joined
from console.resizing import SteadyScreen
from console.view import ClusterView
from transport.messages import Message

if TYPE_CHECKING:
    from console.app import ConsoleApp

FEATURE_KEYS: dict[str, tuple[Key, ...]] = {
    "move": (
        Key(("up", "k"), "move(-1)", "", "One up", face="↑ k"),
        Key(("down", "j"), "move(1)", "", "One down", face="↓ j"),
        Key(("pageup",), "page(-1)", "", "A page up"),
        Key(("pagedown",), "page(1)", "", "A page down"),
        Key(("g", "home"), "jump(-1)", "", "To the first"),
        Key(("G", "end"), "jump(1)", "", "To the last"),
    ),
    "filter": (Key(("/",), "filter", "filter", "Show only what matches: text, !text, column=value, column>value"),),
    "sort": (
        Key(("s",), "sort", "sort", "Sort by the next column"),
        Key(("S",), "reverse", "", "Sort the other way round"),
    ),
    "detail": (
        Key(("enter",), "detail", "detail", "Open what is under the cursor"),
        Key(("backspace",), "back", "", "Back from it"),
    ),
    "copy": (
        Key(("y",), "copy_cell", "copy", "Copy the cell under the cursor"),
        Key(("Y",), "copy_row", "", "Copy the row as JSON"),
    ),
}
"""What a screen may have: named in its FEATURES, with the hooks of the same name."""


class LiveScreen(SteadyScreen[None]):
    """A header, one LineView, a footer.

    A subclass has the attributes below, `build`, and the hooks of its FEATURES. An action of its own is a Key in KEYS
    and a method `action_<name>`; it ends with `self.paint()` if it changed what is to be seen.

    Attributes:
        NAME: of its mode and for `:`.
        NUMBER: its key.
        TITLE_TEXT: in the footer.
        FEATURES: of `move`, `filter`, `sort`, `detail`, `copy`.
        KEYS: its own keys; the most wanted first, because a narrow footer drops the last ones.
    """

    NAME: ClassVar[str] = ""
    NUMBER: ClassVar[int] = 0
    TITLE_TEXT: ClassVar[str] = ""
    FEATURES: ClassVar[frozenset[str]] = frozenset()
    KEYS: ClassVar[tuple[Key, ...]] = ()

    ALLOW_SELECT = False
    AUTO_FOCUS = ""
    inherit_bindings: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        cls.BINDINGS = [*bindings(cls.all_keys()), *bindings([_ESCAPE])]
        super().__init_subclass__()

    @classmethod
    def all_keys(cls) -> tuple[Key, ...]:
        """Its own keys, then those of its features."""
        return (*cls.KEYS, *(key for name, keys in FEATURE_KEYS.items() if name in cls.FEATURES for key in keys))

    # ------------------------------------------------------------------ what a subclass says

    def questions(self) -> Sequence[Message]:
        """What to ask the head in each round, beyond AskStatus, AskExperts and AskTraffic."""
        return ()

    def build(self, width: int, height: int, now: float) -> list[Line]:
        """The body: at most `height` lines of at most `width` cells, from `self.view` and the screen's own state."""
        raise NotImplementedError

    def can(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Whether an action of KEYS can be done now; if not, its key is in no footer, help or palette."""
        return True

    def move(self, rows: int) -> None:
        """Feature `move`: the cursor, by so many rows."""

    def jump(self, end: int) -> None:
        """Feature `move`: to the first (-1) or the last (1) row."""

    def set_filter(self, text: str) -> str:
        """Feature `filter`: called with every change. Returns what is wrong with it, "" if nothing is; a wrong filter
        leaves the one before in force."""
        return ""

    def get_filter(self) -> str:
        """Feature `filter`: the text of the one in force."""
        return ""

    def sort(self, *, reverse: bool) -> None:
        """Feature `sort`: by the next column, or the same one the other way round."""

    def open_detail(self) -> None:
        """Feature `detail`: Enter."""

    def close(self) -> bool:
        """Esc and Backspace: closes the innermost thing that is open (a detail); False if nothing was."""
        return False

    def cell(self) -> str:
        """Feature `copy`: the text of what is under the cursor, "" if nothing is."""
        return ""

    def row(self) -> object:
        """Feature `copy`: the row as what JSON can say; None if there is none."""
        return None

    def export(self) -> object:
        """What `e` writes of this screen beside its picture, as what JSON can say."""
        return None

    def click(self, x: int, y: int) -> None:
        """The mouse, in cells of the body."""

    def commands(self) -> Mapping[str, tuple[str, Callable[[str], str]]]:
        """More for `:`: name to (what it does, a function of the rest of the line that returns what is wrong, "")."""
        return {}

    def arrive(self) -> None:
        """It is shown from now on."""

    # ------------------------------------------------------------------ what a subclass uses

    @property
    def desk(self) -> ConsoleApp:
        return cast("ConsoleApp", self.app)

    @property
    def view(self) -> ClusterView:
        """What to draw: what is known, or what was known when the screen was frozen."""
        return self.desk.shown

    @property
    def body_size(self) -> tuple[int, int]:
        """Width and height of the body in cells; (0, 0) before it is shown."""
        size = self.query_one("#body", LineView).size if self.is_mounted else None
        return (size.width, size.height) if size else (0, 0)

    def ask(self, question: Question) -> None:
        """Asks before a change, and makes it after a `y`; what became of it is told in the footer and as an event."""
        self.footer.ask(question, self.desk.why, self.desk.answer)
        self.paint()

    def say(self, text: str, level: str = "info") -> None:
        """A sentence in the footer until the next key."""
        self.desk.say(text, level)

    @property
    def footer(self) -> Footer:
        return self.query_one("#footer", Footer)

    def paint(self) -> None:
        """Draws what changed."""
        if self.is_mounted:
            self._paint_body()
            # What can be done may depend on what is under the cursor, which is known once the body was built.
            self.paint_edges()

    def _paint_body(self) -> None:
        body = self.query_one("#body", LineView)
        width, height = body.size
        if not width or not height:
            return
        now = self.desk.shown_now()
        view = self.view
        lines = draw_state(view, self.NAME, width, height, now)
        if lines is None:
            lines = self.build(width, height, now)
            if view.phase(now) != "live":
                lines = [dimmed(line) for line in lines]
        body.set_lines(lines[:height])

    def paint_edges(self) -> None:
        """Header and footer, which go on while the body is frozen."""
        desk = self.desk
        width = desk.size.width
        self.query_one("#header", LineView).set_lines(desk.header_lines(width))
        self.footer.show(draw_footer(desk.tabs(), desk.keys_now(), width))

    # ------------------------------------------------------------------ Textual's side

    def compose(self) -> ComposeResult:
        look = self.desk.look
        yield LineView(id="header", theme=look)
        yield LineView(id="body", theme=look)
        yield Footer(look)

    def set_look(self) -> None:
        for view in self.query(LineView):
            view.set_theme(self.desk.look)

    def on_screen_resume(self) -> None:
        self.set_look()
        self.arrive()
        self.call_after_refresh(self.paint)
        self.desk.hurry()

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self.paint)

    def clear_note(self) -> None:
        """Before a key does what it does, which may leave a note of its own."""
        if self.footer.note is not None:
            self.footer.note = None
            self.paint_edges()

    def on_typed(self, event: Typed) -> None:
        event.stop()
        self.paint()

    def on_click(self, event: events.Click) -> None:
        widget = event.widget
        if isinstance(widget, LineView) and widget.id == "body":
            self.click(event.x, event.y)
            self.paint()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        if "move" in self.FEATURES:
            self.action_move(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        if "move" in self.FEATURES:
            self.action_move(-3)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        for key in self.all_keys():
            if key.name == action:
                return self.desk.allows(key) and self.can(action, parameters)
        return True

    # ------------------------------------------------------------------ actions of the features

    def action_move(self, rows: int) -> None:
        self.move(rows)
        self.paint()

    def action_page(self, pages: int) -> None:
        self.move(pages * max(1, self.body_size[1] - 4))
        self.paint()

    def action_jump(self, end: int) -> None:
        self.jump(end)
        self.paint()

    def action_filter(self) -> None:
        before = self.get_filter()

        def heard(entry: Entry, said: str) -> None:
            if said == "left":
                self.set_filter(before)
            else:
                entry.error = self.set_filter(entry.text)

        self.footer.open_entry(Entry("/", before), heard)
        self.paint()

    def action_sort(self) -> None:
        self.sort(reverse=False)
        self.paint()

    def action_reverse(self) -> None:
        self.sort(reverse=True)
        self.paint()

    def action_detail(self) -> None:
        self.open_detail()
        self.paint()

    def action_back(self) -> None:
        """Esc and Backspace: out of the detail, then out of the filter."""
        if not self.close() and "filter" in self.FEATURES and self.get_filter():
            self.set_filter("")
        self.paint()

    def action_copy_cell(self) -> None:
        self.desk.copy(self.cell(), "cell")

    def action_copy_row(self) -> None:
        self.desk.copy_json(self.row())


_ESCAPE = Key(("escape",), "back", "", "Back; clear the filter")


def dimmed(line: Line) -> Line:
    """A line that is no longer true. Heat keeps its ground: without it there would be nothing to see."""
    return joined((text, style if style.startswith("heat") else "gone") for text, style in line)
