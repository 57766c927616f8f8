"""Where configuration values come from: flag > --set > ENGINE_ variable > file > default, each with its origin.

Owns the precedence, the search for the line of a key, and the one list of all problems. Does not own the keys (`keys`)
nor what the values mean once they are valid (`config`).

Every key can be set everywhere: `limits.link_stall_s` is one value in the file (`[limits]` `link_stall_s = "10s"`), on
the command line (`--set limits.link_stall_s=10s`) and in the environment (`ENGINE_LIMITS__LINK_STALL_S=10s`).
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.config import (
    DRAFT_TOKENS,
    EXPERT_KEYS,
    HAND_BACK_KEYS,
    HTTP_KEYS,
    NANO,
    NO_KEYS,
    NO_SCENARIO,
    SLO_KEYS,
    ClusterConfig,
    DraftConfig,
    ExpertsConfig,
    HandBackConfig,
    HttpConfig,
    Limits,
    ModelFacts,
    PoolConfig,
    SloConfig,
    parse_ranks,
    plan_num_pages,
    read_model_facts,
)
from engine.errors import ConfigError
from engine.keys import KEYS, NAME_TO_KEY, VARIABLE_TO_NAME, parse_value

SOCKET_PATH_BYTES = 107
"""Longest path of a unix socket on Linux, without the closing zero."""
LONGEST_SOCKET = "/rank-4095-999999.sock"
"""Longest name in the runtime directory: a rank's socket after very many lives."""
PATH_CHARACTERS = 256
"""Of a model's path: it travels in messages as a `transport.messages.Name`."""
LARGEST_GROUP = 1024
"""Ranks of a group: its members are named in one message."""
MOST_GROUP_ROWS = 4095
"""Rows of a rank in a group's exchanges between GPUs; `kernels.mailbox.MOST_ROWS`, which this process does not load."""
LEAST_PROMPT_RATE = 1000.0
"""Ids of prompts in a second of a rank of a group on GPUs, for what a step may take: measured were 8,000, in half of
V4-Flash's layers."""

RACK = "showroom"
"""The scenario of a simulated rack when nobody names one."""
RACK_KEYS = frozenset({"cluster", "device", "scenario", "admin.dir", "log.format", "log.level", *SLO_KEYS, *HTTP_KEYS})
"""What a simulated rack is told; its scenario says the rest."""

_KUBERNETES = re.compile(r"ENGINE_(SERVICE_.*|PORT(_.*)?)")
"""What Kubernetes puts into every pod beside a Service called `engine`; not meant for us."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration, and for every key where its value came from."""

    config: ClusterConfig
    origins: Mapping[str, str]


class ConfigProblems(ConfigError):
    """Everything that is wrong with a configuration, in one go."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        title = "1 problem" if count == 1 else f"{count} problems"
        super().__init__(f"{title} in the configuration:\n" + "\n".join(f"  {problem}" for problem in self.problems))


def default_runtime_directory(environ: Mapping[str, str]) -> str:
    """Where head and clients of one user meet when nobody names a place."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    return os.path.join(runtime, "engine") if os.path.isdir(runtime) else f"/tmp/engine-{os.getuid()}"


def peek_setting(name: str, flag: str | None, config_file: str | None, environ: Mapping[str, str]) -> Any:
    """One key by the usual precedence, for commands that need nothing else; None if no source says anything.

    Raises:
        ConfigProblems: a source has a problem, whichever key it is about.
    """
    sources = _Sources()
    sources.read_flags({name: flag} if flag is not None else {})
    sources.read_environment(environ)
    if config_file:
        sources.read_file(Path(config_file))
    if sources.problems:
        raise ConfigProblems(sources.problems)
    return sources.values.get(name)


def runtime_directory(flag: str | None, config_file: str | None, environ: Mapping[str, str]) -> str:
    """The runtime directory by the usual precedence."""
    return str(peek_setting("admin.dir", flag, config_file, environ) or default_runtime_directory(environ))


def resolve_config(
    config_file: str | None,
    *,
    flags: Mapping[str, object],
    sets: Iterable[str],
    environ: Mapping[str, str],
) -> Resolved:
    """Reads all sources, checks everything, derives what was left out.

    Args:
        config_file: TOML file, or None for defaults only.
        flags: dotted key to value, from the command line's own options; None values were not given.
        sets: `key=value` of each `--set`; the last one of a key counts.
        environ: the process environment.

    Raises:
        ConfigProblems: lists every problem found, with its place.
    """
    sources = _Sources()
    sources.read_flags({name: value for name, value in flags.items() if value is not None})
    sources.read_sets(sets)
    sources.read_environment(environ)
    if config_file:
        sources.read_file(Path(config_file))
    return _derive(sources, environ)


class _Sources:
    """Values by source, strongest first: a key that is already there is not replaced."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.problems: list[str] = []

    def read_flags(self, flags: Mapping[str, object]) -> None:
        for name, value in flags.items():
            option = "http" if name == "http.listen" else name.split(".")[-1].replace("_", "-")
            self._take(name, value, f"flag --{option}", Path.cwd())

    def read_sets(self, sets: Iterable[str]) -> None:
        """Of several for one key the last one counts, as it does of an option."""
        values: dict[str, str] = {}
        for text in sets:
            name, equals, value = text.partition("=")
            if equals:
                values[name.strip()] = value.strip()
            else:
                self.problems.append(f"--set {text}: write --set key=value")
        for name, value in values.items():
            self._take(name, value, f"--set {name}", Path.cwd())

    def read_environment(self, environ: Mapping[str, str]) -> None:
        for variable in sorted(environ):
            if not variable.startswith("ENGINE_") or variable == "ENGINE_CONFIG" or _KUBERNETES.fullmatch(variable):
                continue
            if variable in VARIABLE_TO_NAME:
                self._take(VARIABLE_TO_NAME[variable], environ[variable], f"variable {variable}", Path.cwd())
            else:
                self.problems.append(f"variable {variable}: unknown{_nearest(variable, VARIABLE_TO_NAME)}")

    def read_file(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="utf-8")
            tree = tomllib.loads(text)
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            self.problems.append(f"{path}: can not be read ({why})")
            return
        except tomllib.TOMLDecodeError as error:
            self.problems.append(f"{path}: {error}")
            return
        lines = key_lines(text)
        for name, value in _flatten(tree):
            self._take(name, value, f"{path}:{_line_of(name, lines)}", path.resolve().parent)

    def _take(self, name: str, value: object, origin: str, directory: Path) -> None:
        key = NAME_TO_KEY.get(name)
        if key is None:
            self.problems.append(f"{origin}: unknown key {name!r}{_nearest(name, NAME_TO_KEY)}")
            return
        try:
            parsed = parse_value(key, value)
        except ConfigError as error:
            self.problems.append(f"{origin}: {name}: {error}")
            return
        is_name = parsed in (NANO, NO_KEYS) or (name == "scenario" and not parsed.endswith(".toml"))
        if key.kind == "path" and not is_name:
            parsed = str((directory / os.path.expanduser(parsed)).resolve())
        self.values.setdefault(name, parsed)
        self.origins.setdefault(name, origin)


def _derive(sources: _Sources, environ: Mapping[str, str]) -> Resolved:
    problems = sources.problems
    values = {key.name: key.default for key in KEYS} | sources.values
    origins = {key.name: "default" for key in KEYS} | sources.origins

    def problem(name: str, text: str) -> None:
        problems.append(f"{origins[name]}: {name}: {text}")

    def derive(name: str, value: object, why: str) -> None:
        if values[name] is None:
            values[name], origins[name] = value, f"default ({why})"

    derive("admin.dir", default_runtime_directory(environ), "this user's runtime directory")
    if len(os.fsencode(values["admin.dir"])) + len(LONGEST_SOCKET) > SOCKET_PATH_BYTES:
        problem("admin.dir", f"too long: a socket's path may have {SOCKET_PATH_BYTES} bytes, {values['admin.dir']!r}")
    if values["scenario"] == NO_SCENARIO:
        values["scenario"] = None
    if values["device"] == "sim":
        derive("scenario", RACK, "device is sim")
        return _derive_rack(values, origins, problems, problem)
    pools = _derive_pools(values, problem)
    on_gpu = values["device"] == "cuda"
    if on_gpu and values["model"] == NANO:
        derive("kv_dtype", "bfloat16", "device is cuda, and nano's entries are too narrow for fp8")
    derive("kv_dtype", "fp8" if on_gpu else "float32", f"device is {values['device']}")
    if on_gpu:
        _check_gpu(values, problem)
        derive("draft.tokens", 0, "device is cuda")
    else:
        for name, value in (("kv_dtype", "fp8"), ("load_format", "dummy")):
            if values[name] == value:
                problem(name, f'{value!r} is for device = "cuda"')
    if values["scenario"] is not None:
        problem("scenario", 'is for device = "sim"; engine up --device sim runs it, engine simulate checks it')
    derive("scenario", NO_SCENARIO, "device is not sim")
    limits = Limits(**{field.name: values[f"limits.{field.name}"] for field in dataclasses.fields(Limits)})
    if limits.heartbeat_s < 2 * limits.snapshot_s:
        problem("limits.heartbeat_s", f"must be at least twice limits.snapshot_s ({limits.snapshot_s:g} s)")
    if any(pool.group > 1 for pool in pools):
        _check_groups(values, limits, problem)
        if on_gpu:
            _check_gpu_groups(limits, pools[0].group > 1, problem)

    if len(values["model"]) > PATH_CHARACTERS:
        problem("model", f"its absolute path has {len(values['model'])} characters (limit {PATH_CHARACTERS})")
    is_nano = values["model"] == NANO
    derive("page_tokens", 64 if is_nano else 256, "nano" if is_nano else "not nano")
    page_tokens = values["page_tokens"]
    vocab_size = 0
    try:
        facts = read_model_facts(values["model"], page_tokens=page_tokens, value_bytes=_VALUE_BYTES[values["kv_dtype"]])
    except ConfigError as error:
        problem("model", str(error))
    else:
        vocab_size = facts.vocab_size
        _derive_drafts(values, facts, derive, problem)
        derive("max_model_tokens", min(facts.max_length, 8192), f"the model's {facts.max_length}, at most 8192")
        if values["max_model_tokens"] > facts.max_length:
            problem("max_model_tokens", f"{values['max_model_tokens']} is more than the model's {facts.max_length}")
        derive(
            "num_pages",
            plan_num_pages(
                decode_rows=limits.decode_rows,
                max_model_tokens=values["max_model_tokens"],
                page_tokens=page_tokens,
                page_bytes=facts.page_bytes,
                ranks=max(1, sum(len(pool.ranks) for pool in pools)),
            ),
            "full sequences for limits.decode_rows, within a quarter of memory",
        )
        if values["num_pages"] * page_tokens < values["max_model_tokens"]:
            problem(
                "num_pages",
                f"{values['num_pages']} pages of {page_tokens} tokens can not hold one sequence of"
                f" max_model_tokens ({values['max_model_tokens']})",
            )
    derive("num_slabs", 2 * limits.decode_rows, "twice limits.decode_rows")
    if limits.prefill_chunk_tokens % page_tokens:
        problem(
            "limits.prefill_chunk_tokens",
            f"{limits.prefill_chunk_tokens} is not a whole number of pages of"
            f" {page_tokens} tokens; write {-(-limits.prefill_chunk_tokens // page_tokens) * page_tokens}",
        )
    if problems:
        raise ConfigProblems(problems)
    config = ClusterConfig(
        **{name: values[name] for name in _PLAIN},
        prefill=pools[0],
        decode=pools[1],
        admin_dir=values["admin.dir"],
        log_format=values["log.format"],
        log_level=values["log.level"],
        vocab_size=vocab_size,
        limits=limits,
        experts_main=_derive_experts(values, "main"),
        experts_draft=_derive_experts(values, "draft"),
        slo=_derive_slo(values),
        http=_derive_http(values),
        draft=DraftConfig(values["draft.tokens"], values["draft.max_rows"], values["draft.acceptance"]),
        prefix_cache=values["prefix_cache.enabled"],
        hand_back=HandBackConfig(**{name: values[key] for key, name in HAND_BACK_KEYS.items()}),
    )
    return Resolved(config, origins)


def _derive_rack(
    values: Mapping[str, Any], origins: dict[str, str], problems: list[str], problem: Callable[[str, str], None]
) -> Resolved:
    """A simulated rack is its scenario, whatever a file says for real ones: only what this command was told counts."""
    from engine.sim.realtime import resolve_rack  # the head and the simulator, which no other configuration needs

    scenario = values["scenario"]
    for name, origin in origins.items():
        if name not in RACK_KEYS and origin.startswith(("flag ", "--set ")):
            problem(name, f"a simulated rack has what its scenario says; leave it out, or change {scenario}")
    try:
        config = resolve_rack(scenario)
    except ConfigError as error:
        problem("scenario", str(error))
    if problems:
        raise ConfigProblems(problems)
    config = dataclasses.replace(
        config,
        cluster=values["cluster"],
        admin_dir=values["admin.dir"],
        log_format=values["log.format"],
        log_level=values["log.level"],
        slo=_derive_slo(values),
        http=_derive_http(values),
    )
    return Resolved(config, {name: origins[name] if name in RACK_KEYS else f"scenario {scenario}" for name in origins})


_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 1}


def _check_gpu(values: Mapping[str, Any], problem: Callable[[str, str], None]) -> None:
    """What a rank on a GPU can not do yet is refused by name."""
    if values["replay_rows"]:
        problem(
            "replay_rows",
            f"{values['replay_rows']} rows would leave the others out of the layers past the last KV source, but steps"
            ' on device = "cuda" run all rows through all layers; write 0',
        )
    if values["fabric"] == "tcp":
        problem("fabric", 'tcp carries host memory only; on device = "cuda" write nixl or auto')


_PLAIN = tuple(key.name for key in KEYS if "." not in key.name)


def _derive_pools(values: Mapping[str, Any], problem: Callable[[str, str], None]) -> tuple[PoolConfig, PoolConfig]:
    """Named ranks first, then counts take the lowest free ones, prefill before decode."""
    named: dict[str, tuple[int, ...]] = {}
    for counts in (False, True):
        for pool in ("prefill", "decode"):
            wanted = values[f"pools.{pool}.ranks"]
            if (isinstance(wanted, int) or wanted.isdigit()) is counts:
                taken = frozenset(rank for ranks in named.values() for rank in ranks)
                named[pool] = parse_ranks(wanted, taken)
    both = sorted(set(named["prefill"]) & set(named["decode"]))
    if both:
        problem("pools.decode.ranks", f"rank {both[0]} is in pools.prefill too; a rank has one role")
    elif sorted(named["prefill"] + named["decode"]) != list(range(len(named["prefill"] + named["decode"]))):
        problem(
            "pools.decode.ranks",
            "the ranks of both pools must be 0, 1, 2 ... without a gap, but they are"
            f" {sorted(named['prefill'] + named['decode'])}",
        )
    for pool, ranks in named.items():
        group = values[f"pools.{pool}.group"]
        if group > LARGEST_GROUP:
            problem(f"pools.{pool}.group", f"{group} ranks are more than a group may have ({LARGEST_GROUP})")
        elif len(ranks) % group:
            near = f"{max(1, len(ranks) // group) * group} or {-(-len(ranks) // group) * group}"
            near = str(group) if len(ranks) < group else near
            problem(
                f"pools.{pool}.group",
                f"a pool of {len(ranks)} does not divide into groups of {group}; give it {near} ranks",
            )
    return (
        PoolConfig(named["prefill"], values["pools.prefill.group"]),
        PoolConfig(named["decode"], values["pools.decode.group"]),
    )


def _derive_drafts(
    values: Mapping[str, Any],
    facts: ModelFacts,
    derive: Callable[[str, object, str], None],
    problem: Callable[[str, str], None],
) -> None:
    """`draft.tokens`."""
    most, on_gpu = facts.max_drafts, values["device"] == "cuda"
    if not most:
        derive("draft.tokens", 0, "a model without drafter")
    elif values["replay_rows"]:
        derive("draft.tokens", 0, "replay_rows leaves out what a drafter needs")
    else:
        derive("draft.tokens", min(DRAFT_TOKENS, most), f"measured; this model's drafter has at most {most}")
    tokens = values["draft.tokens"]
    if tokens and not most:
        problem("draft.tokens", f"this model has no drafter that could draft {tokens} tokens; write 0, or leave it out")
    elif tokens and on_gpu and not facts.predicts:
        problem(
            "draft.tokens",
            'on device = "cuda" only a layer that predicts ahead drafts, and this model has a block drafter, whose'
            f" passes no step there runs; write 0, not {tokens}",
        )
    elif tokens > most:
        problem("draft.tokens", f"{tokens} is more than this model's drafter has ({most})")


def _check_groups(values: Mapping[str, Any], limits: Limits, problem: Callable[[str, str], None]) -> None:
    """What only counts where ranks share experts."""
    if values["replay_rows"]:
        problem(
            "replay_rows",
            f"{values['replay_rows']} rows would run through fewer layers than the others, but all ranks of a group go"
            " through all layers together; write 0, or groups of 1",
        )
    if limits.exchange_s <= limits.heartbeat_s:
        problem(
            "limits.exchange_s",
            f"must be above limits.heartbeat_s ({limits.heartbeat_s:g} s), or the ranks that wait for a hung one are"
            " ended before it is",
        )
    if limits.exchange_s >= limits.step_s:
        problem(
            "limits.exchange_s",
            f"{limits.exchange_s:g} s must be below limits.step_s ({limits.step_s:g} s), or a rank that waits for a"
            " silent one counts as stuck itself",
        )


def _check_gpu_groups(limits: Limits, has_prompts: bool, problem: Callable[[str, str], None]) -> None:
    """What exchanges between GPUs can hold, and how long ranks wait for one another there."""
    if limits.decode_rows > MOST_GROUP_ROWS:
        problem(
            "limits.decode_rows",
            f'{limits.decode_rows} rows are more than a rank of a group on device = "cuda" may have'
            f" ({MOST_GROUP_ROWS})",
        )
    # A rank says its words once the step before is over, if that has prompts; the others wait for them meanwhile.
    longest_s = limits.prefill_chunk_tokens / LEAST_PROMPT_RATE if has_prompts else 0.0
    if limits.exchange_s < longest_s:
        problem(
            "limits.exchange_s",
            f"{limits.exchange_s:g} s must be more than the longest step, for which a group waits, and one of"
            f" limits.prefill_chunk_tokens ({limits.prefill_chunk_tokens}) may take {longest_s:g} s; write so much,"
            f" or chunks of {int(limits.exchange_s * LEAST_PROMPT_RATE)} ids at most",
        )


def _derive_slo(values: Mapping[str, Any]) -> SloConfig:
    return SloConfig(**{name: values[key] for key, name in SLO_KEYS.items()})


def _derive_http(values: Mapping[str, Any]) -> HttpConfig:
    return HttpConfig(**{name: values[key] for key, name in HTTP_KEYS.items()})


def _derive_experts(values: Mapping[str, Any], part: str) -> ExpertsConfig:
    """ExpertsConfig in its own units. Microseconds are whole thousandths: 200us is 200.0, not 199.99999999999997."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(ExpertsConfig):
        name, per_unit = EXPERT_KEYS.get(field.name, (field.name, 1))
        value = values[f"experts.{part}.{name}"]
        fields[field.name] = value if per_unit == 1 else round(value * per_unit, 3)
    return ExpertsConfig(**fields)


def _nearest(name: str, names: Iterable[str]) -> str:
    """The hint for a name that is unknown; a last part that fits elsewhere counts as near."""
    candidates = list(names)
    near = difflib.get_close_matches(name, candidates, 1, 0.6)
    if not near:
        last = {candidate.rsplit(".", 1)[-1]: candidate for candidate in candidates}
        near = [last[part] for part in difflib.get_close_matches(name.rsplit(".", 1)[-1], last, 1, 0.75)]
    return f"; did you mean {near[0]!r}?" if near else "; `engine config schema` lists all keys"


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and prefix + name not in NAME_TO_KEY:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


_HEADER = re.compile(r"\s*\[\[?\s*([^\]]+?)\s*\]")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z0-9_\-.\"' ]+?)\s*=")


def key_lines(text: str) -> dict[str, int]:
    """Dotted name of each table and key to its line, counted from 1. tomllib keeps no positions: they are searched."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = _plain_name(header[1])
            lines.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            name = _plain_name(assignment[1])
            lines.setdefault(f"{table}.{name}" if table else name, number)
    return lines


def _plain_name(text: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in text.split("."))


def _line_of(name: str, lines: Mapping[str, int]) -> int:
    """The line of a key, or of the nearest table around it (inline tables have no lines of their own)."""
    while name not in lines and "." in name:
        name = name.rsplit(".", 1)[0]
    return lines.get(name, 1)
