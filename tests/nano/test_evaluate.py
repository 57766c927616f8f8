"""Bits per byte of held-out text: the figure itself, and the command that measures the shipped model again."""

import json
import lzma
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from engine.model.checkpoint import load_checkpoint
from engine.model.engram import load_tables
from engine.nano.build import TOKENIZER
from engine.nano.data import BOS
from engine.nano.evaluate import bits_per_byte, evaluate, main
from engine.nano.forward import Forward
from engine.nano.heldout import held_out_rows, token_bytes

SHIPPED = TOKENIZER.parent
PLAIN = "In the beginning God created the heavens and the earth. The earth was formless and empty. "
CHAT = (
    f"{BOS}<｜User｜>What is a cat?<｜Assistant｜></think>A cat is a small domesticated animal that is often kept as a "
    "pet.<｜end▁of▁sentence｜>"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


@pytest.fixture(scope="module")
def validation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("validation") / "validation.jsonl.xz"
    rows = [{"domain": "plain", "text": BOS + PLAIN}, {"domain": "chat", "text": CHAT}]
    with lzma.open(path, "wt", encoding="utf-8", preset=0) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def test_held_out_rows_predict_every_token_once(tokenizer: Tokenizer) -> None:
    text = BOS + "Every token but the first is predicted exactly once. " * 9
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    rows = held_out_rows([text], tokenizer, 16, 2)
    assert int((rows.counts - 1).sum()) == len(ids) - 1
    targets = [int(t) for row, n in zip(rows.tokens, rows.counts.tolist(), strict=True) for t in row[1:n]]
    assert targets == ids[1:]


@pytest.mark.parametrize(
    "text", ["plain words\n", "na\u00efve \u2603 \U0001f600 \u65e5\u672c", "a<\uff5cUser\uff5c>b", ""]
)
def test_bytes_of_tokens_add_up_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(BOS + text, add_special_tokens=False).ids
    assert int(token_bytes(tokenizer)[ids].sum()) == len(text.encode())
    assert int(held_out_rows([BOS + text], tokenizer, 4, 2).num_bytes.sum()) == len(text.encode())


def test_a_model_that_knows_nothing_needs_the_vocabularys_bits_for_each_token(tokenizer: Tokenizer) -> None:
    texts = [BOS + "one two three", BOS + "a longer text of more than one row " * 4, BOS]
    rows = held_out_rows(texts, tokenizer, 16, 2)
    vocab = tokenizer.get_vocab_size()
    expected = int((rows.counts - 1).sum()) * math.log2(vocab) / int(rows.num_bytes.sum())
    for batch in (1, 3, 100):
        for multiple in (1, 8):
            bits = bits_per_byte(
                lambda tokens: torch.zeros(*tokens.shape, 4), torch.ones(vocab, 4), rows, batch, multiple
            )
            assert bits == pytest.approx(expected, rel=1e-5)


def test_the_shipped_model_reads_english_and_chat(
    validation: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = evaluate(SHIPPED, validation, selection="topk", domains=None, max_rows=None)
    assert capsys.readouterr().err.count("bits per byte") == 2
    # Far below a model that has learned nothing (about 3 bits and more), for text that it has seen the like of.
    assert 0.1 < figures["plain"] < 1.5
    assert 0.1 < figures["chat"] < 1.0
    # The training forward, on whole windows, measures the same.
    shape, weights = load_checkpoint(SHIPPED)
    forward = Forward(shape, load_tables(SHIPPED, shape), torch.device("cpu"), compiled=False)

    def hidden_of(tokens: torch.Tensor) -> torch.Tensor:
        return forward.trunk(weights, tokens, select=True).hidden.view(*tokens.shape, -1)

    rows = held_out_rows([CHAT], tokenizer, 1024, shape.pad_token_id)
    assert bits_per_byte(hidden_of, weights["head.weight"], rows, 4, shape.window) == pytest.approx(
        figures["chat"], abs=1e-4
    )


def test_the_command_tells_a_wrong_record_from_a_right_one(
    validation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--validation", str(validation), "--domains", "chat"]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    right = report["bits_per_byte"]
    assert report["selection"] == "trained" and list(right) == ["chat"]
    record = tmp_path / "record.json"
    for shift, code in ((0.0, 0), (0.05, 1)):
        recorded = {"trained": {"chat": right["chat"] + shift, "elsewhere": 1.0}}
        record.write_text(json.dumps({"results": {"held_out_bits_per_byte": recorded}}))
        assert main([*command, "--against", str(record)]) == code
        told = json.loads(capsys.readouterr().out)["difference"]
        assert told == pytest.approx({"chat": -shift}, abs=1e-6)
    assert main(["--validation", str(validation), "--domains", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, "--rows", "1", "--against", str(record)])
