"""The bench of a device's step, as far as a machine without one can tell: what is measured, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.bench.cases import DeviceCase, cut_layers, gather_cases, load_cases, load_model_config, parse_case
from engine.bench.check import Finding, check_ops, describe_findings
from engine.bench.profile import attribute, read_trace
from engine.bench.rig import StepBench, StepOptions, positions_of
from engine.bench.routing import ROUTINGS, Routing, draw_ids
from engine.bench.step import describe_run, is_sound, main
from engine.errors import ConfigError
from engine.model.ops import reference_ops
from engine.model.shapes import shape_from_config
from kernels.forms import RecordFormat
from kernels.reference import load_record
from tests.cli.test_commands import engine

TINY = "tests/oracle/v4-tiny-quant"
CPU = torch.device("cpu")


def tiny_bench(*cases: str, routing: Routing = "real", ranks: int = 1, records: RecordFormat = "bf16") -> StepBench:
    asked = tuple(parse_case(case) for case in cases)
    return StepBench(StepOptions(TINY, asked, routing=routing, ranks=ranks, records=records), CPU, reference_ops())


# Cases


@pytest.mark.parametrize(
    ("text", "case"),
    [
        ("decode=32*1@8192", DeviceCase("decode", 32, 1, 8192)),
        ("decode=64*1@128k", DeviceCase("decode", 64, 1, 131072)),
        ("verify=16*4@4096:3", DeviceCase("verify", 16, 4, 4096, 3)),
        ("one=1@1k", DeviceCase("one", 1, 1, 1024)),
        ("first=2*3", DeviceCase("first", 2, 3, 3)),
        ("a b=8*8@8:7", DeviceCase("a b", 8, 8, 8, 7)),
    ],
)
def test_a_case_says_requests_rows_and_length(text: str, case: DeviceCase) -> None:
    assert parse_case(text) == case


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8192", "is not NAME="),
        ("a=", "is not NAME="),
        ("a=1@2m", "is not NAME="),
        ("mix=8192,32*1@8192", "mixes shapes"),
        ("prefill=8192", "is a prompt's"),
        ("chunk=4@40960c", "is a prompt's"),
        ("a=0*1@5", "at least one request"),
        ("a=3*0@5", "at least one request"),
        ("a=4@3", "a length that holds its rows"),
        ("verify=16*4@4096:2", "must verify 3 drafts with 4 rows, found 2"),
    ],
)
def test_what_is_no_case_is_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_case(text)


def test_cases_come_from_a_file_too(tmp_path: Path) -> None:
    as_list, as_object = tmp_path / "list.json", tmp_path / "object.json"
    as_list.write_text('["a=1@1k", "b=2*1@2k"]')
    as_object.write_text('{"a": "1@1k", "b": "2*1@2k"}')
    assert load_cases(as_list) == load_cases(as_object) == [parse_case("a=1@1k"), parse_case("b=2*1@2k")]
    with pytest.raises(ConfigError, match="two cases are named 'a'"):
        gather_cases(["a=1"], as_list)
    with pytest.raises(ConfigError, match="no case to measure"):
        gather_cases([], None)
    as_list.write_text("[1]")
    with pytest.raises(ConfigError, match="must hold a list of cases"):
        load_cases(as_list)


def test_v4_flash_is_known_by_name() -> None:
    shape = shape_from_config(load_model_config("v4-flash"))
    ratios = [role.ratio for role in shape.layer_roles]
    assert (ratios.count(0), ratios.count(4), ratios.count(128)) == (2, 21, 20)
    assert sum(role.is_hashed for role in shape.layer_roles) == 3
    assert load_model_config(TINY) == json.loads(Path(TINY, "config.json").read_text())
    with pytest.raises(ConfigError, match="can not be read"):
        load_model_config("v5-flash")
    cut = shape_from_config(cut_layers(load_model_config("v4-flash"), 5))
    assert cut.layer_roles == shape.layer_roles[:5] and cut.num_draft_layers == 0
    with pytest.raises(ConfigError, match="--layers must be at most the model's, found 44"):
        cut_layers(load_model_config("v4-flash"), 44)


# Rows


def test_balanced_and_skewed_experts_are_what_they_are_called() -> None:
    shape = shape_from_config(load_model_config("v4-flash"))
    generator = torch.Generator().manual_seed(3)
    loads = {}
    for routing in ROUTINGS[1:]:
        ids = draw_ids(shape, routing, 128, generator)
        assert ids is not None and ids.shape == (43, 128, 6)
        assert (ids.diff(dim=-1) > 0).all(), "ascending, so distinct"
        loads[routing] = torch.stack([torch.bincount(layer.flatten(), minlength=256) for layer in ids])
    assert set(loads["balanced"].flatten().tolist()) == {3}
    skewed = loads["zipf"].float().sort(-1, descending=True).values.mean(0)
    # The most popular expert is in most rows; the harmonic tail leaves many with none.
    assert skewed[0] > 100 and skewed[0] > 4 * skewed[16] and skewed[128] < 2
    assert loads["zipf"].argmax(-1).unique().numel() > 20, "another favourite in each layer"
    assert draw_ids(shape, "real", 128, generator) is None


def test_sequences_end_one_after_the_other() -> None:
    assert positions_of(DeviceCase("a", 3, 2, 10)) == [[8, 9], [7, 8], [6, 7]]
    assert positions_of(DeviceCase("a", 3, 2, 2)) == [[0, 1], [0, 1], [0, 1]]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_dummy_steps_keep_their_magnitude_and_route_rows_apart(routing: Routing) -> None:
    bench = tiny_bench("a=6*1@300", "b=2*4@64:3", routing=routing, ranks=2)
    for case in bench.options.cases:
        step = bench.open(case)
        outputs = step.run()
        assert outputs.logits.isfinite().all()
        assert 0.3 < outputs.logits.std() < 3
        assert (outputs.logits - outputs.logits.mean(0)).std() > 0.2, "rows differ"
        assert len(outputs.greedy.unique()) > 1
        assert torch.equal(outputs.logits, step.run().logits), "a step that runs again computes the same"
        touched = bench.touched(step, outputs)
        assert len(touched) == 4 and max(touched) <= 4
        if routing == "balanced":
            assert touched == [4, 4, 4, 4]


def test_fp8_records_of_made_up_contexts_are_numbers_of_the_right_size(tmp_path: Path) -> None:
    config = load_model_config(TINY) | {"head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 64}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    case = parse_case("a=3*1@300")
    bench = StepBench(StepOptions(str(path), (case,), records="fp8"), CPU, reference_ops())
    found = {"window": [], "entries": [], "keys": []}  # type: dict[str, list[torch.Tensor]]
    for layer in bench.records.layers:
        for name in found:
            plane = getattr(layer, name)
            if plane is not None:
                found[name] += [load_record(bench.arena, plane, block, plane.rows - 1) for block in range(3)]
    for name, records in found.items():
        values = torch.stack(records)
        assert values.isfinite().all() and 0.4 < values.square().mean().sqrt() < 2.5, name
    outputs = bench.open(case).run()
    assert outputs.logits.isfinite().all() and len(outputs.greedy.unique()) > 1


def test_rows_of_peers_change_nothing_of_the_own_ones() -> None:
    bench = tiny_bench("a=4*1@40", ranks=4)
    step = bench.open(bench.options.cases[0])
    assert step.peers is not None and step.peers.ids.shape == (4, 16, 3)
    with_peers = step.run()
    assert torch.equal(step.peers.ids[2, :4], with_peers.ids[2])
    step.peers = None
    assert torch.equal(step.run().logits, with_peers.logits)


def test_bytes_are_those_that_a_step_reads_at_least() -> None:
    bench = tiny_bench("a=2*1@300", ranks=2)
    (case,) = bench.options.cases
    moved = bench.count_bytes(case, [3, 4, 4, 2])
    slots = bench.weights.slots
    assert moved["experts"] == 13 * slots.slot_bytes and slots.slot_bytes == 3 * 128 * 128 * 17 // 32
    # Positions 299 and 298. Windows of 16 in four layers, 2 entries of 128 tokens, 8 of 74 or 75 entries with all keys.
    wanted = 2 * 4 * 16 * 256 + 2 * 2 * 256 + 2 * 2 * 8 * 256 + 2 * (75 + 74) * 64
    assert moved["records"] == wanted
    assert moved["total"] == moved["dense"] + moved["experts"] + moved["records"]
    matrices = [layer.project_query.num_bytes for layer in bench.weights.layers]
    assert moved["dense"] > sum(matrices) + bench.weights.head.num_bytes


def test_full_size_dense_weights_are_what_the_model_says() -> None:
    """6.25 G parameters beside the routed experts, embedding included, most of them in one byte."""
    from engine.model.checkpoint import tensor_specs

    shape = shape_from_config(load_model_config("v4-flash"))
    total = 0
    for name, spec in tensor_specs(shape).items():
        if ".experts." not in name and not name.startswith(("mtp.", "embed")) and spec.store != "ids":
            size = 1
            for edge in spec.shape:
                size *= edge
            total += size * {"fp8": 1, "bf16": 2, "fp32": 4, "fp4": 1, "rows": 1}[spec.store]
    assert 7.5e9 < total < 8.5e9


# The check


def spoil(name: str, ops: Any) -> Any:
    """The same operations, one of them wrong."""
    plain = getattr(ops, name)

    def wrong(*arguments: Any, **more: Any) -> Any:
        result = plain(*arguments, **more)
        if name == "enter_attention":
            arena, ring = arguments[7], arguments[8]
            slab = int(arguments[6].slabs[0])
            # One of the two sequences' window records.
            at = ring.data + slab * ring.stride + int(arguments[6].positions[0]) % ring.rows * ring.data_bytes
            arena[at : at + ring.data_bytes] ^= 1
        elif name == "prepare_and_select":
            result = (result[0], result[1] + (result[1] >= 0).int())
        elif name == "attend":
            result = result * torch.nan
        else:
            result = result * 1.02
        return result

    return SimpleNamespace(**{**vars(ops), name: wrong})


@pytest.mark.parametrize("name", [None, "linear", "attend", "enter_attention", "prepare_and_select"])
def test_the_check_names_the_operation_that_is_wrong(name: str | None) -> None:
    bench = tiny_bench("a=2*1@300", ranks=2)
    ops = bench.ops if name is None else spoil(name, bench.ops)
    findings: dict[str, Finding] = {}
    bench.open(bench.options.cases[0]).run_with(check_ops(ops, bench.arena, findings))
    assert len(findings) == 14 and findings["attend"].calls == 4
    wrong = [op for op, finding in findings.items() if not finding.is_fine(op)]
    if name == "attend":
        # NaN is in all that follows, which has no difference to judge.
        assert name in wrong
    else:
        assert wrong == ([] if name is None else [name])
    assert sum("WRONG" in line for line in describe_findings(findings)) == len(wrong)


# Traces


def event(cat: str, name: str, ts: float, dur: float, correlation: int | None = None) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


def eager_trace() -> dict[str, Any]:
    events = [
        event("user_annotation", "step:dense", 10, 10),
        event("user_annotation", "step:head", 30, 10),
        event("user_annotation", "another", 45, 100),
        event("cuda_driver", "cuLaunchKernelEx", 12, 2, 1),
        event("cuda_driver", "cuLaunchKernelEx", 35, 2, 2),
        event("cuda_runtime", "cudaLaunchKernel", 50, 2, 3),
        # On the device all of it runs later, and its order there is what counts.
        event("kernel", "product", 100, 5, 1),
        event("kernel", "product", 110, 7, 2),
        event("kernel", "copy", 120, 1, 3),
        {"ph": "i", "cat": "kernel", "name": "no span", "ts": 1},
    ]
    return {"traceEvents": events}


def test_kernels_belong_to_the_operation_that_launched_them() -> None:
    eager = read_trace(eager_trace())
    assert [(kernel.name, kernel.group) for kernel in eager] == [
        ("product", "dense"),
        ("product", "head"),
        ("copy", None),
    ]
    replays = [
        event("kernel", name, at + 100 * number, took)
        for number in range(2)
        for name, at, took in (("product", 0, 4 + 2 * number), ("product", 10, 8), ("copy", 20, 1))
    ]
    found = attribute(eager, read_trace({"traceEvents": replays}), 2)
    assert found.matched and found.busy_us == pytest.approx(14)
    assert found.groups["dense"] == (pytest.approx(5), 1) and found.groups["head"] == (pytest.approx(8), 1)
    assert found.groups["rest"] == (pytest.approx(1), 1) and found.groups["experts"] == (0, 0)
    assert found.top[0] == ("product", pytest.approx(13), 2)


def test_kernels_that_overtake_others_keep_their_operations() -> None:
    eager = read_trace(eager_trace())
    replays = [
        event("kernel", name, at + 100 * number, took)
        for number, order in enumerate(((0, 5, 10), (20, 0, 10)))
        for name, at, took in zip(("copy", "product", "product"), order, (1, 4, 8), strict=True)
    ]
    found = attribute(eager, read_trace({"traceEvents": replays}), 2)
    assert found.matched and not found.others
    assert found.groups["dense"] == (4, 1) and found.groups["head"] == (8, 1) and found.groups["rest"] == (1, 1)


def test_other_kernels_than_the_eager_ones_are_told() -> None:
    eager = read_trace(eager_trace())
    replays = [event("kernel", name, at, 3) for at, name in enumerate(("product", "copy", "unknown"))]
    found = attribute(eager, read_trace({"traceEvents": replays}), 1)
    assert not found.matched and found.others == [("product", 2, 1.0), ("unknown", 0, 1.0)]
    assert found.groups["rest"] == (6, 2) and found.groups["dense"][1] + found.groups["head"][1] == 1


# The commands


def test_without_a_device_both_commands_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert main(["--case", "a=1@64"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert main(["--case", "a=1@64", "--profiled", "b"]) == 2
    assert "--profiled b is none of the cases" in capsys.readouterr().err
    assert main(["--case", "a=9@64"]) == 2
    assert "is a prompt's" in capsys.readouterr().err
    done = engine("bench", "forward", "--device", "cuda", "--case", "a=1@64")
    assert done.returncode == 2 and "no CUDA device" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--case", "a=1@64"], "a=1@64 needs --device cuda"),
        (["--routing", "zipf"], "--routing needs --device cuda"),
        (["--device", "cuda", "--rows", "3"], "--rows --device cuda has none"),
        (["--device", "cuda", "--case", "3:64:2"], "3:64:2 is the CPU's"),
    ],
)
def test_options_of_the_other_device_are_refused(arguments: list[str], words: str) -> None:
    done = engine("bench", "forward", *arguments)
    assert done.returncode == 2 and words in done.stderr


def test_a_run_is_described_with_what_makes_it_comparable() -> None:
    run: dict[str, Any] = {
        "case": "a", "requests": 16, "rows": 1, "length": 1024, "median_us": 15000.0, "spread_pct": 0.4,
        "share_of_bound": 0.76, "bound_us": 11400.0, "bytes": {"total": 48.8e9, "experts": 41e9, "dense": 7.7e9,
        "records": 1e8}, "experts_touched": {"mean": 71.3}, "nodes": {"kernels": 800, "copies": 3, "fills": 0,
        "others": 0}, "distinct_tokens": 16, "memory_bytes": {"peak": 9e10}, "finite": True,
        "graph_equals_eager": True, "graph_vs_eager": 0.0,
    }  # fmt: skip
    text = describe_run(run)
    assert "15.000 ms" in text and "71.3 experts a layer" in text and "800 kernels" in text and "WRONG" not in text
    text = describe_run(run | {"finite": False, "graph_equals_eager": False, "graph_vs_eager": 0.25})
    assert text.count("WRONG") == 2 and "2.5e-01" in text
    del run["nodes"]
    assert "no profile: no driver" in describe_run(run | {"profile_error": "no driver"})
    profile = {"groups": {"experts": (9500.0, 172), "head": (0.0, 0)}, "busy_us": 14000.0, "matched": False,
               "others": [("fill", 3, 1.0)]}  # fmt: skip
    text = describe_run(run | {"profile": profile})
    assert "experts 9500 us (172)" in text and "head" not in text and "1000 us between them" in text
    assert "2000 us of them beside others" in describe_run(run | {"profile": profile | {"busy_us": 17000.0}})
    assert "follow kernels' names: eager run and replay differ (fill 3 and 1)" in text
    assert "rows of 5 drafts, none judged" in describe_run(run | {"drafts": {"asked": 5, "rounds": 0}})
    assert "5 drafts made" in describe_run(run | {"drafts": {"asked": 5, "rounds": 5}})
    assert describe_run({"case": "a", "error": "no room"}) == "a: no room"


def test_a_run_is_sound_if_it_was_measured_and_is_right() -> None:
    right = {"case": "a", "finite": True, "graph_equals_eager": True}
    assert is_sound(right)
    assert not is_sound({**right, "finite": False})
    assert not is_sound({**right, "graph_equals_eager": False})
    assert not is_sound({"case": "a", "error": "out of memory"})
