"""Packed attention: against one masked attention over everything, against each sequence alone, and bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import vision_rope as vr

LENGTHS = [5, 1, 12]


def block_mask(lengths, is_causal=False):
    """Second formulation: who may look at whom, from the number of its sequence."""
    sequence = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)])
    mask = sequence[:, None] == sequence
    return mask & torch.ones_like(mask).tril() if is_causal else mask


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lead", [(3,), (1, 3), (2, 3)])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_packed_attention_is_attention_under_a_block_diagonal_mask(lead, is_causal, scale):
    q, k, v = torch.randn(3, *lead, sum(LENGTHS), 8)
    packed = vr.attend_packed(q, k, v, LENGTHS, scale=scale, is_causal=is_causal)
    assert_close(packed, vr.attend(q, k, v, mask=block_mask(LENGTHS, is_causal), scale=scale), atol=1e-6, rtol=1e-5)


def test_gradients_and_dtypes_of_packed_attention():
    q, k, v = (torch.randn(1, 2, sum(LENGTHS), 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    grads = torch.autograd.grad(vr.attend_packed(q, k, v, LENGTHS).square().sum(), (q, k, v))
    masked = vr.attend(q, k, v, mask=block_mask(LENGTHS))
    assert_close(grads, torch.autograd.grad(masked.square().sum(), (q, k, v)))
    low = (x.detach().bfloat16() for x in (q, k, v))
    assert vr.attend_packed(*low, np.array(LENGTHS)).dtype == torch.bfloat16


def test_dropout_drops_weights():
    q, k = torch.randn(2, 1, 2, sum(LENGTHS), 4)
    ones = torch.ones(1, 2, sum(LENGTHS), 4)
    assert_close(vr.attend_packed(q, k, ones, LENGTHS), ones)
    assert not torch.allclose(vr.attend_packed(q, k, ones, LENGTHS, dropout=0.5), ones)


@pytest.mark.parametrize("name", ["rope-vit-axial", "rope-vit-mixed", "dinov3"])
def test_images_of_three_sizes_packed_are_each_image_alone(name):
    """From positions to the output: nothing of another image enters, and each has the positions of its own grid."""
    grids = [(2, 3), (4, 1), (3, 5)]
    rope = vr.preset(name, head_dim=16, num_heads=2)
    images = [torch.randn(1, h * w + 1, 3, 2, 16) for h, w in grids]  # a class token each
    positions = [vr.with_prefix(rope.positions(h, w), 1) for h, w in grids]

    q, k, v = vr.rotate_qkv(torch.cat(images, dim=1), rope(torch.cat(positions)))
    packed = vr.attend_packed(q, k, v, [len(x) for x in positions])
    alone = [vr.attend(*vr.rotate_qkv(image, rope(place))) for image, place in zip(images, positions, strict=True)]
    assert_close(packed, torch.cat(alone, dim=2), atol=1e-6, rtol=1e-5)


@pytest.mark.integration
def test_packed_attention_compiles_as_one_graph():
    q, k, v = torch.randn(3, 1, 2, sum(LENGTHS), 8)
    compiled = torch.compile(vr.attend_packed, fullgraph=True, backend="aot_eager")
    assert_close(compiled(q, k, v, LENGTHS), vr.attend_packed(q, k, v, LENGTHS))


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([], "at least one sequence"),
        ([5, 0, 13], r"\[5, 0, 13\].*one token in each"),
        ([20, -2], "one token in each"),
        ([5, 12], r"q has shape \(1, 2, 18, 8\).*add up to 17"),
        ([5.0, 13.0], "whole numbers"),
        (18, "lengths is 18; it must be a sequence"),
    ],
)
def test_wrong_lengths_are_refused(lengths, words):
    q = torch.randn(1, 2, 18, 8)
    with pytest.raises(ValueError, match=words):
        vr.attend_packed(q, q, q, lengths)


def test_the_tensor_that_does_not_fit_is_named():
    q = torch.randn(1, 2, 18, 8)
    with pytest.raises(ValueError, match=r"k has shape \(1, 2, 17, 8\)"):
        vr.attend_packed(q, q[:, :, 1:], q, LENGTHS)
    with pytest.raises(ValueError, match=r"must be \(..., heads, 18, head_dim\)"):
        vr.attend_packed(q[0, 0], q[0, 0], q[0, 0], LENGTHS)


@pytest.mark.parametrize("lengths", [[0, 24, 45], [24, 45]])
def test_cumulative_lengths_are_told_from_lengths(lengths: list[int]) -> None:
    x = torch.zeros(1, 2, 45, 4)
    with pytest.raises(ValueError, match="cumulative lengths, as flash-attention takes them, are no lengths"):
        vr.attend_packed(x, x, x, lengths)
    for wrong in ([45, 24], [45, 45], [46]):
        with pytest.raises(ValueError, match=r"one after the other$"):
            vr.attend_packed(x, x, x, wrong)
