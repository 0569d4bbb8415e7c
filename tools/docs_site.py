"""Pages of the documentation site that are made from the code, and three of the repository's root.

A hook of MkDocs (`mkdocs.yml`): `make docs` builds the site. Python and commands come from the requests and
docstrings, the paper's numbers from `steepen.reproduction` and the recipe `paper`.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Classes of results, after the functions that return them.
RESULTS = {
    "steepen.results.fit": ["ComputeResult"],
    "steepen.results.chinchilla": ["ChinchillaResult"],
    "steepen.results.isoflop": ["IsoflopResult"],
    "steepen.requests.power": ["PowerResult"],
    "steepen.results.runs": ["Runs", "Run"],
    "steepen.results.study": ["Study", "Status"],
    "steepen.results.dry_run": ["DryRun"],
    "steepen.results.files": ["Report", "Packed"],
    "steepen.results.evaluate": ["EvaluationResult"],
}


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages and the examples."""
    file_type: Any = importlib.import_module("mkdocs.structure.files").File

    pages = {
        "index.md": root_page("README.md"),
        "reference.md": python_reference(),
        "commands.md": command_reference(),
        "paper-numbers.md": paper_reference(),
        "changelog.md": root_page("CHANGELOG.md"),
        "contributing.md": root_page("CONTRIBUTING.md"),
    }
    for name, text in pages.items():
        files.append(file_type.generated(config, name, content=text))
    for example in sorted([*(ROOT / "examples").glob("*.ipynb"), *(ROOT / "examples").glob("*.py")]):
        files.append(file_type.generated(config, f"examples/{example.name}", content=example.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links to the examples, which are beside docs/ in the repository and inside the site."""
    return markdown.replace("](../examples/", "](examples/")


def root_page(name: str) -> str:
    """A page of the repository's root, with links as seen from docs/."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
    return text.replace("](CHANGELOG.md)", "](changelog.md)").replace(
        "](CONTRIBUTING.md)", "](contributing.md)"
    )


def python_reference() -> str:
    """Every name of `import steepen` with its signature and docstring, then the results' methods."""
    import steepen
    from steepen.requests.report import Report

    modules: dict[str, str] = steepen.MODULES
    lines = [
        "# Python reference", "",
        "What `import steepen` offers, from the docstrings. [steepen in Python](python.md) shows it in use.",
        "", "## Functions", "",
    ]  # fmt: skip
    kinds = {"Arm", "StageSchedule", "SteepenError", "UsageError"}
    for name in steepen.__all__:
        if name in kinds:
            continue
        request = Report if name == "report" else getattr(getattr(steepen, name), "request", None)
        documented = [f"::: steepen.{modules[name]}.{name}", ""]
        lines += documented if request is None else function_reference(name, request)
    lines += [
        "## Results",
        "",
        "Each also has the methods of a result:",
        "",
        "::: steepen.results.result.Result",
        "",
    ]
    for module, names in RESULTS.items():
        known = importlib.import_module(module)
        for name in names:
            if not hasattr(known, name):
                raise AttributeError(f"{module} has no {name}: change tools/docs_site.py")
            lines += [f"::: {module}.{name}", ""]
    lines += ["## Arms and errors", ""]
    for name in sorted(kinds):
        lines += [f"::: steepen.{modules[name]}.{name}", ""]
    return "\n".join(lines)


def function_reference(name: str, request: Any) -> list[str]:
    """The function of a request: its signature, docstring and parameters, from the request's fields."""
    from steepen.requests.request import fields_of, type_name

    fields = fields_of(request)
    places = [field.name for field in fields if not field.keyword_only]
    doc = [" ".join(part.split()) for part in (request.__doc__ or "").strip().split("\n\n")]
    call = f"steepen.{name}({', '.join([*places, '*', '…'])})"
    lines = [f"### `{name}` {{ #{name} }}", "", f"```python\n{call}\n```", "", *(f"{one}\n" for one in doc)]
    lines += ["| parameter | type | meaning | default |", "|---|---|---|---|"]
    for field in fields:
        text = " ".join([field.option.help, field.option.python]).strip()
        default = "" if field.required or field.default is None else f"`{field.default!r}`"
        kind = type_name(field.hint).replace("|", "\\|")
        lines.append(f"| `{field.name}` | `{kind}` | {text.replace('|', chr(92) + '|')} | {default} |")
    return [*lines, ""]


def command_reference() -> str:
    """Every command with its options, from the help texts of the command line."""
    from steepen.requests.app import all_commands

    lines = ["# Commands", "", "`steepen COMMAND --help` prints the same.", ""]
    for name, command in all_commands():
        path = f"steepen {name}"
        help_text = re.sub(r"\[/?(?:bold|dim)\]", "`", command.help or command.short_help or "")
        context = command.make_context(path, [], resilient_parsing=True)
        arguments = " ".join(command.collect_usage_pieces(context))
        lines += [f"## {path}", "", f"```\n{path} {arguments}\n```", "", *as_markdown(help_text), ""]
        options = [one for one in command.params if not getattr(one, "hidden", False) and one.name != "help"]
        rows = [option_row(one) for one in options]
        if rows:
            lines += ["| option | meaning | default |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def as_markdown(help_text: str) -> list[str]:
    """A help text as paragraphs; a block after \\b (a table of names) stays as it is."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", help_text.strip()):
        if paragraph.startswith("\b"):
            lines += ["```", *paragraph.replace("`", "").splitlines()[1:], "```", ""]
        else:
            text = " ".join(paragraph.split())
            text = re.sub(r"^Example: `?(.*?)`?$", r"Example: `\1`", text)
            text = re.sub(r"^(steepen .*)$", r"`\1`", text)
            lines += [text, ""]
    return lines


def option_row(option: Any) -> str:
    """One row: names, help and default."""
    if option.param_type_name == "argument":
        names = f"`{option.metavar or option.name.upper()}`"
    else:
        names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    default = option.default
    shown = option.show_default if isinstance(getattr(option, "show_default", None), str) else None
    if shown is None and default not in (None, False, (), []) and not callable(default):
        shown = str(default)
    meaning = " ".join((getattr(option, "help", "") or "").split()).replace("|", "\\|")
    written = re.search(r" \[dim\]\\?\[default: (.*)\]\[/dim\]$", meaning)  # of a request
    if written:
        meaning, shown = meaning[: written.start()], written[1]
    return f"| {names} | {meaning} | {f'`{shown}`' if shown else ''} |"


def paper_reference() -> str:
    """The paper's figures and tables, its printed numbers beside ours, and its ladders as planned."""
    return f"""# The paper's figures, tables and numbers

Made from the package at each build of this site. [From the paper to commands](paper-map.md) explains it.

## Figures and tables

The *status* says what is missing, because the authors do not publish it, or computed otherwise.

{item_table()}

## Printed numbers, reproduced

`steepen paper claim NAME` prints one. *Printed* is the paper's number, *authors' procedure* what their
procedure gives for their measurements (where it is known to more digits), *ours* what this package gives.
The tolerance is for the printed number. `d26_loss_forecast_minus_measured` has the paper's sign; forecast
errors elsewhere are observed − forecast.

{claim_table()}

## Published ladders

The runs that `steepen plan --recipe paper` plans. The authors publish the command lines of 52 of them (all
but Deep Vanilla Grow) and the FLOPs of all. All digits are ours; the last column names what equals them.

{ladder_table()}
"""


def item_table() -> str:
    """Every figure and table: number, title, label, the commands, and how it differs from the printed one."""
    from steepen.reproduction.items import ITEMS

    lines = [
        "| number | title | LaTeX label | command | from your own runs | status |",
        "|---|---|---|---|---|---|",
    ]
    for item in ITEMS:
        own = "; ".join(f"`{command.strip()}`" for command in item.command.split(";"))
        kind, number = item.number.lower().split()
        lines.append(
            f"| {item.number} | {item.title.rstrip('.')} | `{item.label}` | `steepen paper {kind} {number}` "
            f"| {own} | {item.note or 'complete'} |"
        )
    return "\n".join(lines)


def claim_table() -> str:
    """Every claim: printed, by the authors' procedure on their tables, and ours."""
    from steepen.reproduction.claims import claims
    from steepen.reproduction.paper_studies import PaperStudies

    studies = PaperStudies()
    lines = [
        "| claim | arm | in | printed | authors' procedure | ours | tolerance |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for claim in claims():
        theirs = "–" if claim.recomputed is None else f"{claim.recomputed:.6g}"
        lines.append(
            f"| `{claim.name}` | {claim.arm or '–'} | {claim.item} | {claim.printed:g} | {theirs} "
            f"| {claim.compute(studies):.6g} | {claim.tolerance:g} |"
        )
    return "\n".join(lines)


def ladder_table() -> str:
    """The published ladders: our plan of each run, and what was published for it."""
    from steepen.recipe.planner import plan_ladders
    from steepen.recipe.recipe_choice import RecipeChoice
    from steepen.reproduction.tables import table

    command_lines = {(row["arm"], row["depth"]): row for row in table("ladder_recipes")}
    flops = {
        (row["arm"], row["depth"]): row["compute_flops"]
        for name in ("fineweb_ladders", "fineweb_edu_ladders")
        for row in table(name)
    }
    lines = [
        "| arm | depth | steps | growth step | learning rate | FLOPs | published, and equal |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for rung in plan_ladders(RecipeChoice()):
        key = (rung.arm.name, rung.shape.depth)
        rate = rung.hyperparameters.learning_rate
        found = ["FLOPs"] if rung.flops.total == flops[key] else ["FLOPs DIFFER"]
        if (row := command_lines.get(key)) is not None:
            theirs = (row["steps"], row["crossover_step"], row["learning_rate"])
            equal = theirs == (rung.steps, rung.growth_step, rate)
            found.insert(0, "command line" if equal else "command line DIFFERS")
        growth = "–" if rung.growth_step is None else str(rung.growth_step)
        lines.append(
            f"| {key[0]} | {key[1]} | {rung.steps} | {growth} | {rate} | {rung.flops.total} "
            f"| {', '.join(found)} |"
        )
    return "\n".join(lines)
