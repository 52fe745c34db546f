"""Faults written before the checks of definitions, to see whether these find more than the faults that they were made for."""

from functools import partial

from catalogue_blind import BlindFault
from catalogue_unseen import EBT, FLOW, GPT, THINKER, WORLD, unseen

LAYERS, LIKELIEST = (f"seedbed/nn/{n}.py" for n in ("layers", "likeliest"))
TEXT, IMAGES, OPTIM = "seedbed/data/text.py", "seedbed/data/image_source.py", "seedbed/train/optim.py"
FLOW_DATA, FLOW_SYSTEM, FLOW_MODEL = (f"seedbed/recipes/flow/{n}.py" for n in ("data", "system", "model"))
MEMORY, EVALUATE, FIELD, PLAYER = (f"seedbed/recipes/world/{n}.py" for n in ("memory", "evaluate", "radiance_field", "player"))
THINKER_MODEL, THINKER_EVALUATE = (f"seedbed/recipes/thinker/{n}.py" for n in ("model", "evaluate"))
EBT_MODEL, GENERATE, CURVES = (f"seedbed/recipes/ebt/{n}.py" for n in ("model", "generate", "evaluate"))
_BEFORE = "torch.ones_like(transmittance_BDHW[:, :1]), transmittance_BDHW[:, :-1]"

gpt, flow, world, thinker, ebt = (partial(unseen, recipe) for recipe in (GPT, FLOW, WORLD, THINKER, EBT))

FAULTS: list[BlindFault] = [
    gpt("model", "medium", "gates of attention open half way only",
        "Every gate starts at a half: attention is weaker than it was made to be, and deep models learn slowly.",
        LAYERS, "(2.0 * torch.sigmoid(self.gate(x_BTC)))", "torch.sigmoid(self.gate(x_BTC))", "model.gate=true"),
    gpt("inference", "easy", "top-k keeps one token more",
        "--top-k 1 is not greedy, and every setting draws from more tokens than was asked for.",
        LIKELIEST, "logits_BV.topk(sampling.top_k)", "logits_BV.topk(sampling.top_k + 1)"),
    gpt("evaluation", "easy", "perplexity is a power of two",
        "Nats are taken for bits: perplexities are far too low against those of others.",
        TEXT, "math.exp(min(per_token, 700.0))", "2.0 ** min(per_token, 700.0)"),
    gpt("optimizer", "hard", "Muon without the look ahead of Nesterov",
        "Updates follow the momentum alone: training is a little slower than it should be.",
        OPTIM, "torch.lerp(grad_kmn, momentum_kmn, self.optim.momentum)", "momentum_kmn.clone()"),
    flow("evaluation", "medium", "times of evaluation begin at pure noise",
         "All times are a sixteenth early, and losses are not comparable with those of other runs.",
         FLOW_SYSTEM, "% NUM_TIMES + 0.5) / NUM_TIMES", "% NUM_TIMES) / NUM_TIMES"),
    flow("data", "medium", "pixels divided by 128",
         "White is not 1 but 0.992: samples are clipped, and a model of other pixels is compared with them.",
         IMAGES, "mul_(1 / 127.5)", "mul_(1 / 128.0)"),
    flow("objective", "hard", "noise and time from the same random numbers",
         "The first pixels of the noise tell the time: training is easier than sampling, whose noise says nothing.",
         FLOW_DATA, "rng.keys(seed, index_B, _NOISE)", "rng.keys(seed, index_B, _TIME)"),
    flow("model", "medium", "scale of the time left out of its features",
         "Neighbouring times look the same to the network, and it cannot tell how much noise there is.",
         FLOW_MODEL, "scale * wide_B[:, None] * rates", "wide_B[:, None] * rates"),
    world("data", "medium", "coarse memories start with the oldest frames",
          "The coarse memory of a window is not the one that play and rollouts have.",
          MEMORY, "frames_BTCHW[:, -num:]", "frames_BTCHW[:, :num]", "model.pyramid=true"),
    world("evaluation", "medium", "teacher forcing from the first frames",
          "The error with true frames is measured from those of the first step: rollouts seem not to drift at all.",
          EVALUATE, "traj.memory(system, step), traj.action(step)", "traj.memory(system), traj.action(step)"),
    world("evaluation", "easy", "mean frame in another range",
          "The baseline of the mean frame is a grey one, and every model beats it.",
          EVALUATE, "data.mean_frame).movedim(-1, 0) / 127.5 - 1.0", "data.mean_frame).movedim(-1, 0) / 255.0"),
    world("model", "hard", "what is nearest to the camera does not count",
          "The first sample of a ray has no weight: near walls are transparent.",
          FIELD, _BEFORE, "transmittance_BDHW[:, :1], transmittance_BDHW[:, :-1]"),
    world("inference", "easy", "level of noise in play ignored",
          "The slider of the player changes nothing.",
          PLAYER, "self.scaled(action_A), index_1, turn, self.level)", "self.scaled(action_A), index_1, turn)"),
    thinker("loop", "hard", "accuracy of training is that of the first step",
            "The curriculum waits for answers after one step, which no amount of training makes right.",
            THINKER_MODEL, "(at_S == at_S.max())", "(at_S == at_S.clamp_min(1).min())", "model.n_step=1:4"),
    thinker("evaluation", "medium", "padding counts in the nats of evaluation",
            "The loss of evaluation is that of all positions divided by the number of targets.",
            THINKER_EVALUATE, "(nats_BM * keep_BM).sum())", "nats_BM.sum())", "data.curriculum.kind=uniform"),
    ebt("model", "medium", "predictions stand where the last token stands",
        "A prediction has the position of the token before it, in training and in generation of one context only.",
        EBT_MODEL, "self.rope(positions_T + more + 1)", "self.rope(positions_T + more)"),
    ebt("inference", "medium", "all rows begin with the same prediction",
        "Texts of one prompt are more alike than the model is, and an average over them gains less.",
        GENERATE, "counter_BT - 1 + (rows_B1 << 32)", "counter_BT - 1"),
    ebt("evaluation", "easy", "curves keep the prediction of highest energy",
        "Best-of seems to make predictions worse: the energy is said to be of no use.",
        CURVES, "energy_NP.argmin(0", "energy_NP.argmax(0"),
]  # fmt: skip
