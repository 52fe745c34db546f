"""A gated curriculum through the whole loop: promotions change the loss, and no guard raises an alarm."""

from pathlib import Path

from helpers import kinds, rows, start

SMALL = ["model.width=16", "model.heads=2", "model.n_latent=4", "model.n_step=2", "data.task=copy", "data.length=4", "batch=32"]
STAGES = ["kind=gated", "start=1", "threshold=0.9", "window=20", "min_steps=20"]
SHORT = ["steps=700", "schedule.kind=constant", "optim.lr=1e-2", "every.log=10", "every.eval=0", "data.test=0", "guard.window=16"]


def test_curriculum_promotions_are_no_spikes(tmp_path: Path) -> None:
    stages = [f"data.curriculum.{word}" for word in STAGES]
    assert start(tmp_path, "one", *SMALL, *stages, *SHORT, recipe="thinker/demo") == 0
    longest = [row["longest"] for row in rows(tmp_path, "one")]
    assert longest[0] == 1 and longest[-1] >= 3, longest
    assert not {"spike", "rollback"} & set(kinds(tmp_path, "one"))
