"""A model of CTranslate2, computed by CTranslate2 for comparison."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import is_sentencepiece_available

from ..configuration_vaswani import IGNORE_INDEX
from ..modeling_vaswani import VaswaniForConditionalGeneration
from .ctranslate2 import forbidden_tokens
from .ctranslate2_file import read_variables, starts_from_zero
from .ctranslate2_folder import MARK, MODEL, ConvertedTokens, read_folder


class CTranslate2Original:
    """A model before its conversion, computed by CTranslate2 in single precision.

    Parameters
    ----------
    folder : Path
        Its folder, or that of a package around it.
    dtype : torch.dtype
        Not used: there are no other dtypes on a CPU that keep its weights.
    """

    measure = "log-probabilities of tokens"

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:  # noqa: ARG002
        import ctranslate2

        self.folder = read_folder(folder)
        self.tokens = ConvertedTokens(self.folder, starts_from_zero(read_variables(self.folder.place / MODEL)))
        self.processor: Any = None
        self.translator: Any = ctranslate2.Translator(
            str(self.folder.place), device="cpu", compute_type="float32", intra_threads=torch.get_num_threads()
        )

    def translate(self, inputs: Mapping[str, torch.Tensor], length: int) -> torch.Tensor:
        """Translate a batch by beam search.

        Parameters
        ----------
        inputs : Mapping[str, torch.Tensor]
            Token ids and mask of the sources.
        length : int
            The most tokens of a translation, with the one that starts it.

        Returns
        -------
        torch.Tensor
            The translations, padded on the right.
        """
        results = self.translator.translate_batch(
            self._sources(inputs),
            beam_size=4,
            min_decoding_length=0,
            max_decoding_length=length - 1,
            return_end_token=True,
        )
        ids = self.tokens.vocabs[1]
        found = [torch.tensor([self.tokens.start, *map(ids.__getitem__, each.hypotheses[0])]) for each in results]
        return pad_sequence(found, batch_first=True, padding_value=self.tokens.pad)

    def difference(
        self, model: VaswaniForConditionalGeneration, inputs: Mapping[str, torch.Tensor], sequences: torch.Tensor
    ) -> float:
        """Compare the log-probabilities of translations, token by token, among the tokens that both can find.

        Parameters
        ----------
        model : VaswaniForConditionalGeneration
            The converted model.
        inputs : Mapping[str, torch.Tensor]
            Token ids and mask of the sources.
        sequences : torch.Tensor
            Translations of them, padded on the right.

        Returns
        -------
        float
            The largest difference.
        """
        special = {self.tokens.pad, self.tokens.eos}
        found = [[token for token in row[1:] if token not in special] for row in sequences.tolist()]
        targets = [[self.folder.vocabs[1][token] for token in row] for row in found]
        scores = self.translator.score_batch(self._sources(inputs), targets)  # it appends EOS itself
        rows = [torch.tensor([*row, self.tokens.eos]) for row in found]
        labels = pad_sequence(rows, batch_first=True, padding_value=IGNORE_INDEX)
        lacking = [*range(len(self.folder.vocabs[1]), model.config.vocab_size), *forbidden_tokens(model)]
        logits = model(**inputs, labels=labels).logits.index_fill(
            -1, torch.tensor(lacking, dtype=torch.long), -torch.inf
        )
        ours = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return max(
            float((torch.tensor(theirs.log_probs) - each[: len(row)]).abs().max())
            for theirs, each, row in zip(scores, ours, rows, strict=True)
        )

    def token_ids(self, text: str) -> list[int] | None:
        """Tokenize a source.

        Parameters
        ----------
        text : str
            The source.

        Returns
        -------
        list[int] | None
            Its token ids; None where there is no SentencePiece model, or sentencepiece is not installed.
        """
        if self.folder.sentencepiece is None or not is_sentencepiece_available():
            return None
        from sentencepiece import SentencePieceProcessor

        if self.processor is None:
            self.processor = SentencePieceProcessor(model_file=str(self.folder.sentencepiece[0]))
        vocab, unknown = self.tokens.vocabs[0], self.folder.tokens["unk"]
        pieces = self.processor.encode(text, out_type=str)
        return [*(vocab.get(piece, vocab[unknown]) for piece in pieces), self.tokens.eos]

    def _sources(self, inputs: Mapping[str, torch.Tensor]) -> list[list[str]]:
        """Write the sources in tokens, without EOS where CTranslate2 appends it."""
        stop = -1 if self.folder.config.get(MARK) else None
        rows = [
            row[mask.bool()].tolist() for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        ]
        return [[self.folder.vocabs[0][token] for token in row[:stop]] for row in rows]


__all__ = ["CTranslate2Original"]
