"""Summary: medians and spread over the runs of a record, and the ratios between what was measured side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.bench.record import spread


def summarise_forward(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per row count the medians of samples with their spread, the smallest step of all, and prefill rates."""
    decode: list[dict[str, Any]] = []
    for rows, context in sorted({(run["rows"], run["context"]) for run in runs if run["kind"] == "decode"}):
        mine = [run for run in runs if (run.get("rows"), run.get("context")) == (rows, context)]
        step_ms = spread([run["step_ms_median"] for run in mine])
        decode.append(
            {
                "rows": rows,
                "context": context,
                "step_ms": step_ms,
                "step_ms_least": min(run["step_ms_min"] for run in mine),
                "step_ms_most": max(run["step_ms_max"] for run in mine),
                "tokens_per_s": round(rows * 1e3 / step_ms["median"], 1),
            }
        )
    prefill: list[dict[str, Any]] = []
    for tokens in sorted({run["tokens"] for run in runs if run["kind"] == "prefill"}):
        rates = [tokens * 1e3 / run["prefill_ms"] for run in runs if run.get("tokens") == tokens]
        prefill.append({"tokens": tokens, "tokens_per_s": spread(rates)})
    return {"decode": decode, "prefill": prefill}


def summarise_served(decode: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]) -> None:
    """Adds to the decode entries of a forward's summary what the same cases took in a rank's loop.

    `gap_ms` is the served step less the bare one, medians of samples; `cpu_us` the processor time of a step, in the
    loop's thread, in the device's, and by what it is spent on.
    """
    for entry in decode:
        mine = [run for run in runs if (run["rows"], run["context"]) == (entry["rows"], entry["context"])]
        if not mine:
            continue
        entry["served_ms"] = spread([run["step_ms_median"] for run in mine])
        entry["gap_ms"] = round(entry["served_ms"]["median"] - entry["step_ms"]["median"], 4)
        entry["cpu_us"] = {
            "loop": spread([run["loop_us_per_step"] for run in mine])["median"],
            "worker": spread([run["worker_us_per_step"] for run in mine])["median"],
            **mine[0]["parts_us_per_step"],
        }


def summarise_serve(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians and spread over repeats, and ratios of what was measured in the same repeat."""
    counts = sorted({run["sequences"] for run in runs})
    served = {n: [run for run in runs if run["kind"] == "served" and run["sequences"] == n] for n in counts}
    bare = {n: [run for run in runs if run["kind"] == "bare" and run["sequences"] == n] for n in counts}
    ratios: dict[str, dict[str, float]] = {}
    for n in counts:
        pairs = list(zip(served[n], bare[n], strict=True))
        ratios[f"ratio_step_at_{n}"] = spread([run["itl_ms_p50"] / alone["step_ms_p50"] for run, alone in pairs])
        ratios[f"ratio_mean_step_at_{n}"] = spread([run["step_ms"] / alone["step_ms"] for run, alone in pairs])
        ratios[f"ratio_cpu_at_{n}"] = spread(
            [_decode_cpu_ms(run) / alone["cpu_ms_per_step"] for run, alone in pairs if alone["cpu_ms_per_step"] > 0]
            or [0.0]
        )
        shares = [rank["overhead_share"] for run in served[n] for rank in run["ranks"] if _has_share(rank)]
        if shares:
            ratios[f"overhead_share_at_{n}"] = spread(shares)
        if n != counts[0]:
            rates = [
                run["tokens_per_s"] / least["tokens_per_s"]
                for run, least in zip(served[n], served[counts[0]], strict=True)
            ]
            ratios[f"ratio_rate_{n}_to_{counts[0]}"] = spread(rates)
    cases = [{"sequences": n, "bare": _spreads(bare[n]), "served": _spreads(served[n])} for n in counts]
    return {"ratios": ratios, "cases": cases}


def _decode_cpu_ms(run: dict[str, Any]) -> float:
    """Processor time that a decode rank spent on a step, all its threads together; of the busiest rank."""
    spent = [spent for name, spent in run["processes"].items() if name.startswith("decode")]
    return max(float(one["cpu_ms_per_step"]) for one in spent)


def _has_share(rank: dict[str, Any]) -> bool:
    return rank["role"] == "decode" and "overhead_share" in rank


def _spreads(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Every figure of the runs, and of their processes and ranks as `<process>_<figure>`."""
    flat = [
        {
            **{name: value for name, value in run.items() if isinstance(value, int | float)},
            **{
                f"{process}_{name}": value
                for process, spent in run.get("processes", {}).items()
                for name, value in spent.items()
            },
            **{
                f"{rank['role']}{rank['rank']}_{name}": value
                for rank in run.get("ranks", ())
                for name, value in rank.items()
                if name not in ("rank", "role")
            },
        }
        for run in runs
    ]
    names = dict.fromkeys(name for run in flat for name in run if name not in ("repeat", "sequences"))
    return {name: spread([run[name] for run in flat if name in run]) for name in names}
