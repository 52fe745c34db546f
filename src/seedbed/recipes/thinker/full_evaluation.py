"""The full evaluation of a trained thinker: every number of the report, as plain values, and its plots.

Shape suffixes: B samples, M output tokens, K latents, S steps that are looked at, V vocabulary.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from seedbed.recipes.thinker.data import TaskSource
from seedbed.recipes.thinker.evaluate import Inference, as_trained, batches, leak_check, predict, right_answers, score, states_of
from seedbed.recipes.thinker.program import NAMED, parse_program
from seedbed.recipes.thinker.tasks import trivial_baselines
from seedbed.report.heatmap import Panel, draw_panels

if TYPE_CHECKING:
    from seedbed.recipes.thinker.system import ThinkerSystem

NUM_DRAWS = 4
# How far beyond training: steps of the curves, latents and steps of the map.
FAR, MORE_LATENTS, MORE_STEPS = 16, 1.5, 4 / 3
MAX_CELLS, MAX_LENGTHS, MAX_POINTS = 16, 12, 40
PAIRS = 1 << 14

MAP, EXACT_MAP, CURVE, RESIDUAL = "map.png", "map-exact.png", "steps.png", "residual.png"


@torch.no_grad()
def full_evaluation(system: ThinkerSystem, source: TaskSource, folder: Path | None = None, num: int = 65_536) -> dict[str, Any]:
    """Evaluate `system` on `num` new samples of the full length; curves and maps use a part of them.

    After a leak there are no other numbers. With a folder, the result and its plots are written there.
    """
    full, part = source.at(source.task.length), min(num, max(1024, num // 16))
    leak = leak_check(system, full, part)
    found: dict[str, Any] = {"task": source.task.name, "num": num, "leak": leak.found, "leak_check": str(leak)}
    if not leak.found:
        found |= {
            "baselines": trivial_baselines(next(batches(system, full, as_trained(system), part))),
            **in_range(system, full, num),
            "by_length": by_length(system, source, part),
            "curve": curve(system, full, part),
            "map": latent_step_map(system, full, part),
            "programs": named_programs(system, full, part),
            "longer": longer(system, source, part),
            "pairs": all_pairs(system, source),
        }
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "full_evaluation.json").write_text(json.dumps(found, indent=1) + "\n")
        if not leak.found:
            plot_map(found, "token", folder / MAP)
            plot_map(found, "exact", folder / EXACT_MAP)
            _plot_curve(found, folder / CURVE)
            _plot_residual(found, folder / RESIDUAL)
    return found


def in_range(system: ThinkerSystem, source: TaskSource, num: int) -> dict[str, Any]:
    """Exact match and tokens over several draws of noise, by position, and whether the draws agree."""
    scores = [score(system, source, as_trained(system, draw=draw), num) for draw in range(NUM_DRAWS)]
    exact, token = [s.exact for s in scores], [s.token for s in scores]
    return {
        "exact": sum(exact) / NUM_DRAWS,
        "exact_spread": max(exact) - min(exact),
        "token": sum(token) / NUM_DRAWS,
        "num_wrong": [s.num_wrong for s in scores],
        # Zero errors in n samples bound the true rate by 3/n at 95 %.
        "error_bound": 3.0 / num if not scores[0].num_wrong else None,
        "by_position": [round(v, 6) for v in scores[0].position_M.tolist()],
        **ensembles(system, source, min(num, 4096)),
    }


def ensembles(system: ThinkerSystem, source: TaskSource, num: int) -> dict[str, float]:
    """Several draws of noise: how often two agree, the vote of all, and the most confident step of one."""
    steps = tuple(range(system.steps.low, system.steps.high + 1))
    first = Inference(system.latents.high, steps)
    totals = torch.zeros(3, dtype=torch.float64)
    for batch in batches(system, source, first, num):
        logits_SBMV = predict(system, batch, first)
        others = [predict(system, batch, as_trained(system, draw=draw))[-1] for draw in range(1, NUM_DRAWS)]
        answers = [logits_BMV.argmax(-1) for logits_BMV in (logits_SBMV[-1], others[0])]
        same_B = ((answers[0] == answers[1]) | ~batch["keep"]).all(-1)
        votes_BMV = torch.stack([logits_SBMV[-1], *others]).softmax(-1).sum(0)
        voted_B = right_answers(votes_BMV, batch).all(-1)
        # The logits of the step at which the least confident token of a sample is most confident.
        sure_SBM = logits_SBMV.softmax(-1).amax(-1).masked_fill(~batch["keep"], 1.0)
        best_B = sure_SBM.amin(-1).argmax(0)
        sure_B = right_answers(logits_SBMV[best_B, torch.arange(len(best_B), device=best_B.device)], batch).all(-1)
        totals += torch.stack([same_B.sum(), voted_B.sum(), sure_B.sum()]).double().cpu()
    same, voted, sure = (totals / num).tolist()
    return {"same_answer_of_two_draws": same, "exact_by_vote": voted, "exact_at_surest_step": sure}


def by_length(system: ThinkerSystem, source: TaskSource, num: int) -> list[dict[str, float]]:
    """Scores at some lengths up to the longest of training."""
    length = source.task.length
    if system.config.data.curriculum.kind == "fixed":
        return []
    stride = -(-length // MAX_LENGTHS)
    rows = []
    for size in sorted({*range(stride, length + 1, stride), 1, length}):
        found = score(system, source.at(size), as_trained(system), num)
        rows.append({"length": size, "exact": found.exact, "token": found.token})
    return rows


def named_programs(system: ThinkerSystem, source: TaskSource, num: int) -> dict[str, dict[str, float]]:
    """A thinker trained on random programs, under each of the named ones."""
    if system.program is not None:
        return {}
    config, top = system.config.model, system.steps.high
    found = {}
    for name, text in NAMED.items():
        program = parse_program(text, max(top, 2), config.n_memory, config.static_memory)
        got = score(system, source, Inference(system.latents.high, (max(top, 2),), program=program), num)
        found[name] = {"exact": got.exact, "token": got.token}
    return found


def curve(system: ThinkerSystem, source: TaskSource, num: int) -> dict[str, list[float]]:
    """Accuracy and convergence of the state, for steps up to 16 times the trained ones."""
    top = system.steps.high
    steps = _points(FAR * top)
    found = score(system, source, Inference(system.latents.high, steps), num)
    return {
        "steps": list(steps),
        "exact": found.exact_S.tolist(),
        "token": found.token_S.tolist(),
        "trained": [system.steps.low, top],
        "residual": residuals(system, source, FAR * top, min(num, 512)),
    }


def _points(last: int) -> tuple[int, ...]:
    """Every step at first, then geometrically spaced ones, and the last."""
    ratio, found, step = last ** (1 / MAX_POINTS), [], 1.0
    while round(step) < last:
        found.append(round(step))
        step = max(step + 1, step * ratio)
    return (*found, last)


def residuals(system: ThinkerSystem, source: TaskSource, last: int, num: int) -> list[float]:
    """The mean of |z(t+1) - z(t)| / |z(t)| after each step but the last: shows convergence, cycles and drift."""
    inference = Inference(system.latents.high, tuple(range(1, last + 1)))
    total, seen = torch.zeros(max(0, last - 1), dtype=torch.float64), 0
    for batch in batches(system, source, inference, num):
        state_SB = states_of(system, batch, inference).state_SBKD.flatten(2)
        moved_SB = (state_SB[1:] - state_SB[:-1]).norm(dim=-1) / state_SB[:-1].norm(dim=-1).clamp_min(1e-12)
        total, seen = total + moved_SB.double().sum(1).cpu(), seen + state_SB.shape[1]
    return [round(v, 6) for v in (total / seen).tolist()]


def latent_step_map(system: ThinkerSystem, source: TaskSource, num: int) -> dict[str, Any]:
    """Accuracy for every number of latents and steps around what was trained: one unroll per row gives all its columns."""
    latents, steps = system.latents, system.steps
    rows = _around(latents.low, latents.high, latents.stride, MORE_LATENTS)
    columns = _around(steps.low, steps.high, steps.stride, MORE_STEPS)
    scores = [score(system, source, Inference(number, columns), num) for number in rows]
    return {
        "latents": list(rows),
        "steps": list(columns),
        "token": [s.token_S.tolist() for s in scores],
        "exact": [s.exact_S.tolist() for s in scores],
        "box": [latents.low, latents.high, steps.low, steps.high],
        "chance": 1.0 / source.shape.symbols,
    }


def _around(low: int, high: int, stride: int, more: float) -> tuple[int, ...]:
    """Some whole numbers from `low` (half of `high` where only that was trained) to `more` times `high`."""
    first = low if low < high else max(1, high // 2)
    last = math.ceil(more * high)
    stride = max(stride, -(-(last - first) // MAX_CELLS))
    return tuple(sorted({*range(first, last + 1, stride), low, high}))


def longer(system: ThinkerSystem, source: TaskSource, num: int) -> list[dict[str, Any]]:
    """Lengths beyond training, with latents and steps in proportion, and the trained steps times 1, 2, 4 and 16.

    A thinker trained for one number of steps keeps it: its answers are not stable under more.
    """
    rows, top, length = [], system.steps.high, source.task.length
    for size in system.config.data.test_lengths:
        number, grown = (math.ceil(n * max(1.0, size / length)) for n in (system.latents.high, top))
        grown = grown if system.steps.low < top else top
        steps = tuple(sorted({top, 2 * top, 4 * top, FAR * top, grown}))
        found = score(system, source.at(size), Inference(number, steps), min(num, 512))
        token, exact = (dict(zip(steps, values.tolist(), strict=True)) for values in (found.token_S, found.exact_S))
        row = {"length": size, "latents": number, "steps": grown, "token": token[grown], "exact": exact[grown]}
        rows.append(row | {f"token_{k}x": token[k * top] for k in (1, 2, 4, FAR)})
    return rows


def all_pairs(system: ThinkerSystem, source: TaskSource) -> dict[str, Any]:
    """All pairs of addition; those that were never trained on are counted separately."""
    if not source.num_pairs:
        return {}
    device = next(system.parameters()).device
    counts = torch.zeros(4, dtype=torch.int64)
    for start in range(0, source.num_pairs, PAIRS):
        batch = source.all_pairs(start, min(PAIRS, source.num_pairs - start), device)
        held_B = batch["held"]
        right_B = right_answers(predict(system, batch, as_trained(system))[-1], batch).all(-1)
        counts += torch.stack([right_B.sum(), torch.ones_like(held_B).sum(), (right_B & held_B).sum(), held_B.sum()]).cpu()
    right, num, held_right, num_held = counts.tolist()
    found: dict[str, Any] = {"num": num, "num_wrong": num - right, "exact": right / num}
    return found | ({"num_held": num_held, "exact_held": held_right / num_held} if num_held else {})


def plot_map(found: dict[str, Any], kind: str, path: Path) -> None:
    """Accuracy in per cent by latents and steps, the trained box outlined; colours run from chance to 100."""
    cells, names = found["map"], {"token": "tokens right", "exact": "exact match"}
    rows, columns = cells["latents"], cells["steps"]
    low_k, high_k, low_t, high_t = cells["box"]
    panel = Panel("", [[100.0 * value for value in row] for row in cells[kind]])
    draw_panels(
        path,
        [panel],
        (rows, columns, "latents", "steps"),
        f"{found['task']}: {names[kind]} in %, training box outlined",
        low=100.0 * cells["chance"] if kind == "token" else 0.0,
        high=100.0,
        box=(rows.index(low_k), rows.index(high_k), columns.index(low_t), columns.index(high_t)),
    )


def _plot_curve(found: dict[str, Any], path: Path) -> None:
    curve, baselines = found["curve"], found["baselines"]
    with _plot_over_steps(found, "accuracy against steps, to 16 times the trained ones", path) as axis:
        axis.plot(curve["steps"], [100 * v for v in curve["exact"]], marker="o", markersize=3, label="exact match")
        axis.plot(curve["steps"], [100 * v for v in curve["token"]], marker="o", markersize=3, label="tokens right")
        trivial = 100 * max(v for name, v in baselines.items() if name.endswith("_token"))
        axis.axhline(trivial, color="tab:gray", linestyle=":", label=f"tokens right by a trivial answer ({trivial:.1f})")
        axis.set_ylim(-2, 102)
        axis.set_ylabel("%")


def _plot_residual(found: dict[str, Any], path: Path) -> None:
    moves = found["curve"]["residual"]
    with _plot_over_steps(found, "residual |z(t+1) - z(t)| / |z(t)|", path) as axis:
        axis.plot(range(1, len(moves) + 1), moves, label="change of the state by a step, relative to its norm")
        if min(moves, default=0) > 0:
            axis.set_yscale("log")


@contextlib.contextmanager
def _plot_over_steps(found: dict[str, Any], title: str, path: Path) -> Iterator[Any]:
    """Axes to draw on; the trained range is marked, and the picture is written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), dpi=120, layout="constrained")
    yield (axis := figure.subplots())
    axis.axvspan(*found["curve"]["trained"], color="tab:red", alpha=0.12, label="trained")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("steps")
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    axis.set_title(f"{found['task']}: {title}", fontsize=10, loc="left")
    figure.savefig(path, format="png")
