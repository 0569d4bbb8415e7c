"""`steepen`: find the verb, run its command, and turn errors into one sentence on stderr and an exit code."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from steepen.errors import INTERNAL, UsageError, failure_of
from steepen.requests.command import command_function, shorten_types
from steepen.requests.registry import VERBS, Verb, find_verb
from steepen.requests.request import Argument, Field, fields_of
from steepen.utils.formatting import printable_output
from steepen.utils.imports import code_from
from steepen.utils.values import metavar

# OpenBLAS and torch were seen to wait forever with up to 1.5 GB, where a limit left no room for a thread.
MIN_ADDRESS_SPACE = 2 << 30
CONTEXT = {"help_option_names": ["-h", "--help"]}


class Verbs(TyperGroup):
    """The verbs as commands. One is built, and its module imported, when it is run or its help is printed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first words name (`fit`, `data prepare`), and the words after them."""
        name, _, _ = super().resolve_command(ctx, args)  # suggests the nearest for an unknown word
        name, words = str(name), args[1:]
        members = [verb.name for verb in VERBS.values() if verb.name.startswith(f"{name} ")]
        fields = fields_of(VERBS[name].load()) if members and VERBS[name].target else ()
        place = _first_word(fields, words) if members else len(words)
        if place < len(words) and (verb := find_verb(f"{name} {words[place]}")) is not None:
            # Options may be before the member's name: `runs --runs DIR show RUN`.
            words.pop(place)
            verb.load().check_words(words)
            return verb.name, build_command(verb), words
        if place < len(words) and fields and not any(isinstance(one.option, Argument) for one in fields):
            others = ", ".join(one.partition(" ")[2] for one in members)
            raise UsageError(f"steepen {name} has no command {words[place]!r}; it has {others}, or none.")
        return name, build_command(VERBS[name]), words


def build_command(verb: Verb) -> Any:
    """The command of a verb, or the group of the verbs that have its name before their own."""
    members = [one for one in VERBS.values() if one.name.startswith(f"{verb.name} ")]
    if not verb.target:
        listed: dict[str, Any] = {one.name.partition(" ")[2]: _listed(one) for one in members}
        group = TyperGroup(
            name=verb.name, help="\n\n".join(filter(None, (verb.summary, verb.about))), no_args_is_help=True,
            rich_markup_mode="rich", context_settings=CONTEXT, commands=listed,
        )  # fmt: skip
        return shorten_types(group)
    app = typer.Typer(add_completion=False, rich_markup_mode="rich", context_settings=CONTEXT)
    others = " ".join(f"[bold]steepen {one.name}[/bold]: {one.summary}" for one in members)
    app.command(verb.name, epilog=others or None)(command_function(verb.load()))
    return shorten_types(typer.main.get_command(app))


def all_commands() -> Iterator[tuple[str, Any]]:
    """Every command with its words, in the order of the help."""
    return ((verb.name, build_command(verb)) for verb in VERBS.values() if verb.target)


def _first_word(fields: tuple[Field, ...], words: list[str]) -> int:
    """The place of the first word that is neither an option nor the value of one."""
    with_value = {flag for field in fields if metavar(field.hint) for flag in field.flags}
    place = 0
    while place < len(words) and words[place].startswith("-"):
        place += 2 if words[place] in with_value else 1
    return place


def _listed(verb: Verb) -> TyperCommand:
    """A line of the list of commands: a command without options, which is never run."""
    name = verb.name.rpartition(" ")[2]
    return TyperCommand(
        name, help=verb.summary, rich_help_panel=verb.panel, rich_markup_mode="rich", context_settings=CONTEXT
    )


def _print_version(requested: bool) -> None:
    if requested:
        import steepen

        typer.echo(f"steepen {steepen.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Does a change to an architecture make its scaling law steeper, or only lower?"""


def root_command() -> Any:
    """The command `steepen`."""
    app = typer.Typer(
        name="steepen",
        cls=Verbs,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings=CONTEXT,
        epilog="Every command takes --debug, which shows the full traceback of an error, and --trust-code, "
        "with which files may name custom code (module:attribute); names on the command line are trusted.",
    )
    app.callback()(_root)
    root: Any = typer.main.get_command(app)
    root.commands = {verb.name: _listed(verb) for verb in VERBS.values() if " " not in verb.name}
    return shorten_types(root)


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
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= space < MIN_ADDRESS_SPACE and {*words} - {"-h", "--help", "--version"} == {*words}:
        _print_error(
            f"the address space of a process is limited to {space >> 20:,} MiB here (`ulimit -v`); below "
            f"{MIN_ADDRESS_SPACE >> 20:,} MiB libraries hang or end the program: raise the limit."
        )
        return 1
    try:
        with code_from(words, trust_all=trust), printable_output(), no_lost_interrupt():
            root_command()(args=words, prog_name="steepen")
        return 0
    except SystemExit as stop:  # typer has printed its own usage message, or the command chose a code
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BrokenPipeError:
        # The process that read our output (head, less) has exited; Python would report it again at shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, KeyboardInterrupt) as error:
        if debug and not isinstance(error, KeyboardInterrupt):
            raise
        for note in getattr(error, "__notes__", ()):  # such as how an interrupted evaluation resumes
            print(note, file=sys.stderr)
        failure = failure_of(error)
        hint = " (Add --debug for the traceback.)" if failure.exit_code == INTERNAL else ""
        _print_error(failure.message + hint)
        return failure.exit_code


@contextlib.contextmanager
def no_lost_interrupt() -> Generator[None]:
    """Send a Ctrl-C again that Python dropped because it came during a callback or a finalizer."""
    before, timers = sys.unraisablehook, list[threading.Timer]()

    def hook(dropped: Any) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            return before(dropped)
        timers.append(
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        )  # when the callback has ended
        timers[-1].start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in timers:
            timer.cancel()


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
    from steepen.utils.formatting import wrap_to_terminal

    print(wrap_to_terminal(f"steepen: {sentence}", sys.stderr), file=sys.stderr)
