"""Inference curves as a table, a picture and JSON."""

import json
from pathlib import Path
from typing import Any

PICTURE, NUMBERS = "thinking.png", "thinking.json"


def table(found: dict[str, Any]) -> str:
    """Nats per token after 1, 2, 3... steps, a line per text; then those of several samples at the trained number of steps."""
    sets = found["sets"]
    longest = max((len(name) for name in [*sets, "nats per token, steps:"]), default=0)
    steps = next(iter(sets.values()))["steps"]
    head = "".join(f"{str(k) + '*' * (k == found['trained_steps']):>8}" for k in steps)
    lines = [f"{'nats per token, steps:':<{longest}}{head}   energy gap   best of"]
    for name, curve in sets.items():
        numbers = "".join(f"{n:8.3f}" for n in curve["nats"])
        wide = curve["by_starts"]["lowest energy"]
        lines.append(f"{name:<{longest}}{numbers}{curve['gap']:13.3f}   {curve['starts'][-1]}: {wide[0]:.3f} -> {wide[-1]:.3f}")
    if "plain" in found:
        lines.append(f"{'plain transformer':<{longest}}{found['plain']['nats']:8.3f}   the same size, data and number of updates")
    lines += [f"{name}: not measured: {why}" for name, why in found["skipped"].items()]
    return "\n".join([*lines, "* as trained; only what falls beyond the trained number of steps is a gain by more steps"])


def write(found: dict[str, Any], folder: Path) -> tuple[Path, ...]:
    """The numbers and the picture; the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NUMBERS).write_text(json.dumps(found, indent=1) + "\n")
    _draw(found, folder / PICTURE)
    return folder / PICTURE, folder / NUMBERS


def _draw(found: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    longer, wider = figure.subplots(1, 2)
    for number, (name, curve) in enumerate(found["sets"].items()):
        colour = f"C{number}"
        longer.plot(curve["steps"], curve["perplexity"], marker="o", markersize=3, color=colour, label=name)
        for name, style in (("lowest energy", "-"), ("at random", ":"), ("average of all", "--")):
            label = name if not number else None
            wider.plot(curve["starts"], curve["by_starts"][name], linestyle=style, color=colour, label=label)
    longer.axvline(found["trained_steps"], color="tab:red", alpha=0.4, label="as trained")
    if "plain" in found:
        longer.axhline(found["plain"]["perplexity"], color="tab:gray", linestyle=":", label="plain transformer, held-out")
    for axis, title, label in ((longer, "more optimisation steps", "steps"), (wider, "best of several samples", "samples")):
        axis.set_xscale("log", base=2)
        axis.set_title(title)
        axis.set_xlabel(label)
        axis.legend(fontsize=7)
    longer.set_yscale("log")
    longer.set_ylabel("perplexity")
    wider.set_ylabel("nats per token")
    figure.savefig(path, dpi=110)
