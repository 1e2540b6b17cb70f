"""Byte entropies against small texts by hand, and against plain Python."""

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle_megatron.data import TokenStream, byte_entropies, entropy

EOD = 256


def stream_of(folder, texts):
    tokens = [token for text in texts for token in [*text, EOD]]
    path = folder / "text.train.bin"
    np.asarray(tokens, dtype="<u2").tofile(path)
    return TokenStream(str(path), len(tokens), len(texts), f"digest of {texts}")


def in_plain_python(texts):
    singles = Counter(byte for text in texts for byte in text)
    pairs = Counter(pair for text in texts for pair in itertools.pairwise(text))
    firsts = Counter()
    for (first, _), count in pairs.items():
        firsts[first] += count
    total, total_pairs = sum(singles.values()), sum(pairs.values())
    unigram = -sum(n / total * math.log(n / total) for n in singles.values())
    bigram = -sum(n / total_pairs * math.log(n / firsts[first]) for (first, _), n in pairs.items())
    return unigram, bigram


def test_by_hand(tmp_path):
    # "aab" and "ab": a three times of five; after a comes a once and b twice; b ends its document.
    unigram, bigram = byte_entropies(stream_of(tmp_path, [b"aab", b"ab"]))
    assert unigram == pytest.approx(-0.6 * math.log(0.6) - 0.4 * math.log(0.4))
    assert bigram == pytest.approx(-math.log(1 / 3) / 3 - 2 * math.log(2 / 3) / 3)


@settings(max_examples=30, deadline=None)
@given(
    texts=st.lists(st.text("abc é", min_size=1).map(str.encode), min_size=1, max_size=6),
    chunk=st.sampled_from([1, 2, 5, 1 << 20]),
)
def test_against_plain_python_however_it_is_cut(tmp_path_factory, texts, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entropy, "_CHUNK", chunk)
        found = byte_entropies(stream_of(tmp_path_factory.mktemp("text"), texts))
    assert found == pytest.approx(in_plain_python(texts), abs=1e-9)


def test_the_result_is_kept_beside_the_stream(tmp_path, monkeypatch):
    stream = stream_of(tmp_path, [b"abracadabra"])
    first = byte_entropies(stream)
    monkeypatch.setattr(entropy, "_pair_counts", None)
    assert byte_entropies(stream) == first


def test_what_was_kept_of_other_text_or_damaged_is_not_believed(tmp_path):
    stream = stream_of(tmp_path, [b"abracadabra"])
    kept = Path(tmp_path, "text.train.entropy.json")
    first = byte_entropies(stream)
    kept.write_text(json.dumps({"digest": "other", "unigram": 1, "bigram": 1}))
    assert byte_entropies(stream) == first
    kept.write_text("[")
    assert byte_entropies(stream) == first


def test_an_empty_stream(tmp_path):
    assert byte_entropies(TokenStream(str(tmp_path / "none.bin"), 0, 0, "none")) == (0.0, 0.0)


def test_a_folder_that_cannot_be_written_is_no_hindrance(tmp_path, monkeypatch):
    def refuse(path):
        raise OSError("read-only")

    monkeypatch.setattr(entropy, "written_aside", refuse)
    assert byte_entropies(stream_of(tmp_path, [b"ab"]))[0] == pytest.approx(math.log(2))
