"""Draws docs/img/demo.png from a run of gpt/demo: `python docs/img/draw.py runs/NAME`."""

import sys
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from seedbed.track.run import Run

run = Run(Path(sys.argv[1]))
rows, events = run.rows(), run.events()
evals = [(e["step"], e["loss"]) for e in events if e["kind"] == "eval"]
samples = [e for e in events if e["kind"] == "sample"]

figure, (curve, page) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(1, 1.15), layout="constrained")
curve.plot([r["step"] for r in rows], [r["loss"] for r in rows], color="tab:blue", alpha=0.6, label="training")
curve.plot(*zip(*evals, strict=True), color="tab:orange", marker="o", label="validation")
curve.set(xlabel="step", ylabel="nats per character", title="gpt/demo on two CPU cores")
curve.grid(alpha=0.25)
curve.legend(frameon=False)
page.axis("off")
for top, event in ((0.98, samples[0]), (0.46, samples[-1])):
    page.text(0.0, top, f"what it writes at step {event['step']}", va="top", weight="bold", transform=page.transAxes)
    shown = [part for line in event["text"].splitlines() for part in textwrap.wrap(line, 66, drop_whitespace=False) or [""]]
    page.text(0.0, top - 0.08, "\n".join(shown[:8]), va="top", family="monospace", size=9, transform=page.transAxes)
figure.savefig(Path(__file__).with_name("demo.png"), dpi=110)
