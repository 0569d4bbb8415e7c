"""The data of a study: what was given, or the preset's own, which is prepared once."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from steepen.errors import UsageError
from steepen.model.arms import find_arm
from steepen.runs.spec import UNKNOWN_DATA
from steepen.studies.context import DatasetInfo, StudyContext
from steepen.studies.driver.journal import preparing_data
from steepen.studies.preset import Preset
from steepen.utils.lock import file_lock


def open_data(
    preset: Preset, folder: Path | None, runs: Path, dry_run: bool, study: tuple[Path, str]
) -> tuple[Path, DatasetInfo]:
    """The given data, or the preset's own, which is prepared beside the runs if missing.

    `study` is the directory of studies and the name of the one that needs the data: `steepen status` knows
    of it while the data is prepared.
    """
    from steepen.data import Dataset

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
                    f"the preset {preset.name} needs `data`: a folder made by `steepen data prepare`, e.g. "
                    f"`steepen data prepare {sources[0]} --tokenizer {preset.tokenizer} --out data/corpus`"
                    f"{''.join(f', or {other}' for other in sources[1:])}."
                )
            # Two studies of one preset may start together: the second waits, and finds the data prepared.
            wait = file_lock(folder.parent / f".{folder.name}.lock", wait=True, poll_seconds=0.5)
            with preparing_data(*study), wait:
                if not (folder / "manifest.json").is_file():
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
    from steepen.data.tokenizer import GPT2_SIZE, parse_tokenizer

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


def tokenizer_note(preset: Preset, folder: Path, facts: DatasetInfo) -> str | None:
    """What another tokenizer than the preset's changes: the cost of the reference's ladder, and the loss."""
    if not (folder / "manifest.json").is_file():  # a dry run without data
        return None
    from steepen.data import Dataset

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
