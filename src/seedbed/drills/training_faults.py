"""Drills of non-finite values, out of memory, failing data threads, hanging steps and changed sizes."""

import json
import re
import signal
import time

from seedbed.drills import faults
from seedbed.drills.sandbox import EVERY, STEPS, DrillResult, Failed, Fault, Sandbox, last_line, line_with, require_close
from seedbed.errors import EXIT_STALLED
from seedbed.train import checkpoint, checkpoint_loading

AT = 2 * EVERY + 3
STOP = AT + 2


# Of each kind: the injection, the guard's last action, and what `replay` must name.
NOT_FINITE: dict[str, tuple[Fault, str, str]] = {
    "batch": (faults.corrupt_input(AT, STEPS), "skip", "model.embed"),
    "gradient": (faults.corrupt_gradient(AT, STEPS), "skip", "mlp"),
    "weight": (faults.at_step(AT, faults.corrupt_weight), "rollback", "model.embed.weight"),
    "moment": (faults.at_step(AT, faults.corrupt_moment), "rollback", "model.embed.weight"),
    # The step before a save: what the next step would detect must not be saved.
    "moment-saved": (faults.at_step(2 * EVERY, faults.corrupt_moment), "rollback", "model.embed.weight"),
}


def not_finite(sandbox: Sandbox, result: DrillResult) -> None:
    """NaN in a batch, a gradient, a weight, the optimizer's moments: skipped or rolled back, never saved, named by `replay`."""
    for name, (fault, answer, place) in NOT_FINITE.items():
        output = sandbox.train(name, fault=fault)
        bad = sandbox.events(name, "nonfinite")
        if not bad or sandbox.status(name) != "done" or bad[-1]["answer"] != answer:
            raise Failed(f"{name}: {[e['answer'] for e in bad]}, status {sandbox.status(name)}")
        result.add(line_with(output, "is not finite").removeprefix("warning: "))
        for path in checkpoint.steps_in(sandbox.checkpoints(name)):
            tensors = checkpoint_loading.load(path).tensors
            wrong = [n for group in tensors.values() for n, t in group.items() if not t.isfinite().all()]
            if wrong:
                raise Failed(f"{name}: {path.name} holds numbers that are not finite in {wrong[0]}")
        result.messages.append(f"replay of the {name}: {_named(sandbox, name, bad[0]['step'], fault, place)}")
        if sandbox.short:
            continue
        # The same again, stopped after the fault and resumed: guard state is in the checkpoint.
        stop = faults.at_step(4 * EVERY + 1, faults.send(signal.SIGTERM))
        sandbox.train(f"{name}-2", fault=both(fault, stop), code=143)
        sandbox.resume(f"{name}-2", same_as=name)


def both(one: Fault, two: Fault) -> Fault:
    return lambda: (one(), two())


def _named(sandbox: Sandbox, name: str, step: int, fault: Fault, place: str) -> str:
    """The message of `replay` for the bad step, which must name the step and the place."""
    child = sandbox.start("replay", name, str(step), "--json", fault=fault)
    code, output = sandbox.wait(child), child.output()
    found = json.loads(output[output.find("{") :]) if "{" in output else {}
    if code or not found.get("reproduced") or found["step"] != step or place not in json.dumps(found):
        raise Failed(f"replay did not name {place} of {name}: {found.get('what') or last_line(output)}")
    return found["what"]


def out_of_memory(sandbox: Sandbox, result: DrillResult) -> None:
    """Memory for fewer items than a micro-batch, at once, from a later step, and for none: micro-batch reduced, or an error."""
    plain = ("model.dropout=0.0", "accum=1")  # dropout draws by micro-batch: other parts, other masks
    sandbox.train("straight", *plain)
    for name, limit, step in (("early", 4, 1), ("late", 2, AT)):
        output = sandbox.train(name, *plain, fault=faults.out_of_memory(limit, step))
        result.add(line_with(output, "out of memory; now"))
        events = sandbox.events(name, "out_of_memory")
        config = sandbox.run_folder(name).joinpath("config.json").read_text()
        if events[-1]["micro_batch"] != limit or config.count('"accum"') < 2:
            raise Failed(f"{name}: recorded {events[-1]}")
        require_close(sandbox, "straight", name, 1e-4)
    stop = faults.at_step(STOP, faults.send(signal.SIGTERM))
    sandbox.train("stopped", *plain, fault=both(faults.out_of_memory(2, AT), stop), code=143)
    sandbox.resume("stopped", fault=faults.out_of_memory(2, 1), same_as="late")
    output = sandbox.train("hopeless", *plain, fault=faults.out_of_memory(0, AT), code=2)
    result.add(line_with(output, "with one item at a time").removeprefix("seedbed: "))
    sandbox.resume("hopeless")


def feed(sandbox: Sandbox, result: DrillResult) -> None:
    """The thread that reads the data raises, dies or hangs: reported within a step with the samples it was reading; resumed."""
    first = AT * 8

    sandbox.train("straight", fault=faults.thread_reads(lambda counter: None))
    for name, (act, code, words) in {
        "raises": (lambda: faults.fail(OSError(5, "Input/output error")), 2, f"samples {first} to {first + 7} cannot be read"),
        "leaves": (lambda: faults.fail(SystemExit()), 1, f"ended by SystemExit while it read samples {first} to {first + 7}"),
        "dies": (lambda: None, 1, "RuntimeError: the feed's thread died before sample"),
        "hangs": (lambda: time.sleep(3600), 2, f"samples {first} to {first + 7} for"),
    }.items():
        fault = faults.thread_reads(lambda counter, act=act: act() if counter == first else None)
        output = sandbox.train(name, fault=both(fault, faults.thread_dies(first)) if name == "dies" else fault, code=code)
        message = line_with(output, words).removeprefix("seedbed: ")
        result.add(message)
        # All steps before the named samples were taken; metrics arrive one step late.
        sample, last = re.search(r"samples? (\d+)", message), sandbox.rows(name)[-1]["step"]
        if not sample or last != int(sample[1]) // 8 - 1:
            raise Failed(f"{name}: reported after step {last}: {message}")
        sandbox.resume(name, same_as="straight")


def hang(sandbox: Sandbox, result: DrillResult) -> None:
    """A step that never ends: every thread's stack is printed, status `stalled`, its own exit code; resumed."""
    sandbox.train("straight")
    output = sandbox.train("stuck", "guard.stall=1", fault=faults.at_step(AT, faults.hang), code=EXIT_STALLED)
    result.add(line_with(output, "has not ended after").removeprefix("seedbed: ").partition("; it stands")[0])
    if sandbox.status("stuck") != "stalled" or "MainThread" not in (sandbox.run_folder("stuck") / "stacks.txt").read_text():
        raise Failed(f"status {sandbox.status('stuck')}")
    line_with(output, "in hang")
    sandbox.resume("stuck", "guard.stall=none", same_as="straight")


def sizes(sandbox: Sandbox, result: DrillResult) -> None:
    """Stopped, then resumed with another accum and another batch: the same items in the same order, the same losses."""
    plain = ("model.dropout=0.0",)
    sandbox.train("straight", *plain)
    stop = faults.at_step(2 * EVERY, faults.send(signal.SIGTERM))
    sandbox.train("parts", *plain, fault=stop, code=143)
    sandbox.resume("parts", "accum=8")
    require_close(sandbox, "straight", "parts", 1e-5)
    sandbox.train("batch", *plain, fault=stop, code=143)
    sandbox.resume("batch", "batch=16", "accum=4")
    wanted, found = (sandbox.newest(name).state["items"] for name in ("straight", "batch"))
    result.add(f"the run ends after as many items: {wanted}")
    if found != wanted:
        raise Failed(f"{found} items against {wanted}")
    result.add()
