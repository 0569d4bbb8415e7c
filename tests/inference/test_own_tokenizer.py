"""A run on data with a tokenizer of one's own keeps it: in its directory, in an export and back, in text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

import steepen
from steepen.data.prepare import PrepareRequest, prepare
from steepen.evaluation.load import load
from steepen.inference.export import write_hugging_face
from steepen.inference.import_model import import_model
from steepen.requests.data import DataResult
from steepen.runs.spec import DataConfig, RunSpec
from steepen.runs.store import RunStore
from steepen.training.run import train
from steepen.training.train_options import TrainOptions


def test_export_and_import_carry_the_tokenizer_of_the_data(
    tmp_path: Path, make_spec: Callable[..., RunSpec]
) -> None:
    texts = [f"document {number} of a few, with words in it" for number in range(300)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    library.decoder = decoders.ByteLevel()  # pyright: ignore
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False
    )
    library.train_from_iterator(texts, trainer)
    library.save(str(tmp_path / "tokenizer.json"))
    request = PrepareRequest((str(tmp_path / "text.jsonl"),), tokenizer=str(tmp_path / "tokenizer.json"))
    data = prepare(request, tmp_path / "data")
    assert "</s> (id 0), before every document" in str(DataResult(data))

    spec = make_spec("vanilla", depth=2, steps=4)
    spec = replace(spec, data=DataConfig(data.identity), validation_tokens=64)
    store = RunStore(tmp_path / "runs")
    train(spec, data, store, TrainOptions(device="cpu", quiet=True))
    run = load(store.run(spec).path, device="cpu")
    kept = run.tokenizer
    assert kept.identity == data.tokenizer().identity

    folder = tmp_path / "export"
    folder.mkdir()
    write_hugging_face(run, folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    assert (loaded.eos_token, loaded.eos_token_id) == ("</s>", 0)
    for text in texts[:20]:
        assert loaded(text)["input_ids"] == [0, *library.encode(text).ids] == [0, *kept.encode(text)]
        assert loaded.decode(kept.encode(text)) == text
    again = load(import_model(folder, tmp_path / "imported").path, device="cpu")
    assert again.tokenizer.identity == kept.identity
    assert steepen.generate(store.run(spec).path, "document", max_tokens=5, device="cpu")
