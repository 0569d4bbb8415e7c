"""What to measure of a checkpoint: fields of `eval`, which `train` and `study` set for their runs too."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from steepen.errors import UsageError
from steepen.utils.codec import Option, Range
from steepen.utils.values import Integers, Tokens, Words

if TYPE_CHECKING:
    from steepen.evaluation.core.bundle import Bundle
    from steepen.evaluation.core.run_suite import CoreOptions

# Panels of --help.
CORE = "CORE"
DEPTH = "KL effective depth"
DEPTH_TOKENS = 16_384  # for KL effective depth, where no other number is requested


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """What to measure; the validation loss is always measured."""

    passes: Annotated[Integers | None, Option("Measure the loss at these core passes: 1-8 or 1,2,4.")] = None
    validation_tokens: Annotated[Tokens | None, Option("Validation tokens; default: as in training.")] = None
    core: Annotated[
        Path | None,
        Option("Directory of a CORE bundle (core.yaml, eval_meta_data.csv, eval_data/).", CORE),
    ] = None
    core_examples: Annotated[
        int | None, Range(1, 10**9), Option("Maximum examples per task (a fixed subset).", CORE)
    ] = None
    convention: Annotated[
        Literal["authors", "nanochat"],
        Option("How CORE is scored: authors (of the paper) or nanochat; they differ in seeds and NLL.", CORE),
    ] = "authors"
    seeds: Annotated[
        Integers | None,
        Option(
            "Seeds of the few-shot demonstrations; scores are averaged over them. Default: 0,1,2 (authors) "
            "or 1234 (nanochat).",
            CORE,
        ),
    ] = None
    tasks: Annotated[
        Words | None,
        Option("Only these tasks: comma-separated labels, or core17 for the paper's subset.", CORE),
    ] = None
    token_budget: Annotated[
        int | None,
        Range(1, 10**12),
        Option("Padded tokens per CORE batch; lower it to save memory.", CORE),
    ] = None
    kl_depth: Annotated[bool, Option("Measure KL effective depth.", DEPTH)] = False
    kl_threshold: Annotated[float, Range(0, 1e6), Option("KL threshold in nats.", DEPTH)] = 2.0
    kl_direction: Annotated[
        Literal["final-to-block", "block-to-final"],
        Option("KL direction: final-to-block or block-to-final.", DEPTH),
    ] = "final-to-block"
    kl_depth_tokens: Annotated[
        Tokens | None, Option(f"Validation tokens for `kl_depth`. Default: {DEPTH_TOKENS:,}.", DEPTH)
    ] = None

    @cached_property
    def bundle(self) -> Bundle | None:
        """The CORE bundle, read once."""
        from steepen.evaluation.core.bundle import Bundle

        return None if self.core is None else Bundle.open(self.core)

    @cached_property
    def core_options(self) -> CoreOptions:
        """How CORE is scored."""
        from steepen.evaluation.core import suite
        from steepen.evaluation.core.run_suite import CoreOptions

        tasks = None if self.tasks is None else tuple(dict.fromkeys(self.tasks))
        if tasks in (("core17",), ("core22",)):
            tasks = suite.CORE17 if tasks == ("core17",) else suite.CORE22
        return CoreOptions(
            self.seeds, self.core_examples, tasks, self.token_budget, convention=self.convention
        )

    def check_scores(self) -> None:
        """Raise UsageError for what cannot be measured, before anything is loaded or trained."""
        if self.passes and self.passes[0] < 1:
            raise UsageError("`passes` = 0 is not valid: the core is applied at least once.")
        bundle, labels = self.bundle, self.core_options.tasks or ()
        if bundle is not None:
            for label in labels:
                bundle.task(label)  # raises for a label that it does not have
