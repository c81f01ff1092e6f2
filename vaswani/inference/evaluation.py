"""The evaluation: BLEU with its signature, chrF, and BLEU as the paper's authors measured it."""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import EvalPrediction, PreTrainedTokenizerBase

from ..configuration_vaswani import IGNORE_INDEX

COMPOUND = re.compile(r"(\S)-(\S)")

# Double marks and guillemets, then single ones.
QUOTATION_MARKS = {
    **dict.fromkeys(map(ord, "\u201c\u201d\u201e\u201f\u00ab\u00bb"), '"'),
    **dict.fromkeys(map(ord, "\u2018\u2019\u201a\u201b\u2039\u203a"), "'"),
}


def evaluate_translations(
    hypotheses: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    target_language: str = "de",
    tokenize: str | None = None,
) -> dict[str, Any]:
    """Score translations of a corpus.

    Parameters
    ----------
    hypotheses : Sequence[str]
        The translations to score, a sentence each.
    references : Sequence[str] | Sequence[Sequence[str]]
        A reference translation for each of them, or several.
    target_language : str, default="de"
        Code of their language, for the tokenizers.
    tokenize : str | None, default=None
        Tokenizer of sacreBLEU; by default the one for the language, which is "13a" for most. "none" means that the
        text is tokenised already.

    Returns
    -------
    dict[str, Any]
        `bleu`, `chrf` and `paper_bleu`, from 0 to 100, each with its `_signature`; for both kinds of BLEU also
        `_precisions`, `_brevity_penalty`, and `_hypothesis_length` and `_reference_length` in tokens; and the number of
        `sentences`. All of it can be written as JSON.

    Raises
    ------
    ValueError
        If hypotheses and references differ in number, there are none, or sacreBLEU has no such tokenizer.

    Notes
    -----
    `bleu` with its signature is what others can compare with. `paper_bleu` is for comparing with the paper's Table 2,
    and mostly higher. As in the authors' script, `get_ende_bleu.sh` of tensor2tensor, it counts the tokens of Moses
    (here sacremoses, without its option for hyphens) and splits hyphenated compounds on both sides: `rich-text`
    becomes `rich ##AT##-##AT## text`. Their reference had ASCII quotation marks, so Unicode ones become ASCII. Here
    those of the hypotheses do too, or a copy of the reference would not score 100; their script left low marks there,
    which counted as errors. Smoothing, which they did not use, matters only if no n-gram of some order matches. Text
    that is tokenised already is not tokenised again, but its compounds and quotation marks are treated alike.
    """
    from sacrebleu.metrics import BLEU, CHRF

    if isinstance(hypotheses, str) or isinstance(references, str):
        raise ValueError("hypotheses and references must be lists of sentences, not one string.")
    if len(hypotheses) != len(references):
        raise ValueError(f"There are {len(hypotheses)} hypotheses, but {len(references)} references.")
    if len(hypotheses) == 0:
        raise ValueError("There are 0 hypotheses: at least 1 is needed.")
    if tokenize is not None and tokenize not in BLEU.TOKENIZERS:
        raise ValueError(f"tokenize={tokenize!r} is unknown: it must be one of {sorted(BLEU.TOKENIZERS)}.")
    hypotheses = list(hypotheses)
    choices = [[choice] if isinstance(choice, str) else list(choice) for choice in references]
    if [] in choices:
        raise ValueError(f"Hypothesis {choices.index([])} has 0 references: at least 1 is needed.")

    is_tokenized = tokenize == "none"
    streams, chrf = _streams(choices), CHRF()
    bleu = BLEU(tokenize=tokenize, trg_lang=target_language, force=is_tokenized)
    split, name = _paper_tokenizer(None if is_tokenized else target_language)
    paper_streams = _streams([[split(line) for line in choice] for choice in choices])
    paper_bleu = BLEU(tokenize="none", force=True)
    return {
        **_bleu_figures("bleu", bleu, hypotheses, streams),
        "chrf": chrf.corpus_score(hypotheses, streams).score,
        "chrf_signature": str(chrf.get_signature()),
        **_bleu_figures("paper_bleu", paper_bleu, [split(line) for line in hypotheses], paper_streams, name),
        "sentences": len(hypotheses),
    }


def metrics_for(tokenizer: PreTrainedTokenizerBase, **options: Any) -> Callable[[EvalPrediction], dict[str, float]]:
    """Make the `compute_metrics` of a `Seq2SeqTrainer` that predicts with `generate`.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        The tokenizer of the labels.
    **options : Any
        Options of `evaluate_translations`.

    Returns
    -------
    Callable[[EvalPrediction], dict[str, float]]
        Returns the scores and brevity penalties of `evaluate_translations`.

    Notes
    -----
    References are labels turned back into text, so they are what the tokenizer decodes. Report the scores that
    `evaluate_translations` gives for the original text.
    """

    def text(ids: Any) -> list[str]:
        ids = np.asarray(ids[0] if isinstance(ids, tuple) else ids)
        if ids.ndim != 2:
            raise ValueError(
                f"Got an array of shape {ids.shape}, not sequences of token ids: set predict_with_generate=True."
            )
        return tokenizer.batch_decode(
            np.where(ids == IGNORE_INDEX, tokenizer.pad_token_id, ids), skip_special_tokens=True
        )

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        results = evaluate_translations(text(prediction.predictions), text(prediction.label_ids), **options)
        return {name: value for name, value in results.items() if isinstance(value, float)}

    return compute_metrics


def metric_folder() -> Path:
    """Return the folder of the metric for `evaluate.load`.

    Returns
    -------
    Path
        A folder that `evaluate.load` takes without a network: `evaluate.load(str(metric_folder()))`.
    """
    return Path(__file__).parent.parent / "metrics" / "vaswani_bleu"


def _streams(choices: list[list[str]]) -> list[Any]:
    """Turn the references of each sentence into sacreBLEU's form: all first ones, all second ones, and so on."""
    return list(itertools.zip_longest(*choices))


def _paper_tokenizer(language: str | None) -> tuple[Callable[[str], str], str]:
    """Return what splits a line into the paper's tokens, and its name; without a language it has tokens already."""
    tokens: Callable[[str], str] = str
    name = "none"
    if language is not None:
        import sacremoses

        tokens = functools.partial(sacremoses.MosesTokenizer(language).tokenize, return_str=True)
        name = f"sacremoses-{sacremoses.__version__}-{language}"

    def split(line: str) -> str:
        return COMPOUND.sub(r"\1 ##AT##-##AT## \2", tokens(line.translate(QUOTATION_MARKS)))

    return split, f"{name}+compounds+quotes"


def _bleu_figures(
    name: str, metric: Any, hypotheses: list[str], streams: list[Any], tokens: str | None = None
) -> dict[str, Any]:
    score = metric.corpus_score(hypotheses, streams)
    signature = metric.get_signature()
    if tokens is not None:
        signature.update("tok", tokens)
    return {
        name: score.score,
        f"{name}_signature": str(signature),
        f"{name}_precisions": score.precisions,
        f"{name}_brevity_penalty": score.bp,
        f"{name}_hypothesis_length": score.sys_len,
        f"{name}_reference_length": score.ref_len,
    }


__all__ = ["evaluate_translations", "metric_folder", "metrics_for"]
