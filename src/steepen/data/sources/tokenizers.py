"""Where tokenizers come from: the package, tiktoken, a tokenizer.json, a folder, the Hub, SentencePiece.

The separator that begins every document is the tokenizer's own end-of-text token: of tiktoken's encodings
`<|endoftext|>`, of a folder or a Hub repository the `eos_token` of tokenizer_config.json (else its
`bos_token`), of a SentencePiece model its eos piece, of a lone tokenizer.json the special token with one of
the usual names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any, cast

from steepen.data.sources.hub import any_hub_files, model_file
from steepen.data.sources.sentencepiece import convert_sentencepiece
from steepen.data.tokenizer import (
    END_OF_TEXT,
    JsonTokenizer,
    Tokenizer,
    byte_level,
    check_trainable,
    errors_of_library,
)
from steepen.errors import SteepenError, UsageError, shorten
from steepen.utils.files import read_file
from steepen.utils.json_io import read_json

TIKTOKEN = ("r50k_base", "p50k_base", "p50k_edit", "cl100k_base", "o200k_base", "o200k_harmony")
TOKENIZER_JSON, CONFIG, SENTENCEPIECE = "tokenizer.json", "tokenizer_config.json", "tokenizer.model"
USUAL_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|eos|>")
ACCEPTED = (
    f"gpt2, bpe:SIZE (for example bpe:8192), {', '.join(TIKTOKEN)}, a tokenizer.json, a folder with one, a "
    "SentencePiece .model, or hf:OWNER/NAME[@REVISION]"
)


def parse_tokenizer(name: str) -> int | None:
    """The size in "bpe:SIZE", None for any other tokenizer; raises for what is none."""
    kind, _, size = name.partition(":")
    digits = size.replace("_", "")
    if kind == "bpe" and digits.isdecimal():
        number = int(digits[:12])  # more digits are beyond any limit
        check_trainable(number)
        return number
    if name == "gpt2" or name in TIKTOKEN:
        return None
    if kind == "hf":
        any_hub_files(size)
        return None
    if not os.path.exists(name):  # noqa: PTH110 (which is False for names that no file can have)
        raise UsageError(f"unknown tokenizer {shorten(name)!r}; accepted are {ACCEPTED}.")
    return None


def load_tokenizer(name: str, hub: str | None = None) -> Tokenizer | None:
    """The tokenizer that a name means; None for bpe:SIZE, which is trained on the source.

    `hub` is another Hub than huggingface.co: its URL, or a directory with the layout OWNER/NAME.
    """
    if parse_tokenizer(name) is not None:
        return None
    if name == "gpt2":
        return Tokenizer.gpt2()
    if name in TIKTOKEN:
        return _tiktoken(name)
    kind, _, place = name.partition(":")
    if kind == "hf":
        files = any_hub_files(place)
        find = partial(model_file, files.repository, revision=files.revision, endpoint=hub)
    else:
        path = Path(name)
        if path.is_file():
            return _sentencepiece(name, path) if path.suffix == ".model" else _json(name, path, None)
        find = partial(_in_folder, path)
    definition = find(TOKENIZER_JSON)
    if definition is not None:
        return _json(name, definition, find(CONFIG))
    model = find(SENTENCEPIECE)
    if model is None:
        raise UsageError(f"the tokenizer {name!r} has neither {TOKENIZER_JSON} nor {SENTENCEPIECE}.")
    return _sentencepiece(name, model)


def _in_folder(folder: Path, file: str) -> Path | None:
    return folder / file if (folder / file).is_file() else None


def _tiktoken(name: str) -> Tokenizer:
    import tiktoken

    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # of its HTTP client, or a download with another hash
        reason = f"{type(error).__name__}: {error}".split("\n")[0][:300].rstrip(".")
        raise SteepenError(
            f"tiktoken cannot load {name} ({reason}); it is downloaded once: check the network, or copy the "
            "folder that TIKTOKEN_CACHE_DIR names from a machine that has it."
        ) from None
    token_of = {encoding.encode_single_token(token): token for token in encoding.token_byte_values()}
    tokens = tuple(token_of.get(number, b"") for number in range(1 + max(token_of)))
    return byte_level(name, tokens, cast("Any", encoding)._pat_str, encoding.eot_token, END_OF_TEXT)


@contextlib.contextmanager
def _errors_of(file: Path, kind: str) -> Generator[None]:
    """Say which file cannot be read, or is none of this kind that can be used."""
    try:
        yield
    except OSError as error:
        raise SteepenError(f"the tokenizer {file} cannot be read ({error.strerror}).") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{file} is not a {kind} that can be used: {error}.") from None


def _json(name: str, file: Path, config: Path | None) -> Tokenizer:
    with _errors_of(file, "tokenizer"):
        definition = cast("dict[str, Any]", read_json(file))
        special = [token["content"] for token in definition["added_tokens"] if token["special"]]
        end = next((one for one in USUAL_ENDS if one in special), None)
        if config is not None:
            settings = cast("dict[str, Any]", read_json(config))
            given = settings.get("eos_token") or settings.get("bos_token") or end
            end = given["content"] if isinstance(given, dict) else given
        if end is None:
            raise UsageError(
                f"{file} does not say which token ends a text: put it beside a {CONFIG} with an `eos_token`, "
                "and name the folder."
            )
        return JsonTokenizer.from_definition(name, definition, str(end))


def _sentencepiece(name: str, file: Path) -> Tokenizer:
    with _errors_of(file, "SentencePiece model"):
        content = read_file(file)
        with errors_of_library():
            definition, end = convert_sentencepiece(content)
        return JsonTokenizer.from_definition(name, definition, end)
