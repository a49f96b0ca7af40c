"""What a study is made of: the configuration of a run, and the rows that differ from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vision_rope import flags
from vision_rope.config import OPTIONS_OF, TrainConfig


@dataclass
class StudySection:
    """Rows that a study compares, each trained with several seeds.

    Attributes:
        encodings: position encodings, a row each; all takes every one for images, of clips every one but presets
            without an axis of time, in the order of the tables.
        leave_out: encodings that get no row.
        rows: further rows by name, with the keys that differ from the rest of the file; options are merged into the
            file's, but a row with a model.position of its own begins without position_options.
        num_seeds: trainings a row, with the seeds seed, seed + 1, ...
        baseline: row that the others are compared with, seed by seed; empty leaves that table out.
        processes: trainings at the same time.
        elsewhere: further data sources, on which all finished trainings are judged too, at the size of training.
    """

    encodings: list[str] = field(default_factory=lambda: ["all"])
    leave_out: list[str] = field(default_factory=list)
    rows: dict[str, Any] = field(default_factory=dict)
    num_seeds: int = 3
    baseline: str = ""
    processes: int = 2
    elsewhere: list[str] = field(default_factory=list)


@dataclass
class StudyConfig(TrainConfig):
    """A study: one configuration of a run, and what differs from row to row.

    Attributes:
        task: classification, masked (predict hidden patches, without labels) or motion (tell direction and speed).
        seed: first seed of initial weights, order, augmentation and training masks.
        batch_size: images a step.
        ema_decay: decay of the averaged weights that are evaluated and kept; none switches averaging off.
    """

    study: StudySection = field(default_factory=StudySection)


def load_study(argv: Sequence[str]) -> StudyConfig:
    """Read a study from command-line words, as `load_config` does."""
    if "-h" in argv or "--help" in argv:
        print(flags.help_text(StudyConfig, "vision-rope study"))
        raise SystemExit(0)
    return flags.build(StudyConfig, flags.read_words(StudyConfig, argv, OPTIONS_OF))


def override(config: TrainConfig, keys: Mapping[str, Any]) -> TrainConfig:
    """The configuration of a run with other values of some keys, by their dotted names; options are merged.

    Raises:
        ValueError: for an unknown key, with the nearest valid one, and for a value of the wrong type.
    """
    values: dict[str, Any] = asdict(config)
    values.pop("study", None)
    given: dict[str, Any] = {}
    for key, value in keys.items():
        flags.merge(given, flags.nest(key, value))
    return flags.build(TrainConfig, flags.merge_choices(values, given, OPTIONS_OF))
