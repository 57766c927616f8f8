"""Questions before changes: what is asked, what has to be typed, and which keys answer. Pure: a small machine of keys.

Enter never confirms anything: a hand that is used to Enter must not move experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from console.lines import Line, clip, line, width_of, wrap
from transport.messages import Message


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """One change that is asked about.

    Attributes:
        text: ends with a question mark: `Apply plan 18 to decode/0?`.
        build: makes the message from the reason that `:why` gave ("" if none).
        done: the act in the past or as a noun, for notes: `apply plan 18`.
        risks: sentences why it is risky; if there are any, `typed` has to be typed first.
        typed: what to type: the pool's name.
    """

    text: str
    build: Callable[[str], Message]
    done: str
    risks: tuple[str, ...] = ()
    typed: str = ""


Outcome = Literal["open", "yes", "no"]


class Asking:
    """A question that is on the screen."""

    def __init__(self, question: Question, why: str) -> None:
        self.question = question
        self.why = why
        self.text = ""
        self.is_unlocked = not question.risks

    def press(self, key: str, character: str | None) -> Outcome:
        """One key. `yes` only for a `y` after all that had to be typed was typed."""
        if key in ("escape", "ctrl+c"):
            return "no"
        if not self.is_unlocked:
            if key == "enter":
                # The name leads to the question, not past it.
                if self.text == self.question.typed:
                    self.is_unlocked = True
            elif key == "backspace":
                self.text = self.text[:-1]
            elif key == "ctrl+u":
                self.text = ""
            elif character and character.isprintable():
                self.text = (self.text + character)[:64]
            return "open"
        if character in ("y", "Y"):
            return "yes"
        if character in ("n", "N"):
            return "no"
        return "open"

    def draw(self, width: int) -> list[Line]:
        """One line for a plain question; risks above it for a risky one."""
        question = self.question
        lines: list[Line] = []
        for risk in question.risks:
            lines += [line(("▲ " if not n else "  ", "warn"), part) for n, part in enumerate(wrap(risk, width - 3))]
        if self.why:
            lines.append(clip(line(("why: ", "dim"), self.why), width))
        if self.is_unlocked:
            answers: Line = (("  ", ""), ("[y]", "key"), (" yes  ", ""), ("[n]", "key"), (" no ", ""))
            asked = [line((f" {part} ", "ask")) for part in wrap(question.text, width - 2)]
            if width_of(asked[-1]) + width_of(answers) <= width:
                asked[-1] = line(asked[-1], answers)
            else:
                asked.append(answers)
            lines += asked
        else:
            wanted = f"{question.text} To go on, type {question.typed}:"
            lines += [line((f" {part} ", "ask")) for part in wrap(wanted, width - 2)]
            style = "field" if question.typed.startswith(self.text) else "field bad"
            lines.append(line(" ", (self.text, style), ("▏", "field"), ("  Enter goes on  Esc leaves", "dim")))
        return lines
