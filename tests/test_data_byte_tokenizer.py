"""Bytes as tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle_megatron.data import ByteTokenizer

tokenizer = ByteTokenizer()


@given(st.binary())
def test_bytes_come_back(raw):
    tokens = tokenizer.encode(raw)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == list(raw)
    assert tokenizer.decode(tokens) == raw


@given(st.text())
def test_text_comes_back(text):
    assert tokenizer.decode(tokenizer.encode(text)).decode() == text


def test_end_tokens_are_left_out():
    assert (tokenizer.eod, tokenizer.vocab_size) == (256, 257)
    assert tokenizer.decode([[104, 105], [256, 33]]) == b"hi!"
    assert tokenizer.decode([]) == b""


@pytest.mark.parametrize("token", [-1, 257])
def test_other_ids_are_refused(token):
    with pytest.raises(ValueError, match=str(token)):
        tokenizer.decode([65, token])
