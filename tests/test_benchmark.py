"""The benchmark: every library does the same work, ratios follow from the times, files say what was measured.

No test here looks at how long anything takes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from vision_rope.benchmark import choose, memory, peers, rotate, timing, video, vit
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
    (build,) = rotate.rotate_cases(["overwrite"], ["S1"], ["fp32"], CPU)
    assert timing.peak_bytes(build().runs["vision_rope"], CPU) == 0
    (build,) = rotate.rotate_cases(["forward"], ["S1"], ["fp32"], CPU)
    case = build()
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
        (build,) = rotate.rotate_cases([section], [], [], CPU)
        case = build()
        ours, timm = case.runs["vision_rope"](), case.runs["timm"]()
        if section == "qkv":
            torch.testing.assert_close(ours[0], timm[0], atol=1e-4, rtol=1e-4)
        else:  # with frequencies drawn for each: their gradients exist
            assert ours[1].abs().sum() > 0
            assert timm[2].abs().sum() > 0


@pytest.mark.parametrize("section", vit.SECTIONS)
def test_vit_cases_run(section):
    for build in vit.vit_cases([section], [32], 1, CPU):
        case = build()
        if section.startswith("block"):
            outputs = {name.removeprefix(f"{case.label.split(',')[0]} "): run() for name, run in case.runs.items()}
            assert case.ours is None, "timm's block is not ours"
            if "bare product" in outputs:
                torch.testing.assert_close(outputs["bare product"], outputs["with RoPE"], atol=1e-5, rtol=1e-5)
                assert not torch.allclose(outputs["without"], outputs["with RoPE"], atol=1e-3)
        else:
            assert case.ours in case.runs
        assert case.floor in case.runs


@pytest.mark.parametrize("section", video.SECTIONS)
def test_video_cases_run(monkeypatch, section):
    monkeypatch.setattr(video, "NAME", "vit_tiny_patch16_224")
    (build,) = video.video_cases([section], [32], [4], 2, CPU)
    case = build()
    assert case.ours in case.runs
    outputs = {name: run() for name, run in case.runs.items()}
    if section == "clip":
        assert {name: out.shape for name, out in outputs.items()} == {
            "vision_rope joint": (2, 1000),
            "vision_rope factorised": (2, 1000),
            "vision_rope causal": (2, 1000),
            "timm plain, a frame a step": (4, 1000),
            "vision_rope streaming": (2, 4, 192),
        }
    elif section == "step":
        for attention in ("joint", "factorised"):
            _, cached = outputs[f"vision_rope {attention}, cached"]
            whole = outputs[f"vision_rope {attention}, whole clip"]
            torch.testing.assert_close(cached, whole[:, -4:], atol=1e-5, rtol=1e-5)
    else:
        assert all(gradient is not None for gradient in outputs["vision_rope joint"])


@pytest.mark.parametrize("section", memory.SECTIONS)
def test_memory_cases_run(section):
    (build,) = memory.memory_cases([section], [2], [2], [2], CPU)
    case = build()
    outputs = {name: run() for name, run in case.runs.items()}
    assert case.ours in outputs
    if section == "frame":
        assert len(outputs) > 1
        assert all(error < 1e-4 for error in case.errors.values())
        for output in outputs.values():
            torch.testing.assert_close(output, outputs[case.ours], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["memory", "--grids", "0"], "grids has '0'; give positive whole numbers"),
        (["rotate", "--shapes", "S9"], "shapes has 'S9'; choose from S1, S2, S3, S4"),
        (["rotate", "--sections", "foward"], "did you mean 'forward'"),
        (["rotate", "--dtypes", "fp16"], "dtypes has 'fp16'"),
        (["rotate", "--rounds", "0"], "rounds is 0"),
        (["vit", "--sizes", "225"], "sizes has '225'; give multiples of 16"),
        (["vit", "--batch-size", "0"], "batch-size is 0"),
        (["vit", "--frames", "3"], "frames has 3; give multiples of 2"),
        (["vit", "--frames", "4", "--sections", "block"], "sections has 'block'; choose from clip"),
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
        "vision_rope bare product",
        "timm with RoPE",
        "timm without",
    }


def row_of(name, over_ours, over_floor):
    spreads = [
        None if value is None else {"median": value, "low": value, "high": value} for value in (over_ours, over_floor)
    ]
    return {
        "section": "s",
        "label": "l",
        "dtype": "fp32",
        "name": name,
        "milliseconds": {"median": 1.0},
        "over_ours": spreads[0],
        "over_floor": spreads[1],
        "error": None,
        "peak_memory": None,
    }


def test_a_case_without_ours_has_ratios_to_the_floor_only(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "_count_repeats", lambda run, device: 1)
    case = timing.Case("s", "l", "fp32", {"with": lambda: 0, "without": lambda: 0}, None, "without")
    rows = timing.measure_case(case, rounds=2, device=CPU)
    assert [row["over_ours"] for row in rows] == [None, None]
    assert rows[1]["over_floor"]["median"] == 1.0
    report = format_benchmark(rows, {}, {"s": "title"}, "command")
    assert "ours |" not in report
    assert "| over the floor |" in report
    assert "The floor is the least the work can cost" in report
    plot_benchmark(rows, {"s": "title"}, tmp_path / "plot.png")


@pytest.mark.parametrize(("over_ours", "label"), [(3.0, "time / ours"), (None, "time / without positions")])
def test_bars_are_the_ratio_that_the_axis_names(over_ours, label, monkeypatch, tmp_path):
    from matplotlib.axes import Axes

    seen = {}
    draw = Axes.bar
    monkeypatch.setattr(
        Axes, "bar", lambda self, x, height, *a, **k: seen.update(bars=height) or draw(self, x, height, *a, **k)
    )
    monkeypatch.setattr(Axes, "set_ylabel", lambda self, text: seen.update(label=text))
    plot_benchmark([row_of("timm", over_ours, 5.0)], {"s": "title"}, tmp_path / "plot.png")
    assert seen == {"bars": [3.0 if over_ours else 5.0], "label": label}


def test_names_are_taken_once():
    assert choose("shapes", "S3, S4,S3,S4", rotate.SHAPES) == ["S3", "S4"]


def vit_rows(sizes, folder):
    words = ["benchmark", "vit", "--sections", "block", "--rounds", "1", "--out", str(folder)]
    assert main([*words, "--sizes", sizes]) == 0
    return json.loads((folder / "vit.json").read_text())["rows"]


def test_sizes_are_taken_once_and_the_bar_knows_how_many_cases_come(tiny, tmp_path, capsys):
    assert len(vit_rows("32,32", tmp_path)) == 5
    assert "2/2" in capsys.readouterr().err


def test_nothing_to_measure_is_one_sentence(tiny, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(rotate, "SHAPES", {"S3": TINY})
    out = tmp_path / "out"
    assert main(["benchmark", "rotate", "--sections", "compiled", "--shapes", "S3", "--out", str(out)]) == 2
    assert "leave nothing to measure" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("broken", ["file", "below a file", "read-only", "a folder in a file's place"])
def test_what_cannot_be_written_is_said_before_anything_runs(broken, tiny, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "rotate.md").mkdir(parents=True)
    folder = {
        "file": tmp_path / "file",
        "below a file": tmp_path / "file" / "out",
        "read-only": Path("/proc"),
        "a folder in a file's place": tmp_path / "taken",
    }[broken]
    if broken == "read-only" and not folder.exists():
        pytest.skip("needs a folder in which even root cannot write")
    monkeypatch.setattr(timing, "measure_case", lambda *a, **k: pytest.fail("it measured"))
    assert main(["benchmark", "rotate", "--shapes", "S1", "--out", str(folder), "--no-progress"]) == 2
    error = capsys.readouterr().err
    assert str(folder) in error
    assert "give another folder" in error
    assert len(error.splitlines()) == 1


def test_a_kill_loses_no_case_that_was_measured(tiny, monkeypatch, tmp_path):
    measured, measure = [], timing.measure_case

    def kill_in_third(case, **options):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(case)
        return measure(case, **options)

    monkeypatch.setattr(timing, "measure_case", kill_in_third)
    words = [
        "benchmark",
        "rotate",
        "--sections",
        "qkv,learned,tables",
        "--shapes",
        "S1",
        "--rounds",
        "1",
        "--no-progress",
    ]
    assert main([*words, "--out", str(tmp_path)]) == 130
    content = json.loads((tmp_path / "rotate.json").read_text())
    assert {row["section"] for row in content["rows"]} == {"qkv", "learned"}
    report = format_benchmark(content["rows"], content["machine"], rotate.SECTIONS, content["command"])
    assert (tmp_path / "rotate.md").read_text() == report


def fails_to_import(problem, pairing):
    raise ImportError("cannot import name 'x'\nfrom 'y'")


def fails_in_bf16(problem, pairing):
    def turn(q, k):
        if q.dtype == torch.bfloat16:
            raise RuntimeError("no kernel")
        return peers.ours(problem, pairing)(q, k)

    return turn


def fails_backward(problem, pairing):
    def turn(q, k):
        return peers.ours(problem, pairing)(q.detach(), k.detach())

    return turn


def test_a_broken_library_is_left_out_with_one_line(tiny, monkeypatch, tmp_path, capsys):
    rows = {"first": fails_to_import, "second": fails_in_bf16, "third": fails_backward}
    monkeypatch.setattr(peers, "PEERS", {name: ("torch", "half", prepare) for name, prepare in rows.items()})
    words = ["benchmark", "rotate", "--sections", "forward,backward", "--shapes", "S1", "--rounds", "1"]
    assert main([*words, "--out", str(tmp_path), "--no-progress"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "first is left out where it fails: ImportError: cannot import name 'x' from 'y'",
        "second is left out where it fails: RuntimeError: no kernel",
    ]
    assert len(lines) == 3, "no line comes twice"
    assert lines[2].startswith("third is left out where it fails: RuntimeError: ")
    measured = json.loads((tmp_path / "rotate.json").read_text())["rows"]
    found = {(row["name"], row["section"], row["dtype"]) for row in measured if row["name"] in rows}
    assert found == {
        ("second", "forward", "fp32"),
        ("second", "backward", "fp32"),
        ("third", "forward", "fp32"),
        ("third", "forward", "bf16"),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc's allocator is told")
def test_the_restart_takes_this_process(monkeypatch):
    calls = []
    monkeypatch.setattr(os, "execve", lambda *arguments: calls.append(arguments))
    for name in timing.WARM_ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    words = ["benchmark", "vit"]
    monkeypatch.setattr(sys, "argv", ["notebook"])
    timing.restart_with_warm_allocator("vision_rope.cli", words)
    assert not calls, "whoever calls the command as a function keeps its process"
    monkeypatch.setattr(sys, "argv", ["vision-rope", "--debug", *words])
    timing.restart_with_warm_allocator("vision_rope.cli", words)
    ((program, arguments, environment),) = calls
    assert program == sys.executable
    assert arguments == [sys.executable, "-m", "vision_rope.cli", "--debug", *words]
    assert timing.WARM_ALLOCATOR.items() <= environment.items()
    for name, value in timing.WARM_ALLOCATOR.items():
        monkeypatch.setenv(name, value)
    timing.restart_with_warm_allocator("vision_rope.cli", words)
    assert len(calls) == 1


@pytest.mark.integration
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is restarted")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_what_measures(number, tmp_path):
    """The results stop growing: no child is left that goes on measuring."""
    environment = {key: value for key, value in os.environ.items() if key not in timing.WARM_ALLOCATOR}
    words = [
        "benchmark",
        "rotate",
        "--sections",
        "tables",
        "--rounds",
        "100000",
        "--out",
        str(tmp_path),
        "--no-progress",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "vision_rope.cli", *words],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # A shell that runs the tests in the background hands down an interrupt that is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        group, deadline = process.pid, time.monotonic() + 60
        try:
            warm = next(iter(timing.WARM_ALLOCATOR)).encode()
            while not any(warm in entry for entry in environments_of(group)):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            time.sleep(0.5)
            process.send_signal(number)
            process.wait(30)
            assert not environments_of(group), "nothing of it is left"
        finally:
            if environments_of(group):
                os.killpg(group, signal.SIGKILL)


def environments_of(group):
    """What the processes of a group were started with."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(folder.name)) == group:
                found.append((folder / "environ").read_bytes())
        except OSError:
            continue
    return [entry for entry in found if entry]


RESULTS = Path(__file__).parent.parent / "docs" / "results" / "benchmark"


@pytest.mark.parametrize("name", ["rotate", "vit", "memory", "models/vit"])
def test_reports_follow_from_their_json(name, tmp_path):
    content = json.loads((RESULTS / f"{name}.json").read_text())
    titles = {"rotate": rotate.SECTIONS, "vit": vit.SECTIONS, "memory": memory.SECTIONS}[Path(name).name]
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
    added = {
        (row["section"], row["label"]): row["over_floor"]["median"]
        for row in rows
        if "without" not in row["name"] and "bare" not in row["name"]
    }
    bare = {row["label"]: row["over_floor"]["median"] for row in rows if "bare product" in row["name"]}
    for size in (224, 448):
        assert f"{100 * (bare[f'vision_rope, {size} px'] - 1):.1f}" in readme
    for section in ("block", "block-training"):
        for name in ("vision_rope", "timm"):
            for size in (224, 448):
                assert f"{100 * (added[section, f'{name}, {size} px'] - 1):.1f}" in readme


def test_readme_shows_the_memory_and_whole_models():
    readme = (RESULTS.parent.parent.parent / "README.md").read_text()
    assert summarize(json.loads((RESULTS / "memory.json").read_text())["rows"], "frame") in readme
    rows = json.loads((RESULTS / "models" / "vit.json").read_text())["rows"]
    steps = {row["name"]: row["over_floor"]["median"] for row in rows if row["section"] == "training"}
    for name in ("vision_rope", "vision_rope mixed", "timm", "timm mixed"):
        assert f"{steps[name]:.2f}" in readme
