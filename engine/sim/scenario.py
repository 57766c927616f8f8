"""Scenario: all that a run is a function of, from a seed or from a TOML file."""

from __future__ import annotations

import dataclasses
import random
import re
import tomllib
import types
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from engine.config import Limits
from engine.errors import ConfigError
from engine.sim.costs import FlatCosts, RooflineCosts
from engine.sim.drafting import draw_drafts
from engine.sim.faults import KINDS, Swarm
from engine.sim.gating import ExpertShape
from engine.sim.operators import Operators
from engine.sim.talk import draw_talk
from engine.sim.variety import vary
from engine.sim.workload import Load
from engine.sim.world import WorldShape

DIRECTORY: Final = Path(__file__).parent / "scenarios"
EXTRA_KINDS: Final = ("cut-pair", "push-twice")
"""Of a seed, by a generator of their own that came later: so the draws of all others stayed what they were."""
DRAWN_KINDS: Final = tuple(kind for kind in KINDS if kind not in (*EXTRA_KINDS, "corrupt", "crash-flip"))
"""Of a seed. A new kind here makes other runs of all seeds, those of tests/sim/seeds.txt too."""
FAULTS_S: Final = 12.0
"""How long a small world is hurt."""
SETTLE_S: Final = 120.0
"""After the last fault: until every request must be answered."""

SMALL_LIMITS: Final = Limits(
    prefill_chunk_tokens=32,
    decode_rows=4,
    rank_waiting=16,
    link_stall_s=3.0,
    start_s=10.0,
    step_s=2.0,
    grant_s=5.0,
    transfer_s=3.0,
    abort_s=1.0,
    heartbeat_s=2.0,
    restarts=10_000,
    restart_pause_s=0.05,
    drain_s=30.0,
    stop_s=3.0,
)
"""Of small worlds: short times, so that seconds show what takes minutes with the defaults."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """See the module.

    Attributes:
        extra: faults beside `swarm`, drawn by a generator of their own.
        operators: of clusters with experts.
        is_drawn: each seed varies it, see `variety`; of clusters with experts.
        may_draft: a third of the seeds draft, see `drafting`.
        may_talk: half of the seeds have conversations, see `talk`.
        settle_s: after the last fault, or the last arrival, until every request must be answered.
        signals: instants at which an operator asks the head to stop; none: when everything is answered.
    """

    name: str
    seed: int
    shape: WorldShape = dataclasses.field(default_factory=WorldShape)
    load: Load = dataclasses.field(default_factory=Load)
    swarm: Swarm = dataclasses.field(default_factory=Swarm)
    extra: Swarm = dataclasses.field(default_factory=Swarm)
    settle_s: float = SETTLE_S
    signals: tuple[float, ...] = ()
    operators: Operators = dataclasses.field(default_factory=Operators)
    is_drawn: bool = False
    may_draft: bool = False
    may_talk: bool = False

    def replay_line(self) -> str:
        """The command that runs it again."""
        what = f"--seed {self.seed}" if self.name == "seed" else f"{self.name} --seed {self.seed}"
        return f"engine simulate {what}"


def draw_scenario(seed: int) -> Scenario:
    """A small cluster with some kinds of faults, all of it drawn from the seed."""
    rng = random.Random(f"scenario {seed}")
    page_tokens = rng.choice((4, 8, 16))
    prompt_most = rng.choice((20, 60, 150))
    output_most = rng.choice((8, 40))
    longest = -(-(prompt_most + output_most) // page_tokens)
    num_pages = rng.choice((longest + 1, 2 * longest, 4 * longest, 8 * longest))
    is_tiny = rng.random() < 0.25
    limits = dataclasses.replace(
        SMALL_LIMITS,
        prefill_chunk_tokens=page_tokens * rng.randint(1, 6),
        prefill_prompts=rng.randint(1, 3),
        decode_rows=rng.randint(1, 6),
        rank_waiting=rng.choice((1, 2, 16)) if is_tiny else 32,
        queue_requests=rng.choice((1, 4)) if is_tiny else 4096,
        queue_prompt_tokens=200 if is_tiny else 8_388_608,
        client_inflight=rng.choice((1, 4)) if is_tiny else 4096,
        link_out_bytes=(8 << 10) if is_tiny else (64 << 20),
    )
    num_prefill, num_decode = rng.randint(1, 3), rng.randint(1, 3)
    shape = WorldShape(
        prefill=num_prefill,
        decode=num_decode,
        page_tokens=page_tokens,
        num_pages=num_pages,
        num_slabs=rng.choice((1, 2, 8)),
        max_model_tokens=prompt_most + output_most,
        eos_share=rng.choice((0.0, 0.05)),
        limits=limits,
        prefill_group=num_prefill if rng.random() < 0.15 else 1,
        decode_group=num_decode if rng.random() < 0.3 else 1,
        link_latency_s=rng.choice((0.0, 50e-6, 5e-3)),
        fabric_latency_s=rng.choice((0.0, 20e-6, 20e-3)),
        fabric_bytes_per_s=rng.choice((1e7, 50e9)),
    )
    load = Load(
        requests=rng.randint(1, 40),
        clients=rng.randint(1, 3),
        arrive_s=rng.choice((0.0, FAULTS_S / 2, FAULTS_S)),
        prompt=(1, prompt_most),
        output=(1, output_most),
        cancel_share=rng.choice((0.0, 0.0, 0.2, 0.8)),
        sample_share=0.3,
        end_share=0.3,
        minimum_share=0.2,
    )
    kinds = tuple(kind for kind in DRAWN_KINDS if rng.random() < 0.4)
    is_calm = rng.random() < 0.1
    swarm = Swarm(
        kinds=() if is_calm else kinds,
        per_s=rng.choice((0.3, 1.0, 4.0)),
        from_s=rng.choice((0.0, 1.0)),
        until_s=FAULTS_S,
        most_s=rng.choice((0.1, 1.0, 4.0)),
    )
    signals: tuple[float, ...] = ()
    if rng.random() < 0.15:
        first = rng.random() * FAULTS_S
        signals = (first, first + rng.random()) if rng.random() < 0.5 else (first,)
    shape, load = draw_talk(draw_drafts(shape, seed), load, seed)
    return Scenario("seed", seed, shape, load, swarm, _draw_extra(seed, swarm), SETTLE_S, signals)


def _draw_extra(seed: int, swarm: Swarm) -> Swarm:
    """Half of the seeds that have faults have some of the later kinds too."""
    rng = random.Random(f"{seed}:extra")
    kinds = tuple(kind for kind in EXTRA_KINDS if rng.random() < 0.5)
    per_s = rng.choice((0.3, 1.0, 4.0))
    if not swarm.kinds or rng.random() < 1 / 3:
        return Swarm()
    return dataclasses.replace(swarm, kinds=kinds, per_s=per_s)


# ---------------------------------------------------------------- files


def scenario_names() -> list[str]:
    """Of the scenarios that come with the engine."""
    return sorted(path.stem for path in DIRECTORY.glob("*.toml"))


def load_scenario(name: str, seed: int) -> Scenario:
    """Reads a scenario by its name, or by the path of its file.

    Raises:
        ConfigError: there is no such file, or a key of it is unknown or wrong.
    """
    table = _read_table(name)
    while "like" in table:
        other = table.pop("like")
        if other not in scenario_names():
            raise ConfigError(f"like is one of {', '.join(scenario_names())}, not {other!r}")
        table = _lay_over(_read_table(other), table)
    table.pop("about", None)
    limits = _fill(dataclasses.asdict(SMALL_LIMITS), Limits, table.pop("limits", {}), "limits")
    costs = {f"{role}_costs": _read_costs(table.pop(f"{role}_costs", {}), role) for role in ("prefill", "decode")}
    cluster = table.pop("cluster", {})
    experts = _fill({}, ExpertShape, table.pop("experts"), "experts") if "experts" in table else None
    shape = dataclasses.replace(_fill({}, WorldShape, cluster, "cluster"), limits=limits, experts=experts, **costs)
    _check_groups(shape)
    operators = _fill({}, Operators, table.pop("operators", {}), "operators")
    load = _fill({}, Load, table.pop("load", {}), "load")
    swarm = _fill({}, Swarm, table.pop("swarm", {}), "swarm")
    if "corrupt" in swarm.kinds and not shape.checksums:
        raise ConfigError("[swarm] kinds: 'corrupt' needs checksums = true in [cluster]; nothing else finds it")
    if "crash-flip" in swarm.kinds and experts is None:
        raise ConfigError("[swarm] kinds: 'crash-flip' is for clusters with [experts]")
    unknown_kinds = [kind for kind in swarm.kinds if kind not in KINDS]
    if unknown_kinds:
        raise ConfigError(f"[swarm] kinds: {unknown_kinds[0]!r} is none of {', '.join(KINDS)}")
    parts = {"shape": shape, "load": load, "swarm": swarm, "operators": operators}
    scenario: Scenario = _fill({"name": name, "seed": seed, **parts}, Scenario, table, "")
    if experts is None and (scenario.is_drawn or operators.per_s):
        raise ConfigError("is_drawn and [operators] are for clusters with [experts]")
    if scenario.may_draft:
        scenario = dataclasses.replace(scenario, shape=draw_drafts(scenario.shape, seed))
    if scenario.may_talk:
        shape, load = draw_talk(scenario.shape, scenario.load, seed)
        scenario = dataclasses.replace(scenario, shape=shape, load=load)
    return vary(scenario) if scenario.is_drawn else scenario


def _read_table(name: str) -> dict[str, Any]:
    path = Path(name) if name.endswith(".toml") else DIRECTORY / f"{name}.toml"
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        if path.parent == DIRECTORY:
            known = ", ".join(scenario_names())
            raise ConfigError(f"no scenario {name!r}; there are {known}, or a .toml file") from None
        raise ConfigError(f"scenario {name}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name}: {error}") from None


def _lay_over(under: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """`under`, with the keys of `table` in place of its own; in tables key by key."""
    for key, value in table.items():
        below = under.get(key)
        under[key] = below | value if isinstance(below, dict) and isinstance(value, dict) else value
    return under


def _check_groups(shape: WorldShape) -> None:
    if shape.experts is None:
        return
    for role, ranks, group in (
        ("prefill", shape.prefill, shape.prefill_group),
        ("decode", shape.decode, shape.decode_group),
    ):
        if ranks % group:
            raise ConfigError(f"[cluster] {role} = {ranks} is no multiple of {role}_group = {group}")
    if shape.handoff != "chunks":
        raise ConfigError("[cluster] handoff is chunks where ranks have experts")


def _read_costs(table: dict[str, Any], role: str) -> FlatCosts | RooflineCosts:
    kinds: dict[str, Any] = {"flat": FlatCosts, "roofline": RooflineCosts}
    kind = table.pop("kind", "flat")
    if kind not in kinds:
        raise ConfigError(f"[{role}_costs] kind is flat or roofline, not {kind!r}")
    costs: FlatCosts | RooflineCosts = _fill({}, kinds[kind], table, f"{role}_costs")
    return costs


def _fill(base: dict[str, Any], kind: Any, table: dict[str, Any], where: str) -> Any:
    """A `kind` from `base`, overwritten by the table's keys, each of the type that the field says."""
    hints = get_type_hints(kind)
    for key, value in table.items():
        if key not in hints or key in ("shape", "load", "swarm", "extra", "name", "operators"):
            raise ConfigError(f"[{where}] has no key {key!r}; known are {', '.join(hints)}")
        base[key] = _convert(value, hints[key], f"[{where}] {key}")
    return kind(**base)


def _convert(value: Any, hint: Any, where: str) -> Any:
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} is a list, not {value!r}")
        return tuple(_convert(item, get_args(hint)[0], where) for item in value)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ConfigError(f"{where} is one of {', '.join(get_args(hint))}, not {value!r}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, types.UnionType) or not isinstance(value, hint):
        raise ConfigError(f"{where} is {getattr(hint, '__name__', hint)}, not {value!r}")
    return value


def change_ranks(scenario: Scenario, text: str) -> Scenario:
    """`8P32D`: so many prefill and decode ranks.

    Raises:
        ConfigError: not of that form.
    """
    match = re.fullmatch(r"(\d+)[Pp](\d+)[Dd]", text)
    if match is None or not 0 < int(match[1]) <= 512 or not 0 < int(match[2]) <= 512:
        raise ConfigError(f"--ranks is like 8P32D (1 to 512 of each), not {text!r}")
    return dataclasses.replace(
        scenario, shape=dataclasses.replace(scenario.shape, prefill=int(match[1]), decode=int(match[2]))
    )


def change_length(scenario: Scenario, seconds: float) -> Scenario:
    """The same for `seconds`: arrivals and faults over that time, and as many more requests as it is longer."""
    load, swarm = scenario.load, scenario.swarm
    before = max(load.arrive_s, swarm.until_s)
    factor = seconds / before if before else 1.0
    load = dataclasses.replace(load, arrive_s=seconds, requests=max(1, round(load.requests * factor)))
    swarm = dataclasses.replace(swarm, until_s=seconds, from_s=min(swarm.from_s, seconds))
    extra = dataclasses.replace(scenario.extra, until_s=seconds, from_s=min(scenario.extra.from_s, seconds))
    return dataclasses.replace(scenario, load=load, swarm=swarm, extra=extra)
