"""`python -m brorl` runs the command `brorl`."""

import sys

from brorl.cli import main

if __name__ == "__main__":
    sys.exit(main())
