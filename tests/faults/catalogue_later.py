"""Faults written without knowledge of the checks, as those of catalogue_unseen.py, in a separate list.

They are mistakes that people make when they train models: scales, masks, counters, pairs, splits, resumed state, and evaluations
that lie. No check is expected to find any of them.
"""

from functools import partial

from catalogue_blind import BlindFault
from catalogue_unseen import EBT, FLOW, GPT, THINKER, WORLD, prepared_anew, unseen

LAYERS, FEED, BPE = "seedbed/nn/layers.py", "seedbed/data/feed.py", "seedbed/data/bpe.py"
ENGINE, OPTIM, EMA = (f"seedbed/train/{n}.py" for n in ("engine", "optim", "ema"))

# ---- gpt ---------------------------------------------------------------------------------------------------------------

_fault = partial(unseen, GPT)
GPT_MODEL = "seedbed/recipes/gpt/model.py"

GPT_FAULTS = [
    _fault(
        "model",
        "medium",
        "attention scaled by the number of heads",
        "With few heads attention is several times too sharp from the first step on: training is less stable and learns less.",
        LAYERS,
        "self.scale = self.head_dim**-0.5 *",
        "self.scale = self.heads**-0.5 *",
    ),
    _fault(
        "optimizer",
        "medium",
        "momentum weighs old and new gradients the wrong way round",
        "Nothing is averaged over steps: updates follow the noise of single batches, and no learning rate makes up for it.",
        OPTIM,
        "torch.lerp(momentum_kmn, grad_kmn, 1.0 - self.optim.momentum)",
        "torch.lerp(momentum_kmn, grad_kmn, self.optim.momentum)",
    ),
    _fault(
        "runtime",
        "medium",
        "dropout draws the same mask at every step",
        "Each place of a batch loses the same activations in the whole run: dropout regularises far less than its rate promises.",
        ENGINE,
        "seed = mix(self.config.seed, step, *(",
        "seed = mix(self.config.seed, *(",
        "model.dropout=0.2",
    ),
    _fault(
        "objective",
        "easy",
        "targets are shifted twice",
        "The loss falls as it should, but the model learns the token after the next, and its text is nonsense.",
        GPT_MODEL,
        "self.head(self.hidden(tokens_BT, tables), self.head_weight, targets_BT)",
        "self.head(self.hidden(tokens_BT, tables)[:, :-1], self.head_weight, targets_BT[:, 1:])",
    ),
    prepared_anew(
        GPT,
        "data",
        "medium",
        "token ids are cut to a byte",
        "Every id above 255 becomes another token: the model learns a garbled text, and its loss looks normal.",
        BPE,
        "np.asarray(e.ids, dtype=self.dtype)",
        "np.asarray(e.ids).astype(np.uint8).astype(self.dtype)",
        "data.tokenizer=bpe",
        "data.vocab=512",
    ),
    _fault(
        "inference",
        "hard",
        "positions go on counting when the context window has moved",
        "Samples are good up to the length of the context and then fall apart, which is taken for a weakness of the model.",
        GPT_MODEL,
        "self.model.position_tables(token_B1, self.cache.length_B[:, None])",
        "self.model.position_tables(token_B1, self.count_B[:, None] - 1)",
    ),
]

# ---- flow --------------------------------------------------------------------------------------------------------------

_fault = partial(unseen, FLOW)
FLOW_DATA, FLOW_SYSTEM, SAMPLING = (f"seedbed/recipes/flow/{n}.py" for n in ("data", "system", "sampling"))

FLOW_FAULTS = [
    _fault(
        "loop",
        "medium",
        "the model stays in evaluation mode after the first evaluation",
        "Classes are dropped until the first evaluation only: guidance gets worse from then on, and more training does not help.",
        ENGINE,
        "was_training = self.system.training\n        self.system.eval()",
        "self.system.eval()\n        was_training = self.system.training",
    ),
    _fault(
        "objective",
        "medium",
        "mean and spread of the times exchanged",
        "Training looks at nearly finished images instead of noisy ones: the loss is low, and samples have no clear content.",
        FLOW_DATA,
        "torch.sigmoid(times.mean + times.std * normal_B)",
        "torch.sigmoid(times.std + times.mean * normal_B)",
    ),
    _fault(
        "objective",
        "easy",
        "the network is told the time from the other end",
        "Samplers count from noise to image and training from image to noise: the loss falls, and samples are useless.",
        FLOW_SYSTEM,
        'self.run(seen["input"], seen["time"], seen["class"])',
        'self.run(seen["input"], 1.0 - seen["time"], seen["class"])',
    ),
    _fault(
        "data",
        "medium",
        "sample counters start again in every batch",
        "The k-th image of every batch has one noise, time and dropout for the whole run: at other noise the error is higher.",
        FEED,
        "np.add(self.locator.steps_B, counter, out=slot.host_index)",
        "np.copyto(slot.host_index, self.locator.steps_B)",
    ),
    _fault(
        "inference",
        "easy",
        "the sampler leaves out its last step",
        "Every image keeps the noise that the last step would remove, most of all with few steps.",
        SAMPLING,
        "itertools.pairwise(times)",
        "itertools.pairwise(times[:-1])",
    ),
    _fault(
        "evaluation",
        "hard",
        "errors of images averaged as if they were those of times",
        "The losses of the noisy and of the clean half are the same number up to chance, and the wrong checkpoint is the best.",
        FLOW_SYSTEM,
        "view(-1, NUM_TIMES).sum(0)",
        "view(NUM_TIMES, -1).sum(1)",
    ),
]

# ---- world -------------------------------------------------------------------------------------------------------------

_fault = partial(unseen, WORLD)
FIELD, OBJECTIVE, WORLD_DATA, PLAYER, WORLD_EVALUATE = (
    f"seedbed/recipes/world/{n}.py" for n in ("radiance_field", "objective", "data", "player", "evaluate")
)

WORLD_FAULTS = [
    _fault(
        "model",
        "hard",
        "the camera turns about the axes of the world",
        "Poses are right while the camera is level and wrong when it is tilted: the scene is blurred, and rollouts drift.",
        FIELD,
        "before_B34[:, :, :3] @ rotation_matrices(motion_B6[:, 3:])",
        "rotation_matrices(motion_B6[:, 3:]) @ before_B34[:, :, :3]",
    ),
    _fault(
        "loop",
        "medium",
        "averaged weights follow the last step",
        "The average is the weights of the last step or two: evaluations and the played model are as noisy as without it.",
        EMA,
        "return 1.0 - min(self.decay,",
        "return min(self.decay,",
    ),
    _fault(
        "objective",
        "medium",
        "noise is put on predicted memories instead of true ones",
        "True memories are clean, so the network trusts them fully and amplifies its own errors as soon as it is played.",
        OBJECTIVE,
        "< len(level_B) - window.num_own",
        ">= len(level_B) - window.num_own",
    ),
    _fault(
        "objective",
        "hard",
        "rollouts keep a prediction in place of the frame before it",
        "The newest frame of a rollout is always the true one: the closed loop trains on nearly true memories, out of order.",
        OBJECTIVE,
        "rows.age_B + before] = to_bytes(frame_P3HW)",
        "rows.age_B + before - 1] = to_bytes(frame_P3HW)",
    ),
    _fault(
        "data",
        "easy",
        "windows of every split come from the training part",
        "Validation and test results are those of frames that were trained on, and no overfitting shows.",
        WORLD_DATA,
        "WindowSource(recording, part, before, num,",
        'WindowSource(recording, "train", before, num,',
    ),
    _fault(
        "inference",
        "medium",
        "play begins at the pose of the frame before",
        "The tracked pose is one frame behind the picture for as long as the game lasts, and is blamed on the model.",
        PLAYER,
        "system.pose_of(np.array([self.at]))",
        "system.pose_of(np.array([self.at - 1]))",
    ),
    _fault(
        "evaluation",
        "medium",
        "the rollout with shuffled controls has the true ones",
        "The network seems not to use its controls, so the curriculum never leaves its first stage, and long rollouts stay poor.",
        WORLD_EVALUATE,
        "free_run(system, traj, near, other)",
        "free_run(system, traj, near)",
    ),
]

# ---- thinker -----------------------------------------------------------------------------------------------------------

_fault = partial(unseen, THINKER)
THINKER_MODEL, THINKER_SYSTEM, TASK = (f"seedbed/recipes/thinker/{n}.py" for n in ("model", "system", "task"))

THINKER_FAULTS = [
    _fault(
        "model",
        "easy",
        "input tokens have no position",
        "The thinker sees which symbols there are and not in which order: accuracy stops at what that allows.",
        THINKER_MODEL,
        "self._tokens(x_BN) + position_ND]",
        "self._tokens(x_BN)]",
    ),
    _fault(
        "optimizer",
        "easy",
        "one cosine lasts as long as the warm-up",
        "The learning rate goes up and down many times and may be high at the end: a run ends worse than it was before.",
        OPTIM,
        "max(1.0 - schedule.warmup, 1e-12)",
        "max(schedule.warmup, 1e-12)",
    ),
    _fault(
        "loop",
        "hard",
        "a resumed run starts its curriculum again",
        "After a resume the run trains on the shortest samples again and may end before it has reached the long ones.",
        THINKER_SYSTEM,
        "curriculum.first(config.data.curriculum, task.length))",
        "curriculum.first(config.data.curriculum, task.length), persistent=False)",
        "data.curriculum.kind=gated",
        "data.curriculum.window=20",
        "data.curriculum.min_steps=20",
        "data.curriculum.threshold=0.5",
    ),
    _fault(
        "runtime",
        "medium",
        "all samples have the same initial noise",
        "Training knows one noise only, so the answers to new samples, which start from another one, are worse.",
        THINKER_MODEL,
        "rng.keys(setting.seed, index_B, NOISE + setting.stream)",
        "rng.keys(setting.seed, torch.zeros_like(index_B), NOISE + setting.stream)",
    ),
    _fault(
        "objective",
        "easy",
        "gradients are off in the steps that have a loss",
        "Only the decoder learns: the block that should do the work keeps its random weights, and accuracy stays near chance.",
        THINKER_MODEL,
        "t >= setting.first",
        "t < setting.first",
        "model.loss.backprop_steps=2",
    ),
    _fault(
        "data",
        "medium",
        "the last symbol is never drawn",
        "Training and evaluation both lack one symbol: exact match is perfect, and inputs with that symbol get wrong answers.",
        TASK,
        "rng.integers(key_B, shape.num_in, self.symbols)",
        "rng.integers(key_B, shape.num_in, self.symbols - 1)",
    ),
]

# ---- ebt ---------------------------------------------------------------------------------------------------------------

_fault = partial(unseen, EBT)
EBT_MODEL, OPTIMIZE, EBT_EVALUATE = (f"seedbed/recipes/ebt/{n}.py" for n in ("model", "optimize", "evaluate"))

EBT_FAULTS = [
    _fault(
        "model",
        "easy",
        "predictions attend to the token that they predict",
        "Training and validation losses are far too good, and text that is generated without that token is nonsense.",
        EBT_MODEL,
        ".triu(more + 1)",
        ".triu(more + 2)",
    ),
    _fault(
        "loop",
        "hard",
        "second moments are restored into a copy",
        "A resumed or rolled-back run continues with second moments of zero: its first steps are several times too large.",
        OPTIM,
        'yield f"square.{name}", square',
        'yield f"square.{name}", square.clone()',
    ),
    _fault(
        "objective",
        "medium",
        "predictions climb the energy",
        "Training succeeds with energies of the wrong sign: a low one no longer means good, as best-of and early stop assume.",
        OPTIMIZE,
        "z_BTV) - alpha * slope_BTV, grad_BTV",
        "z_BTV) + alpha * slope_BTV, grad_BTV",
    ),
    _fault(
        "evaluation",
        "medium",
        "probabilities of several predictions are added and not averaged",
        "Every further prediction seems to lower the loss by as much as the logarithm of their number: a gain that is not there.",
        EBT_EVALUATE,
        "(torch.logsumexp(-nats_NP[:n], 0) - math.log(n)).mean()",
        "torch.logsumexp(-nats_NP[:n], 0).mean()",
    ),
    _fault(
        "inference",
        "hard",
        "positions of a prompt begin at one",
        "The last token of a prompt and the next one share a position: text is worse than the validation loss says.",
        EBT_MODEL,
        "self.rope(torch.arange(x_NTC.shape[1], device=x_NTC.device))",
        "self.rope(torch.arange(x_NTC.shape[1], device=x_NTC.device) + 1)",
    ),
]

FAULTS: list[BlindFault] = [*GPT_FAULTS, *FLOW_FAULTS, *WORLD_FAULTS, *THINKER_FAULTS, *EBT_FAULTS]
