"""Mask decoder of SAM 2: tokens of prompts and features of a frame become candidate masks, their quality and a score.

Names of parameters are those of SAM 2 and SAM 2.1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vision_rope.memory.encoder import ChannelNorm
from vision_rope.memory.perceptron import Perceptron
from vision_rope.segmenter.two_way import TwoWayTransformer

# A single mask is taken where it hardly changes with the threshold of its logits: by less than 2 % within 0.05.
STABLE_DELTA, STABLE_SHARE = 0.05, 0.98


class Candidates(NamedTuple):
    """What a decoder offers for the objects of a frame.

    Attributes:
        logits: of each mask, at four times the grid.
        qualities: predicted IoU of each mask.
        tokens: output token of each mask.
        scores: logit that the object is in the frame.

    Shapes: logits (objects, masks, h, w), qualities (objects, masks), tokens (objects, masks, dim), scores (objects, 1)
    """

    logits: Tensor
    qualities: Tensor
    tokens: Tensor
    scores: Tensor


class MaskDecoder(nn.Module):
    """Candidate masks of the objects that prompts and memory point to.

    Args:
        dim: channels of features and tokens; a multiple of 8.
        depth, num_heads, mlp_dim: of the transformer between tokens and features.
        num_masks: candidates for a prompt that can mean several things, beside the one for a prompt that cannot; 0 has
            that one alone.

    Source: SAM (arXiv 2304.02643), appendix A; SAM 2 (arXiv 2408.00714), appendix D.1.
    """

    def __init__(
        self, dim: int = 256, *, depth: int = 2, num_heads: int = 8, mlp_dim: int = 2048, num_masks: int = 3
    ) -> None:
        super().__init__()
        if dim % 8 or (dim // 2) % num_heads:
            raise ValueError(
                f"dim is {dim}; it must be a multiple of 8, and num_heads ({num_heads}) must divide half of it"
            )
        self.transformer = TwoWayTransformer(dim, depth=depth, num_heads=num_heads, mlp_dim=mlp_dim)
        self.obj_score_token = nn.Embedding(1, dim)
        self.iou_token = nn.Embedding(1, dim)
        self.mask_tokens = nn.Embedding(num_masks + 1, dim)
        self.output_upscaling = nn.Sequential(
            nn.ConvTranspose2d(dim, dim // 4, 2, stride=2),
            ChannelNorm(dim // 4),
            nn.GELU(),
            nn.ConvTranspose2d(dim // 4, dim // 8, 2, stride=2),
            nn.GELU(),
        )
        self.conv_s0 = nn.Conv2d(dim, dim // 8, 1)
        self.conv_s1 = nn.Conv2d(dim, dim // 4, 1)
        self.output_hypernetworks_mlps = nn.ModuleList(
            Perceptron(dim, dim, dim, dim // 8) for _ in range(num_masks + 1)
        )
        self.iou_prediction_head = Perceptron(dim, dim, dim, num_masks + 1)
        self.pred_obj_score_head = Perceptron(dim, dim, dim, 1)

    def forward(
        self, features: Tensor, places: Tensor, prompts: Tensor, middle: Tensor, fine: Tensor, *, ambiguous: bool
    ) -> Candidates:
        """Decode the masks of objects.

        Args:
            features: of the frame, conditioned on each object's memory, with the map of its mask prompt added.
            places: encoding of the grid's cells.
            prompts: tokens of each object's prompts.
            middle, fine: features at twice and four times the grid, from `conv_s1` and `conv_s0`.
            ambiguous: offer the masks for prompts that can mean several things, as a single click does. Otherwise
                there is one, and in evaluation one of those in its place where it is not stable.

        Shapes: features (objects, dim, h, w), places (1, h * w, dim), prompts (objects, n, dim), middle (objects or 1,
            dim / 4, 2 * h, 2 * w), fine (objects or 1, dim / 8, 4 * h, 4 * w)
        """
        own = torch.cat((self.obj_score_token.weight, self.iou_token.weight, self.mask_tokens.weight))
        tokens = torch.cat((own.expand(len(prompts), -1, -1), prompts), dim=1)
        tokens, cells = self.transformer(tokens, features.flatten(2).mT, places)
        mask_tokens = tokens[:, 2 : 2 + len(self.mask_tokens.weight)]
        first, norm, gelu, second, _ = self.output_upscaling
        x = gelu(norm(first(cells.mT.reshape(features.shape)) + middle))
        x = functional.gelu(second(x) + fine)
        kernels = [
            head(token) for head, token in zip(self.output_hypernetworks_mlps, mask_tokens.unbind(1), strict=True)
        ]
        found = Candidates(
            (torch.stack(kernels, dim=1) @ x.flatten(2)).unflatten(-1, x.shape[-2:]),
            self.iou_prediction_head(tokens[:, 1]).sigmoid(),
            mask_tokens,
            self.pred_obj_score_head(tokens[:, 0]),
        )
        single = Candidates(found.logits[:, :1], found.qualities[:, :1], found.tokens[:, :1], found.scores)
        if mask_tokens.shape[1] == 1:
            return single
        several = Candidates(found.logits[:, 1:], found.qualities[:, 1:], found.tokens[:, 1:], found.scores)
        if ambiguous:
            return several
        return single if self.training else _stable(single, choose_best(several))


def choose_best(candidates: Candidates) -> Candidates:
    """The one mask of each object that has the highest quality."""
    best = candidates.qualities.argmax(1, keepdim=True)
    return Candidates(
        candidates.logits.take_along_dim(best[..., None, None], dim=1),
        candidates.qualities.take_along_dim(best, dim=1),
        candidates.tokens.take_along_dim(best[..., None], dim=1),
        candidates.scores,
    )


def _stable(single: Candidates, best: Candidates) -> Candidates:
    """The single mask, and the best of several where it is not stable; the token stays that of the single one."""
    inner, outer = ((single.logits > bound).sum((-2, -1)) for bound in (STABLE_DELTA, -STABLE_DELTA))
    stable = (outer == 0) | (inner >= STABLE_SHARE * outer)
    return Candidates(
        torch.where(stable[..., None, None], single.logits, best.logits),
        torch.where(stable, single.qualities, best.qualities),
        single.tokens,
        single.scores,
    )
