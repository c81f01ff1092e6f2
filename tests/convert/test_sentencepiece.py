"""SentencePiece models that are read without SentencePiece: the same pieces, or an error that says why not."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.opus import SCRIPTS, sentences_of, train_sentencepiece
from vaswani.convert.sentencepiece import read_unigram
from vaswani.tokenization_marian import UnigramSide

sentencepiece = pytest.importorskip("sentencepiece", reason="SentencePiece is not installed: pip install sentencepiece")

VOCAB = {"</s>": 0, "<unk>": 1, "<pad>": 2}
TEXTS = [*SCRIPTS, "", "  two  spaces  ", "<sep> a<sep>b  <SEP>ﬁ"]
TEXTS += ["ａｂｃ １２３ \t x", "aaaa ﬁﬁﬁ e\u0301e\u0301 <sep>\u0338", "▁a▁ ▁"]


def side_of(model: bytes, folder: Path, vocab: dict[str, int] = VOCAB) -> UnigramSide:
    (folder / "source.spm").write_bytes(model)
    (folder / "tokenizer.json").write_text(read_unigram(folder / "source.spm", vocab))
    return UnigramSide(folder / "tokenizer.json")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalization_rule_name": "identity"},
        {"normalization_rule_name": "nfkc_cf"},
        {"remove_extra_whitespaces": False},
        {"add_dummy_prefix": False},
        {"user_defined_symbols": ["<sep>", "ﬁ", "ﬁﬁ"]},
        {"split_by_whitespace": False},
        {"control_symbols": ["<ctrl>"], "unk_piece": "<UNK>", "pad_id": 3},
    ],
    ids=str,
)
def test_pieces_are_those_of_sentencepiece(options: dict[str, Any], tmp_path: Path) -> None:
    model = train_sentencepiece(sentences_of(200), 400, **options)
    theirs, ours = sentencepiece.SentencePieceProcessor(model_proto=model), side_of(model, tmp_path)
    for text in TEXTS:
        assert ours.normalize(text) == theirs.normalize(text), text
        assert ours.split(text) == theirs.encode(text, out_type=str), text


def test_ids_are_those_of_the_vocabulary_and_pieces_that_it_lacks_come_after(tmp_path: Path) -> None:
    model = train_sentencepiece(sentences_of(200), 400)
    piece = sentencepiece.SentencePieceProcessor(model_proto=model).id_to_piece(20)
    (tmp_path / "a.spm").write_bytes(model)
    vocab = {**VOCAB, piece: 5, ">>deu<<": 3}  # without an id 4
    entries = json.loads(read_unigram(tmp_path / "a.spm", vocab))["model"]["vocab"]
    assert [entries[index][0] for index in (0, 1, 2, 3, 5)] == ["</s>", "<unk>", "<pad>", ">>deu<<", piece]
    assert len({name for name, _ in entries}) == len(entries)
    assert entries[3][1] < -1e5 < entries[5][1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "bpe"}, "a model of type 'bpe'"),
        ({"model_type": "char"}, "a model of type 'char'"),
        ({"treat_whitespace_as_suffix": True}, "spaces at the end of pieces"),
        ({"byte_fallback": True}, "pieces for bytes"),
    ],
    ids=str,
)
def test_what_would_not_be_exact_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"source.spm has {message}"):
        side_of(train_sentencepiece(sentences_of(300), 700, **options), tmp_path)


def test_a_vocabulary_without_its_special_tokens_is_refused(tmp_path: Path) -> None:
    model = train_sentencepiece(sentences_of(100), 300)
    for token in ("</s>", "<unk>"):
        with pytest.raises(ValueError, match=f"has no '{token}'"):
            side_of(model, tmp_path, {name: index for name, index in VOCAB.items() if name != token})


def test_every_cut_of_a_model_is_an_error_or_a_shorter_model(tmp_path: Path) -> None:
    model = train_sentencepiece(sentences_of(100), 300, normalization_rule_name="identity")
    refused = read = 0
    for length in range(0, len(model), 7):
        try:
            side_of(model[:length], tmp_path)
        except ValueError as error:
            refused += "source.spm" in str(error)
        else:
            read += 1
    assert refused + read == len(range(0, len(model), 7))
    assert refused > read


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x0a" + b"\xff" * 10, b"{}", bytes(1000)])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"source.spm is not a SentencePiece model, or is damaged"):
        side_of(content, tmp_path)


def test_ties_between_orders_of_the_same_pieces_are_decided_as_by_sentencepiece(tmp_path: Path) -> None:
    lines = ["- -- a --- b ---- | |---|---| = == === ====", "hm hmhm -----", "|---|---|---|---|"] * 40
    model = train_sentencepiece([*sentences_of(100), *lines], 420)
    theirs, ours = sentencepiece.SentencePieceProcessor(model_proto=model), side_of(model, tmp_path)
    generator = random.Random(0)
    texts = ["".join(generator.choice("-=|ab ") * generator.randint(1, 9) for _ in range(9)) for _ in range(400)]
    wanted = [theirs.encode(text, out_type=str) for text in texts]
    assert [ours.split(text) for text in texts] == wanted
    assert [ours._model.encode(ours.normalize(text)).tokens for text in texts] != wanted
