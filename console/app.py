"""ConsoleApp: the seven screens as modes, what is common to them, and who may press what."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import socket
from collections.abc import Iterable
from typing import ClassVar

from textual import events
from textual.app import App, SystemCommand
from textual.screen import Screen
from textual.theme import Theme as TextualTheme

from console.clock import Clock
from console.commands import RATES_HZ, CommandTable, make_table, run_line
from console.confirm import Question
from console.connection import Connection, Gate
from console.dial import Target
from console.entry import Entry
from console.footer import Note, Tab
from console.header import HeaderState, build_header
from console.keys import Key, bindings
from console.lines import Line
from console.marks import THEMES, Theme
from console.screens import SCREENS
from console.screens.base import LiveScreen
from console.terminal import ConsoleDriver
from console.verdict import judge
from console.view import ClusterView
from transport.errors import EngineError
from transport.messages import ActDone, Message, RebalanceAnswer, Refused, ShutdownAccepted

TICK_S = 0.5
"""How often age and clock in the header go on, and a link that has become stale is noticed."""
DRAW_S = 2.0
"""For Textual to say that it has drawn; a screen that is just being left never says it."""

APP_KEYS: tuple[Key, ...] = (
    Key((":",), "command", "command", "Type a command: a screen, why TEXT, theme NAME, quit, ..."),
    Key(("?",), "help", "keys", "All keys that work now"),
    Key(("space",), "freeze", "freeze", "Freeze the screen, or let it go on"),
    Key(("+", "="), "rate(1)", "", "Refresh more often"),
    Key(("-",), "rate(-1)", "", "Refresh less often"),
    Key(("e",), "export", "", "Write this screen to files: its data as JSON, its picture as SVG"),
    Key(("t",), "theme", "", "Next theme"),
    Key(("M",), "mouse", "", "Mouse on or off; off, the terminal selects text itself"),
    Key(("ctrl+z",), "suspend", "", "Suspend, as any program"),
    Key(("q",), "leave", "", "Leave; the engine goes on"),
)
_QUIT = Key(("ctrl+c",), "leave", "", "Leave")

_TEXTUAL_THEMES: dict[Theme, str] = {
    "dark": "console-dark",
    "light": "console-light",
    "mono": "ansi-dark",
    "ansi": "ansi-dark",
}


def screen_keys() -> tuple[Key, ...]:
    return tuple(
        Key((str(screen.NUMBER),), f"show('{screen.NAME}')", "", f"Screen {screen.TITLE_TEXT}") for screen in SCREENS
    )


class ConsoleApp(App[int]):
    """The console.

    Args:
        target: where the head is.
        hz: refreshes a second.
        theme: one of `marks.THEMES`.
        clock: for tests, whose pictures must not depend on when they were taken.
        directory: where `e` writes; the current one by default.
    """

    CSS_PATH = "console.tcss"
    DEFAULT_MODE: ClassVar[str] = SCREENS[0].NAME
    BINDINGS = bindings((*screen_keys(), *APP_KEYS, _QUIT))
    TITLE = "engine console"

    def __init__(
        self,
        target: Target,
        *,
        hz: float = 2.0,
        theme: Theme = "dark",
        clock: Clock | None = None,
        directory: str = ".",
    ) -> None:
        super().__init__(driver_class=ConsoleDriver)
        self._screens: dict[str, LiveScreen] = {}
        for kind in SCREENS:
            screen = self._screens[kind.NAME] = kind()
            self.add_mode(kind.NAME, lambda screen=screen: screen)  # type: ignore[misc]
        self.view = ClusterView()
        self.look: Theme = theme
        self.hz = hz
        self.why = ""
        self.frozen: ClusterView | None = None
        self.frozen_at = 0.0
        self.has_mouse = True
        self._has_news = False
        self.directory = directory
        self._clock = clock or Clock()
        self.link = Connection(
            target,
            self.view,
            Gate(
                questions=lambda: self.live.questions() if self.live else (),
                draw=self._draw,
                changed=self.paint,
                noted=self._note_news,
                drained=self._drained,
                period=lambda: self._clock.period(self.hz),
                pause=self._clock.pause,
                now=self.now,
                wall_ms=self.wall_ms,
            ),
        )

    # ------------------------------------------------------------------ what screens ask

    @property
    def shown(self) -> ClusterView:
        """What screens draw: the view, or what it was when the screen was frozen."""
        return self.frozen or self.view

    @property
    def live(self) -> LiveScreen | None:
        """The screen that is shown, also under help or palette."""
        for screen in reversed(self.screen_stack):
            if isinstance(screen, LiveScreen):
                return screen
        return None

    def shown_now(self) -> float:
        """The time that screens draw: it stands while they are frozen."""
        return self.frozen_at if self.frozen else self.now()

    def now(self) -> float:
        return self._clock.now()

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

    def allows(self, key: Key) -> bool:
        """Whether the link lets this key do what it does."""
        return not key.changes or (self.view.link.is_admin and self.view.link.phase == "live")

    def keys_now(self) -> list[Key]:
        """All keys that work now: the screen's, then the console's."""
        live = self.live
        keys = [key for key in live.all_keys() if live.check_action(key.name, ())] if live else []
        return [*keys, *APP_KEYS]

    def screen_of(self, name: str) -> LiveScreen:
        """A screen by name, shown or not: to choose there what another one points at."""
        return self._screens[name]

    def all_keys(self) -> tuple[Key, ...]:
        """Keys that work on every screen."""
        return (*screen_keys(), *APP_KEYS)

    def tabs(self) -> list[Tab]:
        live = self.live
        name = live.NAME if live else ""
        return [Tab(screen.NUMBER, screen.TITLE_TEXT, name == screen.NAME) for screen in SCREENS]

    def header_lines(self, width: int) -> list[Line]:
        now = self.now()
        found = judge(self.view, now)
        state = HeaderState(
            hz=self.hz,
            is_frozen=self.frozen is not None,
            why=self.why,
            wall_ms=self.wall_ms(),
            verdict=found.sentence,
            level=found.level,
            hint=self._hint(found.key),
        )
        return build_header(self.view, state, width, now)

    def _hint(self, key: str) -> str:
        """`[6] Balance`: the screen that leads on from the verdict; nothing on that screen itself."""
        return next((f"[{key}] {tab.title}" for tab in self.tabs() if str(tab.number) == key and not tab.is_shown), "")

    def who(self) -> tuple[str, str]:
        """User and host, for messages that carry them; the head believes the kernel, not this."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):
            user = f"uid {os.getuid()}"
        return user[:256], socket.gethostname()[:256]

    def say(self, text: str, level: str = "info") -> None:
        """A sentence in the footer until the next key."""
        live = self.live
        if live is not None and live.is_mounted:
            live.footer.note = Note(text, level)
            live.paint_edges()

    def copy(self, text: str, what: str) -> None:
        """To the clipboard of the person's terminal (OSC 52), also through ssh."""
        if text:
            self.copy_to_clipboard(text)
            self.say(f"copied {what}: {text if len(text) <= 60 else text[:59] + '…'}")
        else:
            self.say("nothing to copy here")

    def copy_json(self, value: object) -> None:
        self.copy("" if value is None else json.dumps(value, default=str), "row")

    def hurry(self) -> None:
        """Another screen wants other answers now. A link that is down is not dialled any sooner for it."""
        if self.view.link.phase == "live":
            self.link.hurry()

    # ------------------------------------------------------------------ changes

    def answer(self, question: Question, is_yes: bool) -> None:
        """The end of a question."""
        if not is_yes:
            self.say(f"not done: {question.done}")
            return
        if not self.view.link.is_admin:
            self.say("this link only reads", "error")
            return
        message = question.build(self.why)
        self.say(f"asked for: {question.done} ...")
        self.run_worker(self._act(message, question.done), name="act", exit_on_error=True)

    async def act(self, message: Message, done: str) -> Message | None:
        """Sends a message that needs no question, such as a plan, which changes nothing; tells what became of it."""
        return await self._act(message, done)

    async def _act(self, message: Message, done: str) -> Message | None:
        try:
            result = await self.link.act(message)
        except (EngineError, OSError, TimeoutError) as error:
            said = str(error) or "no answer in time"
            self._told(f"{done}: not known whether it was done: {said}", "error")
            return None
        if isinstance(result, Refused):
            self._told(f"{done}: refused: {result.message}", "error")
        elif isinstance(result, RebalanceAnswer | ActDone):
            self._told(f"{done}: {result.done}", "good")
            self.why = ""
        elif isinstance(result, ShutdownAccepted):
            self._told(f"{done}: {result.running} requests still run", "good")
        self.link.hurry()
        return result

    def _told(self, text: str, level: str) -> None:
        self.view.note("act", text, self.wall_ms(), "error" if level == "error" else "info")
        self.say(text, level)
        self.paint()

    # ------------------------------------------------------------------ drawing

    def paint(self) -> None:
        """Draws the visible screen."""
        live = self.live
        if live is not None:
            live.paint()

    async def _draw(self) -> None:
        """Draws a round's answers, and returns when Textual has given them to the terminal's writer."""
        self.paint()
        self._has_news = False
        drawn = asyncio.Event()
        if self.screen.call_after_refresh(drawn.set):
            try:
                async with asyncio.timeout(DRAW_S):
                    await drawn.wait()
            except TimeoutError:
                pass
        self.view.drawn_at = self.now()

    async def _drained(self) -> None:
        driver = self._driver
        if isinstance(driver, ConsoleDriver):
            await driver.drained()

    def _note_news(self) -> None:
        """Events came: the next round or tick draws them. Nothing is drawn because something arrived."""
        self._has_news = True

    def _tick(self) -> None:
        """Draws what goes on between two rounds, unless one has just been drawn or the terminal is still busy."""
        driver = self._driver
        live = self.live
        if live is None or (isinstance(driver, ConsoleDriver) and not driver.is_drained):
            return
        if self._has_news or self.view.phase(self.now()) != "live":
            live.paint()
        elif self.now() - self.view.drawn_at > TICK_S:
            live.paint_edges()
        self._has_news = False

    # ------------------------------------------------------------------ Textual's side

    def on_mount(self) -> None:
        for name, is_dark, ground, text in (
            ("console-dark", True, "#121212", "#d0d0d0"),
            ("console-light", False, "#ffffff", "#1c1c1c"),
        ):
            self.register_theme(
                TextualTheme(name=name, primary="#5fafff" if is_dark else "#005faf", background=ground,
                             foreground=text, surface=ground, dark=is_dark)
            )  # fmt: skip
        self.set_look(self.look)
        # After `fg` the terminal is empty, and Textual draws it again only if it has another size.
        self.app_resume_signal.subscribe(self, lambda app: self.screen.refresh())
        self.set_interval(TICK_S, self._tick)
        self.run_worker(self.link.run(), name="link", exclusive=True, group="link", exit_on_error=True)

    async def on_event(self, event: events.Event) -> None:
        # Keys one after another, here. Textual gives them to the queue of whoever has the focus, and looks for bindings
        # when they come back: of what is typed fast behind a `/`, an `x` would still be the screen's, and an act.
        live = self.screen_stack[-1] if self.screen_stack else None
        is_key = isinstance(event, events.Key) and not event.is_forwarded
        if not is_key or not isinstance(live, LiveScreen) or not live.is_mounted:
            await super().on_event(event)
            return
        assert isinstance(event, events.Key)
        if live.footer.is_busy:
            live.footer.take(event)
            return
        live.clear_note()
        found = self.active_bindings.get(event.key)
        if found is not None and found.enabled:
            await self.run_action(found.binding.action, found.node)

    def set_look(self, look: Theme) -> None:
        self.look = look
        self.theme = _TEXTUAL_THEMES[look]
        for screen in self._screens.values():
            if screen.is_mounted:
                screen.set_look()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        live = self.live
        for kind in SCREENS:
            title = f"{kind.NUMBER} {kind.TITLE_TEXT}"
            yield SystemCommand(title, "Screen", lambda name=kind.NAME: self.action_show(name))
        for key in self.keys_now():
            if key.name == "command":
                continue
            owner = live if live is not None and key in live.all_keys() else self
            yield SystemCommand(
                f"{key.text}", f"Key {key.shown_as}", lambda key=key, owner=owner: self._run(key, owner)
            )
        for look in THEMES:
            yield SystemCommand(f"Theme {look}", "Colours", lambda look=look: self.set_look(look))

    def _run(self, key: Key, owner: LiveScreen | ConsoleApp) -> None:
        self.call_later(self.run_action, key.action, owner)

    # ------------------------------------------------------------------ actions

    def action_show(self, name: str) -> None:
        self.switch_mode(name)

    def action_command(self) -> None:
        live = self.live
        if live is None:
            return

        def heard(entry: Entry, said: str) -> None:
            if said == "done" and entry.text.strip():
                entry.error = self.run_command(entry.text)

        live.footer.open_entry(Entry(":", words=sorted(self.command_table())), heard)
        live.paint_edges()

    def command_table(self) -> CommandTable:
        """What `:` knows here."""
        return make_table(self)

    def run_command(self, text: str) -> str:
        """Runs one line of `:`; returns what is wrong with it."""
        return run_line(self.command_table(), text)

    def action_help(self) -> None:
        from console.help import HelpScreen

        self.push_screen(HelpScreen())

    def action_freeze(self) -> None:
        self.frozen = None if self.frozen else self.view.copy()
        self.frozen_at = self.now()
        self.paint()

    def action_rate(self, step: int) -> None:
        steps = [hz for hz in RATES_HZ if (hz > self.hz if step > 0 else hz < self.hz)]
        if steps:
            self.hz = steps[0] if step > 0 else steps[-1]
            self.hurry()
        self.paint()

    def action_export(self) -> None:
        from console.export import write_files

        live = self.live
        if live is None:
            return
        now = self.now()
        try:
            names = write_files(
                self.directory, live.NAME, self.shown, live.export(), self.export_screenshot(), now, self.wall_ms()
            )
        except OSError as error:
            self.say(f"not written: {error}", "error")
            return
        self.say(f"written: {', '.join(names)}", "good")

    def action_theme(self) -> None:
        self.set_look(THEMES[(THEMES.index(self.look) + 1) % len(THEMES)])
        self.say(f"theme {self.look}")
        self.paint()

    def action_mouse(self) -> None:
        self.has_mouse = not self.has_mouse
        if isinstance(self._driver, ConsoleDriver):
            self._driver.set_mouse(self.has_mouse)
        self.say(f"mouse {'on' if self.has_mouse else 'off: the terminal selects text itself'}")

    def action_suspend(self) -> None:
        self.action_suspend_process()

    def action_leave(self) -> None:
        self.exit(0)
