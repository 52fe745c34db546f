"""The instruments as commands: each opens a recipe, measures, prints text or JSON, and returns an exit code."""

import sys
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Any

from rich.markup import escape

from seedbed import config as configs
from seedbed.errors import EXIT_FAILED, EXIT_OK
from seedbed.recipes import find
from seedbed.track.files import write_atomic
from seedbed.track.run import Run, full_name
from seedbed.tune import batch, goodput, lr, scale, show
from seedbed.tune import plan as planning
from seedbed.tune import profile as profiling
from seedbed.tune.workload import Workload, output_folder, writing


def find_lr(name: str, assignments: list[str], *, root: Path, json: bool = False, steps: int | None = None, **more: Any) -> int:
    """Suggests a learning rate from short trials, with a figure; `more` is of `lr.find`. All state is restored."""
    workload = Workload.open(name, assignments)
    with show.progress("short trainings at several rates") as tick:
        finding = lr.find(workload, num_steps=steps, tick=tick, **more)
    folder = output_folder(root, "find-lr", workload.name)
    picture = folder / "find-lr.png"
    lr.draw(finding, f"find-lr {workload.name}", picture)
    if not _finish(folder, {"name": workload.name, **finding.to_json(), "plot": str(picture)}, json):
        show.find_lr(finding, workload.name, str(picture))
    return EXIT_OK


def find_batch(name: str, assignments: list[str], *, root: Path, json: bool = False, **options: Any) -> int:
    """Finds the largest batch that fits, its throughput, and a split of the configured one; `options` of `batch.find`."""
    workload, out = Workload.open(name, assignments), show.console()
    if not json:
        out.print(f"[bold]find-batch {escape(workload.name)}[/]  on {workload.device}")
        out.print(show.TRIAL_COLUMNS.format("batch", "", "peak memory", "ms/step", "items/s"), style="bold", markup=False)

    def say(trial: batch.Trial) -> None:
        if not json:
            show.batch_trial(out, trial)

    try:
        finding = batch.find(workload, say=say, **options)
    except batch.Crashed as crash:
        print(f"seedbed: {crash}", file=sys.stderr)
        return EXIT_FAILED
    folder = output_folder(root, "find-batch", workload.name)
    if not _finish(folder, {"name": workload.name, **finding.to_json()}, json):
        show.find_batch(out, finding)
    return EXIT_OK if finding.largest else EXIT_FAILED


def profile(name: str, assignments: list[str], *, root: Path, json: bool = False, steps: int = 20) -> int:
    """Shows the time of a step by phase and operation; writes a trace."""
    workload = Workload.open(name, assignments)
    folder = output_folder(root, "profile", workload.name)
    with show.status_line("profiling") as set_status:
        found = profiling.run(workload, folder, num_steps=steps, tick=set_status)
    if not _finish(folder, {"name": workload.name, **found.to_json()}, json):
        show.profile(found, workload.name)
    return EXIT_OK


def plan(
    name: str,
    assignments: list[str],
    *,
    root: Path,
    json: bool = False,
    run: str | None = None,
    prices: Path | None = None,
    world: list[int] | None = None,
) -> int:
    """Estimates the needs of a run and its hours and cost on a table of GPUs; trains nothing."""
    known = planning.read_prices(Path(prices)) if prices else None
    rate = planning.measured_rate(Run.open(root, run)) if run else None
    recipe, preset = find(name)
    config = configs.override(recipe.preset(preset), assignments)
    assert preset is not None
    with show.status_line("planning") as set_status:
        set_status("opening the data")
        data = recipe.open_data(config)
        set_status("estimating costs")
        alone = configs.override(config, configs.SINGLE_PROCESS)
        found = planning.make(recipe, alone, data, rate=rate, prices=known)
        set_status("dividing among ranks")
        about = (recipe, config, data, found.estimate, found.rate.mfu)
        spread = [scale.estimate_scale(*about, many) for many in world or [config.dist.world] if many > 1]
    shown = full_name(recipe.name, preset)
    folder = output_folder(root, "plan", shown)
    lines = [line for one in spread for line in goodput.simulate(one)] if len(spread) > 1 else []
    more: dict[str, Any] = {"goodput": [asdict(line) for line in lines]} if lines else {}
    more |= {"scale": asdict(spread[0])} if len(spread) == 1 else {}
    if not _finish(folder, {"name": shown, **found.to_json(), **more}, json):
        show.plan(found, shown)
        if lines:
            goodput.show(lines, show.console())
        elif spread:
            scale.show(spread[0], show.console())
    return EXIT_OK


def _finish(folder: Path, result: dict[str, Any], as_json: bool) -> bool:
    """Writes the result; True when JSON was requested and printed."""
    with writing(folder):
        write_atomic(folder / "result.json", dumps(result, indent=1) + "\n")
    if as_json:
        print(dumps(result))
    return as_json
