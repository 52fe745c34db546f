"""Faults written without knowledge of the checks: inference, evaluation, data pairing, stages, and settings that interact.

Each has a difficulty and a sentence on the harm to the user. `expected` was added later, by the definitions of the checks alone.
"""

from dataclasses import dataclass
from functools import partial

from catalogue import apart
from patching import Fault, edited

GPT, FLOW, EBT, THINKER, WORLD = "gpt/demo", "flow/demo", "ebt/demo", "thinker/demo", "world/demo"
DENOISE = "ebt/denoise-shapes"
SMALL_DENOISER = ("model.depth=2", "model.width=64", "model.heads=2")


# The checks whose definition a fault violates.
EXPECTED = {
    "temperature multiplies the logits": "I6",
    "text is returned one token late": "I2",
    "prompts of a batch share the longest length": "I1 I2",
    "new token hidden from itself in the cache": "I1 I2",
    "exported model is loaded in training mode": "I6 I7",
    "sampling noise broadcast over rows": "I6",
    "rotary positions rounded to bfloat16": "M8",
    "last batch of the split is not scored": "V2 V3",
    "offset of the blocks drawn once": "D7 D8",
    "random blocks from the beginning of the text only": "D2 D8",
    "every micro-batch is the first one": "D7 D8",
    "unknown characters become the first id": "D4 D6",
    "soft cap only in the training loss": "I1 V2",
    "cooldown begins where it should end": "O5",
    "image turned into a velocity by the time": "L2 I3",
    "class dropout follows the time": "T3 I4",
    "dropped classes become the last class": "I4",
    "guidance away from the class": "I4",
    "noise repeats from batch to batch of samples": "I3 I6",
    "averaged weights are not loaded": "I2 O7",
    "classes repeated in another order than images": "V2 V4",
    "classifier from disk is left in training mode": "I6 V1 V3 V5",
    "Fréchet distance without a factor of two": "V4 V8",
    "held-out images are trained on": "D2",
    "classes of the first rows for any images": "D4 D7",
    "class tokens overlap": "C3 M7",
    "no second-order gradient": "C6 O2",
    "the same Langevin noise at every step": "T3",
    "gradients never pass more than one step": "A2 C6",
    "replayed predictions belong to other contexts": "D7 M4",
    "test pairs of shape and colour are trained on": "D2",
    "replay buffer is never marked as filled": "M7 O2",
    "one-step predictions are reported as the result": "C9 V2",
    "baseline trained on the validation part": "D2 V4 V6",
    "best-of keeps the worst prediction": "I3 I6",
    "padding is part of the loss": "L1 L3",
    "target stream sees its own answer": "C1 C2",
    "length limit of the curriculum read once": "T5",
    "padded strings are reversed as a whole": "C2",
    "age of a stage restarts with every window": "T5",
    "one right token counts as an exact match": "V4 V7",
    "evaluation after the fewest steps": "C9 V2",
    "typed sums are padded on the other side": "I2",
    "memory shows its oldest entries first": "C9",
    "training uses the control after the frame": "C8 D1",
    "windows cross the ends of episodes": "D2 D8",
    "rollouts are compared with the frame before": "C8 V4",
    "rollouts are fed the true frames": "C8 I2 V4",
    "closed loop trains on true frames": "C8 T5",
    "radiance field's own loss is reported and not trained": "L0 L4",
    "generator tries to look false": "L4",
    "diffusion loss without its weighting": "L0 L6",
    "evaluation results recorded in the wrong order": "T5",
    "new frames enter the memory as the oldest": "C8 I2",
    "coarse memories never advance": "C8 I2",
    "player passes controls in recorded units": "I2 I8",
    "Euler steps not divided by the noise level": "I3",
    "poses integrate scaled controls": "C8 D1",
    "frames stand still unless every control moves": "C3 M7",
    "learning-rate factors of parameters ignored": "O5",
}


@dataclass(frozen=True)
class BlindFault(Fault):
    """`difficulty` is easy, medium or hard; `harm` says what goes wrong for the user."""

    difficulty: str = ""
    harm: str = ""


def blind(
    recipe: str, place: str, difficulty: str, id: str, harm: str, file: str, old: str, new: str, *settings: str
) -> BlindFault:
    """One edit: `old`, which must stand in the file exactly once, becomes `new`. It matters with these settings."""
    return BlindFault(
        id, recipe, place, set(EXPECTED[id].split()), lambda: edited(file, old, new), file, settings, difficulty, harm
    )


DECODING, LAYERS = "seedbed/nn/decoding.py", "seedbed/nn/layers.py"
FEED, TEXT, TOKENIZERS, IMAGES, IMAGE_STORE = (
    f"seedbed/data/{n}.py" for n in ("feed", "text", "tokenizers", "image_source", "image_store")
)
OPTIM = "seedbed/train/optim.py"
INFERENCE = "seedbed/train/inference_weights.py"

# ---- gpt ---------------------------------------------------------------------------------------------------------------

_fault = partial(blind, GPT)
GPT_MODEL = "seedbed/recipes/gpt/model.py"
_LENGTHS = "self.cache.length_B[rows_N] = torch.tensor(sizes, device=tokens_NT.device)"
_PARTS = "{name: value[k * self.size : (k + 1) * self.size] for name, value in self.values.items()}"
_READ_OUT = "return self.head.logits(x_BTC, self.head_weight)[..., : self.vocab]"

GPT_FAULTS = [
    _fault("inference", "easy", "temperature multiplies the logits",
           "A low temperature makes samples wilder and a high one makes them dull.",
           DECODING, "logits_BV.float() / sampling.temperature", "logits_BV.float() * sampling.temperature"),
    _fault("inference", "easy", "text is returned one token late",
           "A completion repeats the last token of its prompt and loses its own last token.",
           DECODING, "newest_BN = (self.count_B - count)[:, None]", "newest_BN = (self.count_B - count - 1)[:, None]"),
    _fault("inference", "hard", "prompts of a batch share the longest length",
           "In a batch of prompts the shorter ones attend to padding and are continued from the wrong position.",
           DECODING, _LENGTHS, "self.cache.length_B[rows_N] = tokens_NT.shape[1]"),
    _fault("inference", "medium", "new token hidden from itself in the cache",
           "Cached generation predicts each token without its newest input, so text is worse than the loss says.",
           DECODING, "(slots_T > self.length_B[:, None])", "(slots_T >= self.length_B[:, None])"),
    _fault("inference", "medium", "exported model is loaded in training mode",
           "An exported model that was trained with dropout drops activations at inference: its answers are random and worse.",
           INFERENCE, "engine.system.eval(), f", "engine.system, f", "model.dropout=0.2"),
    _fault("runtime", "medium", "sampling noise broadcast over rows",
           "All samples of one prompt are the same text, because one row of noise is shared by the batch.",
           DECODING, "torch.empty_like(logits_BV).exponential_", "torch.empty_like(logits_BV[:1]).exponential_"),
    _fault("runtime", "hard", "rotary positions rounded to bfloat16",
           "Beyond 256 tokens neighbouring positions become equal, and long contexts lose the order of their tokens.",
           LAYERS, "positions[..., None, None].to(dtype)", "positions[..., None, None].to(torch.bfloat16).to(dtype)",
           "data.block=512"),
    _fault("evaluation", "easy", "last batch of the split is not scored",
           "The incomplete last batch is dropped while the sum is still divided by all targets: the loss looks lower than it is.",
           TEXT, "for start in range(0, whole, batch):", "for start in range(0, whole - batch + 1, batch):"),
    _fault("data", "hard", "offset of the blocks drawn once",
           "Block borders stay where they were in the first epoch, so tokens at the border never get a longer context.",
           TEXT, "if epoch != self._epoch:", "if self._epoch < 0:"),
    _fault("data", "medium", "random blocks from the beginning of the text only",
           "Starts are drawn among the number of blocks, not of tokens: most of the text is never trained on.",
           TEXT, "np.uint64(len(self.tokens) - self.block)", "np.uint64(self.num_items)", "data.mode=random"),
    _fault("data", "easy", "every micro-batch is the first one",
           "With accumulation most of each batch is thrown away and its first part is counted several times.",
           FEED, _PARTS, _PARTS.replace("k * self.size : (k + 1) * self.size", ": self.size"), "accum=4"),
    apart(_fault("data", "medium", "unknown characters become the first id",
                 "Brackets and all other characters outside of the table are stored as line ends.",
                 TOKENIZERS, "ids[missing] = len(self.table)", "ids[missing] = 0", "data.tokenizer=char75", "data.unknown=unk")),
    _fault("model", "hard", "soft cap only in the training loss",
           "The model is trained with capped logits and evaluated and sampled without the cap.",
           GPT_MODEL, _READ_OUT, "return F.linear(self.head.norm(x_BTC), self.head_weight)[..., : self.vocab]",
           "model.softcap=15"),
    _fault("optimizer", "easy", "cooldown begins where it should end",
           "The learning rate decays too late and never reaches its floor.",
           OPTIM, "progress - (1.0 - schedule.decay)", "progress - schedule.decay"),
]  # fmt: skip

# ---- flow --------------------------------------------------------------------------------------------------------------

_fault = partial(blind, FLOW)
FLOW_SYSTEM, FLOW_DATA, FLOW_MODEL, FLOW_OBJECTIVE, FLOW_SAMPLING, FLOW_EVALUATE, FLOW_CLASSIFIER = (
    f"seedbed/recipes/flow/{n}.py" for n in ("system", "data", "model", "objective", "sampling", "evaluate", "classifier")
)
_SPLIT = "return shuffled_N[~held_N[shuffled_N]], shuffled_N[held_N[shuffled_N]]"
_PICKED = 'self.arrays["class"][rows_N].astype(np.int64)'

FLOW_FAULTS = [
    _fault("objective", "easy", "image turned into a velocity by the time",
           "A network that predicts the image is divided by t instead of 1 - t, in the loss and in the sampler.",
           FLOW_OBJECTIVE, "_over_images((1.0 - time_B).clamp_min(MIN_GAP))", "_over_images(time_B.clamp_min(MIN_GAP))"),
    _fault("objective", "hard", "class dropout follows the time",
           "Classes are dropped at the smallest times only, so the unconditional half of guidance is untrained elsewhere.",
           FLOW_DATA, "rng.keys(seed, index_B, _DROP)", "rng.keys(seed, index_B, _TIME)", "model.stratified=false"),
    _fault("objective", "medium", "dropped classes become the last class",
           "The last class learns the unconditional model, and guidance uses a null class that was never trained.",
           FLOW_SYSTEM, "shape.drop, data.num_classes)", "shape.drop, data.num_classes - 1)"),
    _fault("inference", "easy", "guidance away from the class",
           "Conditional and unconditional halves are exchanged: guidance above 1 pushes samples away from their class.",
           FLOW_SAMPLING, "conditional, unconditional = velocity_at(", "unconditional, conditional = velocity_at("),
    _fault("inference", "hard", "noise repeats from batch to batch of samples",
           "Beyond 128 samples on a CPU every batch starts from the same noise, so metrics count near copies.",
           FLOW_SAMPLING, "draw_noise(index_B, seed, model.shape)", "draw_noise(index_N[: len(class_B)], seed, model.shape)"),
    _fault("inference", "medium", "averaged weights are not loaded",
           "`seedbed sample` shows the live weights of a run whose evaluations used the average.",
           INFERENCE, 'if "ema" in saved.tensors:', 'if "ema" in saved.tensors and engine.ema:'),
    _fault("evaluation", "medium", "classes repeated in another order than images",
           "Evaluation gives images the classes of others, so the loss of a good model does not fall with its conditioning.",
           FLOW_SYSTEM, "class_N.to(device).repeat_interleave(NUM_TIMES)", "class_N.to(device).repeat(NUM_TIMES)"),
    _fault("evaluation", "medium", "classifier from disk is left in training mode",
           "Scores depend on the other images of the batch, and every scored batch changes the running statistics.",
           FLOW_CLASSIFIER, "return classifier.to(device).eval().requires_grad_(False)",
           "return classifier.to(device).requires_grad_(False)"),
    _fault("evaluation", "easy", "Fréchet distance without a factor of two",
           "Two equal sets of images have a distance far above 0, and runs cannot be compared with published numbers.",
           FLOW_EVALUATE, "cov_b.trace() - 2 * cross", "cov_b.trace() - cross"),
    _fault("data", "medium", "held-out images are trained on",
           "The mask of one part is applied to the shuffled order: most validation images are in the training part too.",
           IMAGE_STORE, _SPLIT, _SPLIT.replace("[~held_N[shuffled_N]]", "[~held_N]")),
    _fault("data", "medium", "classes of the first rows for any images",
           "Images that are picked for evaluation and for the classifier come with the classes of the first rows.",
           IMAGES, _PICKED, _PICKED.replace("rows_N", ": len(rows_N)")),
    _fault("model", "medium", "class tokens overlap",
           "With several tokens for a class, neighbouring classes share most of them and are mixed up.",
           FLOW_MODEL, "class_B[:, None] * num + torch.arange", "class_B[:, None] + torch.arange", "model.context_tokens=4"),
]  # fmt: skip

# ---- ebt ---------------------------------------------------------------------------------------------------------------

_fault = partial(blind, EBT)
EBT_MODEL, EBT_SYSTEM, EBT_OBJECTIVE, EBT_OPTIMIZE, EBT_GENERATE, EBT_EVALUATE = (
    f"seedbed/recipes/ebt/{n}.py" for n in ("model", "system", "objective", "optimize", "generate", "evaluate")
)
DENOISE_DATA, DENOISE_SYSTEM = (f"seedbed/recipes/ebt/{n}.py" for n in ("data", "denoise/system"))
_KNOWN_PAIRS = "train, valid = (_only(source, config, held, False) for source in (data.train, data.valid))"

EBT_FAULTS = [
    _fault("objective", "easy", "no second-order gradient",
           "The gradient of the energy has no graph: only the step size learns, and no weight of the network.",
           EBT_MODEL, "(energy_BT.sum(), at_BTV, create_graph=goes_on)", "(energy_BT.sum(), at_BTV)"),
    _fault("objective", "medium", "the same Langevin noise at every step",
           "The noise of the first step is added again and again: predictions drift instead of exploring.",
           EBT_OBJECTIVE, "noise(counter_BT, NOISE + number)", "noise(counter_BT, NOISE)", "model.mcmc.langevin_noise=1"),
    _fault("objective", "hard", "gradients never pass more than one step",
           "`backprop_through=all` is read and has no effect: earlier steps are not trained towards the last one.",
           EBT_OBJECTIVE, 'z_BTV = z_BTV if config.backprop_through == "all" else stop_gradient(z_BTV)', "z_BTV = z_BTV.detach()",
           "model.mcmc.backprop_through=all", "model.mcmc.loss=last"),
    _fault("data", "hard", "replayed predictions belong to other contexts",
           "The replay buffer stores the predictions of some rows with the tokens of others.",
           EBT_OPTIMIZE, "= batch.tokens_BL[:num]", "= batch.tokens_BL[-num:]", "model.mcmc.replay_buffer=32"),
    blind(DENOISE, "data", "medium", "test pairs of shape and colour are trained on",
          "The test split of pairs that training never shows is part of the training data.",
          DENOISE_DATA, _KNOWN_PAIRS, "train, valid = data.train, _only(data.valid, config, held, False)", *SMALL_DENOISER),
    _fault("runtime", "medium", "replay buffer is never marked as filled",
           "The fill is not in place: nothing is ever replayed, and half of each batch is counted twice instead.",
           EBT_OPTIMIZE, "self.known_R.index_fill_(0, slot_B, True)", "self.known_R.index_fill(0, slot_B, True)",
           "model.mcmc.replay_buffer=32"),
    _fault("evaluation", "medium", "one-step predictions are reported as the result",
           "The reported nats and the best checkpoint ignore all optimisation steps after the first.",
           EBT_SYSTEM, "return {**evaluate.report(nats[-1], source)", "return {**evaluate.report(nats[0], source)"),
    _fault("evaluation", "hard", "baseline trained on the validation part",
           "The plain transformer at the end of a run has seen the text that it is scored on, and the energy model looks worse.",
           EBT_EVALUATE, "Stepper(engine, data.train)", "Stepper(engine, data.valid)"),
    _fault("inference", "easy", "best-of keeps the worst prediction",
           "`--best-of N` picks the prediction of highest energy, so more samples make the text worse.",
           EBT_GENERATE, "self.energy_BN.argmin(-1, keepdim=True)", "self.energy_BN.argmax(-1, keepdim=True)"),
]  # fmt: skip

# ---- thinker -----------------------------------------------------------------------------------------------------------

_fault = partial(blind, THINKER)
THINKER_MODEL, THINKER_SYSTEM, THINKER_TASK, THINKER_CURRICULUM, THINKER_EVALUATE, THINKER_SHOW = (
    f"seedbed/recipes/thinker/{n}.py" for n in ("model", "system", "task", "curriculum", "evaluate", "show")
)
UNIFORM, GATED = "data.curriculum.kind=uniform", "data.curriculum.kind=gated"
SUMS = ("data.task=add", "data.max_value=64")
_NATS = "nats_S = (nats_SBM * learn_BM).sum((-2, -1)) / learn_BM.sum().clamp_min(1.0)"

THINKER_FAULTS = [
    _fault("objective", "hard", "padding is part of the loss",
           "With samples of several lengths the mean runs over all positions: much of the loss is about predicting padding.",
           THINKER_MODEL, _NATS, "nats_S = nats_SBM.mean((-2, -1))", UNIFORM),
    _fault("objective", "easy", "target stream sees its own answer",
           "Targets are not shifted after BOS: every position but the first copies its answer, and accuracy means nothing.",
           THINKER_MODEL, "self.sizes.bos), y_BM[:, :-1]), 1)", "self.sizes.bos), y_BM[:, 1:]), 1)",
           "data.task=mirrored", "model.target_stream=only"),
    _fault("data", "hard", "length limit of the curriculum read once",
           "The curriculum reports promotions while training goes on with samples of the first length.",
           THINKER_SYSTEM, "self.source.limit = lambda: curriculum.limit(self.stage)",
           "longest = curriculum.limit(self.stage)\n            self.source.limit = lambda: longest",
           GATED, "data.curriculum.start=2"),
    _fault("data", "medium", "padded strings are reversed as a whole",
           "Answers of samples below the full length are symbols that are not in the input, so they cannot be learned.",
           THINKER_TASK, "return x_BN.gather(-1, (length_B1 - 1 - position_M).clamp_min(0))", "return x_BN.flip(-1)", UNIFORM),
    _fault("loop", "medium", "age of a stage restarts with every window",
           "With a window shorter than `min_steps` no stage is ever old enough, and training stays at the first length.",
           THINKER_CURRICULUM, "age=torch.where(passed, 0, age)", "age=torch.where(full, 0, age)",
           GATED, "data.curriculum.window=50", "data.curriculum.min_steps=100"),
    _fault("evaluation", "easy", "one right token counts as an exact match",
           "Exact match is near 100 % for a model that knows almost nothing, and selects the best checkpoint.",
           THINKER_EVALUATE, "right_SBM.all(-1).sum(-1)", "right_SBM.any(-1).sum(-1)"),
    _fault("evaluation", "easy", "evaluation after the fewest steps",
           "Accuracy is measured after the shortest of the trained numbers of steps and is reported as that of the model.",
           THINKER_EVALUATE, "(system.latents.high, (system.steps.high,), draw)",
           "(system.latents.high, (system.steps.low,), draw)"),
    _fault("inference", "hard", "typed sums are padded on the other side",
           "`seedbed sample --prompt` gives wrong sums for a model that adds correctly: its input is padded on the right.",
           THINKER_SHOW, "padded = [*fill, *x] if isinstance(task, Addition) else [*x, *fill]", "padded = [*x, *fill]", *SUMS),
    _fault("model", "medium", "memory shows its oldest entries first",
           "Until the memory is full, lookups see empty entries and not what was just written.",
           THINKER_MODEL, "age_W = torch.arange(num_slots, 0, -1, device", "age_W = torch.arange(1, num_slots + 1, device",
           "model.program=everything"),
]  # fmt: skip

# ---- world -------------------------------------------------------------------------------------------------------------

_fault = partial(blind, WORLD)
WORLD_DATA, WORLD_MODEL, WORLD_OBJECTIVE, EMULATOR, CURRICULUM, MEMORY, CRITIC, EVALUATE, PLAYER, FIELD, EDM = (
    f"seedbed/recipes/world/{n}.py"
    for n in (
        "data", "model", "objective", "emulator", "curriculum", "memory", "critic", "evaluate", "player", "radiance_field", "edm"
    )
)  # fmt: skip
RECORDING = "seedbed/recipes/world/recording/recording.py"
DIFFUSION, ADVERSARIAL = "model.kind=edm", "model.adversarial=0.5"
_WINDOW = "return Window(memory, rows.action_BTA[newest],"
_ROLLOUT_STEP = "system.rollout_step(memory, action_BA, traj.index_B, step, level)"
_FREE_RUN = f"memory = {_ROLLOUT_STEP}\n        yield step, memory.last"
_FED_TRUE = (
    f"frame = {_ROLLOUT_STEP}.last\n        fed = frame if actions is not None else traj.target(step)\n"
    "        memory = system.advance(memory, action_BA, fed)\n        yield step, frame"
)
_KEPT = "self.frames_PTHWC[torch.arange(num, device=rows.age_B.device), rows.age_B + before] = to_bytes(frame_P3HW)\n"
_PUSHED = "torch.cat((old_BMHW[:, 3:], new[name]), dim=1)"
_EDM_LOSS = "loss_B = (outputs - (window.target_B3HW - by.skip * noisy) / by.out).square()"

WORLD_FAULTS = [
    _fault("data", "easy", "training uses the control after the frame",
           "Each frame is predicted from the control of the next step: the model learns to ignore controls or answers late.",
           WORLD_OBJECTIVE, _WINDOW, "return Window(memory, rows.action_BTA[row_B1[:, 0], from_B + before],"),
    _fault("data", "medium", "windows cross the ends of episodes",
           "Some windows continue in another episode, where the scene jumps without a control.",
           RECORDING, "broken_T = self.last_T | (self.dt_T > ", "broken_T = (self.dt_T > "),
    _fault("evaluation", "easy", "rollouts are compared with the frame before",
           "PSNR is measured against the frame that precedes the predicted one: copying the input looks perfect.",
           EVALUATE, "return self.frames_BTCHW[:, self.before - 1 + step]",
           "return self.frames_BTCHW[:, self.before - 2 + step]"),
    _fault("evaluation", "easy", "rollouts are fed the true frames",
           "Free-running numbers are those of single steps: drift is not seen, and the closed loop begins too early.",
           EVALUATE, _FREE_RUN, _FED_TRUE),
    _fault("objective", "hard", "closed loop trains on true frames",
           "Predicted frames are never stored: the closed-loop stage repeats the open loop, and long rollouts drift.",
           WORLD_OBJECTIVE, _KEPT, "\n"),
    _fault("objective", "medium", "radiance field's own loss is reported and not trained",
           "`loss_map` is logged but moves nothing, so the rendered scene stays wrong under the U-net.",
           EMULATOR, "return error + mapped", "return error"),
    _fault("objective", "medium", "generator tries to look false",
           "The adversarial loss has the critic's sign: the generator makes frames that the critic rejects.",
           CRITIC, "return F.softplus(real_B - fake_B).mean()", "return F.softplus(fake_B - real_B).mean()", ADVERSARIAL),
    _fault("objective", "hard", "diffusion loss without its weighting",
           "The error of the denoised frame is not divided by c_out: low noise levels, which make frames sharp, hardly count.",
           EDM, _EDM_LOSS, "loss_B = (clean - window.target_B3HW).square()", DIFFUSION),
    _fault("loop", "hard", "evaluation results recorded in the wrong order",
           "The curriculum takes the error for the effect of controls, finds it too small, and never leaves the open loop.",
           EMULATOR, 'found["listens"], found["free_l1"], found[', 'found["free_l1"], found["listens"], found['),
    _fault("inference", "easy", "new frames enter the memory as the oldest",
           "Rollouts and play predict from a memory in the wrong order, unlike training, and fall apart after one frame.",
           MEMORY, _PUSHED, "torch.cat((new[name], old_BMHW[:, :-3]), dim=1)"),
    _fault("inference", "hard", "coarse memories never advance",
           "In rollouts only the full-size memory moves on: the pyramid shows the first frames for ever.",
           MEMORY, _PUSHED, f"{_PUSHED} if name == 'm1' else old_BMHW", "model.pyramid=true"),
    _fault("inference", "medium", "player passes controls in recorded units",
           "In play the network gets unscaled controls and hardly moves, while evaluations are fine.",
           PLAYER, "self.player.predict(self.memory, self.scaled(action_A), index_1",
           "self.player.predict(self.memory, torch.from_numpy(np.float32(action_A[None])).to(self.player.device), index_1"),
    _fault("inference", "easy", "Euler steps not divided by the noise level",
           "Sampled frames keep several times the noise of their level, and rollouts become grey or noisy.",
           EDM, "(x - clean) * (there / here)", "(x - clean) * there", DIFFUSION),
    _fault("model", "easy", "poses integrate scaled controls",
           "Dead reckoning uses controls in network units: the tracked camera leaves the scene within a few steps.",
           FIELD, "motion_A6[names.index(name), n] = recording.axes[names.index(name)].scale",
           "motion_A6[names.index(name), n] = 1.0"),
    _fault("model", "easy", "frames stand still unless every control moves",
           "A static scene is held by the smallest control instead of the largest, so predictions copy the last frame.",
           WORLD_MODEL, "action_BA.abs().amax(1) / STILL", "action_BA.abs().amin(1) / STILL"),
    _fault("optimizer", "medium", "learning-rate factors of parameters ignored",
           "Planes and intrinsics of the radiance field learn five times too slowly, and the scene is not mapped in time.",
           OPTIM, "found[(algo, kind, lr * scale, base_decay", "found[(algo, kind, lr, base_decay"),
]  # fmt: skip

FAULTS = [*GPT_FAULTS, *FLOW_FAULTS, *EBT_FAULTS, *THINKER_FAULTS, *WORLD_FAULTS]
