"""Nested dataclasses from YAML files and command-line flags, strict about names and types.

jsonargparse checks and converts the values; names are settled here, so that a wrong one is answered with the nearest.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from vision_rope.suggestion import did_you_mean

Config = TypeVar("Config")


def read_words(kind: type, argv: Sequence[str], options_of: Mapping[str, str]) -> dict[str, Any]:
    """Read `--config FILE.yaml` and `--section.key VALUE` words into nested values; flags win over files.

    `options_of` names keys that choose something by its name, with the key of its options: another name drops the
    options that came before it.

    Raises:
        ValueError: for an unknown flag, with the nearest valid one.
    """
    merged: dict[str, Any] = {}
    pairs = list(_read_flags(kind, argv))
    for key, value in pairs:
        if key == "config":
            merge_choices(merged, read_yaml(Path(value)), options_of)
    given: dict[str, Any] = {}
    for key, value in pairs:
        if key != "config":
            merge(given, nest(key, value))
    return merge_choices(merged, given, options_of)


def merge_choices(target: dict[str, Any], source: dict[str, Any], options_of: Mapping[str, str]) -> dict[str, Any]:
    """Merge nested keys of `source` into `target` and return it, without the options of what another choice replaces.

    `options_of`: see `read_words`.
    """
    for key, options in options_of.items():
        before, after = _look_up(target, key), _look_up(source, key)
        if after is not None and before is not None and after != before:
            section, _, name = options.partition(".")
            target[section].pop(name, None)
    return merge(target, source)


def _look_up(values: dict[str, Any], key: str) -> Any:
    """The value of a dotted name in nested values, or None."""
    section, _, name = key.partition(".")
    inner = values.get(section)
    return inner.get(name) if isinstance(inner, dict) else None


def to_yaml(config: Any) -> str:
    """Write every key of a dataclass as YAML that reads back to an equal one."""
    import yaml

    return yaml.safe_dump(_plain(asdict(config)), sort_keys=False, allow_unicode=True)


def build(kind: type[Config], values: dict[str, Any]) -> Config:
    """Make a dataclass of nested values.

    Raises:
        ValueError: for an unknown key, with the nearest valid one, and for a value of the wrong type.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    known = leaves(kind)
    tidy: dict[str, Any] = {}
    for key, value in flatten(kind, values):
        if key not in known:
            raise ValueError(_unknown(kind, key, "key"))
        if value is None and not _is_optional(known[key]):
            raise ValueError(f"{key} is empty, but it must be {_describe(known[key])}")
        merge(tidy, nest(key, _tidy(known[key], key, value)))
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind)
    try:
        parsed = parser.instantiate(parser.parse_object(tidy))
    except ArgumentError as error:
        match = re.search(r'Parser key "([^"]+)"', str(error))
        if match is None or match[1] not in known:
            raise ValueError(f"the configuration cannot be read: {error}") from None
        key = match[1]
        value = dict(flatten(kind, values))[key]
        choices = get_args(known[key]) if get_origin(known[key]) is Literal else ()
        hint = did_you_mean(str(value), choices)
        raise ValueError(f"{key} is {value!r}, but it must be {_describe(known[key])}{hint}") from None
    return kind(**{item.name: parsed[item.name] for item in fields(kind)})  # type: ignore[arg-type]


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the nested values of a YAML file."""
    import yaml

    if not path.is_file():
        raise ValueError(f"--config {path}: there is no such file")
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"--config {path} must hold keys with values (batch_size: 64), not a {type(values).__name__}")
    return values


def merge(target: dict[str, Any], source: dict[str, Any]) -> dict[str, Any]:
    """Merge nested keys of `source` into `target` and return it."""
    for key, value in source.items():
        inner = target.get(key)
        if isinstance(value, dict) and isinstance(inner, dict):
            merge(inner, value)
        else:
            target[key] = copy.deepcopy(value)
    return target


def leaves(kind: type) -> dict[str, Any]:
    """Types of all keys by their dotted names."""
    sections = {item.name: section for item, section in _sections(kind)}
    names = {name: hint for name, hint in get_type_hints(kind).items() if name not in sections}
    for prefix, section in sections.items():
        names |= {f"{prefix}.{name}": hint for name, hint in get_type_hints(section).items()}
    return names


def get(config: Any, key: str) -> Any:
    """The value of a dotted name."""
    for word in key.split("."):
        config = getattr(config, word)
    return config


def help_text(kind: type, command: str) -> str:
    """List every key with its meaning and default, a section at a time."""
    lines = [
        f"usage: {command} [--config FILE.yaml] [--section.key VALUE ...]",
        "",
        "Flags win over files; options take YAML ({a: 1}) or a flag a key (--model.options.depth 6).",
    ]
    for prefix, section in [("", kind), *((f"{item.name}.", part) for item, part in _sections(kind))]:
        meanings = _attribute_docs(section)
        lines += ["", f"{prefix[:-1] or 'run as a whole'}: {(section.__doc__ or '').splitlines()[0]}"]
        for item in fields(section):
            if item.name in meanings:
                default = "" if _default(item) in (None, {}, []) else f" [{_word(_default(item))}]"
                lines.append(f"  --{prefix}{item.name}  {meanings[item.name]}{default}")
    return "\n".join(lines)


def parse_yaml(text: str) -> Any:
    """Parse YAML by jsonargparse's rules, under which 1e-3 is a number (plain PyYAML makes it a word)."""
    from jsonargparse import get_loader

    return get_loader("yaml")(text)


def _read_flags(kind: type, argv: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value); a true-or-false key may stand without a value."""
    known = leaves(kind)
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ValueError(f"{word!r} is not a flag: flags look like --model.position rope-vit-mixed")
        key, equals, value = word[2:].partition("=")
        parent = next((name for name in known if key.startswith(f"{name}.") and _is_dict(known[name])), None)
        if key != "config" and key not in known and parent is None:
            raise ValueError(_unknown(kind, key, "flag"))
        if not equals:
            if words and not words[0].startswith("--"):
                value = words.pop(0)
            elif known.get(key) is bool:
                value = "true"
            else:
                raise ValueError(f"--{key} needs a value")
        if parent is not None or _is_dict(known.get(key)):
            yield key, _parse_option(key, value)
        else:
            yield key, value


def _parse_option(key: str, text: str) -> Any:
    import yaml

    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--{key} {text}: not valid YAML: {' '.join(str(error).split())}") from None


def _unknown(kind: type, key: str, what: str) -> str:
    """Name the nearest valid key, by the whole dotted name first and by its last word else."""
    sections = [item.name for item, _ in _sections(kind)]
    if key in sections:
        example = next(name for name in leaves(kind) if name.startswith(f"{key}."))
        return f"--{key} is a section; its flags look like --{example}"
    valid = [*leaves(kind), *(["config"] if what == "flag" else sections)]
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.75)
    if not near:
        last = key.rpartition(".")[2]
        words = difflib.get_close_matches(last, [name.rpartition(".")[2] for name in valid], n=1, cutoff=0.6)
        near = [name for name in valid if words and name.rpartition(".")[2] == words[0]][:1]
    if not near:
        near = difflib.get_close_matches(key, valid, n=1, cutoff=0.0)
    dashes = "--" if what == "flag" else ""
    return f"unknown {what} {dashes}{key}; the nearest valid one is {dashes}{near[0]}"


def _tidy(hint: Any, key: str, value: Any) -> Any:
    """Read the words people write: none for nothing, lists with commas, sizes as numbers."""
    if isinstance(value, str) and value.lower() in ("none", "null") and _is_optional(hint):
        return None
    if hint == list[str]:
        if isinstance(value, str) and not value.startswith("["):
            value = [word.strip() for word in value.split(",") if word.strip()]
        elif isinstance(value, str):
            value = _parse_option(key, value)
        elif isinstance(value, int) and not isinstance(value, bool):
            value = [value]
        if isinstance(value, list):
            value = [str(item) if isinstance(item, int) else item for item in value]
        return value
    if hint in (list[int], list[float]):
        if isinstance(value, str):
            words = [] if value.startswith("[") else [word for word in value.split(",") if word.strip()]
            return [_parse_option(key, word) for word in words] or _parse_option(key, value)
        return [value] if isinstance(value, int | float) and not isinstance(value, bool) else value
    if hint == int | tuple[int, int] and isinstance(value, str) and re.fullmatch(r"\d+[x,]\d+", value):
        return [int(number) for number in re.split("[x,]", value)]
    return value


def _sections(kind: type) -> list[tuple[Field[Any], type]]:
    hints = get_type_hints(kind)
    return [(item, hints[item.name]) for item in fields(kind) if is_dataclass(hints[item.name])]


def flatten(kind: type, values: dict[str, Any]) -> list[tuple[str, Any]]:
    """Nested values as pairs of a dotted name and a value; dotted names stay as they are.

    Raises:
        ValueError: for a section that holds no keys.
    """
    sections = {item.name for item, _ in _sections(kind)}
    flat: list[tuple[str, Any]] = []
    for key, value in values.items():
        if key not in sections:
            flat.append((str(key), value))
        elif isinstance(value, dict):
            flat += [(f"{key}.{inner}", item) for inner, item in value.items()]
        else:
            raise ValueError(f"{key} is {value!r}, but it is a section and must hold keys with values")
    return flat


def nest(key: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} of "a.b"."""
    for word in reversed(key.split(".")):
        value = {word: value}
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _is_optional(hint: Any) -> bool:
    return type(None) in get_args(hint)


def _is_dict(hint: Any) -> bool:
    return hint == dict[str, Any]


def _describe(hint: Any) -> str:
    """Say a type in words."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    words[Any] = "anything"
    if hint in words:
        return words[hint]
    if _is_dict(hint):
        return "keys with values, like {depth: 6}"
    if hint == list[str]:
        return "a list, like 64,96x160"
    if hint in (list[int], list[float]):
        return f"a list, like {'8,16' if hint == list[int] else '2,7.5'}, each of them {_describe(get_args(hint)[0])}"
    if getattr(hint, "__origin__", None) is Literal:
        return "one of " + ", ".join(get_args(hint))
    if getattr(hint, "__origin__", None) is tuple:
        return f"{len(get_args(hint))} numbers, like [{', '.join(['1'] * len(get_args(hint)))}]"
    return " or ".join(_describe(part) for part in get_args(hint))


def _attribute_docs(section: type) -> dict[str, str]:
    """Meanings of the attributes, from the Attributes part of a dataclass's docstring."""
    _, _, text = inspect.cleandoc(section.__doc__ or "").partition("Attributes:\n")
    meanings: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if match := re.match(r"    (\w+): (.*)", line):
            name = match[1]
            meanings[name] = match[2]
        elif name and line.strip():
            meanings[name] += " " + line.strip()
    return meanings


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ",".join(f"{part:.4g}" if isinstance(part, float) else str(part) for part in value)
    return str(value)
