"""The transformer of SAM's mask decoder: a few tokens and the cells of a frame look at each other in turn.

Names of parameters are those of SAM 2 and SAM 2.1.
"""

from __future__ import annotations

from torch import Tensor, nn

from vision_rope.attention import attend
from vision_rope.memory.perceptron import Perceptron


class TwoWayTransformer(nn.Module):
    """Tokens and cells that look at each other.

    Source: SAM (arXiv 2304.02643), appendix A.
    """

    def __init__(self, dim: int, *, depth: int = 2, num_heads: int = 8, mlp_dim: int = 2048) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TwoWayLayer(dim, num_heads, mlp_dim, is_first=i == 0) for i in range(depth))
        self.final_attn_token_to_image = PlainAttention(dim, dim // 2, num_heads)
        self.norm_final_attn = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor, cells: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Let them look at each other.

        Args:
            places: encoding of the cells' places; tokens are their own.

        Shapes: tokens (batch, n, dim), cells (batch, h * w, dim), places (batch or 1, h * w, dim) -> those of
            tokens and cells
        """
        own = tokens
        for layer in self.layers:
            tokens, cells = layer(tokens, cells, own, places)
        tokens = tokens + self.final_attn_token_to_image(tokens + own, cells + places, cells)
        return self.norm_final_attn(tokens), cells


class TwoWayLayer(nn.Module):
    """Tokens look at themselves and at the cells, go through a perceptron, and the cells look at them.

    Args:
        is_first: tokens are their own places there, so nothing is added to them.
    """

    def __init__(self, dim: int, num_heads: int, mlp_dim: int, *, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.self_attn = PlainAttention(dim, dim, num_heads)
        self.norm1 = nn.LayerNorm(dim)
        self.cross_attn_token_to_image = PlainAttention(dim, dim // 2, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Perceptron(dim, mlp_dim, dim)
        self.norm3 = nn.LayerNorm(dim)
        self.norm4 = nn.LayerNorm(dim)
        self.cross_attn_image_to_token = PlainAttention(dim, dim // 2, num_heads)

    def forward(self, tokens: Tensor, cells: Tensor, own: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: as of `TwoWayTransformer.forward`, own as tokens."""
        if self.is_first:
            tokens = self.self_attn(tokens, tokens, tokens)
        else:
            tokens = tokens + self.self_attn(tokens + own, tokens + own, tokens)
        tokens = self.norm1(tokens)
        tokens = self.norm2(tokens + self.cross_attn_token_to_image(tokens + own, cells + places, cells))
        tokens = self.norm3(tokens + self.mlp(tokens))
        cells = self.norm4(cells + self.cross_attn_image_to_token(cells + places, tokens + own, tokens))
        return tokens, cells


class PlainAttention(nn.Module):
    """Attention without a rotation, narrower inside than outside where asked to."""

    def __init__(self, dim: int, inner_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(dim, inner_dim)
        self.k_proj = nn.Linear(dim, inner_dim)
        self.v_proj = nn.Linear(dim, inner_dim)
        self.out_proj = nn.Linear(inner_dim, dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Shapes: q (batch, n, dim), k and v (batch, m, dim) -> (batch, n, dim)"""
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project, x in ((self.q_proj, q), (self.k_proj, k), (self.v_proj, v))
        )
        return self.out_proj(attend(q, k, v).transpose(1, 2).flatten(2))
