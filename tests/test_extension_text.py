"""Methods of context extension with options as text: in flags, YAML lists, sweeps, probes and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.config import load_config, to_yaml
from vision_rope.evaluate import check_methods, sweep
from vision_rope.extension import EXTENSIONS
from vision_rope.extension_text import parse_extension
from vision_rope.study_config import load_study
from vision_rope.study_results import _reasons

BY_FIT = "yarn:beta_fast=16:beta_slow=2:temperature=0"


@pytest.mark.parametrize("name", EXTENSIONS)
def test_every_method_by_its_name_alone_and_with_its_defaults(name: str) -> None:
    assert parse_extension(name) == (name, {})
    defaults = {knob: value for knob, value in EXTENSIONS[name].knobs.items() if value is not None}
    text = ":".join([name, *(f"{knob}={value}" for knob, value in defaults.items())])
    assert parse_extension(text) == (name, defaults)


def test_values_are_yaml() -> None:
    text = "ntk-by-parts:beta_fast=16:beta_slow=1.5:linear_fast=1e1:truncate=false:factors=max:temperature=0"
    knobs = {"beta_fast": 16, "beta_slow": 1.5, "linear_fast": 10.0, "truncate": False, "factors": "max"}
    assert parse_extension(text) == ("ntk-by-parts", {**knobs, "temperature": 0})
    # Fits embeddings of a smaller base, such as rope-vit-axial's 100.
    assert parse_extension("base:base=1e3") == ("base", {"base": 1000.0})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("yarm:beta_fast=1", r"extend 'yarm:beta_fast=1': method is 'yarm'; .* did you mean 'yarn'\?"),
        ("", "extend '': method is ''; the context-extension methods are none, interpolate"),
        (":beta_fast=1", "method is ''"),
        (
            "yarn:beta_fats=16",
            r"'yarn' has no option 'beta_fats'; its options: beta_fast, .*did you mean 'beta_fast'\?",
        ),
        ("yarn:factor=2", r"'yarn' has no option 'factor'"),
        ("none:beta_fast=16", r"'none' has no option 'beta_fast'; its options: none"),
        ("pitch:factors=max", r"'pitch' has no option 'factors'"),
        ("yarn:", r"'' must be OPTION=VALUE, as in yarn:beta_fast=16:beta_slow=2"),
        ("yarn:beta_fast", r"'beta_fast' must be OPTION=VALUE"),
        ("yarn:beta_fast=", r"'beta_fast=' must be OPTION=VALUE"),
        ("yarn:=16", r"'=16' must be OPTION=VALUE"),
        ("yarn:beta_fast=16:beta_fast=8", "option beta_fast is given twice"),
        ("yarn:beta_fast=[", r"'beta_fast=\[' has a value that is not valid YAML"),
        ("yarn:beta_fast=fast", "beta_fast is 'fast'; it must be a positive number"),
        ("yarn:beta_fast=[16]", r"beta_fast is \[16\]; it must be a positive number"),
        ("yarn:beta_fast=1:beta_slow=2", "beta_fast must be the larger one"),
        ("yarn:truncate=1", "truncate is 1; it must be True or False"),
        ("yarn:temperature=-1", "temperature is -1; it must be zero or a positive number"),
        ("yarn:factors=most", "factors is 'most'; choose"),
        ("base:base=1", "base is 1 and the embedding's own base 1; the new one must be larger"),
    ],
)
def test_what_cannot_be_read_is_refused_before_any_work(text: str, message: str) -> None:
    """Failure class 20."""
    with pytest.raises(ValueError, match=message):
        check_methods(["ntk", text])


def test_flags_and_yaml_lists_hold_options(tmp_path: Path) -> None:
    wanted = ["none", "ntk", BY_FIT]
    file = tmp_path / "run.yaml"
    file.write_text(f"evaluation:\n  extend: [none, ntk, {BY_FIT}]\n")
    config = load_config(["--config", str(file)])
    assert config.evaluation.extend == wanted
    assert load_config(["--evaluation.extend", f"none,ntk,{BY_FIT}"]).evaluation.extend == wanted
    assert load_study(["--config", str(file)]).evaluation.extend == wanted
    file.write_text(to_yaml(config))
    assert load_config(["--config", str(file)]) == config


class Pictures:
    """Pictures that have the size they are asked for, so that nothing resizes them."""

    classes = ("a", "b", "c")

    def __init__(self) -> None:
        self.images = torch.randint(0, 256, (6, 3, 48, 64), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], index % 3


def create(position: str = "rope-vit-axial", **options: Any) -> Any:
    shape: dict[str, Any] = {
        "img_size": 16,
        "patch_size": 8,
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 2,
        "num_classes": 3,
    }
    model: Any = vr.create_model("vit_tiny_patch16_224", position, **shape, **options)
    for name, parameter in model.named_parameters():
        if "position" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def sweep_rows(model: Any, data: Pictures, methods: list[str]) -> dict[str, dict[str, Any]]:
    rows = sweep(
        model,
        data,
        sizes=[(48, 64)],
        methods=methods,
        train_size=(16, 16),
        patch_size=(8, 8),
        device=torch.device("cpu"),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        num_workers=0,
        progress=False,
    )
    return {row["method"]: row for row in rows}


def test_a_sweep_follows_the_options_and_shows_the_text() -> None:
    """Against the same model, extended and judged by hand."""
    model, data = create(), Pictures()
    rows = sweep_rows(model, data, ["yarn", BY_FIT, "base:base=50"])
    assert list(rows) == ["none", "yarn", BY_FIT, "base:base=50"]
    assert model.extension is None
    knobs = {"beta_fast": 16, "beta_slow": 2, "temperature": 0}
    losses = []
    for text, method, options in (("yarn", "yarn", {}), (BY_FIT, "yarn", knobs)):
        vr.set_extension(model, method, train_size=(2, 2), **options)
        with torch.no_grad():
            loss = F.cross_entropy(model(data.images / 127.5 - 1), torch.arange(6) % 3)
        assert_close(rows[text]["nll"], loss.item(), rtol=1e-4, atol=1e-5)
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) > 1e-3
    # Another embedding may take it, this one's own base is 100.
    assert "base is 50 and the embedding's own base 100" in rows["base:base=50"]["reason"]
    assert rows["base:base=50"]["nll"] is None


def test_a_temperature_switched_off_suits_linear_attention() -> None:
    rows = sweep_rows(create(attention="linear"), Pictures(), ["yarn", BY_FIT])
    assert "give temperature=0" in rows["yarn"]["reason"]
    assert rows[BY_FIT]["reason"] is None
    assert rows[BY_FIT]["nll"] is not None


def test_a_study_says_a_reason_once_for_all_options() -> None:
    rows = [
        {"row": row, "seed": 0, "size": "64", "method": method, "reason": row_reason}
        for row in ("a", "b")
        for method in ("ntk", BY_FIT)
        if (row_reason := f"{method.partition(':')[0]} means nothing for {row}: it has no ladder")
    ]
    assert _reasons(rows) == [f"- a, b: no figures for ntk, {BY_FIT}: it has no ladder."]


def test_a_probe_takes_options(tmp_path: Path) -> None:
    from vision_rope.probe import probe

    with pytest.raises(ValueError, match="is not a run folder"):
        probe(tmp_path, extend=BY_FIT)
    (tmp_path / "config.yaml").write_text(to_yaml(load_config([])))
    with pytest.raises(ValueError, match=r"no option 'beta_fats'"):
        probe(tmp_path, extend="yarn:beta_fats=2")


def test_a_probe_extends_its_backbone_with_options() -> None:
    from vision_rope.config import VideoConfig
    from vision_rope.probe import _fit_to_size

    model = create()
    _fit_to_size(model, (48, 64), (16, 16), BY_FIT, VideoConfig())
    assert model.extension == ("yarn", (2, 2), {"beta_fast": 16, "beta_slow": 2, "temperature": 0})
