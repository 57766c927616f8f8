"""The engine's own processes, head and two ranks: the answers that come back are those of one device."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.cluster import start_cluster
from engine.settings import resolve_config
from tests.actors.head_process import talking_client
from tests.e2e.duo import Request
from tests.e2e.prompts import cut, fresh_seed, random_ids, text_ids
from tests.e2e.truth import Truth
from transport.messages import RequestFinished, Sampling
from transport.nixl_fabric import is_available

LENGTHS = [1, 2, 63, 64, 65, 129, 191, 256, 320, 1500]
needs_nixl = pytest.mark.skipif(not is_available(), reason="no nixl wheel is installed")


@pytest.mark.parametrize(
    "fabric", [pytest.param("tcp", marks=pytest.mark.slow), pytest.param("nixl", marks=needs_nixl)]
)
async def test_answers_of_real_processes_are_those_of_one_device(fabric: str, tmp_path: Path) -> None:
    rng = random.Random(fresh_seed())
    sets = [f"fabric={fabric}", "limits.prefill_chunk_tokens=128", "num_pages=200", "max_model_tokens=2048"]
    config = resolve_config(None, flags={}, sets=sets, environ={}).config
    requests = []
    for number, length in enumerate(LENGTHS):
        prompt = cut(rng, text_ids(), length) if number % 2 else random_ids(rng, length)
        temperature = 0.8 if number % 3 == 2 else 0.0
        sampling = Sampling(temperature=temperature, seed=rng.randrange(1 << 30), max_tokens=12, ignore_eos=True)
        requests.append(Request(number, prompt, sampling))
    with (tmp_path / "log").open("wb") as log:
        async with start_cluster(config, stderr=log) as cluster:
            await cluster.wait_ready(50)
            head = SimpleNamespace(directory=SimpleNamespace(requests_socket=cluster.requests_path))
            async with talking_client(head) as client:  # type: ignore[arg-type]
                for request in requests:
                    values = {name: getattr(request.sampling, name) for name in request.sampling.__struct_fields__}
                    client.submit(request.number, request.prompt, **values)
                for request in requests:
                    end = await client.end_of(request.number, 60)
                    assert isinstance(end, RequestFinished), end
                    request.finished, request.tokens = end, client.tokens[request.number]
                    started = client.starts[request.number]
                    assert (started.prefill_rank, started.decode_rank) == (0, 1)
                    assert started.pushed_bytes > 0
    assert f"fabric={'nixl/UCX' if fabric == 'nixl' else 'tcp'}" in (tmp_path / "log").read_text()
    truth = Truth()
    verdicts = [truth.judge(request, [64]) for request in requests]
    assert not any(verdict.wrong or verdict.excused for verdict in verdicts), verdicts
