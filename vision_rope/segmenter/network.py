"""What the weights of a segmenter compute: masks of a batch of objects, from features, prompts and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vision_rope.memory.bank import MemoryBank, StoredFrame, StoredPointer
from vision_rope.memory.encoder import MASK_STRIDE
from vision_rope.memory.selection import MemoryPolicy
from vision_rope.memory.sine import sine_2d
from vision_rope.memory.video_memory import VideoMemory
from vision_rope.rope import Rope
from vision_rope.segmenter.backbone import Pyramid
from vision_rope.segmenter.framing import Framing
from vision_rope.segmenter.mask_decoder import Candidates, MaskDecoder, choose_best
from vision_rope.segmenter.prompt_encoder import MASK_CELLS, NO_POINT, PromptEncoder

# Logits of a mask where its object is not in the frame.
NOTHING = -1024.0
# Logits that a mask prompt stands for, inside and outside.
SURE = 10.0
# Logits that go back into the prompt encoder are cut off there, as in SAM 2.
LARGEST_LOGIT = 32.0
# How often training withholds the mask of the frame before, so that memory is read too.
WITHHELD = 0.15


class FrameOutput(NamedTuple):
    """What a segmenter says of the objects of a frame in training: masks of absent ones too, which scores decide.

    Shapes: logits (objects, candidates, h, w) at four times the grid, qualities (objects, candidates), scores (objects)
    """

    logits: Tensor
    qualities: Tensor
    scores: Tensor


class Found(NamedTuple):
    """What was found of objects in a frame.

    Attributes:
        pointer_scores: logits that the object is there, of what its pointer says.
        offered: logits of the candidates before those of absent objects were emptied: what training compares, since an
            emptied mask has no gradient, and a model that takes all for absent would not learn any.
    """

    candidates: Candidates
    pointer_scores: Tensor
    offered: Tensor


class SegmenterNetwork(nn.Module):
    """Backbone, memory, prompt encoder and mask decoder, for a batch of objects that are all treated alike.

    Args:
        backbone: gives a `Pyramid` of frames and knows its `stride` and `cell`, as `VitBackbone` does.
        image_size: the long side in pixels that frames are resized to; None takes them as they are.
        train_size: (height, width) in pixels that it was trained at, from which context extension counts.
        mean, std: of each channel, by which frames are normalised.
        policy: what is kept in memory and read; the default is SAM 2's.
        memory_dtype: to store memories in; that of the weights when not given.
        previous_mask: the decoder also gets the mask of the frame before, as a mask prompt. Weights have to be trained
            for it: SAM 2's are not, and small trainings learn to follow sooner with it.

    Source: SAM 2 (arXiv 2408.00714).
    """

    def __init__(
        self,
        backbone: Any,
        memory: VideoMemory,
        prompt_encoder: PromptEncoder,
        mask_decoder: MaskDecoder,
        *,
        image_size: int | None = None,
        train_size: tuple[int, int] | None = None,
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
        policy: MemoryPolicy | None = None,
        memory_dtype: torch.dtype | None = None,
        previous_mask: bool = False,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.memory = memory
        self.prompt_encoder = prompt_encoder
        self.mask_decoder = mask_decoder
        self.mask_downsample = nn.Conv2d(1, 1, MASK_STRIDE // MASK_CELLS, stride=MASK_STRIDE // MASK_CELLS)
        self.image_size = image_size
        self.train_size = train_size
        self.mean, self.std = tuple(mean), tuple(std)
        self.policy = policy or MemoryPolicy()
        self.memory_dtype = memory_dtype
        self.previous_mask = previous_mask

    @property
    def stride(self) -> int:
        """Frames are padded to a multiple of it, in pixels."""
        return int(self.backbone.stride)

    @property
    def device(self) -> torch.device:
        """Where the weights are; frames may come from anywhere."""
        return self.mask_downsample.weight.device

    def set_extension(self, method: str, train_size: tuple[int, int] | None = None, **knobs: Any) -> None:
        """Choose the context extension of the backbone and of memory attention; see `vision_rope.set_extension`.

        A backbone without a rotary embedding has nothing to extend and stays as it is.

        Args:
            train_size: grid (rows, columns) in training; that of `train_size` of the segmenter when not given.

        Raises: ValueError where neither is known, and for an unknown method or option.
        """
        if train_size is None:
            if self.train_size is None:
                raise ValueError("train_size is not known of this segmenter; give the grid (rows, columns) of training")
            train_size = (self.train_size[0] // self.backbone.cell, self.train_size[1] // self.backbone.cell)
        self.memory.memory_attention.set_extension(method, train_size, **knobs)
        trunk = self.backbone.trunk
        if isinstance(getattr(trunk, "position", None), Rope):
            trunk.set_extension(method, train_size, **knobs)

    def no_weight_decay(self) -> set[str]:
        """Parameters that no optimizer should decay: those of the backbone."""
        trunk = self.backbone.trunk
        names = trunk.no_weight_decay() if hasattr(trunk, "no_weight_decay") else set()
        return {f"backbone.trunk.{name}" for name in names}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute activations of the backbone in the backward pass."""
        self.backbone.trunk.set_grad_checkpointing(enable)

    def forward(
        self,
        frames: Tensor,
        owners: Tensor,
        points: Tensor | None = None,
        labels: Tensor | None = None,
        masks: Tensor | None = None,
    ) -> list[FrameOutput]:
        """Follow objects through whole clips, with gradients through the memory; own masks are fed back.

        Args:
            owners: the clip of each object.
            points, labels: prompts on the first frame; labels as in `prompt_encoder`.
            masks: or masks on the first frame.

        Shapes: frames (clips, 3, frames, height, width), normalised, both sides a multiple of `stride`; owners int64
            (objects); points (objects, n, 2) as x, y in pixels, labels int64 (objects, n); masks (objects, height,
            width), above 0 inside
        Returns: an output a frame.
        Raises: ValueError where there are neither points nor masks, or both.
        """
        if (points is None) == (masks is None) or (points is None) != (labels is None):
            raise ValueError("give either points with labels, or masks, on the first frame")
        size = (frames.shape[-2], frames.shape[-1])
        framing = Framing(size, size, size)
        num_frames = frames.shape[2]
        pyramid = self.look(frames.transpose(1, 2).flatten(0, 1))
        by_frame = [x.unflatten(0, (-1, num_frames)).unbind(1) for x in pyramid]
        bank = MemoryBank(self.policy)
        outputs = []
        before = None
        for number in range(num_frames):
            features = Pyramid(*(x[number].index_select(0, owners) for x in by_frame))
            if number > 0:
                found = self.decode(self.remember(features, bank, number), features, mask_logits=before)
            elif masks is not None:
                found = self.take_mask(features, framing.lay_mask(masks > 0, features.grid))
            else:
                assert points is not None
                found = self.decode(self.without_memory(features), features, framing.lay_points(points), labels)
            candidates = found.candidates
            if self.previous_mask:
                before = self._withhold(choose_best(candidates).logits.detach())
            stored, pointer = self.store(features, found, number, prompted=number == 0)
            bank = bank.add_frame(stored).add_pointer(pointer)
            outputs.append(FrameOutput(found.offered, candidates.qualities, candidates.scores.flatten()))
        return outputs

    def _withhold(self, mask_logits: Tensor) -> Tensor:
        """Masks of a frame for the next one; in training some of them say nothing: all their logits are 0."""
        if not self.training:
            return mask_logits
        kept = torch.rand(len(mask_logits), 1, 1, 1, device=mask_logits.device) >= WITHHELD
        return torch.where(kept, mask_logits, 0.0)

    def look(self, frames: Tensor) -> Pyramid:
        """Features of frames, as the mask decoder takes them.

        Shapes: (batch, 3, height, width), normalised, both a multiple of `stride`
        """
        coarse, middle, fine = self.backbone(frames)
        return Pyramid(coarse, self.mask_decoder.conv_s1(middle), self.mask_decoder.conv_s0(fine))

    def without_memory(self, features: Pyramid) -> Tensor:
        """Features of a frame of which no memory is read.

        Shapes: -> (batch, dim, h, w)
        """
        return features.coarse + self.memory.no_mem_embed.mT[..., None]

    def remember(self, features: Pyramid, bank: MemoryBank, number: int, num_frames: int | None = None) -> Tensor:
        """Features of a frame, conditioned on memory.

        Shapes: -> (objects, dim, h, w)
        """
        tokens, place = self.tokens(features)
        seen = self.memory(tokens, bank, number, grid=features.grid, tokens_pos=place, num_frames=num_frames)
        return seen.mT.unflatten(-1, features.grid)

    def tokens(self, features: Pyramid) -> tuple[Tensor, Tensor]:
        """Tokens of a frame as memory attention takes them, and where they are."""
        tokens = features.coarse.flatten(2).mT
        return tokens, sine_2d(*features.grid, tokens.shape[-1], device=tokens.device)

    def decode(
        self,
        seen: Tensor,
        features: Pyramid,
        points: Tensor | None = None,
        labels: Tensor | None = None,
        mask_logits: Tensor | None = None,
    ) -> Found:
        """Masks of objects from what memory and prompts say; nothing where an object is not there.

        Shapes: seen (objects, dim, h, w), points and labels as of `PromptEncoder`, mask_logits (objects, 1, 4 * h, 4 *
            w)
        """
        num_points = 0 if labels is None else labels.shape[1]
        if points is None or labels is None:
            points, labels = _no_points(seen)
        cut = None if mask_logits is None else mask_logits.clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
        # One click can mean a thing or its part; without prompts memory can be unsure.
        found = self._ask(seen, features, points, labels, cut, ambiguous=num_points <= 1)
        shown = torch.where(found.scores[..., None, None] > 0, found.logits, NOTHING)
        return Found(found._replace(logits=shown), found.scores, found.logits)

    def take_mask(self, features: Pyramid, mask: Tensor) -> Found:
        """A mask prompt as the result; the decoder is asked for the pointer alone.

        Shapes: mask (objects, 1, 16 * h, 16 * w), 0 or 1
        """
        dtype = self.mask_downsample.weight.dtype
        height, width = (side * MASK_CELLS // MASK_STRIDE for side in mask.shape[-2:])
        logits = functional.interpolate(
            (2 * mask - 1) * SURE, size=(height, width), mode="bilinear", align_corners=False, antialias=True
        ).to(dtype)
        seen = features.coarse.expand(len(mask), -1, -1, -1)
        points, labels = _no_points(seen)
        read = self._ask(seen, features, points, labels, self.mask_downsample(mask.to(dtype)), ambiguous=False)
        there = mask.flatten(1).any(1, keepdim=True)
        scores = torch.where(there, SURE, -SURE).to(logits)
        candidates = Candidates(logits, torch.ones_like(scores), read.tokens[:, :1], scores)
        # The pointer says that the object is there where both the mask and the decoder find it.
        return Found(candidates, torch.minimum(scores, read.scores), logits)

    def _ask(
        self,
        seen: Tensor,
        features: Pyramid,
        points: Tensor,
        labels: Tensor,
        mask_logits: Tensor | None,
        *,
        ambiguous: bool,
    ) -> Candidates:
        grid = features.grid
        return self.mask_decoder(
            seen + self.prompt_encoder.embed_masks(mask_logits, grid),
            self.prompt_encoder.grid_embedding(grid),
            self.prompt_encoder.embed_points(points, labels),
            features.middle,
            features.fine,
            ambiguous=ambiguous,
        )

    def store(
        self, features: Pyramid, found: Found, number: int, *, prompted: bool
    ) -> tuple[StoredFrame, StoredPointer]:
        """What is remembered of a frame and of the masks found on it."""
        best = choose_best(found.candidates)
        rows, columns = features.grid
        whole = functional.interpolate(
            best.logits, size=(MASK_STRIDE * rows, MASK_STRIDE * columns), mode="bilinear", align_corners=False
        )
        frame = self.memory.encode_frame(
            number,
            features.coarse,
            whole,
            object_score=best.scores,
            mask_quality=best.qualities,
            prompted=prompted,
            binarize=prompted and not self.training,
            dtype=self.memory_dtype,
        )
        return frame, self.memory.make_pointer(number, best.tokens[:, 0], found.pointer_scores, prompted=prompted)


def _no_points(seen: Tensor) -> tuple[Tensor, Tensor]:
    """What SAM 2 puts in the place of points where there are none."""
    return seen.new_zeros(len(seen), 1, 2), torch.full((len(seen), 1), NO_POINT, device=seen.device)
