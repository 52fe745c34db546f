"""Configs as runs of this and of earlier versions have saved them."""

import typing
from typing import Any

from seedbed.config import PLAIN, flat, flatten, replaced
from seedbed.errors import UserError

# Old keys, or groups of keys, with their new names; then, by new key, old values. Saved configs are translated; on the command
# line an old name is an error that states the new one.
RENAMED: dict[str, str] = {
    "recompute": "remat",
    "model.odometer": "model.pose_tracking",
    "model.map_cells": "model.plane_resolution",
    "model.blank": "model.memory_dropout",
    "model.warm_critic": "model.critic_warmup",
    "model.walk.steps": "model.mcmc.num_steps",
    "model.walk.fewest": "model.mcmc.min_steps",
    "model.walk.landscapes": "model.mcmc.num_landscapes",
    "model.walk.spread": "model.mcmc.random_alpha",
    "model.walk.start": "model.mcmc.initial_condition",
    "model.walk.through": "model.mcmc.backprop_through",
    "model.walk.langevin": "model.mcmc.langevin_noise",
    "model.walk.replay": "model.mcmc.replay_buffer",
    "model.walk": "model.mcmc",
    "model.spread": "model.random_alpha",
    "model.t_law": "model.t_distribution",
    "model.plan": "model.program",
    "model.flow": "model.target_stream",
}
RENAMED_VALUES: dict[str, dict[Any, Any]] = {
    "schedule.kind": {"gpt3": "cosine"},
    "model.target_stream": {"beside": "both"},
    "model.latent_init": {"placed": "positional"},
}

# Settings that may be changed when a run is resumed.
FREE_KEYS = {"batch", "accum", "device", "precision", "keep", "steps", "budget", *(word.partition("=")[0] for word in PLAIN)}
FREE_GROUPS = ("every.", "guard.", "dist.")


def is_free(key: str) -> bool:
    """Whether a run may be resumed with another value of this key."""
    return key in FREE_KEYS or key.startswith(FREE_GROUPS)


def translated(values: dict[str, Any], known: typing.Container[str] = ()) -> dict[str, Any]:
    """A flattened config of an earlier version with the present keys and values; keys in `known` are not translated."""
    if values.get("schedule.kind") == "one_cycle" and "schedule.floor" in values and "schedule.div" not in values:
        values = {**values, "schedule.kind": "cosine"}  # without `div` it was an alias of it
    found = {}
    for key, value in values.items():
        key = key if key in known else current_key(key)
        options = RENAMED_VALUES.get(key, {})
        found[key] = options.get(value, value) if options and isinstance(value, str) else value
    return found


def current_key(key: str) -> str:
    """The present name of a dotted key, which it or its group may have been renamed to."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            return new + key[len(old) :]
    return key


def from_json(like: Any, values: dict[str, Any]) -> Any:
    """The config that `to_json` wrote, with the types of `like`; an unknown key is an error."""
    known = flatten(like)
    found = translated(flat(values), known)
    for key in (key for key in found if key not in known):
        if any(name.startswith(f"{key}.") for name in known):
            raise UserError(f"the saved config is damaged: `{key}` should hold a group of values")
        raise UserError(f"the saved config has `{key}`, which this version does not know; another version wrote it")
    return replaced(like, {key: _tuples(value) for key, value in found.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
