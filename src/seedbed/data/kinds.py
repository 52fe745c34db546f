"""Registry of dataset kinds other than text and images, for `seedbed data prepare | inspect | record`.

A recipe registers its kinds in its file `dataset.py`, which must be cheap to import.
"""

import argparse

KINDS: "dict[str, DatasetKind]" = {}


class DatasetKind:
    """What the data commands do with one kind of data. `given` holds the parsed options of the command."""

    name = ""

    def add_prepare_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of `data prepare` that only this kind has."""

    def check_unused(self, given: argparse.Namespace) -> None:
        """Refuse those options where another kind prepares the path."""

    def can_prepare(self, path: str) -> bool:
        return False

    def prepare(self, given: argparse.Namespace) -> int:
        raise NotImplementedError

    def can_inspect(self, path: str) -> bool:
        return False

    def inspect(self, given: argparse.Namespace) -> int:
        raise NotImplementedError

    def add_record_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of `data record`, for the kind that can be recorded."""

    def record(self, given: argparse.Namespace) -> int:
        raise NotImplementedError


def register(kind: DatasetKind) -> None:
    KINDS[kind.name] = kind
