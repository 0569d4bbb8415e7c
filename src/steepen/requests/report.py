"""`report`, `pack` and `unpack`: finished studies as a page with figures and tables, or as one file."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from steepen.errors import UsageError
from steepen.requests.request import Argument, Option, Request, function
from steepen.results.files import Packed
from steepen.results.files import Report as ReportFiles
from steepen.utils.codec import option
from steepen.utils.values import Text, parse_words

FormatsField: TypeAlias = Annotated[
    tuple[Literal["pdf", "svg", "png"], ...],
    Text(lambda text: parse_words(text.lower()), "any of pdf, svg and png, separated by commas"),
    Option("Figure formats: any of pdf, svg and png, separated by commas.", flag="--format"),
]


@dataclass(frozen=True)
class Report(Request[ReportFiles]):
    """Make a report of finished studies: one HTML page, figures and tables.

    OUT/report.html is self-contained: verdicts, figures with hover values, tables, method, and every run with
    its spec and record; it opens offline, on phones, and prints. OUT/figures has every figure as PDF, SVG and
    PNG, with its data as CSV; OUT/tables every table as CSV, Markdown and LaTeX. The same study gives the
    same bytes.
    """

    examples = (
        "steepen report ladder",
        "steepen report ladder-tiny studies/tpp-tiny --out report --format pdf",
    )

    study: Annotated[
        tuple[Any, ...],
        Argument(
            "Studies: directories, names (or unambiguous prefixes of names) in `studies`, or a directory "
            "that holds runs/ and studies/.",
            python="Also what `open_study` returns.",
        ),
    ]
    out: Path = option("Directory to write to; created if missing.", Path("report"))
    _: KW_ONLY
    formats: FormatsField = ("pdf", "svg", "png")
    studies: Path = option("Directory of all studies.", Path("studies"))
    runs: Path | None = option("Directory of the runs, if they have moved since the study.")
    forecasts: Path | None = option(
        "Score the forecasts of this file of `steepen fit --register` against the studies' runs."
    )

    def check(self) -> None:
        """Reject an empty list of formats, and a file where a directory is needed."""
        if not self.formats:
            raise UsageError("`formats` is empty: choose among pdf, svg and png.")
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"`out` {self.out} is a file; give a folder, which is made if there is none.")

    def run(self) -> ReportFiles:
        """Write the page, the figures and the tables."""
        from steepen.report.load_studies import expand_studies
        from steepen.report.write import make_report

        names = expand_studies([str(getattr(one, "folder", one)) for one in self.study])
        written = make_report(
            names, self.out, self.formats, studies=self.studies, runs=self.runs, forecasts=self.forecasts
        )
        there = (file for kind in ("figures", "tables") for file in (self.out / kind).glob("*"))
        return ReportFiles(written[0], tuple(written), tuple(file for file in there if file not in written))


@dataclass(frozen=True)
class Pack(Request[Packed]):
    """Pack a study with its runs, answer and report into one checksummed file."""

    examples = ("steepen pack ladder-tiny --out ladder.tar.gz",)

    study: Annotated[str | Path, Argument("Name of a study, a prefix of it, or its directory.")]
    out: Path | None = option("The file to write. Default: NAME.steepen.tar.gz.")
    _: KW_ONLY
    studies: Path = option("Directory of studies.", Path("studies"))
    runs: Path | None = option("Directory of its runs, if it has moved.")
    weights: bool = option("Add the last checkpoint of every run, optimizer state included.", False)

    def run(self) -> Packed:
        """Make the report in a hidden directory, and write everything to the file."""
        from steepen.report.write import make_report
        from steepen.studies.driver.archive import study_files, write_archive
        from steepen.studies.driver.journal import Journal, find_study_folder
        from steepen.utils.files import scratch_directory

        journal = Journal.read(find_study_folder(str(self.study), self.studies))
        name = journal.entry.name
        target = self.out or Path(f"{name}.steepen.tar.gz")
        directory = journal.runs_directory(self.runs)
        held = [asked.run for asked in journal.entry.runs if (directory / asked.run).is_dir()]
        if journal.entry.runs and not held:
            raise UsageError(f"the runs of the study {name} are not in {directory}; say where with `runs`.")
        with scratch_directory("packing", target.parent) as scratch:
            files = study_files(journal, [directory / run for run in held], weights=self.weights)
            if journal.entry.answer is not None:
                written = make_report([journal.folder], scratch / "report", ("svg",), runs=directory)
                files |= {path.relative_to(scratch).as_posix(): path for path in sorted(written)}
            write_archive(target, name, files)
        return Packed(target, name, len(held), len(files), target.stat().st_size)


@dataclass(frozen=True)
class Unpack(Request[Packed]):
    """Unpack a study below `out` (studies/NAME, runs/HASH, report/NAME), after checking every file's SHA-256.

    A file that is already there with the same content is kept; another content is rejected. All files are
    written, or none.
    """

    examples = ("steepen unpack ladder.tar.gz --out moved",)

    file: Annotated[Path, Argument("A file that `steepen pack` wrote.")]
    out: Path = option("Directory for studies/, runs/ and report/; created if missing.", Path())

    def run(self) -> Packed:
        """Check the files in a hidden directory, then move them to their places."""
        from steepen.studies.driver.archive import extract_archive

        if not self.file.is_file():
            raise UsageError(f"there is no file {self.file}; give one that `steepen pack` wrote.")
        manifest, size = extract_archive(self.file, self.out)
        runs = {name.split("/")[1] for name in manifest.files if name.startswith("runs/")}
        folder = self.out / "studies" / manifest.study
        return Packed(folder, manifest.study, len(runs), len(manifest.files), size, unpacked=True)


report = function(Report)
pack = function(Pack)
unpack = function(Unpack)
