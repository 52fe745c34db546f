"""The user's own recipe file in the folders of its runs."""

import shutil

from seedbed.recipes import Recipe
from seedbed.track import code_patch
from seedbed.track.run import Run


def copy_files(recipe: Recipe, run: Run) -> None:
    """Copy the file into the run folder, unless it contains a secret."""
    for path in recipe.files():
        if what := code_patch.found(path.read_bytes()):
            run.warn(f"{path.name} holds {what}, so it is not copied into the run folder; read it from the environment instead")
        else:
            shutil.copy2(path, run.path / path.name)
            run.remember(path.name)
