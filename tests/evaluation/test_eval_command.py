"""The commands `steepen eval`, `steepen eval filter` and `steepen forecast`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steepen.data import Dataset
from steepen.evaluation.core.suite import CORE17, CORE22
from steepen.laws.fits.downstream import GPT3_CORE
from steepen.requests.app import main
from steepen.results.evaluate import EvaluationResult
from steepen.runs.record import RunRecord
from steepen.runs.store import RunDirectory
from steepen.utils.json_io import with_checksum, write_json


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / trained.name))


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main([str(word) for word in words]) == 0
    return json.loads(capsys.readouterr().out)


def rejected(capsys: pytest.CaptureFixture[str], *words: object, code: int = 2) -> str:
    assert main([str(word) for word in words]) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_requested_scores_are_measured_saved_and_joined(
    run: Path, dataset: Dataset, bundle_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("eval", run, "--data", dataset.directory, "--core", bundle_folder, "--kl-depth")
    asked = (*asked, "--passes", "1-8", "--figure", tmp_path / "scores.png", "--json")
    before = RunDirectory(run).record()
    found = answer(capsys, *asked)
    record = RunDirectory(run).record()
    assert before is not None and record is not None and found["in_record"]
    # The same weights on the same tokens: evaluation finds training's own last loss.
    assert found["validation"]["loss"] == pytest.approx(before.validation_loss, abs=1e-6)
    assert found["validation"]["identity"] == before.validation_identity
    assert found["passes"] == 4 and found["test_time_passes"]["passes"] == [1, 2, 3, 4]
    assert found["kl_depth"]["executed"] == 1 + 4 + 1
    assert set(found["core"]["tasks"]) == {"choose", "choose_shots", "ending", "complete"}
    assert replace(record, evaluation={}) == replace(before, evaluation={})
    in_record = record.evaluation
    assert all(
        in_record[part] == found[part] for part in ("validation", "kl_depth", "test_time_passes", "core")
    )
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")
    # Asked again for less, the rest stays; a smaller look at CORE does not displace the larger one.
    answer(capsys, "eval", run, "--data", dataset.directory, "--json")
    less = ("--core", bundle_folder, "--core-examples", 2, "--tasks", "choose")
    small = answer(capsys, "eval", run, "--data", dataset.directory, *less, "--json")
    assert set(small["core"]["tasks"]) == {"choose"}
    again = RunDirectory(run).record()
    assert again is not None and again.evaluation["core"] == in_record["core"]


def test_a_bundle_with_cores_labels_and_other_examples_is_named(
    run: Path, dataset: Dataset, bundle_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A score called CORE that is not of the published examples must not pass for one."""
    folder = Path(shutil.copytree(bundle_folder, tmp_path / "altered"))
    entry = "-\n  label: {}\n  dataset_uri: one/choose.jsonl\n  num_fewshot: [0]\n"
    entry += "  icl_task_type: multiple_choice\n"
    (folder / "core.yaml").write_text("icl_tasks:\n" + "".join(entry.format(label) for label in CORE22))
    baselines = "Eval Task,Random baseline\n" + "".join(f"{label},50\n" for label in CORE22)
    (folder / "eval_meta_data.csv").write_text(baselines)
    words = ["eval", str(run), "--data", str(dataset.directory), "--core"]
    assert main([*words, str(folder), "--core-examples", "1"]) == 0
    said = capsys.readouterr()
    assert "is not the published CORE bundle" in " ".join(said.err.split()) and "bits per byte)" in said.out
    assert main([*words, str(bundle_folder), "--core-examples", "1"]) == 0
    assert "published CORE bundle" not in capsys.readouterr().err


def test_scores_are_printed_as_text(
    run: Path, dataset: Dataset, bundle_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("eval", run, "--data", dataset.directory, "--core", bundle_folder, "--core-examples", 3)
    assert main([str(word) for word in (*words, "--passes", "1,2", "--kl-depth")]) == 0
    said = capsys.readouterr().out
    for part in ("validation loss", "choose_shots", "KL effective depth", "loss at k passes", "at most 3"):
        assert part in said


def test_passes_are_printed_where_a_core_is_repeated() -> None:
    validation = {"loss": 3.0, "bits_per_byte": 1.0, "tokens": 64}
    for passes, expected in ((1, "step 5, fp32: validation"), (2, "step 5, 2 core passes, fp32: validation")):
        scores = {"run": "a", "step": 5, "passes": passes, "precision": "fp32", "validation": validation}
        assert EvaluationResult(scores).summary().startswith(expected)


def test_unsupported_passes_are_named(
    run: Path, dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(run), "--data", str(dataset.directory), "--passes"]
    assert main([*words, "1-8"]) == 0
    assert "passes 5, 6, 7, 8 are not supported" in capsys.readouterr().out
    assert main([*words, "1-4"]) == 0
    assert "are not supported" not in capsys.readouterr().out
    assert main([*words, "6"]) == 0
    said = capsys.readouterr().out
    assert "passes 6 are not supported" in said and "loss at k passes" not in said
    assert answer(capsys, *words, "3-5", "--json")["test_time_passes"]["unsupported_passes"] == [5]


def test_tokens_used_for_kl_depth_are_printed(
    run: Path, dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(run), "--data", str(dataset.directory), "--kl-depth"]
    most = len(dataset.tokens("val")) // 65 * 64  # whole contexts of 64 and what follows each
    assert main([*words, "--kl-depth-tokens", "1000000"]) == 0
    out, err = capsys.readouterr()
    assert f"{most:,} tokens); nats" in out and f"--kl-depth-tokens 1,000,000: {most:,} were used" in err
    assert main([*words, "--kl-depth-tokens", "128"]) == 0
    out, err = capsys.readouterr()
    assert "128 tokens); nats" in out and "were used" not in err
    said = rejected(capsys, *words, "--kl-depth-tokens", "63")
    assert "--kl-depth-tokens 63" in said and "context, 64" in said
    # The default is nobody's request: it needs no remark.
    assert main(words) == 0
    assert "were used" not in capsys.readouterr().err


def test_earlier_checkpoint_is_scored_but_not_joined(
    run: Path, dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    first = sorted((run / "checkpoints").iterdir())[0]
    found = answer(capsys, "eval", first, "--data", dataset.directory, "--json")
    assert found["step"] == 2 and found["passes"] == 2 and not found["in_record"]
    assert (run / "evaluation" / first.name / "evaluation.json").is_file()
    record = RunDirectory(run).record()
    assert record is not None and not record.evaluation
    said = rejected(capsys, "eval", first, "--data", dataset.directory, "--update-record")
    assert "not the run's last checkpoint" in said


def test_wrong_requests_are_rejected_in_a_sentence(
    run: Path, dataset: Dataset, bundle_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("--data", dataset.directory)
    assert "neither a run directory" in rejected(capsys, "eval", tmp_path / "none", *data)
    assert "no prepared data" in rejected(capsys, "eval", run, "--data", tmp_path)
    assert "not a CORE bundle" in rejected(capsys, "eval", run, *data, "--core", tmp_path)
    assert "--passes '8..1'" in rejected(capsys, "eval", run, *data, "--passes", "8..1")
    assert "--passes 'all'" in rejected(capsys, "eval", run, *data, "--passes", "all")
    assert "--core-examples" in rejected(capsys, "eval", run, *data, "--core-examples", "0")
    assert "--kl-direction 'up'" in rejected(capsys, "eval", run, *data, "--kl-depth", "--kl-direction", "up")
    core = (*data, "--core", bundle_folder)
    assert "no task 'chose'" in rejected(capsys, "eval", run, *core, "--tasks", "chose")
    assert "--precision 'fp8'" in rejected(capsys, "eval", run, *data, "--precision", "fp8")
    assert "--data" in rejected(capsys, "eval", run)


def test_damaged_weights_are_not_scored(
    run: Path, dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = sorted((run / "checkpoints").iterdir())[-1] / "state.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "corrupt" in rejected(capsys, "eval", run, "--data", dataset.directory, code=1)


def test_training_scores_the_run_when_it_ends(
    dataset: Dataset, bundle_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = {"aspect": 8, "head-dim": 8, "mlp-multiple": 8, "context": 64, "batch-tokens": 256, "tokens": 512}
    options = [word for name, value in size.items() for word in (f"--{name}", value)]
    words = ["train", "--arm", "loop-2", "--depth", 3, "--data", dataset.directory, *options, "--json"]
    words += ["--runs", tmp_path / "runs", "--device", "cpu"]
    scored = answer(capsys, *words, "--core", bundle_folder, "--core-examples", 2, "--passes", "1-3")
    assert scored["evaluation"]["core"]["examples"] == 2
    assert scored["evaluation"]["test_time_passes"]["passes"] == [1, 2, 3]
    # A wrong request is rejected before anything is trained.
    other = [*words[:-4], "--runs", tmp_path / "other", "--device", "cpu"]
    assert "not a CORE bundle" in rejected(capsys, *other, "--core", tmp_path)
    assert not (tmp_path / "other").exists()


# --- records with task scores, as a ladder of evaluated runs would leave them -------------------------

ARMS = {"vanilla": (0.11, 3.0), "untied-grow": (0.13, 2.9)}  # exponent and size of the task losses' laws


def task_nll(arm: str, place: int, flops: float) -> float:
    exponent, scale = ARMS[arm]
    return 0.6 + 0.02 * place + scale * (flops / 1e18) ** -exponent


def task_score(nll: float) -> float:
    return 1 / (1 + np.exp(1.6 * nll - 3.4))


def core_of(arm: str, flops: float) -> float:
    return 0.87 * float(np.mean([task_score(task_nll(arm, p, flops)) for p in range(17)]))


def ladder(trained: Path, root: Path, points: int) -> None:
    record = RunDirectory(trained).record()
    assert record is not None
    for arm in ARMS:
        for number, flops in enumerate(np.geomspace(3e17, 1e20, points).tolist()):
            tasks: dict[str, Any] = {}
            for place, label in enumerate((*CORE17, *(x for x in CORE22 if x not in CORE17))):
                centered = task_score(task_nll(arm, place, flops)) if label in CORE17 else 0.0
                tasks[label] = {
                    "nll": task_nll(arm, place, flops),
                    "centered": centered,
                    "accuracy": 0.25 + 0.75 * centered,
                    "baseline": 0.25,
                }
            core = {"core22": core_of(arm, flops), "tasks": tasks}
            spec = replace(record.spec, arm=replace(record.spec.arm, name=arm), seed=number)
            made = replace(
                record,
                spec=spec,
                run=spec.hash,
                flops=flops,
                tokens=int(flops / 1e9),
                evaluation={"core": core},
            )
            write_json(root / f"{arm}-{number}" / "record.json", made.to_dict())
            assert RunRecord.from_dict(made.to_dict()) == made


@pytest.fixture
def store(trained: Path, tmp_path: Path) -> Path:
    ladder(trained, tmp_path / "ladder", 8)
    return tmp_path / "ladder"


def test_forecast_recovers_the_simulated_truth(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "forecast.png"
    found = answer(capsys, "forecast", store, "--target", "1.2e21", "--figure", figure, "--json")
    for row in found["forecast"]:
        assert row["core"] == pytest.approx(core_of(row["arm"], 1.2e21), abs=3e-3)
    assert {row["arm"] for row in found["forecast"]} == set(ARMS)
    # The largest run of each arm is held out of the fit it is compared with.
    assert [row["flops"] for row in found["hold_out"]] == pytest.approx([1e20, 1e20])
    assert all(abs(row["error"]) < 3e-3 for row in found["hold_out"])
    assert [row["reference"] for row in found["compute_for"]][::2] == list(GPT3_CORE)
    assert found["r"] == pytest.approx(0.87, abs=0.01) and len(found["tasks"]) == 17
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_run_held_out_by_name_takes_no_part_in_forecast_and_crossings(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = store / "vanilla-7" / "record.json"
    record = json.loads(file.read_text())
    asked = ("forecast", store, "--target", "1e21", "--hold-out", record["run"], "--json")
    honest = answer(capsys, *asked)
    for task in record["evaluation"]["core"]["tasks"].values():
        task["nll"] *= 0.7  # had it been fitted, the forecast would be far better
    record["evaluation"]["core"]["core22"] += 0.2
    write_json(file, with_checksum(record))
    again = answer(capsys, *asked, "--figure", tmp_path / "figure.png")
    assert again["forecast"] == honest["forecast"] and again["compute_for"] == honest["compute_for"]
    assert again["hold_out"][0]["error"] == pytest.approx(honest["hold_out"][0]["error"] + 0.2)


def test_corpora_and_recipes_are_separate_series(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, Any] = {
        "corpus": lambda spec: replace(spec, data=replace(spec.data, identity="b" * 64)),
        "recipe": lambda spec: replace(spec, hyperparameters=replace(spec.hyperparameters, beta2=0.5)),
        "rate": lambda spec: replace(spec, hyperparameters=replace(spec.hyperparameters, learning_rate=0.5)),
    }
    before = {
        file: RunRecord.from_dict(json.loads(file.read_text())) for file in store.glob("van*/record.json")
    }
    for word, change in changes.items():
        for file, record in before.items():
            spec = change(record.spec)
            copy = replace(record, spec=spec, run=spec.hash, flops=1.01 * record.flops)
            write_json(store / f"other-{file.parent.name}" / "record.json", copy.to_dict())
        if word == "rate":
            assert "differ in learning rate or tokens" in rejected(capsys, "forecast", store)
            continue
        found = answer(capsys, "forecast", store, "--target", "1e21", "--json")
        own = [name for name in found["runs"] if name.startswith("vanilla")]
        assert len(own) == 2 and all(f"({word} " in name for name in own)
        assert all(len(found["runs"][name]) == 8 for name in own)


def test_forecast_prints_text_and_rejects_invalid_requests(
    store: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["forecast", str(store), "--target", "1e21", "--arms", "vanilla"]) == 0
    said = capsys.readouterr().out
    assert "held out" in said and "vanilla at 1.000e+21 FLOPs: CORE" in said and "GPT-3 175B" in said
    assert "no scored run of 'loop-9'" in rejected(capsys, "forecast", store, "--arms", "loop-9")
    assert "--target" in rejected(capsys, "forecast", store, "--target", "-1")
    assert "--hold-out 'zz'" in rejected(capsys, "forecast", store, "--hold-out", "zz")
    assert "neither a task" in rejected(capsys, "forecast", store, "--tasks", "juggling")
    misspelt = rejected(capsys, "forecast", store, "--tasks", "copa,lambda_openai")
    assert "'lambda_openai'" in misspelt and "nearest tasks are lambada_openai" in misspelt
    assert "names no task" in rejected(capsys, "forecast", store, "--tasks", ",")
    assert "none of the 1 records has CORE scores" in rejected(capsys, "forecast", trained)
    other = json.loads((store / "vanilla-3" / "record.json").read_text())
    other["evaluation"]["core"]["convention"] = "authors"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "record.json").write_text(json.dumps(with_checksum(other)))
    said = rejected(capsys, "forecast", store, tmp_path / "other")
    assert "different conventions" in said and f"{other['run']} by authors" in said
    ladder(trained, tmp_path / "short", 3)
    assert "at least 4" in rejected(capsys, "forecast", tmp_path / "short")


def test_custom_tasks_are_forecast_by_their_mean(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = dict(zip(CORE17[:3], ("riddles", "sums", "rhymes"), strict=True))
    for file in store.glob("*/record.json"):
        record = json.loads(file.read_text())
        tasks = record["evaluation"]["core"]["tasks"]
        tasks = {name: tasks[label] for label, name in own.items()}
        record["evaluation"]["core"] = {"core22": None, "tasks": tasks}
        file.write_text(json.dumps(with_checksum(record)))
    figure = tmp_path / "own.png"
    asked = ("forecast", store, "--tasks", "riddles,sums", "--target", "1e21")
    found = answer(capsys, *asked, "--figure", figure, "--json")
    assert found["score"] == "mean_centered" and found["tasks"] == ["riddles", "sums"]
    for row in found["forecast"]:
        truth = np.mean([task_score(task_nll(row["arm"], place, 1e21)) for place in range(2)])
        assert row["mean_centered"] == pytest.approx(truth, abs=3e-3) and "core" not in row
    assert all(abs(row["error"]) < 3e-3 for row in found["hold_out"]) and len(found["hold_out"]) == 2
    assert not found["compute_for"] and figure.read_bytes().startswith(b"\x89PNG")
    assert main([str(word) for word in asked]) == 0
    said = capsys.readouterr().out
    assert "the mean of riddles, sums, not CORE" in said and "GPT-3's CORE is left out" in said
    assert "FLOPs: mean centred accuracy" in said and "GPT-3 175B" not in said
    assert "lacks some of the 22 tasks" in rejected(capsys, "forecast", store)
    misspelt = rejected(capsys, "forecast", store, "--tasks", "ridles")
    assert "'ridles'" in misspelt and "nearest tasks are riddles" in misspelt
    # A task that one run lacks is named with the run.
    file = next(store.glob("*/record.json"))
    record = json.loads(file.read_text())
    del record["evaluation"]["core"]["tasks"]["sums"]
    file.write_text(json.dumps(with_checksum(record)))
    said = rejected(capsys, *asked)
    assert f"run {record['run']} has no score of 'sums'" in said


def test_filter_selects_by_the_papers_criteria(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.txt"
    found = answer(capsys, "eval", "filter", store, "--out", kept, "--json")
    # The tasks outside the subset stand at chance with every run: no gap, no order.
    assert tuple(found["selected"]) == CORE17 and found["runs"] == 8
    assert found["tasks"]["boolq"]["gap"] == 0.0 and found["tasks"]["boolq"]["tau"] == 0.0
    assert kept.read_text().split() == list(CORE17)
    answer(capsys, "forecast", store, "--tasks", kept, "--json")
    assert "no scored run of 'loop-2'" in rejected(capsys, "eval", "filter", store, "--arm", "loop-2")


def test_eval_help_does_not_import_torch_or_scipy() -> None:
    code = (
        "import sys; from steepen.requests.app import main; main(['eval', '--help']); "
        "main(['forecast', '--help']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'scipy', 'matplotlib')))"
    )
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=here)
    assert done.returncode == 0, done.stderr
    assert "--core" in done.stdout and "--target" in done.stdout and "filter" in done.stdout
