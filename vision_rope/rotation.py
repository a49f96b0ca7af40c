"""Turning queries and keys: `Rotation`, cos and sin of every pair's angle, and `rotate`, the only place to apply it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor

Pairing = Literal["interleaved", "half"]
PAIRINGS = ("interleaved", "half")


@dataclass(eq=False)
class Rotation:
    """How far each pair of channels of each token turns.

    Attributes:
        cos, sin: one value a pair, (heads or 1, tokens, head_dim / 2), with a batch axis in front where samples differ.
        pairing: which channels form pair i: "interleaved" 2i and 2i + 1, "half" i and i + head_dim / 2.
        attention_scale: factor of the softmax scale (YaRN's temperature), so that cos and sin stay a rotation.

    Raises: ValueError for an unknown pairing.
    """

    cos: Tensor
    sin: Tensor
    pairing: Pairing
    attention_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.pairing not in PAIRINGS:
            raise ValueError(f"pairing is {self.pairing!r}; choose one of {', '.join(PAIRINGS)}")
        # The complex table of the eager path is built here, once for all layers and outside of activation checkpoints,
        # whose recomputation must see the same graph as the first pass. It is no field, since FSDP2 rebuilds dataclass
        # arguments from their fields.
        pays = self.pairing == "interleaved" and _complex_pays(self.cos)
        self._phase = torch.complex(self.cos, self.sin) if pays else None


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn every pair of channels of queries or keys by its angle.

    Arithmetic is in float32 at least; cos and sin of position zero are exactly 1 and 0: such tokens stay as they are.

    Shapes: x (..., heads, tokens, head_dim), always with a heads axis -> the same shape and dtype.
    Raises: ValueError where x does not fit the rotation.
    Source: RoFormer (arXiv 2104.09864), equation 34.
    """
    _check_fit(x, rotation)
    return _turn(x, rotation.cos, rotation.sin, rotation._phase, rotation.pairing)


def rotate_qkv(qkv: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed projection and turn its queries and keys, both in one pass.

    Shapes: qkv (batch, tokens, 3, heads, head_dim) -> q, k, v, each (batch, heads, tokens, head_dim).
    Raises: ValueError where qkv does not fit the rotation.
    """
    if qkv.ndim != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv has shape {tuple(qkv.shape)}; it must be (batch, tokens, 3, heads, head_dim)")
    _check_fit(qkv[:, :, 0].transpose(1, 2), rotation)

    def beside_qk(table: Tensor | None) -> Tensor | None:
        return None if table is None else rearrange(table, "... heads tokens pairs -> ... tokens 1 heads pairs")

    cos, sin = beside_qk(rotation.cos), beside_qk(rotation.sin)
    assert cos is not None
    assert sin is not None
    turned = _turn(qkv[:, :, :2], cos, sin, beside_qk(rotation._phase), rotation.pairing)
    q, k = turned.transpose(1, 3).unbind(2)
    return q, k, qkv[:, :, 2].transpose(1, 2)


def pairing_permutation(head_dim: int, source: Pairing, target: Pairing) -> Tensor:
    """Index p of channels with rotate_target(x[..., p]) == rotate_source(x)[..., p].

    Applied to the rows of the query and key projections (and their norms) it changes a model's pairing without
    changing its output.

    Shapes: -> (head_dim,) int64.
    Raises: ValueError for an unknown pairing or an odd head_dim.
    """
    for name, pairing in (("source", source), ("target", target)):
        if pairing not in PAIRINGS:
            raise ValueError(f"{name} is {pairing!r}; choose one of {', '.join(PAIRINGS)}")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; channels turn in pairs, so it must be even")
    index = torch.arange(head_dim)
    if source == target:
        return index
    if source == "half":
        return rearrange(index, "(two pairs) -> (pairs two)", two=2)
    return rearrange(index, "(pairs two) -> (two pairs)", two=2)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, phase: Tensor | None, pairing: Pairing) -> Tensor:
    """The three forms of one rotation; tables broadcast against x with the last axis halved."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(dtype)
    if phase is not None and _complex_pays(x):
        # At the speed of a copy in eager mode: one fused multiplication, no temporary halves.
        turned = torch.view_as_real(_view_as_complex(wide) * phase).flatten(-2)
    elif pairing == "interleaved":
        even, odd = wide.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    else:
        first, second = wide.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.to(x.dtype)


def _view_as_complex(x: Tensor) -> Tensor:
    """Neighbouring channels as complex numbers, (..., 2 * pairs) -> (..., pairs), without a copy where possible."""
    aligned = x.stride(-1) == 1 and x.storage_offset() % 2 == 0 and all(step % 2 == 0 for step in x.stride()[:-1])
    if not aligned:
        x = x.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _complex_pays(x: Tensor) -> bool:
    """Eager CPU and CUDA multiply complex numbers fast; compilers and exporters neither fuse nor export them."""
    tracing = torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()
    return x.device.type in ("cpu", "cuda") and not tracing


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
