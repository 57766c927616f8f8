"""V4.1-Flash as the bench of a step knows it: its shape, what of it is cut, and tables that a machine has room for."""

from __future__ import annotations

import pytest

from engine.bench.cases import cut_layers, load_model_config, shrink_memory
from engine.errors import ConfigError
from engine.model.engram import hash_primes
from engine.model.shapes import shape_from_config


def test_v41_flash_is_known_by_name() -> None:
    shape = shape_from_config(load_model_config("v4.1-flash"))
    ratios = [role.ratio for role in shape.layer_roles]
    assert (ratios.count(0), ratios.count(2), ratios.count(1)) == (2, 18, 20)
    assert shape.kv_sources == (2, 8, 14, 20)
    assert shape.index_sources == (2, 8, 14, 20, 24, 28, 32, 36)
    assert [role.index for role in shape.layer_roles if role.candidate_source is not None] == [24, 28, 32, 36]
    # What the vendor states of it: 890 bytes a token in its own formats.
    assert shape.long_term_bytes(2000, entry_bytes=288, key_bytes=68) == 890 * 2000
    assert shape.engram is not None
    assert all(
        0 <= rows - total < 1000
        for rows, total in zip(shape.engram.num_rows, hash_primes(shape.engram).sum(1), strict=True)
    )


def test_its_first_layers_keep_their_roles() -> None:
    whole = load_model_config("v4.1-flash")
    roles = shape_from_config(whole).layer_roles
    for layers in (1, 2, 3, 15, 21, 25):
        cut = shape_from_config(cut_layers(whole, layers))
        assert cut.layer_roles == roles[:layers] and cut.drafter is None
        assert cut.candidate_blocks == (2048 if layers > 20 else 0)
    with pytest.raises(ConfigError, match="--layers must be at most the model's, found 41"):
        cut_layers(whole, 41)


def test_tables_that_no_machine_has_room_for_have_a_share_of_their_lines() -> None:
    small = shape_from_config(shrink_memory(load_model_config("v4.1-flash"))).engram
    assert small is not None and small.rows_per_token == 24
    for rows, total in zip(small.num_rows, hash_primes(small).sum(1), strict=True):
        assert total <= rows < 1 << 23
    for name in ("v4-flash", "tests/oracle/v41-tiny"):
        assert shrink_memory(load_model_config(name)) == load_model_config(name)
