"""The engines that train: this model and its peers, one step of the optimiser after the other.

A further peer is one more subclass of `Trainer` in `TRAINERS`.
"""

import copy
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration
from transformers.trainer_pt_utils import LabelSmoother

from ..configuration_vaswani import IGNORE_INDEX
from ..convert.marian import EXPRESSED, shared_fields, to_marian
from ..convert.requirements import POSITIONS, refuse_what_peers_lack
from ..data.batching import PairCollator
from ..modeling_vaswani import VaswaniForConditionalGeneration, sinusoidal_positions
from .pairs import TrainingJob
from .peers import Engine

# Section 5.4, for every size and every engine.
DROPOUT, SMOOTHING = 0.1, 0.1


class Trainer(Engine):
    """An engine that trains.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model whose weights the engine takes.
    threads : int
        Not used: torch has its number of threads for the whole process.

    Notes
    -----
    Adam's learning rate is 0: a step is the same work, but weights stay as they are, so that every round does the same
    and losses can be compared at any time.

    The paper divides the smoothing among the other V - 1 tokens, torch and transformers among all V. There a smoothing
    of eps V / (V - 1) is the same loss.
    """

    package = "transformers"
    # Whether the weights are those of vaswani, so that losses must agree.
    is_comparable: ClassVar[bool] = True

    def __init__(self, model: VaswaniForConditionalGeneration, threads: int) -> None:  # noqa: ARG002
        config = model.config
        self._collate = PairCollator(config.pad_token_id)
        self._decoder_inputs = model.prepare_decoder_input_ids_from_labels
        self.smoothing = SMOOTHING * config.vocab_size / (config.vocab_size - 1)
        self.network = self._build(model).train()
        self._dropouts = [
            (module, name)
            for module in self.network.modules()
            for name in ("p", "dropout")
            if isinstance(rate := getattr(module, name, None), float) and rate > 0
        ]
        self._adam = torch.optim.Adam(self.network.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=True)

    @abstractmethod
    def _build(self, model: VaswaniForConditionalGeneration) -> nn.Module:
        """Return the network, with dropout as the paper has it."""

    @abstractmethod
    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the smoothed loss of a padded batch."""

    def prepare(self, job: TrainingJob) -> Callable[[], Any]:
        """Pad the batches, as they are padded for every engine.

        Parameters
        ----------
        job : TrainingJob
            The batches.

        Returns
        -------
        Callable[[], Any]
            A step on each of them: forward, loss, backward, Adam.
        """
        batches = self._padded(job)

        def steps() -> None:
            for batch in batches:
                self._loss(batch).backward()
                self._adam.step()
                self._adam.zero_grad()

        return steps

    def losses(self, job: TrainingJob) -> list[float]:
        """Compute losses without dropout, but otherwise as in a step.

        Parameters
        ----------
        job : TrainingJob
            The batches.

        Returns
        -------
        list[float]
            The loss of each batch.
        """
        self._set_dropout(0.0)
        try:
            return [self._loss(batch).item() for batch in self._padded(job)]
        finally:
            self._set_dropout(DROPOUT)

    def _padded(self, job: TrainingJob) -> list[dict[str, torch.Tensor]]:
        batches = [self._collate(pairs) for pairs in job.batches]
        return [{**batch, "decoder_input_ids": self._decoder_inputs(batch["labels"])} for batch in batches]

    def _set_dropout(self, rate: float) -> None:
        for module, name in self._dropouts:
            setattr(module, name, rate)


class VaswaniTraining(Trainer):
    """Train with this package: an unpadded batch, and a loss that never keeps all logits.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model whose weights are taken.
    threads : int
        Not used: torch has its number of threads for the whole process.
    """

    name = "vaswani"
    expressed = None
    package = "vaswani"

    def _build(self, model: VaswaniForConditionalGeneration) -> nn.Module:
        config = copy.deepcopy(model.config)
        config.dropout, config.attention_dropout, config.activation_dropout = DROPOUT, 0.0, 0.0
        config.label_smoothing = SMOOTHING
        network = VaswaniForConditionalGeneration(config)
        network.load_state_dict(model.state_dict())
        return network

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.network(**batch).loss
        return loss


class _TransformersTraining(Trainer):
    """An engine that trains a model of transformers, with the label smoother of its Trainer."""

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "decoder_input_ids")}
        loss: torch.Tensor = LabelSmoother(self.smoothing)(self.network(**inputs, use_cache=False), batch["labels"])
        return loss


class MarianTraining(_TransformersTraining):
    """Train `MarianMTModel` of transformers.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model whose weights are converted.
    threads : int
        Not used: torch has its number of threads for the whole process.
    """

    name = "marian"
    expressed = EXPRESSED

    def _build(self, model: VaswaniForConditionalGeneration) -> nn.Module:
        return to_marian(model)


class BartTraining(_TransformersTraining):
    """Train `BartForConditionalGeneration` of transformers, of equal dimensions.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model whose dimensions are taken.
    threads : int
        Not used: torch has its number of threads for the whole process.

    Notes
    -----
    Its positions are learnt and its embeddings are normalised, so the weights cannot be converted: they are random, and
    its loss is not compared.
    """

    name = "bart"
    is_comparable = False

    def _build(self, model: VaswaniForConditionalGeneration) -> nn.Module:
        torch.manual_seed(0)
        fields = shared_fields(model.config)
        return BartForConditionalGeneration(
            BartConfig(**fields, bos_token_id=model.config.bos_token_id, dropout=DROPOUT)
        )


class TorchTransformer(nn.Module):
    """`torch.nn.Transformer` with the weights of a model, between embedding and output embedding.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model.

    Raises
    ------
    ValueError
        If the model has what the peers lack.

    Notes
    -----
    torch ends both stacks with one more layer normalisation and applies dropout to attention weights and activations,
    which the paper does not; here it does neither. Its attention has biases; they are zero where the model has none.
    """

    positions: torch.Tensor

    def __init__(self, model: VaswaniForConditionalGeneration) -> None:
        super().__init__()
        config = model.config
        refuse_what_peers_lack(config)
        options: dict[str, Any] = {
            "d_model": config.d_model,
            "nhead": config.num_attention_heads,
            "dim_feedforward": config.d_ff,
            "dropout": DROPOUT,
            "layer_norm_eps": config.layer_norm_eps,
            "batch_first": True,
        }
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**options), config.encoder_layers, enable_nested_tensor=False
        )
        decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**options), config.decoder_layers)
        self.transformer = nn.Transformer(
            config.d_model,
            config.num_attention_heads,
            custom_encoder=encoder,
            custom_decoder=decoder,
            batch_first=True,
        )
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.scale = math.sqrt(config.d_model)
        self.dropout = nn.Dropout(DROPOUT)
        table = sinusoidal_positions(torch.arange(POSITIONS), config.d_model).float()
        self.register_buffer("positions", table, persistent=False)
        with torch.no_grad():
            self.embedding.weight.copy_(model.get_input_embeddings().weight)  # type: ignore[arg-type]
        for stack, own in ((encoder, model.model.encoder), (decoder, model.model.decoder)):
            for layer, own_layer in zip(stack.layers, own.layers, strict=True):
                _copy_layer(layer, own_layer)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor
    ) -> torch.Tensor:
        """Compute the logits of the next token at every target position.

        Parameters
        ----------
        input_ids : torch.Tensor
            Source token ids, of shape (batch, source).
        attention_mask : torch.Tensor
            1 for a real source token, 0 for padding.
        decoder_input_ids : torch.Tensor
            Target token ids shifted right by one, of shape (batch, target).

        Returns
        -------
        torch.Tensor
            Logits of shape (batch, target, vocabulary).
        """
        padding = attention_mask == 0
        length = decoder_input_ids.shape[1]
        states = self.transformer(
            self._embed(input_ids),
            self._embed(decoder_input_ids),
            tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return nn.functional.linear(states, self.embedding.weight)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.dropout(self.embedding(ids) * self.scale + self.positions[: ids.shape[1]])
        return embedded


def _copy_layer(layer: Any, own: Any) -> None:
    """Copy the weights of one layer, and leave dropout only where the paper has it."""
    attentions = [(layer.self_attn, own.self_attn)]
    norms = [(layer.norm1, own.self_attn_layer_norm), (layer.norm2, own.feed_forward_layer_norm)]
    if hasattr(own, "encoder_attn"):
        attentions.append((layer.multihead_attn, own.encoder_attn))
        norms[1:] = [(layer.norm2, own.encoder_attn_layer_norm), (layer.norm3, own.feed_forward_layer_norm)]
    for attention, own_attention in attentions:
        _copy_attention(attention, own_attention)
    for module, own_module in [*norms, (layer.linear1, own.feed_forward.fc1), (layer.linear2, own.feed_forward.fc2)]:
        module.load_state_dict(own_module.state_dict())
    layer.dropout.p = 0.0


@torch.no_grad()
def _copy_attention(attention: nn.MultiheadAttention, own: Any) -> None:
    projections = [own.q_proj, own.k_proj, own.v_proj]
    attention.dropout = 0.0
    attention.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
    attention.out_proj.weight.copy_(own.out_proj.weight)
    biases = [attention.in_proj_bias, attention.out_proj.bias]
    if own.out_proj.bias is None:
        for bias in biases:
            bias.zero_()
    else:
        biases[0].copy_(torch.cat([projection.bias for projection in projections]))
        biases[1].copy_(own.out_proj.bias)


class TorchTraining(Trainer):
    """Train `torch.nn.Transformer` with torch's own cross-entropy.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model whose weights are converted.
    threads : int
        Not used: torch has its number of threads for the whole process.
    """

    name = "torch"
    package = "torch"

    def _build(self, model: VaswaniForConditionalGeneration) -> nn.Module:
        return TorchTransformer(model)

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self.network(batch["input_ids"], batch["attention_mask"], batch["decoder_input_ids"])
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE_INDEX, label_smoothing=self.smoothing
        )


TRAINERS: dict[str, type[Trainer]] = {
    engine.name: engine for engine in (VaswaniTraining, MarianTraining, BartTraining, TorchTraining)
}

__all__ = ["TRAINERS", "TorchTransformer", "Trainer"]
