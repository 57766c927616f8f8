"""Screen 3 under keys: what each of them changes, and that the head is asked for what is looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from tests.console.expertscene import SMALL, Mover
from tests.console.stubhead import Desk, open_console
from transport.messages import AskHeat, ExpertsReport


def on_experts(mover: Mover, body: Callable[[Desk], Awaitable[None]], **options: object) -> None:
    """Runs `body` with the screen open."""

    async def run() -> None:
        async with open_console(mover.scene, screen="experts", **options) as desk:
            await body(desk)

    asyncio.run(run())


def asked(desk: Desk) -> AskHeat:
    return next(ask for ask in reversed(desk.head.asked) if isinstance(ask, AskHeat))


def sentence(desk: Desk) -> str:
    """The words about the cell under the cursor."""
    return " ".join(text.strip() for text in desk.lines()[-2:]).strip()


def test_it_opens_on_the_worst_and_keys_move_from_there():
    mover = Mover()

    async def body(desk: Desk) -> None:
        assert sentence(desk).startswith("d17 layer 4, hottest expert 23: ")
        assert "the worst layer" in desk.text() and asked(desk).layer == 4
        await desk.press("]")
        await desk.rounds(1)
        assert sentence(desk).startswith("d17 layer 5") and asked(desk).layer == 5
        assert "worst is 4: " in desk.text()
        await desk.press("[", "left", "left")
        assert sentence(desk).startswith("d17 layer 2")
        await desk.press("right", "down", "j")
        assert sentence(desk).startswith("d19 layer 3")
        await desk.press("up", "k", "k")
        assert sentence(desk).startswith("d16 layer 3")
        await desk.press("g")
        assert sentence(desk).startswith("d08 layer 3")
        await desk.press("G")
        assert sentence(desk).startswith("d39 layer 3")
        await desk.press("home", "pagedown")
        page = desk.app.screen.ui.shown_rows
        assert sentence(desk).startswith(f"d{8 + min(31, page):02d} layer 3")
        await desk.press("end", "pageup", "w")
        assert sentence(desk).startswith("d17 layer 4")

    on_experts(mover, body)


def test_the_cursor_stays_where_it_is_when_loads_change():
    mover = Mover()

    async def body(desk: Desk) -> None:
        was = sentence(desk)
        mover.set(skew=msgspec.structs.replace(mover.part.skew, layer=2, rank=30))
        await desk.rounds(1)
        assert sentence(desk) == was
        await desk.press("w")
        assert sentence(desk).startswith("d30 layer 2")
        await desk.press("o")
        before = sentence(desk)
        loads = mover.experts["main"].loads
        loads[2] = loads[2][::-1]  # another expert is the hottest now
        await desk.rounds(1)
        assert sentence(desk).split(":")[1].split()[:2] == before.split(":")[1].split()[:2]
        await desk.press("1", "3")
        assert sentence(desk).startswith("d30 slot")  # nothing was chosen, and it is the worst still
        mover.set(skew=msgspec.structs.replace(mover.part.skew, layer=6, rank=10))
        await desk.rounds(1)
        await desk.press("1", "3")
        await desk.rounds(1)
        assert desk.app.screen.ui.find_layer(mover.part) == 6
        await desk.press("]", "1", "3")
        assert desk.app.screen.ui.find_layer(mover.part) == 7  # chosen, so it is kept
        await desk.press("p", "W")
        assert desk.app.screen.ui.aim == ("decode", 0, "main")

    on_experts(mover, body)


def test_a_part_that_nobody_chose_is_left_when_it_is_even_and_another_is_not():
    mover = Mover()
    even = msgspec.structs.replace(mover.part.skew, max_over_mean=1.02)
    draft = mover.scene.part("decode", 0, "draft")

    async def body(desk: Desk) -> None:
        ui = desk.app.screen.ui
        assert ui.aim == ("decode", 0, "main")
        mover.scene.experts = ExpertsReport((msgspec.structs.replace(mover.part, skew=even), draft))
        await desk.rounds(1)
        assert ui.aim == ("decode", 0, "draft")
        await desk.press("p")
        await desk.rounds(2)
        assert ui.aim == ("decode", 0, "main")  # that was a choice

    on_experts(mover, body)


def test_orders_metrics_and_the_way_in_and_out():
    mover = Mover(has_plan=True)

    async def body(desk: Desk) -> None:
        ui = desk.app.screen.ui
        await desk.press("enter")
        slot = int(sentence(desk).split()[2].rstrip(":"))
        assert sentence(desk).startswith(f"d17 slot {slot}: expert 23 (1 replica: d17) ")
        assert "% of the layer's rows, costs " in sentence(desk)
        await desk.press("left", "left", "right")
        assert "expert 23" not in sentence(desk)
        await desk.press("right", "right", "left", "enter")
        assert ui.order == "experts" and desk.lines()[3].strip().startswith("expert")
        await desk.press("w", "right")
        assert "not on d17: expert 24" in sentence(desk)
        await desk.press("escape")
        assert ui.order == "layers"
        seen = []
        for _ in range(3):
            await desk.press("m")
            seen.append(ui.shown_metric)
        assert seen == ["rows", "cost", "ratio"]  # a layer on a rank has no replicas
        await desk.press("o")
        for metric, words in (("rows", "rows a step"), ("cost", "us above mean"), ("replicas", "replicas")):
            await desk.press("m")
            assert ui.shown_metric == metric and words in desk.lines()[0]
        await desk.press("o", "m")
        assert ui.shown_metric == "moved" and "moved" in desk.lines()[0]
        await desk.press("o")
        assert ui.order == "layers" and "load/mean" in desk.lines()[0]

    on_experts(mover, body)


def test_before_and_after_the_plan():
    mover = Mover(has_plan=True)

    async def body(desk: Desk) -> None:
        before = sentence(desk)
        await desk.press("b")
        assert "after plan 18" in desk.lines()[0] and "Layer 4 is as plan 18 makes it" in desk.text()
        after = desk.lines()[-3]
        assert float(after.split("x mean")[0].split()[-1]) < float(before.split("x mean")[0].split()[-1])
        await desk.press("o")
        assert "4 replicas" in desk.lines()[-3] and "(1 replica" not in desk.text()
        await desk.press("G")
        assert " +23 " in desk.text()
        await desk.press("b")
        assert " +23 " not in desk.text()
        await desk.press("w")
        assert "(1 replica: d17)" in sentence(desk)

    on_experts(mover, body)


def test_without_a_plan_after_is_as_it_is_and_plan_makes_one():
    mover = Mover()

    async def body(desk: Desk) -> None:
        await desk.press("b")
        assert "There is no plan, so this is as it is now; R makes one." in desk.text()
        await desk.press("R")
        await desk.until(lambda: bool(mover.heard), "plan")
        await desk.rounds(2)
        assert mover.heard[0].action == "plan" and "after plan 18" in desk.lines()[0]

    on_experts(mover, body)


def test_parts_and_groups():
    mover = Mover()
    first = mover.part
    scene = mover.scene
    other = type(first)(**{name: getattr(first, name) for name in first.__struct_fields__} | {"group": 1})
    scene.experts = ExpertsReport((*scene.experts.parts, other))

    async def body(desk: Desk) -> None:
        def aim() -> tuple[str, int, str]:
            return asked(desk).pool, asked(desk).group, asked(desk).part

        assert aim() == ("decode", 0, "main")
        await desk.press("p")
        await desk.rounds(1)
        assert aim() == ("decode", 0, "draft") and "layer 0 of 1" in desk.lines()[0]
        await desk.press("p", ".")
        await desk.rounds(1)
        assert aim() == ("decode", 1, "main") and "decode/1 main" in desk.lines()[0]
        await desk.press("tab", ",", ",")
        await desk.rounds(1)
        assert aim() == ("decode", 0, "main")

    on_experts(mover, body)


def test_copy_click_and_export(tmp_path):
    mover = Mover(has_plan=True)

    async def body(desk: Desk) -> None:
        await desk.press("y")
        assert "copied cell: d17 layer 4" in desk.text("footer")
        await desk.press("Y")
        assert '"rank": 17' in desk.text("footer")
        y = next(n for n, text in enumerate(desk.lines()) if text.startswith(" d12"))
        grid_cell = desk.app.screen.ui.grid[3]
        await desk.pilot.click("#body", offset=(8 + 6 * grid_cell, y))
        assert sentence(desk).startswith("d12 layer 6")
        await desk.press("o")
        y = next(n for n, text in enumerate(desk.lines()) if text.startswith(" d12"))
        cell = desk.app.screen.ui.grid[3]
        await desk.pilot.click("#body", offset=(8 + cell, y))
        assert sentence(desk).startswith("d12 slot ")
        exported = desk.app.screen.export()
        assert len(exported["load_of_mean"]) == 32 and len(exported["load_of_mean"][0]) == SMALL.layers
        assert exported["next_slots"] != exported["slots"]

    on_experts(mover, body)


def test_in_a_link_that_only_reads_everything_but_plan_works():
    mover = Mover()

    async def body(desk: Desk) -> None:
        await desk.press("R", "o", "m")
        assert not desk.head.acts and "rank" not in desk.text("footer").partition("│")[2]
        assert "rows a step" in desk.lines()[0]

    on_experts(mover, body, read_only=True)


def test_a_part_without_steps_or_without_groups_says_so():
    mover = Mover(steps=0)

    async def body(desk: Desk) -> None:
        await desk.press("p")  # from the drafter, which has steps
        await desk.rounds(1)
        assert "No steps were counted yet." in desk.text()
        await desk.press("down", "]", "right", "o", "m", "y")
        mover.scene.experts = ExpertsReport(())
        await desk.rounds(1)
        assert "Every rank has all experts" in desk.text()
        await desk.press("down", "]", "right", "o", "p", ".", "w", "enter", "escape")
        assert "Every rank has all experts" in desk.text()

    on_experts(mover, body)
