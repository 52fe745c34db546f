"""`python -m seedbed` is the command line; torchrun starts it this way."""

import os
import sys

_HOME = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

# `python -m` puts the working directory first on the path, where any file could pose as a package that we import.
if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()) and os.path.realpath(os.getcwd()) != _HOME:
    del sys.path[0]

from seedbed.cli import main  # noqa: E402

if __name__ == "__main__":
    status = main()
    if status and "RANK" in os.environ:  # connections to other ranks stay open, and threads of theirs may abort a normal exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
