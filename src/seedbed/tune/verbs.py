"""The instruments as verbs: each opens a recipe, measures, prints or gives JSON, and returns an exit code."""

from __future__ import annotations

import sys
from json import dumps
from pathlib import Path
from typing import Any

from seedbed import config as configs
from seedbed.recipes import find
from seedbed.track.run import Run, full_name
from seedbed.tune import batch, lr, lr_plot, scale, scale_show, show
from seedbed.tune import plan as planning
from seedbed.tune import profile as profiling
from seedbed.tune.bench import Bench, output_folder, save_result

EXIT_OK, EXIT_FAILED = 0, 1


def find_lr(
    name: str,
    assignments: list[str],
    *,
    root: Path,
    json: bool = False,
    steps: int | None = None,
    repeats: int = 3,
    low: float | None = None,
    high: float | None = None,
) -> int:
    """Which learning rate: ramps over it, three suggestions, a plot. The weights are as before."""
    bench = Bench.open(name, assignments)
    with show.progress("ramping the learning rate") as tick:
        finding = lr.find(bench, num_steps=steps, repeats=repeats, low=low, high=high, tick=tick)
    folder = output_folder(root, "find-lr", bench.name)
    picture = folder / "find-lr.png"
    lr_plot.draw(finding, f"find-lr {bench.name}", picture)
    result = {"name": bench.name, **finding.to_json(), "plot": str(picture)}
    if not _finish(folder, result, json):
        show.find_lr(finding, bench.name, str(picture))
    return EXIT_OK


def find_batch(
    name: str, assignments: list[str], *, root: Path, json: bool = False, limit: float | None = None, most: int | None = None
) -> int:
    """Which batch: the largest that fits, what each gives per second, and how to split the configured one."""
    bench = Bench.open(name, assignments)
    try:
        with show.telling("trying batches") as tell:
            finding = batch.find(bench, limit=limit, most=batch.MOST if most is None else most, say=tell)
    except batch.Crashed as crash:
        if crash.trials and not json:
            show.batch_table(show.console(), crash.trials)
        print(f"seedbed: {crash}", file=sys.stderr)
        return EXIT_FAILED
    folder = output_folder(root, "find-batch", bench.name)
    if not _finish(folder, {"name": bench.name, **finding.to_json()}, json):
        show.find_batch(finding, bench.name)
    return EXIT_OK if finding.largest else EXIT_FAILED


def profile(name: str, assignments: list[str], *, root: Path, json: bool = False, steps: int = 20) -> int:
    """Where a step's time goes, in phases, operations and words; the trace is a file."""
    bench = Bench.open(name, assignments)
    folder = output_folder(root, "profile", bench.name)
    with show.telling("profiling") as tell:
        found = profiling.run(bench, folder, num_steps=steps, tick=tell)
    if not _finish(folder, {"name": bench.name, **found.to_json()}, json):
        show.profile(found, bench.name)
    return EXIT_OK


def plan(
    name: str,
    assignments: list[str],
    *,
    root: Path,
    json: bool = False,
    run: str | None = None,
    prices: Path | None = None,
    world: int | None = None,
) -> int:
    """What a run needs, and what that means in hours and money on a table of GPUs; nothing is trained."""
    known = planning.read_prices(Path(prices)) if prices else None
    rate = planning.measured_rate(Run.open(root, run)) if run else None
    recipe, preset = find(name)
    config = configs.override(recipe.preset(preset), assignments)
    assert preset is not None
    with show.telling("planning") as tell:
        tell("opening the data")
        data = recipe.open_data(config)
        tell("counting on paper")
        alone = configs.override(config, configs.ALONE)
        found = planning.make(recipe, alone, data, rate=rate, prices=known)
        many = world or config.dist.world
        tell(f"dividing among {many} ranks")
        spread = scale.look(recipe, config, data, found.counted, found.rate.mfu, many) if many > 1 else None
    shown = full_name(recipe.name, preset)
    folder = output_folder(root, "plan", shown)
    more = {"scale": spread.to_json()} if spread else {}
    if not _finish(folder, {"name": shown, **found.to_json(), **more}, json):
        show.plan(found, shown)
        if spread:
            scale_show.show(spread, show.console())
    return EXIT_OK


def _finish(folder: Path, result: dict[str, Any], as_json: bool) -> bool:
    """Keep the numbers; True when JSON was asked for, which is then all that is printed."""
    save_result(folder, result)
    if as_json:
        print(dumps(result))
    return as_json
