"""What `:` knows: screens by name, and what has no key or an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from console.marks import THEMES
from console.screens import SCREENS

if TYPE_CHECKING:
    from console.app import ConsoleApp

RATES_HZ = (0.5, 1.0, 2.0, 4.0, 5.0, 10.0)
"""Steps of `+` and `-`; `:hz` takes all between."""
WHY_LIMIT = 4096
"""Characters of a reason: what a message takes."""

CommandTable = dict[str, tuple[str, Callable[[str], str]]]
"""By name: what it does, and a function of the rest of the line that returns what is wrong with it, or ""."""


def make_table(app: ConsoleApp) -> CommandTable:
    """All commands that can be typed on the screen that is shown."""

    def later(act: Callable[[], object]) -> Callable[[str], str]:
        def run(rest: str) -> str:
            # After the line that was typed is closed, which has the focus now.
            app.call_later(act)
            return ""

        return run

    def why(rest: str) -> str:
        app.why = rest[:WHY_LIMIT]
        app.call_later(app.say, f"the next change is logged with: {rest}" if rest else "no reason any more")
        return ""

    def theme(rest: str) -> str:
        if rest not in THEMES:
            return f"themes: {', '.join(THEMES)}"
        app.set_look(rest)
        return ""

    def hz(rest: str) -> str:
        try:
            value = float(rest)
        except ValueError:
            return f"hz {rest}: not a number"
        if not RATES_HZ[0] <= value <= RATES_HZ[-1]:
            return f"hz {rest}: from {RATES_HZ[0]:g} to {RATES_HZ[-1]:g}"
        app.hz = value
        app.hurry()
        return ""

    table: CommandTable = {
        screen.NAME: (f"screen {screen.TITLE_TEXT}", later(lambda name=screen.NAME: app.action_show(name)))  # type: ignore[misc]
        for screen in SCREENS
    }
    table |= {
        "why": ("the reason that the next change is logged with", why),
        "theme": (f"colours: {', '.join(THEMES)}", theme),
        "hz": (f"refreshes a second, {RATES_HZ[0]:g} to {RATES_HZ[-1]:g}", hz),
        "quit": ("leave; the engine goes on", later(app.action_leave)),
        "help": ("keys that work now", later(app.action_help)),
        "freeze": ("freeze, or go on", later(app.action_freeze)),
        "export": ("write this screen to files", later(app.action_export)),
        "mouse": ("mouse on or off", later(app.action_mouse)),
    }
    live = app.live
    return table | dict(live.commands()) if live else table


def run_line(table: CommandTable, text: str) -> str:
    """Runs one line: a name or the beginning of one, and the rest. Returns what is wrong with it."""
    name, _, rest = text.strip().partition(" ")
    fits = [name] if name in table else [word for word in table if word.startswith(name)]
    if len(fits) != 1:
        return f"no command {name}" if not fits else f"{name} may be {', '.join(sorted(fits))}"
    return table[fits[0]][1](rest.strip())
