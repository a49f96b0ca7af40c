"""The command `vision-rope`: train, study, evaluate, track, probe, inspect, benchmark, presets."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vision_rope.cli_parser import Parser
from vision_rope.cli_track import add_track

# The rooms behind the commands load torch and timm, which takes seconds; they are imported where they are used, so
# that --help and mistyped flags answer at once.

EXAMPLES = """examples:
  vision-rope train --config configs/default.yaml
  vision-rope evaluate runs/default --sizes 64,96,128,192x256 --extend none,interpolate,ntk,yarn
  vision-rope evaluate vit_small_patch16_rope_224 --pretrained --data folder:imagenet --sizes 224,288,384
  vision-rope evaluate runs/clips --frames 8,16,32 --fps 2,4 --sizes 96,128
  vision-rope evaluate sam2.1_hiera_tiny.pt --data davis:DAVIS --sizes 512,1024
  vision-rope study --config configs/study.yaml
  vision-rope track dog.mp4 --weights sam2.1_hiera_tiny.pt --point 640,360
  vision-rope probe runs/default --weights best,untrained
  vision-rope inspect vit_small_patch16_rope_224 --size 448,448
  vision-rope benchmark rotate --shapes S1 --sections forward,overwrite
  vision-rope presets
"""

# Names of vision_rope.extension.EXTENSIONS, which --help may not import; a test compares them.
METHODS = "none, interpolate, ntk, dynamic-ntk, ntk-by-parts, yarn, llama3, base, pitch"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 2 for what the user can mend, 130 after Ctrl-C.

    Mistakes are one sentence on stderr; --debug shows where they come from.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        if words[:1] == ["train"]:
            return _train(words[1:])
        if words[:1] == ["study"]:
            return _study(words[1:])
        parsed = _build_parser().parse_args(words or ["--help"])
        parsed.words = words
        with _notes_on_stderr():
            status = int(parsed.run(parsed))
        # Here, where a closed pipe is answered, and not at Python's end.
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader, such as head, has seen enough; what Python would flush at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if debug:
            raise
        print(f"vision-rope: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("vision-rope: interrupted", file=sys.stderr)
        return 130


@contextmanager
def _notes_on_stderr() -> Iterator[None]:
    """Show the warnings of this package as a line each, without the place in its code."""
    show = warnings.showwarning

    def note(message: Warning | str, category: type[Warning], filename: str, *place: Any, **more: Any) -> None:
        if not Path(filename).is_relative_to(Path(__file__).parent):
            show(message, category, filename, *place, **more)
            return
        from tqdm import tqdm

        # Beside a progress bar, which a plain line would cut.
        tqdm.write(f"note: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = note
        yield


def _build_parser() -> Parser:
    parser = Parser(
        prog="vision-rope",
        description="Rotary position embedding for vision transformers: train, and evaluate at sizes never trained at.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    commands.add_parser("train", help="train a model from a YAML file and flags, then evaluate it", add_help=False)
    commands.add_parser("study", help="train position encodings side by side and compare them", add_help=False)
    _add_evaluate(commands)
    add_track(commands)
    _add_probe(commands)
    _add_inspect(commands)
    _add_benchmark(commands)
    presets = commands.add_parser(
        "presets",
        help="list the presets of rotary position embedding, or which can be extended how",
        description="List the presets, a line each; or the table of presets and methods of context extension.",
    )
    presets.add_argument(
        "--extend", action="store_true", help="print which method of context extension is defined for which preset"
    )
    presets.set_defaults(run=_list_presets, parser=presets)
    return parser


def _add_evaluate(commands: Any) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="evaluate a run folder or a timm model at several sizes, with context extension",
        description="Evaluate a run folder or a timm model at several sizes, a run on clips with several numbers of "
        "frames and rates too, with and without context extension; print a table and write evaluation.csv, "
        "evaluation.json, per_class.csv and evaluation.png.",
    )
    add = parser.add_argument
    add(
        "target",
        metavar="RUN_OR_MODEL",
        help="folder of a run, a name such as vit_small_patch16_rope_224, a checkpoint of SAM 2, or what follows "
        "objects without training: copy (their first masks) or patches",
    )
    add(
        "--data",
        help="elpv, folder:PATH, images:PATH (masked runs), timm's names; of runs on clips videos:PATH, frames:PATH, "
        "motion:SOURCE; for what follows objects davis:PATH [the run's own]",
    )
    add("--root", help="folder that timm dataset names are looked up in")
    add("--split", help="name of the split [the validation split]")
    add(
        "--sizes",
        help="sizes in pixels: 64,96,192x256 (rows x columns); of what follows objects a single number is "
        "the long side [the run's own, else the training size]",
    )
    add("--frames", help="of clips: numbers of frames, 8,16,32 [the run's own]")
    add("--fps", help="of clips: frames a second that they are sampled at, 2,4 [the run's own]")
    add(
        "--skip-broken",
        action="store_true",
        help="of clips: leave out those that cannot be read or have too few frames [what the run does]",
    )
    add(
        "--extend",
        help=f"methods of context extension, of {METHODS}, with options as in yarn:beta_fast=16:beta_slow=2 "
        "[the run's own, else none]; none is always shown",
    )
    add("--out", help="folder for the results [RUN/evaluation or evaluation-NAME]")
    add("--crop-pct", type=float, help="resize the short side to size / this, then crop the centre [the run's, else 1]")
    add("--batch-size", type=int, help="images a forward pass [the run's own, else 64]")
    add("--max-images", type=int, help="judge by that many images, evenly spread [the run's own, else all]")
    add("--write-masks", action="store_true", help="of marked videos: write the predicted masks too, as palette PNGs")
    _add_computing(parser)
    run = parser.add_argument_group("run folders")
    run.add_argument(
        "--weights", default="best", choices=["best", "last", "ema"], help="which weights of the run [best]"
    )
    timm = parser.add_argument_group("timm models")
    timm.add_argument("--pretrained", action="store_true", help="timm's own weights (downloaded on first use)")
    timm.add_argument("--checkpoint", metavar="FILE", help="weights in a .safetensors file")
    timm.add_argument(
        "--position", help="convert the model to this position encoding (vision-rope presets, learned, ...)"
    )
    timm.add_argument(
        "--option",
        metavar="NAME=VALUE",
        action="append",
        help="option of timm.create_model; may be given several times",
    )
    timm.add_argument("--seed", type=int, help="seed of random weights, where no others are given [0]")
    parser.set_defaults(run=_evaluate, parser=parser)


def _add_probe(commands: Any) -> None:
    parser = commands.add_parser(
        "probe",
        help="classify by the frozen features of a run: nearest neighbours and a linear probe",
        description="Classify labelled images by the frozen features of a run, with the nearest neighbours and with a "
        "linear probe; print a table and write probe.csv and probe.json.",
    )
    add = parser.add_argument
    add("folder", metavar="RUN", help="folder of a run, of any task")
    add("--data", help="elpv, folder:PATH or a timm dataset name [the run's own]")
    add("--root", help="folder that timm dataset names are looked up in")
    add("--size", help="size in pixels: 96 or 192x256 (rows x columns) [the training size]")
    add(
        "--extend",
        default="none",
        help=f"method of context extension for that size: {METHODS}; options as in yarn:beta_fast=16 [none]",
    )
    add("--weights", default="best", help="best, last, ema, untrained; several divided by commas are compared [best]")
    add("--k", type=int, default=20, help="number of neighbours [20]")
    add("--temperature", type=float, default=0.07, help="votes are exp(similarity / this) [0.07]")
    add("--out", help="folder for the results [RUN/probe]")
    add("--batch-size", type=int, help="images a forward pass [the run's own]")
    _add_computing(parser)
    parser.set_defaults(run=_probe, parser=parser)


def _add_inspect(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="show which pair turns how far across a grid, and which angles training never had",
        description="Show the wavelength of every pair, its turns across the training grid and a new one, which pairs "
        "meet unseen angles, the long-term decay bound and a suggested method of context extension; print a table and "
        "write inspect.json, inspect.csv and inspect.png. Weights are not downloaded.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="a run folder, a timm name, sam2_t, sam2.1_l, ... or their file")
    add("--size", help="new size in pixels, rows and columns: 448,448 or 224x448 [the training size]")
    add("--layer", type=int, help="show the pairs of one layer of learned frequencies [a line a layer]")
    add("--out", help="folder for the results [RUN/inspect or runs/inspect/NAME]")
    add("--families", action="store_true", help="list the timm families that positions can be added to, without MODEL")
    add("--weights", default="best", choices=["best", "last", "ema"], help="which weights of a run [best]")
    add("--position", help="of a timm model: the preset that it would be given [its own]")
    add("--option", metavar="NAME=VALUE", action="append", help="of timm.create_model; may be given several times")
    parser.set_defaults(run=_inspect, parser=parser)


def _add_benchmark(commands: Any) -> None:
    from vision_rope.benchmark import BENCHMARKS, run_benchmark

    parser = commands.add_parser(
        "benchmark",
        help="measure speed beside the installed libraries, as ratios",
        description="Measure this package and every installed library in one run, in shuffled rounds; print tables of "
        "ratios and write them as JSON, Markdown and a figure.",
    )
    parser.set_defaults(parser=parser)
    kinds = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True, parser_class=Parser)
    for name, row in BENCHMARKS.items():
        kind = kinds.add_parser(name, help=row.summary, description=f"Measure {row.summary}.")
        row.add_flags(kind)
        add = kind.add_argument
        add("--rounds", type=int, help="rounds of each comparison [15; of clips 3]")
        add("--threads", type=int, default=1, help="threads of torch on a CPU [1]")
        add("--seed", type=int, default=0, help="seed of the order within rounds [0]")
        add("--out", help="folder for the results [runs/benchmark]")
        _add_device(kind)
        kind.set_defaults(run=lambda parsed: run_benchmark(parsed, parsed.words), parser=kind)


def _add_computing(parser: Any) -> None:
    """Flags of commands that run a model: where and how it computes."""
    add = parser.add_argument
    add("--workers", type=int, default=2, help="loader processes [2]")
    add("--precision", default="auto", choices=["auto", "fp32", "bf16"], help="[auto: bf16 where it is fast]")
    _add_device(parser)


def _add_device(parser: Any) -> None:
    """Flags of commands that compute for a while."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps [auto]")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")


def _train(words: Sequence[str]) -> int:
    if "-h" in words or "--help" in words:
        from vision_rope.config import help_text

        print(help_text("vision-rope train"))
        return 0
    from vision_rope.trainer import main as train_main

    return train_main(words)


def _study(words: Sequence[str]) -> int:
    if "-h" in words or "--help" in words:
        from vision_rope.study_config import load_study

        load_study(["--help"])
    from vision_rope.study import main as study_main

    return study_main(words)


def _evaluate(parsed: Any) -> int:
    from vision_rope.evaluate_videos import follows_objects, run_evaluate

    if follows_objects(parsed.target, parsed.data):
        return run_evaluate(parsed)
    if parsed.write_masks:
        raise ValueError(f"--write-masks is for what follows objects, which {parsed.target} does not; leave it out")
    options = _read_options(parsed.option or [])
    from vision_rope.evaluate import evaluate, format_table

    rows, paths = evaluate(
        parsed.target,
        data=parsed.data,
        root=parsed.root,
        split=parsed.split,
        sizes=parsed.sizes,
        frames=parsed.frames,
        fps=parsed.fps,
        extend=parsed.extend,
        weights=parsed.weights,
        checkpoint=parsed.checkpoint,
        pretrained=parsed.pretrained,
        position=parsed.position,
        model_options=options,
        crop_pct=parsed.crop_pct,
        batch_size=parsed.batch_size,
        max_images=parsed.max_images,
        skip_broken=parsed.skip_broken,
        num_workers=parsed.workers,
        device=parsed.device,
        precision=parsed.precision,
        seed=parsed.seed,
        output=parsed.out,
        progress=not parsed.no_progress,
    )
    if paths:
        print(format_table(rows))
        print("\n" + "\n".join(f"wrote {path}" for path in paths))
    return 0


def _probe(parsed: Any) -> int:

    from vision_rope.probe import format_probe, probe, write_probe

    rows = probe(
        parsed.folder,
        data=parsed.data,
        root=parsed.root,
        size=parsed.size,
        extend=parsed.extend,
        weights=parsed.weights,
        k=parsed.k,
        temperature=parsed.temperature,
        batch_size=parsed.batch_size,
        num_workers=parsed.workers,
        device=parsed.device,
        precision=parsed.precision,
        progress=not parsed.no_progress,
    )
    print(format_probe(rows))
    paths = write_probe(rows, parsed.out or Path(parsed.folder, "probe"))
    print("\n" + "\n".join(f"wrote {path}" for path in paths))
    return 0


def _inspect(parsed: Any) -> int:
    options = _read_options(parsed.option or [])
    from vision_rope.inspection_report import run_inspect

    return run_inspect(parsed, options)


def _list_presets(parsed: Any) -> int:
    if parsed.extend:
        from vision_rope.extension_table import format_extension_table

        print(format_extension_table(), end="")
        return 0
    from vision_rope import presets

    table = presets()
    width = max(map(len, table))
    for name, summary in table.items():
        print(f"{name:<{width}}  {summary}")
    return 0


def _read_options(words: Sequence[str]) -> dict[str, Any]:
    """Read NAME=VALUE with values in YAML, so that 64, true and [1, 2] are what they look like."""
    import yaml

    options = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--option {word} must be NAME=VALUE, for instance img_size=128")
        try:
            options[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"--option {word}: the value is not valid YAML") from None
    return options


if __name__ == "__main__":
    sys.exit(main())
