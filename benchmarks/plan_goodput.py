"""The table and the picture of simulated goodput in docs/scale.md: a 6.7 B Llama on 64, 256 and 1,024 ranks, on three networks.

Left: the share of time that failures leave, by the interval between checkpoints, with the best one. Right: goodput by network.
Nothing here is measured on such machines: it is the arithmetic of `seedbed plan --world 64,256,1024`.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from _report import ROOT, write_result

PRESET, WORLDS = "gpt/llama", (64, 256, 1024)
SIZE = ["model.depth=32", "model.width=4096", "model.heads=32", "batch=4096", "accum=256", "optim.kind=adamw", "dist.shard=8"]
PICTURE = ROOT / "docs" / "img" / "goodput.png"


def draw(scales: list[Any], lines: list[Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from seedbed.tune.goodput import INTERVALS, failures_of

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for found in scales:
        failures = failures_of(found)
        best = failures.best_interval()
        kept = [100 * failures.kept(float(interval)) for interval in INTERVALS]
        (curve,) = left.plot(INTERVALS / 60, kept, label=f"{found.degrees.world:,} ranks")
        left.plot(best / 60, 100 * failures.kept(best), "o", color=curve.get_color())
    left.set(xscale="log", xlabel="minutes between checkpoints", ylabel="time kept, %", ylim=(90, 100.2))
    left.legend(frameon=False)
    links = list(dict.fromkeys(line.link for line in lines))
    for number, link in enumerate(links):
        shares = [100 * line.efficiency * line.kept for line in lines if line.link == link]
        right.bar([place + 0.26 * (number - 1) for place in range(len(shares))], shares, 0.24, label=link)
    right.set(xticks=range(len(scales)), xticklabels=[f"{s.degrees.world:,} ranks" for s in scales], ylabel="goodput, %")
    right.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    from seedbed import config as configs
    from seedbed.recipes import find
    from seedbed.tune import goodput, scale
    from seedbed.tune.estimate import estimate_costs
    from seedbed.tune.plan import ASSUMED_MFU
    from seedbed.tune.show import console

    recipe, preset = find(PRESET)
    config = configs.override(recipe.preset(preset), SIZE)
    data = recipe.open_data(config)
    estimate = estimate_costs(recipe, configs.override(config, configs.SINGLE_PROCESS[1:]), data)
    scales = [scale.estimate_scale(recipe, config, data, estimate, ASSUMED_MFU, world) for world in WORLDS]
    lines = [line for found in scales for line in goodput.simulate(found)]
    goodput.show(lines, console())
    write_result("plan-goodput", {"settings": [PRESET, *SIZE], "lines": [asdict(line) for line in lines]})
    draw(scales, lines, PICTURE)


if __name__ == "__main__":
    main()
