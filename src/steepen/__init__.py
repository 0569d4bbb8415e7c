"""steepen: does a change to an architecture make its scaling law steeper, or only lower?"""

from __future__ import annotations

__version__ = "0.1.0"
