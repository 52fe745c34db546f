"""The error for a metric that is called a score, decides `best` and would be minimised."""

from typing import NoReturn

from seedbed.errors import UserError


def refuse(metric: str) -> NoReturn:
    fix = f'write higher_is_better = ("{metric}",) in the System, or return first a number of which less is better'
    raise UserError(f"evaluate: {metric} decides `best`, and its lowest value would count as the best; {fix}")
