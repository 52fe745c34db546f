"""Drills of trouble inside a run: numbers, memory, data threads, a step that never ends, other sizes."""

from __future__ import annotations

import json
import re
import signal
import time

from seedbed.drills import faults
from seedbed.drills.lab import EVERY, STEPS, Failed, Fault, Lab, Tally, last_line, line_with, near
from seedbed.train import checkpoint
from seedbed.train.watchdog import EXIT_STALLED

AT = 2 * EVERY + 3
STOP = AT + 2


# Of each kind: what injects it, the guard's last answer, and what `replay` must name.
NOT_FINITE: dict[str, tuple[Fault, str, str]] = {
    "batch": (faults.spoiled_input(AT, STEPS), "skip", "model.embed"),
    "gradient": (faults.spoiled_gradient(AT, STEPS), "skip", "mlp"),
    "weight": (faults.at_step(AT, faults.spoil_weight), "rollback", "model.embed.weight"),
    "moment": (faults.at_step(AT, faults.spoil_moment), "rollback", "model.embed.weight"),
    # The step before a save: what the next step would notice must not be on the disk by then.
    "moment-saved": (faults.at_step(2 * EVERY, faults.spoil_moment), "rollback", "model.embed.weight"),
}


def not_finite(lab: Lab, tally: Tally) -> None:
    """NaN in a batch, a gradient, a weight, the optimizer's moments: skipped or rolled back, never saved, named by `replay`."""
    for name, (fault, answer, place) in NOT_FINITE.items():
        said = lab.train(name, fault=fault)
        bad = lab.events(name, "nonfinite")
        if not bad or lab.status(name) != "done" or bad[-1]["answer"] != answer:
            raise Failed(f"{name}: {[e['answer'] for e in bad]}, status {lab.status(name)}")
        tally.saw(line_with(said, "is not finite").removeprefix("warning: "))
        _all_finite(lab, name)
        tally.said.append(f"replay of the {name}: {_named(lab, name, bad[0]['step'], fault, place)}")
        if lab.short:
            continue
        # The same again, stopped after the trouble and resumed: the story is kept in the checkpoint.
        stop = faults.at_step(4 * EVERY + 1, faults.send(signal.SIGTERM))
        lab.train(f"{name}-2", fault=both(fault, stop), code=143)
        lab.resume(f"{name}-2")
        lab.same_end(name, f"{name}-2")
    tally.exact = "yes"


def both(one: Fault, two: Fault) -> Fault:
    def inject() -> None:
        one()
        two()

    return inject


def _all_finite(lab: Lab, name: str) -> None:
    for path in checkpoint.steps_in(lab.checkpoints(name)):
        tensors = checkpoint.load(path).tensors
        wrong = [n for group in tensors.values() for n, t in group.items() if not t.isfinite().all()]
        if wrong:
            raise Failed(f"{name}: {path.name} holds numbers that are not finite in {wrong[0]}")


def _named(lab: Lab, name: str, step: int, fault: Fault, place: str) -> str:
    """What `replay` says of the bad step, which must name the step and the place."""
    child = lab.start("replay", name, str(step), "--json", fault=fault)
    code, said = lab.wait(child), child.said()
    found = json.loads(said[said.find("{") :]) if "{" in said else {}
    if code or not found.get("reproduced") or found["step"] != step or place not in json.dumps(found):
        raise Failed(f"replay did not name {place} of {name}: {found.get('what') or last_line(said)}")
    return found["what"]


def out_of_memory(lab: Lab, tally: Tally) -> None:
    """Memory for fewer items than a micro-batch, at once, from a later step, and for none: shrunk and recorded, or told."""
    plain = ("model.dropout=0.0", "accum=1")  # dropout draws by micro-batch: other parts, other masks
    lab.train("straight", *plain)
    for name, limit, step in (("early", 4, 1), ("late", 2, AT)):
        said = lab.train(name, *plain, fault=faults.out_of_memory(limit, step))
        tally.saw(line_with(said, "out of memory; now"))
        events = lab.events(name, "out_of_memory")
        if events[-1]["micro_batch"] != limit or lab.run_folder(name).joinpath("config.json").read_text().count('"accum"') < 2:
            raise Failed(f"{name}: recorded {events[-1]}")
        near(lab, "straight", name, 1e-4)
    stop = faults.at_step(STOP, faults.send(signal.SIGTERM))
    lab.train("stopped", *plain, fault=both(faults.out_of_memory(2, AT), stop), code=143)
    lab.resume("stopped", fault=faults.out_of_memory(2, 1))
    lab.same_end("late", "stopped")
    said = lab.train("hopeless", *plain, fault=faults.out_of_memory(0, AT), code=2)
    tally.saw(line_with(said, "with one item at a time").removeprefix("seedbed: "))
    lab.resume("hopeless")
    tally.exact = "same batch, other sums: losses within 1e-4"


def feed(lab: Lab, tally: Tally) -> None:
    """The thread that reads the data raises, dies or hangs: told within a step with the samples it was reading; resumed."""
    first = AT * 8

    def raises(counter: int) -> None:
        if counter == first:
            raise OSError(5, "Input/output error")

    def leaves(counter: int) -> None:
        if counter == first:
            raise SystemExit

    def hangs(counter: int) -> None:
        if counter == first:
            time.sleep(3600)

    lab.train("straight", fault=faults.thread_reads(lambda counter: None))
    for name, (act, code, words) in {
        "raises": (raises, 2, f"samples {first} to {first + 7} cannot be read"),
        "leaves": (leaves, 1, f"ended by SystemExit while it read samples {first} to {first + 7}"),
        "dies": (lambda counter: None, 1, "RuntimeError: the feed's thread died before sample"),
        "hangs": (hangs, 2, f"samples {first} to {first + 7} for"),
    }.items():
        fault = faults.thread_reads(act)
        said = lab.train(name, fault=both(fault, faults.thread_dies(first)) if name == "dies" else fault, code=code)
        told = line_with(said, words).removeprefix("seedbed: ")
        tally.saw(told)
        _within_a_step(lab, name, told)
        lab.resume(name)
        lab.same_end("straight", name)
    tally.exact = "yes"


def _within_a_step(lab: Lab, name: str, told: str) -> None:
    """Every step before the one whose samples are named was taken; measurements arrive one step late."""
    sample = re.search(r"samples? (\d+)", told)
    last = lab.rows(name)[-1]["step"]
    if not sample or last != int(sample[1]) // 8 - 1:
        raise Failed(f"{name}: told after step {last}: {told}")


def hang(lab: Lab, tally: Tally) -> None:
    """A step that never ends: every thread's stack, the status `stalled`, an exit code of its own; resumed."""
    lab.train("straight")
    said = lab.train("stuck", "guard.stall=1", fault=faults.at_step(AT, faults.hang), code=EXIT_STALLED)
    tally.saw(line_with(said, "has not ended after").removeprefix("seedbed: ").partition("; it stands")[0])
    if lab.status("stuck") != "stalled" or "MainThread" not in (lab.run_folder("stuck") / "stacks.txt").read_text():
        raise Failed(f"status {lab.status('stuck')}")
    line_with(said, "in hang")
    lab.resume("stuck", "guard.stall=none")
    lab.same_end("straight", "stuck")
    tally.exact = "yes"


def sizes(lab: Lab, tally: Tally) -> None:
    """Stopped, then resumed in other parts and with another batch: the same items in the same order, the same losses."""
    plain = ("model.dropout=0.0",)
    lab.train("straight", *plain)
    stop = faults.at_step(2 * EVERY, faults.send(signal.SIGTERM))
    lab.train("parts", *plain, fault=stop, code=143)
    lab.resume("parts", "accum=8")
    near(lab, "straight", "parts", 1e-5)
    lab.train("batch", *plain, fault=stop, code=143)
    lab.resume("batch", "batch=16", "accum=4")
    tally.saw(f"the run ends after as many items: {_items(lab, 'straight')}")
    if _items(lab, "batch") != _items(lab, "straight"):
        raise Failed(f"{_items(lab, 'batch')} items against {_items(lab, 'straight')}")
    tally.injected += 1
    tally.detected += 1
    tally.exact = "same batch: losses within 1e-5"


def _items(lab: Lab, name: str) -> int:
    return lab.newest(name).state["items"]
