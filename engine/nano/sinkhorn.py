"""Sinkhorn normalisation of the hyper-connection mixing matrices, with a gradient.

Owns one operation: `sinkhorn(logits, iterations, eps)`, float32[N, 4, 4] -> float32[N, 4, 4]. It exists because the
plain form is some eighty tiny kernels forwards and twice as many backwards per sublayer, which would rule the training
step. On a CUDA device both directions are one Triton kernel each; elsewhere it is the plain form of
`engine.model.hyper`.

Source: Sinkhorn & Knopp 1967, in the vendor's form: a row softmax, then columns, then (iterations - 1) times rows and
columns.
"""

# Triton reads the annotations of a kernel's parameters itself: Python types have no place there.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch

from engine.errors import DeviceError
from engine.model import hyper

try:  # Training machines with a GPU have Triton; a laptop does not need it.
    import triton
    import triton.language as tl
except ImportError:  # pragma: no cover - depends on the machine
    triton = None

if triton is not None:

    @triton.jit
    def _offsets(pid, BLOCK: tl.constexpr):
        row = pid * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, 4)
        return row, row[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]

    @triton.jit
    def _sinkhorn_forward_kernel(logits_ptr, out_ptr, n, eps, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr):
        row, offsets = _offsets(tl.program_id(0).to(tl.int64), BLOCK)
        live = (row < n)[:, None, None]
        z = tl.load(logits_ptr + offsets, mask=live, other=0.0)
        e = tl.exp(z - tl.max(z, axis=2)[:, :, None])
        c = e / tl.sum(e, axis=2)[:, :, None] + eps
        c = c / (tl.sum(c, axis=1)[:, None, :] + eps)
        for _ in range(ITERATIONS - 1):
            c = c / (tl.sum(c, axis=2)[:, :, None] + eps)
            c = c / (tl.sum(c, axis=1)[:, None, :] + eps)
        tl.store(out_ptr + offsets, c, mask=live)

    @triton.jit
    def _sinkhorn_backward_kernel(
        logits_ptr, grad_ptr, scratch_ptr, out_ptr, n, eps, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr
    ):
        # Every iterate is kept in `scratch` [2 * ITERATIONS - 1, n, 16]; a thread reads back only what it wrote itself.
        row, offsets = _offsets(tl.program_id(0).to(tl.int64), BLOCK)
        live = (row < n)[:, None, None]
        plane = n.to(tl.int64) * 16
        z = tl.load(logits_ptr + offsets, mask=live, other=0.0)
        e = tl.exp(z - tl.max(z, axis=2)[:, :, None])
        p = e / tl.sum(e, axis=2)[:, :, None]
        c = p + eps
        tl.store(scratch_ptr + offsets, c, mask=live)
        c = c / (tl.sum(c, axis=1)[:, None, :] + eps)
        for k in range(ITERATIONS - 1):
            tl.store(scratch_ptr + (2 * k + 1) * plane + offsets, c, mask=live)
            c = c / (tl.sum(c, axis=2)[:, :, None] + eps)
            tl.store(scratch_ptr + (2 * k + 2) * plane + offsets, c, mask=live)
            c = c / (tl.sum(c, axis=1)[:, None, :] + eps)
        tl.debug_barrier()
        g = tl.load(grad_ptr + offsets, mask=live, other=0.0)
        for back in range(ITERATIONS - 1):
            k = ITERATIONS - 2 - back
            c = tl.load(scratch_ptr + (2 * k + 2) * plane + offsets, mask=live, other=1.0)
            s = tl.sum(c, axis=1)[:, None, :] + eps
            g = g / s - tl.sum(g * c, axis=1)[:, None, :] / (s * s)
            c = tl.load(scratch_ptr + (2 * k + 1) * plane + offsets, mask=live, other=1.0)
            s = tl.sum(c, axis=2)[:, :, None] + eps
            g = g / s - tl.sum(g * c, axis=2)[:, :, None] / (s * s)
        c = p + eps
        s = tl.sum(c, axis=1)[:, None, :] + eps
        g = g / s - tl.sum(g * c, axis=1)[:, None, :] / (s * s)
        g = p * (g - tl.sum(g * p, axis=2)[:, :, None])
        tl.store(out_ptr + offsets, g, mask=live)


class _Sinkhorn(torch.autograd.Function):
    BLOCK = 64

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
        logits = logits.contiguous()
        n = logits.shape[0]
        out = torch.empty_like(logits)
        grid = (triton.cdiv(n, _Sinkhorn.BLOCK),)
        _sinkhorn_forward_kernel[grid](logits, out, n, eps, iterations, _Sinkhorn.BLOCK)
        ctx.save_for_backward(logits)
        ctx.iterations, ctx.eps = iterations, eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        n = logits.shape[0]
        out = torch.empty_like(logits)
        scratch = torch.empty(2 * ctx.iterations - 1, n, 16, dtype=torch.float32, device=logits.device)
        grid = (triton.cdiv(n, _Sinkhorn.BLOCK),)
        _sinkhorn_backward_kernel[grid](
            logits, grad.contiguous(), scratch, out, n, ctx.eps, ctx.iterations, _Sinkhorn.BLOCK
        )
        return out, None, None


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Doubly stochastic mixing matrices (rows j, columns k), ended on columns.

    Args:
        logits: float32[N, 4, 4].
        iterations: Normalisation rounds (the vendor's 20).
        eps: Added to the softmax and to every denominator.
    """
    if triton is not None and logits.is_cuda:
        mixed: torch.Tensor = _Sinkhorn.apply(logits.float(), iterations, eps)
        return mixed
    return hyper.sinkhorn(logits.float(), iterations, eps)


def check_sinkhorn(device: torch.device) -> float:
    """Compare both directions with the plain form on `device`; returns the largest difference.

    Raises:
        DeviceError: it is above 1e-4, more than the order of float32 sums explains.
    """
    logits = torch.randn(1000, 4, 4, device=device).mul_(2).requires_grad_()
    weight = torch.randn(1000, 4, 4, device=device)
    values, grads = [], []
    for function in (sinkhorn, hyper.sinkhorn):
        value = function(logits, 20, 1e-6)
        values.append(value.detach())
        grads.append(torch.autograd.grad(value, logits, weight)[0])
    gap = max(float((pair[0] - pair[1]).abs().max()) for pair in (values, grads))
    # Written so that a NaN is refused too.
    if not gap <= 1e-4:
        raise DeviceError(
            f"the Sinkhorn kernels differ from plain torch by {gap:.1e} on {device}; at most 1e-4 is right"
        )
    return gap
