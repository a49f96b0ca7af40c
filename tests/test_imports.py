"""The house's order of imports, and that `import vision_rope` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vision_rope

PACKAGE = Path(vision_rope.__file__).parent

# From the ground up: a room may import the rooms before it. Inside a room (data/, convert/, ...) anything goes.
ORDER = [
    "suggestion",
    "positions",
    "coordinates",
    "multimodal",
    "frequencies",
    "extension_formulas",
    "extension",
    "turning",
    "rotation",
    "attention",
    "linear_attention",
    "masking",
    "rope",
    "rope_presets_video",
    "rope_presets",
    "extension_table",
    "inspection",
    "sinusoidal",
    "relative",
    "relative_encodings",
    "encodings",
    "feature_classifiers",
    "convert",
    "memory",
    "video",
    "segmenter",
    "masked_model",
    "references",
    "flags",
    "extension_text",
    "config_video",
    "config",
    "rules",
    "study_config",
    "sizes",
    "points",
    "data",
    "losses",
    "metrics",
    "motion_metrics",
    "vos_metrics",
    "prompting",
    "segmentation_losses",
    "segmentation_metrics",
    "parallel",
    "weight_metadata",
    "model_building",
    "checkpoint",
    "first_weights",
    "segmenter_loading",
    "optimization",
    "run_folder",
    "plots",
    "results",
    "task_protocol",
    "segmentation_task",
    "tasks",
    "measure",
    "targets",
    "sweep",
    "evaluate",
    "inspection_targets",
    "inspection_report",
    "probe",
    "preparation",
    "progress",
    "video_writer",
    "tracking_output",
    "propagation",
    "tracking_scores",
    "tracking_results",
    "evaluate_videos",
    "track_prompts",
    "track",
    "trainer",
    "study_plan",
    "study_results",
    "study_elsewhere",
    "study",
    "benchmark",
    "cli_parser",
    "cli_track",
    "cli",
]
# Knows the home of every public name, and loads it when it is asked for.
DOOR = "__init__"
# A class's own way from files: files are known above its room.
UPWARDS = {("segmenter", "segmenter_loading")}
WITHOUT_TIMM = [*ORDER[: ORDER.index("convert")], "memory", "flags", "config_video", "config"]
HEAVY = ("timm", "matplotlib", "ultralytics", "torchmetrics", "tensorboard", "torchvision", "av", "torchcodec")


def module_name(path: Path) -> str:
    """vision_rope/data/decode.py -> vision_rope.data.decode; a package is named by its folder."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(dotted: str) -> str:
    """vision_rope.data.decode -> data, vision_rope.create_model -> convert, vision_rope -> the door."""
    parts = dotted.split(".")
    if len(parts) == 1:
        return DOOR
    return vision_rope._HOME_OF.get(parts[1], parts[1]).split(".")[0]


def imported_names(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Dotted absolute names of everything a source text imports, at any depth; relative imports are resolved.

    `import vision_rope as vr` gives every `vr.name` that the text uses, since such a name loads its room.
    """
    tree = ast.parse(source)
    aliases: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name == "vision_rope":
                    aliases.add(name.asname or name.name)
                elif name.name.startswith("vision_rope.") and name.asname is None:
                    aliases.add("vision_rope")
                    yield name.name
                else:
                    yield name.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                package = package[: len(package) - node.level + 1]
                base = ".".join([*package, base] if base else package)
            yield from (f"{base}.{name.name}" for name in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield f"vision_rope.{node.attr}"


def upward_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports of this package's rooms that stand above the room of `module`, and of rooms ORDER does not know."""
    own = room_of(module)
    wrong = []
    for name in imported_names(source, module, is_package):
        if name.split(".")[0] != "vision_rope":
            continue
        room = room_of(name)
        if room in (own, DOOR) or room.startswith("__") or (own, room) in UPWARDS:
            continue
        if room not in ORDER or ORDER.index(room) > ORDER.index(own):
            wrong.append(name)
    return wrong


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports_of(path: Path) -> list[str]:
    return list(imported_names(path.read_text(), module_name(path), path.name == "__init__.py"))


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    if path == PACKAGE / "__init__.py":
        return
    module = module_name(path)
    assert room_of(module) in ORDER, f"give {room_of(module)!r} its place in ORDER"
    assert upward_imports(path.read_text(), module, path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("vision_rope.rotation", "from vision_rope.rope import Rope", ["vision_rope.rope.Rope"]),
        ("vision_rope.rotation", "from vision_rope import rope", ["vision_rope.rope"]),
        ("vision_rope.rotation", "from vision_rope import create_model", ["vision_rope.create_model"]),
        ("vision_rope.rotation", "import vision_rope.trainer", ["vision_rope.trainer"]),
        ("vision_rope.rotation", "import vision_rope.trainer as t", ["vision_rope.trainer"]),
        ("vision_rope.rotation", "import vision_rope as vr\nvr.preset('sam2')", ["vision_rope.preset"]),
        ("vision_rope.rotation", "from .rope import Rope", ["vision_rope.rope.Rope"]),
        ("vision_rope.rotation", "from . import rope", ["vision_rope.rope"]),
        ("vision_rope.data.decode", "from ..trainer import Trainer", ["vision_rope.trainer.Trainer"]),
        ("vision_rope.data.decode", "from .. import cli", ["vision_rope.cli"]),
        ("vision_rope.data.decode", "from .augment import flip", []),
        ("vision_rope.rotation", "def f():\n    from vision_rope.cli import main", ["vision_rope.cli.main"]),
        (
            "vision_rope.rotation",
            "import importlib\nimportlib.import_module('vision_rope.cli')",
            ["vision_rope.cli"],
        ),
        ("vision_rope.rotation", "from vision_rope.helpers import f", ["vision_rope.helpers.f"]),
        ("vision_rope.rope", "import torch\nfrom vision_rope.rotation import rotate\nfrom . import positions", []),
        ("vision_rope.trainer", "import vision_rope\nvision_rope.create_model('x')", []),
    ],
)
def test_the_checker_sees_upward_imports(module: str, source: str, found: list[str]) -> None:
    assert upward_imports(source, module) == found


def test_the_checker_resolves_relative_imports_of_packages() -> None:
    assert upward_imports("from .x import y", "vision_rope.data", is_package=True) == []
    assert upward_imports("from ..cli import main", "vision_rope.data", is_package=True) == ["vision_rope.cli.main"]


def test_only_sam2_imports_ultralytics() -> None:
    users = [path for path in sources() if any(name.split(".")[0] == "ultralytics" for name in imports_of(path))]
    assert [path for path in users if path != PACKAGE / "video" / "sam2.py"] == []


def test_rotary_embeddings_do_not_need_timm() -> None:
    users = {
        room_of(module_name(path))
        for path in sources()
        if any(name.split(".")[0] == "timm" for name in imports_of(path))
    }
    assert "convert" in users
    assert users.isdisjoint(WITHOUT_TIMM)


def test_public_names_resolve_and_are_listed() -> None:
    assert sorted(vision_rope.__all__) == sorted(vision_rope._HOME_OF)
    for name in vision_rope.__all__:
        assert getattr(vision_rope, name) is not None
        assert name in dir(vision_rope)
    with pytest.raises(AttributeError, match="no attribute 'rotat'"):
        _ = vision_rope.rotat


LIGHT = """
import sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import vision_rope
seconds = time.perf_counter() - start
heavy = {heavy!r}

def check(what):
    loaded = [name for name in heavy if name in sys.modules and name not in before]
    assert not loaded, (what, loaded)

check("import vision_rope")
dir(vision_rope)
check("dir(vision_rope)")
rope = vision_rope.preset("rope-vit-axial", head_dim=16)
check("preset")
vision_rope.rotate(torch.ones(1, 6, 16), rope(rope.positions(2, 3)))
check("rotate")
print(seconds)
"""


@pytest.mark.integration
def test_import_is_fast_and_light() -> None:
    """Failure class 44 in part: nothing heavy is imported before it is asked for."""
    script = LIGHT.format(heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2.0
