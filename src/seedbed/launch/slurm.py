"""Submits runs and sweeps as Slurm jobs that are requeued and resumed automatically."""

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
from seedbed.errors import EXIT_OK, UserError
from seedbed.launch import slurm_script
from seedbed.launch.slurm_script import Resources, Script
from seedbed.recipes import Recipe, find, named_code, remember
from seedbed.recipes.saved import find_saved
from seedbed.report import slurm_queue
from seedbed.track import code, files, folders
from seedbed.track.jsonl import print_json
from seedbed.track.run import Run, full_name
from seedbed.track.text import one_line
from seedbed.tune.sweep.folder import Sweep, folder_of

# Most workers of a sweep by default.
MAX_WORKERS = 8
_PATIENCE = 60.0
# Hints for common errors, by a phrase of Slurm's message.
_HINTS = {
    "invalid partition": "sinfo lists the partitions",
    "generic resource": "sinfo -o '%P %G' lists the GPUs; slurm.gpus=0 requests none",
    "account": "sacctmgr show associations user=$USER lists yours",
}
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class SubmitOptions:
    """Options of the command line besides the settings."""

    root: Path
    dry: bool = False
    json: bool = False
    dirty: bool = False
    retry: bool = False  # of a sweep: try failed trials again
    flags: tuple[str, ...] = ()  # passed to the command inside the job


def train(name: str, assignments: list[str], options: SubmitOptions, *, run_name: str | None = None, **about: Any) -> int:
    """Create a run, with `about` as of `Run.create`, and submit its job: its first start begins the run, later ones resume it."""
    resources, own = _run_resources(assignments)
    recipe, preset = find(name)
    base = recipe.preset(preset)
    assert preset is not None
    config = configs.override(base, own)
    slurm_script.layout(resources, config)  # refused before anything is written
    state = code.state(Path.cwd(), options.root)
    code.require_clean(state, options.dirty)
    title = full_name(recipe.name, preset)
    if options.dry:
        taken = set(os.listdir(options.root)) if options.root.is_dir() else set()
        called = folders.check_name(run_name) if run_name else folders.new_name(recipe.name, datetime.datetime.now(), taken)
        return _show(_run_script(title, options.root / called, options, [], resources, recipe, config))
    _require_sbatch()
    remember(recipe, config)
    run = Run.create(options.root, recipe.name, preset, config, name=run_name, code=state, base=base, **about)
    script = _run_script(title, run.path, options, [], resources, recipe, config)
    try:
        run.set_status("queued")
        job = _submit(script, recipe, state)
    except BaseException:
        shutil.rmtree(run.path)  # nothing was trained: a refused job leaves no run folder
        raise
    return _print_submitted(script, job, options)


def resume(run: Run, recipe: Recipe, config: Config, assignments: list[str], options: SubmitOptions) -> int:
    """Submit a job that resumes a run with the current code; `config` includes the assignments."""
    resources, own = _run_resources(assignments)
    script = _run_script(run.title(), run.path, options, own, resources, recipe, config)
    if options.dry:
        return _show(script)
    _require_sbatch()
    if live := list(slurm_queue.query(slurm_queue.jobs(run.path)) or {}):
        raise UserError(f"run {run.name} is already in the queue as job {live[-1]}; to remove it: seedbed cancel {run.name}")
    with run.lock():
        job = _submit(script, recipe, code.state(Path.cwd(), options.root))
    return _print_submitted(script, job, options)


@dataclass(frozen=True)
class SweepJob:
    """The facts of a sweep that its job array needs."""

    name: str
    num_trials: int
    recipe: Recipe
    config: Config


def sweep(job: SweepJob, resources: Resources, options: SubmitOptions, make: Callable[[], Sweep]) -> int:
    """Submit a job array whose tasks are workers of a sweep; each claims trials that no other worker has claimed."""
    workers = resources.workers or min(job.num_trials, MAX_WORKERS)
    root, flags = options.root.absolute(), options.flags
    if not {"--pack", "--no-pack"} & set(flags):
        # The first worker would otherwise take every trial that fits into its memory.
        flags = (*flags, "--pack", str(-(-job.num_trials // workers)))
    script = Script(
        title=f"{workers} workers of sweep {job.name}",
        folder=folder_of(root) / job.name,
        saved=root / job.name,
        words=("sweep", "--join", job.name, "--runs", str(root), "--dirty", *flags),
        resources=resources,
        layout=slurm_script.layout(resources, job.config),
        workers=workers,
        trust=tuple(code.sha256 for code in named_code(job.recipe, job.config)),
    )
    state = code.state(Path.cwd(), options.root)
    code.require_clean(state, options.dirty)
    if options.dry:
        return _show(script)
    _require_sbatch()
    found = make()
    if workers > 1:
        # Claims of trials are file locks, which some shared disks do not support.
        fd = folders.open_lock(found.path / "lock")
        try:
            folders.try_lock(fd)
        except OSError as error:
            raise UserError(f"{found.path} is on a disk without file locks ({error.strerror}): use slurm.workers=1") from None
        finally:
            folders.release(fd)
    if options.retry:
        found.forget_failures()
    return _print_submitted(script, _submit(script, job.recipe, state), options)


def sweep_job_of(found: Sweep, retry: bool) -> SweepJob:
    """The job of additional workers for an existing sweep: at most one per unfinished trial."""
    recipe = find_saved(found.facts["recipe"], found.path)
    ended = [found.result(trial) for trial in found.trials()]
    left = sum(result is None or (retry and result.state == "failed") for result in ended)
    if found.facts.get("sampler"):
        left += int(found.facts["suggest"]) - len(ended)
    if left <= 0:
        raise UserError(f"every trial of sweep {found.name} has ended; see: seedbed sweep --show {found.name}")
    return SweepJob(found.name, left, recipe, recipe.preset(found.facts["preset"]))


def cancel(root: Path, name: str) -> int:
    """Cancel the jobs of a run or a sweep. A running one is saved first and can be resumed."""
    swept = folder_of(root) / Path(name).name
    is_sweep = (swept / "sweep.json").is_file() and not (root / name).is_dir()
    folder = swept if is_sweep else Run.open(root, name).path
    pending = slurm_queue.query(slurm_queue.jobs(folder))
    if pending is None:
        raise UserError("squeue does not answer: cancel from a machine of the cluster")
    if not pending:
        raise UserError(f"{folder.name} has no job in the queue; seedbed runs list shows its status")
    _call(["scancel", *pending])
    again = f"seedbed sweep --join {folder.name}" if is_sweep else f"seedbed resume {folder.name}"
    print(f"cancelled job {', '.join(pending)}; resume with: {again} --on slurm")
    return EXIT_OK


def _run_resources(assignments: list[str]) -> tuple[Resources, list[str]]:
    resources, own = slurm_script.read(assignments)
    if resources.workers:
        raise UserError("slurm.workers is for seedbed sweep; a run uses several processes by dist.replicate and dist.shard")
    return resources, own


def _run_script(
    title: str, path: Path, options: SubmitOptions, own: list[str], resources: Resources, recipe: Recipe, config: Config
) -> Script:
    path, plan = path.absolute(), slurm_script.layout(resources, config)
    words = ("resume", path.name, *own, "--runs", str(path.parent), *options.flags)
    hashes = tuple(code.sha256 for code in named_code(recipe, config))
    return Script(f"run {path.name} ({title})", path, path, words, resources, plan, trust=hashes)


def _show(script: Script) -> int:
    """Dry run: print the script and the command, submit nothing."""
    command = shlex.join(["sbatch", str(script.folder / slurm_script.NAME)])
    print(f"{script.text()}\n# dry run: nothing was written or submitted; the command is\n# {command}")
    return EXIT_OK


def _require_sbatch() -> None:
    if not shutil.which("sbatch"):
        raise UserError(
            "there is no sbatch on PATH: --on slurm works on a machine of the cluster; --dry prints the script anywhere"
        )


def _submit(script: Script, recipe: Recipe, state: dict[str, Any]) -> str:
    """Write the job's files, submit it and record its id."""
    path = script.folder / slurm_script.NAME
    _keep_code(script.folder, recipe, state)
    files.write_atomic(path, script.text())
    job = _call(["sbatch", "--parsable", str(path)]).partition(";")[0]
    if not job.isdigit():
        raise UserError(f"sbatch returned no job id but: {one_line(job) or 'nothing'}")
    slurm_queue.record(script.folder, job)
    return job


def _print_submitted(script: Script, job: str, options: SubmitOptions) -> int:
    path, name = script.folder / slurm_script.NAME, script.folder.name
    if options.json:
        return print_json({"name": name, "job": job, "script": str(path), "path": str(script.folder)})
    output = script.folder / f"slurm-{job}{'_*' if script.workers else ''}.out"
    look = f"seedbed sweep --show {name}" if script.workers else "seedbed runs list"
    print(f"submitted job {job}: {script.title}\nscript  {path}\noutput  {output}")
    print(f"look: {look} · stop: seedbed cancel {name}")
    return EXIT_OK


def _call(words: list[str]) -> str:
    """Output of a Slurm command; a UserError with its message when it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except OSError as error:
        raise UserError(f"{words[0]} cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{words[0]} did not answer within {_PATIENCE:g} s; is the cluster's controller up? see: sinfo") from None
    if done.returncode:
        lines = [line.removeprefix(f"{words[0]}: ").removeprefix("error: ") for line in done.stderr.splitlines() if line.strip()]
        text = one_line("; ".join(lines)) or f"exit status {done.returncode}"
        raise UserError("; ".join([f"{words[0]} refused: {text}", *(hint for word, hint in _HINTS.items() if word in text)]))
    return done.stdout.strip()


def _keep_code(folder: Path, recipe: Recipe, state: dict[str, Any]) -> None:
    """Copy this package, the user's recipe and the code state for the job."""
    aside, target = folder / "code.new", folder / "code"
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(_PACKAGE, aside / _PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    if recipe.name.endswith(".py"):
        # With the modules beside it, at the same relative paths.
        home = Path(recipe.name).parent
        for path, content in (recipe.code.contents if recipe.code else {}).items():
            copy = aside.joinpath("files", *home.parts[1:], path.relative_to(recipe.files()[0].parent))
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)
    code.keep(state, aside)
    shutil.rmtree(target, ignore_errors=True)
    files.replace(aside, target)
