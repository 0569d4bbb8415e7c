"""`python -m steepen`: the command line without the installed script."""

import sys

from steepen.requests.app import main

if __name__ == "__main__":
    sys.exit(main())
