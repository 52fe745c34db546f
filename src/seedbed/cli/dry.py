"""`train --dry`."""

import argparse

from seedbed.errors import UserError


def dry_run(given: argparse.Namespace, num_ranks: int) -> int:
    """Refuse options that a dry run cannot follow, and take one."""
    from seedbed.launch import dry

    if num_ranks:
        raise UserError("--dry is done by one process; set dist.replicate=1 dist.shard=1 for it")
    for option in ("run", "parent", "why", "mirror"):
        if getattr(given, option):
            raise UserError(f"--dry keeps nothing, so --{option} has no effect; drop one of them")
    return dry.dry_run(given.name, given.settings)
