"""The second implementations of tests/definitions can fail: faults of every place differ from them."""

import pytest
from catalogue_later import FAULTS as LATER
from catalogue_unseen import FAULTS as UNSEEN
from definitions.compare import compared

VIOLATE = {
    "nucleus leaves out the token that reaches p", "fused matrices orthogonalised as one", "bits per byte are nats",
    "a full context goes on from the beginning of the text", "branches that are kept are not scaled up",
    "offset of the strata drawn for every item", "early and late times exchanged in the report", "images flipped upside down",
    "gradient of the logits without the softmax's second term", "a pair is held out in one order only",
    "mask of the padding is one token off", "PSNR as if pixels had a range of one", "pixels transported along rows only",
    "mean and spread of the times exchanged", "errors of images averaged as if they were those of times",
    "attention scaled by the number of heads", "input tokens have no position", "all samples have the same initial noise",
    "noise is put on predicted memories instead of true ones", "play begins at the pose of the frame before",
}  # fmt: skip
FAULTS = [fault for fault in (*UNSEEN, *LATER) if fault.id in VIOLATE]


def test_faults_exist():
    assert {fault.id for fault in FAULTS} == VIOLATE


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_fault_differs_from_its_definition(fault):
    frames = ("data.frames=600",) if fault.recipe == "world/demo" else ()
    with fault.apply():
        found = compared(fault.recipe, *frames, *fault.settings)
    assert any(found.values())
