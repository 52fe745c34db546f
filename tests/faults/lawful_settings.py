"""Sixty lawful settings of the five recipes, pairs of switches included: the checks must raise no alarm on any of them.

`python tests/faults/lawful_settings.py [SEED ...] [--only TEXT] [--checks IDS] [--out FILE]` runs all checks on all of them, by
default on three seeds, and prints what alarms and the seconds that each took. FILE collects what several calls measured.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SEEDS = (1, 2, 3)
FRAMES = "data.frames=600"  # of the box world: as many as render in seconds
SETTINGS = {
    "gpt/demo": (
        "model.dropout=0.2 model.norm=layer",
        "model.mlp=relu2 model.tied=false",
        "model.mlp=gelu model.positions=learned optim.kind=adamw",
        "model.kv_heads=2 model.softcap=15",
        "model.skips=true model.gate=true ema=0.99",
        "model.values_x0=true model.drop_path=0.1",
        "optim.kind=adamw optim.lr=1e-3 accum=4",
        "schedule.kind=wsd batch=1",
        "schedule.kind=one_cycle optim.kind=adamw optim.lr=1e-3 schedule.warmup=0.3",
        "model.out_init=1 model.qk_norm=false precision=bf16",
        "remat=full accum=2 data.mode=random",
        "data.tokenizer=bpe data.vocab=512 data.mode=blocks",
        "model.width=256 batch=64",
        "model.positions=none optim.muon_lr=0.003 guard.policy=skip",
    ),
    "flow/demo": (
        "model.predict=v model.t_distribution=uniform optim.lr=2e-3",
        "model.condition=context model.context_tokens=2",
        "model.condition=context model.positions=1d optim.lr=2e-3",
        "model.positions=sines model.mlp=gelu model.qk_norm=false",
        "model.drop=0 model.stratified=false",
        "optim.kind=muon optim.muon_lr=0.01 accum=2",
        "data.size=24 data.flip=true batch=16",
        "data.size=16 data.width=24 model.positions=1d",
        "data.width=32 model.predict=v precision=bf16",
        "model.patch=2 model.patch_init=conv remat=selective",
        "schedule.kind=constant ema=0",
        "model.context_tokens=4 model.context_start=1 ema2=0.999",
        "data.images=random:200:1 model.patch_init=xavier",
    ),
    "world/demo": (
        "model.adversarial=0.5 batch=16",
        "model.kind=edm model.rollout=2 optim.lr=5e-4",
        "model.kind=edm model.feedback=drawn model.static=false",
        "model.static=false model.pose_tracking=false",
        "model.pyramid=true model.memory_dropout=0.1",
        "model.transport=false model.context_noise=0",
        "model.memory=2 model.cells=3 data.width=48",
        "model.closed=1 ema=0 schedule.kind=cosine",
        "data.actions=command model.pose_tracking=false",
        "optim.kind=muon optim.muon_lr=0.003 accum=2",
    ),
    "thinker/demo": (
        "model.loss.steps=progressive model.noise=0",
        "model.loss.steps=random data.task=copy",
        "model.loss.steps=last model.program=read-once model.n_step=4",
        "data.curriculum.kind=gated data.task=cumsum",
        "data.curriculum.kind=mixed model.latent_init=shared",
        "data.curriculum.kind=mostly model.positions.kind=sin",
        "data.curriculum.kind=uniform model.positions.kind=ends model.positions.max=64",
        "model.target_stream=both model.output.tied=true",
        "model.output.self_attn=true model.output.layers=2 accum=2",
        "model.program=rlwso* model.static_memory=8 model.perturb=0.1",
        "data.task=add data.held=0.1 model.state_norm=false",
        "model.latent_init=positional model.n_latent=10 model.loss.backprop_steps=2",
        "model.positions.kind=random_sorted model.positions.max=64 optim.kind=muon",
    ),
    "ebt/demo": (
        "model.kind=plain model.control=false",
        "model.mcmc.num_steps=3 model.mcmc.num_landscapes=1 model.mcmc.loss=last",
        "model.mcmc.space=logit model.mcmc.initial_condition=zeros",
        "model.mcmc.space=mirror model.step_embed=prefix",
        "model.mcmc.backprop_through=all model.mcmc.learn_alpha=false",
        "model.mcmc.replay_buffer=32 model.mcmc.langevin_noise=1",
        "model.mcmc.num_landscapes=1 model.step_embed=none model.mcmc.random_alpha=2",
        "model.mcmc.min_steps=1 model.head_init=xavier model.decay_all=true",
        "optim.kind=muon ema=0.99 data.tokenizer=char",
    ),
    "ebt/denoise-shapes": ("model.observe=concat model.steps=2 model.random_alpha=2",),
}  # fmt: skip
LAWFUL = [(name, tuple(line.split())) for name, lines in SETTINGS.items() for line in lines]


def settings_of(name: str, settings: Sequence[str], seed: int = 1) -> list[str]:
    return [*((FRAMES,) if name.startswith("world") else ()), *settings, f"seed={seed}"]


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("seeds", nargs="*", type=int, default=SEEDS)
    asked.add_argument("--only", default="", help="those whose command holds this text")
    asked.add_argument("--checks", nargs="*", default=[], help="ids or groups of checks")
    asked.add_argument("--out", type=Path, help="a JSON file for the results; those of other settings and seeds in it are kept")
    given = asked.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "benchmarks")]
    from _report import commit
    from patching import check

    measured = {"commit": commit(), "checks": given.checks or "all"}
    rows: dict[str, dict[str, Any]] = {}
    for seed in given.seeds:
        for name, settings in LAWFUL:
            title = f"{name} {' '.join(settings)} seed={seed}"
            if given.only not in title:
                continue
            start, cpu = time.perf_counter(), time.process_time()
            report = check(name, *settings_of(name, settings, seed), only=given.checks)
            alarms = ["\n".join(f.lines(report.name)) for f in report.findings if f.alarm]
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            rows[title] = {"alarms": alarms, "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1), **measured}
            shown = " ".join(f"{f.id} {f.seconds:.1f}" for f in sorted(report.findings, key=lambda f: -f.seconds)[:4])
            print("\n".join([f"{seconds:6.1f} s  {title}  ({shown})", *alarms]), flush=True)
            if given.out:
                write(given.out, rows)
    num = sum(len(row["alarms"]) for row in rows.values())
    print(f"{num} alarms")
    return int(num > 0)


def write(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """A summary of all that was measured, then each with the commit and the checks that ran."""
    import torch
    from _report import hardware

    known = (json.loads(path.read_text())["rows"] if path.exists() else {}) | rows
    found = known.values()
    summary = {
        "settings": len({title.rpartition(" ")[0] for title in known}),
        "seeds": sorted({int(title.rpartition("=")[2]) for title in known}),
        "runs": len(known),
        "alarms": sum(len(row["alarms"]) for row in found),
        "commits": sorted({row["commit"] for row in found}),
        "seconds": {key: round(sum(row[key] for row in found), 1) for key in ("seconds", "cpu_seconds")},
        "most_cpu_seconds": max(row["cpu_seconds"] for row in found),
    }
    facts = {"command": "python tests/faults/lawful_settings.py", "hardware": hardware(), "torch": torch.__version__}
    path.write_text(json.dumps({"name": path.stem, **summary, **facts, "rows": known}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
