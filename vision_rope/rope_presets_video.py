"""The published methods with three axes (t, h, w): videos, and sequences of text, images and videos.

Text has t = h = w, so that it turns as in one dimension; `vision_rope.multimodal` lays such sequences out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from vision_rope.coordinates import Coordinates
from vision_rope.frequencies import Ladder, mixed_frequencies_3d, shared_ladder, split_pairs
from vision_rope.rope import Rope
from vision_rope.rotation import Pairing

T, H, W = 0, 1, 2


def build_qwen2_vl(
    head_dim: int,
    num_heads: int,
    depth: int,
    *,
    base: float = 1000000.0,
    sections: Sequence[int] | None = None,
    pairing: Pairing = "half",
) -> Rope:
    """Three axes, M-RoPE in chunks: one ladder, its first pairs given to time, then rows, then columns.

    Args:
        sections: pairs of (t, h, w); by default 16 : 24 : 24 of 64, rows and columns rounded down to equal numbers.

    Pairs: 0..15 with time, 16..39 with the row, 40..63 with the column, where head_dim is 128.
    Compatible with: the language models of Qwen2-VL and Qwen2.5-VL; positions of their sequences:
        multimodal_positions(segments, "qwen2-vl" or "qwen2.5-vl").
    Source: Wang et al., Qwen2-VL (arXiv 2409.12191), section 2.1.
    """
    t, h, w = _sections("qwen2-vl", head_dim, sections, spatial_share=24 / 64)
    ladders = shared_ladder(base, [T] * t + [H] * h + [W] * w, axes=3)
    return Rope(head_dim=head_dim, axes=3, pairing=pairing, ladders=ladders, depth=depth, name="qwen2-vl")


def build_qwen3_vl(
    head_dim: int,
    num_heads: int,
    depth: int,
    *,
    base: float = 5000000.0,
    sections: Sequence[int] | None = None,
    pairing: Pairing = "half",
) -> Rope:
    """Three axes, M-RoPE interleaved: one ladder dealt out t, h, w, t, h, w, ..., slow and fast pairs for each axis.

    Args:
        sections: pairs of (t, h, w); by default 24 : 20 : 20 of 64, rows and columns rounded down to equal numbers.
            Pair j goes to h where j % 3 == 1 and j < 3 * sections[1], to w where j % 3 == 2 and j < 3 * sections[2],
            else to t; where 3 * section passes the number of pairs, time has a few more, as in transformers.

    Pairs: j % 3 says the axis up to pair 59, the last four turn with time, where head_dim is 128.
    Compatible with: the language model of Qwen3-VL (base=5e5 is transformers' default where a configuration says
        nothing); with t = 0 and base=1e4, timm's RotaryEmbeddingMRope.
    Source: Qwen3-VL technical report (arXiv 2511.21631), "interleaved MRoPE".
    """
    _, h, w = _sections("qwen3-vl", head_dim, sections, spatial_share=20 / 64)

    def axis(pair: int) -> int:
        if pair % 3 == 1 and pair < 3 * h:
            return H
        return W if pair % 3 == 2 and pair < 3 * w else T

    ladders = shared_ladder(base, [axis(pair) for pair in range(head_dim // 2)], axes=3)
    return Rope(head_dim=head_dim, axes=3, pairing=pairing, ladders=ladders, depth=depth, name="qwen3-vl")


def build_videorope(
    head_dim: int,
    num_heads: int,
    depth: int,
    *,
    base: float = 1000000.0,
    sections: Sequence[int] | None = None,
    time_scale: float = 2.0,
    pairing: Pairing = "half",
) -> Rope:
    """Three axes, one ladder: rows and columns alternate on its fast pairs, time has the slowest.

    Frames are centred on the diagonal of time: a token's position is (t, t + row - (rows - 1) // 2, t + column -
    (columns - 1) // 2) with t = time_scale * step, as multimodal_positions(segments, "videorope") has it. More frames
    so take rows and columns to positions that training never had, and context extension, which counts the lengths of
    the grid, treats time alone; factors="max" treats all three alike.

    Args:
        time_scale: positions a step of time; 2 in the paper.
        sections: pairs of (t, h, w), h equal to w or one more; by default 16 : 24 : 24 of 64, rows and columns rounded
            down to equal numbers.

    Pairs: 0..47 with row, column, row, ..., 48..63 with time, where head_dim is 128.
    Compatible with: Wiselnn570/VideoRoPE. The port in Multimodal-RoPEs gives other pairs to time and disagrees.
    Source: Wei et al., VideoRoPE (arXiv 2502.05173), "low-frequency temporal allocation".
    """
    t, h, w = _sections("videorope", head_dim, sections, spatial_share=24 / 64)
    if h - w not in (0, 1):
        raise ValueError(
            f"sections is {(t, h, w)}; rows and columns alternate in videorope, so h must equal w or be one more"
        )
    ladders = shared_ladder(base, ([H, W] * h)[: h + w] + [T] * t, axes=3)
    return Rope(
        head_dim=head_dim,
        axes=3,
        pairing=pairing,
        ladders=ladders,
        depth=depth,
        coordinates=Coordinates(diagonal=time_scale),
        name="videorope",
    )


def build_v_jepa2(
    head_dim: int, num_heads: int, depth: int, *, base: float = 10000.0, pairing: Pairing = "interleaved"
) -> Rope:
    """Three axes with a ladder each, on a third of the pairs, rounded down; pairs that are left over do not turn.

    An axis has p = (head_dim // 3) // 2 pairs with frequencies base ** (-i / p); head_dim / 2 - 3p pairs are unrotated
    (head_dim 64: 10 pairs an axis, 2 unrotated).

    Pairs: 0..p-1 with time, p..2p-1 with the row, 2p..3p-1 with the column.
    Compatible with: V-JEPA 2's formula, not its released weights. The released code pairs neighbouring channels, but
        lays cos and sin out for halves, which changes norms by up to 22 %, and scores with the absolute position: no
        rotation. That form is left out on purpose; this is the orthogonal one that the paper describes.
    Source: Assran et al., V-JEPA 2 (arXiv 2506.09985), "3D-RoPE".
    """
    _check_head_dim(head_dim)
    pairs = head_dim // 3 // 2
    ladders = [
        Ladder(base=base, pairs=pairs, slots=tuple(range(axis * pairs, (axis + 1) * pairs))) for axis in (T, H, W)
    ]
    return Rope(head_dim=head_dim, axes=3, pairing=pairing, ladders=ladders, depth=depth, name="v-jepa2")


def build_axial_3d(
    head_dim: int, num_heads: int, depth: int, *, base: float = 100.0, pairing: Pairing = "interleaved"
) -> Rope:
    """Three axes with a ladder each, on as equal parts of a head's pairs as there are; every pair turns.

    rope-vit-axial with time. Rows and columns have equally many pairs: of pairs that three does not divide, one that is
    left goes to time, two go to row and column (head_dim 64: 10, 11 and 11). An axis with p pairs has the frequencies
    base ** (-i / p).

    Pairs: the first third with time, the second with the row, the last with the column.
    Source: Heo et al., Rotary Position Embedding for Vision Transformer (arXiv 2403.13298), section 3.2, with an axis
        more.
    """
    _check_head_dim(head_dim)
    ladders, start = [], 0
    for pairs in split_pairs(head_dim // 2):
        ladders.append(Ladder(base=base, pairs=pairs, slots=tuple(range(start, start + pairs))))
        start += pairs
    return Rope(head_dim=head_dim, axes=3, pairing=pairing, ladders=ladders, depth=depth, name="axial-3d")


def build_mixed_3d(
    head_dim: int,
    num_heads: int,
    depth: int,
    *,
    base: float = 10.0,
    pairing: Pairing = "interleaved",
    generator: torch.Generator | None = None,
) -> Rope:
    """Three axes, learned: every pair turns with time, row and column, at its own speeds in each layer and head.

    rope-vit-mixed with time. Pairs begin in three directions at right angles to each other, drawn for each layer and
    head, as many in each as axial-3d has for its axes and with its magnitudes.

    Pairs: all with time, row and column.
    Source: Heo et al. (arXiv 2403.13298), section 3.2, with an axis more.
    """
    _check_head_dim(head_dim)
    draw = functools.partial(mixed_frequencies_3d, head_dim, num_heads, depth, base=base)
    rope = Rope(head_dim=head_dim, axes=3, pairing=pairing, initial_frequencies=draw, depth=depth, name="mixed-3d")
    if generator is not None:
        rope.reset_parameters(generator)
    return rope


def _sections(
    name: str, head_dim: int, sections: Sequence[int] | None, *, spatial_share: float
) -> tuple[int, int, int]:
    """Pairs of (t, h, w): as given, or shares of the head with equal numbers for rows and columns."""
    _check_head_dim(head_dim)
    pairs = head_dim // 2
    if sections is None:
        spatial = max(1, int(pairs * spatial_share))
        return pairs - 2 * spatial, spatial, spatial
    if len(sections) != 3 or min(sections) < 1 or sum(sections) != pairs:
        raise ValueError(
            f"sections is {tuple(sections)} for {name} with head_dim {head_dim}; give three positive numbers of pairs "
            f"(t, h, w) with sum {pairs}, half of head_dim"
        )
    return sections[0], sections[1], sections[2]


def _check_head_dim(head_dim: int) -> None:
    if head_dim < 6 or head_dim % 2:
        nearest = max(6, head_dim // 2 * 2)
        raise ValueError(
            f"head_dim is {head_dim}; it must be even and at least 6 (two channels a pair, a pair for each of t, h and "
            f"w), for instance {nearest}: change embed_dim or num_heads"
        )
