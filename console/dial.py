"""Where the head is, and how it is reached: a unix socket of this host, or the other end of `ssh HOST engine relay`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shlex
import urllib.parse

from transport.errors import PeerGone
from transport.link import FrameLink
from transport.messages import OPERATOR_FROM_HEAD

DIAL_S = 5.0
SSH_DIAL_S = 30.0
"""The first answer may have to cross the world, after a key exchange."""
END_S = 2.0
"""For ssh to end when its stdin has; then it is killed."""
RELAY_SAYS = "engine relay: "
"""Before the name of the socket that the relay took."""
RELAY_S = 2.0
STALL_S = 2.0
OUT_LIMIT = 1 << 20
READER_LIMIT = 1 << 20
STDERR_LIMIT = 4096
"""Characters that are kept of what ssh says."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Where the head is.

    Attributes:
        kind: `unix` or `ssh`.
        place: a runtime directory or one of its sockets; or a host.
        directory: the runtime directory, "" where it is not known.
        read_only: never use the socket that takes changes.
    """

    kind: str
    place: str
    directory: str = ""
    read_only: bool = False

    @property
    def address(self) -> str:
        """As a person would write it."""
        return f"ssh://{self.place}" if self.kind == "ssh" else f"unix:{self.place}"


def parse_target(text: str, *, read_only: bool) -> Target:
    """`unix:PATH` (a runtime directory or a socket in it) or `ssh://[user@]host[:port][?dir=PATH]`.

    Raises:
        ValueError: it is neither.
    """
    if text.startswith("unix:") and len(text) > len("unix:"):
        path = os.path.abspath(os.path.expanduser(text[5:]))
        return Target("unix", path, os.path.dirname(path) if path.endswith(".sock") else path, read_only)
    if text.startswith("ssh://"):
        url = urllib.parse.urlsplit(text)
        with contextlib.suppress(ValueError):
            fields = urllib.parse.parse_qs(url.query, strict_parsing=True) if url.query else {}
            # A host that begins with a dash would be an option of ssh.
            if url.hostname and not url.netloc.startswith("-") and url.path in ("", "/") and set(fields) <= {"dir"}:
                return Target("ssh", url.netloc, fields.get("dir", [""])[0], read_only)
    raise ValueError(f"--connect {text}: neither unix:PATH nor ssh://HOST[?dir=PATH]")


def choose_socket(target: Target) -> tuple[str, bool]:
    """The socket of a unix target and whether it takes changes: admin.sock where the file's permissions let us."""
    if target.place.endswith(".sock") and os.path.basename(target.place) not in ("admin.sock", "read.sock"):
        return target.place, not target.read_only
    directory = os.path.dirname(target.place) if target.place.endswith(".sock") else target.place
    admin = os.path.join(directory, "admin.sock")
    wants_admin = not target.read_only and os.path.basename(target.place) != "read.sock"
    if wants_admin and os.access(admin, os.W_OK):
        return admin, True
    return os.path.join(directory, "read.sock"), False


class Dialled:
    """A link that is up, and the process behind it if there is one."""

    def __init__(self, link: FrameLink, is_admin: bool, process: asyncio.subprocess.Process | None = None) -> None:
        self.link = link
        self._is_admin = is_admin
        self._process = process
        self._said = ""
        self._news = asyncio.Event()
        self._listener = asyncio.create_task(self._listen(), name="ssh stderr") if process else None

    async def explain(self, why: str) -> str:
        """`why` of a link that has ended, with the last line of ssh or of the relay that says what is wrong."""
        if self._listener is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELAY_S):
                    await asyncio.shield(self._listener)
        lines = [text.strip() for text in self._said.splitlines()]
        told = [text for text in lines if text and not text.startswith((RELAY_SAYS, "start one with"))]
        return f"{why} ({told[-1]})" if told else why

    async def is_admin(self) -> bool:
        """Whether the link takes changes. Behind ssh the relay says so on stderr, at about the time of its first
        answer; one that does not say it only reads."""
        if self._process is None or not self._is_admin:
            return self._is_admin
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELAY_S):
                while RELAY_SAYS not in self._said:
                    self._news.clear()
                    await self._news.wait()
        return f"{RELAY_SAYS}admin.sock" in self._said

    async def _listen(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        while text := await self._process.stderr.read(STDERR_LIMIT):
            self._said = (self._said + text.decode(errors="replace"))[-STDERR_LIMIT:]
            self._news.set()

    async def aclose(self) -> None:
        await self.link.aclose()
        process = self._process
        if process is None:
            return
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)


async def dial(target: Target) -> Dialled:
    """Connects.

    Raises:
        PeerGone: nobody listens there, or it may not be opened; ssh could not be started.
    """
    if target.kind == "ssh":
        return await _dial_ssh(target)
    path, is_admin = choose_socket(target)
    try:
        async with asyncio.timeout(DIAL_S):
            reader, writer = await asyncio.open_unix_connection(path, limit=READER_LIMIT)
    except TimeoutError:
        raise PeerGone(f"{target.address}: not accepted within {DIAL_S:g} s") from None
    except OSError as error:
        raise PeerGone(f"{target.address}: {os.strerror(error.errno or 0)}") from error
    return Dialled(_link(reader, writer, "the head"), is_admin)


def ssh_command(target: Target) -> list[str]:
    """What is run for an ssh target. It can not ask anything: the terminal is the console's."""
    port = urllib.parse.urlsplit(target.address).port
    host = target.place.rpartition(":")[0] if port is not None else target.place
    words = ["engine", "relay"]
    if target.directory:
        words += ["--dir", shlex.quote(target.directory)]
    if target.read_only:
        words.append("--read-only")
    options = ["-T", "-o", "BatchMode=yes", "-e", "none", *(["-p", str(port)] if port is not None else [])]
    return ["ssh", *options, "--", host, *words]


async def _dial_ssh(target: Target) -> Dialled:
    command = ssh_command(target)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=READER_LIMIT,
            start_new_session=True,  # ctrl+c of this terminal is not for it
        )
    except OSError as error:
        raise PeerGone(f"ssh: {os.strerror(error.errno or 0)}") from error
    assert process.stdout is not None and process.stdin is not None
    return Dialled(_link(process.stdout, process.stdin, target.address), not target.read_only, process)


def _link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> FrameLink:
    return FrameLink(reader, writer, accepts=OPERATOR_FROM_HEAD, out_limit_bytes=OUT_LIMIT, stall_s=STALL_S, name=name)
