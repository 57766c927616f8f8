"""Traces of coding agents, as the AgentX scenario replays them: few, short, made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 64
TRACES = 4
TURNS = 5


def write_traces(folder: Path) -> None:
    """One file a trace. An agent's turns each have all that was before them; behind the second a subagent has two."""
    folder.mkdir()
    for number in range(TRACES):
        trace = {
            "id": f"trace-{number}", "models": ["nano"], "block_size": BLOCK_TOKENS, "hash_id_scope": "local",
            "requests": _requests(8 + number),
        }  # fmt: skip
        (folder / f"trace-{number}.json").write_text(json.dumps(trace))


def _requests(output_tokens: int) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = []
    at_s, blocks = 0.0, [1, 2, 3, 4]
    for turn in range(TURNS):
        blocks = [*blocks, 100 + turn]
        requests.append(_request(at_s, blocks, output_tokens))
        at_s += 0.8
        if turn == 1:
            requests.append(_subagent(at_s))
            at_s += 1.8
    return requests


def _subagent(at_s: float) -> dict[str, Any]:
    calls = [_request(at_s + 0.1 + 0.6 * call, list(range(500, 503 + call)), 6) for call in range(2)]
    return {
        "t": round(at_s, 2), "type": "subagent", "agent_id": "agent_001", "subagent_type": "Explore",
        "duration_ms": 1500, "total_tokens": 500, "tool_use_count": 2, "status": "completed", "models": ["nano"],
        "requests": calls,
    }  # fmt: skip


def _request(at_s: float, blocks: list[int], output_tokens: int) -> dict[str, Any]:
    return {
        "t": round(at_s, 2), "type": "s", "model": "nano", "in": len(blocks) * BLOCK_TOKENS, "out": output_tokens,
        "hash_ids": blocks, "api_time": 0.4, "think_time": 0.2, "stop": "tool_use",
    }  # fmt: skip
