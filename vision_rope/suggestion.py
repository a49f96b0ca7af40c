"""The nearest name, for messages about names that do not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """End of a message: "; did you mean 'x'?" with the nearest known name, or nothing where none is near."""
    nearest = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
