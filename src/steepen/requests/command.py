"""The command of a request: typer parses the words, the request checks them, the result is printed.

typer is given a signature made from the request's fields, in which every option is text, a flag or a list of
text with no default: what text means and which default applies is decided in one place, the request itself.
Only typer's public names are used, so that any typer from 0.15 works.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from steepen.errors import SteepenError
from steepen.requests.request import Argument, Field, Request, fields_of, option_fields, with_flags
from steepen.results.render import WRITERS, check_figure, check_report, check_table
from steepen.utils.codec import Option
from steepen.utils.values import metavar, repeats

OUTPUT = "Output"  # panel of the options that every command has
PREFIX = "output_"  # before their names among the parameters that typer sees


@dataclass(frozen=True)
class Output:
    """What a command does with its result besides printing it."""

    json: Annotated[bool, Option("Print the result as JSON.", OUTPUT)] = False
    figure: Annotated[Path | None, Option("Draw the result to this .pdf, .png or .svg.", OUTPUT)] = None
    report: Annotated[
        Path | None, Option("Write a self-contained page of the result to this .html.", OUTPUT)
    ] = None
    figure_options: Mapping[str, str] = field(default_factory=dict[str, str])
    write_result: Annotated[
        tuple[Path, ...], Option(f"Write the rows to this file ({', '.join(WRITERS)}). Repeatable.", OUTPUT)
    ] = ()

    @staticmethod
    def of(words: Mapping[str, Any]) -> Output:
        """What the options say; a file name that no renderer writes is rejected before anything runs."""
        own = {name: value for name, value in words.items() if not name.startswith("figure_")}
        for name, check in (("figure", check_figure), ("report", check_report)):
            if name in own:
                check(Path(own[name]))
        for path in own.get("write_result", ()):
            check_table(Path(path))
        drawn = {name.removeprefix("figure_"): words[name] for name in words.keys() - own.keys()}
        return Output(**own, figure_options=drawn)

    def show(self, kind: type[Request[Any]], result: Any) -> None:
        """Write the files of a result and print it; fails after that where the result says so."""
        from steepen.utils.formatting import wrap_to_terminal

        for note in result.notes:
            print(wrap_to_terminal(f"note: {with_flags(kind, note)}", sys.stderr), file=sys.stderr)
        if self.figure is not None:
            result.save_figure(self.figure, **self.figure_options)
        for path in self.write_result:
            result.write_table(path)
        if self.report is not None:
            result.write_report(self.report, **self.figure_options)
        if self.json:
            print(result.to_json())
        else:
            result.print()
            tables = (("table", path) for path in self.write_result)
            for word, path in (("figure", self.figure), *tables, ("report", self.report)):
                if path is not None:
                    print(f"{word}: {path}")
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
        "help": marked_up(kind, option.help) + _shown_default(field),
        "show_default": False,
    }
    if option.panel != "Options":
        shown["rich_help_panel"] = option.panel
    if isinstance(option, Argument):
        info = typer.Argument(metavar=option.metavar or field.name.upper(), **shown)
    else:
        names = field.flags
        if flag and field.default is not False:  # switched on by default, or decided later
            names = [f"{names[0]}/--no-{names[0].removeprefix('--')}", *names[1:]]
        word = None if flag else option.metavar or metavar(field.hint)
        info = typer.Option(*names, metavar=word, envvar=option.environment or None, **shown)
    return inspect.Parameter(
        prefix + field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if field.required else None,
        annotation=Annotated[annotation if field.required else annotation | None, info],
    )


def _shown_default(field: Field) -> str:
    """The default at the end of the help; typer would print one that is given as text in parentheses."""
    default = field.option.default or default_text(field)
    return f" [dim]{escape(f'[default: {default}]')}[/dim]" if default else ""


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
                one.display_type_rich = _argument_type
            elif one.metavar is None:
                one.metavar = ""  # a flag; other options have one
        return found

    command.get_params = get_params
    for one in getattr(command, "commands", {}).values():
        shorten_types(one)
    return command


def _argument_type(ctx: Any) -> str:
    return "<str>"
