"""`status` and `serve`: the progress of studies, in a terminal or in a browser."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from steepen.errors import UsageError
from steepen.requests.request import Argument, Request, function
from steepen.utils.codec import Range, option
from steepen.utils.formatting import unwrapped

if TYPE_CHECKING:
    from steepen.results.study import Status as Progress

WATCH_SECONDS = 5.0
START_SECONDS = 60.0  # `watch`: the longest time between the end of a preparation and the journal


@dataclass(frozen=True)
class OfStudies:
    """Which studies a verb looks at, and where they and their runs are."""

    study: Annotated[
        str | Path | None, Argument("Name of a study, a prefix of it, or its directory. Default: all.")
    ] = None
    _: KW_ONLY
    studies: Path = option("Directory of studies.", Path("studies"))
    runs: Path | None = option("Directory of its runs, if it has moved.")


@dataclass(frozen=True)
class Status(OfStudies, Request["Progress"]):
    """Show the progress of a study: runs by status, FLOPs done and left, and ETA.

    It reads files only, so it works on any machine that mounts the directory.
    """

    examples = ("steepen status ladder --watch",)
    tables = True

    _: KW_ONLY
    watch: bool = option("Show it again every few seconds until the study ends.", False)

    def run(self) -> Progress:
        """The progress as the files have it now."""
        from steepen.results.study import Status as Progress
        from steepen.studies.driver import journal as journals
        from steepen.studies.driver.study_status import study_status, with_mistuned

        if self.study is None:
            check_directory(self.studies)
            readable, unreadable = journals.read_journals(self.studies)
            found = tuple(study_status(journal, self.runs) for journal in readable)
            preparing = tuple(journals.list_preparing(self.studies))
            return Progress(found, preparing, unreadable, directory=str(self.studies))
        try:
            folder = journals.find_study_folder(str(self.study), self.studies)
        except UsageError:
            name = journals.find_preparing(str(self.study), self.studies)
            if name is None:
                raise
            return Progress((), (name,), alone=True)
        return Progress((with_mistuned(study_status(journals.Journal.read(folder), self.runs)),), alone=True)

    def run_in_terminal(self, as_json: bool = False) -> Any:
        """Print it once, or with `watch` again and again until the study has ended."""
        if self.watch and as_json:
            raise UsageError("`watch` shows text for people; ask for JSON again and again instead.")
        if not self.watch:
            return self.run()
        prepared = -math.inf  # when the study was last seen preparing its data
        while True:
            if sys.stdout.isatty():
                print("\x1b[H\x1b[2J", end="", file=unwrapped(sys.stdout))  # home, and clear the screen
            try:
                found = self.run()
            except UsageError:
                if time.monotonic() - prepared > START_SECONDS:
                    raise
            else:
                found.print()
                if found.state == "preparing":
                    prepared = time.monotonic()
                elif found.state == "ended":
                    return None
            sys.stdout.flush()
            time.sleep(WATCH_SECONDS)


def check_directory(studies: Path) -> None:
    """Raise UsageError if there is no directory of studies."""
    if not studies.is_dir():
        raise UsageError(f"there is no directory {studies}; name that of your studies with `studies`.")


@dataclass(frozen=True)
class Serve(OfStudies, Request[None]):
    """Show studies in a browser while they run: progress, loss curves, the verdict so far.

    The page reloads every few seconds and becomes the report when the study has finished. It is read-only and
    reachable from this machine only; from another, forward the port: `ssh -L 8642:localhost:8642 HOST`.
    """

    examples = ("steepen serve ladder",)

    _: KW_ONLY
    port: int = option("Port on this machine; 0 takes a free one.", 8642, Range(0, 65535))

    def run(self) -> None:
        """Serve until Ctrl-C."""
        from steepen.report.serve import StudyPages, make_server

        if self.study is None:
            check_directory(self.studies)
        only = None if self.study is None else str(self.study)
        server = make_server(StudyPages(self.studies, self.runs, only), self.port)
        print(f"http://localhost:{server.server_port} (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
        finally:
            server.server_close()


status = function(Status)
