"""Methods of a `System` that have another name now."""

from seedbed.errors import UserError

RENAMED = {
    "players": "named_optimizers",
    "why_one_rank": "single_rank_reason",
    "working": "rank_local_buffers",
    "think": "inference_curve",
    "packs": "packable_keys",
    "envelope": "padded_config",
    "dials": "settings_tensors",
    "lesson": "stage_metric",
}


def refuse_old_names(cls: type) -> None:
    """Refuse a recipe that defines one of them: it would never be called."""
    for old in RENAMED.keys() & vars(cls).keys():
        raise UserError(f"{cls.__name__}.{old} is now called {RENAMED[old]}; rename it in the recipe")
