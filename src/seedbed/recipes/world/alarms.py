"""Alarms of the world recipe: controls ignored, drifting rollouts, an unbalanced critic."""

from collections.abc import Iterator

from seedbed.recipes.world.curriculum import BLIND
from seedbed.track import events
from seedbed.train.watch import Alarm

events.register(
    "warning",
    blind="predictions hardly depend on the controls",
    below_copy="predictions are worse than the persistence baseline",
    drift="rollouts lose sharpness",
    critic_balance="the critic is almost always right or wrong",
    critic_steep="the critic's gradient is too large",
)

# Share of the run after which controls must matter, and bounds of a healthy critic.
EARLY = 0.3
WON = (0.02, 0.98)
SHARP = (0.25, 2.5)
STEEP = 1e4


def world_alarms(measured: dict[str, float], evaluated: dict[str, float], progress: float) -> list[Alarm]:
    """Alarms from the metrics and the latest evaluation."""
    return [*_evaluation(evaluated, progress), *_critic(measured)]


def _evaluation(evaluated: dict[str, float], progress: float) -> Iterator[Alarm]:
    where = "evaluation on held-out windows"
    listens, copy, free, sharp = (evaluated.get(name) for name in ("listens", "copy_1", "free_1", "sharp_16"))
    if progress > EARLY and listens is not None and listens < BLIND:
        what = f"controls hardly matter: with shuffled controls the frame at 4 steps is {listens:.2f} dB worse (limit {BLIND:g})"
        why = "the network ignores its controls, and the loss does not show it"
        fix = "check the lag (seedbed data inspect), train the open loop longer (model.closed), or raise model.size"
        yield Alarm("blind", what, where, why, fix, {"listens": listens})
    if progress > EARLY and copy is not None and free is not None and free < copy:
        what = f"one frame ahead is worse than the persistence baseline: {free:.2f} dB against {copy:.2f} dB"
        fix = "train longer, or lower optim.lr or model.context_noise"
        facts = {"free_1": free, "copy_1": copy}
        yield Alarm("below_copy", what, where, "repeating the last frame would be better", fix, facts)
    if progress > 2 * EARLY and sharp is not None and not SHARP[0] <= sharp <= SHARP[1]:
        what = f"after 16 frames a rollout has {sharp:.2f} of the true sharpness (normal: {SHARP[0]:g} to {SHARP[1]:g})"
        why = "errors accumulate when the network runs on its own frames"
        fix = "train the closed loop longer (model.closed, model.rollout) or raise model.context_noise"
        yield Alarm("drift", what, where, why, fix, {"sharp_16": sharp})


def _critic(measured: dict[str, float]) -> Iterator[Alarm]:
    if not measured.get("loss_critic"):
        return
    where, won, steep = "the adversarial stage", measured.get("critic_won", 0.5), measured.get("r1", 0.0)
    if not WON[0] <= won <= WON[1] and abs(measured["critic_margin"]) > 4.0:
        what = f"the critic is right on {won:.0%} of pairs, by {measured['critic_margin']:.1f} on average"
        why = "a critic that always or never wins gives no useful gradient"
        yield Alarm("critic_balance", what, where, why, "change model.critic_lr, or raise model.gamma", {"critic_won": won})
    if steep > STEEP:
        what = f"the critic's squared gradient at real frames is {steep:.3g} (limit {STEEP:g})"
        yield Alarm(
            "critic_steep", what, where, "such a gradient makes the generator follow noise", "raise model.gamma", {"r1": steep}
        )
