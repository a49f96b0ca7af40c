"""How this package and the installed libraries turn the same queries and keys, each in its own idiom.

Adding a library: a function that prepares its call for a Problem, and one line in PEERS.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import repeat
from torch import Tensor

import vision_rope
from vision_rope.rotation import Pairing

Turn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Problem:
    """Angles to turn by, and how many tokens in front have none.

    Attributes:
        angles: (tokens, head_dim / 2) float64, prefix tokens included.
        num_prefix_tokens: the first tokens, whose angles are zero.
    """

    angles: Tensor
    num_prefix_tokens: int

    def tables(self, pairing: Pairing, *, prefix: bool = True) -> tuple[Tensor, Tensor]:
        """cos and sin as wide as a head, float32, as most libraries store them."""
        angles = self.angles if prefix else self.angles[self.num_prefix_tokens :]
        pattern = "n p -> n (p two)" if pairing == "interleaved" else "n p -> n (two p)"
        wide = repeat(angles, pattern, two=2)
        return wide.cos().float(), wide.sin().float()


def ours(problem: Problem, pairing: Pairing = "interleaved", *, overwrite: bool = False) -> Turn:
    angles = problem.angles[None]

    rotation = vision_rope.Rotation(angles.cos().float(), angles.sin().float(), pairing)

    def turn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (
            vision_rope.rotate(q, rotation, overwrite=overwrite),
            vision_rope.rotate(k, rotation, overwrite=overwrite),
        )

    return turn


def clone(problem: Problem) -> Turn:
    return lambda q, k: (q.clone(), k.clone())


def timm_cat(problem: Problem, pairing: Pairing = "interleaved") -> Turn:
    """timm's AttentionRope: tables side by side, prefix tokens cut off and put back."""
    from timm.layers import apply_rot_embed_cat

    cos, sin = problem.tables(pairing, prefix=False)
    table, prefix, half = torch.cat((sin, cos), dim=-1), problem.num_prefix_tokens, pairing == "half"

    def turn_one(x: Tensor) -> Tensor:
        turned = apply_rot_embed_cat(x[:, :, prefix:], table, half=half)
        return torch.cat((x[:, :, :prefix], turned), dim=2).type_as(x)

    return lambda q, k: (turn_one(q), turn_one(k))


def timm_list(problem: Problem, pairing: Pairing = "interleaved") -> Turn:
    from timm.layers import apply_rot_embed_list

    cos, sin = problem.tables(pairing)
    half = pairing == "half"
    return lambda q, k: tuple(apply_rot_embed_list([q, k], sin, cos, half=half))


def ultralytics(problem: Problem, pairing: Pairing = "interleaved") -> Turn:
    from vision_rope.video.sam2 import ultralytics_module

    apply = ultralytics_module("models.sam.modules.utils").apply_rotary_enc
    phase = torch.polar(torch.ones_like(problem.angles), problem.angles).to(torch.complex64)
    return lambda q, k: apply(q, k, freqs_cis=phase)


def transformers_vision(problem: Problem, pairing: Pairing = "half") -> Turn:
    """Qwen2-VL's vision tower, whose layout is (batch, tokens, heads, head_dim)."""
    from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

    cos, sin = problem.tables(pairing)

    def turn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = apply_rotary_pos_emb_vision(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    return turn


def transformers_text(problem: Problem, pairing: Pairing = "half") -> Turn:
    """Llama's, which computes in the dtype of queries and keys with tables in that dtype."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    tables = problem.tables(pairing)

    def turn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (table[None].to(q.dtype) for table in tables)
        return apply_rotary_pos_emb(q, k, cos, sin)

    return turn


def rotary_embedding_torch(problem: Problem, pairing: Pairing = "interleaved") -> Turn:
    """Its function takes angles and computes cos and sin in every call."""
    from rotary_embedding_torch import apply_rotary_emb

    angles = repeat(problem.angles.float(), "n p -> n (p two)", two=2)
    return lambda q, k: (apply_rotary_emb(angles, q), apply_rotary_emb(angles, k))


# name -> library it needs, pairing, preparation; all turn the same pairs by the same angles
PEERS: dict[str, tuple[str, Pairing, Callable[..., Turn]]] = {
    "timm cat": ("timm", "interleaved", timm_cat),
    "timm cat half": ("timm", "half", timm_cat),
    "timm list": ("timm", "interleaved", timm_list),
    "timm list half": ("timm", "half", timm_list),
    "ultralytics": ("ultralytics", "interleaved", ultralytics),
    "transformers vision": ("transformers", "half", transformers_vision),
    "transformers text": ("transformers", "half", transformers_text),
    "rotary-embedding-torch": ("rotary_embedding_torch", "interleaved", rotary_embedding_torch),
}


def installed_peers() -> dict[str, tuple[Pairing, Callable[..., Turn]]]:
    """The rows of PEERS whose library can be imported."""
    return {
        name: (pairing, prepare)
        for name, (library, pairing, prepare) in PEERS.items()
        if importlib.util.find_spec(library) is not None
    }
