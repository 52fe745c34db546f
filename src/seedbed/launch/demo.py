"""`seedbed demo`: trains gpt/demo, then prints commands to try next."""

import shutil
import sys
from pathlib import Path

from seedbed.errors import EXIT_OK
from seedbed.launch.local import train


def demo(root: Path) -> int:
    """Train gpt/demo, then print commands to try next."""
    status = train("gpt/demo", [], root=root, why="the demo: watch a small GPT learn", dirty=True, check="quick")
    if status == EXIT_OK:
        name = max((p for p in root.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime).name
        command = _command()
        print("\nNow try:")
        print(f'  {command} sample {name} --prompt "The statement " --tokens 300')
        print(f"  {command} train gpt/demo model.depth=2 -m 'is half the depth enough?'")
        print(f"  {command} runs list")
        print(f"  {command} serve")
    return status


def _command() -> str:
    """How to call this program from the shell: its name, or its path when it is not on PATH."""
    found, called = shutil.which("seedbed"), Path(sys.argv[0])
    if called.name != "seedbed" or (found and Path(found).resolve() == called.resolve()):
        return "seedbed"
    return str(called.relative_to(Path.cwd()) if called.is_absolute() and called.is_relative_to(Path.cwd()) else called)
