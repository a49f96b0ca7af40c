"""The benchmark: every library does the same work, ratios follow from the times, files say what was measured.

No test here looks at how long anything takes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vision_rope.benchmark import peers, rotate, timing, vit
from vision_rope.benchmark.report import format_benchmark, plot_benchmark, summarize
from vision_rope.cli import main

CPU = torch.device("cpu")
TINY = rotate.Shape(1, 2, (3, 4), 2, 8)
# Ultralytics takes seconds to import; the integration test has it.
FAST_PEERS = [name for name in peers.PEERS if name != "ultralytics"]


@pytest.fixture
def tiny(monkeypatch):
    """Sizes that take no time, one call a sample, and the allocator taken for warm."""
    monkeypatch.setattr(rotate, "SHAPES", {"S1": TINY})
    monkeypatch.setattr(rotate, "FRONT", rotate.Shape(1, 2, (2, 2), 1, 8))
    monkeypatch.setattr(rotate, "FRONT_GRIDS", (2,))
    monkeypatch.setattr(rotate, "TABLE_GRIDS", (2,))
    monkeypatch.setattr(rotate, "DEPTH", 2)
    monkeypatch.setattr(timing, "SHORTEST_SAMPLE", 0.0)
    monkeypatch.setattr(peers, "PEERS", {name: peers.PEERS[name] for name in FAST_PEERS})
    for name, value in timing.WARM_ALLOCATOR.items():
        monkeypatch.setenv(name, value)


def check_peer(name):
    library, pairing, prepare = peers.PEERS[name]
    if importlib.util.find_spec(library) is None:
        pytest.skip("needs the extras [peers] and [ultralytics]")
    problem = rotate.problem_of(TINY, CPU)
    turn = prepare(problem, pairing)
    assert rotate.error_of(turn, pairing, problem, TINY, torch.float32) < 5e-6
    other = "half" if pairing == "interleaved" else "interleaved"
    assert rotate.error_of(turn, other, problem, TINY, torch.float32) > 0.1, "another pairing would be seen"


@pytest.mark.parametrize("name", FAST_PEERS)
def test_every_library_turns_by_the_same_angles(name):
    check_peer(name)


@pytest.mark.integration
def test_ultralytics_turns_by_the_same_angles():
    before = dict(os.environ)
    check_peer("ultralytics")
    assert dict(os.environ) == before


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_ours_turns_by_the_same_angles(pairing, overwrite):
    problem = rotate.problem_of(TINY, CPU)
    turn = peers.ours(problem, pairing, overwrite=overwrite)
    assert rotate.error_of(turn, pairing, problem, TINY, torch.float32) < 5e-6
    assert not problem.angles[: TINY.prefix].any()
    assert problem.angles[TINY.prefix + 1 :].any(dim=-1).all()


def test_ratios_are_medians_of_rounds(monkeypatch):
    """Against numbers worked out by hand, from a clock that is told what to say."""
    clock = {"ours": [1.0, 2.0, 4.0], "peer": [2.0, 2.0, 16.0], "floor": [0.5, 0.5, 2.0]}
    said = dict.fromkeys(clock, 0)

    def fake(run, repeats, device):
        name = run()
        said[name] += 1
        return clock[name][said[name] - 1]

    monkeypatch.setattr(timing, "_time", fake)
    monkeypatch.setattr(timing, "_count_repeats", lambda run, device: 1)
    case = timing.Case(
        "s", "l", "fp32", {name: (lambda name=name: name) for name in clock}, "ours", "floor", {"peer": 0.5}
    )
    rows = {row["name"]: row for row in timing.measure_case(case, rounds=3, device=CPU)}
    assert rows["peer"]["over_ours"] == {"median": 2.0, "low": 1.5, "high": 3.0}
    assert rows["peer"]["over_floor"]["median"] == 4.0
    assert rows["ours"]["milliseconds"]["median"] == 2000.0
    assert rows["ours"]["over_ours"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert rows["peer"]["error"] == 0.5
    assert rows["ours"]["peak_memory"] is None


def test_every_candidate_runs_in_every_round_in_changing_order(monkeypatch):
    monkeypatch.setattr(timing, "_count_repeats", lambda run, device: 1)
    calls = []
    case = timing.Case("s", "l", "fp32", {name: (lambda name=name: calls.append(name)) for name in "abcd"}, "a")
    timing.measure_case(case, rounds=8, device=CPU)
    rounds = [calls[start : start + 4] for start in range(0, len(calls), 4)]
    assert len(rounds) == 8
    assert all(sorted(group) == list("abcd") for group in rounds)
    assert len({tuple(group) for group in rounds}) > 1


def test_peak_memory_counts_what_lives_at_once():
    x = torch.randn(1000)
    assert timing.peak_bytes(lambda: x.clone(), CPU) == 4000
    assert timing.peak_bytes(lambda: x.mul_(1.0), CPU) == 0
    assert timing.peak_bytes(lambda: (x + 1) + 1, CPU) == 8000

    def one_after_the_other():
        a = x + 1
        del a
        return x + 2

    assert timing.peak_bytes(one_after_the_other, CPU) == 4000
    assert timing.peak_bytes(lambda: x[:10], CPU) == 0, "a view is no memory"


def test_in_place_rotation_needs_no_memory(tiny):
    (case,) = rotate.rotate_cases(["overwrite"], ["S1"], ["fp32"], CPU)
    assert timing.peak_bytes(case.runs["vision_rope"], CPU) == 0
    (case,) = rotate.rotate_cases(["forward"], ["S1"], ["fp32"], CPU)
    assert timing.peak_bytes(case.runs["vision_rope"], CPU) == case.unit


def test_rotate_command_writes_what_it_prints(tiny, tmp_path, capsys):
    sections = "forward,overwrite,backward,qkv,learned,tables"
    words = ["benchmark", "rotate", "--sections", sections, "--rounds", "2", "--out", str(tmp_path), "--no-progress"]
    assert main([*words, "--shapes", "S1"]) == 0
    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "rotate.json").read_text())
    assert content["command"] == f"vision-rope {' '.join([*words, '--shapes', 'S1'])}"
    assert content["machine"]["threads"] == 1
    assert {row["section"] for row in content["rows"]} == set(sections.split(","))
    assert {row["dtype"] for row in content["rows"]} == {"fp32", "bf16"}
    names = {row["name"] for row in content["rows"] if row["section"] == "forward"}
    assert names == {"vision_rope", "vision_rope half", "clone", *peers.installed_peers()}
    assert all(row["error"] < 0.05 for row in content["rows"] if row["error"] is not None)
    report = (tmp_path / "rotate.md").read_text()
    assert report in printed
    assert report.count("## ") == len(sections.split(","))
    assert (tmp_path / "rotate.png").stat().st_size > 10_000


def test_gradients_of_the_packed_way_agree_with_timm(tiny):
    """The two candidates of `qkv` and `learned` do the same work: the same gradient for the same qkv."""
    for section in ("qkv", "learned"):
        (case,) = rotate.rotate_cases([section], [], [], CPU)
        ours, timm = case.runs["vision_rope"](), case.runs["timm"]()
        if section == "qkv":
            torch.testing.assert_close(ours[0], timm[0], atol=1e-4, rtol=1e-4)
        else:  # with frequencies drawn for each: their gradients exist
            assert ours[1].abs().sum() > 0
            assert timm[2].abs().sum() > 0


@pytest.mark.parametrize("section", vit.SECTIONS)
def test_vit_cases_run(section):
    for case in vit.vit_cases([section], [32], 1, CPU):
        if section.startswith("block"):
            for run in case.runs.values():
                run()
        assert case.ours in case.runs
        assert case.floor in case.runs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rotate", "--shapes", "S9"], "shapes has 'S9'; choose from S1, S2, S3, S4"),
        (["rotate", "--sections", "foward"], "did you mean 'forward'"),
        (["rotate", "--dtypes", "fp16"], "dtypes has 'fp16'"),
        (["rotate", "--rounds", "0"], "rounds is 0"),
        (["vit", "--sizes", "225"], "sizes has '225'; give multiples of 16"),
        (["vit", "--batch-size", "0"], "batch-size is 0"),
        (["rotate", "--treads", "2"], "did you mean --threads"),
        (["rotat"], "did you mean rotate"),
    ],
)
def test_a_mistake_is_one_sentence(words, message, capsys):
    assert main(["benchmark", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.integration
def test_the_command_restarts_itself_with_a_warm_allocator(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key not in timing.WARM_ALLOCATOR}
    words = ["benchmark", "vit", "--sections", "block", "--sizes", "32", "--rounds", "1", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "vision_rope.cli", *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "vit.json").read_text())
    assert content["machine"]["warm_allocator"] is (sys.platform == "linux")
    assert {row["name"] for row in content["rows"]} == {
        "vision_rope with RoPE",
        "vision_rope without",
        "timm with RoPE",
        "timm without",
    }


RESULTS = Path(__file__).parent.parent / "docs" / "results" / "benchmark"


@pytest.mark.parametrize("name", ["rotate", "vit"])
def test_reports_follow_from_their_json(name, tmp_path):
    content = json.loads((RESULTS / f"{name}.json").read_text())
    titles = {"rotate": rotate.SECTIONS, "vit": vit.SECTIONS}[name]
    report = format_benchmark(content["rows"], content["machine"], titles, content["command"])
    assert report == (RESULTS / f"{name}.md").read_text()
    plot_benchmark(content["rows"], titles, tmp_path / "plot.png")
    assert (RESULTS / f"{name}.png").exists()


@pytest.mark.parametrize("section", ["forward", "overwrite", "backward", "compiled", "qkv", "learned"])
def test_readme_shows_the_measured_ratios(section):
    content = json.loads((RESULTS / "rotate.json").read_text())
    readme = (RESULTS.parent.parent.parent / "README.md").read_text()
    assert summarize(content["rows"], section) in readme


def test_readme_shows_what_a_block_pays():
    rows = json.loads((RESULTS / "vit.json").read_text())["rows"]
    readme = (RESULTS.parent.parent.parent / "README.md").read_text()
    added = {(row["section"], row["label"]): row["over_floor"]["median"] for row in rows if "with RoPE" in row["name"]}
    for section in ("block", "block-training"):
        for name in ("vision_rope", "timm"):
            for size in (224, 448):
                assert f"{100 * (added[section, f'{name}, {size} px'] - 1):.1f}" in readme
