"""Text of strangers (labels, reasons, names of clients), made safe to print: it can not move a terminal's cursor."""

from __future__ import annotations


def make_plain(text: str) -> str:
    """The same with a question mark for each character that is none to look at."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)
