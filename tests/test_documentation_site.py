"""The documentation site builds without a warning and loads nothing from a network."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it: broken links and unknown names are errors."""
    pytest.importorskip("mkdocs", reason="needs the docs extra: pip install 'steepen[docs]'")
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_of_docs_is_in_the_site(site: Path) -> None:
    pages = {path.stem for path in (REPOSITORY / "docs").glob("*.md")}
    generated = {"index", "reference", "commands", "paper-numbers", "changelog", "contributing"}
    assert pages | generated | {"404"} == {path.stem for path in site.glob("*.html")}


def test_the_references_name_every_function_and_command(site: Path) -> None:
    import steepen
    from steepen.requests.registry import VERBS

    python = html.unescape((site / "reference.html").read_text())
    missing = [name for name in steepen.__all__ if f">{name}<" not in python]
    assert not missing
    commands = (site / "commands.html").read_text()
    assert not [name for name in VERBS if f"steepen {name}" not in commands]


def test_every_published_ladder_is_planned_exactly(site: Path) -> None:
    page = (site / "paper-numbers.html").read_text()
    assert page.count("command line, FLOPs") == 52 and "DIFFER" not in page


def test_no_page_loads_anything_from_a_network(site: Path) -> None:
    outside = re.compile(
        r"<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//[^\s\"'>]+"
    )
    found = {page.name: outside.findall(page.read_text()) for page in site.glob("*.html")}
    assert not {name: links for name, links in found.items() if links}
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"(?:@import|url\()\s*[\"']?https?:", styles)


def test_search_works_when_the_site_is_opened_as_files(site: Path, tmp_path: Path) -> None:
    browser = os.environ.get("STEEPEN_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser here: install one of {', '.join(BROWSERS)}, or set STEEPEN_BROWSER")
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            f"--user-data-dir={tmp_path}", "--host-resolver-rules=MAP * ~NOTFOUND",
            "--virtual-time-budget=15000", "--dump-dom", f"{(site / 'index.html').as_uri()}?q=irreducible",
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    results = re.findall(r'class="md-search-result__link"', done.stdout)
    assert len(results) > 3
