"""`vision-rope benchmark memory`: a frame through SAM 2's memory attention, beside Ultralytics'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vision_rope.benchmark.timing import Case
from vision_rope.memory.attention import MemoryAttention, MemoryEntry
from vision_rope.memory.folded import QUERIES, SCORES, MemoryPart, key_blocks

OURS = "vision_rope"
PEER = "ultralytics"
SECTIONS = {
    "frame": "a frame through all four layers, with 16 object pointers",
    "preparation": "what a frame costs before the scores: keys and values of the memory, in all layers",
    "storing": "keys of one stored frame in all layers, made once when it is stored",
}
GRIDS = (16, 32, 64)
FRAMES = (1, 3, 7)
DIM, MEMORY_DIM, POINTERS = 256, 64, 16


def memory_cases(
    sections: Sequence[str], grids: Sequence[int], frames: Sequence[int], objects: Sequence[int], device: torch.device
) -> list[Callable[[], Case]]:
    """The cases of the chosen sections, as functions, so that each is built when its turn comes."""
    builders = {"frame": _frame_case, "preparation": _preparation_case}
    cases: list[Callable[[], Case]] = []
    for section in sections:
        for side in grids:
            if section == "storing":
                cases.append(partial(_storing_case, side, device))
            else:
                cases += [
                    partial(builders[section], side, count, batch, device) for batch in objects for count in frames
                ]
    return cases


class Problem:
    """The same weights and the same memory in our layers and in the peer's."""

    def __init__(self, side: int, frames: int, objects: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        tokens = side * side
        self.side, self.objects = side, objects
        self.attention = MemoryAttention().to(device).eval()
        with torch.no_grad():
            for parameter in self.attention.parameters():
                if parameter.ndim > 1:
                    parameter.copy_(draw(*parameter.shape) / parameter.shape[1] ** 0.5)
        self.tokens, self.tokens_pos = draw(1, tokens, DIM), draw(1, tokens, DIM)
        self.position = draw(tokens, MEMORY_DIM)
        self.frames = [draw(objects, tokens, MEMORY_DIM) for _ in range(frames)]
        self.ages = [0.1 * draw(MEMORY_DIM) for _ in range(frames)]
        pointer_tokens = POINTERS * DIM // MEMORY_DIM
        self.pointers, self.pointer_pos = draw(objects, pointer_tokens, MEMORY_DIM), draw(pointer_tokens, MEMORY_DIM)
        self.memory = torch.cat([*self.frames, self.pointers], dim=1)
        placed = [self.position + age for age in self.ages]
        self.memory_pos = torch.cat([*placed, self.pointer_pos]).expand(objects, -1, -1)

    def entries(self, attention: MemoryAttention, *, prepared: bool) -> list[MemoryEntry]:
        """What a bank would hold; keys of frames are made when they are stored."""
        dtype = attention.norm.weight.dtype
        found = []
        for features, age in zip(self.frames, self.ages, strict=True):
            entry = MemoryEntry(
                features.to(dtype), (self.side, self.side), position=self.position.to(dtype), age=age.to(dtype)
            )
            found.append(replace(entry, keys=attention.prepare_keys(entry)) if prepared else entry)
        return [*found, MemoryEntry(self.pointers.to(dtype), None, position=self.pointer_pos.to(dtype))]

    def peer(self) -> Any:
        """Ultralytics' layers with our weights; None where the extra is not installed."""
        from vision_rope.video.sam2 import ultralytics_module

        try:
            module = ultralytics_module("models.sam.modules.memory_attention")
        except ImportError:
            return None
        peer = module.MemoryAttention(DIM, True, module.MemoryAttentionLayer(), 4).to(self.tokens.device).eval()
        peer.load_state_dict(self.attention.state_dict())
        return peer


@torch.no_grad()
def _frame_case(side: int, frames: int, objects: int, device: torch.device) -> Case:
    problem = Problem(side, frames, objects, device)
    attention, grid = problem.attention, (side, side)
    entries, prepared = (problem.entries(attention, prepared=choice) for choice in (False, True))

    @torch.no_grad()
    def ours(entries: list[MemoryEntry] = entries) -> Tensor:
        return attention.read(problem.tokens, entries, grid=grid, tokens_pos=problem.tokens_pos)

    tokens, tokens_pos = (x.expand(objects, -1, -1) for x in (problem.tokens, problem.tokens_pos))

    @torch.no_grad()
    def in_one_call() -> Tensor:
        return attention(
            tokens,
            problem.memory,
            grid=grid,
            tokens_pos=tokens_pos,
            memory_pos=problem.memory_pos,
            num_pointer_tokens=problem.pointers.shape[1],
        )

    runs: dict[str, Callable[[], Any]] = {
        OURS: ours,
        f"{OURS}, keys prepared before": partial(ours, prepared),
        f"{OURS}, SAM 2's call": in_one_call,
    }
    peer = problem.peer()
    if peer is not None:
        # SAM 2's tokens stand before the batch.
        given = [x.transpose(0, 1).contiguous() for x in (tokens, problem.memory, tokens_pos, problem.memory_pos)]

        @torch.no_grad()
        def theirs() -> Tensor:
            return peer(*given, num_obj_ptr_tokens=problem.pointers.shape[1]).transpose(0, 1)

        runs[PEER] = theirs
    exact = deepcopy(attention).double()
    wanted = exact.read(
        problem.tokens.double(),
        problem.entries(exact, prepared=False),
        grid=grid,
        tokens_pos=problem.tokens_pos.double(),
    )
    errors = {name: (run().double() - wanted).abs().max().item() for name, run in runs.items()}
    return Case("frame", _label(side, frames, objects), "fp32", runs, OURS, None, errors, problem.memory.nbytes)


@torch.no_grad()
def _preparation_case(side: int, frames: int, objects: int, device: torch.device) -> Case:
    problem = Problem(side, frames, objects, device)
    attention = problem.attention
    rotation = attention.rope.grid_rotations(side, side, device=device)[0]
    turned = frames * side * side
    size = max(1, SCORES // min(QUERIES, side * side))

    @torch.no_grad()
    def ours() -> Any:
        """Keys, made block by block beside the scores; values are not needed."""
        part = MemoryPart(problem.memory, problem.memory + problem.memory_pos, rotation, turned)
        for layer in attention.layers:
            for sample in range(objects):
                for _ in key_blocks([part.sample(sample)], layer.cross_attn_image.make_keys, size, DIM):
                    pass

    prepared = problem.entries(attention, prepared=True)[:-1]

    @torch.no_grad()
    def ages() -> Any:
        """What is left where keys of frames were prepared: their ages, which change with every frame, and pointers."""
        made = []
        for index, layer in enumerate(attention.layers):
            cross = layer.cross_attn_image
            made = [e.keys[index] + cross.make_age(e.age, rotation, side) for e in prepared]  # type: ignore
            made.append(cross.make_keys(problem.pointers + problem.pointer_pos, None))
        return made

    runs: dict[str, Callable[[], Any]] = {OURS: ours, f"{OURS}, keys prepared before": ages}
    peer = problem.peer()
    if peer is not None:
        from vision_rope.video.sam2 import ultralytics_module

        turn = ultralytics_module("models.sam.modules.utils").apply_rotary_enc
        table = peer.layers[0].cross_attn_image.compute_cis(end_x=side, end_y=side).to(device)
        query = problem.tokens.unsqueeze(1).expand(objects, -1, -1, -1).contiguous()
        turned = problem.memory.shape[1] - problem.pointers.shape[1]

        @torch.no_grad()
        def theirs() -> Any:
            made = []
            for layer in peer.layers:
                cross = layer.cross_attn_image
                k = cross.k_proj(problem.memory + problem.memory_pos).unsqueeze(1)
                _, k[:, :, :turned] = turn(query, k[:, :, :turned], freqs_cis=table, repeat_freqs_k=True)
                made += [k, cross.v_proj(problem.memory)]
            return made

        runs[PEER] = theirs
    return Case("preparation", _label(side, frames, objects), "fp32", runs, OURS, None, {}, problem.memory.nbytes)


@torch.no_grad()
def _storing_case(side: int, device: torch.device) -> Case:
    problem = Problem(side, 1, 1, device)
    (entry, _) = problem.entries(problem.attention, prepared=False)

    @torch.no_grad()
    def ours() -> Any:
        return problem.attention.prepare_keys(entry)

    return Case("storing", f"{side} x {side}", "fp32", {OURS: ours}, OURS, None, {}, problem.frames[0].nbytes)


def _label(side: int, frames: int, objects: int) -> str:
    counted = f"{frames} frame{'s' * (frames > 1)}, {objects} object{'s' * (objects > 1)}"
    return f"{side} x {side}, {counted}"
