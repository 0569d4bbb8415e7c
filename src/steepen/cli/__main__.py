"""`python -m steepen.cli`, for launchers that start a command in a fresh interpreter."""

import sys

from steepen.cli.app import main

sys.exit(main())
