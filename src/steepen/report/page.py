"""The report as one HTML page that loads nothing from the network.

The flow: `load_studies.py` reads answers and records; `contents.py` decides which figures and tables a study
has, with their ids; `_Page` turns them into the values of the template `assets/page.html.j2` (sentences with
arms in their colours, SVG from `page_figure.py`, cells with sort keys), which only places them. Colours are
collected on the way as classes and written last, because the sections decide which are in use. `write.py`
writes the page and the same figures and tables as files; `serve.py` renders it for studies that run
(`live.py`). The page depends on nothing but the studies' files: the same files give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from markupsafe import Markup, escape

from steepen.report.colours import DARK_BACKGROUND, LIGHT_BACKGROUND, NEUTRAL, Colour, arm_colour, arm_key
from steepen.report.contents import FigureContent, StudyContent, SummaryRow
from steepen.report.curves import curve_label, ladder_title, legend_curves, legend_entries, main_series
from steepen.report.figure import figure_curves, is_wide
from steepen.report.load_studies import LoadedStudy, arm_titles, study_arm_styles
from steepen.report.page_figure import MANY_PANELS, page_panels
from steepen.results.table import columns_of, formatted_rows, numeric_columns
from steepen.runs.record import RunRecord
from steepen.studies.answer import Series, StudyVerdict, Table
from steepen.utils.formatting import format_value, is_number

Links = Mapping[str, Sequence[tuple[str, str]]]  # (format, path) of the files of a figure or table, by its id
MAX_DETAILED_RUNS = 250  # with spec and record, 4 kB each
GLYPHS = {
    "circle": "●○", "star": "★☆", "square": "■□", "diamond": "◆◇", "triangle": "▲△", "wedge": "▼▽",
    "cross": "✖✕", "block": "■□",
}  # fmt: skip


def render_page(
    studies: Sequence[LoadedStudy], links: Links | None = None, titles: dict[str, str] | None = None
) -> str:
    """The page of one or more studies; `links` leads to files beside it, `titles` are the names of arms."""
    import jinja2

    assets = files("steepen.report") / "assets"
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    page = _Page(studies, links or {}, arm_titles(studies) if titles is None else titles)
    sections = [
        page.study(StudyContent.of(i, study, page.titles, page.styles)) for i, study in enumerate(studies)
    ]
    script = (assets / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.from_string((assets / "page.html.j2").read_text(encoding="utf-8")).render(
        title=studies[0].answer.question if len(studies) == 1 else "Study results",
        studies=sections,
        runs=page.runs(studies),
        css=Markup((assets / "page.css").read_text(encoding="utf-8")),
        colours=Markup(page.colour_rules()),
        script=Markup(script),
        # The page may run this script and its own styles, and load nothing, whatever a name in it contains.
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
    )


class _Page:
    """Builds the template's values from answers, and collects the colours in use."""

    def __init__(self, studies: Sequence[LoadedStudy], links: Links, titles: dict[str, str]) -> None:
        self.titles = titles
        self.links = links
        self.records: dict[str, RunRecord] = {r.run: r for study in studies for r in study.records}
        self.classes: dict[Colour, str] = {}
        self.colour_class(NEUTRAL)
        arms = {record.spec.arm.name for record in self.records.values()}
        drawn = [(s.arm, s.colour) for one in studies for p in one.answer.panels for s in p.series if s.arm]
        arms |= {arm for arm, _ in drawn}
        self.styles = study_arm_styles(studies)
        self.colours = {key: colour for key, (colour, _) in self.styles.items()}
        self.colours |= {arm_key(arm): Colour(*colour) for arm, colour in drawn if colour}
        arms |= {judged.arm for study in studies for judged in study.answer.verdicts}
        self.arms = {arm_key(arm) for arm in arms}
        names = {*arms, *(self.titles[arm] for arm in self.arms if arm in self.titles)}
        longest_first = "|".join(map(re.escape, sorted(names, key=lambda name: (-len(name), name))))
        self.pattern = re.compile(rf"(?<![\w-])(?:{longest_first})(?![\w-])")

    def colour_class(self, colour: Colour) -> str:
        """The class that carries a colour, in both its forms."""
        return self.classes.setdefault(colour, f"k{len(self.classes)}")

    def colour_rules(self) -> str:
        """The classes' rules; print always uses the light colours."""
        light = "".join(f".{k}{{--c:{c.light};--t:{c.light_text}}}" for c, k in self.classes.items())
        dark = "".join(f".{k}{{--c:{c.dark};--t:{c.dark_text}}}" for c, k in self.classes.items())
        dark = f"@media screen and (prefers-color-scheme:dark){{:root{{--paper:{DARK_BACKGROUND}}}{dark}}}"
        return f":root{{--paper:{LIGHT_BACKGROUND}}}{light}{dark}"

    def shade(self, arm: str) -> str:
        """The class of an arm's colour: that of its figures."""
        return self.colour_class(self.colours.get(arm_key(arm)) or arm_colour(arm))

    def arm(self, name: str, variant: str = "") -> Markup:
        """An arm's title in its colour."""
        return self.coloured(ladder_title(name, variant, self.titles), name)

    def coloured(self, title: str, arm: str) -> Markup:
        """A title in an arm's colour."""
        return Markup('<span class="arm {}">{}</span>').format(self.shade(arm), title)

    def verdict(self, judged: StudyVerdict) -> dict[str, Any]:
        """A verdict's arm, words and sentence, with what it is about."""
        return {
            "arm": self.arm(judged.arm, judged.variant),
            "part": judged.part,
            "row": judged.row,
            "sentence": self.prose(judged.verdict.sentence),
        }

    def prose(self, text: str) -> Markup:
        """A sentence with arms in their colours, and a minus sign (no line break) before negative numbers."""
        text = re.sub(r"(?<=[ (])-(?=[\d.])", "−", text)
        out, end = Markup(), 0
        for match in self.pattern.finditer(text):
            shade = self.shade(match.group())
            out += escape(text[end : match.start()])
            out += Markup('<span class="name {}">{}</span>').format(shade, match.group())
            end = match.end()
        return out + escape(text[end:])

    def study(self, content: StudyContent) -> dict[str, Any]:
        """One study's section."""
        study = content.study
        answer = study.answer
        figures = [self.figure(figure) for figure in content.figures]
        tables = [self.table(content.table_id(i), table) for i, table in enumerate(content.tables)]
        summary = self.summary(tables.pop(0), content.summary) if content.summary else None
        contents = [(f"{figure.id}", figure.title) for figure in content.figures]
        return {
            "id": content.id,
            "name": study.name,
            "question": answer.question,
            "section": answer.section,
            "cautions": [self.prose(caution) for caution in answer.cautions],
            "summary": summary,
            "lead": [made for made in figures if made["lead"]],
            "verdicts": [
                {
                    **self.verdict(judged),
                    "shade": self.shade(judged.arm),
                    "more": [self.prose(line) for line in judged.verdict.what_would_change],
                }
                for judged in answer.primary_verdicts
            ],
            "others": [self.verdict(judged) for judged in answer.verdicts if not judged.primary],
            "findings": [self.prose(finding) for finding in answer.findings],
            "figures": [made for made in figures if not made["lead"]],
            "tables": tables,
            "contents": contents,
            "samples": self.samples(study),
            "method": [self.prose(sentence) for sentence in answer.method],
            "facts": provenance_rows(study.records),
            "options": _option_rows(study.options),
            "numbers": _json(answer.to_dict()["values"]) if answer.values else "",
            "failures": list(study.failures),
            "warnings": [self.prose(warning) for warning in answer.warnings],
        }

    def figure(self, figure: FigureContent) -> dict[str, Any]:
        """A figure: the SVG of every panel, one legend, and notes on what is not shown."""
        drawn = page_panels(figure.panels, self.titles, figure.id, self.colour_class)
        curves = figure_curves(figure.panels, self.titles)
        captions = [
            panel.caption if len(figure.panels) == 1 else f"{panel.title}: {panel.caption}"
            for panel in figure.panels
            if panel.caption
        ]
        if len({panel.caption for panel in figure.panels}) == 1:
            captions = [figure.panels[0].caption]
        hidden = sum(one.hidden for _, one in drawn)
        if hidden:
            captions.append(f"{hidden} points have no place on these axes and are not shown.")
        if any(one.cut for _, one in drawn):
            captions.append("Bands that touch the frame continue beyond it.")
        legend = [
            {"text": text, "shade": self.colour_class(colour), "glyph": _glyph(series), "index": index}
            for text, colour, series, index in (
                *(
                    (curve_label(one), one.colour, one.series, curves.index(one))
                    for one in legend_curves(curves)
                ),
                *((one.text, one.colour, [one.series], None) for one in legend_entries(curves)),
            )
        ]
        return {
            "id": figure.id,
            "lead": figure.lead,
            "title": figure.title,
            "dense": len(figure.panels) >= MANY_PANELS,
            "panels": [
                {"title": one.panel.title, "svg": svg, "wide": is_wide(one.panel)} for svg, one in drawn
            ],
            "legend": legend,
            "caption": self.prose(" ".join(captions)),
            "files": self.links.get(figure.id, ()),
        }

    def summary(self, made: dict[str, Any], rows: Sequence[SummaryRow]) -> dict[str, Any]:
        """The summary's table: verdicts in place of their words, and arms in their colours."""
        place = list(columns_of(SummaryRow)).index("answer")
        for cells, row in zip(made["rows"], rows, strict=True):
            cells[place]["verdict"] = None if row.judged is None else self.verdict(row.judged)
            cells[0]["html"] = self.coloured(row.arm, row.name)
        return made

    def table(self, name: str, table: Table) -> dict[str, Any]:
        """A table; each cell has its HTML, its class and its sort key."""
        rows = [
            [
                self.cell(raw, text, arm=i == table.arm_column)
                for i, (raw, text) in enumerate(zip([*row, *[None] * len(texts)], texts, strict=False))
            ]
            for row, texts in zip(table.rows, formatted_rows(table), strict=True)
        ]
        return {
            "id": name,
            "title": table.title,
            "columns": list(zip(table.columns, numeric_columns(table), strict=True)),
            "rows": rows,
            "caption": self.prose(table.caption),
            "files": self.links.get(name, ()),
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
        return {"html": html, "kind": kind, "sort": key, "verdict": None}

    def samples(self, study: LoadedStudy) -> list[dict[str, Any]]:
        """What the largest run of each arm wrote last."""
        found: list[dict[str, Any]] = []
        for arm in dict.fromkeys(record.spec.arm.name for record in study.records):
            runs = [r for r in study.records if r.spec.arm.name == arm and r.run in study.samples]
            if not runs:
                continue
            record = max(runs, key=lambda r: (r.flops, r.run))
            lines = study.samples[record.run]
            last = lines[-1]["step"]
            texts = [(line["prompt"], line["text"]) for line in lines if line["step"] == last]
            title, name = run_title(record), self.arm(arm)
            found.append({"arm": name, "title": title, "run": record.run, "step": last, "texts": texts})
        return found

    def runs(self, studies: Sequence[LoadedStudy]) -> list[dict[str, Any]]:
        """Every run, by arm and compute."""
        samples = {run: lines for study in studies for run, lines in study.samples.items()}
        order = sorted(
            self.records.values(), key=lambda r: (arm_key(r.spec.arm.name), r.flops, r.spec.seed, r.run)
        )
        detailed = len(order) <= MAX_DETAILED_RUNS
        return [
            {
                "run": record.run,
                "arm": self.arm(record.spec.arm.name),
                "title": run_title(record),
                "loss": format_value(record.validation_loss, 5),
                "flops": format_value(record.flops, 3),
                "spec": _json(record.spec.to_dict()) if detailed else "",
                "record": _json({k: v for k, v in record.to_dict().items() if k != "spec"})
                if detailed
                else "",
                "samples": samples.get(record.run, ()),
            }
            for record in order
        ]


def _glyph(series: Sequence[Series]) -> Markup:
    """How a curve looks: the stroke of its line, its marker, or a block for bands and bars."""
    line, point = main_series(series)
    out = Markup()
    if line is not None:
        out += Markup('<span class="stroke {}"></span>').format(line.style)
    if point is not None:
        out += Markup('<span class="glyph">{}</span>').format(GLYPHS[point.marker][0 if point.filled else 1])
    if line is None and point is None:
        look = "" if series[0].kind == "band" else "bars" if series[0].filled else "hollow"
        out += Markup('<span class="block {}"></span>').format(look)
    return out


def _option_rows(options: dict[str, Any]) -> list[tuple[str, str]]:
    """Options that have a value; content hashes are shortened, as the facts of the runs have them whole."""
    rows = [(key, format_value(value)) for key, value in options.items()]
    return [(k, f"{v[:12]}…" if re.fullmatch("[0-9a-f]{64}", v) else v) for k, v in rows if v]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def provenance_rows(records: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """(name, value) rows: runs, compute, time, depths, seeds, data, hardware, versions."""
    if not records:
        return []
    specs = [record.spec for record in records]
    hours = sum(record.seconds_training for record in records) / 3600
    time = f"{format_value(hours, 3)} hours" if hours >= 1 else f"{format_value(60 * hours, 3)} minutes"
    rows = [
        ("runs", format_value(len(records))),
        ("training compute", f"{format_value(sum(r.flops for r in records), 3)} FLOPs in all"),
        ("training time", f"{time} in all"),
        ("depths", _each(spec.shape.depth for spec in specs)),
        ("seeds", _each(spec.seed for spec in specs)),
        ("precision", _each(spec.precision for spec in specs)),
        ("data", _each(spec.data.identity for spec in specs)),
        ("validation set", _each(record.validation_identity for record in records)),
        ("hardware", _each(_pairs(record.hardware, format_value) for record in records)),
        ("versions", _each(_pairs(record.versions, str) for record in records)),
    ]
    return [(name, value) for name, value in rows if value]


def run_title(record: RunRecord) -> str:
    """A short title of a run: depth, seed and tokens."""
    spec = record.spec
    return f"d{spec.shape.depth}, seed {spec.seed}, {format_value(float(spec.tokens), 3)} tokens"


def _each(values: Iterable[Any]) -> str:
    return ", ".join(map(str, sorted(set(values))))


def _pairs(values: Mapping[str, Any], shown: Callable[[Any], str]) -> str:
    return ", ".join(f"{key} {shown(value)}" for key, value in values.items())
