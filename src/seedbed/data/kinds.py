"""Registry of dataset kinds other than text and images, for `seedbed data prepare | inspect | record`.

A recipe registers its kinds in its file `dataset.py`, which must be cheap to import.
"""

import argparse
from typing import Protocol

KINDS: "dict[str, DatasetKind]" = {}


class DatasetKind(Protocol):
    """What the data commands do with one kind of data. `given` holds the parsed options of the command.

    Of the options that only this kind has, those of `data prepare` are refused by `check_unused` where another kind prepares the
    path. What a kind leaves out it does not offer.
    """

    name: str

    def add_prepare_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def check_unused(self, given: argparse.Namespace) -> None: ...
    def can_prepare(self, path: str) -> bool: ...
    def prepare(self, given: argparse.Namespace) -> int: ...
    def can_inspect(self, path: str) -> bool: ...
    def inspect(self, given: argparse.Namespace) -> int: ...
    def add_record_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def record(self, given: argparse.Namespace) -> int: ...


def register(kind: DatasetKind) -> None:
    KINDS[kind.name] = kind
