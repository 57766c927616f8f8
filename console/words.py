"""How the console says figures: durations, bytes, counts, ages, shares, ranks. Short enough for a column."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import datetime, tzinfo

NONE = "–"
"""What is not known, or does not apply."""

# What a terminal would obey instead of showing it: controls, marks of direction, separators, what has no width.
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_RATES = ("B/s", "kB/s", "MB/s", "GB/s", "TB/s")
_SHORTS = ("", "k", "M", "G", "T")


def safe(text: str) -> str:
    """`text` of whoever wrote it, with a mark for each character that a terminal would not show but obey."""
    return _UNSEEN.sub("\ufffd", text)


def is_known(value: float | None) -> bool:
    """Whether it is a number that can be said."""
    return value is not None and math.isfinite(value)


def three(value: float) -> str:
    """Three figures while it is below a thousand: `0.41`, `8.91`, `41.2`, `412`; then `5,812`."""
    for bound, digits in ((9.995, 2), (99.95, 1)):
        if abs(value) < bound:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"


def us(value: float | None) -> str:
    """A duration in microseconds: `412 us`, `8.91 ms`, `1.22 s`, `412 s`, `20 min`."""
    if value is None or not math.isfinite(value):
        return NONE
    if abs(value) < 999.5:
        return f"{value:.0f} us"
    if abs(value) < 999_500:
        return f"{three(value / 1e3)} ms"
    if abs(value) < 999.5e6:
        return f"{three(value / 1e6)} s"
    return age(value / 1e6)


def ms(value_us: float | None, digits: int = 1) -> str:
    """Microseconds as milliseconds without a unit, for columns that name it: `8.9`."""
    if value_us is None or not math.isfinite(value_us):
        return NONE
    return f"{value_us / 1e3:,.{digits}f}"


def us_per_step(value: float | None) -> str:
    """`610 us/step`, `1.24 ms/step`."""
    return NONE if value is None or not math.isfinite(value) else f"{us(value)}/step"


def size(count: float | None) -> str:
    """Bytes that are held or moved: `812 B`, `64.0 MiB`, `3.12 GiB`."""
    return NONE if count is None or not math.isfinite(count) else _scaled(count, 1024.0, _SIZES)


def rate(bytes_per_s: float | None) -> str:
    """Bytes per second, decimal as links are sold: `0 B/s`, `212 MB/s`, `6.80 GB/s`."""
    return NONE if bytes_per_s is None or not math.isfinite(bytes_per_s) else _scaled(bytes_per_s, 1000.0, _RATES)


def count(value: float | None) -> str:
    """`5,812`."""
    return NONE if value is None or not math.isfinite(value) else f"{value:,.0f}"


def short(value: float | None) -> str:
    """A count in at most five places: `9,999`, `41.2k`, `131k`, `1.20M`."""
    if value is None or not math.isfinite(value):
        return NONE
    if abs(value) < 9_999.5:
        return f"{value:,.0f}"
    scaled, unit = _scale(value, 1000.0, _SHORTS)
    return f"{three(scaled)}{unit}"


def share(part: float | None, digits: int = 0) -> str:
    """0.781 as `78%`."""
    return NONE if part is None or not math.isfinite(part) else f"{100 * part:.{digits}f}%"


def ratio(value: float | None) -> str:
    """`1.83`."""
    return NONE if value is None or not math.isfinite(value) else f"{value:.2f}"


def age(seconds: float | None) -> str:
    """`0.2 s`, `41 s`, `12 min`, `5 h`, `3 d`. Rounded down: nothing is older than it is."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{math.floor(seconds * 10) / 10:.1f} s"
    if seconds < 120:
        return f"{int(seconds)} s"
    if seconds < 120 * 60:
        return f"{int(seconds / 60)} min"
    if seconds < 48 * 3600:
        return f"{int(seconds / 3600)} h"
    return f"{int(seconds / 86400):,} d"


def clock(at_ms: float, zone: tzinfo | None = None) -> str:
    """Milliseconds since 1970 as `14:02:31`; in the machine's zone if none is given."""
    return datetime.fromtimestamp(at_ms / 1e3, zone).strftime("%H:%M:%S")


def number_width(ranks: Iterable[int]) -> int:
    """Places of the largest rank number; two at least."""
    return max(2, len(str(max(ranks, default=0))))


def rank_name(role: str, rank: int, width: int = 2) -> str:
    """`d17`, `p00`: the role's first letter and the number, as wide as the largest one of the cluster."""
    return f"{role[:1]}{rank:0{width}d}"


def plural(number: int, one: str, many: str = "") -> str:
    """`1 rank`, `12 ranks`, `2 replicas`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _scale(value: float, base: float, units: tuple[str, ...]) -> tuple[float, str]:
    for unit in units:
        # 999.5 would be said as 1,000: that is the next unit's 1.00.
        if abs(value) < (999.5 if base == 1000 else base - 0.5) or unit == units[-1]:
            return value, unit
        value /= base
    raise AssertionError("the last unit takes everything")


def _scaled(value: float, base: float, units: tuple[str, ...]) -> str:
    scaled, unit = _scale(value, base, units)
    return f"{scaled:.0f} {unit}" if unit == units[0] else f"{three(scaled)} {unit}"
