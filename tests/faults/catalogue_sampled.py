"""Sixteen faults at places of the source that were drawn at random, after checks were changed for those of catalogue_fresh.py.

Four functions of each recipe (for gpt also of the core) came from a seeded draw; those that only print or draw were left out.
"""

from functools import partial

from catalogue_unseen import EBT, FLOW, GPT, THINKER, WORLD, unseen

DECODING, STEPPER, LOOP, CHECKPOINT = (
    "seedbed/nn/decoding.py",
    *(f"seedbed/train/{n}.py" for n in ("stepper", "loop", "checkpoint")),
)
FLOW_MODEL, FLOW_OBJECTIVE, FLOW_SYSTEM = (f"seedbed/recipes/flow/{n}.py" for n in ("model", "objective", "system"))
EVALUATE, FIELD, WORLD_DATA = (f"seedbed/recipes/world/{n}.py" for n in ("evaluate", "radiance_field", "data"))
FULL, THINKER_MODEL, TASKS = (f"seedbed/recipes/thinker/{n}.py" for n in ("full_evaluation", "model", "tasks"))
EBT_MODEL, EBT_SYSTEM, OPTIMIZE = (f"seedbed/recipes/ebt/{n}.py" for n in ("model", "system", "optimize"))

gpt, flow, world, thinker, ebt = (partial(unseen, recipe) for recipe in (GPT, FLOW, WORLD, THINKER, EBT))

FAULTS = [
    gpt("loop", "medium", "batches start at the number of their step",
        "Neighbouring steps share all items but one: an epoch is seen as many times as a batch has items.",
        STEPPER, "self.feed.load(counter)\n        if", "self.feed.load(step)\n        if"),
    gpt("loop", "hard", "a roll-back is taken for going on, and going on for a roll-back",
        "After a spike the evaluations and saves of that step are left out; after a roll-back they are made of old results.",
        LOOP, "if not outliers.accept(job, result):", "if outliers.accept(job, result):"),
    gpt("runtime", "easy", "checkpoints are rounded to bfloat16",
        "A resumed run is another one, and everything that is read from a checkpoint is worse than what was evaluated.",
        CHECKPOINT, "t.detach().cpu().contiguous()", "t.detach().cpu().bfloat16().to(t.dtype).contiguous()"),
    gpt("inference", "medium", "last but one token of a prompt is not read",
        "Generation goes on from a prompt with a gap before its last token.",
        DECODING, "self.starts[r] - leave for r in rows]", "self.starts[r] - 2 * leave for r in rows]"),
    flow("model", "hard", "wavelengths of both axes are squeezed",
         "Angles fall with the root of the base that was set: distant patches look like neighbours.",
         FLOW_MODEL, "head_dim // 2, base)", "head_dim // 2, base**0.5)", "model.positions=2d"),
    flow("objective", "medium", "median of the errors in place of their mean",
         "Only one image of a batch has a gradient, and times with large errors never count.",
         FLOW_SYSTEM, "return error_B.mean(), self._measure", "return error_B.median(), self._measure"),
    flow("evaluation", "hard", "baselines weigh the times near the image too much",
         "The linear baseline is said to be worse than it is, and a run that does not beat it seems to.",
         FLOW_OBJECTIVE, "return (gap_Q / floor_Q).square(), floor_Q", "return (gap_Q / floor_Q), floor_Q"),
    world("evaluation", "medium", "fade baseline with its weights exchanged",
          "The strongest simple baseline is a weak one, and models seem to beat it.",
          EVALUATE, "weight * last + (1 - weight) * mean", "(1 - weight) * last + weight * mean"),
    world("model", "medium", "projections of the field start as torch makes them",
          "They are not drawn from the seed, and the field's part of the features has another size than the network's.",
          FIELD, "for layer in (self.say, self.said, *self.enter):", "for layer in (self.say, self.said):"),
    world("evaluation", "hard", "fade baseline fitted with half of the cross term",
          "The weight of the last frame is too small: the baseline is weaker than it could be.",
          WORLD_DATA, "- 2 * weights * la + aa", "- weights * la + aa"),
    thinker("evaluation", "medium", "change of the state measured from the first step",
            "A state that has converged seems to move for ever.",
            FULL, "(state_SB[1:] - state_SB[:-1]).norm", "(state_SB[1:] - state_SB[:1]).norm"),
    thinker("objective", "medium", "only the worse of the two streams is trained",
            "Queries and target stream take turns, and each unlearns while the other is worse.",
            THINKER_MODEL, "for one_SBMV in streams]).sum()", "for one_SBMV in streams]).amax()", "model.target_stream=both"),
    thinker("data", "easy", "even positions come first",
            "The task is another one than its name says, and results cannot be compared with published ones.",
            TASKS, "2 * position_M + 1, 2 * (position_M - num_odd_B1))", "2 * position_M, 2 * (position_M - num_odd_B1) + 1)",
            "data.task=odds_first"),
    ebt("optimizer", "easy", "step size gets no gradient",
        "The learned step size stays what it was set to.",
        EBT_SYSTEM, "self.log_alpha, mean).exp()", "self.log_alpha, mean).exp().detach()"),
    ebt("evaluation", "medium", "evaluation descends the first landscape at every step",
        "Evaluations and generation follow an energy that was trained for the first step only.",
        OPTIMIZE, "step = take(model, contexts, z_BTV, number,", "step = take(model, contexts, z_BTV, 0,"),
    ebt("model", "hard", "last context is read without a norm",
        "Keys and values of the last block grow with the stream: deep models attend to few tokens.",
        EBT_MODEL, "k, v = F.linear(self.norm1(x_BTC), self.qkv", "k, v = F.linear(x_BTC, self.qkv"),
]  # fmt: skip
