"""Write a byte-pair encoding, with the vocabularies of source and target, as the tokenizer of a converted model."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from ..tokenization_moses import END_OF_WORD, VaswaniMosesTokenizer
from ..tokenization_sides import FILES

# The special tokens of fairseq's dictionaries.
SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}


def moses_tokenizer(
    vocabs: Sequence[Mapping[str, int]], sizes: Sequence[int], merges: Sequence[tuple[str, str]], **options: Any
) -> VaswaniMosesTokenizer:
    """Make the tokenizer of a model.

    Parameters
    ----------
    vocabs : Sequence[Mapping[str, int]]
        The vocabularies of source and target, from token to id.
    sizes : Sequence[int]
        The numbers of tokens that the model has for each.
    merges : Sequence[tuple[str, str]]
        The merges of both sides, the first one first.
    **options : Any
        Options of `VaswaniMosesTokenizer`.

    Returns
    -------
    VaswaniMosesTokenizer
        The tokenizer.

    Raises
    ------
    ValueError
        If a vocabulary has an id that the model has not, or lacks a special token.
    """
    for vocab, size in zip(vocabs, sizes, strict=True):
        if (largest := max(vocab.values())) >= size:
            raise ValueError(f"A vocabulary has the token id {largest}; the model has {size} tokens.")
    separate = dict(vocabs[0]) != dict(vocabs[1])
    special = {name: options.get(name, token) for name, token in SPECIAL.items()}
    with tempfile.TemporaryDirectory() as place:
        paths = {name: Path(place) / file for name, file in FILES.items()}
        for name, vocab in zip(("source_file", "target_file"), vocabs, strict=True):
            paths[name].write_text(byte_pair_pipeline(vocab, merges, **special), encoding="utf-8")
        for name, vocab in zip(("vocab_file", "target_vocab_file"), vocabs, strict=True):
            paths[name].write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
        files: dict[str, Any] = {name: str(path) for name, path in paths.items()}
        return VaswaniMosesTokenizer(**files, separate_vocabs=separate, **{**options, **special})


def byte_pair_pipeline(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], unk_token: str, eos_token: str, **others: str
) -> str:
    """Write one side as a `tokenizer.json` whose token ids are those of a vocabulary.

    Parameters
    ----------
    vocab : Mapping[str, int]
        The vocabulary, from token to id.
    merges : Sequence[tuple[str, str]]
        The merges, the first one first.
    unk_token : str
        The vocabulary's token for what it lacks.
    eos_token : str
        Its token that ends a sequence.
    **others : str
        Its other special tokens.

    Returns
    -------
    str
        The content of `tokenizer.json`. Symbols of merges that the vocabulary lacks have ids behind it.

    Raises
    ------
    ValueError
        If the vocabulary lacks a special token.

    Notes
    -----
    A library without `VaswaniMosesTokenizer` that loads the file gets the token ids of text that is split into words
    already.
    """
    special = [unk_token, eos_token, *others.values()]
    if missing := [token for token in special if token not in vocab]:
        raise ValueError(f"A vocabulary has no {missing[0]!r}.")
    symbols = [symbol for first, second in merges for symbol in (first, second, first + second)]
    new = dict.fromkeys(symbol for symbol in symbols if symbol not in vocab)
    behind = max(vocab.values()) + 1
    entries = {**vocab, **{symbol: behind + rank for rank, symbol in enumerate(new)}}
    model = models.BPE(entries, list(merges), unk_token=unk_token, end_of_word_suffix=END_OF_WORD)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder(suffix=END_OF_WORD)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos_token}", pair=f"$A {eos_token} $B {eos_token}", special_tokens=[(eos_token, vocab[eos_token])]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return str(tokenizer.to_str())


def read_merges(path: Path, last: bool = False) -> list[tuple[str, str]]:
    """Read merges of a byte-pair encoding.

    Parameters
    ----------
    path : Path
        The file: two symbols in each line, and perhaps how often they were found together.
    last : bool, default=False
        Whether a last line counts that no line feed ends. `FSMTTokenizer` leaves it out.

    Returns
    -------
    list[tuple[str, str]]
        The merges.

    Raises
    ------
    ValueError
        If there is no such file, or it has something else.
    """
    if not path.is_file():
        raise ValueError(f"There is no {path.name} in {path.parent}.")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except ValueError:
        raise ValueError(f"{path} is not a file with merges: it is not UTF-8.") from None
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(lines if last else lines[:-1], 1):
        symbols = line.split()
        if not symbols or line.startswith("#version"):
            continue
        if len(symbols) not in (2, 3):
            raise ValueError(f"{path} is not a file with merges: line {number} has {len(symbols)} parts, not 2 or 3.")
        merges.append((symbols[0], symbols[1]))
    return merges


__all__ = ["SPECIAL", "byte_pair_pipeline", "moses_tokenizer", "read_merges"]
