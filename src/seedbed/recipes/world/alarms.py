"""Signs that an emulator goes wrong: blind to its controls, drifting on its own frames, or with an adversary out of balance."""

from __future__ import annotations

from seedbed.recipes.world.stages import BLIND
from seedbed.train.watch import Alarm

# Share of the run after which controls must count for something, and bounds of a healthy critic.
EARLY = 0.3
WON = (0.02, 0.98)
SHARP = (0.25, 2.5)
STEEP = 1e4


def world_alarms(measured: dict[str, float], judged: dict[str, float], progress: float) -> list[Alarm]:
    """What the rows and the latest evaluation warn of."""
    return [*_judged(judged, progress), *_critic(measured)]


def _judged(judged: dict[str, float], progress: float) -> list[Alarm]:
    found = []
    listens, copy, free = (judged.get(name) for name in ("listens", "copy_1", "free_1"))
    if progress > EARLY and listens is not None and listens < BLIND:
        found.append(
            Alarm(
                "blind",
                f"controls hardly matter: with those of other windows the picture at 4 frames is {listens:.2f} dB worse "
                f"(limit {BLIND:g})",
                "evaluation on held-out windows",
                "the network predicts the usual course of things; it cannot be steered, and the loss does not show it",
                "check the lag (seedbed data inspect), train the open loop longer (model.closed), or raise model.size",
                {"listens": listens},
            )
        )
    if progress > EARLY and copy is not None and free is not None and free < copy:
        found.append(
            Alarm(
                "below_copy",
                f"one frame ahead is worse than the last frame held: {free:.2f} dB against {copy:.2f} dB",
                "evaluation on held-out windows",
                "the network has not learned what a standing picture would give for nothing",
                "train longer, or lower optim.lr or model.context_noise",
                {"free_1": free, "copy_1": copy},
            )
        )
    sharp = judged.get("sharp_16")
    if progress > 2 * EARLY and sharp is not None and not SHARP[0] <= sharp <= SHARP[1]:
        found.append(
            Alarm(
                "drift",
                f"after 16 own frames the picture has {sharp:.2f} of the true sharpness (sound: {SHARP[0]:g} to {SHARP[1]:g})",
                "evaluation on held-out windows",
                "errors feed on themselves when the network runs on its own frames",
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
                "a critic that always or never wins gives no direction",
                "change model.critic_lr, or raise model.gamma",
                {"critic_won": won},
            )
        )
    if steep > STEEP:
        found.append(
            Alarm(
                "critic_steep",
                f"the critic's squared slope at real frames is {steep:.3g} (limit {STEEP:g})",
                "the adversarial stage",
                "such a slope makes the generator follow noise",
                "raise model.gamma",
                {"r1": steep},
            )
        )
    return found
