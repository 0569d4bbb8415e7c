"""`steepen serve`: a local page of studies that reloads while they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steepen.cli.launch_options import Studies


def serve(
    study: Annotated[
        str | None,
        typer.Argument(help="Name of a study, a prefix of it, or its directory (default: all)."),
    ] = None,
    studies: Studies = Path("studies"),
    runs: Annotated[Path | None, typer.Option(help="Directory of its runs, if it has moved.")] = None,
    port: Annotated[
        int, typer.Option(help="Port on this machine; 0 takes a free one.", min=0, max=65535)
    ] = 8642,
) -> None:
    """Show studies in a browser while they run: progress, loss curves, the verdict so far.

    The page reloads every few seconds and becomes the report when the study
    has finished. It is read-only and reachable from this machine only; from
    another, forward the port: ssh -L 8642:localhost:8642 HOST.

    Example: steepen serve ladder
    """
    from steepen.api.serve import StudyPages, make_server

    server = make_server(StudyPages(studies, runs, study), port)
    print(f"http://localhost:{server.server_port} (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
