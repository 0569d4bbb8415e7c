"""Print the scores of an evaluation as text and tables."""

from __future__ import annotations

from typing import Any

import typer


def print_scores(found: dict[str, Any]) -> None:
    """Print scores as text and tables."""
    validation = found["validation"]
    passes = f"{found['passes']} core passes, " if found["passes"] > 1 else ""  # 1: nothing is repeated
    typer.echo(
        f"step {found['step']:,}, {passes}{found['precision']}: validation loss "
        f"{validation['loss']:.4f} ({validation['bits_per_byte']:.4f} bits per byte, "
        f"{validation['tokens']:,} tokens)"
    )
    published = found.get("published") or {}
    if published.get("validation_loss") is not None:
        typer.echo(
            f"published {published['arm']} d{published['depth']} on {published['corpus']} "
            f"({published['flops']:.3e} FLOPs): validation loss {published['validation_loss']:.4f}"
        )
    if depth := found.get("kl_depth"):
        curve = " ".join(f"{value:.2f}" for value in depth["curve"])
        typer.echo(
            f"KL effective depth {depth['depth']} of {depth['executed']} executed blocks "
            f"(peak after {depth['peak']}, {depth['tokens']:,} tokens); nats after 0, 1, …: {curve}"
        )
        if published.get("kl_depth") is not None:
            typer.echo(f"published: KL effective depth {published['kl_depth']:g}")
    if curve := found.get("test_time_passes"):
        pairs = zip(curve["passes"], curve["differences"], strict=True)
        parts = ", ".join(f"{passes}: {difference:+.4f}" for passes, difference in pairs)
        if parts:
            typer.echo(f"loss at k passes minus loss at {curve['trained']}: {parts}")
        if left := curve["unsupported_passes"]:
            typer.echo(
                f"passes {', '.join(map(str, left))} are not supported: untied cores run one pass each, "
                "and a network without a core runs only one."
            )
        if known := published.get("test_time_passes"):
            parts = ", ".join(f"{passes}: {value:+.4f}" for passes, value in known["differences"].items())
            typer.echo(f"published, minus loss at {known['trained']}: {parts}")
    if core := found.get("core"):
        print_core(core, published)


def print_core(core: dict[str, Any], published: dict[str, Any]) -> None:
    """Print a table of CORE scores by task, and their means."""
    from rich.table import Table

    from steepen.utils.console import SafeConsole

    table = Table(title=f"CORE, convention: {core['convention']}", title_justify="left")
    names = ["task", "shots", "examples", "accuracy", "chance", "centred", "answer NLL"]
    known = published.get("tasks", {})
    if known:
        names += ["published centred", "NLL"]
    for name in names:
        table.add_column(name, justify="left" if name == "task" else "right", no_wrap=True)
    for label, task in core["tasks"].items():
        numbers = (f"{task[name]:.4f}" for name in ("accuracy", "baseline", "centered", "nll"))
        extra = [_cell(known.get(label, {}).get(name)) for name in ("centered", "nll")] if known else []
        table.add_row(label, str(task["shots"]), f"{task['examples']:,}", *numbers, *extra)
    console = SafeConsole(highlight=False, markup=False)
    console.width = max(console.width, 125 if known else 100)  # so that labels are not truncated
    console.print(table)
    spread = "" if core["core22_seed_sd"] is None else f" ± {core['core22_seed_sd']:.4f} over seeds"
    subset = "" if core["examples"] is None else f", at most {core['examples']:,} examples per task"
    if core["core22"] is not None:
        bits = core.get("bits_per_byte22")
        per_byte = "" if bits is None else f" ({bits:.4f} bits per byte)"
        typer.echo(
            f"CORE22 {core['core22']:.4f}{spread}, CORE17 {core['core17']:.4f}, "
            f"answer NLL {core['nll22']:.4f}{per_byte}{subset}"
        )
    else:
        typer.echo(
            f"mean of {len(core['tasks'])} tasks: centred {core['mean_centered']:.4f}, "
            f"answer NLL {core['mean_nll']:.4f}{subset}"
        )
    if any(published.get(name) is not None for name in ("core22", "core17", "nll22")):
        typer.echo(
            f"published: CORE22 {_cell(published['core22'])}, CORE17 {_cell(published['core17'])}, "
            f"answer NLL {_cell(published['nll22'])} (convention: authors)"
        )


def _cell(value: float | None) -> str:
    """A published score; a dash if none was published."""
    return "–" if value is None else f"{value:.4f}"
