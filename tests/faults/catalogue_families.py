"""Faults of samplers, players, rollouts, curricula, terms of a loss, and the meaning of evaluations, as edits of the recipes."""

from functools import partial

from patching import GPT, fault

FLOW, WORLD, THINKER, EBT = "flow/demo", "world/demo", "thinker/demo", "ebt/demo"
FLOW_SAMPLING, FLOW_DATA, PATCHES = "seedbed/recipes/flow/sampling.py", "seedbed/recipes/flow/data.py", "seedbed/nn/patchify.py"
DATA, SYSTEM, OBJECTIVE, MEMORY, CRITIC, EVALUATE, PLAYER = (
    f"seedbed/recipes/world/{n}.py" for n in ("data", "system", "objective", "memory", "critic", "evaluate", "player")
)
CURRICULUM, SCORES = (f"seedbed/recipes/thinker/{n}.py" for n in ("curriculum", "evaluate"))
GATED = ("data.curriculum.kind=gated", "data.curriculum.start=2")
_ROUNDED = "((x.clamp(-1.0, 1.0) + 1.0) * LEVELS).round() / LEVELS"
_ACTIONS = '"action": self.scaled_NA[self.low : high]'
EMULATOR = "seedbed/recipes/world/emulator.py"

_flow, _world, _thinker = (partial(fault, recipe) for recipe in (FLOW, WORLD, THINKER))

FAULTS = [
    _flow("inference", "time grid ends before the image", "I3", FLOW_SAMPLING, "even = [i / steps for",
          "even = [i / (steps + 1) for"),
    _flow("inference", "midpoint step of half the size", "I3", FLOW_SAMPLING, "t + 0.5 * dt)\n",
          "t + 0.5 * dt)\n            dt = dt / 2\n"),
    _flow("objective", "one draw of class dropout for a batch", "I4", FLOW_DATA, "rng.keys(seed, index_B, _DROP)",
          "rng.keys(seed, index_B[:1].expand_as(index_B), _DROP)"),
    _flow("inference", "guidance counts twice", "I4", FLOW_SAMPLING, "return unconditional + sampling.guidance",
          "return conditional + sampling.guidance"),
    _flow("model", "patches come back transposed", "C5", PATCHES, "x.permute(0, 3, 1, 4, 2, 5)", "x.permute(0, 3, 1, 5, 2, 4)"),
    _world("inference", "levels are cut off, not rounded", "I5", MEMORY, _ROUNDED, _ROUNDED.replace("round", "floor")),
    _world("inference", "keys of play in another order", "I8 C8", PLAYER, "scale_actions(action_A[None], self",
           "scale_actions(np.roll(action_A, 1)[None], self"),
    _world("data", "controls one frame late", "D1", DATA, _ACTIONS,
           _ACTIONS.replace("self.low : high", "self.low + 1 : high + 1")),
    _world("objective", "rollouts never move on", "C8", OBJECTIVE, "self.age_P[:num] = rows.index_B, rows.age_B + 1",
           "self.age_P[:num] = rows.index_B, rows.age_B"),
    _world("evaluation", "evaluation reads the next control", "C8", EVALUATE, "self.action_BTA[:, self.before - 2 + step]",
           "self.action_BTA[:, self.before - 1 + step]"),
    _world("objective", "error of rollouts is reported and not minimised", "L4", EMULATOR, "0.5 * (opened + closed)", "opened"),
    _thinker("loop", "promotion needs more than every answer", "T5", CURRICULUM, "(hits >= config.threshold * count)",
             "(hits > count)", *GATED),
    _thinker("evaluation", "smaller answers count as right", "V7", SCORES, '(logits_SBMV.argmax(-1) == batch["y"])',
             '(logits_SBMV.argmax(-1) <= batch["y"])'),
    fault(EBT, "evaluation", "optimisation stops after one step", "C9", "seedbed/recipes/ebt/evaluate.py", "z_BTV, max(steps),",
          "z_BTV, min(steps),"),
    fault(GPT, "evaluation", "evaluation in training mode", "V5", "seedbed/recipes/gpt/system.py",
          "        model.eval()\n        try", "        model.train()\n        try"),
    fault(GPT, "evaluation", "evaluation on the training text", "V6", "seedbed/recipes/gpt/system.py",
          "shard_of(windows(source, batch, device))", "shard_of(windows(self.data.train, batch, device))"),
]  # fmt: skip
