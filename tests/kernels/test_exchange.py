"""Dispatch and combine of ranks whose mailboxes lie in one process, so that what each puts and when can be chosen.

With a CUDA device all ranks share it; `exchange_two_ranks.py` has two.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from engine.model.nvlink import Expiry, NvlinkExchange
from kernels import combine, exchange, reference
from kernels.exchange import ExchangeConfig
from kernels.forms import PairSums
from kernels.mailbox import COMBINE, DISPATCH, MOST_PARTS, Mailbox, MailboxLayout

Rows = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for each row where a test does not say otherwise: the interpreter runs them one after another."""
    monkeypatch.setattr(exchange, "choose_config", lambda rows: ExchangeConfig())


def open_group(
    layout: MailboxLayout, device: torch.device, membership: int = 1, limit_s: float = 0.05
) -> list[NvlinkExchange]:
    """Mailboxes of NaN, and flags that no exchange has."""
    memories = [torch.full((layout.num_bytes,), 0xFF, dtype=torch.uint8, device=device) for _ in range(layout.ranks)]
    group = [NvlinkExchange(layout, place, memory, limit_s=limit_s) for place, memory in enumerate(memories)]
    enter(group, membership, range(layout.ranks))
    return group


def enter(group: Sequence[NvlinkExchange], membership: int, living: Sequence[int]) -> None:
    addresses = {place: group[place].mailbox.memory.data_ptr() for place in living}
    for place in living:
        group[place].enter(membership, addresses)


def draw_rows(
    layout: MailboxLayout, counts: Sequence[int], experts: int, seed: int, device: torch.device
) -> list[Rows]:
    """Of each rank; the last row of one that has several is padding."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for count in counts:
        x = torch.randn((count, layout.hidden), generator=random).to(layout.dtype)
        ids = torch.rand((count, experts), generator=random).topk(layout.top_k, -1).indices.sort(-1).values.int()
        if count > 1:
            ids[-1] = -1
        weights = torch.rand((count, layout.top_k), generator=random)
        found.append((x.to(device), ids.to(device), weights.to(device)))
    return found


def dispatch(
    group: Sequence[NvlinkExchange], layer: int, rows: int, own: Sequence[Rows], config: ExchangeConfig | None = None
) -> list[Rows]:
    for member, mine in zip(group, own, strict=True):
        exchange.send_rows(member.mailbox, layer, rows, *mine, config)
    return [exchange.receive_rows(member.mailbox, layer, rows, config) for member in group]


def assert_dispatched(found: Rows, own: Sequence[Rows], rows: int, *, narrow: bool = False) -> None:
    expected = reference.dispatch_rows(*zip(*own, strict=True), rows, narrow=narrow)
    there = torch.cat([torch.arange(rows, device=x.device) < len(x) for x, _, _ in own])
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0][there], expected[0][there])
    assert torch.equal(found[2][there], expected[2][there])


@pytest.mark.parametrize(
    ("counts", "hidden", "dtype", "config"),
    [
        ((3, 5), 96, torch.bfloat16, None),
        ((4, 0, 1), 64, torch.float32, ExchangeConfig(warps=4)),
        ((2, 2), 320, torch.bfloat16, ExchangeConfig(parts=4, warps=1)),
    ],
)
def test_every_rank_gets_the_rows_of_all(
    counts: tuple[int, ...], hidden: int, dtype: torch.dtype, config: ExchangeConfig | None, device: torch.device
) -> None:
    layout = MailboxLayout(len(counts), 2, 6, hidden, 3, dtype)
    group = open_group(layout, device)
    own = draw_rows(layout, counts, 8, 1, device)
    for found in dispatch(group, 0, 5, own, config):
        assert_dispatched(found, own, 5)
    assert all(member.find_expiry() is None for member in group)


def test_narrow_rows_are_rounded_alike_on_all_ranks(device: torch.device) -> None:
    layout = MailboxLayout(2, 2, 4, 384, 2, torch.bfloat16, narrow=True)
    group = open_group(layout, device)
    own = draw_rows(layout, (3, 2), 8, 2, device)
    # A group of zeros, of tiny, and of huge numbers; 448 and 449 times a power of two lie on both sides of a step.
    own[0][0][0, :128] = 0
    own[0][0][1, 128:256] *= 2.0**-100
    own[0][0][1, 256:] *= 2.0**60
    own[1][0][0, :128] = 1.75
    own[1][0][1, :128] = 1.765625
    for found in dispatch(group, 1, 3, own):
        assert found[0].dtype == torch.bfloat16
        assert_dispatched(found, own, 3, narrow=True)
    # Three bits of mantissa: half of 2^-3 at most, a quarter of that in the mean square.
    x, narrow = own[0][0].float(), found[0][:3].float()
    assert float((narrow - x).norm() / x.norm()) < 2.0**-4


def test_rows_that_lie_in_the_mailbox_already_are_put_to_peers_only(device: torch.device) -> None:
    layout = MailboxLayout(2, 2, 4, 64, 2, torch.bfloat16)
    group = open_group(layout, device)
    own = draw_rows(layout, (3, 2), 8, 3, device)
    placed = []
    for member, mine in zip(group, own, strict=True):
        # Expert 0 in places without a row, as an earlier step may have left it.
        member.mailbox.memory.zero_()
        x, choice = member.rows(4).own(1, len(mine[0]))
        assert x is not None and choice is not None
        places = (x, *choice)
        for place, part in zip(places, mine, strict=True):
            place.copy_(part)
        placed.append(places)
    for found in dispatch(group, 1, 4, placed):
        assert_dispatched(found, own, 4)


@pytest.mark.parametrize("part_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_pairs", [False, True])
def test_owners_add_the_parts_of_all_ranks_in_their_order(
    is_pairs: bool, part_dtype: torch.dtype, device: torch.device
) -> None:
    counts, rows, k, experts = (3, 0, 4), 4, 4, 6
    # In the same type as parts: bf16 would hide in which order they were added.
    dtype = part_dtype
    layout = MailboxLayout(3, 3, rows, 160, k, dtype, part_dtype=part_dtype)
    group = open_group(layout, device)
    own = draw_rows(layout, counts, experts, 4, device)
    ids = reference.dispatch_rows(*zip(*own, strict=True), rows)[1]
    random = torch.Generator().manual_seed(5)
    bases = [torch.randn((count, 160), generator=random).to(device, dtype) for count in counts]
    partial, parts, here = [], [], []
    for rank in range(3):
        table = torch.where(torch.arange(experts) % 3 == rank, torch.arange(experts), -1).int().to(device)
        # Numbers of different sizes, so that another order has other bits.
        pairs = (torch.randn((3 * rows, k, 160), generator=random) * 10.0 ** (2 - rank)).to(device)
        sums = PairSums(pairs, ids, table)
        sum_ = reference.add_pairs(sums)
        is_here = (ids >= 0) & (table[ids.long().clamp(min=0)] >= 0)
        # What is not to be read.
        pairs[~is_here] = torch.nan
        partial.append(pairs if is_pairs else torch.where(ids[:, :1] >= 0, sum_, torch.nan))
        parts.append(sum_)
        here.append(table if is_pairs else None)
    for rank, member in enumerate(group):
        combine.send_parts(member.mailbox, 2, rows, partial[rank], ids, here[rank])
    for rank, member in enumerate(group):
        base = None if rank == 2 else bases[rank]
        out = torch.full_like(bases[rank], torch.nan)
        found = combine.receive_parts(member.mailbox, 2, rows, partial[rank], ids, base, out, here[rank])
        mine = slice(rank * rows, rank * rows + counts[rank])
        expected = reference.combine_rows([part[mine] for part in parts], rank, ids[mine], base, dtype, part_dtype)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("narrow", [False, True])
def test_rows_go_to_the_places_of_their_experts_only_and_their_parts_come_back(
    narrow: bool, device: torch.device
) -> None:
    counts, rows, k, experts = (3, 2, 0, 4), 4, 3, 9
    layout = MailboxLayout(4, 2, rows, 128, k, torch.float32, narrow)
    group = open_group(layout, device)
    own = draw_rows(layout, counts, experts, 12, device)
    random = torch.Generator().manual_seed(13)
    # Each rank has its rows computed elsewhere, as with replicas; the last place computes nothing.
    places = [torch.randint(3, (experts,), generator=random).int().to(device) for _ in counts]
    for member, mine, table in zip(group, own, places, strict=True):
        exchange.send_rows(member.mailbox, 1, rows, *mine, None, table)
    pairs = torch.randn((4 * rows, k, 128), generator=random).to(device)
    everywhere = torch.zeros(experts, dtype=torch.int32, device=device)
    x, _, weights = reference.dispatch_rows(*zip(*own, strict=True), rows, narrow=narrow)
    found_ids = []
    for rank, member in enumerate(group):
        found = exchange.receive_rows(member.mailbox, 1, rows)
        kept = [reference.keep_ids(mine[1], table, rank) for mine, table in zip(own, places, strict=True)]
        padded = reference.dispatch_rows([mine[0] for mine in own], kept, [mine[2] for mine in own], rows)[1]
        assert torch.equal(found[1], padded)
        is_asked = (padded >= 0).any(1)
        assert torch.equal(found[0][is_asked], x[is_asked])
        assert torch.equal(found[2][padded >= 0], weights[padded >= 0])
        if not narrow:
            others = torch.cat([~is_asked[: rank * rows], ~is_asked[(rank + 1) * rows :]])
            kept_x = torch.cat([found[0][: rank * rows], found[0][(rank + 1) * rows :]])
            assert kept_x[others].isnan().all(), "rows were put where nobody asks for them"
        found_ids.append(padded)
    for rank, member in enumerate(group):
        routed = (own[rank][1], places[rank])
        combine.send_parts(member.mailbox, 1, rows, pairs * (rank + 1), found_ids[rank], everywhere, None, routed)
    for rank, member in enumerate(group):
        mine = slice(rank * rows, rank * rows + counts[rank])
        out = torch.full_like(own[rank][0], torch.nan)
        combine.receive_parts(
            member.mailbox, 1, rows, pairs * (rank + 1), found_ids[rank], None, out, everywhere, None,
            (own[rank][1], places[rank]),
        )  # fmt: skip
        parts = [
            reference.add_pairs(PairSums(pairs * (source + 1), ids, everywhere))[mine]
            for source, ids in enumerate(found_ids)
        ]
        expected = reference.combine_rows(parts, rank, own[rank][1], None, torch.float32, torch.float32)
        assert torch.equal(out, expected)
    assert all(member.find_expiry() is None for member in group)


@pytest.mark.parametrize("layers", [2, 3, 4, 5])
def test_consecutive_exchanges_of_a_phase_share_no_byte(layers: int) -> None:
    layout = MailboxLayout(3, layers, 5, 128, 3, narrow=True, part_dtype=torch.float32)

    def areas(layer: int) -> dict[str, range]:
        flags, choice = 8 * 3 * 5 * MOST_PARTS, 4 * 3 * 5 * 3
        sizes = {
            "dispatch flags": (layout.flags_at(DISPATCH, layer), flags),
            "combine flags": (layout.flags_at(COMBINE, layer), flags),
            "ids": (layout.ids_at(layer), choice),
            "weights": (layout.weights_at(layer), choice),
            "rows": (layout.rows_at(layer), 3 * 5 * 128),
            "scales": (layout.scales_at(layer), 3 * 5),
            "parts": (layout.parts_at(layer), 3 * 5 * 128 * 4),
        }
        return {name: range(start, start + size) for name, (start, size) in sizes.items()}

    order = [*range(layers), 0]
    for earlier, later in pairwise(order):
        together = sorted([*areas(earlier).values(), *areas(later).values()], key=lambda area: area.start)
        for first, second in pairwise(together):
            assert first.stop <= second.start
        assert together[-1].stop <= layout.num_bytes


@pytest.mark.parametrize("layers", [2, 3])
def test_a_rank_may_be_one_exchange_ahead_and_what_came_before_is_still_there(
    layers: int, device: torch.device
) -> None:
    layout = MailboxLayout(2, layers, 3, 64, 2, torch.bfloat16)
    group = open_group(layout, device)
    first, second = (member.mailbox for member in group)
    own = [draw_rows(layout, (1, 2), 8, seed, device) for seed in range(2 * layers)]
    exchange.send_rows(first, 0, 2, *own[0][0])
    for number in range(2 * layers - 1):
        layer, after = number % layers, (number + 1) % layers
        exchange.send_rows(second, layer, 2, *own[number][1])
        assert_dispatched(exchange.receive_rows(first, layer, 2), own[number], 2)
        # As early as it can be: the second rank has not even looked yet.
        exchange.send_rows(first, after, 2, *own[number + 1][0])
        assert_dispatched(exchange.receive_rows(second, layer, 2), own[number], 2)
    assert all(member.find_expiry() is None for member in group)


def test_an_expired_wait_names_its_peer_and_nothing_is_put_or_awaited_after_it(device: torch.device) -> None:
    layout = MailboxLayout(3, 3, 2, 64, 2, torch.float32)
    group = open_group(layout, device)
    own = draw_rows(layout, (2, 1, 2), 8, 7, device)
    for number in range(4):
        dispatch(group, number % 3, 2, own)
    for place in (0, 2):
        exchange.send_rows(group[place].mailbox, 1, 2, *own[place])
    for place in (0, 2):
        exchange.receive_rows(group[place].mailbox, 1, 2)
        assert group[place].find_expiry() == Expiry(step=1, layer=1, phase=DISPATCH, place=1)
    before = [member.mailbox.memory.clone() for member in group]
    out = torch.empty((2, 64), device=device)
    partial, ids = torch.zeros((6, 64), device=device), torch.zeros((6, 2), dtype=torch.int32, device=device)
    combine.send_parts(group[0].mailbox, 1, 2, partial, ids)
    combine.receive_parts(group[0].mailbox, 1, 2, partial, ids, None, out)
    exchange.send_rows(group[0].mailbox, 2, 2, *own[0])
    exchange.receive_rows(group[0].mailbox, 2, 2)
    assert group[0].find_expiry() == Expiry(step=1, layer=1, phase=DISPATCH, place=1)
    for member, memory in zip(group, before, strict=True):
        assert torch.equal(member.mailbox.memory, memory)
    # The one that was slow finds out as well.
    exchange.send_rows(group[1].mailbox, 1, 2, *own[1])
    exchange.receive_rows(group[1].mailbox, 1, 2)
    exchange.send_rows(group[1].mailbox, 2, 2, *own[1])
    exchange.receive_rows(group[1].mailbox, 2, 2)
    found = group[1].find_expiry()
    # Both others are silent; which of them is named depends on whose limit ends first.
    assert found in [Expiry(step=1, layer=2, phase=DISPATCH, place=place) for place in (0, 2)]


def test_the_host_ends_a_wait_that_is_under_way(device: torch.device) -> None:
    layout = MailboxLayout(2, 2, 2, 64, 2, torch.float32)
    group = open_group(layout, device, limit_s=60.0)
    began = time.monotonic()
    # Compiled kernels wait while the host goes on; interpreted ones are the host.
    waiting = threading.Thread(target=exchange.receive_rows, args=(group[0].mailbox, 0, 2))
    waiting.start()
    time.sleep(0.1)
    assert device.type == "cuda" or waiting.is_alive()
    group[0].abort(1)
    waiting.join(20.0)
    found = group[0].find_expiry()
    assert found is not None and found.place == 1
    assert time.monotonic() - began < 20.0


def test_a_part_that_never_comes_is_told_as_the_combine_s(device: torch.device) -> None:
    layout = MailboxLayout(2, 2, 1, 64, 2, torch.float32)
    group = open_group(layout, device)
    own = draw_rows(layout, (1, 1), 8, 8, device)
    dispatch(group, 0, 1, own)
    partial, ids = torch.zeros((2, 64), device=device), torch.zeros((2, 2), dtype=torch.int32, device=device)
    combine.combine_rows(group[1].mailbox, 0, 1, partial, ids, None, torch.empty((1, 64), device=device))
    found = group[1].find_expiry()
    assert found == Expiry(step=0, layer=0, phase=COMBINE, place=0)
    assert str(found) == "place 0 was silent in the combine of layer 0 in step 0"


def test_flags_of_an_older_membership_or_another_size_of_step_do_not_count(device: torch.device) -> None:
    layout = MailboxLayout(2, 2, 3, 64, 2, torch.float32)
    group = open_group(layout, device, membership=5)
    own = draw_rows(layout, (2, 2), 8, 9, device)
    for found in dispatch(group, 0, 2, own):
        assert_dispatched(found, own, 2)
    # The same exchange, the same place in the mailbox: what came then is still there.
    enter(group, 6, range(2))
    exchange.dispatch_rows(group[0].mailbox, 0, 2, *own[0])
    assert group[0].find_expiry() == Expiry(0, 0, DISPATCH, 1)
    enter(group, 7, range(2))
    exchange.send_rows(group[1].mailbox, 0, 3, *own[1])
    exchange.dispatch_rows(group[0].mailbox, 0, 2, *own[0])
    assert group[0].find_expiry() == Expiry(0, 0, DISPATCH, 1)
    enter(group, 8, range(2))
    for found in dispatch(group, 0, 3, own):
        assert_dispatched(found, own, 3)


def test_a_membership_without_one_of_the_places_goes_on(device: torch.device) -> None:
    layout = MailboxLayout(3, 2, 2, 64, 2, torch.float32)
    group = open_group(layout, device)
    own = draw_rows(layout, (2, 1, 2), 8, 10, device)
    dispatch(group, 0, 2, own)
    enter(group, 2, (0, 2))
    left = [own[0], tuple(part[:0] for part in own[1]), own[2]]
    living = [group[0], group[2]]
    ids = reference.dispatch_rows(*zip(*left, strict=True), 2)[1]
    for found in dispatch(living, 0, 2, [own[0], own[2]]):
        assert_dispatched(found, left, 2)
    parts = [torch.full((6, 64), float(place + 1), device=device) for place in (0, 2)]
    for member, part in zip(living, parts, strict=True):
        combine.send_parts(member.mailbox, 0, 2, part, ids)
    for member, part in zip(living, parts, strict=True):
        out = torch.full((2, 64), torch.nan, device=device)
        combine.receive_parts(member.mailbox, 0, 2, part, ids, None, out)
        # 1 and 3, and nothing for the second row, which is padding.
        assert torch.equal(out, torch.tensor([[4.0], [0.0]], device=device).expand(2, 64))
    assert all(member.find_expiry() is None for member in living)


def test_a_step_joins_its_rows_with_those_of_others_and_gets_sums_back(device: torch.device) -> None:
    layout = MailboxLayout(2, 2, 3, 64, 2, torch.bfloat16)
    group = open_group(layout, device)
    first, second = group[0].rows(3), group[1].mailbox
    tables = [torch.tensor(table, dtype=torch.int32, device=device) for table in ([0, 1, -1, -1], [-1, -1, 0, 1])]
    base = torch.randn((2, 64), generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    for step in range(2):
        for layer in range(2):
            own = draw_rows(layout, (2, 3), 4, 2 * step + layer, device)
            exchange.send_rows(second, layer, 3, *own[1])
            joined = first.join(layer, *own[0])
            exchange.receive_rows(second, layer, 3)
            assert_dispatched(joined, own, 3)
            assert torch.equal(first.ids[layer], joined[1])
            pairs = joined[0].float().unsqueeze(1) * joined[2].unsqueeze(-1)
            both = [PairSums(pairs, joined[1], table, base) for table in tables]
            combine.send_parts(second, layer, 3, pairs, joined[1], tables[1])
            found = first.give_back(layer, both[0])
            combine.receive_parts(second, layer, 3, pairs, joined[1], None, torch.empty_like(own[1][0]), tables[1])
            parts = [reference.add_pairs(PairSums(pairs, joined[1], table))[:2] for table in tables]
            expected = reference.combine_rows(parts, 0, own[0][1], base, torch.bfloat16, torch.bfloat16)
            assert torch.equal(found, expected)
    assert all(member.find_expiry() is None for member in group)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    layout = MailboxLayout(2, 2, 3, 64, 2, torch.float32)
    group = open_group(layout, device)
    own = draw_rows(layout, (3, 3), 8, 11, device)
    box: Mailbox = group[0].mailbox
    for layer, rows in ((0, 4), (2, 3), (0, 2)):
        with pytest.raises(ValueError, match=r"rows"):
            exchange.send_rows(box, layer, rows, *own[0])
    with pytest.raises(ValueError, match="2 layers or more"):
        MailboxLayout(2, 1, 3, 64, 2)
    with pytest.raises(ValueError, match="multiple of 128"):
        MailboxLayout(2, 2, 3, 64, 2, narrow=True)
    with pytest.raises(ValueError, match="can not enter"):
        group[0].enter(2, {1: 1})
