"""The report page in headless Chromium: no requests, no errors, hover values, phone and desktop widths."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from steepen.report.contents import StudyContent
from steepen.report.load_studies import LoadedStudy
from steepen.report.page import render_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
]


@dataclass(frozen=True)
class Visit:
    """What a browser made of a page."""

    dom: str
    console: tuple[str, ...]
    requests: tuple[str, ...]  # of the page itself, beyond its own file

    def said(self, name: str) -> str:
        """What the probe wrote down under a name."""
        found = re.search(rf'data-{name}="([^"]*)"', self.dom)
        assert found, f"the probe did not report {name}"
        return found.group(1)


@pytest.fixture(scope="session")
def visit(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Visit]:
    """Opens a page in a headless browser that can resolve no host name."""
    browser = os.environ.get("STEEPEN_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser here: install one of {', '.join(BROWSERS)}, or set STEEPEN_BROWSER")

    def open_page(page: str, *options: str) -> Visit:
        folder = tmp_path_factory.mktemp("visit")
        file, log = folder / "page.html", folder / "net.json"
        file.write_text(page, encoding="utf-8")
        command = [
            str(browser), *QUIET, f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}",
            "--host-resolver-rules=MAP * ~NOTFOUND", *options, "--dump-dom", file.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
        events = json.loads(log.read_text())["events"]
        requests = [
            event["params"]["url"]
            for event in events
            # The browser's own errands (its clock, its updates) have no origin; a page's have.
            if event.get("params", {}).get("initiator", "not an origin") != "not an origin"
        ]
        outside = [url for url in requests if not url.startswith(("file:", "data:"))]
        console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return Visit(done.stdout, tuple(console), tuple(outside))

    return open_page


def probed(page: str, script: str) -> str:
    """The page with a script of the test's after its own (so without its policy against foreign scripts)."""
    bare = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    return bare.replace("</body>", f"<script>{script}</script></body>")


def test_browser_fixture_detects_requests_and_errors(visit: Callable[..., Visit]) -> None:
    seen = visit('<body><img src="http://example.invalid/x.png"><script>nothing_here()</script></body>')
    assert seen.requests == ("http://example.invalid/x.png",)
    assert "nothing_here" in seen.console[0]


def test_page_makes_no_requests_and_logs_no_errors(
    visit: Callable[..., Visit], finished: Callable[[str], LoadedStudy]
) -> None:
    studies = [finished(name) for name in ("ladder", "tpp", "data-constrained", "extrapolate")]
    seen = visit(render_page(studies), "--window-size=1100,1600")
    assert seen.requests == ()
    assert seen.console == ()
    assert all(
        finding.split(":")[0] in re.sub(r"<[^>]+>", "", seen.dom)
        for s in studies
        for finding in s.answer.findings
    )
    # The page's own script has run under the page's policy: every panel can be reached by the keyboard.
    contents = [StudyContent.of(i, study, {}, {}) for i, study in enumerate(studies)]
    panels = sum(len(figure.panels) for content in contents for figure in content.figures)
    assert len(re.findall(r'<svg [^>]*data-box=[^>]* tabindex="0"', seen.dom)) == panels


HOVER = """
const svg = document.querySelector('.figures svg'), point = svg.querySelectorAll('.points use')[3];
const box = point.getBoundingClientRect(), root = document.documentElement;
const at = (kind, x, y) => svg.dispatchEvent(new PointerEvent(kind, {
  clientX: x, clientY: y, bubbles: true, pointerType: 'mouse', button: 0}));
const middle = [box.x + box.width / 2 + 2, box.y + box.height / 2];
at('pointermove', ...middle);
const tip = svg.parentNode.querySelector('.tip');
root.dataset.hover = tip.hidden ? 'hidden' : tip.textContent;
svg.dispatchEvent(new PointerEvent('pointerleave'));
root.dataset.left = String(tip.hidden);
for (let i = 0; i < 5; i++) {
  svg.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}));
  if (i == 3) root.dataset.focus = tip.textContent;
}
root.dataset.next = tip.textContent;
at('pointerdown', ...middle); at('pointerup', ...middle);
root.dataset.open = [...document.querySelectorAll('.run[open]')].map(run => run.id).join();
const figure = svg.closest('figure'), name = figure.querySelector('.legend button');
const shown = () => [...figure.querySelectorAll('.marks > [data-c="0"]')]
  .filter(mark => mark.getBoundingClientRect().width).length;
root.dataset.before = shown();
name.click(); root.dataset.off = shown();
name.click(); root.dataset.on = shown();
const table = document.querySelector('.table'), rows = () => [...table.querySelectorAll('tbody tr')];
const button = table.querySelectorAll('th button')[2];
const order = () => rows().map(row => row.cells[2].textContent).join();
button.click(); root.dataset.rising = order();
button.click(); root.dataset.falling = order();
root.dataset.sort = button.parentNode.getAttribute('aria-sort');
root.dataset.missing = rows().at(-1).cells[2].textContent;
"""


def test_hover_keyboard_and_table_sorting_work(
    visit: Callable[..., Visit], finished: Callable[[str], LoadedStudy]
) -> None:
    study = finished("ladder")
    seen = visit(probed(render_page([study]), HOVER), "--window-size=1100,1600")
    assert seen.console == ()
    fourth, fifth = study.records[3:5]  # the first series are Vanilla's points, in order
    for name, record in (("hover", fourth), ("focus", fourth), ("next", fifth)):
        text = seen.said(name)
        assert text.startswith("Vanilla"), text
        loss = re.search(r"validation loss \(nats per token\): ([\d.]+)", text)
        assert loss and float(loss.group(1)) == pytest.approx(record.validation_loss, abs=6e-5)
        assert record.run in text
    assert seen.said("left") == "true"
    assert seen.said("open") == f"run-{fourth.run}"
    assert int(seen.said("before")) == int(seen.said("on")) > 0 == int(seen.said("off"))
    rising, falling = seen.said("rising").split(","), seen.said("falling").split(",")
    assert rising[:-1] == sorted(rising[:-1]) == falling[-2::-1] and len(set(rising)) == 3
    assert seen.said("sort") == "descending"
    assert seen.said("missing") == rising[-1] == "–"  # Vanilla has no multiplier: last, whichever way


ZOOM = """
const svg = document.querySelector('.figures svg'), root = document.documentElement;
const at = (kind, x, y) => svg.dispatchEvent(new PointerEvent(kind, {
  clientX: x, clientY: y, bubbles: true, pointerType: 'mouse', button: 0}));
const point = svg.querySelectorAll('.points use')[3], tip = svg.parentNode.querySelector('.tip');
const where = () => {
  const b = point.getBoundingClientRect();
  return [b.x + b.width / 2, b.y + b.height / 2];
};
const [x, y] = where();
at('pointerdown', x - 60, y - 40); at('pointermove', x, y); at('pointermove', x + 60, y + 40);
at('pointerup', x + 60, y + 40);
const [zx, zy] = where();
const [l, t, r, b] = svg.dataset.box.split(' ').map(Number);
const ctm = svg.getScreenCTM();
const centre = [(zx - ctm.e) / ctm.a - (l + r) / 2, (zy - ctm.f) / ctm.d - (t + b) / 2];
root.dataset.centre = centre.map(Math.round).join();
at('pointermove', zx, zy);
root.dataset.hover = tip.textContent;
const seen = [...svg.querySelectorAll('.zoom-ticks text')].map(text => text.textContent);
root.dataset.ticks = seen.join();
root.dataset.hidden = getComputedStyle(svg.querySelector('.tick')).display;
svg.parentNode.querySelector('.reset').click();
root.dataset.back = where().map((v, i) => Math.round(v - [x, y][i])).join();
"""


def test_dragging_a_rectangle_zooms_into_it(
    visit: Callable[..., Visit], finished: Callable[[str], LoadedStudy]
) -> None:
    study = finished("ladder")
    seen = visit(probed(render_page([study]), ZOOM), "--window-size=1280,1600")
    assert seen.console == ()
    # The rectangle's middle, a point, is now the middle of the axes; values are still those of the data.
    assert all(abs(int(value)) <= 1 for value in seen.said("centre").split(","))
    loss = re.search(r"validation loss \(nats per token\): ([\d.]+)", seen.said("hover"))
    assert loss and float(loss.group(1)) == pytest.approx(study.records[3].validation_loss, abs=6e-5)
    assert len(seen.said("ticks").split(",")) >= 4 and seen.said("hidden") == "none"
    assert seen.said("back") == "0,0"


FIT = """
const root = parent.document.documentElement, own = document.documentElement;
root.dataset.overflow = String(own.scrollWidth - own.clientWidth);
root.dataset.width = String(own.clientWidth);
root.dataset.shown = [...document.querySelectorAll('.plot svg')].filter(s => s.clientWidth).length;
root.dataset.paper = getComputedStyle(document.body).backgroundColor;
const inside = [...document.querySelectorAll('.plot svg')].filter(s => s.clientWidth).every(svg => {
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].every(t => {
    const box = t.getBoundingClientRect();
    return box.left >= frame.left - 2 && box.right <= frame.right + 6 && box.bottom <= frame.bottom + 2;
  });
});
root.dataset.inside = String(inside);
const clash = [...document.querySelectorAll('.plot svg')].filter(s => s.clientWidth).flatMap(svg => {
  const boxes = [...svg.querySelectorAll('.tick text')].map(t => [t.textContent, t.getBoundingClientRect()]);
  return boxes.flatMap(([a, x], i) => boxes.slice(i + 1).filter(([b, y]) =>
    Math.min(x.right, y.right) - Math.max(x.left, y.left) > 3 &&
    Math.min(x.bottom, y.bottom) - Math.max(x.top, y.top) > 6).map(([b]) => a + '/' + b));
});
root.dataset.clash = clash.join();
root.dataset.small = Math.min(...[...document.querySelectorAll('.tick text')]
  .map(t => parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a));
"""


@pytest.mark.parametrize("width", [390, 1280])
def test_page_fits_phone_and_desktop_widths(
    width: int, visit: Callable[..., Visit], finished: Callable[[str], LoadedStudy]
) -> None:
    studies = [finished(name) for name in ("family", "tpp", "data-constrained", "extrapolate")]
    ladder = finished("ladder")
    long_name = replace(
        ladder.answer.verdicts[0],
        arm="width-only-deep-vanilla",
        variant="adamw",
        part="optimizer, width and depth",
    )
    studies.append(replace(ladder, answer=replace(ladder.answer, verdicts=(long_name,))))
    # A window can't be narrower than some 500 pixels; a frame can.
    inner = html.escape(probed(render_page(studies), FIT))
    style = f"border:0;width:{width}px;height:1600px"
    frame = f'<body style="margin:0"><iframe srcdoc="{inner}" style="{style}"></iframe></body>'
    seen = visit(frame, "--window-size=1400,1600")
    assert seen.console == ()
    assert seen.said("width") == str(width)
    assert seen.said("overflow") == "0"
    assert int(seen.said("shown")) >= sum(len(study.answer.panels) for study in studies)
    assert seen.said("inside") == "true"
    assert seen.said("clash") == ""
    assert float(seen.said("small")) >= 9  # pixels
    assert seen.said("paper") == "rgb(255, 255, 255)"


def test_page_follows_the_dark_colour_scheme(
    visit: Callable[..., Visit], finished: Callable[[str], LoadedStudy]
) -> None:
    page = probed(render_page([finished("ladder")]), FIT)
    seen = visit(page, "--blink-settings=preferredColorScheme=0")
    assert seen.said("paper") == "rgb(21, 24, 28)"
