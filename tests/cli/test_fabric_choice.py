"""Which fabric a rank opens where NIXL does not start: host memory goes over TCP, a GPU's does not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
import trio

from engine import compose
from engine.config import Limits, RankConfig
from engine.errors import FabricError
from transport.tcp_fabric import TcpFabric


@asynccontextmanager
async def open_nothing(*_: Any, **__: Any) -> AsyncIterator[None]:
    raise FabricError("its UCX backend does not start")
    yield


def config_of(device: Literal["cpu", "cuda"], fabric: Literal["auto", "nixl", "tcp"]) -> RankConfig:
    return RankConfig(
        role="decode", model="nano", device=device, fabric=fabric, page_tokens=64, max_model_tokens=256, num_pages=4,
        num_slabs=2, kv_dtype="float32", threads=1, replay_rows=0, config_digest="0", limits=Limits(),
    )  # fmt: skip


async def test_host_memory_goes_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "_nixl", open_nothing)
    async with trio.open_nursery() as nursery:
        fabric = await nursery.start(compose._hold_fabric, 0, config_of("cpu", "auto"))
        assert isinstance(fabric, TcpFabric)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("device", "fabric"), [("cuda", "auto"), ("cuda", "nixl"), ("cpu", "nixl")])
async def test_a_gpu_s_memory_and_who_wants_nixl_get_no_other(
    monkeypatch: pytest.MonkeyPatch, device: Literal["cpu", "cuda"], fabric: Literal["auto", "nixl"]
) -> None:
    monkeypatch.setattr(compose, "_nixl", open_nothing)
    with trio.fail_after(5), pytest.raises(FabricError, match="does not start"):
        await compose._hold_fabric(0, config_of(device, fabric))
