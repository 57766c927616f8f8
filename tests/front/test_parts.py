"""Parts of a front by themselves: keys, counts, reasons, what its process loads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from engine.errors import ConfigError
from engine.front.counts import FrontCounts, make_counts_file
from engine.front.guard import Guard, read_guard
from engine.keys import parse_address
from tests.cli.test_commands import engine


def test_keys_are_read_from_lines_and_only_their_digests_kept(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\n\n  one-key  \nother\n")
    guard = read_guard(str(file))
    assert guard.allows(b"Bearer one-key") and guard.allows(b"bearer other")
    for wrong in (None, b"", b"Bearer ", b"Bearer # ours", b"Bearer one-key2", b"Basic other", b"other"):
        assert not guard.allows(wrong)
    assert "one-key" not in str(vars(guard))
    assert Guard([]).allows(None)


@pytest.mark.parametrize("content", ["", "# none\n", "two words\n", "\N{SNOWMAN}\n", "k" * 600])
def test_a_file_without_good_keys_is_refused_without_showing_them(content, tmp_path):
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"http\.keys_file") as caught:
        read_guard(str(file))
    assert "two words" not in str(caught.value) and "kkk" not in str(caught.value)


def test_an_engine_without_its_keys_does_not_begin(tmp_path):
    wanted = ("--http", "127.0.0.1:0", "--set", f"http.keys_file={tmp_path}/nowhere")
    done = engine("up", *wanted, "--dir", str(tmp_path / "run"))
    assert done.returncode == 2 and "http.keys_file" in done.stderr and "front.start" not in done.stderr


def test_counts_of_all_fronts_are_one_and_outlive_each():
    descriptor = make_counts_file(2)
    try:
        first, second = FrontCounts(descriptor, 0), FrontCounts(descriptor, 1)
        first.add_answer("chat", 200)
        second.add_answer("chat", 200)
        second.add_answer("chat", 418)
        second.put("open_requests", 5)
        assert first.total("chat 200") == 2 and first.total("chat 500") == 1 and first.total("open_requests") == 5
        second.close()
        again = FrontCounts(descriptor, 1)
        assert again.total("chat 200") == 2, "a count never goes back"
        assert again.total("open_requests") == 0, "what was open is not"
        assert 'engine:http_requests_total{code="200",route="chat"} 2.0' in again.metrics_text()
        again.close()
        first.close()
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("wrong", ["", "host", "h:", ":80", "h:1:2", "h:65536", "::1", True, "h:-1"])
def test_addresses_that_are_none(wrong):
    with pytest.raises(ConfigError, match="is not an address"):
        parse_address(wrong)


def test_a_front_loads_neither_the_heads_loop_nor_a_devices_libraries():
    code = "import sys, engine.front.process; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"trio", "torch", "nixl", "nixl_cu13", "safetensors", "textual"} & set(done.stdout.split())
