"""A pytest plugin: the fixture `seedbed_check` runs the checks on a model, and its findings fail the test."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def seedbed_check() -> Callable[..., Any]:
    """`seedbed.check` that fails the test on errors and warnings; it returns the report."""
    from seedbed.checks.foreign import check

    def run(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        report = check(*args, **kwargs)
        if report.exit_code:
            pytest.fail("\n".join(report.details()), pytrace=False)
        return report

    return run
