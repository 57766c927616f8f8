"""What can go wrong on a link. The engine's own tree (`engine.errors`) grows from the same base."""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors that the project raises on purpose; the message names the thing and the limit."""


class LocalProtocolError(EngineError):
    """This side broke the protocol: a bug of ours, never the peer's."""


class RemoteProtocolError(EngineError):
    """The peer sent something that the protocol does not allow; the connection must be dropped."""


class PeerGone(EngineError):
    """The other end of a connection went away: end of stream, reset, or it does not read."""


class Overflow(EngineError):
    """A bounded queue is full. `limit` is in the unit that `what` names."""

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(f"{what} is full (limit {limit})")
        self.what = what
        self.limit = limit


class FabricError(EngineError):
    """A bulk transfer failed or could not be started."""


class TransferTimeout(FabricError):
    """A transfer did not end in time. It was not stopped: the memory on both sides stays tainted."""
