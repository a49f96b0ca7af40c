"""Segmenters from the name of a backbone and a few widths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from vision_rope.memory.attention import MemoryAttention
from vision_rope.memory.encoder import MemoryEncoder
from vision_rope.memory.selection import MemoryPolicy
from vision_rope.memory.video_memory import VideoMemory
from vision_rope.segmenter.backbone import create_backbone
from vision_rope.segmenter.mask_decoder import MaskDecoder
from vision_rope.segmenter.prompt_encoder import PromptEncoder
from vision_rope.segmenter.segmenter import VideoSegmenter


def create_segmenter(
    model: str | nn.Module,
    *,
    position: str = "rope-vit-axial",
    position_options: dict[str, Any] | None = None,
    model_options: dict[str, Any] | None = None,
    pretrained: bool = False,
    dim: int = 256,
    memory_dim: int = 64,
    depth: int = 4,
    mlp_dim: int = 2048,
    num_heads: int = 1,
    dropout: float = 0.1,
    decoder_depth: int = 2,
    decoder_heads: int = 8,
    num_masks: int = 3,
    image_size: int | None = None,
    train_size: tuple[int, int] | None = None,
    mean: Sequence[float] = (0.485, 0.456, 0.406),
    std: Sequence[float] = (0.229, 0.224, 0.225),
    policy: MemoryPolicy | None = None,
    previous_mask: bool = False,
) -> VideoSegmenter:
    """A video segmenter on a backbone, in training mode; its memory and its decoder start with random weights.

    Args:
        model: of `create_model` or timm, or timm's name of one: a vision transformer, which gets the position encoding,
            or a hierarchical model with strides 4, 8, 16 and 32, such as sam2_hiera_tiny, which keeps its own.
        position, position_options, pretrained: of the backbone, as of `create_model`.
        model_options: of timm.create_model for the backbone: img_size, embed_dim, depth, ...
        dim: channels of the features that memory and decoder read.
        memory_dim: channels of a stored frame.
        depth, mlp_dim, num_heads, dropout: of memory attention.
        decoder_depth, decoder_heads: of the mask decoder, whose perceptrons are as wide as those of memory attention.
        num_masks: candidates of the decoder for prompts that can mean several things, as a click does; 0 always has one
            mask, which small trainings learn sooner.
        image_size: the long side that frames are resized to; None takes them as they are.
        train_size: (height, width) in pixels that it is trained at, from which context extension counts.
        mean, std: of each channel, by which frames are normalised.
        policy: what is kept in memory and read.
        previous_mask: the decoder also gets the mask of the frame before; see `SegmenterNetwork`.

    Raises: ValueError for an unknown name, a model without such features, or widths that do not fit.
    """
    backbone = create_backbone(
        model,
        dim,
        position=position,
        position_options=position_options,
        pretrained=pretrained,
        **(model_options or {}),
    )
    attention = MemoryAttention(dim, memory_dim, depth, mlp_dim, num_heads, dropout=dropout)
    policy = policy or MemoryPolicy()
    return VideoSegmenter(
        backbone,
        VideoMemory(attention, MemoryEncoder(dim, memory_dim), num_ages=policy.num_recent + 1),
        PromptEncoder(dim),
        MaskDecoder(dim, depth=decoder_depth, num_heads=decoder_heads, mlp_dim=mlp_dim, num_masks=num_masks),
        image_size=image_size,
        train_size=train_size,
        mean=mean,
        std=std,
        policy=policy,
        previous_mask=previous_mask,
    )
