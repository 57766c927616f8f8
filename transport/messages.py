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
Crc32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
TEXT_LIMIT = 4096
Text = Annotated[str, msgspec.Meta(max_length=TEXT_LIMIT)]

Figure = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
"""A measured or reckoned number: finite."""

FinishReason = Literal["stop", "length"]
"""`stop`: an end-of-text or stop id was sampled (it is the last id emitted). `length`: max_tokens reached."""


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """Base of all messages: positional on the wire, so fields are only ever appended."""


TOP_LIMIT = 20
"""Likeliest tokens that a request may ask to be told at each place."""
GRAMMAR_LIMIT = 64 << 10
"""UTF-8 bytes of the grammar that a request's text has to follow."""
BIAS_LIMIT = 300
"""Ids whose logits a request may raise or lower."""
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
Tops = Annotated[int, msgspec.Meta(ge=-1, le=TOP_LIMIT)]


class Sampling(Message, frozen=True):
    """How to choose tokens, and what to tell of them; `docs/sampling.md` has the order in which the fields apply.
    `temperature` 0 is greedy. Draws are a function of (seed, position, purpose) alone."""

    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    top_k: U31 = 0
    """Keep the k likeliest; 0 keeps all."""
    seed: U53 = 0
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 16
    min_tokens: U31 = 0
    ignore_eos: bool = False
    stop_ids: Annotated[tuple[U31, ...], msgspec.Meta(max_length=64)] = ()
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    """Keep what is at least this share as likely as the likeliest."""
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=100.0)] = 1.0
    """For ids of the prompt and of the completion."""
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    """Both for ids of the completion."""
    bias_ids: Annotated[tuple[U31, ...], msgspec.Meta(max_length=BIAS_LIMIT)] = ()
    biases: Annotated[
        tuple[Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)], ...], msgspec.Meta(max_length=BIAS_LIMIT)
    ] = ()
    """One for each of `bias_ids`, which are different ones."""
    logprobs: Tops = -1
    """-1: none are told; else that of each chosen token and of so many likeliest ones."""
    prompt_logprobs: Tops = -1
    """The same for the ids of the prompt from the second on."""
    grammar: Annotated[str, msgspec.Meta(max_length=GRAMMAR_LIMIT)] = ""
    """What the completion's text has to follow, in Lark as llguidance has it; empty for any text."""

    @property
    def needs_seen(self) -> bool:
        """Whether draws depend on which ids there were before, beyond the model."""
        return self.has_penalties or bool(self.grammar)

    @property
    def has_penalties(self) -> bool:
        """Whether draws depend on the ids before, beyond the model."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def without_minimum(self) -> Sampling:
        """The same once `min_tokens` are there."""
        return msgspec.structs.replace(self, min_tokens=0)


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
    affinity: Name = ""
    """The caller's name for the conversation that it belongs to: a rank that has its earlier turns is preferred."""
    cache_salt: Name = ""
    """Cached prefixes are shared among requests with the same salt only."""


class CancelRequest(Message, frozen=True):
    """Stop it wherever it is. Answered by RequestFailed(cancelled), or by the RequestFinished that overtook it."""

    request: U53
    is_complete: bool = False
    """Its requester has all that it wants, as at a stop string: in the head's counts it is answered, not given up."""


class TokensEmitted(Message, frozen=True):
    """One frame per decode step with the tokens of all its rows. Head to client: the rows of that client, of all ranks
    that the head heard in one turn of its loop; `step` is then the greatest of theirs.

    Blob: int64 request[num_rows], int32 attempt[num_rows], int32 index[num_rows] (place of the row's first token in the
    completion), int32 count[num_rows], then int32 token[sum(count)].
    """

    step: U53
    num_rows: U31
    num_tokens: U31


class LogprobsEmitted(Message, frozen=True):
    """Of the tokens of the next TokensEmitted whose requests asked for them: natural logarithms of the probabilities
    before any processing. `num_rows` tokens, `num_tops` likeliest ones of theirs together.

    Blob: int64 request[num_rows], int32 attempt[num_rows], int32 index[num_rows] (place in the completion), int32
    count[num_rows] (of its likeliest), float32 logprob[num_rows], int32 place[num_rows] (among the likeliest, from 1);
    then int32 id[num_tops], float32 logprob[num_tops], of each token the likeliest first.
    """

    step: U53
    num_rows: U31
    num_tops: U31


class PromptScored(Message, frozen=True):
    """The same for ids [first, first + count) of a prompt, with `tops` likeliest ids at each place. It goes the way of
    the hand-off, through the decode rank, so it is there before the request can end. `epoch` is for the decode rank.

    Blob: float32 logprob[count], int32 place[count], int32 id[count, tops], float32 logprob[count, tops].
    """

    request: U53
    attempt: U31
    epoch: U53
    first: U31
    count: U31
    tops: Annotated[int, msgspec.Meta(ge=0, le=TOP_LIMIT)]


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
    "timeout", "kv_corrupt",
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


class PartInfo(Message, frozen=True):
    """A part of the model whose experts have slots on this rank. All slots of a part have one size."""

    name: Literal["main", "draft"]
    layers: U31
    experts: U31
    """Of each layer."""
    slots: U31
    slot_bytes: U53


class RankReady(Message, frozen=True):
    """It can take requests; a rank of a group can once it has joined. `address` is where a decode rank listens for
    prefill ranks (empty on prefill ranks). Blob: its fabric's description if it has a group, else empty."""

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
    mesh_address: Name = ""
    """Where a rank of a group meets the others for their exchanges; empty for a group of one."""
    parts: Annotated[tuple[PartInfo, ...], msgspec.Meta(max_length=2)] = ()


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
    affinity: Name = ""
    """As in Submit."""
    cache_salt: Name = ""
    """As in Submit."""


class ReservePages(Message, frozen=True):
    """Head to decode rank: room for a request whose prompt `prefill_rank` computes. Only lengths, no ids of the
    prompt. Blob: with a grammar the ids of earlier attempts, which have followed it, int32[generated]; else empty."""

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


MOST_DRAFTS = 7
"""Drafts that are verified behind one row at most."""
DRAFT_ORIGINS = 64
"""Prefill ranks in one snapshot."""


class DraftCounts(Message, frozen=True):
    """What became of drafted tokens. All grow."""

    rows: U53 = 0
    """Rows of steps that had drafts behind them."""
    proposed: U53 = 0
    """Drafts that were verified."""
    accepted: U53 = 0
    accepted_at: Annotated[tuple[U53, ...], msgspec.Meta(max_length=8)] = ()
    """Rows whose first draft was accepted, whose first and second were, and so on. Empty while nothing was drafted."""


class DraftOrigin(Message, frozen=True):
    """Drafts of requests whose KV came from one life of one prefill rank, of late and only of requests that have ended;
    with sums of squares over requests, for the error of a share."""

    rank: U31
    generation: U31
    requests: U53 = 0
    proposed: U53 = 0
    accepted: U53 = 0
    proposed2: U53 = 0
    """Sum of proposed * proposed."""
    accepted2: U53 = 0
    both: U53 = 0
    """Sum of proposed * accepted."""


class PrefixCounts(Message, frozen=True):
    """What a prefill rank's prefix cache did, in prompt ids of requests that may use it."""

    queried: U53 = 0
    hit: U53 = 0
    """Not computed again."""
    possible: U53 = 0
    """What a cache of unlimited size on this rank, which had kept every page of every prompt, would have spared."""
    evicted_pages: U53 = 0


DeclineReason = Literal["gone", "known", "full", "draining"]
"""Why a turn is not taken back: its prompt's cut is not there (any more); the cut is there already; no room within the
share of hand-backs; the rank drains."""


class TurnCounts(Message, frozen=True):
    """What became of finished turns, in turns but for the last two. Of a decode rank: offered, withdrawn, declined and
    failed; of a prefill rank: all others."""

    offered: U53 = 0
    withdrawn: U53 = 0
    """A request needed the memory, the offer found no answer in time, or its link was lost."""
    declined: U53 = 0
    """By the prefill rank, as the decode rank heard it."""
    failed: U53 = 0
    """Granted, and not committed by the decode rank."""
    granted: U53 = 0
    gone: U53 = 0
    """Declined for this reason; so the next three."""
    known: U53 = 0
    full: U53 = 0
    draining: U53 = 0
    kept: U53 = 0
    """Entered into the cache."""
    kept_pages: U53 = 0
    kept_bytes: U53 = 0


class ForgetPrompts(Message, frozen=True):
    """Head to a prefill rank: give up what the prefix cache keeps, but for what prompts use now."""


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
    corrupt_pushes: U53 = 0
    """Decode rank: pushes whose bytes did not have the checksum that their writer told."""
    drafted: DraftCounts = DraftCounts()
    """Decode rank: of this life."""
    draft_origins: Annotated[tuple[DraftOrigin, ...], msgspec.Meta(max_length=DRAFT_ORIGINS)] = ()
    """Decode rank: the prefill ranks with most requests."""
    pages_cached: U31 = 0
    """Prefill rank: pages of the prefix cache. They are there for prompts as free ones are, unless `pages_pinned`."""
    pages_pinned: U31 = 0
    """Prefill rank: of `pages_cached`, those that running prompts use."""
    slabs_cached: U31 = 0
    prefix: PrefixCounts = PrefixCounts()
    """Prefill rank: of this life."""
    turns: TurnCounts = TurnCounts()
    """Of this life."""

    @property
    def pages_available(self) -> int:
        """Pages that a prompt or sequence can have at once: free ones, and cached ones that nobody uses."""
        return self.pages_free + max(0, self.pages_cached - self.pages_pinned)


class WriterOverdue(Message, frozen=True):
    """What this process of the other role was granted stays in quarantine, or a push to it does not end, and the memory
    is needed. Only its death frees it."""

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
    num_pages: U31 = 0
    """Of its block table, as in PeerWelcome, where it takes turns back; else 0."""
    num_slabs: U31 = 0


class PeerWelcome(Message, frozen=True):
    """Decode rank's answer. Blob: its fabric's description. In its block table slabs come after `num_pages` pages."""

    version: U31
    rank: U31
    generation: U31
    layout_digest: Name
    num_pages: U31
    num_slabs: U31


class PagesGranted(Message, frozen=True):
    """Decode to prefill: these pages may be written until EpochEnded. Blob: int32[num_pages] page ids in order. For a
    turn that was offered, the same from prefill to decode; so EpochEnded and GrantRevoked."""

    request: U53
    attempt: U31
    epoch: U53
    """Unique in the granting rank's life; never reused."""
    slab: U31
    num_pages: U31


class PagesPushed(Message, frozen=True):
    """Prefill to decode: WRITE done for pages [first, first + count) of the grant."""

    request: U53
    epoch: U53
    first: U31
    count: U31
    num_bytes: U53
    checksum: Crc32 | None = None
    """With `checksum_pushes`: CRC-32 over the blocks that this write read, pages in order and then, in the prompt's
    last write, the slab."""


class TokenScored(Message, frozen=True):
    """What a request asked to be told of its first token: as in LogprobsEmitted."""

    logprob: Figure
    place: U31
    ids: Annotated[tuple[U31, ...], msgspec.Meta(max_length=TOP_LIMIT)] = ()
    logprobs: Annotated[tuple[Figure, ...], msgspec.Meta(max_length=TOP_LIMIT)] = ()


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
    first_scored: TokenScored | None = None
    cached_tokens: U31 = 0
    """Of `num_ids`, those that were not computed for it."""


class EpochEnded(Message, frozen=True):
    """Prefill to decode: no WRITE of this epoch is in flight and none will start, so its quarantine is over."""

    request: U53
    epoch: U53


class GrantRevoked(Message, frozen=True):
    """Decode to prefill: stop writing to the epoch; answer with EpochEnded once nothing is in flight."""

    request: U53
    epoch: U53


class TurnOffered(Message, frozen=True):
    """Decode to prefill: a request that you had prefilled has finished, and here are the pages behind its prompt and
    its slab. Answered by PagesGranted, as a hand-off is opened in the other direction, or by TurnDeclined; it may be
    withdrawn meanwhile. Blob: int32 ids, all tokens of this attempt."""

    request: U53
    attempt: U31
    num_ids: U31
    """Ids of prompt and completion whose state is complete: all but the last token."""
    num_pages: U31
    """From the page on that the first id behind the prompt is in."""


class TurnDeclined(Message, frozen=True):
    """Prefill to decode: keep nothing for this offer."""

    request: U53
    attempt: U31
    reason: DeclineReason


class TurnCommitted(Message, frozen=True):
    """Decode to prefill: all pages of the grant and the slab are written. Also ends the epoch."""

    request: U53
    epoch: U53
    num_ids: U31
    num_pages: U31
    num_bytes: U53
    checksum: Crc32 | None = None
    """With `checksum_pushes`: as in PagesPushed, over all of it."""


# ---------------------------------------------------------------- groups and their experts: head <-> rank

Part = Literal["main", "draft"]


class Member(Message, frozen=True):
    """One place of a group. `generation` 0 and an empty address: its rank is lost. `description_bytes`: length of its
    fabric's description in the blob."""

    rank: U31
    generation: U31
    mesh_address: Name
    description_bytes: U31


class PartTable(Message, frozen=True):
    """A part's placement in the blob: int32[places, slots], `layer * experts + expert` or -1. `epoch`: in force."""

    part: Part
    epoch: U53
    layers: U31
    experts: U31
    slots: U31


class NameGroup(Message, frozen=True):
    """Head to rank: prepare to step with these members: have the experts of your row in your slots. Answered by
    GroupPrepared. Blob: each part's table, then each member's fabric description."""

    membership: U31
    """Counts up within the head's life; a greater one replaces every one before."""
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=1024)]
    """All places of the group in order, lost ones included."""
    parts: Annotated[tuple[PartTable, ...], msgspec.Meta(max_length=2)]


class GroupPrepared(Message, frozen=True):
    """Rank to head: the experts are in place; it can join."""

    rank: U31
    generation: U31
    membership: U31


class JoinGroup(Message, frozen=True):
    """Head to rank: all members are prepared: step with them from the step on that the pact agrees on."""

    membership: U31


class GroupJoined(Message, frozen=True):
    """Rank to head: its first step with these members was awaited."""

    rank: U31
    generation: U31
    membership: U31


class AskWake(Message, frozen=True):
    """Rank to head: the group parked at `step` of `membership`, and there is something to do here."""

    membership: U31
    step: U53


class WakeGroup(Message, frozen=True):
    """Head to every rank of the group: steps go on after the park at `step` of `membership`."""

    membership: U31
    step: U53


class PeerAccused(Message, frozen=True):
    """Rank to head: a member did not answer in an exchange within its limit. `rank` is the accused."""

    rank: U31
    generation: U31
    membership: U31
    step: U53
    why: Text


class ExpertLoads(Message, frozen=True):
    """Rank to head: rows that its gates sent to each expert since the last of these. Blob: int32[layers, experts]."""

    part: Part
    steps: U53
    """Steps in which they were counted, idle ones left out."""
    pairs: U53
    """(row, expert) pairs that this rank computed, for whichever rank's rows."""
    expert_us: U53
    """What computing them took, microseconds."""
    layers: U31
    experts: U31


class PrepareEpoch(Message, frozen=True):
    """Head to rank: an epoch's stage. Blob: int32[places, slots], the table once it is active; then int32[copies, 6]:
    layer, expert, source place, source slot, target place, target slot; then int32[released, 2]: place, slot."""

    part: Part
    epoch: U53
    layers: U31
    experts: U31
    places: U31
    slots: U31
    copies: U31
    released: U31
    step_bytes: U53
    """Each source may send so many bytes per step."""


class HoldCopies(Message, frozen=True):
    """Head to rank: start no more copies of this epoch."""

    part: Part
    epoch: U53


class ReleaseCopies(Message, frozen=True):
    """Head to rank: the reverse of HoldCopies."""

    part: Part
    epoch: U53


class WithdrawEpoch(Message, frozen=True):
    """Head to rank: do not become ready for it, or take your word back. Answered by EpochWithdrawn or EpochFlipped."""

    part: Part
    epoch: U53


class AdoptEpoch(Message, frozen=True):
    """Head to rank: it became active on another rank before the group lost one; the next membership starts with it."""

    part: Part
    epoch: U53


class BurnEpoch(Message, frozen=True):
    """Head to rank: nobody is ready for it, or will be: empty its slots. Answered by EpochReclaimed."""

    part: Part
    epoch: U53


class SlotsCopied(Message, frozen=True):
    """Source to head, head to target: these slots of `place` have their weights. Blob: int32[count] slots."""

    part: Part
    epoch: U53
    place: U31
    count: U31
    num_bytes: U53
    transfer_us: U53
    """Time of the writes added up; 0 to a target."""


class CopyFailed(Message, frozen=True):
    """Source to head: a copy of this epoch can not be carried out. The migration is given up."""

    part: Part
    epoch: U53
    why: Text


class EpochReady(Message, frozen=True):
    """Rank to head: all copies to it are complete and visible, and its ready word says so."""

    part: Part
    epoch: U53


class EpochFlipped(Message, frozen=True):
    """Rank to head: it awaited a step in which the epoch was active: `step` of `membership`."""

    part: Part
    epoch: U53
    membership: U31
    step: U53


class EpochWithdrawn(Message, frozen=True):
    """Rank to head: it is not ready for the epoch and never will be."""

    part: Part
    epoch: U53


class EpochReclaimed(Message, frozen=True):
    """Rank to head: the slots that the epoch (or its burning) releases are empty, and no queued step names them."""

    part: Part
    epoch: U53


# ---------------------------------------------------------------- operators (status, down, rebalance) <-> head


class AskStatus(Message, frozen=True):
    """Reads only. Answered by StatusReport."""


class RankStatus(Message, frozen=True):
    """One rank as the head sees it. `state`: starting, joining, ready, draining, lost, restarting. A rank of a
    group is joining until its group steps with it. `draining` and a `phase` of `drained`: an operator has drained it,
    and it has nothing left."""

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
    phase_done: U53 = 0
    """Of a rank that starts: RankStarting's count, its total and its unit, and how long the phase runs."""
    phase_total: U53 = 0
    phase_unit: Name = ""
    phase_ms: U53 = 0
    reason: Text = ""
    """Why it is drained, lost or restarting, if that is known."""


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
    degraded: Annotated[tuple[Text, ...], msgspec.Meta(max_length=256)] = ()
    """It serves, but not as it should: one sentence each (a group without a member, a balancer without progress)."""
    is_stopping: bool = False
    """No new requests: the engine drains, and then ends."""
    waiting_limit: U31 = 0
    """How many may wait."""
    drafted: DraftCounts = DraftCounts()
    """Of all lives of all decode ranks."""
    prefix: PrefixCounts = PrefixCounts()
    """Of all lives of all prefill ranks."""
    turns: TurnCounts = TurnCounts()
    """Of all lives of all ranks."""


class Shutdown(Message, frozen=True):
    """Admin socket only. `drain_ms` 0 stops at once. Answered by ShutdownAccepted, then by the end of the stream."""

    drain_ms: U53
    reason: Text


class ShutdownAccepted(Message, frozen=True):
    """The head stops taking requests now."""

    running: U31


class AskExperts(Message, frozen=True):
    """Reads only. Answered by ExpertsReport."""


class SkewFigures(Message, frozen=True):
    """The three figures of skew (see the glossary), and the worst layer with its fullest rank."""

    max_over_mean: Figure
    """Of the layers' sums: sum of maxima / sum of means; 1 is even."""
    imbalance: Figure
    lost_us_per_step: Figure
    layer: U31
    rank: U31


class PlanFigures(Message, frozen=True):
    """A plan and its bill. `plan` 0: none."""

    plan: U31
    age_ms: U53
    pays: bool
    reason: Text
    before: SkewFigures
    after: SkewFigures
    moved_slots: U31
    moved_bytes: U53
    far_slots: U31
    saved_us_per_step: Figure
    gain_us: Figure
    cost_us: Figure
    stages: U31
    is_rollback: bool = False


class PastRebalance(Message, frozen=True):
    """One line of the history. `realised` is the drop of max/mean that came, as a share of the predicted one; -1 where
    it can not be said (yet)."""

    plan: U31
    ended_ago_ms: U53
    result: Literal["applied", "skipped", "failed", "rolled_back", "running"]
    reason: Text
    by: Name
    before: Figure
    predicted: Figure
    after: Figure
    realised: Figure
    moved_slots: U31
    moved_bytes: U53
    took_ms: U53


REBALANCE_BOUNDS_MS = (100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000, 120_000, 300_000)
"""Upper bounds of the histogram of re-placements by their length."""


class PartReport(Message, frozen=True):
    """The experts of one part of one group. `ranks`: all places in order, lost ones included; `slots` and `empty_slots`
    are of all of them together."""

    pool: Role
    group: U31
    part: Part
    ranks: Annotated[tuple[U31, ...], msgspec.Meta(max_length=1024)]
    layers: U31
    experts: U31
    slots: U31
    empty_slots: U31
    slot_bytes: U53
    mode: Literal["off", "manual", "auto"]
    state: Literal["forming", "idle", "planning", "moving", "paused", "withdrawing", "incomplete"]
    membership: U31
    epoch: U53
    steps: U53
    """Steps that the load window has seen."""
    skew: SkewFigures
    plan: PlanFigures
    copied_slots: U31
    """Of the running migration."""
    total_slots: U31
    progress_age_ms: U53
    """Since the balancer last got somewhere, while it has something to do; 0 otherwise."""
    lost_us_total: Figure
    """Expert time lost to skew since the head started, microseconds."""
    history: Annotated[tuple[PastRebalance, ...], msgspec.Meta(max_length=64)]
    """The one that runs is among them, with the result `running` and `ended_ago_ms` 0."""
    applied: U53 = 0
    """Re-placements that ended so since the head started; the same words as `PastRebalance.result`."""
    skipped: U53 = 0
    failed: U53 = 0
    rolled_back: U53 = 0
    moved_slots_total: U53 = 0
    """Of all re-placements since the head started, the running one included: what arrived."""
    moved_bytes_total: U53 = 0
    took_ms_total: U53 = 0
    """Of all that moved something and have ended, added up."""
    took_counts: Annotated[tuple[U53, ...], msgspec.Meta(max_length=16)] = ()
    """How many of these took at most each of `REBALANCE_BOUNDS_MS` and more than the one before; the last: longer than
    all. Empty: none has ended."""
    plan_age_limit_ms: U53 = 0
    """A plan older than this is not applied."""
    next_check_ms: U53 = 0
    """Until auto looks at the loads again; 0: it does not."""
    done_text: Text = ""
    """What runs, in words, with who began it."""


class ExpertsReport(Message, frozen=True):
    """All parts of all groups with more than one rank."""

    parts: Annotated[tuple[PartReport, ...], msgspec.Meta(max_length=1024)]


class Rebalance(Message, frozen=True):
    """Admin socket only: an operator's act on one part of one group. `plan` changes nothing. Answered by
    RebalanceAnswer or Refused."""

    action: Literal["plan", "apply", "rollback", "pause", "resume", "abort", "mode"]
    pool: Role
    group: U31
    part: Part
    plan: U31
    """For apply: which one; 0 plans anew and applies that."""
    mode: Literal["", "off", "manual", "auto"]
    user: Name
    host: Name
    reason: Text


class RebalanceAnswer(Message, frozen=True):
    """What was done, in words, and the part as it is now."""

    done: Text
    report: PartReport


class Refused(Message, frozen=True):
    """An answer to anything that is not allowed on this link or in this state."""

    message: Text


# ---------------------------------------------------------------- what a console asks for


LATENCY_BOUNDS_US: tuple[int, ...] = tuple(round(100 * 1.25**n) for n in range(64))
"""Upper bounds of latency histograms, 100 us to 127 s, each 1.25 times the one before: a percentile of merged counts is
within 12 % of the truth. Counts have one more place, for what is above all."""

Counts = Annotated[tuple[U53, ...], msgspec.Meta(max_length=65)]
"""How many fell into each bucket since the head started. Empty: none."""


REQUEST_BOUNDS_MS = (
    1, 3, 10, 30, 100,
    300, 500, 800, 1000, 1500, 2000, 2500, 5000, 10_000, 15_000, 20_000, 30_000, 40_000, 50_000, 60_000, 120_000,
    240_000, 480_000, 960_000, 1_920_000, 7_680_000,
)  # fmt: skip
"""Upper bounds of histograms of whole requests and their stages: those of vLLM, and some below its first."""


class TimeCounts(Message, frozen=True):
    """A histogram of times with its exact sum."""

    counts: Counts = ()
    sum_us: U53 = 0


class RequestTimes(Message, frozen=True):
    """Of requests that were answered whole by their first attempt. All by `REQUEST_BOUNDS_MS`, but for `token`."""

    whole: TimeCounts = TimeCounts()
    """Accepted until the head had the last token."""
    queue: TimeCounts = TimeCounts()
    """Of it, until the first chunk of the prompt was submitted."""
    run: TimeCounts = TimeCounts()
    """The rest: `prefill` and `decode`."""
    prefill: TimeCounts = TimeCounts()
    """From there until the head had the first token."""
    decode: TimeCounts = TimeCounts()
    """From there on."""
    token: TimeCounts = TimeCounts()
    """`decode` by the tokens behind the first, 0 where there are none; by `LATENCY_BOUNDS_US`."""


class RequestEnds(Message, frozen=True):
    """How submissions ended that were taken. All grow."""

    stop: U53 = 0
    """By an id that ends a text, or by a stop string that the requester found."""
    length: U53 = 0
    abort: U53 = 0
    """Given up by clients or operators."""
    error: U53 = 0


class AskTraffic(Message, frozen=True):
    """Reads only. Answered by TrafficReport."""


class TrafficReport(Message, frozen=True):
    """Totals of the head since it started, all growing: rates and percentiles of any stretch are differences of two."""

    at_ms: U53
    """On the head's clock that never goes back."""
    accepted: U53
    refused: U53
    finished: U53
    failed: U53
    cancelled: U53
    prompt_tokens: U53
    """Of started attempts, the cached ones included."""
    cached_tokens: U53
    generated_tokens: U53
    waiting: U31
    waiting_tokens: U53
    running: U31
    ttft: Counts
    """Accepted until the head had the first token of the first attempt."""
    itl: Counts
    """Between two turns of a decode rank that brought tokens, once for each token row of the later one."""
    handoff: Counts
    """`RequestFinished.handoff_us`."""
    ttft_limit_us: U53 = 0
    """What the operator set under `[slo]`; 0: nothing."""
    itl_limit_us: U53 = 0
    push_failures: U53 = 0
    """Attempts that ranks ended with `transfer_failed` or `kv_corrupt`."""
    ends: RequestEnds = RequestEnds()
    times: RequestTimes = RequestTimes()


class AskRequests(Message, frozen=True):
    """Reads only. Answered by RequestsReport."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    older_ms: U53
    """Only what was accepted at least so long ago."""


RequestState = Literal["queued", "prefill", "decode", "stopping"]
"""`queued`: no rank has it yet; `prefill`: computed and pushed; `decode`: its first token was said; `stopping`: it was
cancelled or given up, and its ranks still have to say so."""


class RequestRow(Message, frozen=True):
    """One request that has not ended. Ranks are -1 while there is none."""

    request: U53
    """The head's number, which CancelRequests takes."""
    client: Name
    label: Name
    state: RequestState
    age_ms: U53
    """Since it was accepted."""
    state_ms: U53
    attempt: U31
    prompt_tokens: U31
    cached_tokens: U31
    generated: U31
    max_tokens: U31
    prefill_rank: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
    decode_rank: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
    queue_us: U53 = 0
    """These three as `Timings` has them; 0 until it has started."""
    prefill_us: U53 = 0
    push_us: U53 = 0


class RequestsReport(Message, frozen=True):
    """The oldest requests first. `total`: all that match, of which `rows` may be the oldest `limit`."""

    total: U53
    rows: Annotated[tuple[RequestRow, ...], msgspec.Meta(max_length=4096)]


class AskHeat(Message, frozen=True):
    """Reads only. Answered by HeatReport, or by Refused if there is no such part. `layer`: whose slots to tell."""

    pool: Role
    group: U31
    part: Part
    layer: U31


class HeatReport(Message, frozen=True):
    """Loads of one part of one group. n ranks in the order of `PartReport.ranks`, s slots each. Blob: little-endian

        rank load   float32[n, layers]    expert rows per step at that rank, of the layer's mean over ranks; 1 is even
        hottest     int32[n, layers]      expert with the highest load per replica on that rank; -1: it has none
        slots       int32[n, s]           of `layer`: the expert in each slot, -1: empty
        next slots  int32[n, s]           the same after the last plan, where `has_plan`; else the same again
        load        float32[experts]      of `layer`: rows per step that gates send there, of the mean over experts
        moved       uint8[n, s]           of `layer`: 1 where the last re-placement that was carried out put the expert
    """

    pool: Role
    group: U31
    part: Part
    layer: U31
    layers: U31
    experts: U31
    ranks: U31
    slots_per_rank: U31
    has_plan: bool
    steps: U53
    """Steps that the load window has seen; 0: all loads are zeros."""
    us_per_row: Figure
    """Time of one expert row, so that (load - mean) has a price; 0: not measured yet."""
    rows_per_step: Figure
    """Mean expert rows per step of one rank in one layer."""


class PairCounts(Message, frozen=True):
    """A prefill rank's pushes by decode rank, with each of its snapshots. Blob: columns of `count` rows, little-endian:
    decode rank int32, bytes int64 and pushes int64 since this life began, in flight int32, failed int32, p99 of the
    last pushes in microseconds int32."""

    rank: U31
    generation: U31
    count: U31


class AskLinks(Message, frozen=True):
    """Reads only. Answered by LinksReport."""


class LinksReport(Message, frozen=True):
    """What living prefill ranks have pushed to whom. Blob: columns of `count` rows, little-endian: prefill rank int32,
    its generation int32, then the columns of PairCounts."""

    count: U31


class WatchEvents(Message, frozen=True):
    """From now on the head sends EventsHappened on this connection, unasked; at once what it still has after `after`
    (0: all). Once for a connection."""

    after: U53


class HeadEvent(Message, frozen=True):
    """One line of the head's log. `name` is dotted and stable, `text` has its fields for people."""

    seq: U53
    """From 1, without gaps."""
    at_ms: U53
    """Since 1970, of the head's host."""
    level: Literal["info", "warning", "error"]
    name: Name
    text: Text


class EventsHappened(Message, frozen=True):
    """`lost`: events before these that the head no longer has."""

    lost: U53
    events: Annotated[tuple[HeadEvent, ...], msgspec.Meta(max_length=256)]


class SetDrain(Message, frozen=True):
    """Admin socket only: no new requests for these ranks (`drain`), or new ones again. What they have is finished; they
    stay up and step with their groups. Answered by ActDone or Refused."""

    ranks: Annotated[tuple[U31, ...], msgspec.Meta(min_length=1, max_length=4096)]
    drain: bool
    host: Name
    reason: Text


class CancelRequests(Message, frozen=True):
    """Admin socket only: ends these requests (`RequestRow.request`) as their clients could. Answered by ActDone or
    Refused."""

    requests: Annotated[tuple[U53, ...], msgspec.Meta(min_length=1, max_length=4096)]
    host: Name
    reason: Text


class ResetCache(Message, frozen=True):
    """Admin socket only: prefill ranks are told ForgetPrompts. Answered by ActDone or Refused."""

    host: Name
    reason: Text


class ActDone(Message, frozen=True):
    """What was done, in words."""

    done: Text


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
    32: ForgetPrompts,
    40: PeerHello,
    41: PeerWelcome,
    42: PagesGranted,
    43: PagesPushed,
    44: PrefillCommitted,
    45: EpochEnded,
    46: GrantRevoked,
    47: TurnOffered,
    48: TurnDeclined,
    49: TurnCommitted,
    60: AskStatus,
    61: StatusReport,
    62: Shutdown,
    63: ShutdownAccepted,
    64: Refused,
    65: AskExperts,
    66: ExpertsReport,
    67: Rebalance,
    68: RebalanceAnswer,
    70: NameGroup,
    71: GroupPrepared,
    72: JoinGroup,
    73: GroupJoined,
    74: AskWake,
    75: WakeGroup,
    76: PeerAccused,
    77: ExpertLoads,
    80: PrepareEpoch,
    81: HoldCopies,
    82: ReleaseCopies,
    83: WithdrawEpoch,
    84: AdoptEpoch,
    85: BurnEpoch,
    86: SlotsCopied,
    87: CopyFailed,
    88: EpochReady,
    89: EpochFlipped,
    90: EpochWithdrawn,
    91: EpochReclaimed,
    92: PairCounts,
    100: AskTraffic,
    101: TrafficReport,
    102: AskRequests,
    103: RequestsReport,
    104: AskHeat,
    105: HeatReport,
    106: AskLinks,
    107: LinksReport,
    108: WatchEvents,
    109: EventsHappened,
    110: SetDrain,
    111: CancelRequests,
    112: ActDone,
    113: ResetCache,
    120: LogprobsEmitted,
    121: PromptScored,
}
MESSAGE_TO_KIND: dict[type[Message], int] = {message: kind for kind, message in KIND_TO_MESSAGE.items()}

# What each link's reader accepts; anything else is a RemoteProtocolError.
HEAD_FROM_CLIENT: frozenset[type[Message]] = frozenset({ClientHello, Submit, CancelRequest})
CLIENT_FROM_HEAD: frozenset[type[Message]] = frozenset(
    {
        *(HeadHello, RequestStarted, TokensEmitted, RequestFinished, RequestFailed, Refused),
        *(LogprobsEmitted, PromptScored),
    }
)
HEAD_FROM_RANK: frozenset[type[Message]] = frozenset(
    {
        *(RankHello, RankStarting, RankReady, RankSnapshot, WriterOverdue, PairCounts),
        *(RequestStarted, TokensEmitted, RequestFinished, RequestFailed, RequestAborted),
        *(LogprobsEmitted, PromptScored),
        *(GroupPrepared, GroupJoined, AskWake, PeerAccused, ExpertLoads),
        *(SlotsCopied, CopyFailed, EpochReady, EpochFlipped, EpochWithdrawn, EpochReclaimed),
    }
)
RANK_FROM_HEAD: frozenset[type[Message]] = frozenset(
    {
        *(PeerUp, PeerDown, StartPrefill, ReservePages, Abort, Drain, ForgetPrompts),
        *(NameGroup, JoinGroup, WakeGroup),
        *(PrepareEpoch, HoldCopies, ReleaseCopies, WithdrawEpoch, AdoptEpoch, BurnEpoch, SlotsCopied),
    }
)
DECODE_FROM_PREFILL: frozenset[type[Message]] = frozenset(
    {
        *(PeerHello, PagesPushed, PromptScored, PrefillCommitted, EpochEnded),
        *(PagesGranted, GrantRevoked, TurnDeclined),
    }
)
PREFILL_FROM_DECODE: frozenset[type[Message]] = frozenset(
    {PeerWelcome, PagesGranted, GrantRevoked, Refused, TurnOffered, TurnCommitted, EpochEnded}
)
HEAD_FROM_OPERATOR: frozenset[type[Message]] = frozenset(
    {
        *(AskStatus, AskExperts, AskTraffic, AskRequests, AskHeat, AskLinks, WatchEvents),
        *(Shutdown, Rebalance, SetDrain, CancelRequests, ResetCache),
    }
)
OPERATOR_FROM_HEAD: frozenset[type[Message]] = frozenset(
    {
        *(StatusReport, ExpertsReport, TrafficReport, RequestsReport, HeatReport, LinksReport, EventsHappened),
        *(ShutdownAccepted, Refused, RebalanceAnswer, ActDone),
    }
)
