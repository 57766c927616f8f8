"""The pact between GPUs: each of its rules holds, and is found broken by its check where a bug breaks it.

Bugs are planted into copies of the kernels' files, or into the layout. With a CUDA device they are compiled, else
interpreted. `exchange_rules.py` has the checks; the last tests have sleeping kernels on real streams.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch

from engine.model import nvlink
from kernels import combine, exchange
from kernels.mailbox import MailboxLayout
from tests.kernels import exchange_rules as rules
from tests.kernels.exchange_rules import Kernels

REAL = Kernels(exchange, combine)
FILES = ("flags", "exchange", "combine")
"""In the order in which they import one another."""
Check = Callable[[Kernels, torch.device], None]
Patch = Callable[[pytest.MonkeyPatch], None]
Edits = Mapping[str, Mapping[str, str]]
"""By file, lines and what they become."""


@pytest.mark.parametrize(("layers", "kind"), [(2, "dispatch"), (3, "combine"), (3, "both")])
def test_whoever_is_slow_all_get_what_was_put_for_them(layers: int, kind: str, device: torch.device) -> None:
    for seed in range(2):
        rules.check_delays(REAL, device, layers, kind, seed)


@pytest.mark.parametrize(
    "check",
    [
        rules.check_sticky, rules.check_blame, rules.check_memberships, rules.check_numbers, rules.check_sizes,
        rules.check_lost,
    ],
)  # fmt: skip
def test_a_rule_holds(check: Check, device: torch.device) -> None:
    check(REAL, device)


def delays(layers: int, kind: str) -> Check:
    def check(kernels: Kernels, device: torch.device) -> None:
        for seed in range(4):
            rules.check_delays(kernels, device, layers, kind, seed)

    return check


def rows_have_one_half(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MailboxLayout, "rows_at", lambda self, layer: self.weights_at(self.layers))


def parts_have_one_half(patch: pytest.MonkeyPatch) -> None:
    original = MailboxLayout.parts_at
    patch.setattr(MailboxLayout, "parts_at", lambda self, layer: original(self, 0))


def flags_have_one_half(patch: pytest.MonkeyPatch) -> None:
    original = MailboxLayout.flags_at
    patch.setattr(MailboxLayout, "flags_at", lambda self, phase, layer: original(self, phase, 0))


def odd_layers_have_two_halves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MailboxLayout, "half", lambda self, layer: layer % 2)


def memberships_have_no_number(patch: pytest.MonkeyPatch) -> None:
    original = nvlink.first_words
    patch.setattr(nvlink, "first_words", lambda layout, membership: original(layout, 0))


PATCHES: dict[Patch, Check] = {
    rows_have_one_half: delays(2, "dispatch"),
    parts_have_one_half: delays(2, "combine"),
    flags_have_one_half: delays(2, "dispatch"),
    odd_layers_have_two_halves: delays(3, "both"),
    memberships_have_no_number: rules.check_memberships,
}
ANY_FLAG = {
    '"acquire", scope="sys") == word': '"acquire", scope="sys") != 0',
    "setp.eq.b64 found, seen, $5;": "setp.ne.b64 found, seen, 0;",
}
BUGS: dict[str, tuple[Edits, Check]] = {
    "any flag will do, of another membership": ({"flags": ANY_FLAG}, rules.check_memberships),
    "any flag will do, of another exchange": ({"flags": ANY_FLAG}, rules.check_numbers),
    "exchanges are not counted": ({"flags": {"next_half, word + 1)": "next_half, word)"}}, rules.check_numbers),
    "flags do not tell the size of the step": (
        {"exchange": {"word | (rows.to(tl.int64) << COUNTER_BITS)": "word + 0"}},
        rules.check_sizes,
    ),
    "who has no rows puts no flags": (
        {"exchange": {"flag_word, rank, RANKS, FAST)": "flag_word, rank, tl.where(own > 0, RANKS, 0), FAST)"}},
        delays(2, "dispatch"),
    ),
    "who has waited in vain puts rows": (
        {"exchange": {"        fine = agree(failure, FAST)\n        if fine:": "        if True:"}},
        rules.check_sticky,
    ),
    "who has waited in vain puts parts": (
        {"combine": {"                fine = agree(failure, FAST)": "                fine = failure == failure"}},
        rules.check_sticky,
    ),
    "a wait accuses who waits": (
        {"flags": {
            "failed | (peer.to(tl.int64) << 52)": "failed | (rank.to(tl.int64) << 52)",
            "cvt.u64.u32 failure, peer;": "cvt.u64.u32 failure, $8;",
        }},
        rules.check_blame,
    ),
    "an expiry does not tell its exchange": (
        {"flags": {"failed = FAILED | (PHASE << 60) | number": "failed = FAILED | (PHASE << 60) | (number & 0)"}},
        rules.check_blame,
    ),
    "rows of a place that is lost are left": (
        {"exchange": {"tl.full(place.shape, -1, tl.int32), mask=listed)":
                      "tl.full(place.shape, -1, tl.int32), mask=listed & (row < 0))"}},
        rules.check_lost,
    ),
}  # fmt: skip


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.__name__)
def test_a_bug_of_the_layout_is_found(patch: Patch, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    patch(monkeypatch)
    with pytest.raises(AssertionError):
        PATCHES[patch](REAL, device)


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_the_kernels_is_found(bug: str, plant: Callable[[Edits], Kernels], device: torch.device) -> None:
    edits, check = BUGS[bug]
    kernels = plant(edits)
    with pytest.raises(AssertionError):
        check(kernels, device)


@pytest.mark.gpu
@pytest.mark.parametrize("slow", range(3))
def test_on_streams_the_others_run_ahead_of_one_that_sleeps(slow: int, device: torch.device) -> None:
    rules.check_sleeps(REAL, device, slow)


@pytest.mark.gpu
def test_rows_without_a_second_half_show_on_streams(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    rows_have_one_half(monkeypatch)
    with pytest.raises(AssertionError, match="has other rows"):
        rules.check_sleeps(REAL, device, 2)


def test_copies_of_the_kernels_without_a_bug_pass(plant: Callable[[Edits], Kernels], device: torch.device) -> None:
    rules.check_blame(plant({}), device)


@pytest.fixture
def plant(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[Edits], Kernels]]:
    """Copies of the files of `FILES` with edits, as modules."""
    loaded = []

    def load(edits: Edits) -> Kernels:
        names = {file: f"planted_{abs(hash(request.node.name))}_{file}" for file in FILES}
        modules: dict[str, ModuleType] = {}
        for file in FILES:
            text = Path(exchange.__file__).with_name(f"{file}.py").read_text()
            for old, new in edits.get(file, {}).items():
                assert old in text, f"kernels/{file}.py has no {old!r}"
                text = text.replace(old, new)
            for other in FILES:
                text = text.replace(f"from kernels.{other} import", f"from {names[other]} import")
            path = tmp_path / f"{names[file]}.py"
            path.write_text(text)
            spec = importlib.util.spec_from_file_location(names[file], path)
            assert spec is not None and spec.loader is not None
            modules[file] = sys.modules[names[file]] = importlib.util.module_from_spec(spec)
            loaded.append(names[file])
            spec.loader.exec_module(modules[file])
        return Kernels(modules["exchange"], modules["combine"])

    yield load
    for name in loaded:
        del sys.modules[name]
