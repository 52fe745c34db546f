"""Commands that `torchrun --max-restarts` starts again after a lost rank: they go on with the run that they had begun."""

from pathlib import Path

from seedbed import config as configs
from seedbed.config import Config
from seedbed.dist import started
from seedbed.errors import EXIT_OK, UserError
from seedbed.launch import resume
from seedbed.track.run import Run


def go_on(root: Path, run_name: str | None, config: Config, until: int = 0) -> int | None:
    """The exit code of the run of this name and config, once it has been resumed to its end; None where there is none yet."""
    if run_name is None:
        raise UserError("torchrun --max-restarts starts this command again after a lost rank: name its run by --name NAME")
    if not (root / run_name).is_dir():
        return None
    run = Run.open(root, run_name)
    settings = (configs.override(one, [*configs.SINGLE_PROCESS]) for one in (resume.saved_config(run)[1], config))
    if len(set(map(configs.digest, settings))) > 1:
        return None  # another run, and its name is refused
    if run.status().get("status") == "done":
        return EXIT_OK  # a rank was lost after the last step
    return resume.resume(root, run_name, [], until=until)


def fitted(config: Config) -> list[str]:
    """The settings by which a run goes on with the ranks that are left: replicas of as many shards as before."""
    num, shard = started(), config.dist.shard
    if num == config.dist.world:
        return []
    most = max(num, config.dist.world)
    possible = [world for world in range(shard, most + 1, shard) if config.batch % (world * config.accum) == 0]
    if num not in possible:
        of, worlds = f"dist.shard={shard}, batch={config.batch} and accum={config.accum}", ", ".join(map(str, possible))
        raise UserError(f"torchrun has {num} ranks left of {config.dist.world}; with {of} a run goes on with one of: {worlds}")
    return [f"dist.replicate={num // shard}"]
