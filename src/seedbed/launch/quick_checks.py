"""The quick checks before the first step of a run: a failure stops it, unless it is forced."""

from seedbed.checks.preflight import before_training
from seedbed.data.feed import Data
from seedbed.launch.local import Launch
from seedbed.track import clocks


def are_passed(launch: Launch, data: Data, check: str) -> bool:
    """Whether training may start. The findings are written into the run's folder."""
    run, console, clock, preset = launch.run, launch.console, launch.clock, launch.run.config_json()["preset"]
    about = {"root": run.path.parent, "folder": run.path, "say": console.line, "data": data}
    with clock.timer("preflight"):
        report = before_training(launch.recipe, preset, launch.config, **about)
    errors, warnings = ([f.id for f in report.of(severity)] for severity in ("err", "warn"))
    outcome = "forced" if errors and check == "force" else "failed" if errors else "passed"
    run.event(0, "preflight", outcome=outcome, errors=errors, warnings=warnings)
    if outcome == "failed":
        reason = f"preflight: {', '.join(errors)}"
        run.set_status("failed", error=reason)
        run.close()
        console.line(f"wall    {clocks.split_line(clock.split())}")
        console.line(f"{reason}: not started; fix it, or start anyway with --force", style="bold")
    return outcome != "failed"
