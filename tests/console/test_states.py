"""Every state of the link and of the cluster is drawn on purpose; pictures of all of them."""

from __future__ import annotations

import asyncio
import math

import msgspec
import pytest

from console.draw_state import draw_starting, draw_state, start_command, start_figures
from console.lines import plain, width_of
from console.view import ClusterView, LinkState
from tests.console.picture import check_pictures
from tests.console.stubhead import Desk, Scene, make_rank, make_status, open_console


def run(body):
    asyncio.run(body())


def starting() -> Scene:
    """Half of the decode ranks load, one waits for its group, one died."""
    scene = Scene(status=make_status(ready=False, reasons=("10 of 40 ranks are not ready",)))
    for rank in range(8, 16):
        scene.set_rank(
            *(rank,),
            state="starting",
            phase=f"weights {rank - 5}/32 GiB",
            phase_done=(rank - 5) << 30,
            phase_total=32 << 30,
            phase_unit="bytes",
            phase_ms=4000,
            snapshot=None,
        )
    scene.set_rank(16, state="joining", phase="group", phase_ms=2000, snapshot=None)
    scene.set_rank(17, state="restarting", reason="exit code 1", restarts=2, snapshot=None)
    scene.set_rank(18, state="starting", phase="graphs", phase_done=5, phase_total=8, phase_ms=5000, snapshot=None)
    return scene


def partial() -> Scene:
    scene = Scene()
    scene.set_rank(22, state="lost", reason="signal 9", snapshot=None)
    scene.set_rank(30, age_ms=4200)
    scene.set_rank(12, state="draining", phase="drained")
    return scene


def draining() -> Scene:
    return Scene(status=make_status(is_stopping=True, ready=False, reasons=("draining",), running=120, waiting=0))


async def connecting(desk: Desk) -> None:
    await desk.until(lambda: desk.head.asked)
    desk.clock.at += 3
    desk.app.paint()


async def never(desk: Desk) -> None:
    await desk.until(lambda: desk.app.view.link.phase == "never")


async def mismatch(desk: Desk) -> None:
    await desk.until(lambda: desk.app.view.link.phase == "mismatch")


async def live(desk: Desk) -> None:
    await desk.rounds(8, seconds=1.0)


async def stale(desk: Desk) -> None:
    await desk.rounds(8, seconds=1.0)
    desk.head.is_silent = True
    desk.app.hurry()
    await desk.until(lambda: desk.app.view.asked_at > 0)
    desk.clock.at += 12.4


async def lost(desk: Desk) -> None:
    await desk.rounds(8, seconds=1.0)
    await desk.head.stop()
    await desk.until(lambda: desk.app.view.link.phase == "lost")
    desk.clock.at += 0.1


STATES = {
    "connecting": (connecting, Scene, {"warm": 0, "wait": False, "is_silent": True}, "Connecting"),
    "never": (never, Scene, {"has_head": False}, "engine up --detach --dir /run/engine"),
    "mismatch": (mismatch, lambda: Scene(status=make_status(version=9)), {"warm": 0, "wait": False}, "protocol 9"),
    "starting": (live, starting, {}, "29 of 40 ranks ready"),
    "live": (live, Scene, {}, "fullest: d25 1.83×"),
    "partial": (live, partial, {}, "ranks"),
    "draining": (live, draining, {}, "ranks"),
    "stale": (stale, Scene, {}, "ranks"),
    "lost": (lost, Scene, {}, "ranks"),
}
HEADERS = {
    "connecting": "connecting to unix:/run/engine",
    "never": "no engine answers: unix:/run/engine: No such file or directory; again in 1 s",
    "mismatch": "the engine speaks protocol 9, this console 1",
    "starting": "not ready",
    "live": "d25",
    "partial": "2 ranks missing: d22, d30",
    "draining": "draining: 120 requests left",
    "stale": "the head has not answered for 12 s",
    "lost": "link lost 0 s ago: the head: end of stream; again in 1 s",
}


@pytest.mark.parametrize("theme", ["dark", "mono"])
@pytest.mark.parametrize("state", STATES)
def test_state(state, theme, monkeypatch):
    reach, scene, options, said = STATES[state]
    if theme == "mono":
        monkeypatch.setenv("NO_COLOR", "1")

    async def body():
        async with open_console(scene(), theme=theme, **options) as desk:
            await reach(desk)
            desk.app.paint()
            await desk.pilot.pause()
            assert said in desk.text() and HEADERS[state] in desk.text("header")
            for part in ("header", "body", "footer"):
                assert all(len(line) <= 80 for line in desk.lines(part))
            sizes = ((80, 24), (120, 40), (200, 60)) if state in ("live", "starting") else ((80, 24), (120, 40))
            stem = "over" if state == "live" else f"state-{state}"
            if theme == "mono" and state not in ("live", "starting", "lost"):
                sizes = ((80, 24),)
            await check_pictures(desk, stem, sizes)

    run(body)


def test_what_is_shown_of_a_mode_before_anything_is_known():
    async def body():
        async with open_console(has_head=False) as desk:
            await never(desk)
            assert "READ-ONLY" not in desk.text("header") and "ADMIN" not in desk.text("header")
            assert "no data" in desk.text("header")

    run(body)


def test_sockets_that_may_not_be_opened():
    view = ClusterView()
    view.link = LinkState("never", "unix:/run/engine: Permission denied", address="unix:/run/engine")
    lines = draw_state(view, "over", 80, 21, 1.0)
    assert lines is not None
    text = " ".join(plain(entry).strip() for entry in lines)
    assert "modes of its sockets" in text and "engine up" not in text


def test_the_countdown_counts():
    async def body():
        async with open_console(has_head=False) as desk:
            view = desk.app.view
            await never(desk)
            for _ in range(3):
                before = view.link
                desk.app.link.hurry()
                await desk.until(lambda before=before: view.link is not before)
            assert "Again in 5 s." in desk.text()
            desk.clock.at += 2.5
            desk.app._tick()
            await desk.pilot.pause()
            assert "Again in 3 s." in desk.text() and "again in 3 s" in desk.text("header")

    run(body)


def test_other_screens_are_drawn_while_ranks_start():
    async def body():
        async with open_console(starting(), screen="ranks") as desk:
            assert "9 starting" in desk.text() and "29 of 40" not in desk.text()

    run(body)


def test_the_command_to_start_an_engine():
    view = ClusterView()
    view.link = LinkState(address="ssh://me@host", directory="/run/a b")
    assert start_command(view) == "ssh me@host engine up --detach --dir '/run/a b'"
    view.link = LinkState(address="unix:/x")
    assert start_command(view) == "engine up --detach"


def test_rate_and_rest_of_a_phase():
    found = start_figures(
        make_rank(1, "decode", state="starting", phase_done=8 << 30, phase_total=32 << 30, phase_ms=4000)
    )
    assert (found.share, found.per_s, found.eta_s) == (0.25, 2 << 30, 12.0)
    nothing = start_figures(make_rank(1, "decode", state="joining", phase_ms=4000))
    assert math.isnan(nothing.share) and math.isnan(nothing.eta_s)
    begun = start_figures(make_rank(1, "decode", state="starting", phase_total=5, phase_ms=1))
    assert begun.share == 0 and math.isnan(begun.eta_s)


@pytest.mark.parametrize(("width", "height"), [(80, 21), (120, 37), (200, 57), (80, 6)])
def test_a_rack_that_starts_fits(width, height):
    view = ClusterView()
    status = make_status(16, 56, ready=False)
    ranks = tuple(
        msgspec.structs.replace(
            *(rank,), state="starting", phase="weights", phase_done=n << 30, phase_total=80 << 30, phase_unit="bytes",
            phase_ms=10_000, snapshot=None,
        )
        for n, rank in enumerate(status.ranks, 1)
    )  # fmt: skip
    view.take(msgspec.structs.replace(status, ranks=ranks), b"", 1.0)
    lines = draw_starting(view, width, height)
    assert len(lines) <= height and all(width_of(line) <= width for line in lines)
    text = "\n".join(plain(line) for line in lines)
    # The slowest comes first, and who is not named is counted.
    assert text.index("p00") < text.index("p01")
    named = text.count("weights")
    assert named == 72 or f"and {72 - named} rank" in text
