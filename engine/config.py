"""ClusterConfig, RankConfig and Limits: the frozen configuration and what follows from it.

Where its values come from (file, environment, flags) is `settings`' business; here they are final, checked against each
other and the same on every rank: the digest in the handshakes says so.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

from engine.errors import ConfigError

NANO = "nano"
"""Name of the bundled model wherever a model directory is asked for."""
NO_SCENARIO = "none"
NO_HTTP = NO_KEYS = NO_OTLP = "none"
"""Addresses, files of keys and collectors that are none."""
"""The scenario of a cluster that is not simulated."""
DRAFT_TOKENS = 2
DRAFT_ROWS = 4
Acceptance = Literal["equal", "rejection"]
"""Defaults of drafting, by `docs/performance.md`, Drafting."""
SIMULATED = " (simulated)"
"""How the name of a model ends that is none, after that of a rack's scenario. Its tokenizer is the bundled one's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Every bound in one place. A component is given the numbers it needs, not this."""

    queue_requests: int = 4096
    """Requests waiting in the head."""
    queue_prompt_tokens: int = 8_388_608
    """Prompt ids waiting in the head."""
    queue_wait_s: float = 0.0
    """Longest wait in the head, as predicted from its pace of late, that a new request is accepted for. 0: any."""
    client_inflight: int = 4096
    """Unfinished requests of one client."""
    clients: int = 64
    """Connections to the head's request socket."""
    rank_waiting: int = 512
    """Requests that the head gives to one rank at a time, running or waiting there; the rest wait in the head."""
    decode_rows: int = 32
    """Sequences in one decode step of a rank; in a group on GPUs 4,095 at most."""
    prefill_chunk_tokens: int = 512
    """Ids in one prefill step of a rank; a whole number of pages."""
    prefill_prompts: int = 16
    """Prompts with a chunk in one prefill step; `prefill_chunk_tokens` bounds their sum. They go through the model
    together, so short ones cost little more than one of them."""
    link_out_bytes: int = 64 << 20
    """Bytes queued for one connection; one that needs more is dropped."""
    link_stall_s: float = 10.0
    """A peer that does not read for so long is gone."""
    start_s: float = 300.0
    """From process start to RankReady."""
    step_s: float = 60.0
    """One device step. Longer: the device counts as stuck."""
    grant_s: float = 60.0
    """Decode rank: a request without a link to its prefill rank, or a grant without any news of that rank."""
    transfer_s: float = 30.0
    """One WRITE. Longer: its request fails, and the pair stream is made anew."""
    abort_s: float = 5.0
    """Abort sent to RequestAborted; then the client is told without it."""
    quarantined_pages: float = 0.5
    """Share of a decode rank's pages, or of its slabs, in quarantine at which a writer that owes an end has to go."""
    snapshot_s: float = 0.25
    """Between two snapshots of a rank."""
    heartbeat_s: float = 5.0
    """A rank that sends nothing for so long, though its socket is open, is hung."""
    restarts: int = 3
    """Restarts of one rank within `restart_window_s`; one more ends the cluster."""
    restart_window_s: float = 60.0
    """What `restarts` counts over."""
    restart_pause_s: float = 0.1
    """First pause before a restart; doubles up to 5 s."""
    drain_s: float = 60.0
    """For running requests after the first signal to a head. `engine down` has an option of its own."""
    stop_s: float = 5.0
    """Drain sent to a rank until its process is gone; then it is killed."""
    progress_s: float = 12.0
    """A rank that has work and finishes no step for so long makes the cluster not ready."""
    exchange_s: float = 10.0
    """One wait for another rank in an exchange. Longer: that rank is ended. Above `heartbeat_s`, so that a hung process
    is found as such, below `step_s`, and on GPUs above the longest step, that of `prefill_chunk_tokens`: 1 s for 1,000
    ids at least."""
    group_s: float = 120.0
    """A rank whose group is broken waits so long for the next membership."""
    idle_steps: int = 64
    """Steps without rows on all ranks of a group after which it parks."""
    copy_s: float = 30.0
    """One copy of an expert to another rank. Longer: the re-placement is given up."""
    balance_s: float = 60.0
    """A re-placement that gets nowhere for so long makes the cluster degraded; so does a planner."""
    plan_age_s: float = 60.0
    """A plan older than this is not applied."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """How the experts of one part of the model are placed on the ranks of a group.

    Attributes:
        spare_slots: slots of each rank beyond its share, for replicas and moves.
        mode: `off` counts only, `manual` moves when an operator says so, `auto` by itself too.
        interval_s: between two plans of `auto`.
        min_gain_us: `auto` moves nothing that saves less in a step, microseconds.
        horizon_steps: for how many steps loads are trusted to last: the gain is reckoned over them.
        max_bytes_per_step: each rank sends so much in a step while experts move.
        loads_s: between two reports of a rank's loads.
        link_bytes_per_s: rate of a copy, for the bill, until copies were measured.
    """

    spare_slots: int = 16
    mode: Literal["off", "manual", "auto"] = "manual"
    interval_s: float = 30.0
    min_gain_us: float = 0.0
    horizon_steps: int = 10_000
    max_bytes_per_step: int = 64 << 20
    loads_s: float = 1.0
    link_bytes_per_s: int = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class DraftConfig:
    """How much decode ranks draft. The text is the same whatever it says, unless it is drawn and `rejection` is on.

    Attributes:
        tokens: drafts behind each row at most; fewer where the model's drafter has no more. 0: nobody drafts.
        max_rows: a rank whose step has more rows does not draft in it.
        acceptance: a draft holds while it is what the model itself draws there (`equal`), or by rejection sampling.
    """

    tokens: int = DRAFT_TOKENS
    max_rows: int = DRAFT_ROWS
    acceptance: Acceptance = "equal"


@dataclasses.dataclass(frozen=True, slots=True)
class HandBackConfig:
    """Finished turns go back from their decode rank into the prefix cache of the prefill rank.

    Attributes:
        tokens: a turn with fewer generated tokens stays where it is.
        share: of a rank's pages, or of its slabs, that turns on their way may hold.
        wait_s: an offer without an answer is withdrawn after it.
    """

    enabled: bool = True
    tokens: int = 64
    share: float = 0.1
    wait_s: float = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class SloConfig:
    """Latencies that an operator wants, in seconds; 0 wants nothing. Nothing is refused or slowed for them: one that is
    missed over a minute makes the cluster degraded."""

    ttft_p90_s: float = 0.0
    """Accepted until the first token, of 90 % of requests."""
    itl_p99_s: float = 0.0
    """Between tokens of a request, of 99 % of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class HttpConfig:
    """The HTTP surface: where it listens, and its bounds. Those of connections and requests hold for each front."""

    listen: str = NO_HTTP
    """`host:port`, or NO_HTTP."""
    fronts: int = 1
    """Processes that share the port."""
    keys_file: str = NO_KEYS
    """Clients' keys, one a line; NO_KEYS: nobody is asked for one."""
    metrics_need_key: bool = True
    """Whether a scrape is asked for one, too."""
    queue: int = 4096
    """Requests without a first token; one more is refused with 429."""
    connections: int = 4096
    body_bytes: int = 8 << 20
    header_bytes: int = 32 << 10
    choices: int = 128
    """Answers that one request may ask for: its prompts, times `n`."""
    default_max_tokens: int = 4096
    """Of a chat that says none. Its memory is reserved for so many."""
    stream_tokens: int = 4096
    """So many tokens a reader may be behind; then he is dropped."""
    stall_s: float = 60.0
    """A client that takes nothing for so long is dropped."""
    keepalive_s: float = 15.0
    """A stream that has nothing to say says so as often."""
    drain_s: float = 60.0
    """For running requests once a front is told to end."""
    otlp: str = NO_OTLP
    """URL of the collector that fronts send spans to, or NO_OTLP."""

    @property
    def is_on(self) -> bool:
        return self.listen != NO_HTTP

    @property
    def asks_keys(self) -> bool:
        return self.keys_file != NO_KEYS


@dataclasses.dataclass(frozen=True, slots=True)
class RankConfig:
    """What one rank process needs, derived from ClusterConfig; equal inputs give equal digests on every rank.

    `num_pages` 0 asks for as many pages as `decode_rows` sequences of `max_model_tokens` need, within a quarter of the
    machine's memory; `num_slabs` 0 for two slabs per row.
    """

    role: Literal["prefill", "decode"]
    model: str
    device: str
    fabric: Literal["auto", "nixl", "tcp"]
    page_tokens: int
    max_model_tokens: int
    num_pages: int
    num_slabs: int
    kv_dtype: Literal["float32", "bfloat16", "fp8"]
    threads: int
    replay_rows: int
    """Bounded replay (model.md 4.7): prompt rows that run through the layers past the last KV source; 0 is exact."""
    config_digest: str
    limits: Limits
    checksum_pushes: bool = False
    group: int = 1
    """Ranks of this rank's group, itself included."""
    experts_main: ExpertsConfig = dataclasses.field(default_factory=ExpertsConfig)
    experts_draft: ExpertsConfig = dataclasses.field(default_factory=ExpertsConfig)
    draft: DraftConfig = dataclasses.field(default_factory=DraftConfig)
    prefix_cache: bool = True
    hand_back: HandBackConfig = dataclasses.field(default_factory=HandBackConfig)
    load_format: Literal["auto", "dummy"] = "auto"


@dataclasses.dataclass(frozen=True, slots=True)
class PoolConfig:
    """Ranks of one role. `group` ranks share one expert placement and step together."""

    ranks: tuple[int, ...]
    group: int = 1

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group, in order of rank. A group's number is its index here."""
        return tuple(self.ranks[at : at + self.group] for at in range(0, len(self.ranks), self.group))


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The whole cluster, resolved: every path absolute, nothing left to a default.

    Attributes:
        cluster: name for people.
        model: absolute directory of a checkpoint, or `nano`; of a simulated rack, a name that ends with SIMULATED.
        scenario: of a simulated rack, the name or the absolute path of its scenario; else NO_SCENARIO.
        num_pages, num_slabs: of each rank's arena.
        threads: intra-op threads of each rank.
        draft: how much decode ranks draft.
        prefix_cache: prefill ranks keep what prompts have computed; not where `replay_rows` is set.
        hand_back: and what was generated behind them.
        load_format: `dummy` for random weights of the model's shapes.
        slo: latencies to watch.
        http: the HTTP surface.
        admin_dir: runtime directory with the head's sockets.
        log_format, log_level: of head and ranks.
        vocab_size: of the model, for validation in the head.
    """

    cluster: str
    model: str
    prefill: PoolConfig
    decode: PoolConfig
    device: Literal["cpu", "cuda", "sim"]
    fabric: Literal["auto", "nixl", "tcp"]
    page_tokens: int
    max_model_tokens: int
    num_pages: int
    num_slabs: int
    kv_dtype: Literal["float32", "bfloat16", "fp8"]
    threads: int
    replay_rows: int
    admin_dir: str
    log_format: Literal["text", "json"]
    log_level: Literal["debug", "info", "warning", "error"]
    vocab_size: int
    limits: Limits = dataclasses.field(default_factory=Limits)
    checksum_pushes: bool = False
    experts_main: ExpertsConfig = dataclasses.field(default_factory=ExpertsConfig)
    experts_draft: ExpertsConfig = dataclasses.field(default_factory=ExpertsConfig)
    scenario: str = NO_SCENARIO
    slo: SloConfig = dataclasses.field(default_factory=SloConfig)
    http: HttpConfig = dataclasses.field(default_factory=HttpConfig)
    draft: DraftConfig = dataclasses.field(default_factory=DraftConfig)
    prefix_cache: bool = True
    hand_back: HandBackConfig = dataclasses.field(default_factory=HandBackConfig)
    load_format: Literal["auto", "dummy"] = "auto"

    @property
    def digest(self) -> str:
        """Sixteen hex digits over all that ranks and head must agree on; what is the head's alone is left out."""
        values = dataclasses.asdict(self)
        for local in ("admin_dir", "log_format", "log_level", "slo", "http"):
            del values[local]
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def roles(self) -> dict[int, Literal["prefill", "decode"]]:
        """Rank to role, ranks ascending."""
        prefill = dict.fromkeys(self.prefill.ranks, "prefill")
        decode = dict.fromkeys(self.decode.ranks, "decode")
        return dict(sorted({**prefill, **decode}.items()))  # type: ignore[arg-type]

    def pool_of(self, rank: int) -> PoolConfig:
        return self.prefill if rank in self.prefill.ranks else self.decode

    @property
    def keeps_prompts(self) -> bool:
        """Whether prefill ranks have a prefix cache. What `replay_rows` leaves out is missing in what it would keep."""
        return self.prefix_cache and not self.replay_rows

    def place_of(self, rank: int) -> int:
        """The place of a rank among the members of its group."""
        pool = self.pool_of(rank)
        return pool.ranks.index(rank) % pool.group

    def rank_config(self, rank: int) -> RankConfig:
        """What the process of `rank` is given."""
        return RankConfig(
            role=self.roles[rank],
            model=self.model,
            device=self.device,
            fabric=self.fabric,
            page_tokens=self.page_tokens,
            max_model_tokens=self.max_model_tokens,
            num_pages=self.num_pages,
            num_slabs=self.num_slabs,
            kv_dtype=self.kv_dtype,
            threads=self.threads,
            replay_rows=self.replay_rows,
            config_digest=self.digest,
            limits=self.limits,
            checksum_pushes=self.checksum_pushes,
            group=self.pool_of(rank).group,
            experts_main=self.experts_main,
            experts_draft=self.experts_draft,
            draft=self.draft,
            prefix_cache=self.keeps_prompts,
            hand_back=dataclasses.replace(self.hand_back, enabled=self.hand_back.enabled and self.keeps_prompts),
            load_format=self.load_format,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the configuration must know of a model. `page_bytes` is an estimate: the rank's layout pads records;
    `max_drafts` is 0 for a model without drafter; `predicts` says that this is a layer that predicts ahead, the only
    kind of drafter that runs on GPUs."""

    vocab_size: int
    max_length: int
    page_bytes: int
    max_drafts: int = 0
    predicts: bool = False


def model_directory(model: str) -> Path:
    """Where the model's files are; `nano` is the bundled one, and lends its tokenizer to simulated ones."""
    is_bundled = model == NANO or model.endswith(SIMULATED)
    return Path(__file__).resolve().parent / "nano" if is_bundled else Path(model)


def read_model_facts(model: str, *, page_tokens: int, value_bytes: int) -> ModelFacts:
    """Reads the model's config.json. No torch.

    Raises:
        ConfigError: there is no such model, or it is not one that the engine can run.
    """
    # What matters only to those who resolve a configuration.
    from engine.model.shapes import load_shape
    from transport.messages import MOST_DRAFTS

    shape = load_shape(model_directory(model))
    page_bytes = shape.long_term_bytes(
        page_tokens, entry_bytes=shape.head_dim * value_bytes, key_bytes=shape.index_dim * value_bytes
    )
    max_drafts = MOST_DRAFTS if shape.num_predict_layers else 0
    predicts = shape.num_predict_layers > 0 and shape.drafter is None
    if shape.drafter is not None:
        max_drafts = min(shape.drafter.block_size, MOST_DRAFTS)
    return ModelFacts(shape.vocab_size, shape.max_length, max(page_bytes, 1), max_drafts, predicts)


def plan_num_pages(*, decode_rows: int, max_model_tokens: int, page_tokens: int, page_bytes: int, ranks: int) -> int:
    """Pages of one arena: enough for `decode_rows` full-length sequences, within a quarter of the machine's memory.

    The quarter is shared by the ranks of this host. One sequence of full length always fits, else the configuration
    could accept requests that no rank can ever hold.
    """
    per_sequence = -(-max_model_tokens // page_tokens)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    affordable = memory_bytes // 4 // ranks // page_bytes
    return max(per_sequence + 1, min(decode_rows * per_sequence, affordable))


def parse_ranks(value: int | str, taken: frozenset[int]) -> tuple[int, ...]:
    """`2` is the two lowest ranks not taken; `"0-7,12"` names them (a single one as `"3-3"`).

    Raises:
        ConfigError: not a count and not a list of ranges.
    """
    if isinstance(value, int) or value.isdigit():
        count = int(value)
        if not 1 <= count <= 4096:
            raise ConfigError(f"a pool has 1 to 4096 ranks, not {count}")
        free = (rank for rank in range(len(taken) + count) if rank not in taken)
        return tuple(next(free) for _ in range(count))
    ranks: list[int] = []
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"{value!r} is not a list of ranks; write 2 (a count), '0-1' or '0-7,12'")
        low, high = int(first), int(last or first)
        if high < low or high > 4095:
            raise ConfigError(f"range {part.strip()!r} does not ascend within 0-4095")
        ranks.extend(range(low, high + 1))
    if len(set(ranks)) != len(ranks):
        raise ConfigError(f"{value!r} names a rank twice")
    return tuple(sorted(ranks))


def config_from_json(text: bytes) -> ClusterConfig:
    """Reads a resolved configuration that a parent handed to its child as JSON."""
    import msgspec

    return msgspec.json.decode(text, type=ClusterConfig)


def config_view(config: ClusterConfig) -> dict[str, Any]:
    """The configuration as the keys that people write, dotted, with their resolved values."""
    view: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in ("prefill", "decode"):
            view[f"pools.{field.name}.ranks"] = list(value.ranks)
            view[f"pools.{field.name}.group"] = value.group
        elif field.name in ("experts_main", "experts_draft"):
            part = field.name.replace("_", ".")
            for name, held in dataclasses.asdict(value).items():
                key, per_unit = EXPERT_KEYS.get(name, (name, 1))
                view[f"{part}.{key}"] = held if per_unit == 1 else held / per_unit
        elif field.name == "slo":
            view.update({key: getattr(value, name) for key, name in SLO_KEYS.items()})
        elif field.name == "draft":
            view.update({f"draft.{name}": v for name, v in dataclasses.asdict(value).items()})
        elif field.name == "hand_back":
            view.update({key: getattr(value, name) for key, name in HAND_BACK_KEYS.items()})
        elif field.name == "http":
            view.update({key: getattr(value, name) for key, name in HTTP_KEYS.items()})
        elif field.name == "limits":
            view.update({f"limits.{name}": v for name, v in dataclasses.asdict(value).items()})
        elif field.name != "vocab_size":
            view[SECTIONS.get(field.name, field.name)] = value
    return view


SECTIONS = {
    "admin_dir": "admin.dir", "log_format": "log.format", "log_level": "log.level",
    "prefix_cache": "prefix_cache.enabled",
}  # fmt: skip
"""Fields that people write inside a table."""

HAND_BACK_KEYS = {
    "prefix_cache.hand_back": "enabled",
    "prefix_cache.hand_back_tokens": "tokens",
    "prefix_cache.hand_back_share": "share",
    "prefix_cache.hand_back_wait": "wait_s",
}
"""Keys that people write to fields of HandBackConfig."""

SLO_KEYS = {"slo.ttft_p90": "ttft_p90_s", "slo.itl_p99": "itl_p99_s"}
"""Keys that people write to fields of SloConfig."""

HTTP_KEYS = {f"http.{field.name.removesuffix('_s')}": field.name for field in dataclasses.fields(HttpConfig)}
"""The same of HttpConfig; a duration has its unit in its value."""

EXPERT_KEYS = {
    "interval_s": ("interval", 1),
    "min_gain_us": ("min_gain", 1_000_000),
    "loads_s": ("loads", 1),
    "link_bytes_per_s": ("link_rate", 1),
}
"""Fields of ExpertsConfig to the keys that people write, and how many of the field's units one of the key's is: a key
has its unit in its value, a field in its name."""
