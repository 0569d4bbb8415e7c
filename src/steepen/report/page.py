"""The report as one self-contained HTML page that loads nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from markupsafe import Markup, escape

from steepen.report.colours import DARK_BACKGROUND, LIGHT_BACKGROUND, NEUTRAL, Colour, arm_colour, arm_key
from steepen.report.groups import ladder_title
from steepen.report.layout import NARROW, WIDE, lay_out
from steepen.report.load_studies import LoadedStudy, arm_titles
from steepen.report.provenance import provenance_rows, run_title
from steepen.report.select_verdicts import primary_verdicts, secondary_verdicts
from steepen.report.svg import alt_text, panel_svg
from steepen.report.table_files import formatted_rows, numeric_columns
from steepen.runs.record import RunRecord
from steepen.studies.answer import Panel, StudyVerdict, Table
from steepen.utils.formatting import format_value, is_number


def render_page(studies: Sequence[LoadedStudy]) -> str:
    """The page of one or more studies."""
    import jinja2

    assets = files("steepen.report") / "assets"
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    content = _Content(studies)
    sections = [content.study(i, study) for i, study in enumerate(studies)]
    script = (assets / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.from_string((assets / "page.html.j2").read_text(encoding="utf-8")).render(
        title=studies[0].answer.question if len(studies) == 1 else "Study results",
        studies=sections,
        runs=content.runs(),
        css=Markup((assets / "page.css").read_text(encoding="utf-8")),
        colours=Markup(content.colour_rules()),
        script=Markup(script),
        # The page may run this script and its own styles, and load nothing, whatever a name in it contains.
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
    )


class _Content:
    """Builds the template's content from answers, and collects the colours in use."""

    def __init__(self, studies: Sequence[LoadedStudy]) -> None:
        self.titles = arm_titles(studies)
        self.records: dict[str, RunRecord] = {r.run: r for study in studies for r in study.records}
        self.classes: dict[Colour, str] = {}
        self.colour_class(NEUTRAL)
        arms = {record.spec.arm.name for record in self.records.values()}
        arms |= {s.arm for study in studies for p in study.answer.panels for s in p.series if s.arm}
        arms |= {judged.arm for study in studies for judged in study.answer.verdicts}
        self.arms = {arm_key(arm) for arm in arms} | {"vanilla"}
        names = {name for arm in self.arms for name in (arm, self.titles.get(arm, arm))}
        longest_first = "|".join(
            re.escape(name) for name in sorted(names, key=lambda name: (-len(name), name))
        )
        self.pattern = re.compile(rf"(?<![\w-])(?:{longest_first})(?![\w-])")

    def colour_class(self, colour: Colour) -> str:
        """The class that carries a colour, in both its forms."""
        return self.classes.setdefault(colour, f"k{len(self.classes)}")

    def colour_rules(self) -> str:
        """The classes' rules; print always uses the light colours."""
        light = "".join(f".{k}{{--c:{c.light};--t:{c.light_text}}}" for c, k in self.classes.items())
        dark = "".join(f".{k}{{--c:{c.dark};--t:{c.dark_text}}}" for c, k in self.classes.items())
        dark_screen = (
            f"@media screen and (prefers-color-scheme:dark){{:root{{--paper:{DARK_BACKGROUND}}}{dark}}}"
        )
        return f":root{{--paper:{LIGHT_BACKGROUND}}}{light}{dark_screen}"

    def arm(self, name: str, variant: str = "") -> Markup:
        """An arm's title in its colour."""
        shade = self.colour_class(arm_colour(name))
        title = ladder_title(name, variant, self.titles)
        return Markup('<span class="arm {}">{}</span>').format(shade, title)

    def verdict(self, judged: StudyVerdict) -> dict[str, Any]:
        """A verdict's arm, word and sentence, with what it is about."""
        return {
            "arm": self.arm(judged.arm, judged.variant),
            "part": judged.part,
            "measure": judged.measure,
            "growth": judged.verdict.growth,
            "by_what": judged.verdict.by_what,
            "fragile": bool(judged.verdict.fragile),
            "by_what_fragile": bool(judged.verdict.by_what_fragile),
            "sentence": self.prose(judged.verdict.sentence),
        }

    def prose(self, text: str) -> Markup:
        """A sentence with arms in their colours, and a minus sign (no line break) before negative numbers."""
        text = re.sub(r"(?<=[ (])-(?=[\d.])", "−", text)
        out, end = Markup(), 0
        for match in self.pattern.finditer(text):
            shade = self.colour_class(arm_colour(match.group()))
            out += escape(text[end : match.start()])
            out += Markup('<span class="name {}">{}</span>').format(shade, match.group())
            end = match.end()
        return out + escape(text[end:])

    def study(self, index: int, study: LoadedStudy) -> dict[str, Any]:
        """One study's section."""
        answer = study.answer
        return {
            "id": f"s{index + 1}",
            "name": study.name,
            "question": answer.question,
            "section": answer.section,
            "verdicts": [
                {
                    **self.verdict(judged),
                    "shade": self.colour_class(arm_colour(judged.arm)),
                    "more": [self.prose(line) for line in judged.verdict.what_would_change],
                }
                for judged in primary_verdicts(answer)
            ],
            "others": [self.verdict(judged) for judged in secondary_verdicts(answer)],
            "findings": [self.prose(finding) for finding in answer.findings],
            "panels": [self.panel(f"s{index + 1}-f{i + 1}", panel) for i, panel in enumerate(answer.panels)],
            "tables": [self.table(table) for table in answer.tables],
            "method": [self.prose(sentence) for sentence in answer.method],
            "facts": provenance_rows(study.records),
            "options": [(key, format_value(value)) for key, value in study.options.items()],
            "numbers": _json(answer.to_dict()["values"]) if answer.values else "",
            "failures": list(study.failures),
            "warnings": [self.prose(warning) for warning in answer.warnings],
            "runs": len(answer.runs),
        }

    def panel(self, name: str, panel: Panel) -> dict[str, Any]:
        """A figure in its two widths."""
        wide, narrow = lay_out(panel, WIDE, self.titles), lay_out(panel, NARROW, self.titles)
        alt = alt_text(panel, wide)
        hidden = (
            f" {wide.hidden} points have no place on these axes and are not shown." if wide.hidden else ""
        )
        return {
            "id": name,
            "title": panel.title,
            "x": panel.x.label,
            "y": panel.y.label,
            "wide": panel_svg(wide, f"{name}w", self.colour_class, alt),
            "narrow": panel_svg(narrow, f"{name}n", self.colour_class, alt),
            "caption": self.prose((panel.caption + hidden).strip()),
        }

    def table(self, table: Table) -> dict[str, Any]:
        """A table; each cell has its HTML, its class and its sort key."""
        rows = [
            [
                self.cell(raw, text, arm=i == table.arm_column)
                for i, (raw, text) in enumerate(zip([*row, *[None] * len(texts)], texts, strict=False))
            ]
            for row, texts in zip(table.rows, formatted_rows(table), strict=True)
        ]
        return {
            "title": table.title,
            "columns": list(zip(table.columns, numeric_columns(table), strict=True)),
            "rows": rows,
            "caption": self.prose(table.caption),
        }

    def cell(self, raw: Any, text: str, *, arm: bool) -> dict[str, Any]:
        """One cell; `arm`: it holds an arm's name."""
        # Right-align numbers; do not wrap short text.
        kind = "n" if is_number(raw) or raw is None else "s" if len(text) <= 32 else ""
        html = escape(text)
        if isinstance(raw, str) and raw in self.records:
            html = Markup('<a href="#run-{0}"><code>{0}</code></a>').format(raw)
        elif arm and isinstance(raw, str) and (arm_key(raw) in self.arms or raw in self.titles.values()):
            html = self.arm(raw)
        key = repr(float(raw)) if is_number(raw) else "" if raw is None else text
        return {"html": html, "kind": kind, "sort": key}

    def runs(self) -> list[dict[str, Any]]:
        """Every run, by arm and compute."""
        order = sorted(
            self.records.values(), key=lambda r: (arm_key(r.spec.arm.name), r.flops, r.spec.seed, r.run)
        )
        return [
            {
                "run": record.run,
                "arm": self.arm(record.spec.arm.name),
                "title": run_title(record),
                "loss": format_value(record.validation_loss, 5),
                "flops": format_value(record.flops, 3),
                "spec": _json(record.spec.to_dict()),
                "record": _json({k: v for k, v in record.to_dict().items() if k != "spec"}),
            }
            for record in order
        ]


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False)
