"""Turning queries and keys: `Rotation`, cos and sin of every pair's angle, and `rotate`, the only place to apply it.

One rotation is computed in three ways, by what the moment allows. Eager mode multiplies neighbouring channels as
complex numbers, one pass at the speed of a copy; other pairings have a real form of three passes. Compilers and
exporters get plain arithmetic, which they fuse and which holds no complex number. Where a gradient is needed, the
backward pass is the inverse rotation, which needs cos and sin and no activation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd import forward_ad

Pairing = Literal["interleaved", "half", "half-per-axis"]
PAIRINGS = ("interleaved", "half", "half-per-axis")

# cos, sin and, where the eager path can use it, cos + i sin
Tables = tuple[Tensor, Tensor, Tensor | None]


@dataclass(eq=False)
class Rotation:
    """How far each pair of channels of each token turns.

    Attributes:
        cos, sin: one value a pair, (heads or 1, tokens, head_dim / 2), with a batch axis in front where samples differ.
        pairing: which channels form pair i: "interleaved" 2i and 2i + 1; "half" i and i + head_dim / 2; "half-per-axis"
            the same within each half of the head, of which each has its own axis.
        attention_scale: factor of the softmax scale (YaRN's temperature), so that cos and sin stay a rotation.
        phase: cos + i sin, where it is known already.

    Raises: ValueError for an unknown pairing.
    """

    cos: Tensor
    sin: Tensor
    pairing: Pairing
    attention_scale: float = 1.0
    phase: InitVar[Tensor | None] = None

    def __post_init__(self, phase: Tensor | None) -> None:
        if self.pairing not in PAIRINGS:
            raise ValueError(f"pairing is {self.pairing!r}; choose one of {', '.join(PAIRINGS)}")
        # The complex table of the eager path is built here, once for all layers and outside of activation checkpoints,
        # whose recomputation must see the same graph as the first pass. It is no field, since FSDP2 rebuilds dataclass
        # arguments from their fields.
        self._phase = phase
        if phase is None and self.pairing == "interleaved" and _is_eager(self.cos):
            self._phase = torch.complex(self.cos.to(_wide_dtype(self.cos)), self.sin.to(_wide_dtype(self.sin)))

    def _tables(self) -> Tables:
        return self.cos, self.sin, self._phase


def rotate(x: Tensor, rotation: Rotation, *, overwrite: bool = False) -> Tensor:
    """Turn every pair of channels of queries or keys by its angle.

    Arithmetic is in float32 at least; cos and sin of position zero are exactly 1 and 0: such tokens stay as they are.

    Args:
        overwrite: allow the result to take the place of x in memory, which is faster where no gradient needs x.

    Shapes: x (..., heads, tokens, head_dim), always with a heads axis -> the same shape and dtype.
    Raises: ValueError where x does not fit the rotation.
    Source: RoFormer (arXiv 2104.09864), equation 34.
    """
    _check_fit(x, rotation)
    return _turn(x, rotation._tables(), rotation.pairing, x if overwrite else None)


def rotate_qkv(qkv: Tensor, rotation: Rotation, *, overwrite: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed projection and turn its queries and keys, both in one pass.

    Args:
        overwrite: allow the result to take the place of qkv in memory, which is faster where no gradient needs qkv.

    Shapes: qkv (batch, tokens, 3, heads, head_dim) -> q, k, v, each (batch, heads, tokens, head_dim).
    Raises: ValueError where qkv does not fit the rotation.
    """
    if qkv.ndim != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv has shape {tuple(qkv.shape)}; it must be (batch, tokens, 3, heads, head_dim)")
    _check_fit(qkv[:, :, 0].transpose(1, 2), rotation)
    tables = rotation._tables()
    if _is_fast(qkv, tables) and _needs_gradient(qkv, tables):
        return _TurnQKV.apply(qkv, *tables, rotation.pairing)
    qk = qkv[:, :, :2]
    q, k = _turn(qk, _beside_qk(tables), rotation.pairing, qk if overwrite else None).transpose(1, 3).unbind(2)
    return q, k, qkv[:, :, 2].transpose(1, 2)


def outer_rotations(
    angles: Tensor,
    size: Sequence[int],
    pairing: Pairing,
    num_prefix_tokens: int = 0,
    attention_scale: float = 1.0,
) -> list[Rotation]:
    """The rotations of a grid, one a layer, from the angles that each axis alone turns by.

    A turn by a sum of angles is a product of turns, R(a + b) = R(a) R(b), and those of one axis are few.

    Shapes: angles (layers, heads or 1, sum of size, head_dim / 2), an axis after the other -> cos, sin (heads or 1,
        num_prefix_tokens + product of size, head_dim / 2), prefix tokens in front.
    """
    cos, sin = angles.cos(), angles.sin()
    if pairing == "interleaved" and _is_eager(angles):
        phase = functools.reduce(_outer, torch.complex(cos, sin).to(torch.complex64).split(list(size), dim=-2))
        phase = F.pad(phase, (0, 0, num_prefix_tokens, 0), value=1.0)
        return [Rotation(layer.real, layer.imag, pairing, attention_scale, layer) for layer in phase.unbind()]

    parts = list(zip(cos.float().split(list(size), dim=-2), sin.float().split(list(size), dim=-2), strict=True))
    cos, sin = parts[0]
    for cos_2, sin_2 in parts[1:]:
        cos, sin = _outer(cos, cos_2) - _outer(sin, sin_2), _outer(sin, cos_2) + _outer(cos, sin_2)
    cos = F.pad(cos, (0, 0, num_prefix_tokens, 0), value=1.0)
    sin = F.pad(sin, (0, 0, num_prefix_tokens, 0), value=0.0)
    return [Rotation(*layer, pairing, attention_scale) for layer in zip(cos.unbind(), sin.unbind(), strict=True)]


def pairing_permutation(head_dim: int, source: Pairing, target: Pairing) -> Tensor:
    """Index p of channels with rotate_target(x[..., p]) == rotate_source(x)[..., p].

    Applied to the rows of the query and key projections (and their norms) it changes a model's pairing without
    changing its output.

    Shapes: -> (head_dim,) int64.
    Raises: ValueError for an unknown pairing, or a head_dim that does not divide into its pairs.
    """
    for name, pairing in (("source", source), ("target", target)):
        if pairing not in PAIRINGS:
            raise ValueError(f"{name} is {pairing!r}; choose one of {', '.join(PAIRINGS)}")
    unit = 4 if "half-per-axis" in (source, target) else 2
    if head_dim < unit or head_dim % unit:
        raise ValueError(
            f"head_dim is {head_dim}; channels turn in pairs, so it must be "
            + ("even" if unit == 2 else "a multiple of 4 for half-per-axis")
        )

    def channels(pairing: Pairing) -> Tensor:
        return rearrange(_pairs_of(torch.arange(head_dim), pairing), "groups two pairs -> (groups pairs two)")

    permutation = torch.empty(head_dim, dtype=torch.int64)
    permutation[channels(target)] = channels(source)
    return permutation


def _turn(x: Tensor, tables: Tables, pairing: Pairing, out: Tensor | None = None) -> Tensor:
    """Turn x in the way that the moment allows; tables broadcast against x with its last axis halved.

    `out` is memory that the result may be written to, x itself too; it is used where no gradient is needed.
    """
    if not _is_fast(x, tables):
        return _turn_plainly(x, tables, pairing)
    if _needs_gradient(x, tables):
        return _Turn.apply(x, *tables, pairing)
    return _turn_fast(x, tables, pairing, out)


def _turn_plainly(x: Tensor, tables: Tables, pairing: Pairing) -> Tensor:
    """Plain arithmetic, for compilers, exporters and every kind of derivative; casts stand where they fuse best."""
    first, second = _pairs_of(x.to(_wide_dtype(x)), pairing).unbind(-2)
    cos, sin = (_grouped(table, pairing) for table in tables[:2])
    turned = ((first * cos - second * sin).to(x.dtype), (first * sin + second * cos).to(x.dtype))
    return torch.stack(turned, dim=-2).flatten(-3)


def _turn_fast(x: Tensor, tables: Tables, pairing: Pairing, out: Tensor | None = None) -> Tensor:
    """Turn x in as few passes over memory as eager mode can do with."""
    wide = x.to(_wide_dtype(x))
    phase = tables[2]
    if phase is not None:
        numbers = _as_complex(wide)
        if out is not None and out.dtype == wide.dtype and _is_aligned(out):
            torch.mul(numbers, phase, out=_as_complex(out))
            return out
        private = wide.dtype != x.dtype or not _is_aligned(x)
        numbers = numbers.mul_(phase) if private else numbers * phase
        turned = torch.view_as_real(numbers).flatten(-2)
    else:
        pairs = _pairs_of(wide, pairing)
        cos, sin = (_grouped(table, pairing) for table in tables[:2])
        halves = pairs * cos.unsqueeze(-2)
        halves[..., 0, :].addcmul_(pairs[..., 1, :], sin, value=-1)
        halves[..., 1, :].addcmul_(pairs[..., 0, :], sin)
        turned = halves.flatten(-3)
    return turned.to(x.dtype) if out is None else out.copy_(turned)


class _Turn(torch.autograd.Function):
    """`_turn_fast` whose backward is the inverse rotation; it keeps the table, and the output where that is learned."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor, phase: Tensor | None, pairing: Pairing) -> Tensor:
        return _turn_fast(x, (cos, sin, phase), pairing)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, cos, sin, phase, ctx.pairing = inputs
        ctx.save_for_backward(cos, sin, phase, output if ctx.needs_input_grad[3] else None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, phase, turned = ctx.saved_tensors
        # Through _turn again, so that a second derivative finds its way.
        grad_x = _turn(grad, _inverse(cos, sin, phase), ctx.pairing)
        return grad_x, None, None, None if turned is None else _phase_gradient([grad], [turned], phase), None


class _TurnQKV(torch.autograd.Function):
    """Packed qkv -> q, k, v. The backward writes all gradients into one packed tensor, which replaces two copies."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        qkv: Tensor, cos: Tensor, sin: Tensor, phase: Tensor | None, pairing: Pairing
    ) -> tuple[Tensor, Tensor, Tensor]:
        turned = _turn_fast(qkv[:, :, :2], _beside_qk((cos, sin, phase)), pairing)
        q, k = turned.transpose(1, 3).unbind(2)
        return q, k, qkv[:, :, 2].transpose(1, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, cos, sin, phase, ctx.pairing = inputs
        ctx.save_for_backward(cos, sin, phase, *(output[:2] if ctx.needs_input_grad[3] else ()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, phase, *turned = ctx.saved_tensors
        inverse = _inverse(cos, sin, phase)
        grad_q, grad_k, grad_v = grads
        if torch.is_grad_enabled():  # a second derivative is wanted, which writing into memory would hide
            packed = torch.stack([_turn(grad_q, inverse, ctx.pairing), _turn(grad_k, inverse, ctx.pairing), grad_v])
            grad_qkv = rearrange(packed, "three batch heads tokens dim -> batch tokens three heads dim")
        else:
            batch, heads, tokens, dim = grad_v.shape
            grad_qkv = grad_v.new_empty(batch, tokens, 3, heads, dim)
            places = grad_qkv.permute(2, 0, 3, 1, 4)
            _turn_fast(grad_q, inverse, ctx.pairing, out=places[0])
            _turn_fast(grad_k, inverse, ctx.pairing, out=places[1])
            places[2].copy_(grad_v)
        return grad_qkv, None, None, _phase_gradient(grads[:2], turned, phase) if turned else None, None


def _phase_gradient(grads: Sequence[Tensor], turned: Sequence[Tensor], phase: Tensor) -> Tensor:
    """Gradient for cos + i sin: the sum over what shares it of grad * conj(x), with x = turned / phase."""
    total = torch.zeros_like(phase)
    for grad, output in zip(grads, turned, strict=True):
        product = _as_complex(grad.to(_wide_dtype(grad))) * _as_complex(output.to(_wide_dtype(output))).conj()
        total = total + product.sum_to_size(phase.shape)
    return total / phase.conj()


def _outer(first: Tensor, second: Tensor) -> Tensor:
    """Products of all rows of two tables (..., rows, pairs), row-major."""
    return (first.unsqueeze(-2) * second.unsqueeze(-3)).flatten(-3, -2)


def _num_groups(pairs: int, pairing: Pairing) -> int:
    """What the pairings differ in: in how many groups of neighbours the first channels of all pairs stand together."""
    return {"interleaved": pairs, "half": 1, "half-per-axis": 2}[pairing]


def _pairs_of(x: Tensor, pairing: Pairing) -> Tensor:
    """Channels as (..., groups, 2, pairs of a group)."""
    return x.unflatten(-1, (_num_groups(x.shape[-1] // 2, pairing), 2, -1))


def _grouped(table: Tensor, pairing: Pairing) -> Tensor:
    """A table (..., pairs) as (..., groups, pairs of a group)."""
    return table.unflatten(-1, (_num_groups(table.shape[-1], pairing), -1))


def _inverse(cos: Tensor, sin: Tensor, phase: Tensor | None) -> Tables:
    return cos, -sin, None if phase is None else phase.conj()


def _beside_qk(tables: Tables) -> Tables:
    """Tables for queries and keys side by side, (batch, tokens, 2, heads, head_dim)."""

    def beside(table: Tensor) -> Tensor:
        return rearrange(table, "... heads tokens pairs -> ... tokens 1 heads pairs")

    cos, sin, phase = tables
    return beside(cos), beside(sin), None if phase is None else beside(phase)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _as_complex(x: Tensor) -> Tensor:
    """Neighbouring channels as complex numbers, (..., 2 * pairs) -> (..., pairs), without a copy where possible."""
    if not _is_aligned(x):
        x = x.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _is_aligned(x: Tensor) -> bool:
    return bool(x.stride(-1) == 1 and not any(step % 2 for step in (x.storage_offset(), *x.stride()[:-1])))


def _is_eager(x: Tensor) -> bool:
    """Eager CPU and CUDA multiply complex numbers fast; compilers and exporters neither fuse nor export them."""
    tracing = torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()
    return x.device.type in ("cpu", "cuda") and not tracing


def _is_fast(x: Tensor, tables: Tables) -> bool:
    """Whether the fast ways are right: learned tables need a phase to learn by, tangents need plain arithmetic."""
    cos, _, phase = tables
    if not _is_eager(x) or (phase is None and cos.requires_grad):
        return False
    return all(forward_ad.unpack_dual(tensor).tangent is None for tensor in (x, cos))


def _needs_gradient(x: Tensor, tables: Tables) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or tables[0].requires_grad)


def _check_fit(x: Tensor, rotation: Rotation) -> None:
    table = rotation.cos.shape
    if x.ndim < 3 or x.shape[-1] != 2 * table[-1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and the rotation is for head_dim {2 * table[-1]} (cos {tuple(table)}); x "
            "must be (..., heads, tokens, head_dim): split the channels into heads first"
        )
    if x.shape[-2] != table[-2] or table[-3] not in (1, x.shape[-3]):
        raise ValueError(
            f"x has {x.shape[-3]} heads and {x.shape[-2]} tokens (shape {tuple(x.shape)}) and the rotation is for "
            f"{table[-3]} heads and {table[-2]} tokens (cos {tuple(table)}); pass the positions of exactly these "
            "tokens, prefix tokens included (with_prefix)"
        )
    if len(table) > 3 and (x.ndim < len(table) or table[-4] not in (1, x.shape[-4])):
        raise ValueError(
            f"x has shape {tuple(x.shape)} and the rotation has a batch of {table[-4]} (cos {tuple(table)}); "
            "the batches must agree"
        )
