"""Assemble the commands, and turn errors into one sentence on stderr and an exit code."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
import typer.main

from steepen.cli import (
    best_passes,
    data,
    downstream,
    evaluate,
    export,
    fit,
    forecast,
    generate,
    pack,
    plan,
    power,
    report,
    runs,
    serve,
    status,
    study,
    train,
)
from steepen.cli.former_options import former_options
from steepen.cli.short_types import shorten_types
from steepen.errors import SteepenError, is_out_of_memory, shorten
from steepen.utils.imports import code_from
from steepen.utils.printable_stream import printable_output

# Groups of `steepen --help`, in the order in which a project uses them.
PLAN = "Plan"
RUN = "Run"
INSPECT = "Inspect"
ANALYSE = "Analyse"
MODELS = "Models"

app = typer.Typer(
    name="steepen",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Every command takes --debug, which shows the full traceback of an error, and --trust-code, with "
    "which files may name custom code (module:attribute); names on the command line are trusted.",
)


def _print_version(requested: bool) -> None:
    if requested:
        import steepen

        typer.echo(f"steepen {steepen.__version__}")
        raise typer.Exit


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction]
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Does a change to an architecture make its scaling law steeper, or only lower?"""


# One-line summaries of the root help page.
app.command("arms", rich_help_panel=PLAN, short_help="List the arms and their sizes.")(plan.arms)
app.command("plan", rich_help_panel=PLAN, short_help="Plan one run: size, tokens, hyperparameters, cost.")(
    plan.plan
)
app.command("best-passes", rich_help_panel=PLAN, short_help="The best number of core passes at a size.")(
    best_passes.best_passes
)
app.command(
    "power",
    rich_help_panel=PLAN,
    short_help="Statistical power of a planned ladder.",
    context_settings=former_options({"arms": "comparisons"}),
)(power.power)
app.add_typer(
    data.app, name="data", rich_help_panel=RUN, short_help="Prepare, show and verify tokenized text."
)
app.command("train", rich_help_panel=RUN, short_help="Train or resume one run.")(train.train)
app.command("study", rich_help_panel=RUN, short_help="Run or resume a study: all its runs and its answer.")(
    study.study
)
app.add_typer(
    runs.app, name="runs", rich_help_panel=INSPECT, short_help="List, show, compare and clean runs."
)
app.command("status", rich_help_panel=INSPECT, short_help="Show the progress of a study.")(status.status)
app.command("serve", rich_help_panel=INSPECT, short_help="Show studies in a browser while they run.")(
    serve.serve
)
app.command("pack", rich_help_panel=INSPECT, short_help="Pack a study into one file, to share or move it.")(
    pack.pack
)
app.command("unpack", rich_help_panel=INSPECT, short_help="Unpack a study.")(pack.unpack)
app.add_typer(
    evaluate.app,
    name="eval",
    rich_help_panel=ANALYSE,
    short_help="Score a checkpoint: loss, CORE, KL depth, passes.",
)
app.command(
    "fit",
    rich_help_panel=ANALYSE,
    short_help="Fit scaling laws to a table and judge the arms.",
    context_settings=former_options({"loss": "objective", "tied": "equal-exponents", "table": "write-table"}),
)(fit.fit)
app.command("forecast", rich_help_panel=ANALYSE, short_help="Forecast CORE at a larger compute budget.")(
    forecast.forecast
)
app.command(
    "downstream", rich_help_panel=ANALYSE, short_help="Scores along ladders, at equal loss, and beyond."
)(downstream.downstream)
app.command("report", rich_help_panel=ANALYSE, short_help="Write a study's page, figures and tables.")(
    report.report
)
app.command("generate", rich_help_panel=MODELS, short_help="Continue a prompt with a trained network.")(
    generate.generate
)
app.command("export", rich_help_panel=MODELS, short_help="Export a run to transformers or safetensors.")(
    export.export
)
app.command("import", rich_help_panel=MODELS, short_help="Import an exported model as a run.")(export.import_)


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code. `arguments` defaults to `sys.argv[1:]`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words or os.environ.get("STEEPEN_DEBUG") == "1"
    trust = "--trust-code" in words
    words = [word for word in words if word not in ("--debug", "--trust-code")]
    _mend_streams()
    # Set before torch is imported: OpenMP threads that spin while they wait stall each other on busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        Path.cwd()
    except FileNotFoundError:  # libraries fail there with messages of their own
        _print_error("the current directory was removed; change to another one.")
        return 1
    try:
        with code_from(words, trust_all=trust), printable_output():
            shorten_types(typer.main.get_command(app))(args=words, prog_name="steepen")
        return 0
    except SystemExit as stop:  # typer has printed its own usage message, or the command chose a code
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        _print_error("stopped by the user.")
        return 130
    except BrokenPipeError:
        # The process that read our output (head, less) has exited; Python would report it again at shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SteepenError as error:
        if debug:
            raise
        _print_error(str(error))
        return error.exit_code
    except OSError as error:
        if debug:
            raise
        where = f" ({error.filename})" if error.filename else ""
        if error.errno == errno.ENOSPC:
            _print_error(f"the disk is full{where}; free some space and run the same command again.")
        else:
            _print_error(f"{error.strerror or error}{where}.")
        return 1
    except UnicodeEncodeError as error:  # pyarrow and other libraries take names in UTF-8 only
        if debug:
            raise
        _print_error(f"{shorten(str(error.object))!r} is not UTF-8; rename it, or write it in UTF-8.")
        return 1
    except Exception as error:
        if debug:
            raise
        if isinstance(error, MemoryError) or ("torch" in sys.modules and is_out_of_memory(error)):
            _print_error("out of memory; use smaller sizes, or a machine with more.")
            return 1
        reason = shorten(str(error))
        _print_error(f"internal error: {type(error).__name__}: {reason} (add --debug for the traceback).")
        return 70


def _mend_streams() -> None:
    """Open closed standard streams on /dev/null, and print � where an encoding lacks a character."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")


def _print_error(sentence: str) -> None:
    if "STEEPEN_FAULT_DIRECTORY" in os.environ:  # a rank that `steepen train --gpus` started, which prints
        from steepen.distributed.monitor import report_fault

        report_fault(sentence, 1, "Failed")
        return
    from steepen.utils.formatting import wrap_to_terminal

    print(wrap_to_terminal(f"steepen: {sentence}", sys.stderr), file=sys.stderr)
