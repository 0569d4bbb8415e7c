"""The report page: complete, ordered, escaped and reproducible."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from steepen.laws.verdict.questions import GROWTH
from steepen.report.colours import arm_colour
from steepen.report.load_studies import LoadedStudy, load_study
from steepen.report.page import render_page
from steepen.runs.record import RunRecord
from steepen.studies.answer import Answer, Axis, Panel, Series, Table


class Outline(HTMLParser):
    """Elements, attributes and visible text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self._silent = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._silent = tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))


def test_page_sections_are_in_order_with_verdicts_first(
    finished: Callable[[str], LoadedStudy],
) -> None:
    study = finished("ladder")
    study = replace(study, answer=replace(study.answer, warnings=("a rung is missing.",)))
    text = Outline(render_page([study])).text
    parts = [
        "Do operator-1, untied-grow scale better than vanilla",
        "untied-grow against vanilla: better",
        "Loss against compute",
        "Verdicts against vanilla",
        "Method",
        "All values (JSON)",
        "Warnings",
        f"All {len(study.records)} runs",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_page_of_several_studies_opens_with_the_ladders_answers(
    finished: Callable[[str], LoadedStudy],
) -> None:
    page = render_page([finished("tpp"), finished("ladder")])
    answers, contents = page.index('class="stacked"'), page.index('<nav aria-label="Contents">')
    assert answers < contents < page.index("Study tpp")
    assert page.count('class="stacked"') == 1, "the answers are not repeated"


def test_long_tables_are_folded(ladder_page: str) -> None:
    assert '<details class="fold"><summary>' in ladder_page
    for block in ladder_page.split('<details class="fold">')[1:]:
        assert block[: block.index("</details>")].count("<tr>") > 12
    assert ladder_page.index('class="stacked"') < ladder_page.index('<details class="fold">')


def test_page_has_every_number_of_the_answer(
    finished: Callable[[str], LoadedStudy], ladder_page: str
) -> None:
    found = re.search(r"All values \(JSON\)</summary><pre[^>]*>(.*?)</pre>", ladder_page, re.S)
    assert found
    assert json.loads(unescape(found.group(1))) == finished("ladder").answer.values


def test_page_states_each_verdict_once(finished: Callable[[str], LoadedStudy], ladder_page: str) -> None:
    study = finished("ladder")
    visible = Outline(ladder_page).text.split("Every number")[0]
    for judged in study.answer.verdicts:
        sentence = re.sub(r"(?<=[ (])-(?=[\d.])", "−", judged.verdict.sentence)
        assert visible.split("All values (JSON)")[0].count(sentence) == 1
    assert study.answer.findings[-1] in visible


def test_verdicts_absent_from_the_findings_follow_them(
    finished: Callable[[str], LoadedStudy],
) -> None:
    study = finished("ladder")
    first = [judged for judged in study.answer.verdicts if judged.primary]
    judged = first[-1]
    detail = replace(
        judged.verdict,
        growth="undecided",
        by_what=None,
        sentence="untied-grow per second: undecided.",
        unit="seconds",
    )
    secondary = replace(judged, verdict=detail, primary=False)
    verdicts = (*first, secondary)
    page = render_page([replace(study, answer=replace(study.answer, verdicts=verdicts))])
    assert len(re.findall(r'<article class="verdict', page)) == 2
    text = Outline(page).text
    assert text.index("untied-grow against vanilla: better") < text.index("Verdicts per second")
    assert "untied-grow per second: undecided." in text


def test_page_has_spec_and_record_of_every_run(
    finished: Callable[[str], LoadedStudy], ladder_page: str
) -> None:
    study = finished("ladder")
    blocks = re.findall(
        r'<details class="run" id="run-(\w+)">.*?<pre[^>]*>(.*?)</pre>.*?<pre[^>]*>(.*?)</pre>',
        ladder_page,
        re.S,
    )
    assert {run for run, _, _ in blocks} == set(study.answer.runs)
    for run, spec, rest in blocks:
        plain = {**json.loads(unescape(rest)), "spec": json.loads(unescape(spec))}
        record = RunRecord.from_dict(plain)
        assert record == next(r for r in study.records if r.run == run)


def test_every_point_has_its_values_and_a_link_to_its_run(
    finished: Callable[[str], LoadedStudy], ladder_page: str
) -> None:
    study = finished("ladder")
    plots = ladder_page.split('<div class="plot')[1:]
    figure = next(part for part in plots if '<p class="title">Loss against compute</p>' in part)
    top, bottom = (float(v) for v in re.findall(r'data-box="\S+ (\S+) \S+ (\S+)"', figure)[0])
    low, high = json.loads(unescape(re.findall(r'data-y="([^"]*)"', figure)[0]))["limits"]
    found: dict[str, float] = {}
    for runs, marks in re.findall(r'class="points[^>]*data-runs="([^"]*)"[^>]*>(.*?)</g></g>', figure):
        for run, y in zip(runs.split(), re.findall(r'<use [^>]*y="([^"]+)"', marks), strict=True):
            found[run] = low + (high - low) * (bottom - float(y)) / (bottom - top)
    assert found == {r.run: pytest.approx(r.validation_loss, abs=2e-5) for r in study.records}
    assert all(f'id="run-{record.run}"' in ladder_page for record in study.records)


def test_page_references_no_external_resource(finished: Callable[[str], LoadedStudy]) -> None:
    page = Outline(render_page([finished("ladder"), finished("tpp")]))
    loads = [
        (tag, value)
        for tag, name, value in page.attributes
        if name in ("src", "href", "srcset", "action", "data")
    ]
    assert all(value.startswith(("#", "data:")) for _, value in loads)
    policy = next(v for t, n, v in page.attributes if t == "meta" and n == "content" and "default-src" in v)
    assert policy.startswith("default-src 'none'")


def test_html_in_names_is_escaped(finished: Callable[[str], LoadedStudy]) -> None:
    evil = '<script>alert(1)</script>"><img src=x onerror=alert(1)></style>'
    judged = finished("ladder").answer.verdicts[0]
    verdict = replace(judged.verdict, sentence=evil + "!", what_would_change=(evil,))
    judged = replace(judged, verdict=verdict, arm=evil, variant=evil, part=evil)
    series = Series(
        evil,
        "points",
        (1.0, 2.0),
        (1.0, 2.0),
        arm=evil,
        variant=evil,
        note=evil,
        detail=evil,
        runs=(evil, evil),
    )
    line = Series(evil, "line", (1.0, 2.0), (1.0, 2.0), level=3.0, style="dashed")
    answer = Answer(
        study=evil,
        question=evil,
        section=evil,
        findings=(evil,),
        values={evil: evil},
        verdicts=(judged,),
        panels=(Panel(evil, Axis(evil), Axis(evil), (series, line), (("x", 1.5, evil),), evil),),
        tables=(Table(evil, (evil,), ((evil,),), evil),),
        warnings=(evil,),
        method=(evil,),
    )
    clean = replace(
        answer,
        study="x",
        question="x",
        findings=(),
        values={},
        verdicts=(),
        panels=(),
        tables=(),
        warnings=(),
    )
    page = Outline(render_page([LoadedStudy(evil, answer, {evil: evil}, ())]))
    plain = Outline(render_page([LoadedStudy("x", clean, {}, ())]))
    assert page.elements["script"] == plain.elements["script"] == 1
    assert page.elements["style"] == plain.elements["style"] == 1
    assert page.elements["img"] == 0
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]


def test_arm_has_one_colour_on_the_whole_page(finished: Callable[[str], LoadedStudy]) -> None:
    page = render_page([finished("ladder"), finished("family"), finished("extrapolate")])
    colour = arm_colour("untied-grow")
    rules = re.findall(rf"\.(k\d+)\{{--c:{colour.light};", page)
    assert len(rules) == 1
    shades = set(re.findall(r'<span class="(?:arm|name) (k\d+)">(?:Untied-Grow|untied-grow)<', page))
    labels = set(
        re.findall(
            r'<button type="button" class="key (k\d+)"[^>]*>(?:<span[^>]*>[^<]*</span>)*Untied-Grow', page
        )
    )
    marks = set(re.findall(r'<g class="(?:points|line|band) (k\d+)"[^>]*data-n="Untied-Grow', page))
    marks |= set(re.findall(r'<g [^>]*class="(?:points|line|band) (k\d+)"[^>]*data-n="Untied-Grow', page))
    assert shades == labels == marks == set(rules)


def test_dark_colours_apply_to_screens_only(ladder_page: str) -> None:
    assert set(re.findall(r"@media ([^{]*prefers-color-scheme[^{]*)\{", ladder_page)) == {
        "screen and (prefers-color-scheme:dark)"
    }


def test_same_study_gives_the_same_page(simulated_studies: Path, ladder_page: str) -> None:
    assert render_page([load_study("ladder", simulated_studies / "studies")]) == ladder_page


@pytest.mark.parametrize("name", ["tpp", "data-constrained", "extrapolate"])
def test_study_without_runs_or_verdicts_has_a_page(name: str, finished: Callable[[str], LoadedStudy]) -> None:
    study = finished(name)
    text = Outline(render_page([study])).text
    assert study.answer.findings[0] in text
    assert all(table.title in text for table in study.answer.tables)
    assert "All 0 runs" not in text


def test_simulated_figures_are_labelled_simulated(simulated_studies: Path) -> None:
    for file in (simulated_studies / "studies").glob("*/study.json"):
        assert json.loads(file.read_text())["answer"]["question"].startswith("Simulated laws")


def test_badges_differ_by_answer(finished: Callable[[str], LoadedStudy]) -> None:
    study = finished("ladder")
    judged = study.answer.verdicts[0]
    looks: set[str] = set()
    for growth in GROWTH:
        by_what = "either" if growth == "grows" else None
        verdict = replace(judged.verdict, better="no difference", growth=growth, by_what=by_what)
        answer = replace(study.answer, verdicts=(replace(judged, verdict=verdict),), panels=(), tables=())
        page = render_page([replace(study, answer=answer, records=())])
        badges = f'<b class="word no-difference">no difference</b> <b class="word {growth}">{growth}</b>'
        assert badges in page
        assert ('<b class="word by">by either</b>' in page) == (growth == "grows")
        (rule,) = re.findall(rf"\.word\.{growth}(?:,[^{{]*)?(\{{[^}}]*\}})", page)
        looks.add(rule)
    assert len(looks) == len(GROWTH), "every answer has its own look"


def test_only_the_arm_column_of_a_table_is_coloured(finished: Callable[[str], LoadedStudy]) -> None:
    study = finished("ladder")
    coloured = '<span class="arm'
    for column, expected in ((0, 1), (None, 0)):
        table = Table("T", ("arm", "copy"), (("vanilla", "vanilla"),), arm_column=column)
        answer = replace(study.answer, verdicts=(), tables=(table,), panels=())
        page = render_page([replace(study, answer=answer, records=study.records[:1])])
        body = page[page.index("<tbody") : page.index("</tbody")]
        assert body.count(coloured) == expected
