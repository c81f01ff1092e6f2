"""Vocabularies that are lists of tokens, and `tokenizer.json` files, as the tokenizer of a converted model."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..data.text_files import read_lines
from ..pretrained_vaswani import check_inside
from ..tokenization_pair import VaswaniPairTokenizer, read_pipeline
from ..tokenization_sides import FILES
from .nn_transformer_description import DESCRIPTION, Description

SPECIAL = ("unk_token", "pad_token", "bos_token", "eos_token")


def pair_tokenizer(
    folder: Path, description: Description, sizes: Sequence[int], max_length: int | None
) -> VaswaniPairTokenizer:
    """Make the tokenizer of a model.

    Parameters
    ----------
    folder : Path
        The folder with the vocabularies.
    description : Description
        The description that names them.
    sizes : Sequence[int]
        The numbers of tokens that the model has for source and target.
    max_length : int | None
        The longest sequence that the model can read; None for one without limit.

    Returns
    -------
    VaswaniPairTokenizer
        The tokenizer.

    Raises
    ------
    ValueError
        If a vocabulary is missing, damaged, does not fit the model, or lacks a special token, or one has different ids
        for source and target.
    """
    names = description.source_vocabulary, description.target_vocabulary
    pipelines = [side_pipeline(folder, name, description) for name in names]
    vocabs = [pipeline.get_vocab() for pipeline in pipelines]
    for name, vocab, size in zip(names, vocabs, sizes, strict=True):
        if (largest := max(vocab.values())) >= size:
            raise ValueError(f"{name} has the token id {largest}; the model has {size} tokens.")
    special = {name: getattr(description, name) for name in SPECIAL}
    for name, token in special.items():
        for file, vocab in zip(names, vocabs, strict=True):
            if token not in vocab:
                raise ValueError(f"{file} has no token {token!r}: {DESCRIPTION} must name another {name}.")
        if vocabs[0][token] != vocabs[1][token]:
            raise ValueError(
                f"The token {token!r} has the ids {vocabs[0][token]} and {vocabs[1][token]} in {names[0]} and "
                f"{names[1]}; only equal ids can be converted exactly."
            )
    languages = {name: getattr(description, name) for name in ("source_lang", "target_lang")}
    with tempfile.TemporaryDirectory() as place:
        paths = {name: Path(place) / file for name, file in FILES.items()}
        for name, pipeline in zip(("source_file", "target_file"), pipelines, strict=True):
            paths[name].write_text(pipeline.to_str(), encoding="utf-8")
        for name, vocab in zip(("vocab_file", "target_vocab_file"), vocabs, strict=True):
            paths[name].write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
        files: dict[str, Any] = {name: str(path) for name, path in paths.items()}
        return VaswaniPairTokenizer(
            **files,
            separate_vocabs=vocabs[0] != vocabs[1],
            source_begins_with_bos=description.source_begins_with_bos,
            source_ends_with_eos=description.source_ends_with_eos,
            model_max_length=max_length,
            **special,
            **{name: language for name, language in languages.items() if language},
        )


def side_pipeline(folder: Path, name: str, description: Description) -> Tokenizer:
    """Read one side's vocabulary as a pipeline of the library `tokenizers`.

    Parameters
    ----------
    folder : Path
        The folder.
    name : str
        The file: a `tokenizer.json`, a JSON list of tokens, a JSON object with the id of each, or text with a token in
        each line.
    description : Description
        Says how text is split where the vocabulary is a list.

    Returns
    -------
    Tokenizer
        The pipeline.

    Raises
    ------
    ValueError
        If the file is missing or damaged.
    """
    check_inside(folder, [name])
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{DESCRIPTION} names {name}, and {folder} has no such file.")
    tokens: Any = list(read_lines(path))
    if path.suffix == ".json":
        try:
            tokens = json.loads("\n".join(tokens))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a JSON file: {error}.") from None
    if isinstance(tokens, dict) and "model" in tokens:
        if description.split or description.lowercase:
            raise ValueError(f"{path} says itself how text is split: split and lowercase are for lists of tokens.")
        return read_pipeline(path.read_text(encoding="utf-8"), path)
    vocab = tokens if isinstance(tokens, dict) else {token: index for index, token in enumerate(tokens)}
    are_strings = all(isinstance(token, str) and token for token in tokens)
    if not vocab or not are_strings or len(vocab) < len(tokens):
        raise ValueError(f"{path} is not a vocabulary: it must have tokens, each of them once, and no empty one.")
    if not all(type(index) is int and index >= 0 for index in vocab.values()) or len(set(vocab.values())) < len(vocab):
        raise ValueError(f"{path} is not a vocabulary: each token must have an id of its own, 0 or more.")
    return _list_pipeline(vocab, description)


def _list_pipeline(vocab: dict[str, int], description: Description) -> Tokenizer:
    if description.split is None:
        raise ValueError(
            f'The vocabularies are lists: {DESCRIPTION} must say whether to split text into "characters" or "words" '
            "(split)."
        )
    pipeline = Tokenizer(models.WordLevel(vocab, unk_token=description.unk_token))
    if description.lowercase:
        pipeline.normalizer = normalizers.Lowercase()
    if description.split == "characters":
        pipeline.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        pipeline.decoder = decoders.Fuse()
    else:
        pipeline.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return pipeline


__all__ = ["pair_tokenizer", "side_pipeline"]
