"""Faults written without knowledge of the checks, after these were extended for those of catalogue_blind.py.

Sampling, playing and caching, evaluation, data, objectives, models, and the loop. No check is expected to find any of them.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from functools import partial
from unittest import mock

from catalogue_blind import BlindFault
from patching import SRC, edited

GPT, FLOW, EBT, THINKER, WORLD = "gpt/demo", "flow/demo", "ebt/demo", "thinker/demo", "world/demo"


def unseen(
    recipe: str, place: str, difficulty: str, id: str, harm: str, file: str, old: str, new: str, *settings: str
) -> BlindFault:
    """One edit: `old`, which must stand in the file exactly once, becomes `new`. It matters with these settings."""
    return BlindFault(id, recipe, place, set(), lambda: edited(file, old, new), file, settings, difficulty, harm)


def prepared_anew(
    recipe: str, place: str, difficulty: str, id: str, harm: str, file: str, old: str, new: str, *settings: str
) -> BlindFault:
    """The same for an edit of what prepares data: stores are made again, in a cache folder of their own."""

    @contextlib.contextmanager
    def apply() -> Iterator[None]:
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", SEEDBED_CACHE=folder), edited(file, old, new):
            yield

    return BlindFault(id, recipe, place, set(), apply, file, settings, difficulty, harm)


LIKELIEST, DECODING, PATCHIFY = (f"seedbed/nn/{n}.py" for n in ("likeliest", "decoding", "patchify"))
TEXT, TOKENISE, IMAGES = (f"seedbed/data/{n}.py" for n in ("text", "tokenise", "image_source"))
OPTIM, ENGINE = (f"seedbed/train/{n}.py" for n in ("optim", "engine"))

# ---- gpt ---------------------------------------------------------------------------------------------------------------

_fault = partial(unseen, GPT)
GPT_MODEL = "seedbed/recipes/gpt/model.py"
_SEPARATED = """tokens += [ids, tokenizer.separator] if between else [ids]
        yield chunks, np.concatenate(tokens)"""
_JOINED = """tokens.append(ids)
        yield chunks, np.concatenate([*tokens, tokenizer.separator] if between else tokens)"""

GPT_FAULTS = [
    _fault("inference", "medium", "nucleus leaves out the token that reaches p",
           "With --top-p 0.9 less than nine tenths of the probability is kept: samples repeat themselves more than asked for.",
           LIKELIEST, "before_BV = probs_BV.cumsum(-1) - probs_BV", "before_BV = probs_BV.cumsum(-1)"),
    _fault("inference", "hard", "a full context goes on from the beginning of the text",
           "Once a text is longer than the context, it is continued as if its first tokens had just been written.",
           DECODING, "self.history_BN[row, self.starts[row] : self.starts[row] + size]", "self.history_BN[row, :size]"),
    _fault("evaluation", "easy", "bits per byte are nats",
           "Bits per byte are reported 31 % lower than they are, and the model seems better than others of its size.",
           TEXT, "nats / (math.log(2) * source.num_target_bytes)", "nats / source.num_target_bytes"),
    _fault("evaluation", "medium", "windows of evaluation share no token",
           "The first token of every window is no target, but is counted as one: the loss is lower than it is.",
           TEXT, "unfold(0, size + 1, size)", "unfold(0, size + 1, size + 1)"),
    prepared_anew(GPT, "data", "easy", "training part reaches to the end of the text",
                  "The validation part is trained on as well: its loss looks good and says nothing about new text.",
                  TOKENISE, '"train": (0, num_tokens - num_valid)', '"train": (0, num_tokens)'),
    prepared_anew(GPT, "data", "medium", "separator after a batch of documents only",
                  "Small files run into each other without a separator, and the model learns to change the subject anywhere.",
                  TOKENISE, _SEPARATED, _JOINED, f"data.text={SRC / 'seedbed' / 'data'}"),
    _fault("model", "medium", "branches that are kept are not scaled up",
           "With stochastic depth every branch is larger at inference than in training, and predictions are worse than trained.",
           GPT_MODEL, "y_BTC * (keep_B11 / (1.0 - self.drop_path)).to(y_BTC.dtype)", "y_BTC * keep_B11.to(y_BTC.dtype)",
           "model.drop_path=0.3"),
    _fault("loop", "hard", "fused matrices orthogonalised as one",
           "Queries, keys and values are one matrix for Muon: their updates are no longer orthogonal, and training is slower.",
           OPTIM, "for height in rows_of(param):", "for height in (param.shape[0],):"),
]  # fmt: skip

# ---- flow --------------------------------------------------------------------------------------------------------------

_fault = partial(unseen, FLOW)
FLOW_DATA, FLOW_MODEL, FLOW_OBJECTIVE, FLOW_SAMPLING, FLOW_SYSTEM = (
    f"seedbed/recipes/flow/{n}.py" for n in ("data", "model", "objective", "sampling", "system")
)
_MIRRORED = "column_BW = torch.where(flip_B1 == 1, self.shape[1] - 1 - column_BW, column_BW)"
_UPSIDE_DOWN = "row_BH = torch.where(flip_B1 == 1, self.shape[0] - 1 - row_BH, row_BH)"
_HALVES = "mean_T[:half].mean().item(), mean_T[half:].mean().item()"

FLOW_FAULTS = [
    _fault("inference", "medium", "Heun's second slope at the time of the first",
           "The sampler is no more accurate than Euler's at twice the cost, and images are blurred at few steps.",
           FLOW_SAMPLING, "field(x + dt * slope, following)", "field(x + dt * slope, t)"),
    _fault("inference", "easy", "guidance outside of its interval only",
           "With the default interval guidance never acts: --guidance changes nothing.",
           FLOW_SAMPLING, "or not sampling.interval[0] <= t", "or sampling.interval[0] <= t"),
    _fault("evaluation", "medium", "every batch of evaluation has the same noise",
           "Evaluation sees a fraction of the noises, and its numbers depend on how many images fit into a batch.",
           FLOW_SYSTEM, "+ FIRST_EVALUATED + first * NUM_TIMES", "+ FIRST_EVALUATED"),
    _fault("evaluation", "hard", "early and late times exchanged in the report",
           "The best checkpoint is chosen by the times near the image, where a model that memorises looks worse.",
           FLOW_SYSTEM, f"early, late = {_HALVES}", f"late, early = {_HALVES}"),
    _fault("data", "easy", "images flipped upside down",
           "Half of the images that are trained on stand on their head, and so do the samples.",
           IMAGES, _MIRRORED, _UPSIDE_DOWN, "data.flip=true"),
    _fault("objective", "hard", "target not limited near the image",
           "At times above 0.95 the output is divided by the floor and its target is not: the best output is no image there.",
           FLOW_OBJECTIVE, "target = velocity_BCHW * _over_images(gap_B / gap_B.clamp_min(MIN_GAP))", "target = velocity_BCHW",
           "model.t_distribution=uniform"),
    _fault("objective", "medium", "offset of the strata drawn for every item",
           "A step no longer covers all times: the loss is as noisy as without strata.",
           FLOW_DATA, "rng.keys(seed, index_B // strata, _STRATUM)", "rng.keys(seed, index_B, _STRATUM)"),
    _fault("model", "medium", "rows and columns of patches by the number of rows",
           "In images that are not square the positions of patches run on over the edges: neighbours have distant positions.",
           PATCHIFY, "torch.stack((at // columns, at % columns), dim=1)", "torch.stack((at // rows, at % rows), dim=1)",
           "data.width=24"),
]  # fmt: skip

# ---- world -------------------------------------------------------------------------------------------------------------

_fault = partial(unseen, WORLD)
PLAYER, METRICS, WORLD_DATA, WORLD_OBJECTIVE, WORLD_MODEL, STAGES = (
    f"seedbed/recipes/world/{n}.py" for n in ("player", "metrics", "data", "objective", "model", "curriculum")
)
RECORDING = "seedbed/recipes/world/recording/recording.py"
_CONTROLS = """self._actions[-1] = rollout.applied_A if self.of == "simulator" else rollout.action_A
        self._commands[-1] = rollout.action_A
"""

WORLD_FAULTS = [
    _fault("inference", "medium", "a replayed recording is one control ahead",
           "Beside the recording the model gets the control of the next frame: its rollouts seem to drift from the truth.",
           PLAYER, "np.array(self.recording.actions_TA[self.at])", "np.array(self.recording.actions_TA[self.at + 1])"),
    _fault("inference", "hard", "play moves the camera by unscaled controls",
           "In play the tracked pose hardly moves, and the scene stays behind the picture; evaluations do not show it.",
           PLAYER, "self.player.system.advance(self.memory, self.scaled(action_A), frame_13HW)",
           "self.player.system.advance(self.memory, torch.from_numpy(action_A[None]).to(self.player.device), frame_13HW)"),
    _fault("inference", "medium", "played recordings keep a control with the frame it led to",
           "A model that is trained on a played recording learns every control one frame late.",
           PLAYER, f"{_CONTROLS}        self._take(rollout)", f"self._take(rollout)\n        {_CONTROLS.rstrip()}"),
    _fault("evaluation", "easy", "PSNR as if pixels had a range of one",
           "All PSNR values are 6 dB lower than those of others on the same data.",
           METRICS, "- target_BCHW).div(2).square().flatten(1).mean(1)", "- target_BCHW).square().flatten(1).mean(1)"),
    _fault("data", "medium", "strong controls clipped to their usual size",
           "The strongest twentieth of all controls look like weaker ones: fast turns are predicted too slow.",
           RECORDING, "- shift_A, -CLIP, CLIP)", "- shift_A, -1.0, 1.0)"),
    _fault("data", "hard", "windows hold the poses of the following frames",
           "In training the tracked pose is one frame ahead of the memory, in evaluation and play it is not.",
           WORLD_DATA, "flat_poses(recording)[self.low : high]", "flat_poses(recording)[self.low + 1 : high + 1]"),
    _fault("objective", "easy", "network is not told the noise of its memory",
           "The noise level is always given as 0: the network distrusts clean frames, and the level in play has no effect.",
           WORLD_OBJECTIVE, "return level_B * noisy_B, (level_B", "return torch.zeros_like(level_B), (level_B"),
    _fault("model", "medium", "pixels transported along rows only",
           "When the view moves up or down, pixels cannot follow, and rollouts blur.",
           WORLD_MODEL, "transport(x_BCHW, rows[2 * n + 1], stride, 2)", "transport(x_BCHW, rows[2 * n + 1], stride, 3)"),
    _fault("loop", "medium", "one evaluation moves the stage at every step",
           "After the first good evaluation rollouts have their full length within three steps, and training becomes unstable.",
           STAGES, "self.before, self.latest = self.latest, None", "self.before = self.latest"),
]  # fmt: skip

# ---- thinker -----------------------------------------------------------------------------------------------------------

_fault = partial(unseen, THINKER)
THINKER_SYSTEM, EVALUATE, ADDITION, LENGTHS, BATCH_SETTINGS, THINKER_MODEL = (
    f"seedbed/recipes/thinker/{n}.py" for n in ("system", "evaluate", "addition", "curriculum", "batch_settings", "model")
)
UNIFORM = "data.curriculum.kind=uniform"

THINKER_FAULTS = [
    _fault("inference", "easy", "prompts are answered after the fewest steps",
           "`seedbed sample` answers after one step instead of four and is wrong more often than evaluations say.",
           THINKER_SYSTEM, '(wanted["steps"] or self.steps.high,)', '(wanted["steps"] or self.steps.low,)'),
    _fault("evaluation", "medium", "all draws of noise are the same",
           "The spread over draws is 0, two draws always agree and a vote gains nothing: the answers seem stable.",
           EVALUATE, "stream=EVALUATION + inference.draw", "stream=EVALUATION"),
    _fault("evaluation", "easy", "evaluation with the lengths of training",
           "Exact match is that of samples of all lengths, most of them shorter and easier than it says.",
           EVALUATE, "NUM_QUICK[device.type], source.at(source.task.length)", "NUM_QUICK[device.type], source", UNIFORM),
    _fault("data", "hard", "a pair is held out in one order only",
           "Sums that count as never seen were trained on with their operands exchanged.",
           ADDITION, "number = torch.minimum(a, b) << 31 | torch.maximum(a, b)", "number = a << 31 | b",
           "data.task=add", "data.base=10", "data.max_value=100", "data.held=0.2"),
    _fault("data", "easy", "the longest samples are never drawn",
           "Training stops one symbol short of the length that is asked for and evaluated.",
           LENGTHS, "drawn_B = 1 + (word_B2[..., 0] * limit >> 32)", "drawn_B = (word_B2[..., 0] * limit >> 32).clamp_min(1)",
           UNIFORM),
    _fault("objective", "medium", "first steps weigh more than the last",
           "A base above 1 should stress late steps; now the answer after one step is trained most, and later ones hardly.",
           BATCH_SETTINGS, "config.loss.base ** (step - steps.high)", "config.loss.base ** (steps.high - step)",
           "model.loss.base=2"),
    _fault("model", "medium", "mask of the padding is one token off",
           "The last symbol of a shorter sample is hidden and a padding token is read instead.",
           THINKER_MODEL, ".to(rows_BCD.dtype), (1, after))", ".to(rows_BCD.dtype), (after, 1))", UNIFORM),
    _fault("loop", "hard", "micro-batches weigh the same whatever they hold",
           "With accumulation a micro-batch of short samples counts as much as one of long ones: another loss is minimised.",
           ENGINE, "list((counts_K / total.clamp_min(1.0)).unbind())", "list((torch.ones_like(counts_K) / len(counts)).unbind())",
           UNIFORM, "accum=4"),
]  # fmt: skip

# ---- ebt ---------------------------------------------------------------------------------------------------------------

_fault = partial(unseen, EBT)
EBT_MODEL, OPTIMIZE, CURVES, REPLAY, EBT_OBJECTIVE = (
    f"seedbed/recipes/ebt/{n}.py" for n in ("model", "optimize", "evaluate", "optimize", "objective")
)

EBT_FAULTS = [
    _fault("inference", "medium", "a generated token is predicted at the place of the last",
           "In generation predictions stand one position too early, and text is worse than the loss says.",
           EBT_MODEL, "Context(keys, values, self.rope(cache.length_B[:, None]), layers[0].mask)",
           "Context(keys, values, self.rope(cache.length_B[:, None] - 1), layers[0].mask)"),
    _fault("inference", "hard", "landscapes start again after the last",
           "With more steps than trained, every second step descends the first landscape: more steps make predictions worse.",
           OPTIMIZE, "return min(number, len(contexts) - 1)", "return number % len(contexts)"),
    _fault("evaluation", "medium", "energies in the curves are those before the step",
           "The choice by lowest energy and its correlation with the loss use energies of one step earlier.",
           CURVES, "if done in steps:", "if done + 1 in steps:"),
    _fault("data", "medium", "replayed predictions get the tokens of the batch",
           "Partly optimised predictions are paired with another context and with targets they were not made for.",
           REPLAY, "self.tokens_RL[slot_h], tokens_BL[:num])", "tokens_BL[:num], tokens_BL[:num])",
           "model.mcmc.replay_buffer=32"),
    _fault("objective", "medium", "gradient of the logits without the softmax's second term",
           "Steps are not those of the gradient with respect to logits: what is reported for space=logit is another method.",
           OPTIMIZE, "return p_BTV * (grad_BTV - (p_BTV * grad_BTV).sum(-1, keepdim=True))", "return p_BTV * grad_BTV",
           "model.mcmc.space=logit"),
    _fault("objective", "hard", "random step sizes are never below alpha",
           "Training sees steps half as large again as those of evaluation and generation, on average.",
           EBT_OBJECTIVE, "low, high = 1.0 / config.random_alpha, config.random_alpha", "low, high = 1.0, config.random_alpha",
           "model.mcmc.random_alpha=2", "model.mcmc.learn_alpha=false"),
    _fault("loop", "easy", "parameters without weight decay decay all the same",
           "Embeddings that are declared without weight decay shrink in every step.",
           OPTIM, 'wants_decay = kind != "scalar" and param.ndim >= 2 if decay is None else decay',
           'wants_decay = bool(decay) or (kind != "scalar" and param.ndim >= 2)'),
]  # fmt: skip

FAULTS = [*GPT_FAULTS, *FLOW_FAULTS, *WORLD_FAULTS, *THINKER_FAULTS, *EBT_FAULTS]
