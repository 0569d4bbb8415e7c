"""Generate text with a trained network.

import steepen

print(steepen.generate("runs/3f2a…", "The law of", max_tokens=40)[0])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from steepen.evaluation.load import LoadedRun, load
from steepen.inference.decoding import Sampling, continue_text


def generate(
    run: str | Path | LoadedRun,
    prompt: str | Sequence[str],
    *,
    max_tokens: int = 64,
    passes: int | None = None,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    device: str = "auto",
    precision: str = "auto",
    on_text: Callable[[int, str], None] | None = None,
) -> list[str]:
    """Continue a prompt, or several in one batch; returns the new text of each, without the prompt.

    `run` is a run or checkpoint directory, or what `evaluation.load.load` returns. `passes` is the number of
    core passes (default: the one the run is evaluated at). `on_text(row, text)` receives pieces of text while
    they are generated.
    """
    sampling = Sampling(temperature, top_p, seed)
    loaded = run if isinstance(run, LoadedRun) else load(run, device=device, precision=precision)
    return continue_text(
        loaded.network,
        loaded.require_tokenizer(),
        [prompt] if isinstance(prompt, str) else list(prompt),
        max_tokens,
        sampling,
        passes=loaded.passes if passes is None else passes,
        on_text=on_text,
    )
