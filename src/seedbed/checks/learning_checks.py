"""Checks H and E: hyperparameters suit the task, and the model learns from its inputs."""

import statistics

from seedbed.checks import short_runs
from seedbed.checks.registry import check, failed, passed, skipped
from seedbed.checks.subject import Subject
from seedbed.report.findings import Finding

# Share of the drop lost against a rate ten times lower: clean presets gain from the higher one; 30x too high loses .12 and more.
RATE_LIMIT, RATE_SIGMAS = 0.08, 3
# The same with a user's optimizer, which may be set for longer runs: SGD at 0.1 on a residual network .18, 100x too high .9.
COARSE_RATE_LIMIT = 0.5
# Share of the first held-out loss above which a run has learned nothing: AdamW at 3.0 and at 0.3 .97, at 0.03 .005.
LEARNS = 0.95
# Clean .004 to .03; a rate 1e4 times too low 3e-6.
RATIO_LOW, RATIO_HIGH = 1e-5, 0.2
WARMUP_LIMIT = 0.5
# Steps in which weight decay alone would shrink a weight to a third.
DECAY_STEPS = 50.0
# Share of the first loss, after steps on one batch: clean presets need 9 to 80 of the 120 steps for half of it.
OVERFIT_LIMIT, NUM_OVERFIT, OVERFIT_RATE = 0.5, 120, 5e-3
# The same for losses that may have a floor nobody declared, such as a cross-entropy against grey pixels.
MIXED_LIMIT = 0.9
# This little is left when rows are memorised and not only token frequencies.
MEMORISED, NUM_TO_MEMORISE = 0.15, 160
# Gain from inputs on held-out batches: clean .06 to .2, inputs or targets mixed up at most .002.
GAIN_LIMIT = 0.015
# Before frequencies are learned, which takes long with a large vocabulary, inputs do not help.
BLIND_LIMIT = 1.03
# On held-out batches: clean characters .57 to .83, points .8 (.95 at a third of the rate); a rate 1e4 times too low 1.000.
FALL_LIMIT, FALL_SIGMAS = 0.99, 2


@check("H1", "learning rate", "warn", humbatova=(2,))
def learning_rate(subject: Subject) -> Finding:
    subject = short_runs.learner(subject)
    if reason := short_runs.nothing_to_learn(subject):
        return skipped(reason)
    return short_runs.on_every_seed(lambda more: _compare_rates(subject, more))


def _compare_rates(subject: Subject, more_seed: int) -> Finding:
    fast, share = short_runs.real_run(subject, more_seed), 0.1
    lr, (first, high) = subject.small.optim.lr, fast.held_out_loss
    if not fast.finite:
        what = f"at lr {lr:g} the loss is not finite after {len(fast.losses)} steps"
        fix = f"optim.lr={lr / 10:g}, or find-lr"
        return failed(what, where=subject.preset_line(), case="H1-finite", fix=fix, severity="err")
    slow = short_runs.slow_run(subject, share, more_seed)
    if min(high, slow.held_out_loss[1]) > LEARNS * first:  # nothing is learned at either: both may be too high
        slower = short_runs.slow_run(subject, 0.01, more_seed)
        slow, share = (slower, 0.01) if slower.held_out_loss[1] <= LEARNS * first else (slow, share)
    low = slow.held_out_loss[1]
    apart = [f - s for (_, f), (_, s) in zip(fast.held_out, slow.held_out, strict=True)]
    noise = statistics.stdev(apart) / len(apart) ** 0.5
    worse = (high - low) / max(first - min(high, low), 1e-12)
    limit = COARSE_RATE_LIMIT if subject.unsure else RATE_LIMIT
    if worse > limit and high - low > RATE_SIGMAS * noise:
        what = f"{short_runs.NUM_STEPS} steps at lr {lr:g} end at {high:.3g} on held-out batches, at {lr * share:g} at {low:.3g}"
        fix = f"optim.lr={lr * share:g}, or: seedbed find-lr {subject.name}"
        return failed(what, where=subject.preset_line(), case="H1-high", fix=fix, value=worse, limit=limit)
    return passed(f"lr {lr:g} ends at {high:.3g}, {share:g} of it at {low:.3g}", worse, limit)


@check("H2", "update ratio", "warn", humbatova=(2, 12))
def update_ratio(subject: Subject) -> Finding:
    subject = short_runs.learner(subject)
    if reason := short_runs.nothing_to_learn(subject):
        return skipped(reason)
    ratios = short_runs.real_run(subject).ratios
    if not ratios:
        return skipped("no matrix, or the run was not finite (see H1)")
    middle = statistics.median(ratios)
    low = middle < RATIO_LOW
    if low or not middle <= RATIO_HIGH:
        what = f"a step changes matrices by {middle:.1e} of their length (healthy: {RATIO_LOW:g} to {RATIO_HIGH:g})"
        case, limit = ("H2-low", RATIO_LOW) if low else ("H2-high", RATIO_HIGH)
        return failed(what, where=subject.preset_line(), case=case, value=middle, limit=limit)
    return passed("median change of a matrix per step", middle, RATIO_HIGH)


@check("H3", "schedule sums", "warn", humbatova=(2,))
def schedule_sums(subject: Subject) -> Finding:
    config, num_items, where = subject.config, subject.real_data.train.num_items, subject.preset_line()
    optim = config.optim
    if config.schedule.warmup > WARMUP_LIMIT:
        return failed(f"warm-up takes {config.schedule.warmup:.0%} of the run", where=where, case="H3-warmup")
    if num_items and config.batch > num_items:
        what = f"a batch of {config.batch} is larger than the {num_items} items there are"
        return failed(what, where=where, case="H3-batch", fix=f"batch={max(1, num_items // 4)}")
    shrink = max(optim.lr * optim.weight_decay, optim.muon_lr * optim.muon_weight_decay if optim.kind == "muon" else 0.0)
    if shrink * DECAY_STEPS > 1.0:
        what = f"lr x weight decay = {shrink:.2g}: weights shrink to a third in {1 / shrink:.0f} steps"
        return failed(what, where=where, case="H3-decay")
    return passed(f"{config.steps * config.batch / num_items:.3g} epochs" if num_items else "endless data")


@check("E1", "overfit", "err", humbatova=(4, 6))
def overfit(subject: Subject) -> Finding:
    subject = short_runs.learner(subject)
    trace = overfit_run(subject)
    bound = subject.declared.lower_bound
    end = min(trace.losses[:NUM_OVERFIT])
    share = end / trace.first if trace.first > 0 else 0.0
    where = subject.loss_line()
    if not trace.finite:
        return failed(f"one batch: not finite after {len(trace.losses)} steps", where=where, case="E1-breaks")
    if bound is not None and min(trace.losses) < bound - 1e-3 * max(1.0, abs(trace.first)):
        what = f"one batch: {min(trace.losses):.4g} is below the smallest possible loss {bound:.4g}"
        return failed(what, where=where, case="E1-bound")
    limit = MIXED_LIMIT if subject.unsure else OVERFIT_LIMIT
    if share > limit:
        what = f"one batch, {NUM_OVERFIT} steps: {trace.first:.4g} -> {end:.4g}"
        return failed(what, where=where, value=share, limit=limit)
    return passed(f"{trace.first:.3g} -> {end:.3g} on one batch", share, limit)


def overfit_run(subject: Subject) -> short_runs.ShortRun:
    """Overfits at a higher lr where the preset's is low for so short a run, else at the preset's."""

    def go() -> short_runs.ShortRun:
        rate = short_runs.lr_factor(subject, OVERFIT_RATE)
        trace = short_runs.overfit(subject, rate, NUM_TO_MEMORISE, MEMORISED)
        if rate > 1.0 and not min(trace.losses[:NUM_OVERFIT]) <= OVERFIT_LIMIT * trace.first:
            trace = short_runs.overfit(subject, 1.0, NUM_TO_MEMORISE, MEMORISED)
        return trace

    return subject.once("short_runs.overfit", go)


@check("E2", "input use", "err", humbatova=(1, 10), needs=("inputs", "predict"))
def input_use(subject: Subject) -> Finding:
    subject = short_runs.learner(subject)
    if reason := short_runs.nothing_to_learn(subject):
        return skipped(reason)
    if subject.declared.order == "strict":
        return skipped("the inputs are targets before: blank ones leave the other inputs of the model")
    return short_runs.on_every_seed(lambda more: _compare_inputs(subject, more), others=(1,))


def _compare_inputs(subject: Subject, more_seed: int) -> Finding:
    for real, blank in short_runs.paired_runs(subject, more_seed):
        if not real.finite or not blank.finite:
            return skipped("the short run was not finite (see H1)")
        seeing, blind = real.held_out_loss[1], blank.held_out_loss[1]
        gain = (blind - seeing) / max(abs(blind), 1e-12)
        if gain >= GAIN_LIMIT:
            return passed(f"real inputs {seeing:.3g}, blank ones {blind:.3g} on held-out batches", gain, GAIN_LIMIT)
        # Slow learners get a longer run.
    floor = short_runs.first_baseline(subject)
    if blind > BLIND_LIMIT * floor:
        return skipped(f"inconclusive: with blank inputs it ends at {blind:.3g}, and frequencies alone give {floor:.3g}")
    what = f"held-out loss after {short_runs.NUM_MORE_STEPS} steps: {seeing:.4g} with real inputs, {blind:.4g} with blank ones"
    return failed(what, where=subject.loss_line(), case="E2-ignored", value=gain, limit=GAIN_LIMIT)


@check("E3", "loss decreases", "warn", humbatova=(6,))
def loss_decreases(subject: Subject) -> Finding:
    subject = short_runs.learner(subject)
    if reason := short_runs.nothing_to_learn(subject):
        return skipped(reason)
    return short_runs.on_every_seed(lambda more: _compare_ends(subject, more))


def _compare_ends(subject: Subject, more_seed: int) -> Finding:
    trace = short_runs.real_run(subject, more_seed)
    if not trace.finite:
        return skipped("the short run was not finite (see H1)")
    first, end = trace.held_out_loss
    drops = [a - b for a, b in trace.held_out]
    noise = statistics.stdev(drops) / len(drops) ** 0.5
    share = end / first if first > 0 else 0.0
    if share > FALL_LIMIT or first - end < FALL_SIGMAS * noise:
        what = f"{short_runs.NUM_STEPS} steps: {first:.4g} -> {end:.4g} on held-out batches"
        return failed(what, where=subject.loss_line(), case="E3-flat", value=share, limit=FALL_LIMIT)
    return passed(f"{first:.3g} -> {end:.3g} in {short_runs.NUM_STEPS} steps, on held-out batches", share, FALL_LIMIT)
