"""Data, name and recipe files of a study: what `steepen study` and `steepen.study` share."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from steepen.data import Dataset
from steepen.data.tokenizer import GPT2_SIZE, parse_tokenizer
from steepen.errors import UsageError
from steepen.model.arms import find_arm
from steepen.recipe.flops import FlopCount
from steepen.recipe.recipe_file import write_recipe
from steepen.runs.spec import UNKNOWN_DATA
from steepen.studies.context import DatasetInfo, StudyContext
from steepen.studies.driver.journal import preparing_data

if TYPE_CHECKING:
    from steepen.studies.answer import Answer
    from steepen.studies.preset import Preset
    from steepen.studies.registry import StudyEntry


def study_title(
    listed: StudyEntry, preset: Preset, given: dict[str, Any], optimizer: str | None = None
) -> str:
    """The default name of a study's folder: study, preset, arms, parts, and the optimizer if one is named."""
    words = [listed.name, preset.name, *given.get("arms", ()), *given.get("parts", ())]
    words += [] if optimizer is None else [optimizer]
    return re.sub(r"[^A-Za-z0-9_+.-]+", "-", "-".join(words))[:100]


def open_data(
    preset: Preset, folder: Path | None, runs: Path, dry_run: bool, study: tuple[Path, str] | None = None
) -> tuple[Path, DatasetInfo]:
    """The given data, or the preset's own, which is prepared beside the runs if missing.

    `study` is the directory of studies and the name of the one that needs the data: `steepen status` knows
    of it while the data is prepared.
    """
    if folder is None:
        own = preset.source or "data"
        folder = (
            runs.absolute().parent / "data" / re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{own}-{preset.tokenizer}")
        )
        if not (folder / "manifest.json").is_file():
            if dry_run:
                return folder, assumed_data(preset)
            if preset.source is None:
                sources = preset.suggested_data or ("SOURCE",)
                raise UsageError(
                    f"the preset {preset.name} needs --data: a folder made by `steepen data prepare`, e.g. "
                    f"`steepen data prepare {sources[0]} --tokenizer {preset.tokenizer} --out data/corpus`"
                    f"{''.join(f', or {other}' for other in sources[1:])}."
                )
            with nullcontext() if study is None else preparing_data(*study):
                _prepare(preset, folder)
    dataset = Dataset.open(folder)
    return folder, DatasetInfo(
        identity=dataset.identity,
        vocabulary=dataset.padded_vocabulary,
        train_tokens=len(dataset.tokens("train")),
        validation_tokens=len(dataset.tokens("val")),
        real_vocabulary=dataset.vocabulary,
    )


def assumed_data(preset: Preset) -> DatasetInfo:
    """Data for a dry run: the vocabulary follows from the tokenizer, the tokens suffice for anything."""
    real = parse_tokenizer(preset.tokenizer) or GPT2_SIZE
    return DatasetInfo(UNKNOWN_DATA, -(-real // 128) * 128, 10**15, 10**9, real)


def _prepare(preset: Preset, folder: Path) -> None:
    from steepen.data.prepare import prepare
    from steepen.data.prepare_request import PrepareRequest
    from steepen.utils.progress import stage_progress

    print(f"Preparing {preset.source} with {preset.tokenizer} in {folder}.", file=sys.stderr)
    request = PrepareRequest(
        source=(preset.source or "",), tokenizer=preset.tokenizer, max_tokens=preset.max_tokens
    )
    with stage_progress(quiet=False) as show:
        prepare(request, folder, lambda now: show(now.stage, now.characters, now.total, tokens=now.tokens))


def write_recipes(answer: Answer, folder: Path) -> list[Path]:
    """Write the fitted recipes: recipe.yaml, or recipe-ARM.yaml where there are several."""
    written: list[Path] = []
    for file in answer.recipes:
        name = "recipe.yaml" if len(answer.recipes) == 1 else f"recipe-{file.arm}.yaml"
        write_recipe(folder / name, file)
        written.append(folder / name)
    return written


def tokenizer_note(preset: Preset, folder: Path, facts: DatasetInfo) -> str | None:
    """What another tokenizer than the preset's changes: the cost of the reference's ladder, and the loss."""
    if not (folder / "manifest.json").is_file():  # a dry run without data
        return None
    own = Dataset.open(folder).manifest.tokenizer
    expected = assumed_data(preset)
    if facts.vocabulary == expected.vocabulary:
        return None
    arm = find_arm(preset.reference)

    def cost(info: DatasetInfo) -> float:
        context = StudyContext(preset, info)
        recipe = context.recipe(arm)
        return sum(recipe.at(arm, depth, context.size_rule).flops.total for depth in preset.depths(arm))

    ratio = cost(facts) / cost(expected)
    return (
        f"the tokenizer of {folder} is {own.name} ({own.size:,} tokens), that of the preset {preset.name} is "
        f"{preset.tokenizer}: the ladder of {arm.name} takes {ratio:.2g} times the preset's FLOPs, and "
        "losses do not compare with the preset's own; `steepen data prepare SOURCE --tokenizer "
        f"{preset.tokenizer}` prepares data for it."
    )


def with_sweep_flops(preset: Preset, count: str | None) -> Preset:
    """The preset with another count of sweeps' FLOPs ("total" or "matrix"); None leaves it."""
    if count is None:
        return preset
    for known in get_args(FlopCount):
        if count == known:
            return replace(preset, sweep_flops=known)
    raise UsageError(f"--sweep-flops {count!r} is not valid: use {' or '.join(get_args(FlopCount))}.")
