"""Pack the tables that the paper's authors publish into src/steepen/reproduction/assets/authors_tables.zip.

    python tools/pack_authors_tables.py DIRECTORY

DIRECTORY holds their measurements as CSV. The tables that `tables/assets` has already are left out.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "steepen"
TARGET = PACKAGE / "reproduction" / "assets" / "authors_tables.zip"


def main() -> None:
    """Write the archive; the same tables give the same bytes."""
    with zipfile.ZipFile(TARGET, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(Path(sys.argv[1]).glob("*.csv")):
            if not (PACKAGE / "laws" / "assets" / path.name).exists():
                entry = zipfile.ZipInfo(path.name, (1980, 1, 1, 0, 0, 0))
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, path.read_bytes())
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
