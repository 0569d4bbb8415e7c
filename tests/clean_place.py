"""One of everything that steepen reads, made once: tests damage copies of it."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from core_bundle import write_bundle
from steepen import pack
from steepen.data import Dataset
from steepen.inference.export import export
from steepen.recipe.paper_tables import PAPER
from steepen.recipe.recipe_choice import RecipeFile, write_recipe
from steepen.requests.app import main
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.studies.answer import Answer, Axis, Panel, Series, Table
from steepen.studies.driver.journal import Journal
from steepen.studies.preset import load_preset
from steepen.training.run import train
from steepen.training.train_options import TrainOptions
from steepen.utils.codec import to_builtins
from steepen.utils.json_io import write_json

HANG_SECONDS = 300  # of a command that waits; a busy machine needs some of them to compute


@dataclass(frozen=True)
class Place:
    """A finished and evaluated run, an unfinished one, their data, a bundle, a study, its pack, an export,
    a preset, a recipe and a table.
    """

    root: Path
    run: str
    loss: float
    scores: dict[str, Any]


def make_place(root: Path, spec: RunSpec, data: Path) -> Place:
    """Train, evaluate, export and pack a run of a second below `root`."""
    shutil.copytree(data, root / "data")
    options = TrainOptions(device="cpu", quiet=True, checkpoint_every=2, keep_last=3)
    write_bundle(root / "bundle")
    named = root / "named"
    named.mkdir()
    (named / "preset.yaml").write_text(yaml.safe_dump(to_builtins(load_preset("tiny"))))
    write_recipe(named / "recipe.yaml", RecipeFile("vanilla", PAPER["vanilla"]))
    rows = [f"{arm},{10**n},{1.8 + 3 * 10 ** (-n / 20)}" for arm in "ab" for n in range(15, 22)]
    (named / "table.csv").write_text("\n".join(["arm,flops,loss", *rows, ""]))
    store = RunStore(root / "runs")
    train(spec, Dataset.open(root / "data"), store, options)
    assert main(["eval", str(store.run(spec).path), *eval_words(root), "--kl-depth", "--passes", "1-2"]) == 0
    shutil.copytree(store.root, root / "unfinished")
    (root / "unfinished" / spec.hash / "record.json").unlink()
    record = store.record(spec)
    assert record is not None
    journal = Journal.open(root / "studies", "s", {}, store.root)
    with journal.driving():
        journal.add_batch([spec])
        series = Series("vanilla", "points", (1.0, 2.0), (3.0, 2.0), arm="vanilla", runs=(spec.hash,))
        panels = (Panel("loss", Axis("FLOPs", "log"), Axis("loss"), (series,)),)
        tables = (Table("runs", ("arm", "loss"), (("vanilla", 3.0), ("loop-2", None))),)
        journal.set_answer(
            Answer("ladder", "?", "", ("It does.",), {}, tables=tables, panels=panels, runs=(spec.hash,))
        )
    pack("s", root / "pack" / "s.tar.gz", studies=root / "studies")
    export(store.run(spec).path, root / "export", "safetensors")
    for runs in ("runs", "unfinished"):
        write_json(root / runs / spec.hash / "failure.json", {"kind": "Failed", "message": "it failed."})
    return Place(root, spec.hash, record.validation_loss, record.evaluation)


def eval_words(root: Path) -> list[str]:
    """The options of `steepen eval` that measure one task."""
    words = ["--data", str(root / "data"), "--core", str(root / "bundle"), "--device", "cpu"]
    return [*words, "--tasks", "choose", "--json"]


class Hung(BaseException):
    """A command has waited too long; not an Exception, which the command line would report and swallow."""


@contextlib.contextmanager
def no_hang(seconds: int = HANG_SECONDS) -> Generator[None]:
    """Raise `Hung` in what waits for longer."""

    def stop(*_: object) -> NoReturn:
        raise Hung(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
