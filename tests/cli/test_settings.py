"""Configuration from its sources: precedence, origins, and problems that say where and what to write instead."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from engine.config import (
    ClusterConfig,
    ExpertsConfig,
    Limits,
    RankConfig,
    SloConfig,
    config_from_json,
    config_view,
    model_directory,
    parse_ranks,
    read_model_facts,
)
from engine.errors import ConfigError
from engine.keys import KEYS, VARIABLE_TO_NAME, config_schema, parse_duration, parse_size
from engine.settings import (
    MOST_GROUP_ROWS,
    ConfigProblems,
    Resolved,
    default_runtime_directory,
    resolve_config,
    runtime_directory,
)
from kernels.mailbox import MOST_ROWS

MODEL = str(Path(__file__).parent.parent / "oracle" / "v41-tiny")
GPU_GROUP = "device='cuda'\npools.prefill={ranks=2, group=2}"


def resolve(
    file: Path | None = None, *, flags: dict | None = None, sets: tuple[str, ...] = (), **environ: str
) -> Resolved:
    return resolve_config(
        str(file) if file else None, flags={"model": MODEL, **(flags or {})}, sets=sets, environ=environ
    )


def problems_of(file: Path | None = None, **kinds: object) -> list[str]:
    with pytest.raises(ConfigProblems) as caught:
        resolve(file, **kinds)  # type: ignore[arg-type]
    return list(caught.value.problems)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "engine.toml"
    path.write_text(text)
    return path


def test_without_any_source_there_is_one_rank_of_each_role():
    config = resolve().config
    assert config.roles == {0: "prefill", 1: "decode"}
    assert (config.device, config.fabric, config.kv_dtype, config.replay_rows) == ("cpu", "auto", "float32", 0)
    assert config.max_model_tokens == 4096 and config.vocab_size == 288


def test_every_source_beats_the_next_and_is_named(tmp_path):
    name, layers = "limits.restarts", []
    file = write(tmp_path, "[limits]\nqueue_requests = 5\nrestarts = 11\n")
    for sources, value, origin in [
        ({}, 3, "default"),
        ({"file": file}, 11, f"{file}:3"),
        ({"file": file, "ENGINE_LIMITS__RESTARTS": "12"}, 12, "variable ENGINE_LIMITS__RESTARTS"),
        ({"file": file, "ENGINE_LIMITS__RESTARTS": "12", "sets": (f"{name}=13",)}, 13, f"--set {name}"),
        ({"file": file, "sets": (f"{name}=13",), "flags": {name: 14}}, 14, "flag --restarts"),
    ]:
        resolved = resolve(**sources)
        layers.append(resolved.config.limits.restarts)
        assert (resolved.config.limits.restarts, resolved.origins[name]) == (value, origin)
    assert layers == [3, 11, 12, 13, 14]


def test_every_limit_can_be_set_in_its_own_unit(tmp_path):
    file = write(
        tmp_path, '[limits]\nlink_stall_s = "250ms"\nlink_out_bytes = "4MiB"\nquarantined_pages = 0.25\nstart_s = 7\n'
    )
    limits = resolve(file).config.limits
    assert limits == dataclasses.replace(
        Limits(), link_stall_s=0.25, link_out_bytes=4 << 20, quarantined_pages=0.25, start_s=7.0
    )
    names = {key.name for key in KEYS if key.name.startswith("limits.")}
    assert names == {f"limits.{field.name}" for field in dataclasses.fields(Limits)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("modle = 'x'", ":1: unknown key 'modle'; did you mean 'model'?"),
        ("\n[limits]\n# x\nclient = 1", ":4: unknown key 'limits.client'; did you mean 'limits.clients'?"),
        ("queue_requests = 1", ":1: unknown key 'queue_requests'; did you mean 'limits.queue_requests'?"),
        ("pools.decode.rank = 1", ":1: unknown key 'pools.decode.rank'; did you mean 'pools.decode.ranks'?"),
        ("[web]\nlisten = 'x'", ":2: unknown key 'web.listen'"),
        ("[limits]\nstep_s = 'soon'", ":2: limits.step_s: 'soon' is not a duration; write 30s"),
        ("[limits]\nlink_out_bytes = '4 apples'", ":2: limits.link_out_bytes: '4 apples' is not a size"),
        ("[limits]\nclients = 0", ":2: limits.clients: 0 is out of range; the least is 1"),
        ("[limits]\nclients = true", ":2: limits.clients: True is not a whole number"),
        ("[limits]\nquarantined_pages = 2", ":2: limits.quarantined_pages: 2 is not a share"),
        ("checksum_pushes = 1", ":1: checksum_pushes: 1 is neither true nor false"),
        ("fabric = 'tcpp'", ":1: fabric: 'tcpp' is not one of auto, nixl, tcp; did you mean 'tcp'?"),
        ("device = 'cuda'\nfabric = 'tcp'", ":2: fabric: tcp carries host memory only"),
        ("device = 'cuda'\n[draft]\ntokens = 2", ":3: draft.tokens: on device = \"cuda\" only a layer"),
        ("device = 'cuda'\n[draft]\ntokens = 2", "this model has a block drafter, whose passes no step there runs; wr"),
        ("device = 'cuda'\nreplay_rows = 8", ":2: replay_rows: 8 rows would leave the others out of the layers past"),
        ("kv_dtype = 'fp8'", ":1: kv_dtype: 'fp8' is for device = \"cuda\""),
        ("load_format = 'dummy'", ":1: load_format: 'dummy' is for device = \"cuda\""),
        ("[pools.decode]\ngroup = 2", ":2: pools.decode.group: a pool of 1 does not divide into groups of 2; give"),
        ("[pools.prefill]\nranks=5\ngroup=2", "does not divide into groups of 2; give it 4 or 6 ranks"),
        ("[pools.decode]\nranks=2000\ngroup=2000", ":3: pools.decode.group: 2000 ranks are more than a group may have"),
        ("[pools.decode]\ngroup = 0", ":2: pools.decode.group: 0 is out of range; the least is 1"),
        ("replay_rows=8\n[pools.decode]\nranks=2\ngroup=2", ":1: replay_rows: 8 rows would run through fewer layers"),
        ("limits.exchange_s=5\n[pools.decode]\nranks=2\ngroup=2", ":1: limits.exchange_s: must be above"),
        ("limits.step_s=9\n[pools.decode]\nranks=2\ngroup=2", "exchange_s: 10 s must be below limits.step_s (9 s), or"),
        ("limits.decode_rows=4096\n" + GPU_GROUP, ":1: limits.decode_rows: 4096 rows are more than a rank of a group"),
        ("limits.prefill_chunk_tokens=10240\n" + GPU_GROUP, "limits.exchange_s: 10 s must be more than the longest st"),
        ("limits.prefill_chunk_tokens=10240\n" + GPU_GROUP, "of limits.prefill_chunk_tokens (10240) may take 10.24 s"),
        ("[experts.main]\nmode='autoo'", ":2: experts.main.mode: 'autoo' is not one of off, manual, auto"),
        ("[experts.main]\nmin_gain='200us/step'", ":2: experts.main.min_gain: '200us/step' is not a duration"),
        ("[experts.draft]\nspare = 3", ":2: unknown key 'experts.draft.spare'; did you mean 'experts.draft"),
        ("[experts]\nmode = 'off'", ":2: unknown key 'experts.mode'"),
        ("[experts.main]\nhorizon_steps = 0", ":2: experts.main.horizon_steps: 0 is out of range"),
        ("[experts.main]\nlink_rate = 'fast'", ":2: experts.main.link_rate: 'fast' is not a size"),
        ("[pools]\ndecode.ranks='0-1'\nprefill.ranks='1-1'", ":2: pools.decode.ranks: rank 1 is in pools.prefill too"),
        ("[pools.decode]\nranks = '3-3'", ":2: pools.decode.ranks: the ranks of both pools must be 0, 1, 2"),
        ("[pools.decode]\nranks = 'all'", ":2: pools.decode.ranks: 'all' is not a list of ranks"),
        ("max_model_tokens = 5000", ":1: max_model_tokens: 5000 is more than the model's 4096"),
        ("num_pages = 2", ":1: num_pages: 2 pages of 256 tokens can not hold one sequence"),
        ("page_tokens = 96", "limits.prefill_chunk_tokens: 512 is not a whole number of pages of 96 tokens; write 576"),
        ("[limits]\nheartbeat_s = '0.3s'", ":2: limits.heartbeat_s: must be at least twice limits.snapshot_s"),
        ("a = [1,", "engine.toml: "),
    ],
)  # fmt: skip
def test_a_problem_names_its_place_and_what_to_write(tmp_path, text, says):
    assert any(says in problem for problem in problems_of(write(tmp_path, text))), problems_of(write(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        "limits.prefill_chunk_tokens=9984\n" + GPU_GROUP,
        "limits={prefill_chunk_tokens=10240, exchange_s=11}\n" + GPU_GROUP,
        # Prompts of a rank alone hold nobody up, and on a CPU ranks exchange in each layer.
        "limits.prefill_chunk_tokens=10240\ndevice='cuda'\npools.decode={ranks=2, group=2}",
        "limits={prefill_chunk_tokens=10240, decode_rows=4096}\npools.prefill={ranks=2, group=2}",
        "limits.decode_rows=4095\n" + GPU_GROUP,
        "limits.decode_rows=4096\ndevice='cuda'",
    ],
)
def test_limits_of_groups_on_gpus_are_theirs_alone(tmp_path: Path, text: str) -> None:
    assert resolve(write(tmp_path, text)).config.limits


def test_rows_of_a_group_are_as_many_as_flags_can_tell() -> None:
    assert MOST_GROUP_ROWS == MOST_ROWS


def test_both_architectures_run_on_gpus_in_formats_that_their_entries_can_have() -> None:
    for model, kv_dtype in (("nano", "bfloat16"), ("tests/oracle/v41-tiny", "fp8"), ("tests/oracle/v4-tiny", "fp8")):
        config = resolve(flags={"device": "cuda", "model": model}).config
        assert (config.kv_dtype, config.draft.tokens) == (kv_dtype, 0)


def test_a_simulated_rack_is_its_scenario_whatever_a_file_says_for_real_ones(tmp_path):
    file = write(tmp_path, "cluster = 'here'\nmodel = '/no/such'\n[pools.decode]\nranks = 3\n[limits]\nclients = 7\n")
    resolved = resolve(file, flags={"device": "sim", "model": None})
    config = resolved.config
    assert (config.cluster, config.model, config.device) == ("here", "showroom (simulated)", "sim")
    assert config.scenario == "showroom" and resolved.origins["scenario"] == "default (device is sim)"
    assert (len(config.prefill.ranks), config.prefill.group) == (8, 2)
    assert (len(config.decode.ranks), config.decode.group) == (64, 32)
    assert config.limits.clients == 64 and resolved.origins["limits.clients"] == "scenario showroom"
    assert config.vocab_size == read_model_facts("nano", page_tokens=64, value_bytes=4).vocab_size
    assert model_directory(config.model) == model_directory("nano")
    assert set(config_view(config)) == {key.name for key in KEYS}
    assert config_from_json(json.dumps(dataclasses.asdict(config)).encode()) == config


def test_a_scenario_of_ones_own_is_found_from_the_file_that_names_it(tmp_path):
    (tmp_path / "mine.toml").write_text("like = 'small'\n[cluster]\ndecode = 3\n")
    config = resolve(write(tmp_path, "device = 'sim'\nscenario = 'mine.toml'\n"), flags={"model": None}).config
    assert (config.scenario, config.model) == (str(tmp_path / "mine.toml"), "mine (simulated)")
    assert (len(config.prefill.ranks), len(config.decode.ranks)) == (2, 3)


@pytest.mark.parametrize(
    ("flags", "sets", "says"),
    [
        ({"scenario": "showroom"}, (), "flag --scenario: scenario: is for device = \"sim\""),
        ({"device": "sim", "scenario": "shop"}, (), "scenario: no scenario 'shop'; there are groups, "),
        ({"device": "sim", "scenario": "/no/shop.toml"}, (), "scenario: scenario /no/shop.toml: No such file"),
        ({"device": "sim", "model": "nano"}, (), "flag --model: model: a simulated rack has what its scenario says"),
        ({"device": "sim"}, ("limits.clients=5",), "--set limits.clients: limits.clients: a simulated rack has what"),
        ({"device": "sim", "scenario": "groups"}, (), "groups: signals and [operators] are for engine simulate"),
    ],
)
def test_what_a_simulated_rack_can_not_be_told(flags, sets, says):
    problems = problems_of(flags={"model": None, **flags}, sets=sets)
    assert any(says in problem for problem in problems), problems


def test_groups_and_their_experts(tmp_path):
    file = write(
        tmp_path,
        "[pools.decode]\nranks = '1-4'\ngroup = 2\n"
        "[experts.main]\nmode = 'auto'\nmin_gain = '200us'\ninterval = '10s'\nlink_rate = '2GiB'\nloads = '500ms'\n"
        "[experts.draft]\nspare_slots = 0\nmax_bytes_per_step = '8MiB'\nhorizon_steps = 500\n",
    )
    config = resolve(file).config
    assert config.decode.groups == ((1, 2), (3, 4)) and config.prefill.groups == ((0,),)
    assert config.experts_main == ExpertsConfig(
        mode="auto", min_gain_us=200.0, interval_s=10.0, link_bytes_per_s=2 << 30, loads_s=0.5
    )
    assert config.experts_draft == ExpertsConfig(spare_slots=0, max_bytes_per_step=8 << 20, horizon_steps=500)
    assert config.rank_config(3).group == 2 and config.rank_config(0).group == 1


def test_what_is_shown_of_experts_has_the_names_that_people_write():
    resolved = resolve(sets=("experts.main.min_gain=200us",))
    view = config_view(resolved.config)
    shown = {name: value for name, value in view.items() if name.startswith("experts.")}
    assert set(shown) == {key.name for key in KEYS if key.name.startswith("experts.")}
    assert shown["experts.main.min_gain"] == pytest.approx(200e-6) and shown["experts.draft.interval"] == 30.0
    assert resolved.origins["experts.main.min_gain"] == "--set experts.main.min_gain"


def test_the_defaults_of_keys_are_those_of_the_configuration():
    config = resolve().config
    assert config.experts_main == config.experts_draft == ExpertsConfig()


def test_problems_of_groups_come_at_once(tmp_path):
    file = write(tmp_path, "replay_rows = 8\n[pools.prefill]\ngroup = 3\n[experts.main]\nmode = 'on'\nloads = 'x'\n")
    problems = problems_of(file, sets=("pools.decode.group=2", "limits.exchange_s=1"))
    assert len(problems) == 6, problems


def test_all_problems_come_at_once_from_all_sources(tmp_path):
    file = write(tmp_path, "modle = 'x'\n[limits]\nstep_s = 'soon'\n")
    problems = problems_of(file, sets=("fabrik=tcp", "nonsense"), ENGINE_MODLE="y")
    assert len(problems) == 5
    with pytest.raises(ConfigError, match="5 problems"):
        resolve(file, sets=("fabrik=tcp", "nonsense"), ENGINE_MODLE="y")


def test_what_kubernetes_sets_for_a_service_called_engine_is_not_ours():
    resolve(ENGINE_SERVICE_HOST="10.0.0.1", ENGINE_PORT="tcp://10.0.0.1:80", ENGINE_PORT_80_TCP="x")


def test_a_missing_file_and_a_missing_model_are_problems_of_the_configuration(tmp_path):
    assert "No such file" in problems_of(tmp_path / "none.toml")[0]
    [problem] = problems_of(flags={"model": str(tmp_path)})
    assert problem.startswith("flag --model: model: ") and "config.json" in problem


def test_paths_of_a_file_are_relative_to_the_file(tmp_path):
    file = write(tmp_path, "[admin]\ndir = 'run'\n")
    assert resolve(file).config.admin_dir == str(tmp_path / "run")


def test_a_directory_whose_sockets_could_not_be_bound_is_refused(tmp_path):
    assert "a socket's path may have 107 bytes" in problems_of(flags={"admin.dir": "/tmp/" + "x" * 100})[0]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("250ms", 0.25), ("1h30m", 5400), ("2d", 172800), ("7", 7), (1.5, 1.5), ("10us", 1e-5)],
)  # fmt: skip
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "30 s", "3s4", "-1s", "1h 30m", "30S"])
def test_what_is_no_duration(text):
    with pytest.raises(ConfigError, match="not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [("4GiB", 4 << 30), ("1GB", 10**9), ("64 KiB", 65536), ("12", 12), ("5B", 5), ("0.5MiB", 1 << 19)],
)
def test_sizes(text, count):
    assert parse_size(text) == count


def test_rank_lists():
    assert parse_ranks("0-3,7", frozenset()) == (0, 1, 2, 3, 7)
    assert parse_ranks(2, frozenset({0, 2})) == (1, 3)
    for wrong in ("3-1", "1,1", "a", "0-9999", "1-"):
        with pytest.raises(ConfigError):
            parse_ranks(wrong, frozenset())


def test_counts_take_the_ranks_that_nobody_named(tmp_path):
    config = resolve(write(tmp_path, "[pools.prefill]\nranks = 2\n[pools.decode]\nranks = '0-1'\n")).config
    assert config.prefill.ranks == (2, 3) and config.decode.ranks == (0, 1)


def test_the_digest_is_of_what_ranks_must_agree_on():
    base = resolve().config
    assert base.digest == resolve().config.digest and len(base.digest) == 16
    for same in ({"admin.dir": "/tmp/elsewhere"}, {"log.level": "debug"}):
        assert resolve(flags=same).config.digest == base.digest
    for other in ({"page_tokens": 128}, {"limits.step_s": 9}, {"kv_dtype": "bfloat16"}, {"pools.decode.ranks": 2}):
        assert resolve(flags=other).config.digest != base.digest


def test_a_rank_is_given_its_part_of_the_configuration():
    config = resolve(flags={"threads": 3}).config
    ranks = [config.rank_config(rank) for rank in (0, 1)]
    assert all(isinstance(rank, RankConfig) for rank in ranks)
    assert [rank.role for rank in ranks] == ["prefill", "decode"]
    assert ranks[0] == dataclasses.replace(ranks[1], role="prefill")
    assert ranks[0].threads == 3 and ranks[0].config_digest == config.digest


def test_a_rank_has_its_place_in_its_group():
    config = resolve(flags={"pools.prefill.ranks": 2, "pools.decode.ranks": 4, "pools.decode.group": 2}).config
    assert [config.place_of(rank) for rank in range(6)] == [0, 0, 0, 1, 0, 1]


def test_a_child_reads_the_same_configuration_back():
    config = resolve().config
    again = config_from_json(json.dumps(dataclasses.asdict(config)).encode())
    assert isinstance(again, ClusterConfig) and again == config and again.digest == config.digest


def test_the_arena_always_holds_one_full_sequence():
    config = resolve(sets=("limits.decode_rows=1",)).config
    assert config.num_pages * config.page_tokens >= config.max_model_tokens


def test_the_schema_knows_every_key_and_nothing_else():
    def walk(node: dict, prefix: str = "") -> set[str]:
        names = set()
        for name, child in node["properties"].items():
            names |= walk(child, f"{prefix}{name}.") if "properties" in child else {prefix + name}
        return names

    schema = config_schema()
    assert walk(schema) == {key.name for key in KEYS}
    assert schema["additionalProperties"] is False and schema["properties"]["limits"]["additionalProperties"] is False


def test_the_runtime_directory_follows_the_usual_precedence(tmp_path):
    file = write(tmp_path, "[admin]\ndir = '/tmp/from-file'\n")
    assert runtime_directory(None, None, {"XDG_RUNTIME_DIR": str(tmp_path)}) == str(tmp_path / "engine")
    assert runtime_directory(None, None, {}) == default_runtime_directory({})
    assert runtime_directory(None, str(file), {}) == "/tmp/from-file"
    assert runtime_directory(None, str(file), {"ENGINE_DIR": "/tmp/from-variable"}) == "/tmp/from-variable"
    assert runtime_directory("/tmp/from-flag", str(file), {"ENGINE_DIR": "/tmp/x"}) == "/tmp/from-flag"
    assert VARIABLE_TO_NAME["ENGINE_DIR"] == VARIABLE_TO_NAME["ENGINE_ADMIN__DIR"] == "admin.dir"


def test_of_several_sets_the_last_one_counts_and_only_that(tmp_path: Path) -> None:
    sets = ["num_pages=900", "limits.drain_s=5s", "num_pages=none", " num_pages = 800", "limits.drain_s=7s"]
    resolved = resolve_config(None, flags={}, sets=sets, environ={})
    assert (resolved.config.num_pages, resolved.config.limits.drain_s) == (800, 7.0)
    assert resolved.origins["num_pages"] == "--set num_pages"
    with pytest.raises(ConfigProblems) as caught:
        resolve_config(None, flags={}, sets=[*sets, "num_pages", "num_pages=many"], environ={})
    assert len(caught.value.problems) == 2, caught.value.problems
    flag = resolve_config(None, flags={"device": "cpu"}, sets=["device=sim", "device=sim"], environ={})
    assert flag.config.device == "cpu"


@pytest.mark.parametrize("sets", [["checksum_pushes=true"], ["checksum_pushes=false"], []])
def test_a_flag_is_true_or_false_in_any_place(sets: list[str], tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text("checksum_pushes = true\n")
    wanted = sets != ["checksum_pushes=false"]
    assert resolve_config(path, flags={}, sets=sets, environ={}).config.checksum_pushes is wanted
    assert not resolve_config(None, flags={}, sets=[], environ={}).config.checksum_pushes
    environ = {"ENGINE_CHECKSUM_PUSHES": "true"}
    assert resolve_config(None, flags={}, sets=[], environ=environ).config.rank_config(0).checksum_pushes


def test_latency_limits_are_durations_that_only_the_head_knows(tmp_path: Path) -> None:
    config = resolve(write(tmp_path, '[slo]\nitl_p99 = "50ms"\n'), sets=("slo.ttft_p90=1.5s",)).config
    assert config.slo == SloConfig(ttft_p90_s=1.5, itl_p99_s=0.05)
    assert resolve().config.slo == SloConfig() == SloConfig(0.0, 0.0)
    assert config.digest == resolve().config.digest, "it is no matter of the ranks"
    view = config_view(config)
    assert (view["slo.ttft_p90"], view["slo.itl_p99"]) == (1.5, 0.05) and "slo" not in view
    assert config_from_json(json.dumps(dataclasses.asdict(config)).encode()) == config
    [problem] = problems_of(sets=("slo.itl=5ms",))
    assert "did you mean 'slo.itl_p99'" in problem
