"""The optimisers: Muon for matrices, AdamW for the rest, and the load rule of the router bias.

Muon keeps one momentum per group of equally shaped matrices and orthogonalises the whole group, stacked experts
included, in one batched Newton-Schulz iteration.

Source: Muon (Jordan et al. 2024), with decoupled weight decay; auxiliary-loss-free balancing (Wang et al. 2024).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

# Quintic coefficients that push singular values towards one within five steps.
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearest (roughly) semi-orthogonal matrices: float[K, a, b] -> bfloat16[K, a, b], values within 0.6..1.3."""
    x = matrices.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.transpose(-1, -2) if tall else x


class Muon:
    """Momentum, orthogonalisation, decoupled decay.

    Args:
        parameters: name -> float32[..., out, in]; leading dimensions are a stack.
        splits: name ending -> number of matrices that lie side by side in the first dimension (groups of heads).
        momentum: of the running gradient, applied Nesterov style.
        decay: weight decay per step as a fraction of the learning rate.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], *, splits: Mapping[str, int], momentum: float = 0.95, decay: float = 0.1
    ) -> None:
        self.parameters = dict(parameters)
        self.momentum, self.decay = momentum, decay
        self.groups: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for name, parameter in self.parameters.items():
            stack = parameter.shape[0] if parameter.dim() == 3 else 1
            for ending, count in splits.items():
                if name.endswith(ending):
                    stack = count
            size = (parameter.numel() // parameter.shape[-1] // stack, parameter.shape[-1])
            self.groups.setdefault(size, []).append((name, stack))
        self.buffers = {
            size: torch.zeros(sum(stack for _, stack in members), *size, device=self.parameters[members[0][0]].device)
            for size, members in self.groups.items()
        }

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move every parameter; gradients are read from `.grad` and must be present."""
        for size, members in self.groups.items():
            grads = torch.cat([_gradient(name, self.parameters[name]).view(-1, *size) for name, _ in members])
            buffer = self.buffers[size]
            buffer.lerp_(grads, 1 - self.momentum)
            update = orthogonalise(grads.lerp_(buffer, self.momentum)).float()
            # With singular values of one a tall matrix has smaller entries than a wide one: even that out.
            scale = max(1.0, size[0] / size[1]) ** 0.5
            at = 0
            for name, stack in members:
                parameter = self.parameters[name]
                parameter.mul_(1 - lr * self.decay).sub_(update[at : at + stack].view_as(parameter), alpha=lr * scale)
                at += stack

    def state(self) -> dict[str, Tensor]:
        """Momentum buffers by group."""
        return {f"{a}x{b}": buffer for (a, b), buffer in self.buffers.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the buffers of an earlier run over the same parameters."""
        for (a, b), buffer in self.buffers.items():
            buffer.copy_(state[f"{a}x{b}"])


def _gradient(name: str, parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, f"{name} has no gradient"
    return parameter.grad


@torch.no_grad()
def clip_gradients(parameters: list[Tensor], limit: float) -> float:
    """Scale all gradients together to a norm of at most `limit`; returns the norm before (NaN: skip the step)."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    value = float(norm)
    if value > limit:
        torch._foreach_mul_(grads, limit / (value + 1e-6))
    return value


@torch.no_grad()
def balance_bias(bias: Tensor, load: Tensor, rate: float) -> None:
    """Raise the bias of experts below the mean load and lower it above: float32[experts], in place."""
    bias.add_(torch.sign(load.mean() - load), alpha=rate)
    # Only differences matter for the choice; without this the common part drifts.
    bias.sub_(bias.mean())
