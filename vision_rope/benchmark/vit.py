"""`vision-rope benchmark vit`: what positions cost in a ViT-S: a block, a forward pass, a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
PATCH = 16
SECTIONS = {
    "block": "one ViT-S block, forward, against the same block without positions",
    "block-training": "the same, forward and backward",
    "model": "a ViT-S, forward",
    "training": "a ViT-S, forward and backward",
}
DEFAULT_SECTIONS = tuple(SECTIONS)
SIZES = (224, 448)


def vit_cases(sections: Sequence[str], sizes: Sequence[int], batch: int, device: torch.device) -> Iterator[Case]:
    """The cases of the chosen sections, each built when its turn comes."""
    for section in sections:
        for size in sizes:
            build = _block_cases if section.startswith("block") else _model_cases
            yield from build(section, size, batch, device)


def _block_cases(section: str, size: int, batch: int, device: torch.device) -> Iterator[Case]:
    """Ours and timm's block, each against itself without positions, so that what else differs does not count."""
    side = size // PATCH
    x = torch.randn(batch, side * side + 1, 384, generator=torch.Generator().manual_seed(0)).to(device)
    training = section == "block-training"

    model = vision_rope.create_model(NAME, "rope-vit-axial", depth=1).to(device).train(training)
    (rotation,) = model.position.grid_rotations(side, side, num_prefix_tokens=1, device=device)  # type: ignore[union-attr,operator]
    own = model.blocks[0]
    table = RotaryEmbeddingCat(64, in_pixels=False, temperature=100.0, grid_indexing="xy").get_embed([side, side])
    peer = EvaBlock(384, 6, qkv_fused=True, attn_type="rope", num_prefix_tokens=1).to(device).train(training)
    table = table.to(device)
    pairs: dict[str, tuple[nn.Module, Callable[[], Tensor], Callable[[], Tensor]]] = {
        OURS: (own, lambda: own(x, None, False, rotation), lambda: own(x, None, False, None)),
        "timm": (peer, lambda: peer(x, rope=table), lambda: peer(x, rope=None)),
    }
    for name, (block, positioned, without) in pairs.items():
        runs = {f"{name} with RoPE": positioned, f"{name} without": without}
        runs = {label: _step(run, block, training) for label, run in runs.items()}
        yield Case(section, f"{name}, {size} px", "fp32", runs, f"{name} with RoPE", f"{name} without")


def _model_cases(section: str, size: int, batch: int, device: torch.device) -> Iterator[Case]:
    """Whole models at the size they are built for: timm's own, and the same ViT-S with ours."""
    images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)
    training = section == "training"
    models = {
        OURS: vision_rope.create_model(NAME, "rope-vit-axial", img_size=size),
        f"{OURS} mixed": vision_rope.create_model(NAME, "rope-vit-mixed", img_size=size),
        f"{OURS} none": vision_rope.create_model(NAME, "none", img_size=size),
        "timm": timm.create_model("vit_small_patch16_rope_224", img_size=size),
        "timm mixed": timm.create_model("vit_small_patch16_rope_mixed_224", img_size=size),
    }
    runs = {}
    for name, model in models.items():
        model = model.to(device).train(training)
        runs[name] = _step(lambda model=model: model(images), model, training)  # type: ignore[misc]
    yield Case(section, f"{size} px", "fp32", runs, OURS, f"{OURS} none")


def _step(run: Callable[[], Tensor], module: nn.Module, training: bool) -> Callable[[], Any]:
    if training:
        parameters = list(module.parameters())
        return lambda: torch.autograd.grad(run().sum(), parameters, allow_unused=True)

    def forward() -> Tensor:
        with torch.no_grad():
            return run()

    return forward
