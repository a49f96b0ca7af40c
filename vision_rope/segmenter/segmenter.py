"""A streaming video segmenter: frames and prompts go in one by one, masks come out, and the state is an argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision_rope.memory.bank import MemoryBank, join_banks
from vision_rope.memory.weights import read_weights
from vision_rope.segmenter.backbone import Pyramid
from vision_rope.segmenter.framing import FrameSizeError, Framing, read_frame
from vision_rope.segmenter.mask_decoder import choose_best
from vision_rope.segmenter.network import SegmenterNetwork
from vision_rope.segmenter.prompts import ObjectPrompt, Prompt, gather_all
from vision_rope.segmenter.state import SegmenterState, TrackedObject

Prompts = Mapping[int, Prompt | Iterable[Prompt]]
Masks = dict[int, Tensor]


@dataclass(frozen=True, eq=False)
class Job:
    """An object that is to be found in a frame.

    Attributes:
        video: place of its video's features in the batch of frames.
        number: of the frame.
        bank: what is remembered of the object.
        prompt: what is said of it on this frame.
        is_fresh: no memory is read.
        previous: the mask that a correction starts from, or that of the frame before.
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


class VideoSegmenter(SegmenterNetwork):
    """Follows objects through a video from points, a box or a mask: SAM 2's way, on any backbone and any grid.

    Objects come and go; those of one age go through the weights together.

    Args: as of `SegmenterNetwork`.
    Source: SAM 2 (arXiv 2408.00714).
    """

    @staticmethod
    def load(path: str | Path, **options: Any) -> VideoSegmenter:
        """A segmenter in evaluation mode: of a SAM 2 checkpoint, a run folder or its weights.

        Args, Raises: see `vision_rope.segmenter_loading.load_segmenter`.
        """
        # The one import upwards: what a run folder holds is known above this room.
        from vision_rope.segmenter_loading import load_segmenter

        return load_segmenter(path, **options)

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
            gather_all({} if prompt is None else prompt, framing.frame)
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
                one = state.objects.get(key)
                bank = MemoryBank(self.policy) if one is None else one.bank
                fresh = key in prompt or not bank.frames
                before = one.mask_logits if self.previous_mask and one is not None and not fresh else None
                job = Job(place, state.number, bank, prompt.get(key), is_fresh=fresh, previous=before)
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
        for key, prompt in gather_all(prompts, state.framing.frame).items():
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
            raise ValueError(f"object_id is {object_id!r}, which {why}; the objects are {list(state.objects)}")
        tokens, place = self.tokens(state.features)
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

    def _framing(self, state: SegmenterState, frame: Tensor) -> Framing:
        size = (frame.shape[-2], frame.shape[-1])
        if state.framing is None:
            return Framing.fit(size, self.stride, self.image_size)
        if state.framing.frame != size:
            before = state.framing.frame
            raise FrameSizeError(
                f"frame has {size[0]}x{size[1]} pixels and those before had {before[0]}x{before[1]} (rows x columns); "
                "resize it, or start anew",
                number=state.number + 1,
                size=size,
                first=before,
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
            found = self.take_mask(features, torch.cat(laid))
        else:
            if first.is_fresh:
                seen = self.without_memory(features)
            else:
                bank = join_banks([job.bank for job in jobs])
                seen = self.remember(features, bank, first.number, states[first.video].num_frames)
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
            found = self.decode(seen, features, points, labels, before)
        stored, pointer = self.store(features, found, first.number, prompted=first.prompt is not None)
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
