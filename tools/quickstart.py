"""`make quickstart`: train a small ladder, then judge the paper's ladders and this one, and write its page.

An interrupted ladder is resumed; a finished one is only judged again. With --dry-run: what it would cost
here, or with --gpu on another machine.
"""

from __future__ import annotations

import argparse
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import steepen
from steepen.errors import SteepenError
from steepen.tables.paper_ladders import paper_ladders
from steepen.utils.formatting import wrap_to_terminal

OUT = Path("quickstart")


def main(preset: str, dry_run: bool, gpu: str | None) -> int:
    """Print the paper's verdicts, the ladder's own, and what such a ladder can and cannot show."""
    places: dict[str, Any] = {"runs": OUT / "runs", "studies": OUT / "studies", "name": f"{preset}-ladder"}
    if dry_run:
        steepen.ladder(preset=preset, dry_run=True, gpu=gpu, **places).print()
        return 0
    study = steepen.ladder(preset=preset, **places)
    ignore = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is answered here, not by a second traceback
    with ProcessPoolExecutor(1, get_context("spawn"), signal.signal, ignore) as process:
        fitting = process.submit(steepen.fit, "paper:fineweb")  # beside the drawing of the page
        page = study.report(OUT)
        paper: Any = fitting.result()
    title = paper_ladders("paper:fineweb").title
    say(f"\nThe paper's ladders, {title}: better than vanilla, and does the gain grow?\n")
    for arm, verdict in paper.verdicts.items():
        print(f"  {arm:18} {verdict.gain.value:.2f}×  {verdict.word}")
    largest = max(paper.verdicts.values(), key=lambda verdict: abs(verdict.delta_gamma))
    top = max(record.flops for record in study.runs.records())
    say(f"\nYour ladder, {len(study.runs)} runs up to {top:.2g} FLOPs:\n")
    for verdict in study.verdicts.values():
        say(f"  {verdict.sentence}")
    answer = study.answer
    assert answer is not None
    laws = answer.values["flops"]["arms"].values()
    off = max(law["residual_sd"] for law in laws)
    e, (least, most) = next((law["e"], law["intervals"]["e"]["unconditional"]) for law in laws)
    widths = [high - low for low, high in (one.delta_gamma_interval for one in study.verdicts.values())]
    say(
        f"\nThe residual SD of the losses about their laws is at most {off:.2g} (E = {e:.2g}, 90% "
        f"{least:.2g} to {most:.2g}). The ladder shows that these arms train and are measured here as they "
        f"would be at scale. It cannot show exponents that differ as little as the paper's do "
        f"({largest.arm}: Δγ = {largest.delta_gamma:+.4f}): its intervals are {min(widths):.2g} wide. "
        f"`steepen power --delta-gamma {abs(largest.delta_gamma):.2g}` says how large a ladder must be."
    )
    say(f"\n{page}: open it in any browser. Next: docs/tutorial.md.")
    return 0


def say(text: str) -> None:
    """Print a paragraph, wrapped to the terminal."""
    print(wrap_to_terminal(text, sys.stdout))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("preset", nargs="?", default="tiny")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--gpu", help="with --dry-run: h100, h200 …")
    given = parser.parse_args()
    if given.gpu and not given.dry_run:
        parser.error("--gpu is for --dry-run: runs use the GPU that is there")
    try:
        raise SystemExit(main(given.preset, given.dry_run, given.gpu))
    except SteepenError as error:
        raise SystemExit(f"steepen: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command resumes it.") from None
