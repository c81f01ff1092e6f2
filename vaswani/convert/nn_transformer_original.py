"""A model around `torch.nn.Transformer` before its conversion, computed by torch.

Dimension letters in shape comments: B batch, S source length, T target length, D width.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..modeling_vaswani import VaswaniForConditionalGeneration
from .nn_transformer_description import Description
from .vocabularies import side_pipeline
from .weights import read_file


class NNTransformerOriginal:
    """A model around `torch.nn.Transformer` before its conversion, computed by torch as its description says.

    Parameters
    ----------
    folder : Path
        Its folder.
    dtype : torch.dtype
        The dtype in which it computes.
    """

    measure = "logits"

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.description = Description.read(folder)
        found = read_file(folder, self.description.weights, self.description.state_dict)
        self.weights = {name: weight.to(dtype) for name, weight in found.items()}
        vocab = side_pipeline(folder, self.description.target_vocabulary, self.description).get_vocab()
        self.bos, self.eos, self.pad = (
            vocab[getattr(self.description, name)] for name in ("bos_token", "eos_token", "pad_token")
        )
        self.transformer = self._transformer(dtype).eval()

    def _transformer(self, dtype: torch.dtype) -> nn.Transformer:
        """Make the model of torch, with its weights."""
        name, d_model = self.description.transformer, self.weights[self.description.target_embedding].shape[1]
        pattern = re.compile(rf"{re.escape(f'{name}.' if name else '')}((?:encoder|decoder)\..*)")
        own = {found[1]: weight for name, weight in self.weights.items() if (found := pattern.fullmatch(name))}
        bias = any("in_proj_bias" in name for name in own)
        eps = self.description.layer_norm_eps

        def stack(name: str, layer_class: Any, stack_class: Any, **options: Any) -> Any:
            width = len(own[f"{name}.layers.0.linear1.weight"])
            numbers = [int(found[1]) for each in own if (found := re.match(rf"{name}\.layers\.(\d+)\.", each))]
            layer = layer_class(
                d_model,
                self.description.nhead,
                dim_feedforward=width,
                activation=self.description.activation,
                layer_norm_eps=eps,
                batch_first=True,
                bias=bias,
                dtype=dtype,
            )
            norm = nn.LayerNorm(d_model, eps, bias=bias, dtype=dtype) if f"{name}.norm.weight" in own else None
            return stack_class(layer, max(numbers) + 1, norm, **options)

        made = nn.Transformer(
            d_model,
            self.description.nhead,
            custom_encoder=stack(
                "encoder", nn.TransformerEncoderLayer, nn.TransformerEncoder, enable_nested_tensor=False
            ),
            custom_decoder=stack("decoder", nn.TransformerDecoderLayer, nn.TransformerDecoder),
            batch_first=True,
        )
        made.load_state_dict(own)
        return made

    def _embed(self, ids: torch.Tensor, side: str) -> torch.Tensor:
        embedding = self.weights[getattr(self.description, f"{side}_embedding")]
        states = nn.functional.embedding(ids, embedding)  # (B, S, D)
        if self.description.scale_embeddings:
            states = states * math.sqrt(embedding.shape[1])
        name = getattr(self.description, f"{side}_positions")
        if name is not None:
            table = self.weights[name].reshape(-1, embedding.shape[1])
        else:
            frequencies = torch.exp(
                torch.arange(0, embedding.shape[1], 2).double() * (-math.log(1e4) / embedding.shape[1])
            )
            angles = torch.arange(ids.shape[1]).double().unsqueeze(1) * frequencies  # (S, D/2)
            table = torch.zeros(ids.shape[1], embedding.shape[1], dtype=torch.float64)
            table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
        return states + table[: ids.shape[1]].to(states.dtype)

    def logits(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor
    ) -> torch.Tensor:
        """Compute the logits of the next token at every target position.

        Parameters
        ----------
        input_ids : torch.Tensor
            Source token ids, of shape (batch, source), padded on the right.
        attention_mask : torch.Tensor
            1 for a real source token, 0 for padding.
        decoder_input_ids : torch.Tensor
            Target token ids, of shape (batch, target), padded on the right.

        Returns
        -------
        torch.Tensor
            Logits, of shape (batch, target, vocabulary).
        """
        is_padding = attention_mask == 0
        length = decoder_input_ids.shape[1]
        states = self.transformer(
            self._embed(input_ids, "source"),
            self._embed(decoder_input_ids, "target"),
            tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),
            src_key_padding_mask=is_padding,
            memory_key_padding_mask=is_padding,
        )
        output = self.description.output
        return nn.functional.linear(states, self.weights[f"{output}.weight"], self.weights.get(f"{output}.bias"))

    @torch.no_grad()
    def translate(self, inputs: Mapping[str, torch.Tensor], length: int) -> torch.Tensor:
        """Translate a batch by greedy search.

        Parameters
        ----------
        inputs : Mapping[str, torch.Tensor]
            Token ids and mask of the sources.
        length : int
            The most tokens of a translation.

        Returns
        -------
        torch.Tensor
            The translations, padded on the right.
        """
        sequences = torch.full((len(inputs["input_ids"]), 1), self.bos)
        is_finished = torch.zeros(len(sequences), dtype=torch.bool)
        while sequences.shape[1] < length and not is_finished.all():
            best = self.logits(inputs["input_ids"], inputs["attention_mask"], sequences)[:, -1].argmax(dim=-1)
            best = best.masked_fill(is_finished, self.pad)
            sequences = torch.cat((sequences, best.unsqueeze(1)), dim=1)
            is_finished |= best == self.eos
        return sequences

    @torch.no_grad()
    def difference(
        self, model: VaswaniForConditionalGeneration, inputs: Mapping[str, torch.Tensor], sequences: torch.Tensor
    ) -> float:
        """Compare the logits for translations.

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
        is_token = (sequences != self.pad) | (torch.arange(sequences.shape[1]) == 0)
        theirs = self.logits(inputs["input_ids"], inputs["attention_mask"], sequences)[is_token]
        ours = model(**inputs, decoder_input_ids=sequences).logits[is_token]
        return float((theirs - ours).abs().max())

    def token_ids(self, text: str) -> list[int] | None:  # noqa: ARG002
        """Tokenize a source: a state dict has no tokenizer of its own.

        Parameters
        ----------
        text : str
            The source.

        Returns
        -------
        list[int] | None
            None.
        """
        return None


__all__ = ["NNTransformerOriginal"]
