"""Unix sockets: permissions, stale files, live owners."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
import trio

from transport.errors import EngineError, PeerGone
from transport.unix import open_unix_listener, open_unix_stream


async def test_streams_cross_and_the_file_goes_with_the_listener(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    async with await open_unix_listener(path) as listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with await open_unix_stream(path) as client, await listener.accept() as server:
            await client.send_all(b"hello")
            assert await server.receive_some() == b"hello"
    assert not path.exists()
    assert os.listdir(tmp_path) == []


async def test_the_mode_given_is_the_files(tmp_path: Path) -> None:
    async with await open_unix_listener(tmp_path / "a.sock", 0o660):
        assert stat.S_IMODE((tmp_path / "a.sock").stat().st_mode) == 0o660


async def test_a_dead_listeners_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(path))
        dead.listen()
    with pytest.raises(PeerGone, match=r"a\.sock: Connection refused"):
        await open_unix_stream(path)
    async with await open_unix_listener(path), await open_unix_stream(path):
        pass


async def test_a_live_listener_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    async with await open_unix_listener(path) as listener:
        with pytest.raises(EngineError, match=r"a\.sock: address in use by a live process"):
            await open_unix_listener(path)
        async with await open_unix_stream(path), await listener.accept():
            pass


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("x")
    with pytest.raises(EngineError, match="no socket"):
        await open_unix_listener(path)
    assert path.read_text() == "x"


async def test_closing_leaves_a_successors_file(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    first = await open_unix_listener(path)
    path.unlink()
    async with await open_unix_listener(path):
        await first.aclose()
        await first.aclose()
        assert path.exists()


async def test_of_many_starters_on_a_stale_file_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(path))
    won, lost = [], []

    async def start() -> None:
        try:
            won.append(await open_unix_listener(path))
        except EngineError:
            lost.append(1)

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(start)
    assert (len(won), len(lost)) == (1, 9)
    await won[0].aclose()


async def test_errors_name_the_path_and_the_limit(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"socket path of \d+ bytes \(limit 107\)"):
        await open_unix_listener(tmp_path / ("x" * 120))
    with pytest.raises(PeerGone, match="none: No such file"):
        await open_unix_stream(tmp_path / "none")
    with pytest.raises(OSError, match="No such file"):
        await open_unix_listener(tmp_path / "no" / "where")
