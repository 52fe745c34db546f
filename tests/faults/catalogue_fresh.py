"""Thirty more faults written without knowledge of the checks, after these were extended for those of catalogue_unseen.py.

Six of each recipe: 6 easy, 16 medium, 8 hard to see. No check is expected to find any of them.
"""

from functools import partial

from catalogue_unseen import unseen

LAYERS, LIKELIEST, DECODING = (f"seedbed/nn/{n}.py" for n in ("layers", "likeliest", "decoding"))
OPTIM, ENGINE, EMA, ROLLBACK = (f"seedbed/train/{n}.py" for n in ("optim", "engine", "ema", "rollback"))

# ---- gpt ---------------------------------------------------------------------------------------------------------------

_fault = partial(unseen, "gpt/demo")
GPT_MODEL = "seedbed/recipes/gpt/model.py"
_BETAS = """beta1=self.optim.beta1,
            beta2=self.optim.beta2,"""

GPT_FAULTS = [
    _fault("model", "medium", "skips of a U-shaped model are crossed",
           "The last block gets the state of the innermost one: early states arrive where they help least.",
           GPT_MODEL, "skip = early.pop()", "skip = early.pop(0)", "model.skips=true", "model.depth=4"),
    _fault("optimizer", "medium", "decays of the two moments exchanged",
           "The mean hardly averages, the square forgets within ten steps: steps are noisy and large after quiet ones.",
           OPTIM, _BETAS, _BETAS.replace("optim.beta1", "optim.beta0").replace("optim.beta2", "optim.beta1")
           .replace("optim.beta0", "optim.beta2")),
    _fault("loop", "hard", "roll-back forgets how often it has rolled back",
           "A run that diverges again and again is rolled back without end instead of stopping after three times.",
           ROLLBACK, "    job.incidents.load_state(incidents)", "    pass"),
    _fault("runtime", "medium", "metrics of a step are those of its last micro-batch",
           "The logged loss covers a part of the step, and is that part's share of a mean: a quarter of the loss.",
           ENGINE, "out[name] = out[name] + value if name in out else value", "out[name] = value", "accum=4"),
    _fault("objective", "easy", "soft cap not multiplied back",
           "Logits never leave -1 to 1, and no prediction can be certain: the loss ends far too high.",
           GPT_MODEL, "torch.tanh(logits_BTV / self.softcap) * self.softcap", "torch.tanh(logits_BTV / self.softcap)",
           "model.softcap=15"),
    _fault("inference", "easy", "Gumbel noise with the wrong sign",
           "Tokens are drawn from another distribution than the model's: unlikely ones come too often.",
           DECODING, "(logits_BV - waits_BV.log())", "(logits_BV + waits_BV.log())"),
]  # fmt: skip

# ---- flow --------------------------------------------------------------------------------------------------------------

_fault = partial(unseen, "flow/demo")
FLOW_DATA, FLOW_MODEL, FLOW_SAMPLING = (f"seedbed/recipes/flow/{n}.py" for n in ("data", "model", "sampling"))

FLOW_FAULTS = [
    _fault("model", "hard", "both axes of the rotary angles follow the row",
           "Attention cannot tell columns apart by their distance, and learns it from the added positions, later and worse.",
           FLOW_MODEL, "for place_N in places_N2.unbind(1)]", "for place_N in places_N2[:, :1].expand_as(places_N2).unbind(1)]",
           "model.positions=2d"),
    _fault("loop", "medium", "average without a warm-up",
           "For hundreds of steps the averaged weights are mostly the initial ones: evaluations and samples are far too bad.",
           EMA, "1.0 - min(self.decay,", "1.0 - max(self.decay,", "ema=0.99"),
    _fault("runtime", "medium", "checkpoints hold the live weights as average",
           "After a resume, and for everything that reads a checkpoint, the average starts anew from noisy weights.",
           ENGINE, "{name: dict(e.shadow)", "{name: dict(e.live)", "ema=0.9"),
    _fault("objective", "medium", "path from noise to image is curved",
           "Inputs hold more noise than their time says: the velocity is learned for points that sampling never meets.",
           FLOW_DATA, "torch.addcmul(noise_BCHW, velocity_BCHW, time_B[:, None, None, None])",
           "torch.addcmul(noise_BCHW, velocity_BCHW, time_B[:, None, None, None].square())"),
    _fault("data", "easy", "class dropout keeps the share that it should drop",
           "Nine of ten images are trained without their class, and classes are hardly learned.",
           FLOW_DATA, "_DROP), 1)[:, 0] < share", "_DROP), 1)[:, 0] > share"),
    _fault("inference", "hard", "shift moves the steps towards the image",
           "--shift 3 spends the steps where little is left to decide, and images lose their shape.",
           FLOW_SAMPLING, "t / (t + shift * (1.0 - t))", "shift * t / (shift * t + (1.0 - t))"),
]  # fmt: skip

# ---- world -------------------------------------------------------------------------------------------------------------

_fault = partial(unseen, "world/demo")
WORLD_DATA, WORLD_OBJECTIVE, WORLD_MODEL, CRITIC, EDM = (
    f"seedbed/recipes/world/{n}.py" for n in ("data", "objective", "model", "critic", "edm")
)

WORLD_FAULTS = [
    _fault("model", "easy", "without control the oldest frame comes back",
           "A view that should stand still jumps back to the first remembered frame, and flickers.",
           WORLD_MODEL, 'last_B3HW, moving_B111 = memory["m1"][:, -3:]', 'last_B3HW, moving_B111 = memory["m1"][:, :3]'),
    _fault("loop", "medium", "rollouts never grow older",
           "Every prediction of a rollout is the first one: the network never sees its own errors, and long rollouts drift.",
           WORLD_OBJECTIVE, "rows.index_B, rows.age_B + 1", "rows.index_B, rows.age_B"),
    _fault("runtime", "medium", "every frame of a rollout has the same noise",
           "The generator's own noise does not change from frame to frame: patterns stand in the picture.",
           WORLD_DATA, "stream + 64 * turn)", "stream + 0 * turn)"),
    _fault("objective", "medium", "gradient penalty of the critic is reported and not trained",
           "The critic grows as steep as it can, and the generator follows its noise.",
           CRITIC, "gamma * (along - along.detach())", "gamma * (along.detach() - along.detach())", "model.adversarial=0.5"),
    _fault("objective", "hard", "preconditioning without the offset noise",
           "At low noise levels the network's target has a variance far above 1: fine detail is learned last and badly.",
           EDM, "square_B = sigma_B.square() + OFFSET**2", "square_B = sigma_B.square()", "model.kind=edm"),
    _fault("evaluation", "medium", "evaluation reads controls in recorded units",
           "Free-running errors are those of wrong controls; the curriculum waits for an evaluation that never gets good.",
           WORLD_DATA, "torch.from_numpy(self.scaled_NA[rows_BT])",
           "torch.from_numpy(self.recording.actions_TA[rows_BT].astype(np.float32))"),
]  # fmt: skip

# ---- thinker -----------------------------------------------------------------------------------------------------------

_fault = partial(unseen, "thinker/demo")
TASKS, LENGTHS, EVALUATE, THINKER_MODEL = (
    f"seedbed/recipes/thinker/{n}.py" for n in ("tasks", "curriculum", "evaluate", "model")
)
ADDITION = "data.task=binary_addition"

THINKER_FAULTS = [
    _fault("optimizer", "hard", "Nesterov's step mixes momentum and gradient the wrong way",
           "Nearly the plain gradient is orthogonalised: momentum hardly acts, and training is noisy.",
           OPTIM, "nesterov = torch.lerp(grad_kmn, momentum_kmn, self.optim.momentum)",
           "nesterov = torch.lerp(momentum_kmn, grad_kmn, self.optim.momentum)", "optim.kind=muon"),
    _fault("loop", "medium", "one right answer promotes to longer samples",
           "The curriculum rushes to the full length after a few windows, and nothing is learned on the way.",
           LENGTHS, "(hits >= config.threshold * count)", "(hits >= config.threshold)", "data.curriculum.kind=gated"),
    _fault("runtime", "hard", "gradients reach back one step less than asked",
           "backprop_steps=2 trains as 1 does, at the cost of 2, and the comparison of the two says nothing.",
           THINKER_MODEL, "torch.is_grad_enabled() and t >= setting.first", "torch.is_grad_enabled() and t > setting.first",
           "model.loss.backprop_steps=2"),
    _fault("objective", "medium", "loss averaged over padded positions too",
           "Batches of short samples have a small loss and small gradients: long samples outweigh them.",
           THINKER_MODEL, "/ learn_BM.sum().clamp_min(1.0)", "/ learn_BM.numel()", "data.curriculum.kind=uniform"),
    _fault("data", "medium", "carries are added to their own position",
           "Sums with a carry are wrong, and the model learns a rule that is no addition.",
           TASKS, "torch.cat((torch.zeros_like(carry_BM[..., :1]), carry_BM[..., :-1]), -1)", "carry_BM", ADDITION),
    _fault("evaluation", "medium", "positions that do not count are wrong answers",
           "Exact match stays near zero however good the model is, and no run is ever finished.",
           EVALUATE, '(logits_SBMV.argmax(-1) == batch["y"]) | ~batch["keep"]',
           '(logits_SBMV.argmax(-1) == batch["y"]) & batch["keep"]', ADDITION),
]  # fmt: skip

# ---- ebt ---------------------------------------------------------------------------------------------------------------

_fault = partial(unseen, "ebt/demo")
EBT_DATA, EBT_MODEL, EBT_OBJECTIVE, OPTIMIZE, EBT_SYSTEM = (
    f"seedbed/recipes/ebt/{n}.py" for n in ("data", "model", "objective", "optimize", "system")
)
_COUNT = "counts[mix(self.config.seed, step, optimize.NUM_STEPS) % len(counts)]"

EBT_FAULTS = [
    _fault("model", "medium", "newest token is hidden from its prediction",
           "Every token is predicted without the one before it: the loss ends at that of a text with a gap.",
           EBT_MODEL, "device=device).triu(more + 1)", "device=device).triu(more)"),
    _fault("loop", "medium", "number of optimisation steps drawn once",
           "All batches take as many steps as the first one, and other numbers are never trained.",
           EBT_SYSTEM, _COUNT, _COUNT.replace(" step,", ""), "model.mcmc.min_steps=1", "model.mcmc.num_steps=4"),
    _fault("objective", "easy", "losses of the steps are summed",
           "Loss and gradients grow with the number of steps, which the learning rate does not expect.",
           EBT_OBJECTIVE, "torch.stack(nats_K).mean()", "torch.stack(nats_K).sum()"),
    _fault("objective", "hard", "step size can only grow smaller",
           "Negative gradients of the step size are cut off: it shrinks, and predictions end before they arrive.",
           OPTIMIZE, "grad.clamp(-1.0, 1.0)", "grad.clamp(0.0, 1.0)"),
    _fault("data", "hard", "counters of the blocks repeat every 64 samples",
           "Initial predictions are the same again and again, and the model learns to start from these.",
           EBT_DATA, '"index": raw["index"]}', '"index": raw["index"] % 64}'),
    _fault("data", "easy", "validation part is the training part again",
           "Evaluations look as good as training does, and over-fitting is never seen.",
           EBT_DATA, "parts = (data.train, data.valid)", "parts = (data.train, data.train)"),
]  # fmt: skip

FAULTS = [*GPT_FAULTS, *FLOW_FAULTS, *WORLD_FAULTS, *THINKER_FAULTS, *EBT_FAULTS]
