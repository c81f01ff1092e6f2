"""A SentencePiece model as a `tokenizer.json`, in both directions: its Unigram pieces and its normalisation."""

import base64
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..tokenization_marian import ABSENT, SPACE, Charsmap

# Fields of the messages ModelProto, SentencePiece, TrainerSpec and NormalizerSpec that are read, and kinds of pieces.
PIECES, TRAINER, NORMALIZER, DENORMALIZER = 1, 2, 3, 5
PIECE, SCORE, KIND = 1, 2, 3
MODEL_TYPE, SPACES_AS_SUFFIX, BYTE_FALLBACK = 3, 24, 35
CHARSMAP, DUMMY_PREFIX, REMOVE_SPACES, ESCAPE_SPACES = 2, 3, 4, 5
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
UNIGRAM = 1
MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


def read_unigram(
    path: Path, vocab: Mapping[str, int], unk_token: str = "<unk>", eos_token: str = "</s>", pad_token: str = "<pad>"
) -> str:
    """Write a SentencePiece model as a `tokenizer.json` whose token ids are those of a vocabulary.

    Parameters
    ----------
    path : Path
        The model's file.
    vocab : Mapping[str, int]
        The vocabulary, from token to id.
    unk_token : str, default="<unk>"
        Its token for what it lacks.
    eos_token : str, default="</s>"
        Its token that ends a sequence.
    pad_token : str, default="<pad>"
        Its token that pads sequences.

    Returns
    -------
    str
        The content of `tokenizer.json`: tokens of the vocabulary, those that are not pieces of this model with the
        score `ABSENT`, then the model's pieces that the vocabulary lacks. Symbols that a user defined, which are not
        normalised, are added tokens.

    Raises
    ------
    ValueError
        If it is not a SentencePiece model, or has what `VaswaniMarianTokenizer` cannot do exactly.

    Notes
    -----
    A library without `VaswaniMarianTokenizer` that loads the file gets the same token ids for nearly all text, and ids
    outside the vocabulary for pieces that it lacks. The format is that of protocol buffers, of which the few lines here
    read what is needed: the package does not depend on protobuf or sentencepiece.
    """
    if not path.is_file():
        raise ValueError(f"There is no {path.name} in {path.parent}.")
    try:
        model = list(_fields(path.read_bytes()))
        trainer, normalizer, denormalizer = (
            dict(_fields(b"".join(value for field, value in model if field == wanted)))
            for wanted in (TRAINER, NORMALIZER, DENORMALIZER)
        )
        pieces = [_piece(value) for field, value in model if field == PIECES]
    except (ValueError, TypeError, struct.error):
        raise ValueError(f"{path} is not a SentencePiece model, or is damaged.") from None
    if not any(kind == NORMAL for _, _, kind in pieces):
        raise ValueError(f"{path} is not a SentencePiece model, or is damaged: it has no pieces.")
    kind = trainer.get(MODEL_TYPE, UNIGRAM)
    wanted = {
        f"a model of type {MODEL_TYPES.get(kind, kind)!r}": kind == UNIGRAM,
        "spaces at the end of pieces": not trainer.get(SPACES_AS_SUFFIX),
        "pieces for bytes": not trainer.get(BYTE_FALLBACK),
        "spaces that are not escaped": normalizer.get(ESCAPE_SPACES, 1),
        "a table of denormalisation": not denormalizer.get(CHARSMAP),
    }
    for what, is_absent in wanted.items():
        if not is_absent:
            raise ValueError(f"{path} has {what}; only Unigram models without that can be converted exactly.")

    if missing := [token for token in (unk_token, eos_token) if token not in vocab]:
        raise ValueError(f"The vocabulary of {path} has no {missing[0]!r}.")
    try:
        if charsmap := normalizer.get(CHARSMAP):
            Charsmap(charsmap)
    except (ValueError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is not a SentencePiece model, or is damaged: {error}.") from None
    symbols = [piece for piece, _, kind in pieces if kind == USER_DEFINED]
    return _pipeline(_scores(pieces), symbols, normalizer, vocab, (unk_token, eos_token, pad_token))


def write_unigram(text: str) -> bytes:
    """Write a `tokenizer.json` that was made of a SentencePiece model as such a model again.

    Parameters
    ----------
    text : str
        The content of `tokenizer.json`, as `read_unigram` makes it.

    Returns
    -------
    bytes
        The SentencePiece model, which splits text into the same pieces.

    Notes
    -----
    Pieces have the order of `tokenizer.json`, so their ids in this file are other ones. They are not used: Marian's ids
    are those of `vocab.json`. What SentencePiece learned the model from is not restored.
    """
    pipeline = json.loads(text)
    symbols = [added["content"] for added in pipeline["added_tokens"] if not added["special"]]
    pieces = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces += [(symbol, 0.0, USER_DEFINED) for symbol in symbols]
    taken = {piece for piece, _, _ in pieces}
    pieces += [
        (piece, score, NORMAL) for piece, score in pipeline["model"]["vocab"] if score != ABSENT and piece not in taken
    ]
    steps = {step["type"]: step for step in (pipeline["normalizer"] or {}).get("normalizers", [])}
    charsmap = base64.b64decode(steps["Precompiled"]["precompiled_charsmap"]) if "Precompiled" in steps else b""
    normalizer = [
        _field(CHARSMAP, charsmap),
        _field(DUMMY_PREFIX, int(pipeline["pre_tokenizer"]["prepend_scheme"] == "always")),
        _field(REMOVE_SPACES, int("Replace" in steps)),
        _field(ESCAPE_SPACES, 1),
    ]
    messages = [_field(PIECE, piece.encode()) + _score(score) + _field(KIND, kind) for piece, score, kind in pieces]
    return b"".join(
        [
            *(_field(PIECES, message) for message in messages),
            _field(TRAINER, _field(MODEL_TYPE, UNIGRAM)),
            _field(NORMALIZER, b"".join(normalizer)),
        ]
    )


def _scores(pieces: list[tuple[str, float, int]]) -> dict[str, float]:
    """Return the pieces into which text is split, with their scores."""
    best = max(score for _, score, kind in pieces if kind == NORMAL)
    scores = {piece: score for piece, score, kind in pieces if kind == NORMAL}
    # SentencePiece prefers a symbol that a user defined by its length in bytes.
    symbols = {piece: len(piece.encode()) * best - 0.1 for piece, _, kind in pieces if kind == USER_DEFINED}
    return scores | symbols


def _pipeline(
    scores: dict[str, float],
    symbols: list[str],
    normalizer: dict[int, Any],
    vocab: Mapping[str, int],
    special: tuple[str, str, str],
) -> str:
    unk_token, eos_token, _ = special
    tokens = {index: token for token, index in vocab.items()}
    named = [tokens.get(index, f" {index}") for index in range(max(tokens) + 1)]  # a name that no text has for a gap
    entries = [(token, scores.get(token, ABSENT)) for token in named]
    entries += [(piece, score) for piece, score in scores.items() if piece not in vocab]
    tokenizer = Tokenizer(models.Unigram(entries, unk_id=vocab[unk_token], byte_fallback=False))
    steps: list[Any] = []
    if charsmap := normalizer.get(CHARSMAP):
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    if normalizer.get(REMOVE_SPACES, 1):
        steps += [
            {"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        ]
    scheme = "always" if normalizer.get(DUMMY_PREFIX, 1) else "never"
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(SPACE, prepend_scheme=scheme)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos_token}", pair=f"$A $B {eos_token}", special_tokens=[(eos_token, vocab[eos_token])]
    )
    known = [token for token in special if token in vocab]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in known])
    tokenizer.add_tokens([AddedToken(symbol, normalized=False) for symbol in symbols])
    pipeline = json.loads(tokenizer.to_str())
    pipeline["normalizer"]["normalizers"] = steps
    return json.dumps(pipeline, ensure_ascii=False)


def _piece(message: Any) -> tuple[str, float, int]:
    fields = dict(_fields(message))
    score = struct.unpack("<f", fields.get(SCORE, bytes(4)))[0]
    if not -1e5 < score < 1e5:  # NaN too
        raise ValueError("a score is not a number")
    return fields[PIECE].decode() if PIECE in fields else "", score, fields.get(KIND, NORMAL)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message of protocol buffers: number, and a whole number or the bytes."""
    place = 0
    while place < len(message):
        key, place = _whole_number(message, place)
        kind = key & 7
        value: Any
        if kind == 0:
            value, place = _whole_number(message, place)
        else:
            length = {1: 8, 5: 4}.get(kind)
            if kind == 2:
                length, place = _whole_number(message, place)
            if length is None or place + length > len(message):
                raise ValueError("a field is cut off")
            value, place = message[place : place + length], place + length
        yield key >> 3, value


def _whole_number(message: bytes, place: int) -> tuple[int, int]:
    """Read a number in groups of seven bits, and return it and the place after it."""
    number = 0
    for rank, byte in enumerate(message[place : place + 10]):
        number |= (byte & 127) << 7 * rank
        if byte < 128:
            return number, place + rank + 1
    raise ValueError("a number is cut off")


def _field(number: int, value: int | bytes) -> bytes:
    """Write a field: a whole number, or bytes with their length."""
    if isinstance(value, int):
        return _groups(number << 3) + _groups(value)
    return _groups(number << 3 | 2) + _groups(len(value)) + value


def _score(score: float) -> bytes:
    return _groups(SCORE << 3 | 5) + struct.pack("<f", score)


def _groups(number: int) -> bytes:
    """Write a number in groups of seven bits."""
    groups = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])


__all__ = ["read_unigram", "write_unigram"]
