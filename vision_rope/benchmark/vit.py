"""`vision-rope benchmark vit`: what positions cost in a ViT-S: a block, a forward pass, a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import timm
import torch
from timm.layers import RotaryEmbeddingCat
from timm.models.eva import EvaBlock
from torch import Tensor, nn

import vision_rope
from vision_rope.benchmark.timing import Case

OURS = "vision_rope"
NAME = "vit_small_patch16_224"
PLAIN = "timm plain"
PATCH = 16
SECTIONS = {
    "block": "one ViT-S block, forward, against the same block without positions",
    "block-training": "the same, forward and backward",
    "model": "a ViT-S, forward; the floor is timm's, without RoPE",
    "training": "the same, forward and backward",
}
DEFAULT_SECTIONS, DEFAULT_SIZES = tuple(SECTIONS), "224,448"


def vit_cases(
    sections: Sequence[str], sizes: Sequence[int], batch: int, device: torch.device
) -> list[Callable[[], Case]]:
    """The cases of the chosen sections, as functions, so that each is built when its turn comes."""
    cases: list[Callable[[], Case]] = []
    for section in sections:
        for size in sizes:
            if section.startswith("block"):
                cases += [partial(build, section, size, batch, device) for build in (_our_block, _timm_block)]
            else:
                cases.append(partial(_model_case, section, size, batch, device))
    return cases


def _our_block(section: str, size: int, batch: int, device: torch.device) -> Case:
    side, x = size // PATCH, _draw_tokens(size, batch, device)
    model = vision_rope.create_model(NAME, "rope-vit-axial", depth=1).to(device)
    (rotation,) = model.position.grid_rotations(side, side, num_prefix_tokens=1, device=device)  # type: ignore[union-attr,operator]
    block = model.blocks[0]
    runs = {"with RoPE": lambda: block(x, rope=rotation), "without": lambda: block(x)}
    if section == "block":
        bare = _with_bare_product(block, rotation)
        runs["bare product"] = lambda: bare(x)
    return _block_case(OURS, section, size, block, runs)


def _with_bare_product(block: Any, rotation: vision_rope.Rotation) -> nn.Module:
    """The block without positions and one product in place of queries and keys: the least that RoPE can add."""
    phase = torch.complex(rotation.cos, rotation.sin).transpose(0, 1).unsqueeze(1)  # (tokens, q and k, heads, pairs)

    def multiply(_layer: nn.Module, _inputs: tuple[Tensor, ...], qkv: Tensor) -> None:
        pairs = torch.view_as_complex(qkv.view(*qkv.shape[:-1], 3, -1, phase.shape[-1], 2))
        pairs.narrow(2, 0, 2).mul_(phase)

    block = deepcopy(block)
    block.attn.qkv.register_forward_hook(multiply)
    return block


def _timm_block(section: str, size: int, batch: int, device: torch.device) -> Case:
    side, x = size // PATCH, _draw_tokens(size, batch, device)
    rope = RotaryEmbeddingCat(64, in_pixels=False, temperature=100.0, grid_indexing="xy")
    table = rope.get_embed([side, side]).to(device)
    block = EvaBlock(384, 6, qkv_fused=True, attn_type="rope", num_prefix_tokens=1).to(device)
    runs = {"with RoPE": lambda: block(x, rope=table), "without": lambda: block(x, rope=None)}
    return _block_case("timm", section, size, block, runs)


def _block_case(name: str, section: str, size: int, block: nn.Module, runs: Mapping[str, Callable[[], Tensor]]) -> Case:
    """A library's block against itself without positions, so that what else differs from ours does not count."""
    training = section == "block-training"
    block.train(training)
    steps = {f"{name} {form}": _step(run, block, training) for form, run in runs.items()}
    return Case(section, f"{name}, {size} px", "fp32", steps, ours=None, floor=f"{name} without")


def _draw_tokens(size: int, batch: int, device: torch.device) -> Tensor:
    shape = (batch, (size // PATCH) ** 2 + 1, 384)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)


def _model_case(section: str, size: int, batch: int, device: torch.device) -> Case:
    """Whole models at the size they are built for: timm's own, with RoPE and without, and the same ViT-S with ours."""
    images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)
    training = section == "training"
    models = {
        OURS: vision_rope.create_model(NAME, "rope-vit-axial", img_size=size),
        f"{OURS} mixed": vision_rope.create_model(NAME, "rope-vit-mixed", img_size=size),
        f"{OURS} none": vision_rope.create_model(NAME, "none", img_size=size),
        PLAIN: timm.create_model(NAME, img_size=size),
        "timm": timm.create_model("vit_small_patch16_rope_224", img_size=size),
        "timm mixed": timm.create_model("vit_small_patch16_rope_mixed_224", img_size=size),
    }
    runs = {}
    for name, model in models.items():
        model = model.to(device).train(training)
        runs[name] = _step(lambda model=model: model(images), model, training)  # type: ignore[misc]
    return Case(section, f"{size} px", "fp32", runs, OURS, PLAIN)


def _step(run: Callable[[], Tensor], module: nn.Module, training: bool) -> Callable[[], Any]:
    if training:
        parameters = list(module.parameters())
        return lambda: torch.autograd.grad(run().sum(), parameters, allow_unused=True)

    def forward() -> Tensor:
        with torch.no_grad():
            return run()

    return forward
