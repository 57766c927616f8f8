"""docs/console.md has every key of every screen, and shows only pictures that there are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from console.app import APP_KEYS
from console.keys import Key
from console.marks import STATE_MARKS, THEMES
from console.screens import SCREENS
from console.screens.base import FEATURE_KEYS

DOC = Path(__file__).parents[2] / "docs" / "console.md"
BEGIN, END = "<!-- keys: python tests/console/test_console_doc.py -->\n", "<!-- end of keys -->"


def key_tables() -> str:
    """All keys, in Markdown: each screen's own, those that several share with their screens, those of all."""
    parts = [f"**{screen.NUMBER} {screen.TITLE_TEXT}**\n\n{table(screen.KEYS)}" for screen in SCREENS if screen.KEYS]
    for feature, keys in FEATURE_KEYS.items():
        where = [str(screen.NUMBER) for screen in SCREENS if feature in screen.FEATURES]
        on = "all screens" if len(where) == len(SCREENS) else f"screens {', '.join(where)}"
        parts.append(f"**To {feature}** ({on})\n\n{table(keys)}")
    return "\n" + "\n".join([*parts, f"**Everywhere**\n\n{table(APP_KEYS)}"])


def table(keys: Iterable[Key]) -> str:
    lines = ["| key | does |", "|---|---|"]
    for key in keys:
        faces = " ".join(f"`{Key((one,), '', '', '').shown_as.replace('|', chr(92) + '|')}`" for one in key.keys)
        asks = " (changes the cluster, asks first)" if key.changes else ""
        lines.append(f"| {faces} | {key.text.replace('|', chr(92) + '|')}{asks} |")
    return "\n".join(lines) + "\n"


def read_doc() -> str:
    return DOC.read_text(encoding="utf-8")


def test_the_tables_of_keys_are_current() -> None:
    found = read_doc().split(BEGIN, 1)[1].split(END, 1)[0]
    assert found == key_tables() + "\n", "keys changed: run PYTHONPATH=. python tests/console/test_console_doc.py"


def test_every_picture_exists() -> None:
    names = re.findall(r"\]\(([^)]+\.svg)\)", read_doc())
    assert len(names) > 8
    assert not [name for name in names if not (DOC.parent / name).exists()]


def test_every_screen_theme_and_glyph_of_a_state_is_named() -> None:
    text = read_doc()
    for screen in SCREENS:
        assert f"### {screen.NUMBER} {screen.TITLE_TEXT}\n" in text
    for theme in THEMES:
        assert f"`{theme}`" in text
    for mark in STATE_MARKS.values():
        assert f"`{mark.glyph}`" in text


if __name__ == "__main__":
    before, rest = read_doc().split(BEGIN, 1)
    DOC.write_text(f"{before}{BEGIN}{key_tables()}\n{rest[rest.index(END) :]}", encoding="utf-8")
