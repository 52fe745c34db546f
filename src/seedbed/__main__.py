"""`python -m seedbed` is the command line; torchrun starts it this way."""

import sys

from seedbed.cli import main

if __name__ == "__main__":
    sys.exit(main())
