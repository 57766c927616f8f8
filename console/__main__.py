"""python -m console: options, the terminal, the loop, and the exit code.

Exit codes: 0 left; 2 usage, or not at a terminal; 70 a bug of ours, after its report.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from console.dial import Target
    from console.marks import Theme

THEME_NAMES = ("dark", "light", "mono", "ansi")
LOWEST_HZ, HIGHEST_HZ = 0.5, 10.0
EXIT_USAGE, EXIT_BUG = 2, 70


def choose_theme(environ: Mapping[str, str]) -> Theme:
    """What the terminal's surroundings ask for: NO_COLOR, a terminal of sixteen colours, or a light ground."""
    if environ.get("NO_COLOR"):
        return "mono"
    if environ.get("TERM") in ("linux", "vt100", "vt220", "ansi"):
        return "ansi"
    ground = environ.get("COLORFGBG", "").rpartition(";")[2]
    return "light" if ground in ("7", "15") else "dark"


def _rate(text: str) -> float:
    value = float(text)
    if not LOWEST_HZ <= value <= HIGHEST_HZ:
        raise argparse.ArgumentTypeError(f"{text} is not from {LOWEST_HZ:g} to {HIGHEST_HZ:g}")
    return value


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Exits with 2 if they are wrong, as argparse does."""
    parser = argparse.ArgumentParser(prog="engine console", description="Watch and operate a running engine.")
    parser.add_argument("--connect", required=True, metavar="URL", help="unix:PATH or ssh://HOST[?dir=PATH]")
    parser.add_argument("--read-only", action="store_true", help="never use the socket that takes changes")
    parser.add_argument("--hz", type=_rate, default=2.0, help="refreshes a second, 0.5 to 10")
    parser.add_argument("--theme", choices=THEME_NAMES, help="colours; by default as the terminal asks for")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The console, from its options to its exit code."""
    options = parse_options(sys.argv[1:] if arguments is None else arguments)
    from console.dial import parse_target

    try:
        target = parse_target(options.connect, read_only=options.read_only)
    except ValueError as error:
        print(f"engine console: {error}", file=sys.stderr)
        return EXIT_USAGE
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("engine console: stdin and stdout must be a terminal; engine status works without one", file=sys.stderr)
        return EXIT_USAGE
    return _run(target, options.hz, options.theme or choose_theme(os.environ))


def _run(target: Target, hz: float, theme: Theme) -> int:
    # Before Textual is imported, which reads it once.
    os.environ.setdefault("TEXTUAL_ANIMATIONS", "none")
    import asyncio
    import signal

    import uvloop

    from console.app import ConsoleApp

    async def run() -> int:
        app = ConsoleApp(target, hz=hz, theme=theme)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, app.exit, 0)
        left = await app.run_async()
        # Textual prints the report of an error itself, after the terminal is as it was.
        return EXIT_BUG if app.return_code else left or 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


if __name__ == "__main__":
    sys.exit(main())
