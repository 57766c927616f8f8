"""The ends of a step against their truths: streams of tokens, and likeliest tokens, ties and NaN among them."""

from __future__ import annotations

import pytest
import torch

from kernels import ends, reference


@pytest.mark.parametrize(("hidden", "dtype"), [(72, torch.bfloat16), (1040, torch.float32)])
def test_open_streams(hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    embed = torch.randn(11, hidden, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    tokens = torch.tensor([10, 0, 10], dtype=torch.int32, device=device)
    assert torch.equal(ends.open_streams(tokens, embed, 4), reference.open_streams(tokens, embed, 4))


@pytest.mark.parametrize(("vocab", "tile"), [(77, 16384), (1000, 256), (64, 16)])
def test_likeliest(vocab: int, tile: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "TILE", tile)
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(2))
    logits[0] = -1.0  # All are equal.
    logits[1, [5, 40, vocab - 1]] = 9.0
    logits[2] = float("-inf")
    logits[3, [12, 60]] = float("nan")
    logits[4, :] = -0.0
    logits[4, 33] = 0.0
    logits[5] = -logits[5].abs() - 3.0
    logits = logits.to(device)
    got = ends.likeliest(logits)
    assert torch.equal(got, reference.likeliest(logits))
    assert got[:5].tolist() == [0, 5, 0, 12, 0]


@pytest.mark.gpu
def test_real_sizes(device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(3)
    logits = torch.randn(64, 129_280, generator=generator, device=device).bfloat16().float()
    assert torch.equal(ends.likeliest(logits), reference.likeliest(logits))
    embed = torch.randn(1000, 4096, generator=generator, device=device).bfloat16()
    tokens = torch.randint(1000, (256,), generator=generator, device=device).int()
    assert torch.equal(ends.open_streams(tokens, embed, 4), reference.open_streams(tokens, embed, 4))
