"""Envelopes: what is out is nobody else's, and steps of any size find room in one."""

from __future__ import annotations

import numpy as np
import torch

from engine.model.envelope import Envelopes


def test_an_envelope_that_is_out_is_not_taken_again() -> None:
    envelopes = Envelopes(torch.device("cpu"))
    one, other = envelopes.take(), envelopes.take()
    assert one is not other
    envelopes.give(one)
    assert envelopes.take() is one
    third = envelopes.take()
    assert third is not one and third is not other


def test_a_step_s_sheets_are_apart_and_have_no_gaps() -> None:
    envelope = Envelopes(torch.device("cpu")).take()
    for lines, columns in ((5, 4), (5, 1), (9, 64), (5, 4), (70, 100), (5, 4)):
        told, brought = envelope.sheet("told", lines, columns), envelope.sheet("brought", columns, 4)
        table = envelope.write_table(np.full((columns, 9), 3))
        assert told.tensor.is_contiguous() and tuple(told.tensor.shape) == (lines, columns)
        assert told.address == told.tensor.data_ptr() and told.num_bytes == 4 * lines * columns
        told.words[:] = 1
        brought.words[:] = 2
        assert (told.tensor == 1).all() and (table == 3).all()
        assert (envelope.sheet("brought", columns, 4).tensor == 2).all()


def test_tables_grow() -> None:
    envelope = Envelopes(torch.device("cpu")).take()
    generator = np.random.default_rng(3)
    for shape in ((2, 3), (1, 1), (4, 9), (64, 5), (2, 3), (0, 0)):
        table = generator.integers(0, 1 << 30, shape)
        written = envelope.write_table(table[:, :: 2 if shape[1] > 4 else 1])
        assert written.is_contiguous() and (written.numpy() == table[:, :: 2 if shape[1] > 4 else 1]).all()
