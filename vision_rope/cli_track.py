"""The flags of `vision-rope track`."""

from __future__ import annotations

import argparse
from typing import Any

EXAMPLES = """prompts:
  --point, --box and --mask begin an object each; a mask file may hold several. --not-point belongs to the object before
  it. After --object N everything is of object N, up to the next --object: several prompts for one, or corrections.
  --at FRAME is the frame of the prompts that follow it; frames count from 0, which it is before any --at. Points are
  X,Y in pixels: the column, then the row.

examples:
  vision-rope track dog.mp4 --weights sam2.1_hiera_tiny.pt --point 640,360
  vision-rope track dog.mp4 --weights runs/segmenter --mask first.png
  vision-rope track dog.mp4 --weights patches --mask first.png
  vision-rope track street.mp4 --weights W --box 10,20,90,140 --box 200,30,260,150 --at 48 --point 300,80
  vision-rope track dog.mp4 --weights W --point 640,360,700,380 --not-point 20,20 --at 90 --object 1 --point 610,350
  vision-rope track 0 --weights W --point 320,240 --max-frames 300
"""


class _InOrder(argparse.Action):
    """Keeps what was said in the order it was said in, across flags."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        said = getattr(namespace, self.dest) or []
        setattr(namespace, self.dest, [*said, (str(option_string).removeprefix("--"), values)])


def add_track(commands: Any) -> None:
    """Add the command to those of the parser."""
    parser = commands.add_parser(
        "track",
        help="follow objects through a video from a point, a box or a mask",
        description="Follow objects through a video, of any length, from points, boxes or masks; write a video with "
        "the objects in colour, their masks as PNGs in the DAVIS layout and objects.csv (frame, object, area, box, "
        "score: the probability that the object is there, quality: the predicted IoU).",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("video", metavar="VIDEO", help="a video file, a folder of pictures, the number of a camera, or an address")
    add(
        "--weights",
        required=True,
        help="a SAM 2 checkpoint, a run folder or its best.safetensors; patches: follow colours, without weights",
    )
    prompts = parser.add_argument_group("prompts, in their order")
    for flag, form, help in (
        ("--point", "X,Y[,X,Y...]", "points inside a new object"),
        ("--not-point", "X,Y[,X,Y...]", "points outside the object before it"),
        ("--box", "X0,Y0,X1,Y1", "a box around a new object: left, upper, right and lower edge"),
        ("--mask", "FILE", "a picture whose values are object ids, or 0 and 255"),
        ("--at", "FRAME", "the frame of the prompts that follow [0]"),
        ("--object", "ID", "the object of the prompts that follow"),
    ):
        prompts.add_argument(flag, action=_InOrder, dest="prompts", metavar=form, help=help)
    output = parser.add_argument_group("output; none leaves one out")
    output.add_argument(
        "--out", metavar="FILE", help="the video: .mp4, .mov, .mkv, .webm [runs/track/NAME/overlay.mp4]"
    )
    output.add_argument("--masks", metavar="FOLDER", help="a new folder for the masks [runs/track/NAME/masks]")
    output.add_argument("--csv", metavar="FILE", help="the table [runs/track/NAME/objects.csv]")
    reading = parser.add_argument_group("reading")
    reading.add_argument("--max-frames", type=int, help="end after that many frames")
    reading.add_argument("--size", type=int, help="long side in pixels that the segmenter looks at [its own]")
    reading.add_argument("--fps", type=float, help="frames a second, instead of the times that the video has")
    reading.add_argument("--resize", action="store_true", help="bring frames that change size to that of the first")
    reading.add_argument(
        "--decoder", default="pyav", choices=["pyav", "torchcodec", "nvdec"], help="of video files [pyav]"
    )
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps [auto]")
    add("--no-progress", action="store_true", help="no progress bar")
    parser.set_defaults(run=_track, parser=parser)


def _track(parsed: Any) -> int:
    from vision_rope.track import run_track

    return run_track(parsed)
