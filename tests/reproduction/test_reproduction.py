"""Every figure, table and claim of the paper comes out of the tables that its authors publish."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import steepen
from steepen.errors import UsageError
from steepen.laws.analysis import fit_compute
from steepen.laws.fits.compute_law import AnalysisRequest
from steepen.laws.fits.downstream import fit_downstream
from steepen.laws.ladder import make_ladder
from steepen.laws.verdict.multipliers import interpolated_multipliers
from steepen.reproduction import claims as claims_module
from steepen.reproduction.claims import EDU, FINEWEB, Claim, claims
from steepen.reproduction.items import ITEMS, Item, find_item
from steepen.reproduction.paper_studies import DECAY, PaperStudies
from steepen.reproduction.tables import ARCHIVE, table
from steepen.requests.app import main
from steepen.studies.answer import Panel, Table
from steepen.studies.design.matched_compute import slice_families
from steepen.studies.driver.journal import Journal
from steepen.tables.paper_ladders import ASSETS

from .latex_numbers import printed_numbers, read_paper

Find = Callable[[str], Path]


@pytest.fixture(scope="module")
def studies() -> PaperStudies:
    """The paper's studies, driven once for all tests."""
    return PaperStudies(draws=100)


def test_the_paper_has_24_figures_and_10_tables_in_48_items() -> None:
    numbers = [item.number for item in ITEMS]
    assert len(set(numbers)) == len({item.label for item in ITEMS}) == len(ITEMS) == 48
    for kind, count in (("Figure", 24), ("Table", 10)):
        own = {re.sub(r"[a-z]$", "", number) for number in numbers if number.startswith(kind)}
        assert own == {f"{kind} {n}" for n in range(1, count + 1)}


def test_numbers_and_titles_are_those_of_the_papers_source(reference_data: Find) -> None:
    source = read_paper(reference_data("paper"))
    numbers = printed_numbers(source)
    assert {item.label: item.number for item in ITEMS} == {
        label: number for label, number in numbers.items() if label in {item.label for item in ITEMS}
    }
    whole = {number for number in numbers.values() if number + "a" in numbers.values()}
    assert set(numbers.values()) - whole == {item.number for item in ITEMS}  # none is left out
    macros = {r"\KtwoGrow": "Loop-Grow", r"\DepGrow": "Untied-Grow", "--": "–", "$": "", r"\times": "×",
              "10^{18}": "10¹⁸", "10^{20}": "10²⁰"}  # fmt: skip
    for name, text in macros.items():
        source = source.replace(name, text)
    for item in ITEMS:
        assert item.title in " ".join(source.split()), item.number


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.label)
def test_an_item_is_made_of_the_authors_runs(item: Item, studies: PaperStudies) -> None:
    shown = item.show(studies)
    kind = Panel if item.number.startswith("Figure") else Table
    assert shown and all(isinstance(one, kind) for one in shown)
    for one in shown:
        if isinstance(one, Panel):
            values = [(x, y) for series in one.series for x, y in zip(series.x, series.y, strict=True)]
            assert len(values) >= 2 and np.isfinite(values).all()
        else:
            assert len(one.rows) >= 4 and len({len(row) for row in one.rows}) == 1


@pytest.mark.parametrize("claim", claims(), ids=lambda claim: f"{claim.name}:{claim.arm}")
def test_a_printed_number_is_reproduced(claim: Claim, studies: PaperStudies) -> None:
    ours = claim.compute(studies)
    assert abs(ours - claim.printed) <= claim.tolerance
    assert claim.item in {item.number for item in ITEMS}
    if claim.recomputed is not None:  # far closer than the tolerance to what the authors' scripts give
        assert ours == pytest.approx(claim.recomputed, rel=2e-5, abs=1e-6)


def test_studies_state_what_the_fits_give(studies: PaperStudies) -> None:
    """The numbers that users of a study read are those of the fits alone."""
    arms = studies.get("ladder").values["flops"]["arms"]
    for arm, law in claims_module.laws(FINEWEB).arms.items():
        assert arms[arm]["gamma"] == pytest.approx(law.gamma.value, rel=1e-3)
    for arm in ("vanilla", "loop-2"):
        assert studies.get("tpp").values[arm]["mean"] == pytest.approx(claims_module.optimal_tpp(arm).mean)
    for arm in ("loop-grow", "untied-grow"):
        found = studies.get("growth-fraction").values[arm]["mean"]
        assert found == pytest.approx(claims_module.mean_optimal_rho(arm), abs=1e-3)
        law = studies.get(f"growth-timing:{arm}").values[arm]["law"]
        assert law["a"] == pytest.approx(claims_module.growth_law(arm).a, abs=0.002)
    for arm in ("operator-1", "loop-2", "untied-2"):
        regret = studies.get("transfer:probe").values["probe"][arm]["regret"]
        assert 1e3 * regret == pytest.approx(claims_module.transfer_regret(arm))
    core = studies.get("extrapolate").values["downstream"]["scores"]["core_forecast"]
    assert core["r"] == pytest.approx(claims_module.core_forecast().r, rel=1e-6)
    factor = studies.get("data-constrained:grid").values["decay"]["frontier_factor"]
    assert factor == pytest.approx(claims_module.loops_over_model_size(), rel=1e-6)


def test_the_drift_table_is_the_printed_one(studies: PaperStudies, reference_data: Find) -> None:
    source = read_paper(reference_data("paper"))
    before, after = source.split(r"\label{tab:hp-drift}")[0], r"([+-]\d\.\d\d)\\pm(\d\.\d\d)"
    printed = [f"{beta}±{error}" for beta, error in re.findall(after, before[before.rindex("tabular}{ll") :])]
    slopes = find_item("table", "8").show(studies)[0]
    assert isinstance(slopes, Table) and len(printed) == 40
    ours = [cell.replace("−", "-") for row in slopes.rows for cell in row[2:]]
    assert sorted({*printed} - {*ours}) == ["+2.73±0.23"]  # RM of Vanilla: an optimum is outside its sweep


def test_the_size_table_is_the_printed_one(studies: PaperStudies, reference_data: Find) -> None:
    source = read_paper(reference_data("paper")).split(r"\label{tab:model-sizes}")[0]
    lines = [line for line in source[source.rindex("Exec. Depth") :].splitlines() if line.startswith("$d")]
    printed = [re.sub(r"[${}\\, ]|mathrm", "", line).replace("to", "→").split("&") for line in lines]
    sizes = find_item("table", "2").show(studies)[0]
    assert isinstance(sizes, Table)
    assert printed == [[str(cell).replace(" ", "") for cell in row] for row in sizes.rows]


def test_the_papers_words_remain_options_and_give_other_numbers() -> None:
    """Huber of log losses, log-loss interpolation, log–log cuts and a predicted ratio."""
    ladders = claims_module.ladders(FINEWEB)
    law = fit_compute(
        ladders, AnalysisRequest("vanilla", method="paper", loss="huber", reference_law="free-fit")
    ).arms
    assert law["vanilla"].e.value == pytest.approx(1.6932, abs=1e-4)
    assert law["vanilla"].gamma.value == pytest.approx(0.1101, abs=1e-4)
    assert law["untied-grow"].gamma.value == pytest.approx(0.1155, abs=1e-4)
    in_logs = interpolated_multipliers(ladders["vanilla"], ladders["untied-2"], interpolate="log-loss")
    assert in_logs[-1].value == pytest.approx(1.346, abs=5e-4)
    families = {
        float(loops): make_ladder(str(loops), own.array("matrix_flops"), own.array("val_loss"))
        for loops, own in table("data_constrained_grid").where(weight_decay=DECAY).by("loops").items()
    }
    low, high = slice_families(families, np.array([8.46e17, 6.7e18]), interpolation="log-log")
    assert low.best is not None and high.best is not None
    assert (low.best.x, high.best.x) == pytest.approx((1.72, 6.77), abs=0.01)
    series = {arm: claims_module.checkpoints("fineweb-edu", arm) for arm in ("vanilla", "untied-grow")}
    tasks = claims_module.core_forecast().tasks
    other = fit_downstream(series, tasks, residuals="log-nll", ratio="predicted")
    assert other.r == pytest.approx(0.8634, abs=1e-4)
    d26 = claims_module.largest("compute_flops")
    assert float(other.predict("untied-grow", d26)[0]) == pytest.approx(0.3822, abs=1e-4)


def test_the_irreducible_losses_are_the_authors() -> None:
    for name, e in ((FINEWEB, 1.7064), (EDU, 1.4492)):
        assert claims_module.laws(name).arms["vanilla"].e.value == pytest.approx(e, abs=5e-5)
    errors = [law.slope_standard_error for law in claims_module.laws(FINEWEB).arms.values()]
    assert max(errors) == pytest.approx(8.3e-4, abs=1e-5)


def test_shipped_tables_are_the_published_ones_with_their_licence(reference_data: Find) -> None:
    folder = reference_data("refdata/authors")
    with zipfile.ZipFile(ARCHIVE) as archive:
        shipped = {name: archive.read(name) for name in archive.namelist()}
    assert not {path.name for path in ASSETS.glob("*.csv")} & set(shipped)  # one copy of each
    shipped |= {path.name: path.read_bytes() for path in ASSETS.glob("*.csv")}
    assert shipped == {path.name: path.read_bytes() for path in folder.glob("*.csv")}


def test_the_tables_carry_their_licence_and_are_small() -> None:
    licence = ARCHIVE.with_name("authors_tables.LICENSE").read_text(encoding="utf-8")
    assert "Loop contributors" in licence and "Permission is hereby granted" in licence
    files = [*ARCHIVE.parent.iterdir(), *ASSETS.iterdir()]
    assert sum(path.stat().st_size for path in files) < 300_000


def test_the_command_lists_shows_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["paper"]) == 0
    listed = capsys.readouterr().out
    assert "Figure 24" in listed and "Table 10" in listed and "multiplier_1e20" in listed
    file = tmp_path / "figure12.png"
    assert main(["paper", "figure", "12", "--figure", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [found["item"]["number"], len(found["panels"]), len(found["tables"])] == ["Figure 12", 5, 0]
    assert file.stat().st_size > 10_000
    assert main(["paper", "table", "7", "--write-result", str(tmp_path / "table7.csv")]) == 0
    assert "mean_optimal_tpp" in capsys.readouterr().out
    assert "untied-2,6.07" in (tmp_path / "table7.csv").read_text()
    assert main(["paper", "claim", "exponent"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"untied-grow +Figure 3 +0.1168 +0.11679", shown)
    for words in (["figure", "25"], ["table", "x"], ["claim", "exponnent"], ["claim", "--data", "x"]):
        assert main(["paper", *words]) == 2
    assert "exponent" in capsys.readouterr().err


def test_a_figure_is_drawn_of_ones_own_study(studies: PaperStudies, tmp_path: Path) -> None:
    answer = replace(studies.get("tpp"), runs=())
    panels = tuple(panel for panel in answer.panels if not panel.title.startswith("vanilla"))
    own = Journal.open(tmp_path / "studies", "mine", {}, tmp_path / "runs")
    own.set_answer(replace(answer, panels=panels))
    found = steepen.paper("figure", "12", data=("mine",), studies=tmp_path / "studies")
    assert [panel.title for panel in found.panels()] == [
        panel.title for panel in find_item("figure", "12").show(studies)[1:]
    ]
    assert "from mine" in found.headline()
    with pytest.raises(UsageError, match="Figure 3 shows runs of `steepen study ladder`"):
        steepen.paper("figure", "3", data=("mine",), studies=tmp_path / "studies")
    with pytest.raises(UsageError, match="shows no runs"):
        steepen.paper("table", "2", data=("mine",), studies=tmp_path / "studies")


def test_a_label_names_an_item_and_a_figure_with_subfigures_asks_for_one() -> None:
    assert find_item("figure", "fig:tpl").number == "Figure 9"
    with pytest.raises(
        UsageError, match="Figure 16 has subfigures: give one of 16a, 16b, 16c, 16d, 16e, 16f"
    ):
        find_item("figure", "16")
    assert math.isclose(steepen.paper("claim", "tuned_loss").rows[0].printed, 3.2772)
