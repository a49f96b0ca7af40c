"""Backbones of a segmenter: what a timm model sees in a frame, at the grid of the memory and at finer ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from vision_rope.memory.attention import Grid
from vision_rope.memory.encoder import MASK_STRIDE, ChannelNorm
from vision_rope.segmenter.framing import resize

# Strides of the stages of a hierarchical model, the finest first: the third one is the memory's.
STAGE_STRIDES = (4, 8, 16, 32)


class Pyramid(NamedTuple):
    """Features of frames.

    Shapes: coarse (batch, dim, h, w), middle (batch, channels, 2 * h, 2 * w), fine (batch, channels, 4 * h, 4 * w)
    """

    coarse: Tensor
    middle: Tensor
    fine: Tensor

    @property
    def grid(self) -> Grid:
        """(rows, columns) of the coarse features."""
        return self.coarse.shape[-2], self.coarse.shape[-1]


class VitBackbone(nn.Module):
    """A vision transformer, whose one grid is brought to finer ones, with details from the frame itself.

    Attributes:
        stride: the sides of frames are multiples of it, in pixels.
        cell: pixels along the side of a cell of the coarse grid.

    Args:
        trunk: a timm model with patches, as `vision_rope.create_model` gives it; it loses its classifier.
        dim: channels of the features.

    Raises: ValueError for a model without a single square patch.
    Source: the simple pyramid of ViTDet (arXiv 2203.16527); a convolutional stem for details as in ViT-Adapter (arXiv
        2205.08534).
    """

    def __init__(self, trunk: Any, dim: int = 256) -> None:
        super().__init__()
        rows, columns = trunk.patch_embed.patch_size
        if rows != columns:
            raise ValueError(f"the backbone has patches of {rows}x{columns} pixels; a segmenter needs square ones")
        trunk.reset_classifier(0)
        self.trunk = trunk
        self.stride = self.cell = int(rows)
        width = trunk.num_features
        self.coarse = nn.Sequential(nn.Conv2d(width, dim, 1), ChannelNorm(dim))
        self.middle = nn.ConvTranspose2d(width, dim, 2, stride=2)
        self.fine = nn.Sequential(
            nn.ConvTranspose2d(width, dim // 2, 2, stride=2),
            ChannelNorm(dim // 2),
            nn.GELU(),
            nn.ConvTranspose2d(dim // 2, dim, 2, stride=2),
        )
        self.details = nn.Sequential(
            nn.Conv2d(3, dim // 8, 3, stride=2, padding=1),
            ChannelNorm(dim // 8),
            nn.GELU(),
            nn.Conv2d(dim // 8, dim, 3, stride=2, padding=1),
        )

    def forward(self, frames: Tensor) -> Pyramid:
        """Shapes: frames (batch, 3, height, width), normalised; both a multiple of `stride`"""
        tokens = self.trunk.forward_intermediates(frames, indices=1, norm=True, intermediates_only=True)[-1]
        rows, columns = tokens.shape[-2:]
        # In single precision: CPUs have no other kernel for it.
        frames = resize(frames.float(), (MASK_STRIDE * rows, MASK_STRIDE * columns)).to(frames.dtype)
        return Pyramid(self.coarse(tokens), self.middle(tokens), self.fine(tokens) + self.details(frames))


class PyramidBackbone(nn.Module):
    """A hierarchical model with strides 4, 8, 16 and 32, such as SAM 2's Hiera, and SAM 2's feature pyramid.

    Args:
        trunk: a timm model; it loses its classifier.
        dim: channels of the features.

    Raises: ValueError for a model of other strides.
    Source: SAM 2 (arXiv 2408.00714), appendix D.1, where the coarsest stage is added to the one before and to no other.
    """

    stride = STAGE_STRIDES[-1]
    cell = STAGE_STRIDES[-2]

    def __init__(self, trunk: Any, dim: int = 256) -> None:
        super().__init__()
        strides = tuple(stage["reduction"] for stage in trunk.feature_info)
        if strides[-4:] != STAGE_STRIDES:
            raise ValueError(
                f"the backbone's stages have the strides {strides}; a segmenter needs {STAGE_STRIDES}, or a vision "
                "transformer with patches"
            )
        # Not the norm before the classes: SAM 2 takes features as they come, and its weights have none.
        trunk.reset_classifier(0, **({"reset_other": True} if type(trunk).__name__ == "HieraDet" else {}))
        self.trunk = trunk
        self.neck = Neck([stage["num_chs"] for stage in trunk.feature_info[-4:]], dim)

    def forward(self, frames: Tensor) -> Pyramid:
        """Shapes: frames (batch, 3, height, width), normalised; both a multiple of 32"""
        return self.neck(self.trunk.forward_intermediates(frames, indices=4, intermediates_only=True))


class Neck(nn.Module):
    """Projections of a hierarchical model's stages to the same width. Names of parameters are those of SAM 2."""

    def __init__(self, widths: Sequence[int], dim: int) -> None:
        super().__init__()
        # SAM 2 counts from the coarsest stage.
        self.convs = nn.ModuleList(nn.Sequential() for _ in widths)
        for conv, width in zip(self.convs, reversed(widths), strict=True):
            conv.add_module("conv", nn.Conv2d(width, dim, 1))

    def forward(self, stages: Sequence[Tensor]) -> Pyramid:
        """Shapes: stages (batch, width, h, w) each, the finest first"""
        coarsest, coarse, middle, fine = (conv(x) for conv, x in zip(self.convs, reversed(stages), strict=True))
        above = functional.interpolate(coarsest, scale_factor=2.0, mode="nearest")
        return Pyramid(coarse + above, middle, fine)


def create_backbone(
    model: str | nn.Module,
    dim: int,
    *,
    position: str = "rope-vit-axial",
    position_options: dict[str, Any] | None = None,
    pretrained: bool = False,
    **timm_options: Any,
) -> VitBackbone | PyramidBackbone:
    """The backbone that is made of a model.

    Args:
        model: of `vision_rope.create_model` or timm, or timm's name of one: a family that `create_model` knows gets
            the position encoding, a hierarchical one keeps its own.

    Raises: ValueError for an unknown name, and a model of which none can be made.
    """
    from vision_rope.convert import FAMILIES, add_position, create_timm_model
    from vision_rope.convert.model import PositionedModel

    if isinstance(model, str):
        name = model
        model = create_timm_model(name, position, position_options or {}, pretrained=pretrained, **timm_options)
        if type(model) in FAMILIES:
            model = add_position(model, position, **(position_options or {}))
    else:
        options = {"pretrained": pretrained, "position_options": position_options, **timm_options}
        if without_effect := [key for key, value in options.items() if value]:
            raise ValueError(f"{', '.join(without_effect)} would have no effect on a model that is built already")
    trunk: Any = model
    if isinstance(trunk, PositionedModel) or hasattr(getattr(trunk, "patch_embed", None), "patch_size"):
        return VitBackbone(trunk, dim)
    if not hasattr(trunk, "forward_intermediates") or not getattr(trunk, "feature_info", None):
        raise ValueError(
            f"model is a {type(trunk).__name__}; a segmenter needs a vision transformer, or a hierarchical timm model "
            f"with the strides {STAGE_STRIDES}, such as sam2_hiera_tiny"
        )
    return PyramidBackbone(trunk, dim)
