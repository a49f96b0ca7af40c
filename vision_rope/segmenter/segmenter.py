"""A streaming video segmenter: frames and prompts go in one by one, masks come out, and the state is an argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vision_rope.memory.bank import MemoryBank, StoredFrame, StoredPointer, join_banks
from vision_rope.memory.encoder import MASK_STRIDE
from vision_rope.memory.selection import MemoryPolicy
from vision_rope.memory.sine import sine_2d
from vision_rope.memory.video_memory import VideoMemory
from vision_rope.memory.weights import read_weights
from vision_rope.rope import Rope
from vision_rope.segmenter.backbone import Pyramid
from vision_rope.segmenter.framing import Framing, read_frame
from vision_rope.segmenter.mask_decoder import Candidates, MaskDecoder, choose_best
from vision_rope.segmenter.prompt_encoder import MASK_CELLS, NO_POINT, PromptEncoder
from vision_rope.segmenter.prompts import ObjectPrompt, Prompt, gather
from vision_rope.segmenter.state import SegmenterState, TrackedObject

# Logits of a mask where its object is not in the frame.
NOTHING = -1024.0
# Logits that a mask prompt stands for, inside and outside.
SURE = 10.0
# Logits that go back into the prompt encoder are cut off there, as in SAM 2.
LARGEST_LOGIT = 32.0

Prompts = Mapping[int, Prompt | Iterable[Prompt]]
Masks = dict[int, Tensor]


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


@dataclass(frozen=True, eq=False)
class Job:
    """An object that is to be found in a frame.

    Attributes:
        video: place of its video's features in the batch of frames.
        number: of the frame.
        bank: what is remembered of the object.
        prompt: what is said of it on this frame.
        is_fresh: no memory is read.
        previous: the mask that a correction starts from.
    """

    video: int
    number: int
    bank: MemoryBank
    prompt: ObjectPrompt | None = None
    is_fresh: bool = False
    previous: Tensor | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What jobs must have in common to be done together."""
        # A gate weighs the scores of a whole batch: each object is judged alone.
        alone = id(self) if self.bank.policy.gate is not None else None
        prompt = None if self.prompt is None else (self.prompt.mask is None, len(self.prompt.labels))
        return self.number, self.is_fresh or self.bank.layout, prompt, self.previous is None, alone


class VideoSegmenter(nn.Module):
    """Follows objects through a video from points, a box or a mask: SAM 2's way, on any backbone and any grid.

    Args:
        backbone: gives a `Pyramid` of frames and knows its `stride` and `cell`, as `VitBackbone` does.
        image_size: the long side in pixels that frames are resized to; None takes them as they are.
        train_size: (height, width) in pixels that it was trained at, from which context extension counts.
        mean, std: of each channel, by which frames are normalised.
        policy: what is kept in memory and read; the default is SAM 2's.
        memory_dtype: to store memories in; that of the weights when not given.

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

    @property
    def stride(self) -> int:
        """Frames are padded to a multiple of it, in pixels."""
        return int(self.backbone.stride)

    @property
    def device(self) -> torch.device:
        """Where the weights are; frames may come from anywhere."""
        return self.mask_downsample.weight.device

    @staticmethod
    def load(path: str | Path, **options: Any) -> VideoSegmenter:
        """A segmenter in evaluation mode: of a SAM 2 checkpoint, a run folder or its weights.

        Args, Raises: see `vision_rope.segmenter_loading.load_segmenter`.
        """
        # The one import upwards: what a run folder holds is known above this room.
        from vision_rope.segmenter_loading import load_segmenter

        return load_segmenter(path, **options)

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

    def start(self, num_frames: int | None = None) -> SegmenterState:
        """The state before the first frame of a video.

        Args:
            num_frames: of the clip, for the numbers of SAM 2 itself, whose ages of pointers depend on it in clips of
                fewer than 16 frames; a stream has none.
        """
        return SegmenterState(num_frames=num_frames)

    @torch.no_grad()
    def step(self, state: SegmenterState, frame: Any, prompts: Prompts | None = None) -> tuple[SegmenterState, Masks]:
        """Follow all objects into the next frame. The old state stays as it was.

        Args:
            frame: an RGB tensor (3, height, width), or an array (height, width, 3); uint8 or from 0 to 1.
            prompts: by ids that the caller chooses, where objects are in this frame. A new id begins an object. One
                that is followed already is found by the prompt alone, without its memory; `correct` looks at both.

        Returns:
            the new state, and of each object the logits of its pixels (height, width), above 0 inside.

        Raises: ValueError for a frame of another size than those before, and for prompts that do not fit.
        """
        ((after, masks),) = self.step_videos([state], [frame], [prompts])
        return after, masks

    @torch.no_grad()
    def step_videos(
        self,
        states: Sequence[SegmenterState],
        frames: Sequence[Any],
        prompts: Sequence[Prompts | None] | None = None,
    ) -> list[tuple[SegmenterState, Masks]]:
        """`step` for several videos at once: frames of one size go through the backbone together.

        Raises: ValueError as of `step`, and for lists of different lengths.
        """
        prompts = [None] * len(states) if prompts is None else prompts
        if not len(states) == len(frames) == len(prompts):
            raise ValueError(
                f"there are {len(states)} states, {len(frames)} frames and {len(prompts)} prompts; give one of each a "
                "video, None for a frame without prompts"
            )
        read = [read_frame(frame, self.device) for frame in frames]
        framings = [self._framing(state, frame) for state, frame in zip(states, read, strict=True)]
        said = [
            {key: gather(given, key, framing.frame) for key, given in (prompt or {}).items()}
            for framing, prompt in zip(framings, prompts, strict=True)
        ]
        features = self._look(read, framings)
        ahead = [
            replace(state, number=state.number + 1, framing=framing, features=feature)
            for state, framing, feature in zip(states, framings, features, strict=True)
        ]
        jobs = []
        for place, (state, prompt) in enumerate(zip(ahead, said, strict=True)):
            for key in {**state.objects, **prompt}:
                bank = state.objects[key].bank if key in state.objects else MemoryBank(self.policy)
                job = Job(place, state.number, bank, prompt.get(key), is_fresh=key in prompt or not bank.frames)
                jobs.append((place, key, job))
        found = self._find([job for _, _, job in jobs], ahead)
        objects: list[dict[int, TrackedObject]] = [{} for _ in ahead]
        for (place, key, _), one in zip(jobs, found, strict=True):
            objects[place][key] = one
        after = [replace(state, objects=own) for state, own in zip(ahead, objects, strict=True)]
        return [(state, self.masks(state)) for state in after]

    @torch.no_grad()
    def correct(self, state: SegmenterState, prompts: Prompts) -> tuple[SegmenterState, Masks]:
        """Find objects in the last frame once more, with prompts beside what was known and found there.

        Points join those that were given on this frame before; a mask takes the place of all. Objects without prompts
        stay as they are; a new id begins an object.

        Returns: as of `step`
        Raises: ValueError before the first frame, and for prompts that do not fit.
        """
        if state.framing is None:
            raise ValueError("the state has no frame yet to correct anything on; give the first one to `step`")
        jobs = {}
        for key, given in prompts.items():
            prompt = gather(given, key, state.framing.frame)
            one = state.objects.get(key)
            if one is None:
                jobs[key] = Job(0, state.number, MemoryBank(self.policy), prompt, is_fresh=True)
                continue
            fresh = one.is_fresh or not one.before.frames
            whole = prompt if one.prompt is None else one.prompt.and_then(prompt)
            jobs[key] = Job(0, state.number, one.before, whole, is_fresh=fresh, previous=one.mask_logits)
        found = self._find(list(jobs.values()), [state])
        after = replace(state, objects={**state.objects, **dict(zip(jobs, found, strict=True))})
        return after, self.masks(after)

    def masks(self, state: SegmenterState) -> Masks:
        """Logits of each object's pixels in the last frame.

        Shapes: (height, width) each
        """
        if state.framing is None or not state.objects:
            return {}
        lifted = state.framing.lift(torch.cat([one.mask_logits for one in state.objects.values()]).float())
        return dict(zip(state.objects, lifted, strict=True))

    @torch.no_grad()
    def memory_weights(self, state: SegmenterState, object_id: int, *, layer: int = -1) -> dict[int | None, Tensor]:
        """What the last frame read of an object's memory: the share of each place's attention.

        Returns: by the number of a stored frame the shares of its cells, the mean over heads; under None those of the
            tokens of object pointers, where there are some.

        Shapes: (rows, columns, stored rows, stored columns), of pointers (rows, columns, tokens)
        Raises: ValueError where there is no such object, or the last frame read no memory of it.
        """
        one = state.objects.get(object_id)
        if one is None or one.is_fresh or state.features is None or not one.before.frames:
            why = "is not there" if one is None else "was found without memory in the last frame"
            raise ValueError(f"object_id is {object_id!r}, which {why}; the objects are {sorted(state.objects)}")
        tokens, place = self._tokens(state.features)
        entries = self.memory.read_entries(one.before, state.number, num_frames=state.num_frames)
        grid = state.features.grid
        weights = read_weights(self.memory.memory_attention, tokens, entries, grid=grid, tokens_pos=place, layer=layer)
        numbers = [stored.number for stored, _ in one.before.select_frames(state.number)]
        by_frame: dict[int | None, Tensor] = {}
        for number, entry, shares in zip([*numbers, None], entries, weights, strict=False):
            by_frame[number] = shares[0].mean(0).unflatten(0, grid)
            if entry.grid is not None:
                by_frame[number] = by_frame[number].unflatten(-1, entry.grid)
        return by_frame

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
        for number in range(num_frames):
            features = Pyramid(*(x[number].index_select(0, owners) for x in by_frame))
            if number > 0:
                found = self._decode(self._remember(features, bank, number), features)
            elif masks is not None:
                found = self._take_mask(features, framing.lay_mask(masks > 0, features.grid))
            else:
                assert points is not None
                seen = features.coarse + self._no_memory()
                found = self._decode(seen, features, framing.lay_points(points), labels)
            candidates = found.candidates
            stored, pointer = self._store(features, found, number, prompted=number == 0)
            bank = bank.add_frame(stored).add_pointer(pointer)
            outputs.append(FrameOutput(found.offered, candidates.qualities, candidates.scores.flatten()))
        return outputs

    def look(self, frames: Tensor) -> Pyramid:
        """Features of frames, as the mask decoder takes them.

        Shapes: (batch, 3, height, width), normalised, both a multiple of `stride`
        """
        coarse, middle, fine = self.backbone(frames)
        return Pyramid(coarse, self.mask_decoder.conv_s1(middle), self.mask_decoder.conv_s0(fine))

    def _framing(self, state: SegmenterState, frame: Tensor) -> Framing:
        size = (frame.shape[-2], frame.shape[-1])
        if state.framing is None:
            return Framing.fit(size, self.stride, self.image_size)
        if state.framing.frame != size:
            before = state.framing.frame
            raise FrameSizeError(
                f"frame has {size[0]}x{size[1]} pixels and those before had {before[0]}x{before[1]} (rows x columns); "
                "resize it, or start anew"
            )
        return state.framing

    def _look(self, frames: list[Tensor], framings: list[Framing]) -> list[Pyramid]:
        """Features of frames of different sizes, each with a batch of one."""
        found: list[Pyramid | None] = [None] * len(frames)
        dtype = self.mask_downsample.weight.dtype
        mean, std = (torch.tensor(x, device=self.device).view(3, 1, 1) for x in (self.mean, self.std))
        for size in {framing.padded for framing in framings}:
            places = [place for place, framing in enumerate(framings) if framing.padded == size]
            laid = torch.stack([framings[place].lay((frames[place] - mean) / std) for place in places])
            pyramid = self.look(laid.to(dtype))
            for row, place in enumerate(places):
                found[place] = Pyramid(*(x[row : row + 1] for x in pyramid))
        return [pyramid for pyramid in found if pyramid is not None]

    def _find(self, jobs: list[Job], states: Sequence[SegmenterState]) -> list[TrackedObject]:
        """Find the object of each job, those of a kind together."""
        kinds: dict[tuple[object, ...], list[int]] = {}
        for place, job in enumerate(jobs):
            size = states[job.video].framing
            kinds.setdefault((size and size.padded, states[job.video].num_frames, *job.kind), []).append(place)
        found: list[TrackedObject | None] = [None] * len(jobs)
        for places in kinds.values():
            alike = [jobs[place] for place in places]
            for place, one in zip(places, self._find_alike(alike, states), strict=True):
                found[place] = one
        return [one for one in found if one is not None]

    def _find_alike(self, jobs: list[Job], states: Sequence[SegmenterState]) -> list[TrackedObject]:
        first = jobs[0]
        pyramids = [states[job.video].features for job in jobs]
        # Objects of one video share its features without copies.
        shared = len({job.video for job in jobs}) == 1
        features = Pyramid(*(x[0] if shared else torch.cat(x) for x in zip(*pyramids, strict=True)))
        framings = [states[job.video].framing for job in jobs]
        prompts = [job.prompt for job in jobs]
        if first.prompt is not None and first.prompt.mask is not None:
            laid = [
                framing.lay_mask(prompt.mask[None].to(self.device), features.grid)  # type: ignore[union-attr, index]
                for framing, prompt in zip(framings, prompts, strict=True)
            ]
            found = self._take_mask(features, torch.cat(laid))
        else:
            if first.is_fresh:
                seen = features.coarse + self._no_memory()
            else:
                bank = join_banks([job.bank for job in jobs])
                seen = self._remember(features, bank, first.number, states[first.video].num_frames)
            seen = seen.expand(len(jobs), -1, -1, -1)
            points = labels = None
            if first.prompt is not None:
                points = torch.stack(
                    [
                        framing.lay_points(prompt.points)  # type: ignore[union-attr]
                        for framing, prompt in zip(framings, prompts, strict=True)
                    ]
                ).to(self.device)
                labels = torch.stack([prompt.labels for prompt in prompts]).to(self.device)  # type: ignore[union-attr]
            before = None if first.previous is None else torch.cat([job.previous for job in jobs])  # type: ignore[misc]
            found = self._decode(seen, features, points, labels, before)
        stored, pointer = self._store(features, found, first.number, prompted=first.prompt is not None)
        best = choose_best(found.candidates)
        return [
            TrackedObject(
                bank=job.bank.add_frame(frame).add_pointer(own),
                before=job.bank,
                mask_logits=logits,
                object_score=score,
                mask_quality=quality,
                prompt=job.prompt,
                is_fresh=job.is_fresh,
            )
            for job, frame, own, logits, score, quality in zip(
                jobs,
                stored.split(),
                pointer.split(),
                best.logits.split(1),
                best.scores.flatten(),
                best.qualities.flatten(),
                strict=True,
            )
        ]

    def _no_memory(self) -> Tensor:
        return self.memory.no_mem_embed.mT[..., None]

    def _remember(self, features: Pyramid, bank: MemoryBank, number: int, num_frames: int | None = None) -> Tensor:
        """Features of a frame, conditioned on memory.

        Shapes: -> (objects, dim, h, w)
        """
        tokens, place = self._tokens(features)
        seen = self.memory(tokens, bank, number, grid=features.grid, tokens_pos=place, num_frames=num_frames)
        return seen.mT.unflatten(-1, features.grid)

    def _tokens(self, features: Pyramid) -> tuple[Tensor, Tensor]:
        """Tokens of a frame as memory attention takes them, and where they are."""
        tokens = features.coarse.flatten(2).mT
        return tokens, sine_2d(*features.grid, tokens.shape[-1], device=tokens.device)

    def _decode(
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

    def _take_mask(self, features: Pyramid, mask: Tensor) -> Found:
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

    def _store(
        self, features: Pyramid, found: Found, number: int, *, prompted: bool
    ) -> tuple[StoredFrame, StoredPointer]:
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


class FrameSizeError(ValueError):
    """A frame has another size than those before it in its video."""
