"""Tickets: of an owner, and of a place in it, the same ones at every launch; of others, others."""

from __future__ import annotations

import torch

from kernels.tickets import tickets_of


def test_tickets_belong_to_an_owner_and_a_place(device: torch.device) -> None:
    first, second = (torch.empty(8, device=device) for _ in range(2))
    held = tickets_of(first, 3)
    assert held.tolist() == [0, 0, 0] and held.dtype == torch.int32 and held.device.type == device.type
    assert tickets_of(first, 3) is held
    others = [tickets_of(second, 3), tickets_of(first, 3, place=16), tickets_of(first, 4)]
    assert len({tickets.data_ptr() for tickets in (held, *others)}) == 4
