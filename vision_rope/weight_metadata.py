"""What a file of weights says about the model they are of: its encoding, the encoding's options and the pairing."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from vision_rope.config import from_yaml


def describe_position(model: nn.Module) -> dict[str, str]:
    """Metadata of a model's weights: position encoding, its options and, of a rotary one, the pairing."""
    from vision_rope.convert.pairing import pairing_of

    backbone = backbone_of(model)
    described = {
        "position": getattr(backbone, "position_name", None),
        "encoding": _describe_encoding(getattr(backbone, "position", None)),
        "pairing": pairing_of(model),
    }
    return {key: value for key, value in described.items() if value is not None}


def backbone_of(model: Any) -> Any:
    """The part of a model that has the position encoding: of a masked one its encoder, of a segmenter its trunk."""
    whole = getattr(model, "backbone", model)
    return getattr(whole, "encoder", getattr(whole, "trunk", whole))


def _describe_encoding(encoding: Any) -> str | None:
    """The options that weights are bound to, in a line: neither pairing nor extension nor augmentation."""
    from vision_rope.relative import RelativeEncoding
    from vision_rope.rope import Rope
    from vision_rope.sinusoidal import Sinusoidal

    if isinstance(encoding, RelativeEncoding | Sinusoidal):
        return encoding.extra_repr() or None
    if not isinstance(encoding, Rope):
        return None
    words = [encoding.name]
    if encoding.ladders is None:
        words.append("learned")
    else:
        ladders = [f"base {l.base:.8g} over {l.pairs} pairs, scale {l.scale:.8g}" for l in encoding.ladders]
        words += [f"axis {axis}: {text}" for axis, text in enumerate(ladders)]
    coordinates = encoding.coordinates
    for name in ("reference", "normalize", "offset", "diagonal"):
        if value := getattr(coordinates, name):
            words.append(f"{name} {value}")
    return "; ".join(words)


def warn_of_another_kind(model: Any, metadata: Mapping[str, str], path: str | Path) -> None:
    """Weights fit a model of another encoding or attention name by name, so that nothing else would tell."""
    backbone = backbone_of(model)
    trained, own = metadata.get("position"), getattr(backbone, "position_name", None)
    if own is None and trained not in (None, "learned"):
        warnings.warn(
            f"{path} was trained with the position encoding {trained!r}, but the model has timm's own; give it that "
            f"position: --position {trained}, or vision_rope.add_position(model, {trained!r})",
            stacklevel=3,
        )
    elif own is not None and trained not in (None, own):
        warnings.warn(
            f"{path} was trained with the position encoding {trained!r}, but the model has {own!r}", stacklevel=3
        )
    elif own is not None and "encoding" in metadata:
        described = describe_position(backbone).get("encoding")
        if described not in (None, metadata["encoding"]):
            warnings.warn(
                f"{path} was trained with other options of the position encoding {own!r}: {metadata['encoding']}; the "
                f"model has: {described}",
                stacklevel=3,
            )
    # Attention has no parameters of its own, apart from a random projection.
    attention = from_yaml(metadata["config"]).model.attention if "config" in metadata else None
    own = getattr(backbone, "attention_name", None)
    if attention is not None and own is not None and attention != own:
        warnings.warn(f"{path} was trained with {attention} attention, but the model has {own} attention", stacklevel=3)


def adopt_pairing(model: nn.Module, metadata: Mapping[str, str], source: str | Path) -> None:
    """Bring weights that were just loaded into the model's pairing, where their metadata name another one.

    Raises:
        ValueError: where the metadata name no pairing there is.
    """
    from vision_rope.convert.pairing import reorder_weights

    if "pairing" in metadata:
        try:
            reorder_weights(model, metadata["pairing"])
        except ValueError as error:
            raise ValueError(f"{source} does not fit the model: {error}") from error


def check_pairing(model: nn.Module, metadata: Mapping[str, str], source: str | Path) -> None:
    """Refuse weights of another pairing where a training goes on: the optimizer's state is in the order of theirs.

    Raises:
        ValueError: with the pairings of both.
    """
    from vision_rope.convert.pairing import pairing_of

    stored, own = metadata.get("pairing"), pairing_of(model)
    if stored not in (None, own):
        raise ValueError(
            f"{source} holds weights of pairing {stored!r} and the run's model has {own!r}; a training cannot change "
            "its pairing on the way: start a new one, with these weights as model.checkpoint"
        )
