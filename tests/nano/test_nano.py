"""The bundled model's workshop: sizes, data, optimisers, forward, and a run in miniature."""

import dataclasses
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.errors import ConfigError
from engine.model import drafter, hyper, quantise, reference
from engine.model.checkpoint import load_checkpoint
from engine.model.engram import load_tables
from engine.model.layers import linear
from engine.model.shapes import ModelShape, load_shape, shape_from_config
from engine.nano import build, export, plan, train
from engine.nano.build import TOKENIZER
from engine.nano.data import BOS, Corpus, Sampler, prepare, row_starts
from engine.nano.forward import Forward
from engine.nano.loop import Loop
from engine.nano.optim import balance_bias, orthogonalise
from engine.nano.rounding import round_weights
from engine.nano.sinkhorn import check_sinkhorn, sinkhorn

SHIPPED = TOKENIZER.parent
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


@pytest.fixture(scope="module")
def miniature(tokenizer: Tokenizer) -> tuple[dict, ModelShape]:
    config = build.make_config(tokenizer, build.miniature_sizes())
    return config, shape_from_config(config)


def scattered_weights(shape: ModelShape, seed: int) -> dict[str, torch.Tensor]:
    """Initial weights with every constant disturbed, so that no term can hide behind a zero or a one."""
    generator = torch.Generator().manual_seed(seed)
    plans = plan.plan_tensors(shape)
    weights = plan.initial_weights(shape, seed)
    return {
        name: w if plans[name].is_random else w + 0.2 * torch.randn(w.shape, generator=generator)
        for name, w in weights.items()
    }


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small prepared domains, one of works and one of chats."""
    corpus = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(3)
    words = [f"word{i}" for i in range(50)]
    for name, count, size in (("austen", 6, 700), ("chat_code", 80, 40)):
        texts = [BOS + " ".join(rng.choice(words, size)) for _ in range(count)]
        with lzma.open(corpus / f"{name}.txt.xz", "wt", encoding="utf-8", preset=0) as file:
            file.write("\n".join(texts) + "\n")
    folder = tmp_path_factory.mktemp("work")
    prepare(corpus, folder, TOKENIZER, workers=1)
    return folder


def test_the_exported_files_fit_the_budget_with_every_quantised_size_a_multiple_of_32(tokenizer: Tokenizer) -> None:
    shape = shape_from_config(build.make_config(tokenizer))
    estimate = plan.print_budget(shape, TOKENIZER.stat().st_size)
    shipped = sum((SHIPPED / name).stat().st_size for name in export.BUDGETED)
    assert shipped <= plan.FILE_BUDGET
    assert abs(estimate - shipped) < 0.01 * shipped
    for name, tensor in plan.plan_tensors(shape).items():
        if tensor.store in ("fp8", "fp4"):
            assert all(size % 32 == 0 for size in tensor.size[-2:]), name


def test_the_shipped_model_is_the_one_that_the_trainer_makes(tokenizer: Tokenizer) -> None:
    shape = load_shape(SHIPPED)
    assert shape == shape_from_config(build.make_config(tokenizer))
    tables = load_tables(SHIPPED, shape)
    assert tables is not None
    assert torch.equal(tables.token_map, build.make_tables(shape, tokenizer).token_map)


def test_the_configuration_has_every_role_and_a_selection_that_bites(tokenizer: Tokenizer) -> None:
    shape = shape_from_config(build.make_config(tokenizer))
    roles = shape.layer_roles
    assert [role.ratio for role in roles[:2]] == [0, 0]
    assert sum(role.is_kv_source and role.ratio == 2 for role in roles) == 2
    assert sum(role.is_kv_source and role.ratio == 1 for role in roles) == 1
    assert any(role.candidate_source is not None for role in roles)
    assert shape.index_topk < 1024 // 2
    assert 1024 // shape.candidate_block_size > shape.candidate_blocks
    assert shape.index_heads >= 16
    assert shape.max_length >= 8192
    assert shape.drafter is not None
    assert shape.drafter.num_experts != shape.num_experts


def test_the_training_forward_equals_the_reference(miniature: tuple[dict, ModelShape], tokenizer: Tokenizer) -> None:
    _, shape = miniature
    tables = build.make_tables(shape, tokenizer)
    weights = scattered_weights(shape, 1)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, shape.vocab_size, (2, 96), generator=generator)
    forward = Forward(shape, tables, CPU, compiled=False)
    with torch.no_grad():
        for selection in ("dense", "topk"):
            record = reference.Record()
            truth = reference.forward(weights, shape, tokens, engram=tables, selection=selection, record=record)
            ours = forward.trunk(weights, tokens, select=selection == "topk", features=True)
            assert torch.allclose(ours.hidden.view_as(truth.hidden), truth.hidden, atol=1e-4)
            assert torch.allclose(ours.features.view_as(truth.features), truth.features, atol=1e-4)
            assert torch.equal(ours.loads, torch.stack([count.float() for count in record.router_counts]))
        anchors = torch.tensor([[0, 3, 40], [5, 17, 88]])
        blocks = drafter.forward_blocks(weights, shape, truth.features, tokens, anchors, 5)
        draft = forward.draft(weights, truth.features.flatten(0, 1), tokens, anchors)
        assert torch.allclose(draft.logits, blocks.logits.flatten(0, 2), atol=1e-4)
        assert torch.allclose(draft.confidence, blocks.confidence_logit.flatten(), atol=1e-4)


def relative(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours - truth).norm() / truth.norm())


def test_the_training_forward_has_the_references_gradients(
    miniature: tuple[dict, ModelShape], tokenizer: Tokenizer
) -> None:
    _, shape = miniature
    tables = build.make_tables(shape, tokenizer)
    tokens = torch.randint(3, shape.vocab_size, (2, 97), generator=torch.Generator().manual_seed(6))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    ours, theirs = (
        {name: w.requires_grad_() for name, w in scattered_weights(shape, 4).items() if not name.startswith("mtp.")}
        for _ in range(2)
    )
    forward = Forward(shape, tables, CPU, compiled=False)
    forward.nll(ours, forward.trunk(ours, inputs, select=True).hidden, targets).mean().backward()
    truth = reference.forward(theirs, shape, inputs, engram=tables)
    torch.nn.functional.cross_entropy(linear(truth.hidden, theirs["head.weight"]).flatten(0, 1), targets).backward()
    learned = [name for name, w in theirs.items() if w.grad is not None]
    assert {name for name, w in ours.items() if w.grad is not None} == set(learned)
    assert len(learned) > 100
    for name in learned:
        # Float32 sums in another order: single tensors differ by 1e-5 or less.
        assert relative(ours[name].grad, theirs[name].grad) < 1e-3, name


def test_the_indexers_loss_is_its_distance_from_the_references_attention(
    miniature: tuple[dict, ModelShape], tokenizer: Tokenizer
) -> None:
    _, shape = miniature
    # The loss looks at all visible entries, also where the choice is limited to candidates: so none are left out here.
    shape = dataclasses.replace(shape, candidate_blocks=10_000)
    tables = build.make_tables(shape, tokenizer)
    weights = scattered_weights(shape, 7)
    tokens = torch.randint(3, shape.vocab_size, (2, 64), generator=torch.Generator().manual_seed(8))
    record = reference.Record(indexer=True)
    with torch.no_grad():
        reference.forward(weights, shape, tokens, engram=tables, selection="dense", record=record)
        ours = Forward(shape, tables, CPU, compiled=False).trunk(weights, tokens, select=False, index_rows=2)
    truth = {}
    for source in shape.index_sources:
        users = [
            role.index
            for role in shape.layer_roles
            if role.ratio and max(s for s in shape.index_sources if s <= role.index) == source
        ]
        shares = [record.attention_mass[user] for user in users]
        target = torch.stack([share / share.sum(-1, keepdim=True).clamp(min=1e-12) for share in shares]).mean(0)
        logp = record.index_scores[source].log_softmax(-1)
        gap = torch.where(target > 0, target * (target.clamp(min=1e-9).log() - logp), 0.0)
        truth[source] = float(gap.sum(-1).mean())
    assert {layer: float(gap) for layer, gap in ours.index_gap.items()} == pytest.approx(truth, rel=1e-3)
    assert float(ours.index_loss) == pytest.approx(sum(truth.values()), rel=1e-3)


def test_the_indexers_loss_moves_only_the_indexer(miniature: tuple[dict, ModelShape], tokenizer: Tokenizer) -> None:
    _, shape = miniature
    weights = {name: w.requires_grad_() for name, w in scattered_weights(shape, 2).items()}
    forward = Forward(shape, build.make_tables(shape, tokenizer), CPU, compiled=False)
    tokens = torch.randint(3, shape.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))
    out = forward.trunk(weights, tokens, select=False, index_rows=2)
    out.index_loss.backward()
    moved = {name for name, w in weights.items() if w.grad is not None and w.grad.abs().sum() > 0}
    assert moved
    assert all(".indexer." in name for name in moved)
    assert set(out.index_gap) == set(shape.index_sources)


def test_rounding_in_groups_equals_the_files_rounding(miniature: tuple[dict, ModelShape]) -> None:
    _, shape = miniature
    weights = scattered_weights(shape, 3)
    truth = quantise.fake_quantise(weights, shape, plan.narrow_stores(shape))
    ours = round_weights(weights, plan.plan_tensors(shape))
    assert ours.keys() == truth.keys()
    for name, tensor in truth.items():
        assert torch.equal(ours[name], tensor), name


def test_muon_steps_are_orthogonal() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in ((3, 64, 32), (2, 32, 96)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(size, generator=generator)).float())
        assert values.min() > 0.4
        assert values.max() < 1.4


def test_the_router_bias_rises_for_idle_experts_and_falls_for_busy_ones() -> None:
    bias = torch.zeros(4)
    balance_bias(bias, torch.tensor([10.0, 1.0, 1.0, 10.0]), 1e-3)
    assert (bias[[1, 2]] > 0).all()
    assert (bias[[0, 3]] < 0).all()
    assert abs(float(bias.sum())) < 1e-6


def test_batches_depend_on_seed_and_step_alone(work: Path) -> None:
    first, second = (Sampler(Corpus(work, CPU), 64, seed=9) for _ in range(2))
    assert torch.equal(first.batch(4, 6), second.batch(4, 6))
    assert not torch.equal(first.batch(4, 6), first.batch(5, 6))
    assert first.batch(0, 3).shape == (3, 65)


def test_rows_of_chats_begin_with_a_document_and_rows_cover_works() -> None:
    lengths = np.array([30, 50, 20, 200, 40, 60])
    begins = set((np.cumsum(lengths) - lengths).tolist())
    assert set(row_starts(lengths, 64, True).tolist()) <= begins
    assert row_starts(lengths, 64, False).tolist() == [0, 64, 128, 192, 256, 320]


def test_a_run_in_miniature_lowers_the_loss_resumes_and_exports_a_loadable_checkpoint(
    miniature: tuple[dict, ModelShape], tokenizer: Tokenizer, work: Path, tmp_path: Path
) -> None:
    config, shape = miniature
    corpus = Corpus(work, CPU)

    def start() -> Loop:
        tables = build.make_tables(shape, tokenizer)
        return Loop(shape, tables, train.MINIATURE, CPU, tmp_path, compiled=False)

    loop = start()
    sampler = Sampler(corpus, train.MINIATURE.length, 1)
    losses = [float(loop.main_step(sampler, 0.1)["loss"]) for _ in range(6)]
    assert losses[-1] < losses[0] - 0.1
    loop.run_main(corpus, 0.95, 0.0, max_steps=4)
    loop.save()
    loop.save_parts(tmp_path)

    again, parts = start(), start()
    assert again.resume()
    assert parts.resume_parts(tmp_path)
    assert again.counters() == loop.counters() == parts.counters()
    assert all(torch.equal(w, again.weights()[name]) for name, w in loop.weights().items())
    again.run_main(corpus, 1.0, 0.0, max_steps=1)
    again.run_drafter(corpus, 0.0, max_steps=2)
    assert again.draft_progress == 1.0

    out = tmp_path / "out"
    total = export.export(again, config, tokenizer, out)
    assert sorted(path.name for path in out.iterdir()) == sorted((*export.BUDGETED, "config.json"))
    assert total == sum(path.stat().st_size for path in out.iterdir() if path.name != "config.json")
    loaded, stored = load_checkpoint(out)
    tables = load_tables(out, loaded)
    assert tables is not None
    assert torch.equal(tables.token_map, again.forward.tables.token_map)
    rounded = round_weights(again.weights(), plan.plan_tensors(shape))
    assert all(torch.equal(stored[name], w) for name, w in rounded.items())
    bias = stored["layers.0.ffn.gate.bias"]
    assert bias.abs().sum() > 0
    assert torch.equal(bias, stored["layers.0.ffn.gate.bias_vl"])


def test_an_export_above_the_budget_is_refused(
    miniature: tuple[dict, ModelShape], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config, shape = miniature
    loop = Loop(shape, build.make_tables(shape, tokenizer), train.MINIATURE, CPU, tmp_path, compiled=False)
    with pytest.raises(ConfigError, match="budget is 1,000,000"):
        export.export(loop, config, tokenizer, tmp_path, budget=1_000_000)


def test_sinkhorn_on_a_cpu_is_the_models_own() -> None:
    logits = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(2))
    assert torch.equal(sinkhorn(logits, 20, 1e-6), hyper.sinkhorn(logits, 20, 1e-6))
    assert check_sinkhorn(CPU) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_sinkhorn_kernels_equal_plain_torch_in_both_directions() -> None:
    assert check_sinkhorn(torch.device("cuda")) > 0
