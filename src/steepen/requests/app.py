"""`steepen`: find the verb, run its command, and turn errors into one sentence on stderr and an exit code.

In a command typer parses the words, the request checks them, and the result is printed. typer is given a
signature made from the request's fields, in which every option is text, a flag or a list of text with no
default: what text means and which default applies is decided in one place, the request itself. Only typer's
public names are used, so that any typer from 0.15 works.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.main
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from steepen.errors import INTERNAL, SteepenError, UsageError, failure_of
from steepen.requests.registry import VERBS, Verb, find_verb
from steepen.requests.request import (
    OUTPUT,
    Argument,
    Field,
    Request,
    fields_of,
    option_fields,
    print_notes,
    print_to_stderr,
    with_flags,
)
from steepen.results.table import WRITERS, check_ending
from steepen.utils.formatting import printable_output
from steepen.utils.imports import code_from
from steepen.utils.process import exit_process
from steepen.utils.values import metavar, repeats

PREFIX = "output_"  # before their names among the parameters that typer sees


@dataclass(frozen=True)
class Output:
    """What a command does with its result besides printing it."""

    json: bool = OUTPUT("Print the result as JSON.", False)
    figure: Path | None = OUTPUT("Draw the result to this .pdf, .png or .svg.")
    report: Path | None = OUTPUT("Write a self-contained page of the result to this .html.")
    figure_options: Mapping[str, str] = field(default_factory=dict[str, str])
    write_result: tuple[Path, ...] = OUTPUT(
        f"Write the rows to this file ({', '.join(WRITERS)}). Repeatable.", ()
    )

    @staticmethod
    def of(words: Mapping[str, Any]) -> Output:
        """What the options say; a file name that no renderer writes is rejected before anything runs."""
        own = {name: value for name, value in words.items() if not name.startswith("figure_")}
        drawn = {name.removeprefix("figure_"): words[name] for name in words.keys() - own.keys()}
        found = Output(**own, figure_options=drawn)
        for what, file in found.files:
            check_ending(Path(file), what)
        return found

    @property
    def files(self) -> list[tuple[str, Path]]:
        """The files to write, each with what it is: figure, table or report."""
        tables = (("table", path) for path in self.write_result)
        files = (("figure", self.figure), *tables, ("report", self.report))
        return [(what, file) for what, file in files if file is not None]

    def show(self, kind: type[Request[Any]], result: Any) -> None:
        """Write the files of a result and print it; fails after that where the result says so."""
        print_notes(kind, result.notes)
        for what, file in self.files:
            if what == "table":
                result.write_table(file)
            else:
                write = result.save_figure if what == "figure" else result.write_report
                write(file, **self.figure_options)
        if self.json:
            print(result.to_json())
        else:
            result.print()
            for what, file in self.files:
                print(f"{what}: {file}")
        if result.failure:
            raise SteepenError(result.failure)


def output_fields(kind: type[Request[Any]]) -> Iterator[Field]:
    """The options of a command besides the request's fields, named `output_…`."""
    from steepen.report.figure_options import FigureOptions

    for one in option_fields(Output):
        if kind.tables if one.name == "write_result" else kind.figure or one.name == "json":
            yield one
        if kind.figure and one.name == "report":
            for drawn in option_fields(FigureOptions):
                option = replace(drawn.option, help=f"Of the figure: {drawn.option.help}", panel=OUTPUT)
                yield replace(drawn, name=f"figure_{drawn.name}", option=option)


def command_function(kind: type[Request[Any]]) -> Callable[..., None]:
    """The function that typer makes the command of: one parameter for each field, and the output options."""

    def run(**words: Any) -> None:
        given = {name: value for name, value in words.items() if value is not None and value != []}
        shown = {name.removeprefix(PREFIX): given.pop(name) for name in [*given] if name.startswith(PREFIX)}
        try:
            request, output = kind(**given), Output.of(shown)
            result = request.run_in_terminal(output.json)
        except SteepenError as error:
            error.args = (with_flags(kind, str(error)),)
            raise
        if result is not None:
            if found := getattr(result, "problems", ()):
                result.with_problems(tuple(replace(one, done=with_flags(kind, one.done)) for one in found))
            output.show(kind, result)
            if code := result.exit_code:
                raise typer.Exit(code)

    fields = fields_of(kind)
    if kind.first_panel:
        fields = sorted(fields, key=lambda one: one.option.panel != kind.first_panel)
    parameters = [_parameter(kind, one) for one in fields]
    parameters += [_parameter(kind, one, PREFIX) for one in output_fields(kind)]
    run.__doc__ = help_text(kind)
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def help_text(kind: type[Request[Any]]) -> str:
    """The docstring and the examples, one line for each paragraph, in rich's markup."""
    paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    lines = [marked_up(kind, " ".join(paragraph.split())) for paragraph in paragraphs]
    return "\n\n".join([*lines, *(f"[bold]{escape(example)}[/bold]" for example in kind.examples)])


def marked_up(kind: type[Request[Any]], text: str) -> str:
    """A text of a request for `--help`: fields as options, other code in bold."""
    parts = escape(with_flags(kind, text)).split("`")
    return "".join(f"[bold]{part}[/bold]" if i % 2 else part for i, part in enumerate(parts))


def _parameter(kind: type[Request[Any]], field: Field, prefix: str = "") -> inspect.Parameter:
    """A field as typer takes it: text, a flag, or a list of text; never with a default of its own."""
    option = field.option
    flag = metavar(field.hint) == ""
    annotation: Any = bool if flag else list[str] if repeats(field.hint) else str
    shown: dict[str, Any] = {
        "help": marked_up(kind, option.help),
        "show_default": False,  # typer would print one that is given as text in parentheses
    }
    if default := option.shown or default_text(field):
        shown["help"] += f" [dim]{escape(f'[default: {default}]')}[/dim]"
    if option.panel != "Options":
        shown["rich_help_panel"] = option.panel
    if isinstance(option, Argument):
        info = typer.Argument(metavar=option.metavar or field.name.upper(), **shown)
    else:
        names = field.flags
        if flag and field.default is not False:  # switched on by default, or decided later
            names = [f"{names[0]}/--no-{names[0].removeprefix('--')}", *names[1:]]
        word = None if flag else option.metavar or metavar(field.hint)
        info = typer.Option(*names, metavar=word, **shown)
    return inspect.Parameter(
        prefix + field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if field.required else None,
        annotation=Annotated[annotation if field.required else annotation | None, info],
    )


def default_text(field: Field) -> str:
    """A field's default as text; "" for one that says nothing."""
    if field.required or field.default in (None, (), "") or isinstance(field.default, bool):
        return f"{field.name.replace('_', '-')}" if field.default is True else ""
    return ",".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)


def shorten_types(command: Any) -> Any:
    """Make a command and its subcommands print no type for a flag, and `<str>` for an argument.

    typer prints `<bool>` and `<list[str]>`, which leave little of 80 columns to the text.
    """
    plain = command.get_params

    def get_params(context: Any) -> list[Any]:
        found = plain(context)
        for one in found:
            if one.param_type_name == "argument":
                # The metavar of an argument is its name, so its type is replaced where it is printed.
                one.display_type_rich = lambda ctx: "<str>"  # pyright: ignore[reportUnknownLambdaType]
            elif one.metavar is None:
                one.metavar = ""  # a flag; other options have one
        return found

    command.get_params = get_params
    for one in getattr(command, "commands", {}).values():
        shorten_types(one)
    return command


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
    if why := _obstacle(words):
        print_to_stderr(f"steepen: {why}")
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
        print_to_stderr(f"steepen: {failure.message}{hint}")
        return failure.exit_code


def run() -> NoReturn:
    """The program `steepen`: run the command of `sys.argv` and end the process."""
    exit_process(main())


def _obstacle(words: list[str]) -> str:
    """Why no command can run here, where libraries would fail with messages of their own or hang."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return "the current directory was removed; change to another one."
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= space < MIN_ADDRESS_SPACE and not {*words} & {"-h", "--help", "--version"}:
        return (
            f"the address space of a process is limited to {space >> 20:,} MiB here (`ulimit -v`); below "
            f"{MIN_ADDRESS_SPACE >> 20:,} MiB libraries hang or end the program: raise the limit."
        )
    return ""


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
