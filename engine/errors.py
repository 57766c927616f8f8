"""The engine's exception tree; the transport's part of it is re-exported so that one import serves."""

from __future__ import annotations

from transport.errors import (
    EngineError,
    FabricError,
    LocalProtocolError,
    Overflow,
    PeerGone,
    RemoteProtocolError,
    TransferTimeout,
)

__all__ = [
    "ConfigError",
    "DeviceError",
    "EngineError",
    "FabricError",
    "GroupBroken",
    "LocalProtocolError",
    "Overflow",
    "PeerGone",
    "RankLost",
    "RemoteProtocolError",
    "RequestRefused",
    "TransferTimeout",
]


class ConfigError(EngineError):
    """A configuration, checkpoint or command line that can not be used. The message says what to change."""


class DeviceError(EngineError):
    """A device could not be opened, or a step failed on it."""


class RankLost(EngineError):
    """A rank's process or connection is gone."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} is lost: {why}")
        self.rank = rank
        self.why = why


class GroupBroken(EngineError):
    """A step of a group could not be finished because a member did not answer; it runs again in the next membership.

    Attributes:
        membership, step: where; `rank` is who did not answer.
        overdue: True if the wait's limit has passed; False if the member's connection ended, which may be the
            consequence of another's loss.
    """

    def __init__(self, membership: int, step: int, rank: int, why: str, *, overdue: bool) -> None:
        super().__init__(f"step {step} of membership {membership}: rank {rank} {why}")
        self.membership = membership
        self.step = step
        self.rank = rank
        self.why = why
        self.overdue = overdue


class RequestRefused(EngineError):
    """A request that can not be accepted; `code` is a `transport.messages.FailureCode`."""

    def __init__(self, code: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable
