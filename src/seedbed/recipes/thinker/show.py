"""Text output of a thinker: its capacity, sample answers, the answer to a prompt, and the full evaluation as a table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from seedbed.errors import UserError
from seedbed.recipes.thinker.addition import Addition
from seedbed.recipes.thinker.data import TaskSource
from seedbed.recipes.thinker.evaluate import Inference, predict
from seedbed.recipes.thinker.program import LOOKUP, WRITE

if TYPE_CHECKING:
    from seedbed.recipes.thinker.system import ThinkerSystem

NUM_EXAMPLES = 4


def capacity(system: ThinkerSystem) -> str:
    """Bits and tokens of an answer, against the vectors that the decoder reads."""
    shape = system.source.shape
    latents, vectors = system.latents, num_vectors(system)
    bits = shape.num_out * math.log2(shape.symbols)
    many = f"{latents.low} to {vectors}" if latents.low < latents.high else str(vectors)
    rate = shape.num_out / vectors
    width = system.config.model.width
    return f"{bits:.0f} bits in {shape.num_out} tokens from {many} vectors of {width}: {rate:.3g} tokens a vector"


def num_vectors(system: ThinkerSystem) -> int:
    """The largest number of vectors that one answer is read from: the latents, and the memory of a row that looks it up."""
    best, writes = 1, 0
    rows = system.program.rows(system.steps.high) if system.program else ((1, 1, 1, 0, 1),) * system.steps.high
    for row in rows:
        writes = min(writes + row[WRITE], system.model.num_memory)
        best = max(best, 1 + (writes if row[LOOKUP] else 0))
    return best * system.latents.high


def examples(system: ThinkerSystem, source: TaskSource, inference: Inference, num: int) -> str:
    device = next(system.parameters()).device
    batch = source.at(source.task.length).batch({"index": torch.arange(num, device=device)})
    answer_BM, task = predict(system, batch, inference)[-1].argmax(-1), source.task
    lines = []
    for x, y, keep, answer in zip(*(t.tolist() for t in (batch["x"], batch["y"], batch["keep"], answer_BM)), strict=True):
        given = [token if counts else task.pad for token, counts in zip(answer, keep, strict=True)]
        wanted = [token if counts else task.pad for token, counts in zip(y, keep, strict=True)]
        verdict = "right" if given == wanted else f"wrong, it is {task.to_text(wanted)}"
        lines.append(f"{task.to_text(x)} -> {task.to_text(given)}  {verdict}")
    return "\n".join(lines)


def answer(system: ThinkerSystem, source: TaskSource, prompt: str, inference: Inference) -> str:
    """The thinker's answer to a typed input, and the right one."""
    task, device = source.task, next(system.parameters()).device
    names = {task.to_text([token]): token for token in range(source.shape.vocab) if token != task.pad}
    words = prompt.split()
    for word in words:
        if word not in names:
            raise UserError(f"{word!r} is not a token of task {task.name}; there are: {' '.join(names)}")
    if not words:
        raise UserError(f"an input is tokens with blanks between them, such as --prompt {' '.join(list(names)[:3])!r}")
    x = [names[word] for word in words]
    try:
        wanted = task.target(x)
    except (ValueError, IndexError):
        raise UserError(f"{prompt!r} is not an input of task {task.name}; one looks like this: {source.example()}") from None
    shape = source.shape
    fill = [task.pad] * (shape.num_in - len(x))
    padded = [*fill, *x] if isinstance(task, Addition) else [*x, *fill]
    x_1N = torch.tensor([padded], device=device)
    y_1M = torch.full((1, max(shape.num_out, len(wanted))), task.pad, device=device)
    learn_1M = torch.arange(y_1M.shape[1], device=device)[None] < len(wanted)
    batch = {"x": x_1N, "y": y_1M, "learn": learn_1M, "index": torch.zeros(1, dtype=torch.int64, device=device)}
    answer = predict(system, batch, inference)[-1, 0].argmax(-1).tolist()[: len(wanted)]
    verdict = "right" if answer == wanted else f"wrong, it is {task.to_text(wanted)}"
    return f"{task.to_text(x)} -> {task.to_text(answer)}  {verdict}"


def table(found: dict[str, Any]) -> str:
    if found["leak"]:
        return f"{found['leak_check']}\nthe numbers of this run are withheld"
    wrong, num = found["num_wrong"], found["num"]
    bound = f", so at most {found['error_bound']:.1e} wrong" if found["error_bound"] else ""
    curve, cells = found["curve"], found["map"]
    last = curve["steps"][-1]
    trivial = {name: value for name, value in found["baselines"].items() if name.endswith("_token")}
    lines = [
        f"exact match        {found['exact']:.4%} (spread {found['exact_spread']:.4%} over {len(wrong)} draws of noise)",
        f"                   {wrong[0]} of {num:,} wrong in the first draw{bound}",
        f"tokens right       {found['token']:.4%}; trivial answers: "
        + ", ".join(f"{name.removesuffix('_token').replace('_', ' ')} {value:.1%}" for name, value in trivial.items()),
        f"two draws agree    {found['same_answer_of_two_draws']:.2%}; exact by vote {found['exact_by_vote']:.2%}, "
        f"at the surest step {found['exact_at_surest_step']:.2%}",
        f"at {last} steps{'':<{10 - len(str(last))}}exact {curve['exact'][-1]:.2%}, tokens {curve['token'][-1]:.2%}",
        f"inside the box     tokens at least {_worst(cells, True):.2%}; outside at least {_worst(cells, False):.2%}",
        f"leak check         passed: {found['leak_check']}",
    ]
    lines += [f"program {name:<14}exact {row['exact']:.2%}, tokens {row['token']:.2%}" for name, row in found["programs"].items()]
    lines += [f"length {row['length']:<12}tokens {row['token']:.2%}, exact {row['exact']:.2%}" for row in found["longer"][:9]]
    if found["pairs"]:
        pairs = found["pairs"]
        held = f"; held out {pairs['exact_held']:.4%} of {pairs['num_held']:,}" if "num_held" in pairs else ""
        lines.append(f"all {pairs['num']:,} pairs  {pairs['exact']:.4%} exact, {pairs['num_wrong']:,} wrong{held}")
    return "\n".join(lines)


def _worst(cells: dict[str, Any], inside: bool) -> float:
    low_k, high_k, low_t, high_t = cells["box"]
    found = [
        value
        for number, row in zip(cells["latents"], cells["token"], strict=True)
        for step, value in zip(cells["steps"], row, strict=True)
        if (low_k <= number <= high_k and low_t <= step <= high_t) == inside
    ]
    return min(found, default=math.nan)
