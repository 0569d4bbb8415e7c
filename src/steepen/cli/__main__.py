"""`python -m steepen.cli`, the same as `python -m steepen`."""

import sys

from steepen.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
