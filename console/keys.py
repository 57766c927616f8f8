"""Keys as data: what each does, in words, so that footer, help, palette and permissions can not disagree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from textual.binding import Binding, BindingType


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One thing that can be done on a screen.

    Attributes:
        keys: Textual's names or characters, the first one is shown: `("j", "down")`.
        action: the method `action_<action>` of the screen (or the app) that does it, with arguments if it has any:
            `turn(1)`.
        word: one or two words for the footer; "" keeps it out of the footer (it is in the help).
        text: a sentence without a full stop, for help and palette.
        changes: it changes something in the cluster: absent where the link only reads.
        face: how the key is written; "" writes the first of `keys`.
    """

    keys: tuple[str, ...]
    action: str
    word: str
    text: str
    changes: bool = False
    face: str = ""

    @property
    def shown_as(self) -> str:
        return self.face or _FACES.get(self.keys[0], self.keys[0])

    @property
    def name(self) -> str:
        """The action without its arguments, which is what permissions are asked for."""
        return self.action.partition("(")[0]


_FACES = {
    "enter": "Enter",
    "escape": "Esc",
    "backspace": "Backspace",
    "tab": "Tab",
    "left": "←",
    "right": "→",
    "up": "↑",
    "down": "↓",
    "pageup": "PgUp",
    "pagedown": "PgDn",
    "home": "Home",
    "end": "End",
    "ctrl+p": "ctrl+p",
}
_NAMES = {",": "comma"}
"""Binding strings are lists with commas between."""


def bindings(keys: Iterable[Key]) -> list[BindingType]:
    """The same for Textual."""
    return [
        Binding(_NAMES.get(key, key), entry.action, entry.text, show=False, priority=key == "ctrl+c")
        for entry in keys
        for key in entry.keys
    ]
