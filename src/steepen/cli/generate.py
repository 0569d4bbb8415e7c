"""`steepen generate`: continue a prompt with a trained network."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from steepen.results.runs import run_path
from steepen.utils.printable_stream import unwrapped


def generate(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A run (its newest checkpoint): its directory, its hash or the beginning of it; or a "
            "checkpoint directory.",
        ),
    ],
    prompt: Annotated[
        list[str], typer.Option(help="Text to continue; repeat the option for a batch of prompts.")
    ],
    passes: Annotated[
        int | None,
        typer.Option(help="Core passes; default: the number the run is evaluated at.", min=1, max=10_000),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Of the softmax; 0 is greedy decoding.", min=0, max=1000000.0)
    ] = 0.8,
    top_p: Annotated[
        float,
        typer.Option(
            help="Sample from the most probable tokens that have this mass together.", min=1e-09, max=1
        ),
    ] = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", min=0, max=2**63 - 1)] = 0,
    max_tokens: Annotated[int, typer.Option(help="Maximum of new tokens per prompt.", min=1, max=10**9)] = 64,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    runs: Annotated[Path, typer.Option(help="Directory of all runs.")] = Path("runs"),
    precision: Annotated[
        str, typer.Option(help="auto (the run's own; bf16 for fp8 runs), fp32 or bf16.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Continue a prompt with a trained network.

    The text of one prompt is printed while it is generated. It begins a
    document: <|endoftext|> is put before the prompt, as in training.

    [bold]steepen generate runs/HASH --prompt "The law of" --passes 4[/bold]
    """
    from steepen.inference.generate import generate as generate_text

    streaming = len(prompt) == 1 and not as_json
    # A terminal gets printable text only; a file or pipe gets the text as it is.
    out = sys.stdout if sys.stdout.isatty() else unwrapped(sys.stdout)
    started = False

    def show(row: int, text: str) -> None:
        nonlocal started
        print(text if started else prompt[row] + text, end="", file=out, flush=True)
        started = True

    texts = generate_text(
        run_path(run, runs),
        prompt,
        max_tokens=max_tokens,
        passes=passes,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        device=device,
        precision=precision,
        on_text=show if streaming else None,
    )
    if as_json:
        pairs = [{"prompt": one, "text": text} for one, text in zip(prompt, texts, strict=True)]
        typer.echo(json.dumps({"run": str(run), "passes": passes, "seed": seed, "texts": pairs}, indent=2))
    elif streaming:
        print("" if started else prompt[0], file=out)
    else:
        for one, text in zip(prompt, texts, strict=True):
            print(f"{one}{text}\n", file=out)
