"""What `e` writes: a view as JSON, and the screen's picture beside it."""

from __future__ import annotations

import json
import os
from datetime import datetime

import msgspec

from console.view import ClusterView


def view_json(view: ClusterView, screen: str, rows: object, now: float, wall_ms: int) -> dict[str, object]:
    """All that a screen is drawn from, as what JSON can say. Ages are seconds, times milliseconds since 1970."""
    age = view.age(now)
    return {
        "schema": 1,
        "screen": screen,
        "at_ms": wall_ms,
        "age_s": round(age, 3) if age != float("inf") else None,
        "link": {"phase": view.phase(now), "address": view.link.address, "is_admin": view.link.is_admin},
        "status": message_json(view.status),
        "traffic": message_json(view.traffic),
        "experts": message_json(view.experts),
        "latency_us": {
            kind: dict(zip(("p50", "p90", "p99"), map(_number, view.percentiles(kind)), strict=True))
            for kind in ("ttft", "itl", "handoff")
        },
        "rows": rows,
    }


def _number(value: float) -> float | None:
    return value if value == value else None


def message_json(value: object) -> object:
    """A message, or a list of them, as what JSON can say: by field names; on the wire they are positions."""
    if isinstance(value, msgspec.Struct):
        return {name: message_json(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple | list):
        return [message_json(item) for item in value]
    return value


def write_files(
    directory: str, screen: str, view: ClusterView, rows: object, picture: str, now: float, wall_ms: int
) -> list[str]:
    """Writes `engine-SCREEN-TIME.json` and `.svg`; returns their names. A file that is there is not overwritten.

    Raises:
        OSError: the directory can not be written to.
    """
    stamp = datetime.fromtimestamp(wall_ms / 1000).strftime("%Y%m%d-%H%M%S")
    data = json.dumps(view_json(view, screen, rows, now, wall_ms), indent=1, default=str)
    for n in range(100):
        stem = f"engine-{screen}-{stamp}" + (f"-{n}" if n else "")
        try:
            with open(os.path.join(directory, stem + ".json"), "x", encoding="utf-8") as file:
                file.write(data + "\n")
        except FileExistsError:
            continue
        with open(os.path.join(directory, stem + ".svg"), "w", encoding="utf-8") as file:
            file.write(picture)
        return [stem + ".json", stem + ".svg"]
    raise FileExistsError(f"{directory} has a hundred files engine-{screen}-{stamp}")
