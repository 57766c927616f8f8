"""Pictures of the console: an SVG of a screen, compared byte by byte with the one that was looked at and kept.

PICTURES=update writes them anew; look at what changed before you commit it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from console.marks import Theme
from tests.console.stubhead import Desk

SIZES = ((80, 24), (120, 40), (200, 60))
PICTURES = Path(__file__).parent / "pictures"


def check_picture(desk: Desk, name: str) -> None:
    """Compares the screen with `pictures/NAME.svg`."""
    svg = take_picture(desk)
    path = PICTURES / f"{name}.svg"
    if os.environ.get("PICTURES") == "update":
        path.parent.mkdir(exist_ok=True)
        path.write_text(svg, encoding="utf-8")
        return
    assert path.exists(), f"no picture {path.name}; PICTURES=update writes it"
    if path.read_text(encoding="utf-8") == svg:
        return
    wrong = path.with_suffix(".new.svg")
    wrong.write_text(svg, encoding="utf-8")
    raise AssertionError(f"{path.name} looks different; compare it with {wrong.name}")


async def check_pictures(desk: Desk, stem: str, sizes: Iterable[tuple[int, int]] = SIZES) -> None:
    """One screen in several sizes, dark and light (or only as it is, if it has no colours): STEM-80x24-dark..."""
    looks: tuple[Theme, ...] = ("mono",) if desk.app.look == "mono" else ("dark", "light")
    for width, height in sizes:
        await desk.pilot.resize_terminal(width, height)
        for look in looks:
            desk.app.set_look(look)
            desk.app.paint()
            await desk.pilot.pause()
            check_picture(desk, f"{stem}-{width}x{height}-{look}")


def take_picture(desk: Desk) -> str:
    """The screen as SVG, with names that do not depend on the run."""
    svg = desk.app.export_screenshot(title="engine console")
    # Rich names classes by a checksum of the content; a fixed one makes differences small. Its fonts are somewhere else
    # in the world: any fixed one does.
    svg = re.sub(r"terminal-\d+", "terminal", svg)
    return re.sub(r"\s*@font-face \{.*?\}\n", "\n", svg, flags=re.DOTALL)
