"""Faults that the checks were not made for, by the check that finds them now, mostly of a definition, each with its file."""

import pytest
from catalogue_fresh import FAULTS as FRESH
from catalogue_guessed import FAULTS as GUESSED
from catalogue_later import FAULTS as LATER
from catalogue_unseen import FAULTS as UNSEEN
from patching import Fault, check

from seedbed.checks.registry import all_checks

FOUND_BY = {
    "D9": [
        "a pair is held out in one order only",
        "coarse memories start with the oldest frames",
        "images flipped upside down",
        "pixels divided by 128",
        "replayed predictions get the tokens of the batch",
        "strong controls clipped to their usual size",
        "the last symbol is never drawn",
        "the longest samples are never drawn",
        "training part reaches to the end of the text",
        "windows hold the poses of the following frames",
    ],
    "M10": [
        "all samples have the same initial noise",
        "attention scaled by the number of heads",
        "both axes of the rotary angles follow the row",
        "branches that are kept are not scaled up",
        "gates of attention open half way only",
        "input tokens have no position",
        "mask of the padding is one token off",
        "pixels transported along rows only",
        "predictions stand where the last token stands",
        "rows and columns of patches by the number of rows",
        "scale of the time left out of its features",
        "skips of a U-shaped model are crossed",
        "soft cap not multiplied back",
        "targets are shifted twice",
        "what is nearest to the camera does not count",
        "without control the oldest frame comes back",
    ],
    "L7": [
        "accuracy of training is that of the first step",
        "every frame of a rollout has the same noise",
        "first steps weigh more than the last",
        "gradient of the logits without the softmax's second term",
        "gradient penalty of the critic is reported and not trained",
        "landscapes start again after the last",
        "loss averaged over padded positions too",
        "mean and spread of the times exchanged",
        "network is not told the noise of its memory",
        "noise and time from the same random numbers",
        "noise is put on predicted memories instead of true ones",
        "offset of the strata drawn for every item",
        "one evaluation moves the stage at every step",
        "one right answer promotes to longer samples",
        "path from noise to image is curved",
        "predictions climb the energy",
        "random step sizes are never below alpha",
        "step size can only grow smaller",
        "target not limited near the image",
    ],
    "O8": [
        "Muon without the look ahead of Nesterov",
        "Nesterov's step mixes momentum and gradient the wrong way",
        "decays of the two moments exchanged",
        "fused matrices orthogonalised as one",
        "momentum weighs old and new gradients the wrong way round",
    ],
    "V9": [
        "PSNR as if pixels had a range of one",
        "all draws of noise are the same",
        "bits per byte are nats",
        "curves keep the prediction of highest energy",
        "early and late times exchanged in the report",
        "energies in the curves are those before the step",
        "errors of images averaged as if they were those of times",
        "evaluation reads controls in recorded units",
        "evaluation with the lengths of training",
        "every batch of evaluation has the same noise",
        "mean frame in another range",
        "padding counts in the nats of evaluation",
        "perplexity is a power of two",
        "positions that do not count are wrong answers",
        "probabilities of several predictions are added and not averaged",
        "teacher forcing from the first frames",
        "the rollout with shuffled controls has the true ones",
        "times of evaluation begin at pure noise",
    ],
    "I9": [
        "a replayed recording is one control ahead",
        "Gumbel noise with the wrong sign",
        "all rows begin with the same prediction",
        "level of noise in play ignored",
        "nucleus leaves out the token that reaches p",
        "play begins at the pose of the frame before",
        "play moves the camera by unscaled controls",
        "played recordings keep a control with the frame it led to",
        "shift moves the steps towards the image",
        "top-k keeps one token more",
    ],
    "T2": [
        "a resumed run starts its curriculum again",
        "roll-back forgets how often it has rolled back",
    ],
    "T3": ["number of optimisation steps drawn once"],
    "O4": ["metrics of a step are those of its last micro-batch"],
    "O7": ["average without a warm-up", "checkpoints hold the live weights as average"],
    "D7": ["counters of the blocks repeat every 64 samples"],
    "D2": ["validation part is the training part again"],
    "C2": ["carries are added to their own position"],
    "C6": ["gradients reach back one step less than asked"],
    "C8": ["rollouts never grow older"],
    "I1": ["newest token is hidden from its prediction"],
    "I3": ["preconditioning without the offset noise"],
    "I4": ["class dropout keeps the share that it should drop"],
    "L0": ["losses of the steps are summed"],
}
IDS = {fault: id for id, faults in FOUND_BY.items() for fault in faults}
FAULTS = [fault for fault in (*UNSEEN, *LATER, *GUESSED, *FRESH) if fault.id in IDS]
# One of each check, for every test run.
FAST = {FOUND_BY[id][0] for id in ("D9", "M10", "L7", "O8", "V9", "I9", "O4", "T3", "D7")}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def test_faults_and_checks_exist():
    assert {fault.id for fault in FAULTS} == {*IDS} and len(FAULTS) == len(IDS)
    assert {*FOUND_BY} <= {one.id for one in all_checks()}
    assert {fault.id for fault in (*GUESSED, *FRESH)} <= {*IDS}


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=[] if f.id in FAST else pytest.mark.slow, id=f"{f.recipe}: {f.id}") for f in FAULTS]
)
def test_fault_violates_a_definition_and_is_named_in_its_file(fault: Fault):
    frames = ("data.frames=600",) if fault.recipe == "world/demo" else ()
    run = lambda: check(fault.recipe, *frames, *fault.settings, only=[IDS[fault.id]]).findings[0]  # noqa: E731
    with fault.apply():
        found = run()
    assert found.alarm and "could not run" not in found.what and found.why and found.fix
    assert fault.file.rpartition("/")[2] in found.where
    assert run().status == "pass", "the fault outlived its patch"
