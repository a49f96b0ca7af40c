"""A method of context extension with its options as one word, as flags, YAML lists and tables have it."""

from __future__ import annotations

from typing import Any

from vision_rope.extension import check_knobs, check_name, compute_extension
from vision_rope.flags import parse_yaml
from vision_rope.frequencies import Ladder

# A base hardly above 1, which every new base exceeds: values that some embedding takes are not refused here.
ANY_LADDER = Ladder(base=1.0 + 1e-6, pairs=8, slots=tuple(range(8)))


def parse_extension(text: str) -> tuple[str, dict[str, Any]]:
    """Read "yarn" or "yarn:beta_fast=16:factors=max" as the method and its options; values are YAML scalars.

    Raises: ValueError for an unknown method or option, with the nearest, and for values that no embedding takes.
    """
    try:
        method, *words = text.split(":")
        check_name(method)
        knobs: dict[str, Any] = {}
        for word in words:
            name, value = _read_option(word)
            if name in knobs:
                raise ValueError(f"option {name} is given twice")
            knobs[name] = value
        check_knobs(method, knobs)
        # For its checks of the values.
        compute_extension(method, ladders=[ANY_LADDER], pairs=8, train_size=(8,), size=(16,), knobs=knobs)
    except ValueError as error:
        raise ValueError(f"extend {text!r}: {error}") from error
    return method, knobs


def _read_option(word: str) -> tuple[str, Any]:
    import yaml

    name, _, value = word.partition("=")
    if not name or not value:
        raise ValueError(f"{word!r} must be OPTION=VALUE, as in yarn:beta_fast=16:beta_slow=2")
    try:
        return name, parse_yaml(value)
    except yaml.YAMLError:
        raise ValueError(f"{word!r} has a value that is not valid YAML") from None
