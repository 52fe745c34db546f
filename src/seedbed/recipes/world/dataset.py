"""Registers recordings as a dataset kind: `seedbed data prepare | inspect | record` find them here."""

import argparse
from pathlib import Path

from seedbed.data.kinds import DatasetKind, register
from seedbed.errors import UserError


class RecordingKind(DatasetKind):
    """Frames and the controls between them, imported from files or recorded from a simulator."""

    name = "recording"

    def add_prepare_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--shift-actions", type=int, default=0, metavar="N", help="action[t] becomes action[t+N]")
        parser.add_argument("--flip", action="append", default=[], metavar="AXIS", help="negate a control; repeatable")
        parser.add_argument(
            "--accept-lag", action="store_true", help="keep a recording although its controls look shifted or reversed"
        )

    def check_unused(self, given: argparse.Namespace) -> None:
        if given.shift_actions or given.flip or given.accept_lag:
            raise UserError(
                f"{given.path} has no controls to correct: --shift-actions, --flip and --accept-lag are for recordings"
            )

    def can_prepare(self, path: str) -> bool:
        from seedbed.recipes.world.recording.importing import is_importable

        return is_importable(path)

    def prepare(self, given: argparse.Namespace) -> int:
        from seedbed.recipes.world.recording import verbs

        if abs(given.shift_actions) > 64:
            raise UserError(f"--shift-actions: {given.shift_actions} is not between -64 and 64")
        return verbs.prepare(given)

    def can_inspect(self, path: str) -> bool:
        from seedbed.recipes.world.recording.recording import is_recording

        return is_recording(Path(path).expanduser())

    def inspect(self, given: argparse.Namespace) -> int:
        from seedbed.recipes.world.recording import verbs

        return verbs.inspect(given)

    def add_record_arguments(self, parser: argparse.ArgumentParser) -> None:
        from seedbed.recipes.world.simulators import HELP

        parser.add_argument("source", metavar="SIMULATOR", help=HELP)

    def record(self, given: argparse.Namespace) -> int:
        from seedbed.recipes.world.recording import verbs

        return verbs.record(given)


register(RecordingKind())
