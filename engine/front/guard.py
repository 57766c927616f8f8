"""Guard: clients' keys. They are kept as digests, compared in constant time, and never logged."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from engine.errors import ConfigError

MAX_KEYS = 1024
MAX_KEY_BYTES = 512


class Guard:
    """Who may ask. Without keys, everybody who reaches the port.

    Args:
        keys: the keys themselves; only their digests are kept.
    """

    def __init__(self, keys: list[bytes]) -> None:
        self._digests = [hashlib.sha256(key).digest() for key in keys]

    @property
    def is_open(self) -> bool:
        return not self._digests

    def allows(self, authorization: bytes | None) -> bool:
        """Whether a header has one of the keys. Takes as long whichever it is."""
        if self.is_open:
            return True
        scheme, _, key = (authorization or b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found and scheme.lower() == b"bearer"


def read_guard(path: str) -> Guard:
    """Reads a file with one key a line; empty lines and lines that begin with `#` are none.

    Raises:
        ConfigError: it can not be read, or has no key, or one that no header could carry.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"http.keys_file: {path}: {error.strerror}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith(b"#")]
    if not 1 <= len(keys) <= MAX_KEYS:
        raise ConfigError(f"http.keys_file: {path} has {len(keys)} keys, not 1 to {MAX_KEYS}")
    for number, key in enumerate(keys, 1):
        if len(key) > MAX_KEY_BYTES or not all(0x21 <= byte <= 0x7E for byte in key):
            raise ConfigError(
                f"http.keys_file: {path}: key {number} must have 1 to {MAX_KEY_BYTES} printable characters, no space"
            )
    return Guard(keys)
