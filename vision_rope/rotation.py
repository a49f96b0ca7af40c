"""`Rotation`, cos and sin of every pair's angle, and `rotate`, the only way to apply it to queries and keys."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import InitVar, dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd import forward_ad

from vision_rope.turning import PAIRINGS, Pairing, Tables, is_eager, pairs_of, turn, turn_qkv, wide_dtype

__all__ = ["PAIRINGS", "Pairing", "Rotation", "outer_rotations", "pairing_permutation", "rotate", "rotate_qkv"]


@dataclass(eq=False)
class Rotation:
    """How far each pair of channels of each token turns. Its tensors are not to be written into; make a new one.

    Attributes:
        cos, sin: one value a pair, (heads or 1, tokens, head_dim / 2), with a batch axis in front where samples differ.
        pairing: which channels form pair i: "interleaved" 2i and 2i + 1; "half" i and i + head_dim / 2; "half-per-axis"
            the same within each half of the head, of which each has its own axis.
        attention_scale: factor of the softmax scale (YaRN's temperature), so that cos and sin stay a rotation; a tensor
            (batch, 1, 1, 1) where samples differ in it.
        phase: cos + i sin, where it is known already.

    Raises: ValueError for an unknown pairing.
    """

    cos: Tensor
    sin: Tensor
    pairing: Pairing
    attention_scale: float | Tensor = 1.0
    phase: InitVar[Tensor | None] = None

    def __post_init__(self, phase: Tensor | None) -> None:
        if self.pairing not in PAIRINGS:
            raise ValueError(f"pairing is {self.pairing!r}; choose one of {', '.join(PAIRINGS)}")
        # The complex table of the eager path is built here, once for all layers and outside of activation checkpoints,
        # whose recomputation must see the same graph as the first pass. It is no field, since FSDP2 rebuilds dataclass
        # arguments from their fields.
        self._phase = phase
        if phase is None and self.pairing == "interleaved" and is_eager(self.cos):
            self._phase = torch.complex(self.cos.to(wide_dtype(self.cos)), self.sin.to(wide_dtype(self.sin)))
        self._of = (self.cos, self.sin, self.pairing)

    def take(self, tokens: slice) -> Rotation:
        """The rotation of some of the tokens, without a copy."""
        cos, sin, phase = self._tables()
        phase = None if phase is None else phase[..., tokens, :]
        return Rotation(cos[..., tokens, :], sin[..., tokens, :], self.pairing, self.attention_scale, phase)

    def _tables(self) -> Tables:
        # Somebody may have given this rotation other tables since.
        cos, sin, pairing = self._of
        fresh = cos is self.cos and sin is self.sin and pairing == self.pairing
        return self.cos, self.sin, self._phase if fresh else None


def rotate(x: Tensor, rotation: Rotation, *, overwrite: bool = False) -> Tensor:
    """Turn every pair of channels of queries or keys by its angle.

    Arithmetic is in float32 at least; cos and sin of position zero are exactly 1 and 0: such tokens stay as they are.

    Args:
        overwrite: allow the result to take the place of x in memory, which is faster where no gradient needs x.

    Shapes: x (..., heads, tokens, head_dim), always with a heads axis -> the same shape and dtype.
    Raises: ValueError where x does not fit the rotation.
    Source: RoFormer (arXiv 2104.09864), equation 34.
    """
    _check_fit(x.shape, x.dtype, rotation)
    return turn(x, rotation._tables(), rotation.pairing, overwrite=overwrite)


def rotate_qkv(qkv: Tensor, rotation: Rotation, *, overwrite: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed projection and turn its queries and keys, both in one pass.

    Args:
        overwrite: allow the result to take the place of qkv in memory, which is faster where no gradient needs qkv.

    Shapes: qkv (batch, tokens, 3, heads, head_dim) -> q, k, v, each (batch, heads, tokens, head_dim).
    Raises: ValueError where qkv does not fit the rotation.
    """
    if qkv.ndim != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv has shape {tuple(qkv.shape)}; it must be (batch, tokens, 3, heads, head_dim)")
    batch, tokens, _, heads, head_dim = qkv.shape
    _check_fit((batch, heads, tokens, head_dim), qkv.dtype, rotation)
    return turn_qkv(qkv, rotation._tables(), rotation.pairing, overwrite=overwrite)


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
    if is_eager(angles):
        turns = torch.polar(angles.new_ones(()), angles).to(torch.complex64)
        *first, last = turns.split(list(size), dim=-2)
        phase = _after_prefix(num_prefix_tokens, functools.reduce(_outer, first) if first else None, last)
        if pairing == "interleaved":
            return [Rotation(layer.real, layer.imag, pairing, attention_scale, layer) for layer in phase.unbind()]
        cos, sin = torch.view_as_real(phase).movedim(-1, 0).contiguous()
    else:
        cosines, sines = (table.float().split(list(size), dim=-2) for table in (angles.cos(), angles.sin()))
        cos, sin = cosines[0], sines[0]
        for cos_2, sin_2 in zip(cosines[1:], sines[1:], strict=True):
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

    index = torch.arange(head_dim, device="cpu")

    def channels(pairing: Pairing) -> Tensor:
        return rearrange(pairs_of(index, pairing), "groups two pairs -> (groups pairs two)")

    permutation = torch.empty_like(index)
    permutation[channels(target)] = channels(source)
    return permutation


def _after_prefix(count: int, first: Tensor | None, last: Tensor) -> Tensor:
    """Ones for prefix tokens, then the products of all rows of two tables, in one pass where no gradient is needed."""
    if first is None or last.requires_grad or forward_ad.unpack_dual(last).tangent is not None:
        ones = last.new_ones(()).expand(*last.shape[:-2], count, last.shape[-1])
        return torch.cat((ones, last if first is None else _outer(first, last)), dim=-2)
    rows, columns = first.shape[-2], last.shape[-2]
    phase = last.new_empty(*last.shape[:-2], count + rows * columns, last.shape[-1])
    phase.narrow(-2, 0, count).fill_(1.0)
    grid = phase.narrow(-2, count, rows * columns).unflatten(-2, (rows, columns))
    torch.mul(first.unsqueeze(-2), last.unsqueeze(-3), out=grid)
    return phase


def _outer(first: Tensor, second: Tensor) -> Tensor:
    """Products of all rows of two tables (..., rows, pairs), row-major."""
    return (first.unsqueeze(-2) * second.unsqueeze(-3)).flatten(-3, -2)


def _check_fit(shape: Sequence[int], dtype: torch.dtype, rotation: Rotation) -> None:
    table = rotation.cos.shape
    if not dtype.is_floating_point:
        raise ValueError(f"x has dtype {dtype}; queries and keys are floating point numbers: convert it with x.float()")
    if len(shape) < 3 or shape[-1] != 2 * table[-1]:
        raise ValueError(
            f"x has shape {tuple(shape)} and the rotation is for head_dim {2 * table[-1]} (cos {tuple(table)}); x "
            "must be (..., heads, tokens, head_dim): split the channels into heads first"
        )
    if shape[-2] != table[-2]:
        hint = (
            "x seems to be (..., tokens, heads, head_dim): give x.transpose(-3, -2)"
            if shape[-3] == table[-2]
            else "pass the positions of exactly these tokens, prefix tokens included (with_prefix)"
        )
        raise ValueError(
            f"x has {shape[-3]} heads and {shape[-2]} tokens (shape {tuple(shape)}) and the rotation is for "
            f"{table[-2]} tokens (cos {tuple(table)}); {hint}"
        )
    if table[-3] not in (1, shape[-3]):
        raise ValueError(
            f"x has {shape[-3]} heads (shape {tuple(shape)}) and the rotation has tables for {table[-3]} heads (cos "
            f"{tuple(table)}); build the rotary embedding with num_heads={shape[-3]}"
        )
    if len(table) > 3 and (len(shape) < len(table) or table[-4] not in (1, shape[-4])):
        raise ValueError(
            f"x has shape {tuple(shape)} and the rotation has a batch of {table[-4]} (cos {tuple(table)}); "
            "the batches must agree"
        )
