"""Every control message that crosses a process boundary, as frozen structs with a fixed kind number.

Facts are in the past tense (`PagesPushed`), commands in the imperative (`StartPrefill`). A frame is a header, one
message (its *meta*), and a raw *blob* whose layout the message's docstring states; token ids travel only in blobs, as
little-endian int32, and never become Python lists on the way. Kind numbers are never reused. This file owns the
vocabulary; `wire` owns the bytes.

Identities: `request` is a number. A client picks it, unique on its connection; the head gives each accepted request
a number of its own before it tells ranks, so on rank links `request` is unique in the cluster. `attempt` counts from 1
and tells a retry's messages from those of the try before. `rank` is the rank's index in the cluster, `generation`
counts its process's lives from 1.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

PROTOCOL_VERSION = 1
"""Both ends of every link must say the same number in their first message."""

U31 = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
U53 = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
TEXT_LIMIT = 4096
Text = Annotated[str, msgspec.Meta(max_length=TEXT_LIMIT)]

FinishReason = Literal["stop", "length"]
"""`stop`: an end-of-text or stop id was sampled (it is the last id emitted). `length`: max_tokens reached."""


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """Base of all messages: positional on the wire, so fields are only ever appended."""


class Sampling(Message, frozen=True):
    """How to choose tokens. `temperature` 0 is greedy. Draws are a function of (seed, position) alone."""

    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    top_k: U31 = 0
    """Keep the k likeliest; 0 keeps all."""
    seed: U53 = 0
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 16
    min_tokens: U31 = 0
    ignore_eos: bool = False
    stop_ids: Annotated[tuple[U31, ...], msgspec.Meta(max_length=64)] = ()


class Timings(Message, frozen=True):
    """What a request's stages took on the engine's side, in microseconds of the process that measured."""

    queue_us: U53 = 0
    """Accepted by the head until the first prefill chunk was submitted."""
    prefill_us: U53 = 0
    """First chunk submitted until the last chunk's result."""
    push_us: U53 = 0
    """Last chunk's result until the last WRITE was done."""


# ---------------------------------------------------------------- client (front, batch) <-> head


class ClientHello(Message, frozen=True):
    """First message of a client. `name` is for logs."""

    version: U31
    name: Name


class HeadHello(Message, frozen=True):
    """The head's answer: what a client needs to know before it submits."""

    version: U31
    cluster: Name
    model: Name
    """Directory of the model's files on this host, or `nano` for the bundled one."""
    vocab_size: U31
    max_model_tokens: U31
    """Prompt and completion together may not be longer."""
    config_digest: Name
    max_inflight: U31
    """Requests that one client may have unfinished; one more is answered by RequestFailed(queue_full)."""


class Submit(Message, frozen=True):
    """A prompt to complete. Blob: int32[num_ids], the prompt's ids and then the `generated` ids of earlier attempts."""

    request: U53
    attempt: U31
    generated: U31
    """How many ids at the blob's end the client already holds as output; `sampling.max_tokens` still counts them."""
    sampling: Sampling
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    """Lower first. Batch uses 10 on a shared daemon."""
    label: Name = ""
    """The caller's name for it (custom id, HTTP request id), for logs and screens."""


class CancelRequest(Message, frozen=True):
    """Stop it wherever it is. Answered by RequestFailed(cancelled), or by the RequestFinished that overtook it."""

    request: U53


class TokensEmitted(Message, frozen=True):
    """One frame per decode step with the tokens of all its rows (head to client: the rows of that client).

    Blob: int64 request[num_rows], int32 attempt[num_rows], int32 index[num_rows] (place of the row's first token in the
    completion), int32 count[num_rows], then int32 token[sum(count)].
    """

    step: U53
    num_rows: U31
    num_tokens: U31


class RequestStarted(Message, frozen=True):
    """Its prompt is computed and its KV is on the decode rank. Sent before the first token of each attempt, so that
    what a requester ends by itself (a stop string) has its account too."""

    request: U53
    attempt: U31
    prompt_tokens: U31
    cached_tokens: U31
    prefill_rank: U31
    decode_rank: U31
    pushed_bytes: U53
    """Bytes moved for it, as the fabric's own per-transfer telemetry counted them."""
    pushes: U31
    """WRITE transfers it took."""
    post_us: U53
    """Time inside the posting calls of these transfers."""
    timings: Timings


class RequestFinished(Message, frozen=True):
    """All its tokens were emitted before this message; RequestStarted told the rest of its account."""

    request: U53
    attempt: U31
    reason: FinishReason
    completion_tokens: U31
    handoff_us: U53
    """Last prefill chunk's result until the decode rank's first step for it was awaited; 0 if it needed none."""


FailureCode = Literal[
    "cancelled", "bad_request", "too_long", "queue_full", "draining", "rank_lost", "transfer_failed", "device_failed",
    "timeout",
]


class RequestFailed(Message, frozen=True):
    """It ended without an answer. `definite`: no token follows. `retryable`: the same submission may succeed later."""

    request: U53
    attempt: U31
    code: FailureCode
    message: Text
    definite: bool
    retryable: bool


# ---------------------------------------------------------------- head <-> rank

Role = Literal["prefill", "decode"]


class RankHello(Message, frozen=True):
    """A rank's first message, sent once its process runs and before it loads anything."""

    version: U31
    rank: U31
    generation: U31
    role: Role
    pid: U31
    config_digest: Name


class RankStarting(Message, frozen=True):
    """Progress of a start-up phase (`weights`, `arena`, `fabric`, `warmup`)."""

    phase: Name
    done: U53
    total: U53
    unit: Name


class RankReady(Message, frozen=True):
    """It can take requests. `address` is where a decode rank listens for prefill ranks (empty on prefill ranks)."""

    rank: U31
    generation: U31
    address: Name
    num_pages: U31
    page_tokens: U31
    page_bytes: U53
    num_slabs: U31
    slab_bytes: U53
    fabric: Name
    device: Name


class PeerUp(Message, frozen=True):
    """Head to prefill rank: decode rank `rank` serves at `address`. Dial it."""

    rank: U31
    generation: U31
    address: Name


class PeerDown(Message, frozen=True):
    """Head to rank: that process is *confirmed* dead (its pidfd fired): what it could write, it can write no more."""

    rank: U31
    generation: U31


class StartPrefill(Message, frozen=True):
    """Head to prefill rank. Blob: int32[num_ids], prompt and generated ids. Waits for the decode rank's grant."""

    request: U53
    attempt: U31
    decode_rank: U31
    generated: U31
    sampling: Sampling
    queued_us: U53
    """How long it waited in the head."""
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0


class ReservePages(Message, frozen=True):
    """Head to decode rank: room for a request whose prompt `prefill_rank` computes. No ids, only lengths."""

    request: U53
    attempt: U31
    prefill_rank: U31
    num_ids: U31
    """Ids that the prefill rank computes: prompt and already generated ones."""
    generated: U31
    sampling: Sampling
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0


class Abort(Message, frozen=True):
    """Head to rank: give the request up. Always answered by RequestAborted, also when the rank does not know it."""

    request: U53
    attempt: U31


class RequestAborted(Message, frozen=True):
    """Rank to head: nothing of it is emitted after this."""

    request: U53
    attempt: U31


class Drain(Message, frozen=True):
    """Head to rank: finish what you have, then stop. Answered by end of stream."""


class RankSnapshot(Message, frozen=True):
    """A rank's state, newest wins, a few times a second."""

    rank: U31
    generation: U31
    step: U53
    step_age_ms: U53
    """Since the last finished step, while work is waiting; 0 when idle."""
    running: U31
    waiting: U31
    pages_free: U31
    pages_owned: U31
    pages_granted: U31
    pages_quarantined: U31
    pages_total: U31
    slabs_free: U31
    prompt_tokens: U53
    """Total of prompt ids computed (prefill) or received as KV (decode)."""
    generated_tokens: U53
    pushed_bytes: U53
    pushes: U53
    pushes_inflight: U31
    step_us_p50: U53
    step_us_p99: U53
    device_us_p50: U53
    loop_lag_us_p50: U53
    loop_lag_us_p99: U53
    rss_bytes: U53
    device_us_p99: U53 = 0
    step_us_sum: U53 = 0
    """All finished steps of this life added up; with `step` and `device_us_sum` it gives means over any stretch."""
    device_us_sum: U53 = 0


class WriterOverdue(Message, frozen=True):
    """Decode rank to head: what this prefill process was granted stays in quarantine, and the memory is needed. Only
    its death frees it."""

    rank: U31
    generation: U31
    pages: U31


# ---------------------------------------------------------------- prefill rank <-> decode rank (one stream per pair)


class PeerHello(Message, frozen=True):
    """Prefill rank's first message on the pair stream. Blob: its fabric's description (opaque to others)."""

    version: U31
    rank: U31
    generation: U31
    layout_digest: Name
    """Same record format, page size, ring sizes: else the decode rank answers with an error and closes."""


class PeerWelcome(Message, frozen=True):
    """Decode rank's answer. Blob: its fabric's description. In its block table slabs come after `num_pages` pages."""

    version: U31
    rank: U31
    generation: U31
    layout_digest: Name
    num_pages: U31
    num_slabs: U31


class PagesGranted(Message, frozen=True):
    """Decode to prefill: these pages may be written until EpochEnded. Blob: int32[num_pages] page ids in order."""

    request: U53
    attempt: U31
    epoch: U53
    """Unique per decode rank life; never reused."""
    slab: U31
    num_pages: U31


class PagesPushed(Message, frozen=True):
    """Prefill to decode: WRITE done for pages [first, first + count) of the grant."""

    request: U53
    epoch: U53
    first: U31
    count: U31
    num_bytes: U53


class PrefillCommitted(Message, frozen=True):
    """Prefill to decode: all pages and the slab are written; here is the first token. Also ends the epoch."""

    request: U53
    epoch: U53
    num_ids: U31
    num_pages: U31
    first_token: U31
    pushed_bytes: U53
    pushes: U31
    post_us: U53
    timings: Timings


class EpochEnded(Message, frozen=True):
    """Prefill to decode: no WRITE of this epoch is in flight and none will start, so its quarantine is over."""

    request: U53
    epoch: U53


class GrantRevoked(Message, frozen=True):
    """Decode to prefill: stop writing to the epoch; answer with EpochEnded once nothing is in flight."""

    request: U53
    epoch: U53


# ---------------------------------------------------------------- operators (status, down) <-> head


class AskStatus(Message, frozen=True):
    """Reads only. Answered by StatusReport."""


class RankStatus(Message, frozen=True):
    """One rank as the head sees it. `state`: starting, ready, draining, lost, restarting."""

    rank: U31
    role: Role
    generation: U31
    pid: U31
    state: Name
    phase: Name
    age_ms: U53
    """Since its last snapshot or start-up message."""
    restarts: U31
    snapshot: RankSnapshot | None


class StatusReport(Message, frozen=True):
    """The cluster at one moment. `ready` is what `/ready` will say; `reasons` says why not."""

    version: U31
    cluster: Name
    model: Name
    head_pid: U31
    uptime_ms: U53
    ready: bool
    reasons: Annotated[tuple[Text, ...], msgspec.Meta(max_length=256)]
    waiting: U31
    running: U31
    finished: U53
    failed: U53
    ranks: Annotated[tuple[RankStatus, ...], msgspec.Meta(max_length=4096)]
    cancelled: U53 = 0
    """Ended by their clients, as at a stop string; not among `failed`."""


class Shutdown(Message, frozen=True):
    """Admin socket only. `drain_ms` 0 stops at once. Answered by ShutdownAccepted, then by the end of the stream."""

    drain_ms: U53
    reason: Text


class ShutdownAccepted(Message, frozen=True):
    """The head stops taking requests now."""

    running: U31


class Refused(Message, frozen=True):
    """An answer to anything that is not allowed on this link or in this state."""

    message: Text


KIND_TO_MESSAGE: dict[int, type[Message]] = {
    1: ClientHello,
    2: HeadHello,
    3: Submit,
    4: CancelRequest,
    5: TokensEmitted,
    6: RequestFinished,
    7: RequestFailed,
    8: RequestStarted,
    20: RankHello,
    21: RankStarting,
    22: RankReady,
    23: PeerUp,
    24: PeerDown,
    25: StartPrefill,
    26: ReservePages,
    27: Abort,
    28: RequestAborted,
    29: Drain,
    30: RankSnapshot,
    31: WriterOverdue,
    40: PeerHello,
    41: PeerWelcome,
    42: PagesGranted,
    43: PagesPushed,
    44: PrefillCommitted,
    45: EpochEnded,
    46: GrantRevoked,
    60: AskStatus,
    61: StatusReport,
    62: Shutdown,
    63: ShutdownAccepted,
    64: Refused,
}
MESSAGE_TO_KIND: dict[type[Message], int] = {message: kind for kind, message in KIND_TO_MESSAGE.items()}

# What each link's reader accepts; anything else is a RemoteProtocolError.
HEAD_FROM_CLIENT: frozenset[type[Message]] = frozenset({ClientHello, Submit, CancelRequest})
CLIENT_FROM_HEAD: frozenset[type[Message]] = frozenset(
    {HeadHello, RequestStarted, TokensEmitted, RequestFinished, RequestFailed, Refused}
)
HEAD_FROM_RANK: frozenset[type[Message]] = frozenset(
    {
        *(RankHello, RankStarting, RankReady, RankSnapshot, WriterOverdue),
        *(RequestStarted, TokensEmitted, RequestFinished, RequestFailed, RequestAborted),
    }
)
RANK_FROM_HEAD: frozenset[type[Message]] = frozenset({PeerUp, PeerDown, StartPrefill, ReservePages, Abort, Drain})
DECODE_FROM_PREFILL: frozenset[type[Message]] = frozenset({PeerHello, PagesPushed, PrefillCommitted, EpochEnded})
PREFILL_FROM_DECODE: frozenset[type[Message]] = frozenset({PeerWelcome, PagesGranted, GrantRevoked, Refused})
HEAD_FROM_OPERATOR: frozenset[type[Message]] = frozenset({AskStatus, Shutdown})
OPERATOR_FROM_HEAD: frozenset[type[Message]] = frozenset({StatusReport, ShutdownAccepted, Refused})
