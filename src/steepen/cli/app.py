"""Assembles the commands and turns errors into one sentence and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from steepen.cli import data, forecast, report, runs, study, train
from steepen.cli import evaluate as evaluation
from steepen.cli import fit as laws
from steepen.cli import plan as family
from steepen.errors import SteepenError

app = typer.Typer(
    name="steepen",
    help="Does a change make the scaling law steeper, or only lower?",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Every command takes --debug to show the full traceback of an error.",
)


app.add_typer(data.app, name="data")
app.add_typer(evaluation.app, name="eval")


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"steepen {version('steepen')}")
        raise typer.Exit


@app.callback()
def _front_door(  # pyright: ignore[reportUnusedFunction]
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Does a change make the scaling law steeper, or only lower?"""


app.command("arms")(family.arms)
app.command("plan")(family.plan)
app.command("train")(train.train)
app.command("study")(study.study)
app.command("runs")(runs.runs)
app.command("status")(runs.status)
app.command("forecast")(forecast.forecast)
app.command()(laws.fit)
app.command()(laws.power)
app.command("report")(report.report)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words or os.environ.get("STEEPEN_DEBUG") == "1"
    words = [word for word in words if word != "--debug"]
    # Before torch is imported: its threads must not spin while they wait, or two busy cores stall each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    here = str(Path.cwd())
    if here not in sys.path:  # arms of the user's own are found beside them, and hide no one else's module
        sys.path.append(here)
    try:
        app(args=words, prog_name="steepen")
        return 0
    except SystemExit as stop:  # typer has printed its own usage message, or the command chose a code
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        _say("stopped by the user.")
        return 130
    except BrokenPipeError:
        # The reader of our output (head, less) has left; python would complain again at shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SteepenError as error:
        if debug:
            raise
        _say(str(error))
        return error.exit_code
    except OSError as error:
        if debug:
            raise
        where = f" ({error.filename})" if error.filename else ""
        if error.errno == errno.ENOSPC:
            _say(f"the disk is full{where}; free some space and run the same command again.")
        else:
            _say(f"{error.strerror or error}{where}.")
        return 1
    except Exception as error:
        if debug:
            raise
        _say(f"internal error: {type(error).__name__}: {error} (add --debug for the traceback).")
        return 70


def _say(sentence: str) -> None:
    print(f"steepen: {sentence}", file=sys.stderr)
