"""Memory attention of SAM 2: tokens of a frame look at each other, then at stored frames and object pointers.

Names of parameters are those of SAM 2 and SAM 2.1. Grids are passed: nothing here takes a root of a number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vision_rope.memory.folded import MemoryPart
from vision_rope.memory.rope_attention import RopeAttention, join
from vision_rope.rope import ExtensionChoice
from vision_rope.rope_presets import preset
from vision_rope.rotation import Rotation
from vision_rope.turning import is_unobserved

Grid = tuple[int, int]


@dataclass(frozen=True)
class MemoryEntry:
    """A stored frame, or object pointers, as memory attention reads them.

    Attributes:
        features: what is remembered: values are made of it, and keys of it and its positions.
        grid: (rows, columns) of a frame; None for pointers, whose keys are not rotated.
        position: sine encoding that keys have and values do not.
        age: encoding of how long ago that was, the same for all tokens; keys alone have it.
        keys: rotated keys of each layer without their age, from `MemoryAttention.prepare_keys`; None computes them.

    Shapes: features (batch, tokens, memory_dim), position (tokens, memory_dim) or with a batch in front, age
        (memory_dim), keys of a layer (batch, tokens, dim).
    """

    features: Tensor
    grid: Grid | None
    position: Tensor | None = None
    age: Tensor | None = None
    keys: tuple[Tensor, ...] | None = None


class MemoryAttentionLayer(nn.Module):
    """Self-attention, attention to the memory, a perceptron: each behind a norm, and added to what came in."""

    def __init__(self, dim: int, memory_dim: int, mlp_dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.self_attn = RopeAttention(dim, num_heads=num_heads, dropout=dropout)
        self.cross_attn_image = RopeAttention(dim, num_heads=num_heads, kv_dim=memory_dim, dropout=dropout)
        self.linear1 = nn.Linear(dim, mlp_dim)
        self.linear2 = nn.Linear(mlp_dim, dim)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.norm3 = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotation: Rotation, parts: Sequence[MemoryPart]) -> Tensor:
        """Shapes: as of `RopeAttention.read`."""
        x = x + self.dropout(self.self_attn(self.norm1(x), rotation))
        x = x + self.dropout(self.cross_attn_image.read(self.norm2(x), rotation, parts))
        hidden = self.linear1(self.norm3(x))
        hidden = hidden.relu_() if is_unobserved(self.linear1) else hidden.relu()
        return x + self.dropout(self.linear2(self.dropout(hidden)))


class MemoryAttention(nn.Module):
    """Tokens of a frame, conditioned on stored frames and object pointers.

    Args:
        dim: channels of the frame's tokens.
        memory_dim: channels of what is stored.
        depth: number of layers.
        mlp_dim: hidden channels of a layer's perceptron.
        base: base of the rotary embedding, preset "sam2".
        dropout: of attention weights and of residual branches, in training, as in SAM 2.

    Source: SAM 2 (arXiv 2408.00714), section 4 and appendix D.1.
    """

    def __init__(
        self,
        dim: int = 256,
        memory_dim: int = 64,
        depth: int = 4,
        mlp_dim: int = 2048,
        num_heads: int = 1,
        base: float = 10000.0,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(
            MemoryAttentionLayer(dim, memory_dim, mlp_dim, num_heads, dropout) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.rope: Any = preset("sam2", head_dim=dim // num_heads, base=base)
        self.extension: ExtensionChoice | None = None

    def forward(
        self,
        tokens: Tensor,
        memory: Tensor,
        *,
        grid: Grid,
        tokens_pos: Tensor | None = None,
        memory_pos: Tensor | None = None,
        num_pointer_tokens: int = 0,
    ) -> Tensor:
        """SAM 2's own call: stored frames of one grid lie one after another in the memory, then tokens of pointers.

        Args:
            grid: (rows, columns) of the frame and of every stored one.
            tokens_pos: position encoding of the tokens, a tenth of which is added to them.
            memory_pos: position encoding of the memory, ages included, which keys have.
            num_pointer_tokens: how many tokens at the end of the memory are object pointers, whose keys do not turn.

        Shapes: tokens (batch, rows * columns, dim), memory (batch, frames * rows * columns + num_pointer_tokens,
            memory_dim), tokens_pos and memory_pos as what they are added to -> (batch, rows * columns, dim)
        Raises: ValueError where tokens or memory do not fit the grid.
        """
        rotation = self.rotation(grid, tokens.device)
        x = self._start(tokens, tokens_pos, grid)
        _check_batch("memory", memory, tokens)
        tokens_of_frames = memory.shape[1] - num_pointer_tokens
        if not memory.shape[1]:
            raise ValueError("memory is empty; a frame without memory is not read: SAM 2 adds no_mem_embed instead")
        if not 0 <= num_pointer_tokens <= memory.shape[1] or tokens_of_frames % (grid[0] * grid[1]):
            raise ValueError(
                f"memory has {memory.shape[1]} tokens, {num_pointer_tokens} of them of pointers; the others must be "
                f"whole frames of the grid {tuple(grid)}, {grid[0] * grid[1]} tokens each: give entries to `read` "
                "where stored frames have grids of their own"
            )
        placed = self._cast(memory if memory_pos is None else memory + memory_pos)
        part = MemoryPart(self._cast(memory), placed, rotation if tokens_of_frames else None, tokens_of_frames)
        for layer in self.layers:
            x = layer(x, rotation, [part])
        return self.norm(x)

    def read(
        self, tokens: Tensor, entries: Sequence[MemoryEntry], *, grid: Grid, tokens_pos: Tensor | None = None
    ) -> Tensor:
        """Condition a frame on entries of a bank, each with its own grid, age and, where prepared, keys.

        Where all objects see one frame, give its tokens once (batch 1): until the memory is read they are the same.

        Shapes: tokens (batch or 1, rows * columns, dim) -> (batch, rows * columns, dim), the batch that of the entries.
        Raises: ValueError where there are no entries, or tokens do not fit their grid.
        """
        if any(entry.grid is None and entry.age is not None for entry in entries):
            raise ValueError("an entry without a grid has an age; pointers have theirs in `position`, token by token")
        if not entries:
            raise ValueError("entries is empty; a frame without memory is not read: SAM 2 adds no_mem_embed instead")
        rotation = self.rotation(grid, tokens.device)
        x = self._start(tokens, tokens_pos, grid)
        # Grids from files are lists.
        entries = [replace(e, grid=None if e.grid is None else (e.grid[0], e.grid[1])) for e in entries]
        largest = max((entry.features for entry in entries), key=len)
        for entry in entries:
            _check_entry(entry)
            _check_batch("an entry", entry.features, tokens)
            _check_batch("an entry", entry.features, largest)
        rotations = {e.grid: self.rotation(e.grid, tokens.device) for e in entries if e.grid is not None}
        narrow = self._narrow_parts([entry for entry in entries if entry.keys is None], rotations)
        prepared = [entry for entry in entries if entry.keys is not None]
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, [*narrow, *self._prepared_parts(prepared, rotations, index)])
        return self.norm(x)

    def set_extension(self, method: str, train_size: Grid, **knobs: Any) -> None:
        """Choose the context extension for grids larger than the trained one; "none" switches it off.

        Methods that also change the temperature of the softmax change the angles alone here.

        Args:
            train_size: (rows, columns) of the trained grid.

        Raises: ValueError for an unknown method or option.
        """
        larger = [2 * length for length in train_size]
        extension = self.rope.extension_for(method, train_size=train_size, size=larger, **knobs)
        if extension is not None and extension.attention_scale != 1.0:
            knobs = {**knobs, "temperature": 0}
        self.extension = None if method == "none" else (method, tuple(train_size), knobs)

    def prepare_keys(self, entry: MemoryEntry) -> tuple[Tensor, ...]:
        """Rotated keys of a stored frame in every layer, without its age, which changes with every frame.

        They are right as long as the frame's memory and the weights stay; where gradients are on, make none.
        """
        _check_entry(entry)
        rotation = None if entry.grid is None else self.rotation(entry.grid, entry.features.device)
        placed = self.place(replace(entry, age=None))
        return tuple(layer.cross_attn_image.make_keys(placed, rotation) for layer in self.layers)

    def rotation(self, grid: Grid, device: torch.device) -> Rotation:
        """The rotation of a grid's tokens.

        Raises: ValueError where the grid is none.
        """
        if not isinstance(grid, Sequence) or len(grid) != 2:
            raise ValueError(f"grid is {grid!r}; it must be (rows, columns) of a frame's tokens, for instance (36, 64)")
        return self.rope.grid_rotations(*grid, extension=self.extension, device=device)[0]

    def _start(self, tokens: Tensor, tokens_pos: Tensor | None, grid: Grid) -> Tensor:
        """What enters the first layer."""
        dim = self.norm.normalized_shape[0]
        if tokens.ndim != 3 or tokens.shape[1:] != (grid[0] * grid[1], dim):
            raise ValueError(
                f"tokens has shape {tuple(tokens.shape)}; a frame of the grid {tuple(grid)} has (batch, "
                f"{grid[0] * grid[1]}, {dim})"
            )
        if tokens_pos is not None and tokens_pos.shape[-2:] != tokens.shape[-2:]:
            raise ValueError(
                f"tokens_pos has shape {tuple(tokens_pos.shape)} and tokens {tuple(tokens.shape)}; each token has one"
            )
        return self._cast(tokens if tokens_pos is None else tokens + 0.1 * tokens_pos)

    def place(self, entry: MemoryEntry) -> Tensor:
        """What keys of an entry are made from: its features, where they are and how old."""
        places = [x for x in (entry.position, entry.age) if x is not None]
        return self._cast(entry.features + sum(places[1:], places[0]) if places else entry.features)

    def _narrow_parts(self, entries: Sequence[MemoryEntry], rotations: Mapping[Grid, Rotation]) -> list[MemoryPart]:
        """Entries whose keys attention makes itself: those of one grid together, pointers behind the first."""
        groups: dict[Grid | None, list[MemoryEntry]] = {}
        for entry in entries:
            groups.setdefault(entry.grid, []).append(entry)
        pointers = groups.pop(None, []) if len(groups) > 1 else []
        parts = []
        for grid, group in groups.items():
            together = [*group, *pointers]  # with the first grid
            turned = 0 if grid is None else sum(entry.features.shape[1] for entry in group)
            memory = join([self._cast(entry.features) for entry in together])
            placed = join([self.place(entry) for entry in together])
            parts.append(MemoryPart(memory, placed, None if grid is None else rotations[grid], turned))
            pointers = []
        return parts

    def _prepared_parts(
        self, entries: Sequence[MemoryEntry], rotations: Mapping[Grid, Rotation], index: int
    ) -> list[MemoryPart]:
        """Entries that bring keys of this layer, to which their ages are added."""
        attention = self.layers[index].cross_attn_image
        parts = []
        for entry in entries:
            memory, keys = self._cast(entry.features), self._cast(entry.keys[index])  # type: ignore[index]
            if entry.age is not None and entry.grid is not None:
                rows, columns = entry.grid
                keys = keys + attention.make_age(self._cast(entry.age), rotations[rows, columns], columns)
            parts.append(MemoryPart(memory, memory, keys=keys))
        return parts

    def _cast(self, x: Tensor) -> Tensor:
        # Memory may be stored in half precision beside weights of single precision.
        return x.to(self.norm.weight.dtype)


def _check_entry(entry: MemoryEntry) -> None:
    """Raise ValueError where the features do not fill the grid."""
    shape = entry.features.shape
    if len(shape) != 3 or (entry.grid is not None and shape[1] != entry.grid[0] * entry.grid[1]):
        tokens = "tokens" if entry.grid is None else f"{entry.grid[0] * entry.grid[1]}"
        raise ValueError(
            f"an entry's features have shape {tuple(shape)} and its grid is {entry.grid}; features must be "
            f"(batch, {tokens}, memory_dim)"
        )


def _check_batch(name: str, memory: Tensor, tokens: Tensor) -> None:
    """Raise ValueError where the memory belongs to other samples than the tokens."""
    if memory.ndim != 3 or (1 not in (memory.shape[0], tokens.shape[0]) and memory.shape[0] != tokens.shape[0]):
        raise ValueError(
            f"{name} has shape {tuple(memory.shape)} beside {tuple(tokens.shape)}; tokens and every part of the memory "
            "are (batch, tokens, channels), of the same batch or of 1"
        )
