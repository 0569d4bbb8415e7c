"""A SentencePiece model (BPE or Unigram) as a tokenizer of the `tokenizers` library, with the same ids.

A .model file is a protocol buffer; the few fields that decide how text is encoded are read here, so that
neither sentencepiece nor protobuf is needed. Fields have the numbers of sentencepiece_model.proto.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from typing import Any, TypeAlias

from steepen.data.tokenizer import check_charsmap

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of pieces
UNIGRAM, BPE = 1, 2  # types of models
SPACE = "▁"
MAX_PIECE = 1_000  # characters; sentencepiece's own default is 16
Message: TypeAlias = defaultdict[int, list[Any]]  # values by field number


def convert_sentencepiece(content: bytes) -> tuple[dict[str, Any], str]:
    """The tokenizer.json of a model, and its eos piece; raises ValueError for what is no model."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    model = _fields(content)
    pieces = _pieces(model)
    trainer, normalizer = (_fields(model[number][-1] if model[number] else b"") for number in (2, 3))
    kind, eos = _number(trainer, 3, UNIGRAM), _number(trainer, 42, 2)
    unknown, fallback = _number(trainer, 40, 0), bool(_number(trainer, 35, 0))
    if not pieces or kind not in (UNIGRAM, BPE) or not 0 <= eos < len(pieces):
        raise ValueError("it has no pieces, no eos piece, or a model that is neither BPE nor Unigram")
    if kind == UNIGRAM:
        made = Tokenizer(models.Unigram([(p, s) for p, s, _ in pieces], unknown, byte_fallback=fallback))
    else:
        vocabulary = {piece: number for number, (piece, _, _) in enumerate(pieces)}
        made = Tokenizer(
            models.BPE(
                vocabulary, _merges(pieces, vocabulary), unk_token=pieces[unknown][0], fuse_unk=True,
                byte_fallback=fallback,
            )
        )  # fmt: skip
    # Texts are not split at spaces, since pieces may span several.
    made.normalizer = normalizers.Sequence(_normalizers(normalizer))
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    for piece, _, type_ in pieces:
        if type_ in (UNKNOWN, CONTROL):
            made.add_special_tokens([AddedToken(piece, special=True, normalized=False)])
        elif type_ == USER_DEFINED:
            made.add_tokens([AddedToken(piece, special=False, normalized=False)])
    return json.loads(made.to_str()), pieces[eos][0]


def _pieces(model: Message) -> list[tuple[str, float, int]]:
    """Text, score and type of every piece, in the order of the ids."""
    found: list[tuple[str, float, int]] = []
    for entry in model[1]:
        piece = _fields(entry)
        score = struct.unpack("<f", piece[2][-1])[0] if piece[2] else 0.0
        text = piece[1][-1].decode()
        if len(text) > MAX_PIECE:  # every split of a piece is looked up
            raise ValueError(f"a piece has {len(text):,} characters, and at most {MAX_PIECE:,} are accepted")
        found.append((text, score, _number(piece, 3, NORMAL)))
    return found


def _normalizers(normalizer: Message) -> list[Any]:
    """What is done to a text before it is encoded, in this order, as the model's settings say."""
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if normalizer[2] and normalizer[2][-1]:
        check_charsmap(normalizer[2][-1])
        steps.append(normalizers.Precompiled(normalizer[2][-1]))
    if _number(normalizer, 4, 1):  # remove_extra_whitespaces
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if _number(normalizer, 3, 1):  # add_dummy_prefix
        steps.append(normalizers.Prepend(" "))
    return [*steps, normalizers.Replace(" ", SPACE)]


def _merges(pieces: list[tuple[str, float, int]], ids: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, in the order in which they are merged: by its score."""
    by_score = sorted((-score, ids[piece], piece) for piece, score, kind in pieces if kind == NORMAL)
    return [
        (piece[:cut], piece[cut:])
        for _, _, piece in by_score
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]


def _fields(content: bytes) -> Message:
    """The values of a message by field number: integers, and bytes of all other kinds."""
    found: Message = defaultdict(list)
    position = 0
    while position < len(content):
        key, position = _varint(content, position)
        kind = key & 7
        if kind == 0:
            value, position = _varint(content, position)
            found[key >> 3].append(value - (1 << 64) if value >> 63 else value)
            continue
        if kind not in (1, 2, 5):
            raise ValueError("it is not a protocol buffer")
        length = {1: 8, 5: 4}.get(kind)
        if length is None:
            length, position = _varint(content, position)
        if position + length > len(content):
            raise ValueError("it is not a protocol buffer, or ends too early")
        found[key >> 3].append(content[position : position + length])
        position += length
    return found


def _varint(content: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(content):
            break
        byte = content[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise ValueError("it is not a protocol buffer")


def _number(message: Message, field: int, default: int) -> int:
    return int(message[field][-1]) if message[field] else default
