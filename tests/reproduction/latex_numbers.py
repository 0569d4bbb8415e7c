"""The printed numbers of the paper's figures and tables, by walking its LaTeX source in order."""

from __future__ import annotations

import re
from pathlib import Path

TOKEN = re.compile(
    r"\\begin\{(?P<begin>figure|table|subfigure)\*?\}"
    r"|\\end\{(?P<end>figure|table|subfigure)\*?\}"
    r"|\\caption(?:of\{(?P<of>figure|table)\})?\{(?P<caption>(?:[^{}]|\{[^{}]*\})*)"
    r"|\\label\{(?P<label>(?:fig|tab):[^}]*)\}"
    r"|\\paperfigure\s*\{(?P<macro>fig:[^}]*)\}\s*\{(?P<macro_caption>(?:[^{}]|\{[^{}]*\})*)"
)


def source_in_order(text: str) -> str:
    """The document without comments, with every included file where it is included."""
    _, main, *rest = re.split(r"^%% file: ", text, flags=re.MULTILINE)
    files = {name.removesuffix(".tex"): body for name, _, body in (part.partition("\n") for part in rest)}
    document = main.partition("\\begin{document}")[2].partition("\\end{document}")[0]
    document = re.sub(r"\\input\{([^}]*)\}", lambda match: files.get(match[1], ""), document)
    return re.sub(r"(?<!\\)%.*", "", document)


def printed_numbers(text: str) -> dict[str, str]:
    """{label: "Figure 16a" or "Table 9"}, every caption counted by its own kind, subfigures by letters."""
    found: dict[str, str] = {}
    counts = {"Figure": 0, "Table": 0}
    kinds: list[str] = []  # of the environments around a caption
    letter, last = 0, ""
    for match in TOKEN.finditer(text):
        if kind := match["begin"]:
            kinds.append(kind)
            letter = 0 if kind != "subfigure" else letter
        elif match["end"]:
            kinds.pop()
        elif match["macro"]:
            counts["Figure"] += 1
            found[match["macro"]] = f"Figure {counts['Figure']}"
        elif match["caption"] is not None and (match["of"] or kinds):  # not of an algorithm
            kind = match["of"] or kinds[-1]
            if kind == "subfigure":
                letter += 1
                last = f"Figure {counts['Figure'] + 1}{chr(96 + letter)}"
            else:
                word = kind.capitalize()
                counts[word] += 1
                last = f"{word} {counts[word]}"
        elif match["label"]:
            found[match["label"]] = last
    return found


def read_paper(folder: Path) -> str:
    """The LaTeX source of the paper."""
    (file,) = folder.glob("*.txt")
    return source_in_order(file.read_text(encoding="utf-8"))
