"""Before the first step of a recipe in a user's own file: is there an evaluation, and does `best` follow it the right way?"""

import contextlib

from seedbed.checks.small_jobs import evaluate, small_source
from seedbed.errors import UserError
from seedbed.nn import eagerly
from seedbed.track.events import is_score
from seedbed.train.job import Job
from seedbed.train.recipe_mistakes import refuse_score
from seedbed.train.system import System, maximized


def look_at_evaluation(job: Job) -> None:
    """Evaluate a few items, for the names of the metrics; what else may go wrong with so few is left to the first evaluation."""
    name = type(job.system).__name__
    if type(job.system).evaluate is System.evaluate:
        fix = 'return numbers on held-out data by name, as in {"error": 0.5}; the first one decides `best`'
        raise UserError(f"{name} has no evaluate(self, source, engine): {fix}")
    if job.system.evaluation_steers:
        return
    numbers: dict[str, float] = {}
    with contextlib.suppress(Exception), eagerly():
        numbers = evaluate(job.engine, small_source(job.data.valid))
    first = next(iter(numbers), "") if isinstance(numbers, dict) else ""
    if is_score(first) and first not in maximized(job.system, numbers):
        refuse_score(first)
