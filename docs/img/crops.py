"""Cuts the README's small pictures from demo.png and from demo runs called flow, world, thinker and ebt: `... crops.py runs`."""

import sys
from pathlib import Path

from PIL import Image

HERE, runs = Path(__file__).parent, Path(sys.argv[1])
# Picture, and the part of it that is kept: left, top, right, bottom as shares of its size.
CROPS = {
    "gpt": (HERE / "demo.png", (0.49, 0.49, 0.94, 0.84)),
    "flow": (next(runs.glob("flow/samples/step-001100/grid.png")), (0.507, 0.35, 1.0, 0.835)),
    "world": (next(runs.glob("world/samples/*/rollouts.png")), (0.15, 0.0, 1.0, 0.34)),
    "thinker": (next(runs.glob("thinker/samples/step-001200/steps.png")), (0.0, 0.0, 1.0, 1.0)),
    "ebt": (next(runs.glob("ebt/samples/step-000500/thinking.png")), (0.0, 0.0, 0.505, 1.0)),
}
for name, (path, (left, top, right, bottom)) in CROPS.items():
    picture = Image.open(path).convert("RGB")
    width, height = picture.size
    cut = picture.crop((round(left * width), round(top * height), round(right * width), round(bottom * height)))
    cut.thumbnail((480, 480), Image.Resampling.LANCZOS)
    cut.quantize(128).save(HERE / f"train-{name}.png", optimize=True)
