"""The files of a CTranslate2 model: its folder, or a package of Argos Translate around it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME

from ..data.text_files import read_lines, read_object
from ..pretrained_vaswani import check_inside

MODEL = "model.bin"
# Of a package of Argos Translate: what it says about itself, and the folder of the model.
METADATA, PACKAGED = "metadata.json", "model"
# The field of a configuration by which it is recognised: no other library writes it.
MARK = "add_source_eos"
# Activations by their number in CTranslate2.
ACTIVATIONS = ("relu", "gelu_new", "swish", "gelu", "quick_gelu", "tanh", "sigmoid")
# Added to the logit of a token that the original does not have: its probability is 0 in single precision.
NEVER = -1e4
VOCABULARIES = ("shared", "source", "target")
# The SentencePiece models: of each side, or of both. Older packages have byte-pair encoding on Moses' tokens instead.
SIDES, JOINT, BYTE_PAIRS = ("source.spm", "target.spm"), "sentencepiece.model", "bpe.model"


@dataclass(frozen=True)
class CTranslate2Folder:
    """What the small files of a model say.

    Attributes
    ----------
    place : Path
        The folder with `model.bin`.
    config : dict[str, Any]
        What its `config.json` has.
    tokens : dict[str, str]
        Its special tokens: "unk", "eos" and "decoder_start".
    vocabs : tuple[list[str], list[str]]
        The tokens of source and target; one list where they are the same.
    sentencepiece : tuple[Path, Path] | None
        The SentencePiece models of source and target, if they are there.
    languages : tuple[str, str] | None
        The codes of both languages, which a package tells.
    """

    place: Path
    config: dict[str, Any]
    tokens: dict[str, str]
    vocabs: tuple[list[str], list[str]]
    sentencepiece: tuple[Path, Path] | None
    languages: tuple[str, str] | None


class ConvertedTokens:
    """The vocabularies as a converted model has them.

    Parameters
    ----------
    folder : CTranslate2Folder
        The small files of the original.
    starts_from_zero : bool
        Whether its decoder starts from a vector of zeros, not from a token.

    Attributes
    ----------
    vocabs : tuple[dict[str, int], dict[str, int]]
        The vocabularies of source and target, from token to id.
    is_shared : bool
        Whether they are the same.
    pad_token : str
        The token that pads sequences.
    pad, eos, start : int
        Its id, and those of the tokens that end a sequence and that start the decoder.

    Raises
    ------
    ValueError
        If the vocabularies do not have the special tokens.

    Notes
    -----
    A model of this package needs a token that pads, and one that the decoder starts with. Where the original has none,
    or starts from zeros, a token is appended, at the same place in both vocabularies.
    """

    def __init__(self, folder: CTranslate2Folder, starts_from_zero: bool) -> None:
        self.is_shared = folder.vocabs[0] is folder.vocabs[1]
        vocabs = [list(vocab) for vocab in folder.vocabs]
        needed = [("unk", vocabs), ("eos", vocabs), ("decoder_start", [] if starts_from_zero else vocabs[1:])]
        for name, places in needed:
            if any(folder.tokens[name] not in vocab for vocab in places):
                reason = f"has no {folder.tokens[name]!r}, its {name}_token"
                raise ValueError(f"The vocabulary of {folder.place} {reason}.")
        self.pad_token = "<pad>"
        if starts_from_zero or _place_in(vocabs, self.pad_token) is None:
            rank, size = 1, max(map(len, vocabs))
            while any(self.pad_token in vocab for vocab in vocabs):
                rank += 1
                self.pad_token = f"<pad{rank}>"
            for vocab in vocabs:
                vocab += [f" {index}" for index in range(len(vocab), size)]  # a name that no text has
                vocab.append(self.pad_token)
        pad, eos = (_place_in(vocabs, token) for token in (self.pad_token, folder.tokens["eos"]))
        if pad is None or eos is None:
            raise ValueError(f"The vocabularies of {folder.place} have different ids for {folder.tokens['eos']!r}.")
        self.pad, self.eos = pad, eos
        self.start = pad if starts_from_zero else vocabs[1].index(folder.tokens["decoder_start"])
        source, target = ({token: index for index, token in enumerate(vocab)} for vocab in vocabs)
        self.vocabs = (source, target)


def _place_in(vocabs: list[list[str]], token: str) -> int | None:
    """Return the id of a token; None if it has not the same one in both vocabularies."""
    places = {vocab.index(token) if token in vocab else None for vocab in vocabs}
    return places.pop() if len(places) == 1 else None


def recognises(folder: Path) -> bool:
    """Tell whether the small files of a folder are those of CTranslate2.

    Parameters
    ----------
    folder : Path
        The folder.

    Returns
    -------
    bool
        Whether they are.

    Raises
    ------
    ValueError
        If its configuration is damaged.
    """
    path = _place_of(folder) / CONFIG_NAME
    return path.is_file() and MARK in read_object(path)


def read_folder(folder: Path) -> CTranslate2Folder:
    """Read the small files of a model.

    Parameters
    ----------
    folder : Path
        Its folder, or that of a package around it.

    Returns
    -------
    CTranslate2Folder
        What they say.

    Raises
    ------
    ValueError
        If something is missing, damaged, or cannot be expressed exactly. It names what.
    """
    place = _place_of(folder)
    check_inside(folder, [METADATA, JOINT])
    check_inside(place, [MODEL, CONFIG_NAME, *SIDES])
    config = read_object(place / CONFIG_NAME)
    if not (place / MODEL).is_file():
        raise ValueError(f"There is no {MODEL} in {place}.")
    metadata = read_object(folder / METADATA) if place != folder else {}
    codes = tuple(metadata.get(f"{side}_code") for side in ("from", "to"))
    return CTranslate2Folder(
        place=place,
        config=config,
        tokens=_special_tokens(place / CONFIG_NAME, config),
        vocabs=_vocabularies(place),
        sentencepiece=_sentencepiece(folder, place),
        languages=(str(codes[0]), str(codes[1])) if all(codes) else None,
    )


def _place_of(folder: Path) -> Path:
    """Return the folder of the model, which a package has inside."""
    return folder / PACKAGED if (folder / METADATA).is_file() else folder


def _sentencepiece(folder: Path, place: Path) -> tuple[Path, Path] | None:
    if all((place / name).is_file() for name in SIDES):
        return place / SIDES[0], place / SIDES[1]
    if (folder / JOINT).is_file():
        return folder / JOINT, folder / JOINT
    if (folder / BYTE_PAIRS).is_file():
        reason = "byte-pair encoding on the tokens of Moses, which VaswaniMarianTokenizer cannot do exactly"
        raise ValueError(f"{folder / BYTE_PAIRS} has {reason}.")
    return None


def _special_tokens(path: Path, raw: dict[str, Any]) -> dict[str, str]:
    """Return the tokens that a configuration names."""
    if raw.get("add_source_bos") or raw.get("multi_query_attention"):
        name = "add_source_bos" if raw.get("add_source_bos") else "multi_query_attention"
        raise ValueError(f"{path} has {name}={raw[name]!r}; only false can be converted exactly.")
    tokens = {name: raw.get(f"{name}_token") for name in ("unk", "eos", "decoder_start")}
    for name, token in tokens.items():
        if not isinstance(token, str):
            raise ValueError(f"{path} has {name}_token={token!r}; it must be a token.")
    return {name: str(token) for name, token in tokens.items()}


def _vocabularies(place: Path) -> tuple[list[str], list[str]]:
    """Read the tokens of source and target; one list where they are the same."""
    found = {name: _vocabulary(place, name) for name in VOCABULARIES}
    shared, source, target = (found[name] for name in VOCABULARIES)
    if shared is not None:
        return shared, shared
    if source is None or target is None:
        raise ValueError(f"There is no vocabulary in {place}: neither shared_vocabulary.json nor one for each side.")
    return (source, source) if source == target else (source, target)


def _vocabulary(place: Path, name: str) -> list[str] | None:
    files = [file for file in (f"{name}_vocabulary.json", f"{name}_vocabulary.txt") if (place / file).is_file()]
    if not files:
        return None
    check_inside(place, files)
    path = place / files[0]
    try:
        tokens: Any = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else list(read_lines(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from None
    is_list = isinstance(tokens, list) and tokens and all(isinstance(token, str) for token in tokens)
    if not is_list or len(set(tokens)) < len(tokens):
        raise ValueError(f"{path} is not a vocabulary: it must be a list of different tokens.")
    return tokens


__all__ = [
    "ACTIVATIONS",
    "MARK",
    "MODEL",
    "NEVER",
    "SIDES",
    "CTranslate2Folder",
    "ConvertedTokens",
    "read_folder",
    "recognises",
]
