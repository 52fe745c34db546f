"""Runs and sweeps as Slurm jobs, by Slurm's own commands: made ready here, submitted, and resumed by themselves."""

import datetime
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seedbed import config as configs
from seedbed.config import Config
from seedbed.errors import UserError
from seedbed.launch import slurm_script
from seedbed.launch.slurm_script import Ask, Layout, Script
from seedbed.recipes import Recipe, find, find_saved
from seedbed.track import code, files, locks, names, queue
from seedbed.track.listing import print_json
from seedbed.track.run import Run, full_name
from seedbed.track.text import one_line
from seedbed.tune.sweep.folder import Sweep, folder_of

EXIT_OK = 0
# Workers of a sweep where no number was asked for, at most.
MAX_WORKERS = 8
_PATIENCE = 60.0
# What to do about the commonest refusals, by a word in Slurm's own message.
_HINTS = {
    "invalid partition": "sinfo lists those there are",
    "generic resource": "sinfo -o '%P %G' lists the GPUs there are, and slurm.gpus=0 asks for none",
    "account": "sacctmgr show associations user=$USER lists yours",
}
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class How:
    """What the command line says besides the settings."""

    root: Path
    dry: bool = False
    json: bool = False
    dirty: bool = False
    retry: bool = False  # of a sweep: let failed trials be tried again
    flags: tuple[str, ...] = ()  # handed on to the command inside the job


def train(
    name: str,
    assignments: list[str],
    how: How,
    *,
    run_name: str | None = None,
    why: str = "",
    parent: str | None = None,
) -> int:
    """Make a run ready and submit it; its first start in the queue begins it, every later one goes on with it."""
    ask, own = _of_a_run(assignments)
    recipe, preset = find(name)
    base = recipe.preset(preset)
    assert preset is not None
    config = configs.override(base, own)
    plan = slurm_script.layout(ask, config)
    state = code.state(Path.cwd(), how.root)
    code.require_clean(state, how.dirty)
    title = full_name(recipe.name, preset)
    if how.dry:
        taken = set(os.listdir(how.root)) if how.root.is_dir() else set()
        called = names.check_name(run_name) if run_name else names.new_name(recipe.name, datetime.datetime.now(), taken)
        return _show(_run_script(title, how.root / called, how, [], ask, plan))
    _require_sbatch()
    run = Run.create(how.root, recipe.name, preset, config, name=run_name, why=why, parent=parent, code=state, base=base)
    script = _run_script(title, run.path, how, [], ask, plan)
    try:
        run.set_status("queued")
        job = _submit(script, recipe, state)
    except BaseException:
        shutil.rmtree(run.path)  # nothing was trained: what Slurm refuses leaves no run behind
        raise
    return _tell(script, job, how)


def resume(run: Run, recipe: Recipe, config: Config, assignments: list[str], how: How) -> int:
    """Submit a job that goes on with a run, with the code as it is now; `config` is what the assignments make of it."""
    ask, own = _of_a_run(assignments)
    script = _run_script(run.title(), run.path, how, own, ask, slurm_script.layout(ask, config))
    if how.dry:
        return _show(script)
    _require_sbatch()
    if live := queue.in_queue(run.path):
        raise UserError(f"run {run.name} is in the queue already as job {live[-1]}; to take it back: seedbed cancel {run.name}")
    with run.lock():
        job = _submit(script, recipe, code.state(Path.cwd(), how.root))
    return _tell(script, job, how)


@dataclass(frozen=True)
class Crew:
    """What a job array needs to know of the sweep that its tasks will work on."""

    name: str
    num_trials: int
    recipe: Recipe
    config: Config


def sweep(crew: Crew, ask: Ask, how: How, make: Callable[[], Sweep]) -> int:
    """Submit a job array whose tasks are workers of a sweep; each takes what no other has claimed."""
    workers = ask.workers or min(crew.num_trials, MAX_WORKERS)
    root, flags = how.root.absolute(), how.flags
    if not {"--pack", "--no-pack"} & set(flags):
        # The first worker would otherwise take every trial that fits into its memory.
        flags = (*flags, "--pack", str(-(-crew.num_trials // workers)))
    script = Script(
        title=f"{workers} workers of sweep {crew.name}",
        name=crew.name,
        folder=folder_of(root) / crew.name,
        cwd=Path.cwd(),
        saved=root / crew.name,
        words=("sweep", "--join", crew.name, "--runs", str(root), "--dirty", *flags),
        ask=ask,
        layout=slurm_script.layout(ask, crew.config),
        workers=workers,
    )
    state = code.state(Path.cwd(), how.root)
    code.require_clean(state, how.dirty)
    if how.dry:
        return _show(script)
    _require_sbatch()
    found = make()
    if workers > 1:
        _require_locks(found.path)
    if how.retry:
        found.forget_failures()
    return _tell(script, _submit(script, crew.recipe, state), how)


def crew_of(found: Sweep, retry: bool) -> Crew:
    """Further workers for a sweep that is there: as many as have something to do."""
    recipe = find_saved(found.facts["recipe"], found.path.parent)
    ended = [found.result(trial) for trial in found.trials()]
    left = sum(result is None or (retry and result.state == "failed") for result in ended)
    if found.facts.get("sampler"):
        left += int(found.facts["suggest"]) - len(ended)
    if left <= 0:
        raise UserError(f"every trial of sweep {found.name} has ended; see: seedbed sweep --show {found.name}")
    return Crew(found.name, left, recipe, recipe.preset(found.facts["preset"]))


def _require_locks(folder: Path) -> None:
    """Workers on several machines tell each other by locks what is taken; some shared disks have none."""
    fd = locks.open_lock(folder / "lock")
    try:
        locks.try_lock(fd)
    except OSError as error:
        raise UserError(f"{folder} is on a disk without locks ({error.strerror}): take slurm.workers=1") from None
    finally:
        locks.release(fd)


def cancel(root: Path, name: str) -> int:
    """Take the jobs of a run or a sweep out of the queue; what trains is saved first and can go on later."""
    swept = folder_of(root) / Path(name).name
    is_sweep = (swept / "sweep.json").is_file() and not (root / name).is_dir()
    folder = swept if is_sweep else Run.open(root, name).path
    told = queue.ask(queue.jobs(folder))
    if told is None:
        raise UserError("squeue does not answer: cancel from a machine of the cluster")
    if not told:
        raise UserError(f"{folder.name} has no job in the queue; seedbed runs list tells where it stands")
    _call(["scancel", *told])
    again = f"seedbed sweep --join {folder.name}" if is_sweep else f"seedbed resume {folder.name}"
    print(f"cancelled job {', '.join(told)}; go on with: {again} --on slurm")
    return EXIT_OK


def _of_a_run(assignments: list[str]) -> tuple[Ask, list[str]]:
    ask, own = slurm_script.read(assignments)
    if ask.workers:
        raise UserError("slurm.workers is for seedbed sweep; a run spreads by dist.replicate and dist.shard")
    return ask, own


def _run_script(title: str, path: Path, how: How, own: list[str], ask: Ask, plan: Layout) -> Script:
    path = path.absolute()
    words = ("resume", path.name, *own, "--runs", str(path.parent), *how.flags)
    return Script(f"run {path.name} ({title})", path.name, path, Path.cwd(), path, words, ask, plan)


def _show(script: Script) -> int:
    """A dry run: everything that would be submitted, and nothing is."""
    command = shlex.join(["sbatch", str(script.folder / slurm_script.NAME)])
    print(f"{script.text()}\n# dry run: nothing was written or submitted; the command would be\n# {command}")
    return EXIT_OK


def _require_sbatch() -> None:
    if not shutil.which("sbatch"):
        raise UserError(
            "there is no sbatch on PATH: --on slurm works on a machine of the cluster; --dry prints the script anywhere"
        )


def _submit(script: Script, recipe: Recipe, state: dict[str, Any]) -> str:
    """Write what the job needs, hand it in, and remember its number."""
    path = script.folder / slurm_script.NAME
    _keep_code(script.folder, recipe, state)
    files.write_atomic(path, script.text())
    job = _call(["sbatch", "--parsable", str(path)]).partition(";")[0]
    if not job.isdigit():
        raise UserError(f"sbatch gave no job number but: {one_line(job) or 'nothing'}")
    queue.record(script.folder, job)
    return job


def _tell(script: Script, job: str, how: How) -> int:
    path = script.folder / slurm_script.NAME
    if how.json:
        return print_json({"name": script.name, "job": job, "script": str(path), "path": str(script.folder)})
    output = script.folder / f"slurm-{job}{'_*' if script.workers else ''}.out"
    look = f"seedbed sweep --show {script.name}" if script.workers else "seedbed runs list"
    print(f"submitted job {job}: {script.title}\nscript  {path}\noutput  {output}")
    print(f"look: {look} · stop: seedbed cancel {script.name}")
    return EXIT_OK


def _call(words: list[str]) -> str:
    """What a command of Slurm's prints; its own message in one line when it refuses."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except OSError as error:
        raise UserError(f"{words[0]} cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{words[0]} has not answered for {_PATIENCE:g} s; is the cluster's controller up? see: sinfo") from None
    if done.returncode:
        told = [line.removeprefix(f"{words[0]}: ").removeprefix("error: ") for line in done.stderr.splitlines() if line.strip()]
        text = one_line("; ".join(told)) or f"exit status {done.returncode}"
        raise UserError("; ".join([f"{words[0]} refused: {text}", *(hint for word, hint in _HINTS.items() if word in text)]))
    return done.stdout.strip()


def _keep_code(folder: Path, recipe: Recipe, state: dict[str, Any]) -> None:
    """A copy of this package, of a recipe of the user's own, and the state of the code, for the job to run."""
    aside, target = folder / "code.new", folder / "code"
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(_PACKAGE, aside / _PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    if recipe.name.endswith(".py"):
        copy = aside.joinpath("files", *Path(recipe.name).parts[1:])
        copy.parent.mkdir(parents=True)
        shutil.copy2(recipe.files()[0], copy)
    code.keep(state, aside)
    shutil.rmtree(target, ignore_errors=True)
    files.replace(aside, target)
