"""ClusterConfig, RankConfig and Limits: the frozen configuration, its sources and its checks.

Precedence: flag > --set > ENGINE_ variable > file > default.
"""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Every bound in one place. A component is given the numbers it needs, not this."""

    queue_requests: int = 4096
    """Requests waiting in the head."""
    queue_prompt_tokens: int = 8_388_608
    """Prompt ids waiting in the head."""
    client_inflight: int = 4096
    """Unfinished requests of one client."""
    clients: int = 64
    """Connections to the head's request socket."""
    rank_waiting: int = 512
    """Requests that the head lets wait on one rank; the rest wait in the head."""
    decode_rows: int = 32
    """Sequences in one decode step of a rank."""
    prefill_chunk_tokens: int = 512
    """Ids in one prefill step of a rank; a whole number of pages."""
    link_out_bytes: int = 64 << 20
    """Bytes queued for one connection before it counts as stuck."""
    link_stall_s: float = 10.0
    """A peer that does not read for so long is gone."""
    start_s: float = 300.0
    """From process start to RankReady."""
    step_s: float = 60.0
    """One device step. Longer: the device counts as stuck."""
    grant_s: float = 60.0
    """Decode rank: grant given to first page pushed or commit."""
    transfer_s: float = 30.0
    """One WRITE."""
    abort_s: float = 5.0
    """Abort sent to RequestAborted."""
    quarantined_pages: float = 0.5
    """Share of a decode rank's pages in quarantine at which the writer is killed."""
    snapshot_s: float = 0.25
    """Between two snapshots of a rank."""
    heartbeat_s: float = 5.0
    """A rank that sends nothing for so long, though its socket is open, is hung."""
    restarts: int = 3
    """Restarts of one rank within `restart_window_s`; one more ends the cluster."""
    restart_window_s: float = 60.0
    restart_pause_s: float = 0.1
    """First pause before a restart; doubles up to 5 s."""
    drain_s: float = 60.0
    """Default of `engine down --drain`."""


@dataclasses.dataclass(frozen=True, slots=True)
class RankConfig:
    """What one rank process needs, derived from ClusterConfig; equal inputs give equal digests on every rank.

    Sizes: `page_tokens` tokens per page; `arena_bytes` 0 means "as many pages as `decode_rows` sequences of
    `max_model_tokens` need, within a quarter of the machine's memory".
    """

    role: Literal["prefill", "decode"]
    model: str
    device: str
    fabric: Literal["auto", "nixl", "tcp"]
    page_tokens: int
    max_model_tokens: int
    num_pages: int
    num_slabs: int
    kv_dtype: Literal["float32", "bfloat16"]
    threads: int
    replay_rows: int
    """Bounded replay (model.md 4.7): prompt rows that run through the layers past the last KV source; 0 is exact."""
    config_digest: str
    limits: Limits
