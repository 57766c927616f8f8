"""Every key of the configuration: its name, how its text is read, its default and its JSON schema.

Durations (`30s`), sizes (`4GiB`) and ranges (`0-7,12`) are read here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable
from typing import Any

from engine.config import (
    DRAFT_ROWS,
    EXPERT_KEYS,
    HAND_BACK_KEYS,
    HTTP_KEYS,
    NANO,
    NO_HTTP,
    ExpertsConfig,
    HandBackConfig,
    HttpConfig,
    Limits,
    parse_ranks,
)
from engine.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[KMGT]i?B)?")
_SIZE_UNITS = (
    {"B": 1}
    | {f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}
    | {f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}
)
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h|d)")
_DURATION_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One key of the configuration.

    Attributes:
        name: dotted path as people write it.
        kind: how its text is read: `text`, `path`, `address`, `count`, `share`, `size`, `duration`,
            `ranks`, `flag` or `choice`.
        default: value when nobody says anything; None for one that is derived.
        least: smallest count, size or duration.
        choices: of a `choice`.
        doc: one line for people and for the schema.
    """

    name: str
    kind: str
    default: Any
    doc: str
    least: float = 0
    choices: tuple[str, ...] = ()


def _limit_key(field: dataclasses.Field[Any]) -> Key:
    kind = "count"
    for ending, candidate in (("_s", "duration"), ("_bytes", "size")):
        if field.name.endswith(ending):
            kind = candidate
    if field.name == "quarantined_pages":
        kind = "share"
    zero_allowed = field.name in ("restarts", "restart_pause_s", "drain_s", "queue_wait_s")
    return Key(
        f"limits.{field.name}",
        kind,
        field.default,
        "A bound; docs/operations.md says of what.",
        least=0 if zero_allowed else 1 if kind in ("count", "size") else 0.001,
    )


_EXPERT_DOCS: dict[str, tuple[str, float, str]] = {
    "spare_slots": ("count", 0, "Slots of each rank beyond its share, for replicas and for moves."),
    "mode": ("choice", 0, "off counts only, manual moves when an operator says so, auto by itself too."),
    "interval": ("duration", 0.001, "Between two plans of auto."),
    "min_gain": ("duration", 0, "auto moves nothing that saves less than this in a step."),
    "horizon_steps": ("count", 1, "For how many steps loads are trusted to last: the gain is reckoned over them."),
    "max_bytes_per_step": ("size", 1, "Each rank sends so much in a step while experts move."),
    "loads": ("duration", 0.001, "Between two reports of a rank's loads."),
    "link_rate": ("size", 1, "Bytes per second of a copy, for the bill, until copies were measured."),
}
"""Key to kind, least and line, of the experts of either part."""


def _expert_keys(part: str) -> list[Key]:
    """The keys of `[experts.main]` or `[experts.draft]`, with ExpertsConfig's defaults in the units of the key."""
    keys = []
    for field in dataclasses.fields(ExpertsConfig):
        name, per_unit = EXPERT_KEYS.get(field.name, (field.name, 1))
        kind, least, doc = _EXPERT_DOCS[name]
        default = field.default if per_unit == 1 else field.default / per_unit  # type: ignore[operator]
        choices = ("off", "manual", "auto") if kind == "choice" else ()
        keys.append(Key(f"experts.{part}.{name}", kind, default, doc, least=least, choices=choices))
    return keys


_HAND_BACK_DOCS: dict[str, tuple[str, float, str]] = {
    "prefix_cache.hand_back": (
        "flag", 0,
        "Whether the KV of generated tokens goes back to the prefill rank once a request has finished, so that the next"
        " turn of its conversation computes only the new text. Off without prefix_cache.enabled.",
    ),
    "prefix_cache.hand_back_tokens": ("count", 2, "A completion with fewer tokens is not handed back."),
    "prefix_cache.hand_back_share": ("share", 0, "Of a rank's pages, or slabs, that turns on their way back may hold."),
    "prefix_cache.hand_back_wait": ("duration", 0.001, "An offer without an answer is withdrawn after it."),
}  # fmt: skip
"""Key to kind, least and line, of the hand-back."""


def _hand_back_keys() -> list[Key]:
    defaults, keys = HandBackConfig(), HAND_BACK_KEYS.items()
    docs = _HAND_BACK_DOCS
    return [Key(key, docs[key][0], getattr(defaults, name), docs[key][2], least=docs[key][1]) for key, name in keys]


_HTTP_DOCS: dict[str, tuple[str, float, str]] = {
    "listen": ("address", 0, "Where HTTP is served, as 127.0.0.1:8000; none: nowhere."),
    "fronts": ("count", 1, "Processes that share the port; the bounds below are each one's."),
    "keys_file": ("path", 0, "File with clients' keys, one a line; none: nobody is asked for one."),
    "metrics_need_key": ("flag", 0, "With a keys_file: false lets anybody who reaches the port read /metrics."),
    "queue": ("count", 1, "Requests without a first token; one more is refused with 429."),
    "connections": ("count", 1, "Open connections; one more is refused with 503."),
    "body_bytes": ("size", 1024, "Of a request's body."),
    "header_bytes": ("size", 1024, "Of a request's line and headers."),
    "choices": ("count", 1, "Answers that one request may ask for: its prompts, times n."),
    "default_max_tokens": ("count", 1, "Of a chat that names no limit; memory for so many is reserved."),
    "stream_tokens": ("count", 1, "Tokens that a reader of a stream may be behind; then the stream is dropped."),
    "stall": ("duration", 0.1, "A client that takes nothing for so long is dropped."),
    "keepalive": ("duration", 0.1, "A stream without news sends a comment as often."),
    "drain": ("duration", 0, "For running requests of a front that is told to end while the engine goes on."),
    "otlp": ("text", 0, "URL of a collector for traces, as http://127.0.0.1:4318/v1/traces; none: no traces."),
}
"""Key to kind, least and line, of HTTP."""


def _http_keys() -> list[Key]:
    keys = []
    for field in dataclasses.fields(HttpConfig):
        name = next(key for key, own in HTTP_KEYS.items() if own == field.name)
        kind, least, doc = _HTTP_DOCS[name.removeprefix("http.")]
        keys.append(Key(name, kind, field.default, doc, least=least))
    return keys


KEYS: tuple[Key, ...] = (
    Key("cluster", "text", "engine", "Name of the cluster, for people."),
    Key("model", "path", NANO, "Directory of a checkpoint (config.json, *.safetensors), or nano, the bundled one."),
    Key("pools.prefill.ranks", "ranks", 1, "Ranks that compute prompts: a count, or ranges such as 0-7,12."),
    Key("pools.prefill.group", "count", 1, "Ranks that share the experts and step together; 1: each has all.", least=1),
    Key("pools.decode.ranks", "ranks", 1, "Ranks that generate tokens: a count, or ranges such as 0-7,12."),
    Key("pools.decode.group", "count", 1, "Ranks that share the experts and step together; 1: each has all.", least=1),
    *_expert_keys("main"),
    *_expert_keys("draft"),
    Key(
        "device",
        "choice",
        "cpu",
        "Kind of device of a rank: cpu, cuda (ranks take the host's GPUs in turn), or sim: a whole rack"
        " pretended in one process.",
        choices=("cpu", "cuda", "sim"),
    ),
    Key(
        "scenario",
        "path",
        None,
        "Of device sim: a scenario's name, or the path of its .toml file; it says all but names, directory, log and"
        " slo. Default: showroom; none for other devices.",
    ),
    Key(
        "fabric",
        "choice",
        "auto",
        "Carrier of pushed pages; auto takes NIXL where it works, else, with ranks on CPUs, TCP.",
        choices=("auto", "nixl", "tcp"),
    ),
    Key(
        "checksum_pushes",
        "flag",
        False,
        "Whether each push tells a checksum, which the decode rank compares before it uses the pages.",
    ),
    Key("page_tokens", "count", None, "Tokens in a page of KV. Default: 64 for nano, 256 for other models.", least=1),
    Key(
        "max_model_tokens",
        "count",
        None,
        "Prompt and completion together. Default: what the model was made for, at most 8192.",
        least=2,
    ),
    Key(
        "num_pages",
        "count",
        None,
        "Pages of a rank's arena. Default: for limits.decode_rows full sequences, within"
        " a quarter of the machine's memory.",
        least=1,
    ),
    Key("num_slabs", "count", None, "State slabs of a rank. Default: twice limits.decode_rows.", least=1),
    Key(
        "kv_dtype",
        "choice",
        None,
        "Type of the values in a page; fp8 on cuda only. Default: float32, on cuda fp8.",
        choices=("float32", "bfloat16", "fp8"),
    ),
    Key(
        "load_format",
        "choice",
        "auto",
        "Where weights come from: auto, the model's files; dummy, random numbers of its shapes (cuda only).",
        choices=("auto", "dummy"),
    ),
    Key("threads", "count", 1, "Intra-op threads of a rank process.", least=1),
    Key(
        "draft.tokens",
        "count",
        None,
        "Tokens that a small model drafts behind each token of a text, for the model to check in one step: 0 to 7, of"
        " which a rank of a group on GPUs makes 3 at most. The text stays the same. Default: what was measured to be"
        " best; 0 for a model without drafter, and on GPUs, where only a layer that predicts ahead drafts.",
    ),
    Key(
        "draft.max_rows",
        "count",
        DRAFT_ROWS,
        "A decode rank with more sequences in a step does not draft in it: then it has enough to compute.",
    ),
    Key(
        "draft.acceptance",
        "choice",
        "equal",
        "equal: a draft holds while it is what the model itself draws there, so drafting never changes a text."
        " rejection: rejection sampling; more drafts of drawn texts hold, and such a text depends on what was drafted.",
        choices=("equal", "rejection"),
    ),
    Key(
        "prefix_cache.enabled",
        "flag",
        True,
        "Whether what a prompt has computed stays on its prefill rank, for later ones that begin alike. Off with"
        " replay_rows.",
    ),
    *_hand_back_keys(),
    Key(
        "replay_rows",
        "count",
        0,
        "Prompt rows that run through the layers past the last KV source; 0 is exact, and the only value in groups and"
        " on GPUs.",
    ),
    Key(
        "slo.ttft_p90",
        "duration",
        0.0,
        "90 % of first tokens should come so soon after their request. Missed over a minute: degraded. 0: not watched.",
    ),
    Key(
        "slo.itl_p99",
        "duration",
        0.0,
        "99 % of a request's tokens should come so soon after the one before. Missed over a minute: degraded. 0: not"
        " watched.",
    ),
    *_http_keys(),
    Key(
        "admin.dir",
        "path",
        None,
        "Runtime directory with the head's sockets. Default: $XDG_RUNTIME_DIR/engine or /tmp/engine-<uid>.",
    ),
    Key("log.format", "choice", "text", "Form of the log on stderr.", choices=("text", "json")),
    Key("log.level", "choice", "info", "Least level that is logged.", choices=("debug", "info", "warning", "error")),
    *(_limit_key(field) for field in dataclasses.fields(Limits)),
)
NAME_TO_KEY = {key.name: key for key in KEYS}


def environment_name(name: str) -> str:
    """`limits.drain_s` is `ENGINE_LIMITS__DRAIN_S`."""
    return "ENGINE_" + name.upper().replace(".", "__")


VARIABLE_TO_NAME = {environment_name(key.name): key.name for key in KEYS} | {"ENGINE_DIR": "admin.dir"}


def parse_duration(value: object) -> float:
    """Seconds of `30s`, `250ms`, `1h30m`, or of a plain number of seconds."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    text = str(value).strip()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parts = _DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ConfigError(f"{text!r} is not a duration; write 30s, 250ms or 1h30m")
    return float(sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts))


def parse_size(value: object) -> int:
    """Bytes of `4GiB`, `64MiB`, `1GB`, or of a plain number of bytes."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(str(value).strip())
    if match is None:
        raise ConfigError(f"{value!r} is not a size; write 64MiB, 4GiB or a number of bytes")
    return int(float(match[1]) * _SIZE_UNITS[match[2] or "B"])


def _parse_count(value: object) -> int:
    if isinstance(value, bool) or not re.fullmatch(r"-?\d+", str(value).strip()):
        raise ConfigError(f"{value!r} is not a whole number")
    return int(str(value))


def _parse_share(value: object) -> float:
    try:
        share = float(str(value))
    except ValueError:
        raise ConfigError(f"{value!r} is not a number") from None
    if not 0 < share <= 1:
        raise ConfigError(f"{value!r} is not a share; write a number above 0 and at most 1")
    return share


def _parse_flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip()
    if text not in ("true", "false"):
        raise ConfigError(f"{value!r} is neither true nor false")
    return text == "true"


def _parse_text(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 256:
        raise ConfigError(f"{value!r} is not a text of 1 to 256 characters")
    return value


def parse_address(value: object) -> str:
    """`host:port` of an address as people write it, or NO_HTTP: a port alone is one of this machine, for itself only.

    Raises:
        ConfigError: it is none.
    """
    text = str(value).strip()
    if text == NO_HTTP:
        return text
    host, colon, port = text.rpartition(":")
    host = host if colon else "127.0.0.1"
    if isinstance(value, bool) or not (port.isascii() and port.isdigit()) or int(port) > 65535 or not host:
        raise ConfigError(f"{value!r} is not an address; write 127.0.0.1:8000, [::1]:8000 or a port")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ConfigError(f"{value!r} is not an address; write an IPv6 address as [::1]:8000")
    return f"{host}:{int(port)}"


def _parse_ranks(value: object) -> int | str:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"{value!r} is not a list of ranks; write 2 (a count), '0-1' or '0-7,12'")
    parse_ranks(value, frozenset())
    return value


_PARSERS: dict[str, Callable[[object], Any]] = {
    "text": _parse_text,
    "path": _parse_text,
    "address": parse_address,
    "choice": _parse_text,
    "count": _parse_count,
    "share": _parse_share,
    "flag": _parse_flag,
    "size": parse_size,
    "duration": parse_duration,
    "ranks": _parse_ranks,
}


def parse_value(key: Key, value: object) -> Any:
    """Reads one value.

    Raises:
        ConfigError: it is not of the key's kind, or below its least.
    """
    parsed = _PARSERS[key.kind](value)
    if key.choices and parsed not in key.choices:
        near = difflib.get_close_matches(parsed, key.choices, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{parsed!r} is not one of {', '.join(key.choices)}{hint}")
    if key.kind in ("count", "size", "duration") and not key.least <= parsed < 2**53:
        raise ConfigError(f"{value!r} is out of range; the least is {key.least:g}")
    return parsed


def config_schema() -> dict[str, Any]:
    """JSON schema of the TOML file."""
    shapes: dict[str, dict[str, Any]] = {
        "text": {"type": "string", "minLength": 1, "maxLength": 256},
        "path": {"type": "string", "minLength": 1, "maxLength": 256},
        "address": {"type": ["integer", "string"]},
        "choice": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "flag": {"type": "boolean"},
        "size": {"type": ["integer", "string"], "pattern": f"^{_SIZE.pattern}$"},
        "duration": {"type": ["number", "string"], "pattern": r"^(\d+(\.\d+)?(us|ms|s|m|h|d))+$|^\d+(\.\d+)?$"},
        "ranks": {"type": ["integer", "string"], "pattern": r"^\d+(-\d+)?(,\d+(-\d+)?)*$"},
    }
    root: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "engine.toml",
        "type": "object",
        "additionalProperties": False,
        "properties": {},
    }
    for key in KEYS:
        *tables, last = key.name.split(".")
        node = root
        for table in tables:
            node = node["properties"].setdefault(
                table, {"type": "object", "additionalProperties": False, "properties": {}}
            )
        shape = dict(shapes[key.kind], description=key.doc)
        if key.choices:
            shape["enum"] = list(key.choices)
        if key.kind in ("count", "size", "duration") and key.least:
            shape["minimum"] = key.least
        if key.default is not None:
            shape["default"] = key.default
        node["properties"][last] = shape
    return root
