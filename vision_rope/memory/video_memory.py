"""The memory of a SAM 2 model: what its checkpoint holds of it, and its way from a frame into a bank and back.

Names of parameters are those of SAM 2 and SAM 2.1, so that weights of a checkpoint load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from vision_rope.memory.attention import Grid, MemoryAttention, MemoryEntry
from vision_rope.memory.bank import MemoryBank, PreparedKeys, Stamp, StoredFrame, StoredPointer
from vision_rope.memory.encoder import MemoryEncoder
from vision_rope.memory.perceptron import Perceptron
from vision_rope.memory.pointers import is_there, pointer_tokens
from vision_rope.memory.sine import sine_1d, sine_2d

Version = Literal["2.0", "2.1"]
# What of a SAM 2 model is its memory.
PARTS = (
    "memory_attention",
    "memory_encoder",
    "maskmem_tpos_enc",
    "no_mem_embed",
    "no_mem_pos_enc",
    "no_obj_ptr",
    "no_obj_embed_spatial",
    "obj_ptr_proj",
    "obj_ptr_tpos_proj",
)


class VideoMemory(nn.Module):
    """Everything of a SAM 2 model that stores and reads memory; what is stored lies in a `MemoryBank`.

    What was stored in another dtype or on another device than the weights is cast and moved to them when it is read.

    Args:
        version: 2.1 also marks the memory of frames without the object, and encodes the ages of pointers.
        num_ages: rows of the encoding of ages: one more than tracked frames are read.

    Raises: ValueError where the parts do not fit each other, or for an unknown version.
    Source: SAM 2 (arXiv 2408.00714), section 4 and appendix D.1.
    """

    no_obj_embed_spatial: nn.Parameter | None

    def __init__(
        self,
        memory_attention: MemoryAttention | None = None,
        memory_encoder: MemoryEncoder | None = None,
        *,
        version: Version = "2.1",
        num_ages: int = 7,
    ) -> None:
        super().__init__()
        self.memory_attention = memory_attention or MemoryAttention()
        self.memory_encoder = memory_encoder or MemoryEncoder()
        dim, memory_dim = self.memory_encoder.dim, self.memory_encoder.memory_dim
        cross = self.memory_attention.layers[0].cross_attn_image
        if (dim, memory_dim) != (cross.q_proj.in_features, cross.k_proj.in_features):
            raise ValueError(
                f"memory_encoder has {dim} channels and stores {memory_dim}, memory_attention has "
                f"{cross.q_proj.in_features} and reads {cross.k_proj.in_features}; both must be the same"
            )
        if dim % memory_dim:
            raise ValueError(
                f"memory_dim is {memory_dim} and must divide dim, {dim}: pointers are cut into such tokens"
            )
        if version not in get_args(Version):
            raise ValueError(f"version is {version!r}; choose one of {', '.join(get_args(Version))}")
        self.version = version
        self.maskmem_tpos_enc = _embedding(num_ages, 1, 1, memory_dim)
        self.no_mem_embed = _embedding(1, 1, dim)
        # In every checkpoint and read by none of the published configurations.
        self.no_mem_pos_enc = _embedding(1, 1, dim)
        self.no_obj_ptr = _embedding(1, dim)
        self.obj_ptr_proj = Perceptron(dim, dim, dim, dim)
        newer = version == "2.1"
        self.register_parameter("no_obj_embed_spatial", _embedding(1, memory_dim) if newer else None)
        self.obj_ptr_tpos_proj = nn.Linear(dim, memory_dim) if newer else None

    def forward(
        self,
        tokens: Tensor,
        bank: MemoryBank,
        number: int,
        *,
        grid: Grid,
        tokens_pos: Tensor | None = None,
        num_frames: int | None = None,
    ) -> Tensor:
        """Condition the tokens of a frame on what a bank holds.

        A frame without memory gets `no_mem_embed`. SAM 2 takes every frame that is prompted before it was tracked for
        one: give it an empty bank.

        Args:
            number: of the frame.
            tokens_pos: position encoding of the tokens, in SAM 2 `sine_2d` of their grid.
            num_frames: as in `selection.select_pointers`.

        Shapes: tokens (batch or 1, rows * columns, dim) -> (batch, rows * columns, dim)
        """
        tokens = tokens.to(self.no_mem_embed)
        tokens_pos = None if tokens_pos is None else tokens_pos.to(tokens)
        entries = self.read_entries(bank, number, num_frames=num_frames)
        if not entries:
            return tokens + self.no_mem_embed
        return self.memory_attention.read(tokens, entries, grid=grid, tokens_pos=tokens_pos)

    def store_frame(
        self,
        bank: MemoryBank,
        number: int,
        features: Tensor,
        mask_logits: Tensor,
        *,
        object_score: Tensor | None = None,
        mask_quality: Tensor | None = None,
        prompted: bool = False,
        distractor: bool = False,
        binarize: bool = False,
        dtype: torch.dtype | None = None,
        prepare: bool = False,
    ) -> MemoryBank:
        """A bank with the memory of a frame and the masks found on it.

        Args:
            object_score, mask_quality, prompted, distractor, binarize, dtype: as of `encode_frame`.
            prepare: compute keys now and not on each read, which takes four times the memory; on a CPU reading them
                takes as long as making them. Never done while gradients are on.

        Shapes: as of `encode_frame`
        """
        frame = self.encode_frame(
            number,
            features,
            mask_logits,
            object_score=object_score,
            mask_quality=mask_quality,
            prompted=prompted,
            distractor=distractor,
            binarize=binarize,
            dtype=dtype,
        )
        return bank.add_frame(self._with_keys(frame) if prepare else frame)

    def encode_frame(
        self,
        number: int,
        features: Tensor,
        mask_logits: Tensor,
        *,
        object_score: Tensor | None = None,
        mask_quality: Tensor | None = None,
        prompted: bool = False,
        distractor: bool = False,
        binarize: bool = False,
        dtype: torch.dtype | None = None,
    ) -> StoredFrame:
        """The memory of a frame and the masks found on it.

        Args:
            features: of the frame, before any memory was read.
            object_score: logit that the object is there; it is there when not given.
            mask_quality, prompted, distractor: as in `StoredFrame`.
            binarize: as in `MemoryEncoder`.
            dtype: to store the memory in, that of the weights when not given; SAM 2 has bfloat16.

        Shapes: features (batch or 1, dim, h, w), mask_logits (batch, 1, 16 * h, 16 * w), scores (batch) or (batch, 1)
        """
        memory = self.memory_encoder(features, mask_logits, binarize=binarize).flatten(2).mT
        if self.no_obj_embed_spatial is not None and object_score is not None:
            missing = ~is_there(object_score)
            memory = memory + missing[..., None].to(memory) * self.no_obj_embed_spatial
        rows, columns = features.shape[-2:]
        return StoredFrame(
            number=number,
            features=memory.to(dtype or memory.dtype).contiguous(),
            grid=(rows, columns),
            prompted=prompted,
            distractor=distractor,
            object_score=object_score,
            mask_quality=mask_quality,
        )

    def store_pointer(
        self, bank: MemoryBank, number: int, mask_token: Tensor, object_score: Tensor, *, prompted: bool = False
    ) -> MemoryBank:
        """A bank with the object pointer of a frame.

        Args, Shapes: as of `make_pointer`
        """
        return bank.add_pointer(self.make_pointer(number, mask_token, object_score, prompted=prompted))

    def make_pointer(
        self, number: int, mask_token: Tensor, object_score: Tensor, *, prompted: bool = False
    ) -> StoredPointer:
        """The object pointer of a frame.

        Args:
            mask_token: output token of the mask decoder for the mask that was chosen.
            object_score: logit that the object is there; where it is not, the pointer is `no_obj_ptr`.

        Shapes: mask_token (batch, dim), object_score (batch) or (batch, 1)
        """
        pointer = self.obj_ptr_proj(mask_token.to(self.no_obj_ptr.dtype))
        return StoredPointer(number, torch.where(is_there(object_score), pointer, self.no_obj_ptr), prompted)

    def prepare_keys(self, bank: MemoryBank) -> MemoryBank:
        """A bank whose frames all have keys of the present weights; the same bank while gradients are on."""
        return replace(bank, frames=tuple(self._with_keys(frame) for frame in bank.frames))

    def read_entries(self, bank: MemoryBank, number: int, *, num_frames: int | None = None) -> list[MemoryEntry]:
        """What a frame reads of a bank: an entry of each stored frame, then one of all object pointers.

        Args: as of `forward`.
        Raises: ValueError where the bank's policy reads more tracked frames than there are ages.
        """
        num_ages = len(self.maskmem_tpos_enc)
        if bank.policy.num_recent >= num_ages:
            raise ValueError(
                f"the policy's num_recent is {bank.policy.num_recent}; {num_ages} ages, one of them of prompted "
                f"frames, are enough for {num_ages - 1}"
            )
        selected = bank.select_frames(number, num_ages=num_ages)
        frames = self._without_stale_keys([frame for frame, _ in selected])
        places: dict[Grid, Tensor] = {}
        entries = [
            replace(self._entry(frame, places), age=self.maskmem_tpos_enc[row].flatten())
            for frame, (_, row) in zip(frames, selected, strict=True)
        ]
        pointers = bank.select_pointers(number, num_frames=num_frames)
        if pointers:
            entries.append(self._pointer_entry(pointers))
        return entries

    def _pointer_entry(self, pointers: list[tuple[StoredPointer, float]]) -> MemoryEntry:
        memory_dim = self.memory_encoder.memory_dim
        tokens = pointer_tokens([stored.pointer for stored, _ in pointers], memory_dim).to(self.no_obj_ptr)
        if self.obj_ptr_tpos_proj is None:
            return MemoryEntry(tokens, None)
        dim = self.no_obj_ptr.shape[-1]
        ages = torch.tensor([age for _, age in pointers], device=tokens.device)
        position = self.obj_ptr_tpos_proj(sine_1d(ages, dim).to(tokens.dtype))
        return MemoryEntry(tokens, None, position.repeat_interleave(dim // memory_dim, dim=0))

    def _entry(self, frame: StoredFrame, places: dict[Grid, Tensor]) -> MemoryEntry:
        """A stored frame without its age, with its keys where it has some.

        Args:
            places: encodings of the grids of one read, which are computed once.
        """
        features = frame.features.to(self.maskmem_tpos_enc)
        if frame.keys is not None:
            return MemoryEntry(features, frame.grid, keys=frame.keys.layers)
        if frame.grid not in places:
            places[frame.grid] = sine_2d(*frame.grid, features.shape[-1], device=features.device).to(features)
        return MemoryEntry(features, frame.grid, places[frame.grid])

    def _with_keys(self, frame: StoredFrame) -> StoredFrame:
        frame = replace(frame, keys=None)
        if torch.is_grad_enabled():
            return frame
        layers = self.memory_attention.prepare_keys(self._entry(frame, {}))
        return replace(frame, keys=PreparedKeys(layers, _stamp(frame), self._key_weights()))

    def _without_stale_keys(self, frames: list[StoredFrame]) -> list[StoredFrame]:
        """Frames whose keys are dropped where gradients are on, or their memory or the weights of keys have changed."""
        if torch.is_grad_enabled() or all(frame.keys is None for frame in frames):
            return [replace(frame, keys=None) for frame in frames]
        weights, known = self._key_weights(), {}
        right = []
        for frame in frames:
            keys = frame.keys
            if keys is not None and id(keys.weights) not in known:
                known[id(keys.weights)] = _are_equal(keys.weights, weights)
            fresh = keys is not None and known[id(keys.weights)] and keys.stamp == _stamp(frame)
            right.append(frame if fresh else replace(frame, keys=None))
        return right

    def _key_weights(self) -> Tensor:
        """A copy of all weights that keys are made with: not every step of an optimizer counts its changes."""
        projections = [layer.cross_attn_image.k_proj for layer in self.memory_attention.layers]
        weights = [parameter.detach().flatten() for projection in projections for parameter in projection.parameters()]
        return torch.cat(weights)


def _stamp(frame: StoredFrame) -> Stamp:
    """Changes with the frame's memory, in place too."""
    x = frame.features
    # Tensors of inference mode do not count their changes; memory that was made there is not changed afterwards.
    return frame.grid, x.data_ptr(), tuple(x.shape), x.dtype, 0 if x.is_inference() else x._version


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


def _embedding(*shape: int) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=0.02))


def memory_version(state_dict: Mapping[str, Tensor]) -> Version:
    """Version of SAM 2 that weights are of, told from their names alone.

    Raises: ValueError where they have no memory of SAM 2.
    """
    if "maskmem_tpos_enc" not in state_dict:
        raise ValueError(
            "maskmem_tpos_enc is missing; weights of SAM 2 and 2.1 have it: give the state dict itself, which their "
            "checkpoints keep under the key 'model'"
        )
    return "2.1" if "no_obj_embed_spatial" in state_dict else "2.0"


def load_video_memory(
    state_dict: Mapping[str, Tensor], *, num_heads: int = 1, base: float = 10000.0, dropout: float = 0.1
) -> VideoMemory:
    """The memory of a SAM 2 or 2.1 checkpoint with its weights, which tell the version and all sizes.

    Args:
        state_dict: of a whole model; its other weights are left alone.
        num_heads, base, dropout: of `MemoryAttention`, which weights do not tell.

    Raises: ValueError where weights of the memory are missing.
    """
    version = memory_version(state_dict)
    own = {name: value for name, value in state_dict.items() if name.split(".")[0] in PARTS}
    try:
        num_ages, _, _, memory_dim = own["maskmem_tpos_enc"].shape
        dim = own["no_mem_embed"].shape[-1]
        mlp_dim = len(own["memory_attention.layers.0.linear1.bias"])
        depth = len({name.split(".")[2] for name in own if name.startswith("memory_attention.layers.")})
        attention = MemoryAttention(dim, memory_dim, depth, mlp_dim, num_heads, base, dropout)
        memory = VideoMemory(attention, MemoryEncoder(dim, memory_dim), version=version, num_ages=num_ages)
        memory.load_state_dict(own)
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"these are not all weights of the memory of SAM {version}: {error}") from error
    return memory
