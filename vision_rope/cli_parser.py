"""How the command line answers mistakes: in a sentence that names the nearest valid word."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """argparse that names the nearest valid flag or command and prints one sentence without the usage block."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what is left over, with the nearest valid flag."""
        parsed, unknown = self.parse_known_args(args, namespace)
        for word in unknown:
            raise ValueError(self._explain(word, parsed))
        return parsed

    def error(self, message: str) -> NoReturn:
        """Hand argparse's complaint to `main`."""
        if choice := re.match(r"argument (?:COMMAND|BENCHMARK): invalid choice: '(.*?)' \(choose from (.*)\)", message):
            nearest = difflib.get_close_matches(choice[1], re.findall(r"\w+", choice[2]), n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            message = f"unknown command {choice[1]}: the commands are {choice[2]}{hint}".replace("'", "")
        raise ValueError(message)

    def _explain(self, word: str, parsed: Any) -> str:
        if not word.startswith("-"):
            return f"{word!r} is one argument too many; lists are written with commas and no spaces: 64,96,192x256"
        flag = word.split("=")[0]
        known = [name for name in parsed.parser._option_string_actions if name.startswith("--")]
        nearest = difflib.get_close_matches(flag, known, n=1, cutoff=0.4)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        return f"unknown flag {flag}{hint} (vision-rope {parsed.command} --help lists all)"
