"""``data build`` with a Hugging Face tokenizer trained on the spot; skipped without the package for it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from corpora import contents, straight_loop
from typer.testing import CliRunner, Result

from mixle_megatron.cli.main import app
from mixle_megatron.data.corpus_tokenizers import open_tokenizer
from mixle_megatron.data.indexed_inspection import inspect_corpus
from mixle_megatron.errors import Refused

needs_tokenizers = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None, reason="the package tokenizers is not installed"
)
DOCUMENTS = ["def f(x):\n    return x\n", "héllo wörld ", "a <|end|> b", "", "def " * 300]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a byte-level BPE, whose file asks for everything that would change a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 0), ("<|end|>", 1)]
    )
    tokenizer.enable_truncation(max_length=8)
    tokenizer.enable_padding(length=4)
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def config(folder: Path, eos: object, name: str = "tokenizer_config.json") -> None:
    for old in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / old).unlink(missing_ok=True)
    (folder / name).write_text(json.dumps({"eos_token": eos}))


def build(tmp_path: Path, tokenizer: str | Path, *options: str) -> Result:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    (tmp_path / "text.jsonl").write_text(lines)
    words = ["--input", tmp_path / "text.jsonl", "--output", tmp_path / "out", "--workers", 1]
    words += ["--tokenizer", f"hf:{tokenizer}", *options]
    result = CliRunner().invoke(app, ["data", "build", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def theirs(folder: Path) -> list[list[int]]:
    """The ids of the documents by the library alone, each ended with token 1."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in DOCUMENTS if text]
    return [[*ids, 1] for ids in encoded]


@needs_tokenizers
@pytest.mark.parametrize("path", ["", "tokenizer.json"])
def test_the_bytes_are_those_of_a_straight_loop(trained, tmp_path, path):
    config(trained, "<|end|>")
    result = build(tmp_path, trained / path)
    assert result.exit_code == 0, result.output
    straight_loop(tmp_path / "straight", theirs(trained))
    ours = contents(tmp_path / "out")
    record = json.loads(ours.pop(".json"))
    assert ours == contents(tmp_path / "straight")
    assert (record["vocab_size"], record["eod"], record["dtype"]) == (400, 1, "uint16")
    assert record["tokenizer"] == f"hf:{trained / 'tokenizer.json'}"
    found = inspect_corpus(str(tmp_path / "out"), samples=4)
    assert found.damage == found.notes == []
    assert found.samples[1].text == DOCUMENTS[1] + "<|end|>"


@needs_tokenizers
@pytest.mark.parametrize("eos", ["<|end|>", {"content": "<|end|>", "lstrip": False}])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_end_token_is_the_tokenizers_own(trained, eos, name):
    config(trained, eos, name)
    assert open_tokenizer(f"hf:{trained}").eod == 1


@needs_tokenizers
def test_another_end_token_can_be_named(trained, tmp_path):
    config(trained, "<|end|>")
    assert build(tmp_path, trained, "--eod-token", "<|begin|>").exit_code == 0
    assert json.loads((tmp_path / "out.json").read_text())["eod"] == 0
    assert inspect_corpus(str(tmp_path / "out")).notes == []


@needs_tokenizers
def test_without_an_end_token_it_has_to_be_named(trained, tmp_path):
    config(trained, None)
    result = build(tmp_path, trained)
    assert result.exit_code == 2
    assert "does not say which token ends a document; name it by --eod-token '<|begin|>'" in result.stderr
    assert "<|end|>" in result.stderr
    assert build(tmp_path, trained, "--no-append-eod").exit_code == 0
    assert json.loads((tmp_path / "out.json").read_text())["eod"] is None


@needs_tokenizers
@pytest.mark.parametrize(("eos", "options"), [("<|no|>", []), (None, ["--eod-token", "<|no|>"])])
def test_an_end_token_that_there_is_not(trained, tmp_path, eos, options):
    config(trained, eos)
    result = build(tmp_path, trained, *options)
    assert result.exit_code == 2
    assert "=<|no|> is no token of the tokenizer" in result.stderr


@needs_tokenizers
def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{number}": number for number in range(70_000)} | {"[unk]": 70_005}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (tmp_path / "large").mkdir()
    tokenizer.save(str(tmp_path / "large" / "tokenizer.json"))
    assert build(tmp_path, tmp_path / "large", "--eod-token", "w0").exit_code == 0
    record = json.loads((tmp_path / "out.json").read_text())
    assert (record["dtype"], record["vocab_size"]) == ("int32", 70_006)
    tokens = np.fromfile(tmp_path / "out.bin", dtype=np.int32)
    assert tokens[:5].tolist() == [70_005] * 4 + [0]


@needs_tokenizers
def test_another_tokenizer_begins_anew_and_samples_know_it(trained, tmp_path):
    config(trained, "<|end|>")
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).write_bytes((trained / name).read_bytes())
    assert build(tmp_path, copy).exit_code == 0
    stored = json.loads((copy / "tokenizer.json").read_text())
    del stored["model"]["merges"][-1]
    (copy / "tokenizer.json").write_text(json.dumps(stored))
    assert "is there already" in build(tmp_path, copy).stderr
    found = inspect_corpus(str(tmp_path / "out"))
    assert "is another than the corpus's" in found.notes[0]
    assert found.samples[0].text is None


@needs_tokenizers
def test_a_file_that_is_no_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    result = build(tmp_path, tmp_path / "tokenizer.json")
    assert result.exit_code == 2
    assert "is no tokenizer that tokenizers" in result.stderr


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(Refused, match=r"cannot be read: No such file or directory .*tokenizer\.json"):
        open_tokenizer(f"hf:{tmp_path}")


def test_the_library_that_is_missing_is_named(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(Refused, match="package tokenizers, which is not installed; pip install tokenizers"):
        open_tokenizer(f"hf:{tmp_path}")


def test_bytes_are_bytes():
    tokenizer = open_tokenizer("byte")
    assert [each.tolist() for each in tokenizer.encode([b"ab", b"\xc3\xa9"])] == [[97, 98], [195, 169]]
    assert tokenizer.decode([97, 256, 0xC3]) == "a\N{REPLACEMENT CHARACTER}"
