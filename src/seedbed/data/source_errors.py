"""Errors of a source, with the sample that causes them."""

from seedbed.data.feed import Locator
from seedbed.errors import UserError


def with_sample(locator: Locator, counter: int, error: Exception) -> Exception:
    """The error with the number of the first sample that causes it by itlocator."""
    assert locator.order is not None
    kind = UserError if isinstance(error, UserError) else RuntimeError
    for sample in (counter + locator.steps_B).tolist():
        try:
            locator.source.locate(*locator.order.at(sample, 1))
        except Exception as alone:
            return kind(f"the source failed at sample {sample}: {type(alone).__name__}: {alone}")
    return kind(f"the source failed at samples {counter} to {counter + locator.stride - 1}: {type(error).__name__}: {error}")
