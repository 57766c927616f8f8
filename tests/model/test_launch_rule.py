"""The rule of what may be read before a wait, on sequences by hand, and what is read from a kernel's code."""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys

import pytest

from kernels import ends
from tests.model.launch_facts import ANYWHERE, Facts, read_facts
from tests.model.launch_rule import Launch, find_breaks

POSITIONS = 7
WRITER = Launch("open_rows", (), is_early=False, writes=frozenset({POSITIONS}))
EAGER = Launch("eager", (), is_early=True, lets_in_ahead=True)
PATIENT = Launch("patient", (), is_early=True)
PLAIN = Launch("plain", (), is_early=False, lets_in_ahead=True)
LARGE = dataclasses.replace(EAGER, whole=67)
READER = Launch("reader", (), is_early=True, lets_in_ahead=True, reads_ahead=frozenset({POSITIONS}))


def chain(*launches: Launch) -> list[Launch]:
    return [
        dataclasses.replace(launch, front=(number - 1,) if number else ()) for number, launch in enumerate(launches)
    ]


@pytest.mark.parametrize(
    ("between", "is_broken"),
    [
        ([], True),
        ([EAGER], True),
        ([EAGER] * 9, True),
        ([PATIENT], False),
        ([PLAIN], False),
        ([EAGER, PATIENT, EAGER], False),
        ([EAGER, PLAIN, EAGER], False),
        ([LARGE, LARGE], False),
        ([EAGER, LARGE, LARGE], False),
        ([EAGER, LARGE, EAGER, LARGE], True),
        ([EAGER, LARGE, dataclasses.replace(LARGE, whole=65)], True),
    ],
)
def test_what_is_read_ahead_needs_somebody_between_who_has_waited(between: list[Launch], is_broken: bool) -> None:
    found = find_breaks(chain(WRITER, *between, READER))
    assert bool(found) is is_broken
    assert all(f"reads {POSITIONS} before it waits, and 0 open_rows" in each for each in found)
    # Whoever is not launched early may read anything.
    assert not find_breaks(chain(WRITER, *between, dataclasses.replace(READER, is_early=False)))


def test_a_later_writer_counts_too() -> None:
    assert len(find_breaks(chain(WRITER, PATIENT, WRITER, READER))) == 1


def test_a_branch_is_as_late_as_its_own_front_and_joins_both() -> None:
    # 0 writes; 1 patient on the main line, 2 eager on a branch from 0; 3 behind the branch, 4 behind both.
    launches = [
        *chain(WRITER, PATIENT),
        *[dataclasses.replace(EAGER, front=(0,))],
        dataclasses.replace(READER, front=(2,)),
    ]
    assert len(find_breaks(launches)) == 1
    assert not find_breaks([*launches[:3], dataclasses.replace(READER, front=(1, 2))])


def test_each_kernel_waits_and_writes_behind_its_wait() -> None:
    assert "never waits" in find_breaks(chain(WRITER, dataclasses.replace(PATIENT, waits=False)))[0]
    early = dataclasses.replace(PATIENT, writes_ahead=frozenset({POSITIONS}))
    assert "writes 7 before it waits" in find_breaks(chain(WRITER, early))[0]


CODE = """module {
  tt.func public @kernel(FIRST, %second: !tt.ptr<i32>, %third: !tt.ptr<i64>, %n: i32) attributes {noinline = false} {
    %0 = tt.addptr %first, %n : !tt.ptr<i32>, i32
    %1 = tt.load %0 : !tt.ptr<i32>
    %2 = arith.cmpi eq, %1, %n : i32
    cf.cond_br %2, ^bb1, ^bb2
  ^bb1:  // pred: ^bb0
    tt.return
  ^bb2:  // pred: ^bb0
    LET
    %3 = tt.addptr %second, %1 : !tt.ptr<i32>, i32
    %4 = scf.for %i = %n to %n step %n iter_args(%at = %3) -> (!tt.ptr<i32>)  : i32 {
      %7 = tt.addptr %at, %i : !tt.ptr<i32>, i32
      scf.if %2 {
        LOOP
      }
      scf.yield %7 : !tt.ptr<i32>
    }
    WAIT
    %5 = tt.load %4 : !tt.ptr<i32>
    %6 = tt.load %third : !tt.ptr<i64>
    %8 = tt.int_to_ptr %6 : i64 -> !tt.ptr<i32>
    tt.store %8, %5 : !tt.ptr<i32>
    tt.return
  }
}
""".replace("FIRST", '%first: !tt.ptr<i32> {tt.divisibility = 16 : i32} loc("first"(#loc))')
WAIT = '%w = tt.elementwise_inline_asm "griddepcontrol.wait; // $0" {constraints = "=r"} -> i32'
LET = WAIT.replace("%w", "%l").replace("wait", "launch_dependents")
NOTHING = "%k = arith.constant 1 : i32"


@pytest.mark.parametrize(
    ("loop", "facts"),
    [
        (NOTHING, Facts({"first"}, set(), {ANYWHERE}, True, True)),
        ("%9 = tt.load %7 : !tt.ptr<i32>", Facts({"first", "second"}, set(), {ANYWHERE}, True, True)),
        ("tt.store %at, %1 : !tt.ptr<i32>", Facts({"first"}, {"second"}, {"second", ANYWHERE}, True, True)),
    ],
)
def test_a_kernels_code_is_followed_along_all_its_ways(loop: str, facts: Facts) -> None:
    assert read_facts(CODE.replace("LET", LET).replace("LOOP", loop).replace("WAIT", WAIT)) == facts


def test_what_is_done_under_the_condition_of_a_wait_is_behind_it() -> None:
    """Masked, or in a branch of its own."""
    masked = f"""%m = arith.andi %2, %q : i1
    scf.if %2 {{
      {WAIT}
    }}
    tt.store %at, %1, %MASK : !tt.ptr<i32>
    scf.if %2 {{
      %x = tt.load %at : !tt.ptr<i32>
    }}"""
    for mask, ahead in (("m", set()), ("2", set()), ("q", {"second"})):
        code = CODE.replace("LET", NOTHING).replace("WAIT", NOTHING)
        found = read_facts(code.replace("LOOP", masked.replace("%MASK", f"%{mask}")))
        assert (found.reads_ahead, found.writes_ahead - {ANYWHERE}) == ({"first", "second", "third"}, ahead)


def test_a_wait_counts_where_no_way_leads_around_it() -> None:
    """In front of the first way out, all is behind it; under a condition it is not."""
    first = CODE.replace("%0 = ", f"{WAIT}\n%0 = ", 1).replace("LET", LET).replace("WAIT", NOTHING)
    assert read_facts(first.replace("LOOP", NOTHING)) == Facts(set(), set(), {ANYWHERE}, True, False)
    under = CODE.replace("LET", NOTHING).replace("LOOP", WAIT).replace("WAIT", LET)
    assert read_facts(under) == Facts({"first", "second", "third"}, {ANYWHERE}, {ANYWHERE}, True, True)


def run_steps(*options: str) -> str:
    """What the steps of a model are said to do, of which each keeps the rule."""
    command = [sys.executable, "-m", "tests.model.launch_order", *options]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_what_a_step_opens_is_there_for_all_that_follows() -> None:
    """Its rows are written by the kernel in front of this one, and read ahead by many behind it."""
    source = inspect.getsource(ends._open_streams_kernel.fn)
    assert source.index("gdc_wait()") < source.index("gdc_launch_dependents()")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--case", "draft=4*4", "--case", "rows=1*1", "--case", "rows=64*1"),
        ("--ranks", "1", "--case", "draft=1*2", "--case", "rows=1*32"),
        ("--model", "v4.1-flash", "--layers", "6", "--case", "rows=16*1"),
    ],
)
def test_steps_read_nothing_that_may_not_be_there(options: tuple[str, ...]) -> None:
    assert "launches" in run_steps(*options)
