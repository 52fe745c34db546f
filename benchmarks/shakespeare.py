"""tiny-shakespeare: whole-validation loss after a budget of training seconds, several seeds, final and best.

Limits on one H200: 1.46 nats/char within 30 s, 1.45 within 120 s. Every target of the last 10 % is scored once, in cold
windows of 256. `--variants FILE.json` ({"name": ["key=value", ...]}) tries settings; tune on the training part only.
"""

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from pathlib import Path

from _report import write_result

from seedbed.launch import local
from seedbed.track.run import Run


def train(preset: str, settings: list[str]) -> dict:
    """One run in a folder that goes away; its figures."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = local.train(preset, settings, root=Path(folder), run_name="one", dirty=True)
        run = Run.open(Path(folder), "one")
        events, status = run.events(), run.status()
    if code:
        return {"error": said.getvalue()[-400:]}
    evals = [e for e in events if e["kind"] == "eval"]
    name = next(k for k in evals[0] if k not in ("step", "kind"))
    best = min(evals, key=lambda e: e[name])
    return {
        "final": evals[-1][name],
        "best": best[name],
        "best_step": best["step"],
        "steps": status["step"],
        "train_s": round(status["clock"]["train"], 2),
        "compile_s": round(status["clock"].get("compile", 0.0), 1),
        "wall_s": round(time.perf_counter() - start, 1),
        "train_loss": status["loss"],
        "curve": [[e["step"], round(e[name], 4)] for e in evals],
    }


def summarise(rows: list[dict]) -> dict:
    good = [r for r in rows if "error" not in r]
    if not good:
        return {}
    finals, bests = [r["final"] for r in good], [r["best"] for r in good]
    spread = {k: statistics.stdev(v) if len(v) > 1 else 0.0 for k, v in (("final", finals), ("best", bests))}
    means = {"final": statistics.mean(finals), "best": statistics.mean(bests), "most_seconds": max(r["train_s"] for r in good)}
    return {**means, "final_sd": spread["final"], "best_sd": spread["best"], "seeds": len(good)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", required=True)
    parser.add_argument("--name", default="shakespeare-h200")
    parser.add_argument("--presets", default="gpt/shakespeare,gpt/shakespeare-long")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--variants", default="")
    parser.add_argument("settings", nargs="*")
    args = parser.parse_args()
    variants = json.loads(Path(args.variants).read_text()) if args.variants else {"": []}
    figures: dict = {}
    for preset in args.presets.split(","):
        for title, extra in variants.items():
            key = f"{preset} {title}".strip()
            rows = [train(preset, [f"data.text={args.text}", f"seed={s}", *args.settings, *extra]) for s in args.seeds.split(",")]
            figures[key] = {"rows": rows, "settings": [*args.settings, *extra], **summarise(rows)}
            line = {k: v for k, v in figures[key].items() if k not in ("rows", "settings")}
            facts = [
                {k: r.get(k) for k in ("final", "best", "best_step", "steps", "train_s", "wall_s", "train_loss", "error")}
                for r in rows
            ]
            print(key, json.dumps(line), *map(json.dumps, facts), sep="\n   ", flush=True)
            write_result(args.name, figures)


if __name__ == "__main__":
    main()
