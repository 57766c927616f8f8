"""The training loop: steps of the main model, then steps of the drafter, each against the wall clock.

Owns the order of a step, the phases and the state on disk. Progress runs from 0 to 1 and is a function of the time
spent, so that a run always ends with a finished decay, whatever the throughput; a later call goes on from the stored
progress.

Phases of the main model by progress: dense attention; the indexer learns from INDEX_FROM on; its choice is used from
SELECT_FROM on; long rows from LONG_FROM on; rounding to the file's formats in the forward from ROUND_FROM on.
The drafter learns afterwards, on the frozen and rounded main model, so its loss cannot harm it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.model.engram import EngramTables
from engine.model.shapes import ModelShape
from engine.nano.data import Corpus, Sampler
from engine.nano.forward import Forward
from engine.nano.journal import Journal
from engine.nano.optim import balance_bias
from engine.nano.part import Part, Recipe, learning_rate
from engine.nano.plan import initial_weights, plan_tensors
from engine.nano.rounding import round_weights

INDEX_FROM = 0.04
SELECT_FROM = 0.40
LONG_FROM = 0.87
ROUND_FROM = 0.88
DRAFT_ROUND_FROM = 0.70
PART_BYTES = 15 * 1024 * 1024


class Loop:
    """A run on one device.

    Args:
        shape: the model.
        tables: its n-gram hash constants.
        recipe: numbers of the run.
        device: where it runs.
        work: folder for the state and the journal.
        compiled: compile regions of the forward.
    """

    def __init__(
        self,
        shape: ModelShape,
        tables: EngramTables,
        recipe: Recipe,
        device: torch.device,
        work: Path,
        *,
        compiled: bool,
    ) -> None:
        self.shape, self.recipe, self.device, self.work = shape, recipe, device, work
        self.low = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.forward = Forward(shape, tables, device, compiled=compiled, stream_dtype=self.low)
        plans = plan_tensors(shape)
        weights = {name: w.to(device) for name, w in initial_weights(shape, recipe.seed).items()}
        self.plans = plans
        self.main = self._part(weights, drafter=False)
        self.drafter = self._part(weights, drafter=True)
        self.progress = 0.0
        self.draft_progress = 0.0
        self.steps = 0
        self.draft_steps = 0
        self.tokens = 0
        self.skipped = 0
        self.seconds = 0.0

    def _part(self, weights: Mapping[str, Tensor], drafter: bool) -> Part:
        names = [name for name in self.plans if name.startswith("mtp.") == drafter]
        masters = {name: weights[name] for name in names}
        return Part(masters, {name: self.plans[name] for name in names}, self.recipe, self.shape)

    def compute(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors for the forward: matrices and tables in the low precision, the rest in float32."""
        return {
            name: leaf.to(self.low)
            if self.plans[name].kind in ("matrix", "table", "index") and not name.endswith("gate.weight")
            else leaf
            for name, leaf in leaves.items()
        }

    # --- main model ---------------------------------------------------------------------------------------------

    def backward(self, leaves: Mapping[str, Tensor], rows: Tensor, *, select: bool, index: bool) -> dict[str, Tensor]:
        """Gradients of one step, in as many forwards as memory asks for; returns figures and `loads`."""
        length = rows.shape[1] - 1
        per_forward = max(1, self.recipe.micro_tokens // length)
        parts = rows.split(per_forward)
        figures: dict[str, Tensor] = {}
        for part in parts:
            weights = self.compute(leaves)
            index_rows = max(1, min(part.shape[0], self.recipe.index_tokens // length)) if index else 0
            out = self.forward.trunk(weights, part[:, :-1], select=select, index_rows=index_rows)
            loss = self.forward.nll(weights, out.hidden, part[:, 1:].reshape(-1)).mean()
            ((loss + out.index_loss) / len(parts)).backward()
            values = {"loss": loss.detach(), "loads": out.loads}
            values |= {f"index_{layer}": gap for layer, gap in out.index_gap.items()}
            for name, value in values.items():
                figures[name] = figures.get(name, 0) + (value if name == "loads" else value / len(parts))
        return figures

    def main_step(self, sampler: Sampler, progress: float) -> dict[str, Tensor]:
        """One step at a progress; returns figures for the journal."""
        rows = sampler.batch(self.steps, max(1, self.recipe.step_tokens // sampler.length))
        leaves = self.main.leaves(progress >= ROUND_FROM)
        figures = self.backward(leaves, rows, select=progress >= SELECT_FROM, index=progress >= INDEX_FROM)
        loads = figures.pop("loads")
        factor = learning_rate(progress, self.steps, self.recipe.warm_steps)
        norm = self.main.step(leaves, factor)
        if math.isfinite(norm):
            for layer in range(self.shape.num_layers):
                self._balance(self.main, f"layers.{layer}", loads[layer])
        else:
            self.skipped += 1
            norm = 0.0
        self.steps += 1
        self.tokens += rows.shape[0] * sampler.length
        figures["norm"] = torch.tensor(norm)
        figures["skew"] = (loads.max(1).values / loads.mean(1)).mean()
        return figures

    def _balance(self, part: Part, prefix: str, load: Tensor) -> None:
        bias = part.masters[f"{prefix}.ffn.gate.bias"]
        balance_bias(bias, load, self.recipe.bias_rate)
        # Image tokens never come; their bias follows, so that the file holds no unused zeros.
        part.masters[f"{prefix}.ffn.gate.bias_vl"].copy_(bias)

    def run_main(self, corpus: Corpus, until: float, deadline: float, *, max_steps: int | None = None) -> None:
        """Train from the stored progress to `until`, reached at `deadline` (monotonic seconds) or after `max_steps`."""
        journal = Journal(self.work / "journal.jsonl", 10.0)
        samplers: dict[int, Sampler] = {}
        begin, first = time.monotonic(), self.progress
        saved = begin
        step = 0
        while self.progress < until:
            length = self.recipe.length if self.progress < LONG_FROM else self.recipe.long_length
            if length not in samplers:
                samplers[length] = Sampler(corpus, length, self.recipe.seed)
            figures = self.main_step(samplers[length], self.progress)
            journal.note(self.recipe.step_tokens, figures)
            step += 1
            now = time.monotonic()
            if step == 1 and max_steps is None:
                # The first step compiles; its time must not count as training progress.
                begin = saved = now
            done = (now - begin) / max(deadline - begin, 1e-9) if max_steps is None else step / max_steps
            self.progress = min(until, first + (until - first) * min(done, 1.0))
            if journal.due() or self.progress >= until:
                journal.write(
                    progress=self.progress,
                    step=self.steps,
                    tokens=self.tokens,
                    length=length,
                    lr=learning_rate(self.progress, self.steps, self.recipe.warm_steps),
                    skipped=self.skipped,
                )
            if now - saved > 150:
                self.save()
                saved = time.monotonic()
        self.seconds += time.monotonic() - begin

    # --- drafter ------------------------------------------------------------------------------------------------

    def draft_loss(
        self, frozen: Mapping[str, Tensor], leaves: Mapping[str, Tensor], rows: Tensor, step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Distance of the drafter from the target over blocks at random anchors, and figures."""
        assert self.shape.drafter is not None
        block = self.shape.drafter.block_size
        tokens = rows[:, :-1]
        out = self.forward.trunk(frozen, tokens, select=True, features=True)
        hidden, features = out.hidden.detach(), out.features.detach()
        del out
        batch, length = tokens.shape
        generator = torch.Generator(device=self.device).manual_seed(step)
        anchors = torch.randint(
            0, length - block - 1, (batch, self.recipe.anchors), generator=generator, device=self.device
        )
        weights = {**{n: w.detach() for n, w in frozen.items()}, **self.compute(leaves)}
        draft = self.forward.draft(weights, features, tokens, anchors)
        at = anchors.unsqueeze(-1) + torch.arange(block, device=self.device)
        at = (at + torch.arange(batch, device=self.device).view(-1, 1, 1) * length).view(-1)
        with torch.no_grad():
            p = (hidden[at] @ weights["head.weight"].T).float().softmax(-1)
        log_q = draft.logits.float().log_softmax(-1)
        loss = -(p * log_q).sum(-1)
        with torch.no_grad():
            accept = torch.minimum(p, log_q.exp()).sum(-1)
        confidence = F.binary_cross_entropy_with_logits(draft.confidence, accept)
        figures = {"loss": loss.mean(), "accept": accept.mean(), "confidence": confidence, "loads": draft.loads}
        figures |= {f"accept_{i}": accept.view(-1, block)[:, i].mean() for i in range(block)}
        return loss.mean() + confidence, {name: value.detach() for name, value in figures.items()}

    def frozen_main(self) -> dict[str, Tensor]:
        """The finished main model as its file will hold it, for the drafter's phase.

        The tensors ask for a gradient nobody computes: compiled regions are specialised on that, and the training
        phases have compiled them so.
        """
        rounded = round_weights({n: p.detach() for n, p in self.main.masters.items()}, self.main.plans)
        return {
            name: value.detach().requires_grad_(self.plans[name].kind != "bias")
            for name, value in self.compute(rounded).items()
        }

    def run_drafter(self, corpus: Corpus, deadline: float, *, max_steps: int | None = None) -> None:
        """Train the drafter until `deadline` or for `max_steps`."""
        journal = Journal(self.work / "journal.jsonl", 10.0)
        sampler = Sampler(corpus, self.recipe.length, self.recipe.seed + 1)
        frozen = self.frozen_main()
        begin = time.monotonic()
        step = 0
        while self.draft_progress < 1:
            rows = sampler.batch(self.draft_steps, max(1, self.recipe.draft_tokens // sampler.length))
            leaves = self.drafter.leaves(self.draft_progress >= DRAFT_ROUND_FROM)
            loss, figures = self.draft_loss(frozen, leaves, rows, self.draft_steps)
            loss.backward()
            loads = figures.pop("loads")
            norm = self.drafter.step(leaves, learning_rate(self.draft_progress, self.draft_steps, 50))
            if math.isfinite(norm):
                for stage in range(loads.shape[0]):
                    self._balance(self.drafter, f"mtp.{stage}", loads[stage])
            self.draft_steps += 1
            figures["skew"] = (loads.max(1).values / loads.mean(1)).mean()
            journal.note(rows.numel(), figures)
            step += 1
            if step == 1 and max_steps is None:
                begin = time.monotonic()
            done = (time.monotonic() - begin) / max(deadline - begin, 1e-9) if max_steps is None else step / max_steps
            self.draft_progress = min(1.0, done)
            if journal.due() or self.draft_progress >= 1:
                journal.write(drafter=self.draft_progress, step=self.draft_steps)

    # --- state --------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """All masters, detached."""
        return {n: p.detach() for part in (self.main, self.drafter) for n, p in part.masters.items()}

    def counters(self) -> dict[str, Any]:
        """Plain numbers of the run so far."""
        names = ("progress", "draft_progress", "steps", "draft_steps", "tokens", "skipped", "seconds")
        return {name: getattr(self, name) for name in names}

    def save(self) -> None:
        """Write the whole state to `work`, replacing the last one in one move."""
        state = {"counters": self.counters(), "main": self.main.state(), "drafter": self.drafter.state()}
        torch.save(state, self.work / "state.new")
        (self.work / "state.new").rename(self.work / "state.pt")

    def resume(self) -> bool:
        """Go on from `work`, if it holds a state."""
        path = self.work / "state.pt"
        if not path.exists():
            return False
        state = torch.load(path, map_location=self.device, weights_only=True)
        self._count(state["counters"])
        self.main.load(state["main"])
        self.drafter.load(state["drafter"])
        return True

    def _count(self, counters: Mapping[str, Any]) -> None:
        for name, value in counters.items():
            setattr(self, name, value)

    def save_parts(self, out: Path) -> None:
        """Masters in bfloat16 in files below 16 MiB: enough to go on elsewhere, without the optimisers' memory."""
        out.mkdir(parents=True, exist_ok=True)
        part: dict[str, Tensor] = {}
        size, number = 0, 0
        for name, weight in [*self.weights().items(), ("", torch.empty(0))]:
            small = weight.to(torch.bfloat16).cpu().contiguous()
            if part and (size + small.nbytes > PART_BYTES or not name):
                counters = {key: str(value) for key, value in self.counters().items()}
                save_file(part, str(out / f"masters-{number}.safetensors"), metadata=counters)
                part, size, number = {}, 0, number + 1
            part[name], size = small, size + small.nbytes

    def resume_parts(self, folder: Path) -> bool:
        """Go on from files of `save_parts` with fresh optimisers."""
        paths = sorted(folder.glob("masters-*.safetensors"))
        if not paths:
            return False
        stored = {name: tensor for path in paths for name, tensor in load_file(str(path)).items()}
        with torch.no_grad():
            for part in (self.main, self.drafter):
                for name, parameter in part.masters.items():
                    parameter.copy_(stored[name])
        with safe_open(str(paths[0]), "pt") as file:
            counters = file.metadata()
        self._count({k: (float(v) if "." in v or "e" in v else int(v)) for k, v in counters.items()})
        return True
