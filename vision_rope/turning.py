"""One rotation computed in three ways, by what the moment allows.

Eager mode multiplies neighbouring channels as complex numbers, one pass at the speed of a copy; other pairings have a
real form of three passes. Compilers and exporters get plain arithmetic, which they fuse and which holds no complex
number. Where a gradient is needed, the backward pass is the inverse rotation: it needs cos and sin and no activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

Pairing = Literal["interleaved", "half", "half-per-axis"]
PAIRINGS = ("interleaved", "half", "half-per-axis")

# cos, sin and, where the eager path can use it, cos + i sin
Tables = tuple[Tensor, Tensor, Tensor | None]


def turn(x: Tensor, tables: Tables, pairing: Pairing, *, overwrite: bool = False) -> Tensor:
    """Turn x; tables broadcast against x with its last axis halved.

    Args:
        overwrite: allow the result to take the place of x in memory, where no gradient or tangent needs x.
    """
    phase = tables[2]
    eager = is_eager(x)
    out = x if overwrite and _may_write(x, tables, eager) else None
    if phase is not None and eager:
        # Its own derivatives of every kind are as fast as can be.
        return _turn_complex(x, phase, out)
    if phase is None and eager and not _is_learned(tables) and not _has_tangent(x, tables):
        if _needs_gradient(x, tables):
            return _TurnReal.apply(x, *tables[:2], pairing)
        return _turn_real(x, tables, pairing, out)
    return _turn_plainly(x, tables, pairing)


def turn_qkv(
    qkv: Tensor, tables: Tables, pairing: Pairing, *, overwrite: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed projection and turn its queries and keys.

    Shapes: qkv (batch, tokens, 3, heads, head_dim), tables (..., heads or 1, tokens, pairs) -> q, k, v, each (batch,
        heads, tokens, head_dim)
    """
    phase = tables[2]
    eager = is_eager(qkv)
    if eager and _needs_gradient(qkv, tables):
        learnable = phase is not None or not _is_learned(tables)
        if learnable and not _has_tangent(qkv, tables):
            return _TurnQKV.apply(qkv, *tables, pairing)
    qk = qkv.narrow(2, 0, 2)
    if eager and phase is not None:
        out = qk if overwrite and _may_write(qkv, tables, eager) else None
        turned = _turn_complex(qk, _beside_qk(phase), out)
    else:
        turned = turn(qk, _tables_beside_qk(tables), pairing, overwrite=overwrite)
    q, k = turned.transpose(1, 3).unbind(2)
    return q, k, qkv.select(2, 2).transpose(1, 2)


def is_eager(x: Tensor) -> bool:
    """Eager CPU and CUDA multiply complex numbers fast; compilers and exporters neither fuse nor export them.

    Function transforms (torch.func) and batched gradients get plain arithmetic too, which all of them can take apart.
    """
    if x.device.type not in ("cpu", "cuda") or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return not (is_transformed() or torch._C._functorch.is_legacy_batchedtensor(x))


def is_transformed() -> bool:
    """Whether torch.func's grad, vmap, jvp or another is at work; torch has no public way to ask."""
    return torch._C._are_functorch_transforms_active()


def is_unobserved(layer: nn.Module) -> bool:
    """Whether a layer's output is its caller's alone: no hook sees it, and no layer inside hands it on."""
    hooks = layer._forward_hooks or nn.modules.module._global_forward_hooks
    return type(layer) is nn.Linear and not hooks


def wide_dtype(x: Tensor) -> torch.dtype:
    """What rotations of x are computed in: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def pairs_of(x: Tensor, pairing: Pairing) -> Tensor:
    """Channels as (..., groups, 2, pairs of a group)."""
    pairs = x.shape[-1] // 2
    groups = _num_groups(pairs, pairing)
    return x.reshape(*x.shape[:-1], groups, 2, pairs // groups)


def _turn_plainly(x: Tensor, tables: Tables, pairing: Pairing) -> Tensor:
    """Plain arithmetic, for compilers, exporters and every kind of derivative; casts stand where they fuse best."""
    first, second = pairs_of(x.to(wide_dtype(x)), pairing).unbind(-2)
    cos, sin = (_grouped(table, pairing) for table in tables[:2])
    turned = ((first * cos - second * sin).to(x.dtype), (first * sin + second * cos).to(x.dtype))
    return torch.stack(turned, dim=-2).reshape(x.shape)


def _turn_complex(x: Tensor, phase: Tensor, out: Tensor | None = None) -> Tensor:
    """Neighbouring channels as complex numbers: one pass, and two more for the casts of half precision.

    Every line here counts: at the sizes of a ViT-S at 224 px Python takes as long as the product.
    """
    dtype = x.dtype
    if dtype is torch.float32 or dtype is torch.float64:
        if out is not None and (place := _as_complex(out, copy=False)) is not None:
            if out is x:
                place.mul_(phase)
            else:
                torch.mul(_as_complex(x), phase, out=place)
            return out
        turned = torch.view_as_real(_as_complex(x) * phase).flatten(-2)
    else:
        numbers = _as_complex(x.float())
        if not (torch.is_grad_enabled() and (x.requires_grad or phase.requires_grad)):
            numbers.mul_(phase)  # in memory that this function owns
        else:
            numbers = numbers * phase
        turned = torch.view_as_real(numbers).flatten(-2)
    if out is not None:
        return out.copy_(turned)
    return turned if turned.dtype is dtype else turned.to(dtype)


def _turn_real(x: Tensor, tables: Tables, pairing: Pairing, out: Tensor | None = None) -> Tensor:
    """Any pairing in three passes: everything times cos, then each half of a pair plus the other times sin."""
    pairs = pairs_of(x.to(wide_dtype(x)), pairing)
    cos, sin = (_grouped(table, pairing) for table in tables[:2])
    turned = pairs * cos.unsqueeze(-2)
    turned[..., 0, :].addcmul_(pairs[..., 1, :], sin, value=-1)
    turned[..., 1, :].addcmul_(pairs[..., 0, :], sin)
    turned = turned.flatten(-3)
    return turned.to(x.dtype) if out is None else out.copy_(turned)


class _TurnReal(torch.autograd.Function):
    """`_turn_real` with fixed cos and sin: its backward is the inverse rotation, and it keeps nothing else."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
        return _turn_real(x, (cos, sin, None), pairing)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, cos, sin, ctx.pairing = inputs
        ctx.save_for_backward(cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        # Through `turn` again, so that a second derivative finds its way.
        return turn(grad, (cos, -sin, None), ctx.pairing), None, None, None


class _TurnQKV(torch.autograd.Function):
    """Packed qkv -> q, k, v. The backward writes all gradients into one packed tensor, which replaces two copies.

    It keeps the tables, and queries and keys where the tables are learned, which attention keeps anyway.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        qkv: Tensor, cos: Tensor, sin: Tensor, phase: Tensor | None, pairing: Pairing
    ) -> tuple[Tensor, Tensor, Tensor]:
        turned = _turn_fast(qkv.narrow(2, 0, 2), _tables_beside_qk((cos, sin, phase)), pairing)
        q, k = turned.transpose(1, 3).unbind(2)
        return q, k, qkv.select(2, 2).transpose(1, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, cos, sin, phase, ctx.pairing = inputs
        ctx.save_for_backward(cos, sin, phase, *(output[:2] if ctx.needs_input_grad[3] else ()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, phase, *turned = ctx.saved_tensors
        inverse = (cos, -sin, None if phase is None else phase.conj())
        grad_q, grad_k, grad_v = grads
        # Writing into memory would hide a second derivative, and transforms have no rule for it.
        if torch.is_grad_enabled() or not is_eager(grad_v):
            packed = torch.stack([turn(grad_q, inverse, ctx.pairing), turn(grad_k, inverse, ctx.pairing), grad_v])
            grad_qkv = packed.permute(1, 3, 0, 2, 4)
        else:
            batch, heads, tokens, dim = grad_v.shape
            grad_qkv = grad_v.new_empty(batch, tokens, 3, heads, dim)
            places = grad_qkv.permute(2, 0, 3, 1, 4)
            _turn_fast(grad_q, inverse, ctx.pairing, out=places[0])
            _turn_fast(grad_k, inverse, ctx.pairing, out=places[1])
            places[2].copy_(grad_v)
        return grad_qkv, None, None, _phase_gradient(grads[:2], turned, phase) if turned else None, None


def _turn_fast(x: Tensor, tables: Tables, pairing: Pairing, out: Tensor | None = None) -> Tensor:
    phase = tables[2]
    return _turn_real(x, tables, pairing, out) if phase is None else _turn_complex(x, phase, out)


def _phase_gradient(grads: Sequence[Tensor], turned: Sequence[Tensor], phase: Tensor) -> Tensor:
    """Gradient for cos + i sin: the sum over what shares it of grad * conj(x), with x = turned / phase."""
    total = torch.zeros_like(phase)
    for grad, output in zip(grads, turned, strict=True):
        product = _as_complex(grad.to(wide_dtype(grad))) * _as_complex(output.to(wide_dtype(output))).conj()
        total = total + product.sum_to_size(phase.shape)
    return total / phase.conj()


def _as_complex(x: Tensor, *, copy: bool = True) -> Any:
    """Neighbouring channels as complex numbers, (..., 2 * pairs) -> (..., pairs), without a copy where possible.

    Where memory does not allow it, a copy, or None without `copy`.
    """
    shape = x.shape
    try:
        return torch.view_as_complex(x.view(*shape[:-1], shape[-1] // 2, 2))
    except RuntimeError:  # odd strides or an odd offset
        return _as_complex(x.clone(memory_format=torch.contiguous_format), copy=False) if copy else None


def _num_groups(pairs: int, pairing: Pairing) -> int:
    """What the pairings differ in: in how many groups of neighbours the first channels of all pairs stand together."""
    return {"interleaved": pairs, "half": 1, "half-per-axis": 2}[pairing]


def _grouped(table: Tensor, pairing: Pairing) -> Tensor:
    """A table (..., pairs) as (..., groups, pairs of a group)."""
    groups = _num_groups(table.shape[-1], pairing)
    return table.reshape(*table.shape[:-1], groups, table.shape[-1] // groups)


def _beside_qk(table: Tensor) -> Tensor:
    """A table (..., heads, tokens, pairs) for queries and keys side by side, (batch, tokens, 2, heads, pairs)."""
    return table.transpose(-3, -2).unsqueeze(-3)


def _tables_beside_qk(tables: Tables) -> Tables:
    cos, sin, phase = tables
    return _beside_qk(cos), _beside_qk(sin), None if phase is None else _beside_qk(phase)


def _is_learned(tables: Tables) -> bool:
    return tables[0].requires_grad or tables[1].requires_grad


def _needs_gradient(x: Tensor, tables: Tables) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or _is_learned(tables))


def _has_tangent(x: Tensor, tables: Tables) -> bool:
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in (x, *tables[:2]))


def _may_write(x: Tensor, tables: Tables, eager: bool) -> bool:
    """Whether nobody needs x as it is, and no two elements share memory."""
    if not eager or _needs_gradient(x, tables) or _has_tangent(x, tables):
        return False
    if x.is_inference() and not torch.is_inference_mode_enabled():
        return False
    if x.is_contiguous():
        return True
    reach = 1
    for stride, length in sorted(zip(x.stride(), x.shape, strict=True)):
        if length > 1 and stride < reach:
            return False
        reach += (length - 1) * stride
    return True
