"""H and E: the numbers fit the task, and the model learns what it should from what it should."""

from __future__ import annotations

import math
import statistics

from seedbed.checks import practice
from seedbed.checks.case import Case, place
from seedbed.checks.registry import Result, check, failed, passed, skipped

# Share of the drop lost against a rate ten times lower: clean presets gain by the higher one; 30x too high loses .12 and more.
RATE_LIMIT, RATE_SIGMAS = 0.08, 3
# Clean .004 to .03; a rate 1e4 times too low 3e-6.
RATIO_LOW, RATIO_HIGH = 1e-5, 0.2
WARMUP_LIMIT = 0.5
# Steps in which weight decay alone would shrink a weight to a third.
DECAY_STEPS = 50.0
# Share of the first loss, after steps on one batch: clean presets need 9 to 80 of the 120 steps for half of it.
MEMORISED, NUM_OVERFIT, OVERFIT_RATE = 0.5, 120, 5e-3
# So little is left when rows are known by heart and not only how often tokens occur.
BY_HEART, NUM_BY_HEART = 0.15, 160
# Better on unseen batches than without inputs: clean .06 to .2, inputs or targets mixed up at most .002.
GAIN_LIMIT = 0.015
# Before frequencies are learned, which takes long with a large vocabulary, inputs cannot help yet.
BLIND_LIMIT = 1.03
# On unseen batches: clean characters .57 to .83, points .8 (.95 at a third of the rate); a rate 1e4 times too low 1.000.
FALL_LIMIT, FALL_SIGMAS = 0.99, 2


def _preset_place(case: Case) -> str:
    return place(case.recipe.presets[case.preset]) if case.preset in case.recipe.presets else case.recipe.name


@check("H1", "rate", "warn", humbatova=(2,))
def rate(case: Case) -> Result:
    if reason := practice.nothing_to_learn(case):
        return skipped(reason)
    fast, slow = practice.real_run(case), practice.slow_run(case)
    lr = case.small.optim.lr
    if not fast.finite:
        return failed(
            f"at lr {lr:g} the loss is not finite after {len(fast.losses)} steps",
            where=_preset_place(case),
            why="the run would end here",
            fix=f"optim.lr={lr / 10:g}, or find-lr",
            severity="err",
        )
    quick, calm = fast.unseen[1], slow.unseen[1]
    apart = [f - s for (_, f), (_, s) in zip(fast.held_out, slow.held_out, strict=True)]
    noise = statistics.stdev(apart) / len(apart) ** 0.5
    worse = (quick - calm) / max(fast.unseen[0] - min(quick, calm), 1e-12)
    if worse > RATE_LIMIT and quick - calm > RATE_SIGMAS * noise:
        return failed(
            f"{practice.NUM_STEPS} steps at lr {lr:g} end at {quick:.3g} on unseen batches, at {lr / 10:g} at {calm:.3g}",
            where=_preset_place(case),
            why="the learning rate is too high: steps overshoot and undo each other",
            fix=f"optim.lr={lr / 10:g}, or: seedbed find-lr {case.name}",
            value=worse,
            limit=RATE_LIMIT,
        )
    return passed(f"lr {lr:g} ends at {quick:.3g}, a tenth of it at {calm:.3g}", worse, RATE_LIMIT)


@check("H2", "ratio", "warn", humbatova=(2, 12))
def ratio(case: Case) -> Result:
    if reason := practice.nothing_to_learn(case):
        return skipped(reason)
    ratios = practice.real_run(case).ratios
    if not ratios:
        return skipped("no matrix, or the run was not finite (see H1)")
    middle = statistics.median(ratios)
    low = middle < RATIO_LOW
    if low or not middle <= RATIO_HIGH:
        return failed(
            f"a step changes matrices by {middle:.1e} of their length (healthy: {RATIO_LOW:g} to {RATIO_HIGH:g})",
            where=_preset_place(case),
            why="nothing will change in this run" if low else "every step rewrites the model",
            fix="raise optim.lr; see optim.eps and optim.clip" if low else "lower optim.lr or the weight decay",
            value=middle,
            limit=RATIO_LOW if low else RATIO_HIGH,
        )
    return passed("median change of a matrix per step", middle, RATIO_HIGH)


@check("H3", "sums", "warn", humbatova=(2,))
def sums(case: Case) -> Result:
    config, num_items = case.config, case.real_data.train.num_items
    optim = config.optim
    epochs = config.steps * config.batch / num_items if num_items else 0.0
    decays = [optim.lr * optim.weight_decay] + [optim.muon_lr * optim.muon_weight_decay] * (optim.kind == "muon")
    shrink = 1.0 / max(*decays, 1e-12) if len(decays) > 1 else 1.0 / max(decays[0], 1e-12)
    troubles = [
        (
            config.schedule.warmup > WARMUP_LIMIT,
            f"warm-up takes {config.schedule.warmup:.0%} of the run",
            "most of the time is spent at rates too low to learn",
            "schedule.warmup=0.02",
        ),
        (
            bool(num_items) and config.batch > num_items,
            f"a batch of {config.batch} is larger than the {num_items} items there are",
            "every batch holds the same items several times",
            f"batch={max(1, num_items // 4)}",
        ),
        (
            shrink < DECAY_STEPS,
            f"lr x weight decay = {1 / shrink:.2g}: weights shrink to a third in {shrink:.0f} steps",
            "decay erases what is learned before it is used",
            "optim.weight_decay=0.1",
        ),
    ]
    for bad, what, why, fix in troubles:
        if bad:
            return failed(what, where=_preset_place(case), why=why, fix=fix)
    return passed(f"{epochs:.3g} epochs" if num_items else "endless data")


@check("E1", "overfit", "err", humbatova=(4, 6))
def overfit(case: Case) -> Result:
    trace = overfit_run(case)
    bound = case.probe.lower_bound if case.probe and case.probe.lower_bound is not None else None
    end = min(trace.losses[:NUM_OVERFIT])
    share = end / trace.first if trace.first > 0 else 0.0
    place_ = practice.loss_place(case)
    if not trace.finite:
        why = "it breaks on its own training data"
        return failed(f"one batch: not finite after {len(trace.losses)} steps", where=place_, why=why, fix="see H1, O3 and C4")
    if bound is not None and min(trace.losses) < bound - 1e-3 * max(1.0, abs(trace.first)):
        what = f"one batch: {min(trace.losses):.4g} is below the smallest possible loss {bound:.4g}"
        return failed(what, where=place_, why="the objective rewards something else", fix="see L2: sign, mask, normalisation")
    if share > MEMORISED:
        return failed(
            f"one batch, {NUM_OVERFIT} steps: {trace.first:.4g} -> {end:.4g}",
            where=place_,
            why="it cannot even memorise five items",
            fix="see O2 (what moves), M7 (what matters), H1 and H2 (rates)",
            value=share,
            limit=MEMORISED,
        )
    return passed(f"{trace.first:.3g} -> {end:.3g} on one batch", share, MEMORISED)


def overfit_run(case: Case) -> practice.Trace:
    """At the preset's rate; where that is low for so short a time, at one that a small model bears."""

    def go() -> practice.Trace:
        trace = practice.overfit(case, 1.0, NUM_BY_HEART, BY_HEART)
        rate = practice.brisk_rate(case, OVERFIT_RATE)
        if trace.losses[-1] > BY_HEART * trace.first and rate > 1.0:
            trace = practice.overfit(case, rate, NUM_BY_HEART, BY_HEART)
        return trace

    return case.once("practice.overfit", go)


@check("E2", "input", "err", humbatova=(1, 10), needs=("inputs",))
def inputs(case: Case) -> Result:
    if reason := practice.nothing_to_learn(case):
        return skipped(reason)
    for num_steps in (practice.NUM_STEPS, practice.NUM_MORE_STEPS):
        real, blank = practice.seeing_and_blind(case, num_steps)
        if not real.finite or not blank.finite:
            return skipped("the short run was not finite (see H1)")
        seeing, blind = real.unseen[1], blank.unseen[1]
        gain = (blind - seeing) / max(abs(blind), 1e-12)
        if gain >= GAIN_LIMIT:
            return passed(f"real inputs {seeing:.3g}, blank ones {blind:.3g} on unseen batches", gain, GAIN_LIMIT)
        # Slow learners get a longer run before they are judged.
    floor = _first_baseline(case)
    if blind > BLIND_LIMIT * floor:
        return skipped(f"too short to judge: blind it ends at {blind:.3g}, and frequencies alone would give {floor:.3g}")
    return failed(
        f"{practice.NUM_MORE_STEPS} steps with real inputs end at {seeing:.4g} on unseen batches, with blank ones at {blind:.4g}",
        where=practice.loss_place(case),
        why="inputs are ignored, or targets do not belong to them",
        fix="see D4 (what a batch reads like), C2 (what the targets are), C3 (what reaches the output)",
        value=gain,
        limit=GAIN_LIMIT,
    )


def _first_baseline(case: Case) -> float:
    """What the simplest predictor scores, which needs no inputs; infinite when none is declared."""
    if case.probe is None or case.probe.baselines is None:
        return math.inf
    return next(iter(case.probe.baselines(case.probe.batch).values()))


@check("E3", "falls", "warn", humbatova=(6,))
def falls(case: Case) -> Result:
    if reason := practice.nothing_to_learn(case):
        return skipped(reason)
    trace = practice.real_run(case)
    if not trace.finite:
        return skipped("the short run was not finite (see H1)")
    first, end = trace.unseen
    drops = [a - b for a, b in trace.held_out]
    noise = statistics.stdev(drops) / len(drops) ** 0.5
    share = end / first if first > 0 else 0.0
    if share > FALL_LIMIT or first - end < FALL_SIGMAS * noise:
        return failed(
            f"{practice.NUM_STEPS} steps: {first:.4g} -> {end:.4g} on batches it has not seen",
            where=practice.loss_place(case),
            why="it is not learning",
            fix="see E1 (can it memorise?), H1 and H2 (rates), E2 (do inputs matter?)",
            value=share,
            limit=FALL_LIMIT,
        )
    return passed(f"{first:.3g} -> {end:.3g} in {practice.NUM_STEPS} steps, on unseen batches", share, FALL_LIMIT)
