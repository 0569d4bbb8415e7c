"""The command of a request: typer parses the words, the request checks them, the result is printed.

typer is given a signature made from the request's fields, in which every option is text, a flag or a list of
text with no default: what text means and which default applies is decided in one place, the request itself.
Only typer's public names are used, so that any typer from 0.15 works.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from steepen.errors import SteepenError
from steepen.requests.request import Argument, Field, Request, fields_of, with_flags
from steepen.utils.codec import Option
from steepen.utils.values import metavar, repeats

OUTPUT = "Output"  # panel of --json, --figure and --write-result
FIGURE = "figure_option_"  # before the names of the figure's options among those of typer


def command_function(kind: type[Request[Any]]) -> Callable[..., None]:
    """The function that typer makes the command of: one parameter for each field, and the output options."""
    fields = fields_of(kind)

    def run(**words: Any) -> None:
        as_json, figure = words.pop("as_json", False), words.pop("figure_file", None)
        drawn = {
            name.removeprefix(FIGURE): words.pop(name) for name in list(words) if name.startswith(FIGURE)
        }
        drawn = {name: value for name, value in drawn.items() if value is not None}
        page: str | None = words.pop("report_file", None)
        tables: list[str] = words.pop("table_files", None) or []
        given = {name: value for name, value in words.items() if value is not None and value != []}
        try:
            request = kind(**given)
            _check_suffixes(figure, tables, page)
            result = request.run_in_terminal(bool(as_json))
        except SteepenError as error:
            error.args = (with_flags(kind, str(error)),)
            raise
        if result is not None:
            if found := getattr(result, "problems", ()):
                result.with_problems(tuple(replace(one, done=with_flags(kind, one.done)) for one in found))
            show_result(kind, result, bool(as_json), figure, tables, drawn, page)
            if code := result.exit_code:
                raise typer.Exit(code)

    ordered = sorted(fields, key=lambda field: field.option.panel != kind.first_panel)
    parameters = [_parameter(kind, field) for field in (ordered if kind.first_panel else fields)]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _output_options(kind).items()
    ]
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


def _parameter(kind: type[Request[Any]], field: Field) -> inspect.Parameter:
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
        field.name,
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


def _output_options(kind: type[Request[Any]]) -> dict[str, Any]:
    from steepen.report.figure_options import figure_hints
    from steepen.results.render import WRITERS

    found: dict[str, Any] = {
        "as_json": Annotated[
            bool | None,
            typer.Option(
                "--json", help="Print the result as JSON.", show_default=False, rich_help_panel=OUTPUT
            ),
        ]
    }
    if kind.figure:
        found["figure_file"] = Annotated[
            str | None,
            typer.Option("--figure", help="Draw the result to this .pdf, .png or .svg.", metavar="<path>",
                         show_default=False, rich_help_panel=OUTPUT),
        ]  # fmt: skip
        found["report_file"] = Annotated[
            str | None,
            typer.Option("--report", help="Write a self-contained page of the result to this .html.",
                         metavar="<path>", show_default=False, rich_help_panel=OUTPUT),
        ]  # fmt: skip
        for name, hint in figure_hints().items():
            option = next(one for one in typing.get_args(hint) if isinstance(one, Option))
            found[FIGURE + name] = Annotated[
                str | None,
                typer.Option(f"--figure-{name}", help=f"Of the figure: {option.help}", metavar=metavar(hint),
                             show_default=False, rich_help_panel=OUTPUT),
            ]  # fmt: skip
    if kind.tables:
        kinds = ", ".join(WRITERS)
        found["table_files"] = Annotated[
            list[str] | None,
            typer.Option("--write-result", help=f"Write the rows to this file ({kinds}). Repeatable.",
                         metavar="<path>", show_default=False, rich_help_panel=OUTPUT),
        ]  # fmt: skip
    return found


def _check_suffixes(figure: str | None, tables: list[str], page: str | None) -> None:
    """Reject a file name that no renderer writes, before anything runs."""
    from steepen.results.render import check_figure, check_report, check_table

    if page is not None:
        check_report(Path(page))

    if figure is not None:
        check_figure(Path(figure))
    for path in tables:
        check_table(Path(path))


def show_result(
    kind: type[Request[Any]],
    result: Any,
    as_json: bool,
    figure: str | None = None,
    tables: Sequence[str] = (),
    drawn: Mapping[str, str] | None = None,
    page: str | None = None,
) -> None:
    """Print the result of a request and write its files."""
    from steepen.utils.formatting import wrap_to_terminal

    for note in result.notes:
        print(wrap_to_terminal(f"note: {with_flags(kind, note)}", sys.stderr), file=sys.stderr)
    if figure is not None:
        result.save_figure(figure, **(drawn or {}))
    for path in tables:
        result.write_table(path)
    if page is not None:
        result.write_report(page, **(drawn or {}))
    if as_json:
        print(result.to_json())
        return
    result.print()
    for word, path in (("figure", figure), *(("table", path) for path in tables), ("report", page)):
        if path is not None:
            print(f"{word}: {path}")


def shorten_types(command: Any) -> Any:
    """Make a command and its subcommands print no type for a flag, and `<float>` for a number with bounds.

    typer prints `<bool>`, `<float range> [1<=x<=1e+60]` and `<list[str]>`, which leave little of 80 columns
    to the text. A value out of its range is an error that states the range.
    """
    plain = command.get_params

    def get_params(context: Any) -> list[Any]:
        found = plain(context)
        for one in found:
            if one.param_type_name == "argument":
                # The metavar of an argument is its name, so its type is replaced where it is printed.
                one.display_type_rich = functools.partial(_short_type, one)
            elif one.metavar is None:
                one.metavar = _short_type(one, context)
                one.min = one.max = None  # printed only: the range is checked elsewhere
        return found

    command.get_params = get_params
    for one in getattr(command, "commands", {}).values():
        shorten_types(one)
    return command


def _short_type(parameter: Any, ctx: Any) -> str | None:
    if getattr(parameter, "is_flag", False):
        return ""
    if not hasattr(parameter, "display_type"):  # typer before 0.20 has no such types
        return None
    name = parameter.display_type(ctx).lower()
    return re.sub(r"<(?:list\[)?(\w+)(?: range)?\]?>", r"<\1>", name)
