"""The n-gram memory: folding, hash constants, rows and the reach of the look-back."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.errors import ConfigError
from engine.model.engram import (
    EngramTables,
    engram_tables,
    fold_tokenizer,
    fold_vocabulary,
    folded_context,
    hash_multipliers,
    hash_primes,
    table_rows,
)
from engine.model.shapes import EngramShape

REAL = EngramShape(
    layers=(1, 14),
    num_rows=(384_006_168, 384_016_682),
    max_ngram=4,
    num_heads=8,
    head_dim=256,
    bucket_base=16_000_000,
    pad_token_id=2,
    num_classes=99_092,
)


def vocabulary(engram: dict[str, torch.Tensor]) -> list[str]:
    text, offsets = bytes(engram["vocab_utf8"].tolist()), engram["vocab_offsets"].tolist()
    return [text[start:end].decode() for start, end in pairwise(offsets)]


@pytest.mark.parametrize("name", ["v41-tiny", "v41-tiny-quant"])
def test_the_golden_vocabulary_folds_to_the_golden_classes(golden, name):
    engram = golden(name).engram
    assert fold_vocabulary(vocabulary(engram)).tolist() == engram["token_map"].tolist()


@pytest.mark.parametrize("name", ["v41-tiny", "v41-tiny-quant"])
def test_the_golden_constants_follow_from_the_configuration(golden, name):
    model = golden(name)
    for field in ("multipliers", "primes", "offsets"):
        assert torch.equal(getattr(model.tables, field), model.engram[field])
    assert model.tables.pad_folded == model.engram["pad_folded"].item()


def test_the_real_models_constants_and_rows_are_reproduced(oracle):
    stored = load_file(oracle / "engram-real" / "engram.safetensors")
    primes = hash_primes(REAL)
    multipliers = np.stack([hash_multipliers(layer, 4, REAL.num_classes) for layer in REAL.layers])
    assert primes.tolist() == stored["primes"].tolist()
    assert multipliers.tolist() == stored["multipliers"].tolist()
    assert tuple(primes.sum(1).tolist()) == REAL.num_rows
    tables = EngramTables(
        layers=REAL.layers,
        token_map=torch.arange(REAL.num_classes),
        pad_folded=stored["pad_folded"].item(),
        multipliers=torch.from_numpy(multipliers),
        primes=torch.from_numpy(primes),
        offsets=torch.from_numpy(np.cumsum(primes, 1) - primes),
    )
    context = folded_context(tables, stored["folded"].long()[None])
    rows = torch.stack([table_rows(tables, layer, context)[0] for layer in REAL.layers], 1)
    assert torch.equal(rows, stored["rows"])


def test_folding_merges_case_accents_and_white_space_and_keeps_what_has_no_text():
    strings = ["Cafe", "café", "ﬁn", "FIN", " ", "\t\n", " a", "a ", "A\r\nb", "a b", "\u0301", "ΟΔΟΣ", "οδοσ"]
    assert fold_vocabulary(strings).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 6]


def test_broken_byte_sequences_are_told_apart_by_their_spelling():
    assert fold_vocabulary(["\ufffd", "\ufffd", "A\ufffd", "a\ufffd"]).tolist() == [0, 0, 1, 2]
    assert fold_vocabulary(["\ufffd", "\ufffd"], ["x", "y"]).tolist() == [0, 1]


def test_a_chunk_with_its_earlier_ids_gives_the_rows_of_the_whole(tiny):
    ids = tiny.cases["len31.ids"].long()[None]
    whole = folded_context(tiny.tables, ids)
    for cut in (1, 2, 3, 4, 17):
        earlier = torch.cat((torch.full((1, 3), -1), ids[:, :cut]), 1)[:, -3:]
        assert torch.equal(folded_context(tiny.tables, ids[:, cut:], earlier), whole[:, cut:])


def test_nothing_is_read_across_a_position_without_text(tiny):
    pad = tiny.tables.pad_folded
    fold = tiny.tables.token_map.tolist()
    context = folded_context(tiny.tables, torch.tensor([[10, 11, -1, 12, 13, 14]]))[0].tolist()
    assert context[2] == [pad] * 4
    assert context[3] == [fold[12], pad, pad, pad]
    assert context[5] == [fold[14], fold[13], fold[12], pad]


def test_rows_stay_inside_their_own_bucket_range(tiny):
    random = torch.Generator().manual_seed(5)
    context = folded_context(tiny.tables, torch.randint(0, 288, (4, 200), generator=random))
    for slot, layer in enumerate(tiny.tables.layers):
        rows = table_rows(tiny.tables, layer, context)
        assert (rows >= tiny.tables.offsets[slot]).all()
        assert (rows < tiny.tables.offsets[slot] + tiny.tables.primes[slot]).all()


def test_a_vocabulary_of_the_wrong_size_or_class_count_is_refused(tiny):
    token_map = tiny.engram["token_map"]
    with pytest.raises(ConfigError, match=r"vocab_size"):
        engram_tables(tiny.shape, token_map[:-1])
    with pytest.raises(ConfigError, match="engram_compressed_vocab_size is 190, but the vocabulary folds to 191"):
        engram_tables(tiny.shape, torch.cat((token_map[:-1], torch.tensor([190], dtype=token_map.dtype))))


def test_a_table_too_small_for_its_primes_is_refused(tiny):
    small = replace(tiny.shape, engram=replace(tiny.shape.engram, num_rows=(659, 864)))
    with pytest.raises(ConfigError, match="layer 1 must be at least 660, found 659"):
        engram_tables(small, tiny.engram["token_map"])


def test_a_tokenizer_file_folds_by_its_decoded_texts(tmp_path):
    from tokenizers import Tokenizer, models

    words = {"Ab": 0, "ab": 1, "b": 2, " B": 3}
    Tokenizer(models.WordLevel(words, unk_token="b")).save(str(tmp_path / "tokenizer.json"))
    assert fold_tokenizer(tmp_path / "tokenizer.json", 6).tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(ConfigError, match="tokenizer"):
        fold_tokenizer(tmp_path / "none.json", 6)
