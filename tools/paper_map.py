"""Write the tables of docs/reference/paper.md: the paper's items, its claims, and its ladders as planned.

    python tools/paper_map.py            # print the tables
    python tools/paper_map.py --write    # replace them in docs/reference/paper.md

Everything comes from the package: `steepen.reproduction` and the recipe `paper`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from steepen.recipe.planner import plan_ladders
from steepen.recipe.recipe_choice import RecipeChoice
from steepen.reproduction.claims import claims
from steepen.reproduction.items import ITEMS
from steepen.reproduction.paper_studies import PaperStudies
from steepen.reproduction.tables import table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "paper.md"


def item_table() -> str:
    """Every figure and table: number, title, label, the commands, and how it differs from the printed one."""
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


TABLES = {"items": item_table, "claims": claim_table, "ladders": ladder_table}  # by the name of their marker


def between(text: str, name: str) -> tuple[str, str, str]:
    """The text before, between and after the markers of a table."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    own, after = rest.split(end)
    return f"{before}{begin}\n", own.strip(), f"\n{end}{after}"


def main() -> None:
    """Print the tables, or write them into the docs page."""
    page = PAGE.read_text(encoding="utf-8")
    for name, make in TABLES.items():
        made = make()
        if "--write" not in sys.argv:
            print(made, end="\n\n")
            continue
        before, _, after = between(page, name)
        page = before + made + after
    if "--write" in sys.argv:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
