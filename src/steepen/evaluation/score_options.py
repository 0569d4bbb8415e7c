"""What to measure of a checkpoint: fields of `eval`, which `train` and `study` set for their runs too."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from steepen.errors import UsageError
from steepen.utils.codec import HelpPanel, Range, option
from steepen.utils.values import Integers, Tokens, Words

if TYPE_CHECKING:
    from steepen.evaluation.core.bundle import Bundle
    from steepen.evaluation.core.run_suite import CoreOptions

# Panels of --help.
CORE = HelpPanel("CORE")
DEPTH = HelpPanel("KL effective depth")
DEPTH_TOKENS = 16_384  # for KL effective depth, where no other number is requested


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """What to measure; the validation loss is always measured."""

    passes: Integers | None = option("Measure the loss at these core passes: 1-8 or 1,2,4.")
    validation_tokens: Tokens | None = option("Validation tokens; default: as in training.")
    core: Path | None = CORE("Directory of a CORE bundle (core.yaml, eval_meta_data.csv, eval_data/).")
    core_examples: int | None = CORE("Maximum examples per task (a fixed subset).", limits=Range(1, 10**9))
    convention: Literal["authors", "nanochat"] = CORE(
        "How CORE is scored: authors (of the paper) or nanochat; they differ in seeds and NLL.", "authors"
    )
    seeds: Integers | None = CORE(
        "Seeds of the few-shot demonstrations; scores are averaged over them. Default: 0,1,2 (authors) or "
        "1234 (nanochat)."
    )
    tasks: Words | None = CORE("Only these tasks: comma-separated labels, or core17 for the paper's subset.")
    token_budget: int | None = CORE(
        "Padded tokens per CORE batch; lower it to save memory.", limits=Range(1, 10**12)
    )
    kl_depth: bool = DEPTH("Measure KL effective depth.", False)
    kl_threshold: float = DEPTH("KL threshold in nats.", 2.0, Range(0, 1e6))
    kl_direction: Literal["final-to-block", "block-to-final"] = DEPTH(
        "KL direction: final-to-block or block-to-final.", "final-to-block"
    )
    kl_depth_tokens: Tokens | None = DEPTH(f"Validation tokens for `kl_depth`. Default: {DEPTH_TOKENS:,}.")

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
