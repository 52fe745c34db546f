"""Alarms of the world recipe: controls ignored, drifting rollouts, an unbalanced critic."""

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


def _evaluation(evaluated: dict[str, float], progress: float) -> list[Alarm]:
    found = []
    listens, copy, free = (evaluated.get(name) for name in ("listens", "copy_1", "free_1"))
    if progress > EARLY and listens is not None and listens < BLIND:
        found.append(
            Alarm(
                "blind",
                f"controls hardly matter: with shuffled controls the frame at 4 steps is {listens:.2f} dB worse "
                f"(limit {BLIND:g})",
                "evaluation on held-out windows",
                "the network ignores its controls, and the loss does not show it",
                "check the lag (seedbed data inspect), train the open loop longer (model.closed), or raise model.size",
                {"listens": listens},
            )
        )
    if progress > EARLY and copy is not None and free is not None and free < copy:
        found.append(
            Alarm(
                "below_copy",
                f"one frame ahead is worse than the persistence baseline: {free:.2f} dB against {copy:.2f} dB",
                "evaluation on held-out windows",
                "repeating the last frame would be better",
                "train longer, or lower optim.lr or model.context_noise",
                {"free_1": free, "copy_1": copy},
            )
        )
    sharp = evaluated.get("sharp_16")
    if progress > 2 * EARLY and sharp is not None and not SHARP[0] <= sharp <= SHARP[1]:
        found.append(
            Alarm(
                "drift",
                f"after 16 frames a rollout has {sharp:.2f} of the true sharpness (normal: {SHARP[0]:g} to {SHARP[1]:g})",
                "evaluation on held-out windows",
                "errors accumulate when the network runs on its own frames",
                "train the closed loop longer (model.closed, model.rollout) or raise model.context_noise",
                {"sharp_16": sharp},
            )
        )
    return found


def _critic(measured: dict[str, float]) -> list[Alarm]:
    won, steep = measured.get("critic_won", 0.5), measured.get("r1", 0.0)
    if not measured.get("loss_critic"):
        return []
    found = []
    if not WON[0] <= won <= WON[1] and abs(measured["critic_margin"]) > 4.0:
        found.append(
            Alarm(
                "critic_balance",
                f"the critic is right on {won:.0%} of pairs, by {measured['critic_margin']:.1f} on average",
                "the adversarial stage",
                "a critic that always or never wins gives no useful gradient",
                "change model.critic_lr, or raise model.gamma",
                {"critic_won": won},
            )
        )
    if steep > STEEP:
        found.append(
            Alarm(
                "critic_steep",
                f"the critic's squared gradient at real frames is {steep:.3g} (limit {STEEP:g})",
                "the adversarial stage",
                "such a gradient makes the generator follow noise",
                "raise model.gamma",
                {"r1": steep},
            )
        )
    return found
