"""A training step on unpadded batches: the layers see the real tokens of all sequences, one after the other.

Linear layers, embeddings and activations are called as modules, so adapters stay what they are; attention, residual
connections and the loss go through the kernels where they can.
Dimension letters in shape comments: M real tokens of a batch, D d_model, H heads, K d_k.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import Seq2SeqLMOutput

from ..configuration_vaswani import IGNORE_INDEX
from ..kernels import library
from ..kernels.residual import residual_norm
from ..modeling_vaswani import smoothed_cross_entropy
from .attention import attend_unpadded
from .loss import fused_loss
from .unpadding import Unpadding


def training_step(model: Any, inputs: dict[str, Any], is_unpadded: bool, is_fused: bool) -> Seq2SeqLMOutput:
    """Compute the loss of a batch in training.

    Parameters
    ----------
    model : Any
        A `VaswaniForConditionalGeneration` for which the door chose this path.
    inputs : dict[str, Any]
        Arguments of its `forward` that are not None.
    is_unpadded : bool
        Whether the layers shall see an unpadded batch.
    is_fused : bool
        Whether the loss shall be computed together with the output projection.

    Returns
    -------
    Seq2SeqLMOutput
        The loss; logits and the encoder's states are computed when they are first read.
    """
    inputs = {**inputs, "use_cache": False}
    num_items_in_batch, labels = inputs.pop("num_items_in_batch", None), inputs.pop("labels")
    inputs.pop("logits_to_keep", None)
    names = ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask")
    is_mask_given = "decoder_attention_mask" in inputs
    token_ids, mask = model.prepare_targets(labels, *map(inputs.get, names))
    inputs.update(decoder_input_ids=token_ids, decoder_attention_mask=mask)
    if is_unpadded:
        if mask is not None and not is_mask_given:  # what follows the last label has no effect
            inputs["decoder_attention_mask"] = mask & ((labels != IGNORE_INDEX).flip(-1).cumsum(-1).flip(-1) > 0)
        states, target, encoder_states, source = _unpadded_states(model.model, inputs)
        labels = target.unpad(labels)
        output = _lazy_output(
            {
                "logits": lambda: model.lm_head(target.pad(states)),
                "encoder_last_hidden_state": lambda: source.pad(encoder_states),
            }
        )
    else:
        outputs = model.model(**inputs)
        states, labels = outputs.last_hidden_state.flatten(0, 1), labels.flatten()
        others = {name: outputs[name] for name in outputs if name != "last_hidden_state"}
        output = _lazy_output({"logits": functools.partial(model.lm_head, outputs.last_hidden_state)}, **others)

    is_real = labels != IGNORE_INDEX
    rows, labels = states[is_real], labels[is_real]
    label_smoothing = model.config.label_smoothing
    count = max(len(labels), 1) if num_items_in_batch is None else num_items_in_batch
    if is_fused and type(rows) is torch.Tensor:  # a body that goes through modules may return other tensors
        weight, bias = model.lm_head.weight, model.lm_head.bias
        output["loss"] = fused_loss(rows, weight, bias, labels, label_smoothing, 1 / float(count))
    else:
        output["loss"] = smoothed_cross_entropy(model.lm_head(rows), labels, label_smoothing, count)
    return output


def _lazy_output(later: dict[str, Callable[[], torch.Tensor]], **others: Any) -> Seq2SeqLMOutput:
    """Return an output with some tensors, and others that are computed when they are first read."""
    output = _LazyOutput(**others)
    vars(output)["_later"] = later
    return output


class _LazyOutput(Seq2SeqLMOutput):
    """A `Seq2SeqLMOutput` some of whose tensors are computed when they are first read.

    Notes
    -----
    Where torch takes outputs apart and puts them together again, as `DistributedDataParallel` does, what was not
    computed before is None afterwards.
    """

    def _read(self, name: str) -> Any:
        later = vars(self).get("_later", {})
        if name in later:
            self[name] = later.pop(name)()
        return vars(self).get(name)

    def _write(self, value: Any, name: str) -> None:
        vars(self)[name] = value

    logits = property(lambda self: self._read("logits"), lambda self, value: self._write(value, "logits"))
    encoder_last_hidden_state = property(
        lambda self: self._read("encoder_last_hidden_state"),
        lambda self, value: self._write(value, "encoder_last_hidden_state"),
    )

    def __getitem__(self, key: Any) -> Any:
        if key in (0, "loss"):
            return self.loss
        if isinstance(key, str):
            value = getattr(self, key, None)
            if value is None:
                raise KeyError(key)
            return value
        return self.to_tuple()[key]

    def __reduce__(self) -> Any:
        self.to_tuple()  # a copy has every tensor
        return super().__reduce__()

    def to_tuple(self) -> tuple[Any, ...]:
        """Return every tensor, in the order of the fields.

        Returns
        -------
        tuple[Any, ...]
            Loss, logits, and the others that there are.
        """
        values = (getattr(self, name) for name in self.__dataclass_fields__)
        return tuple(value for value in values if value is not None)


def _unpadded_states(model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, Unpadding, torch.Tensor, Unpadding]:
    """Return the states of the decoder and of the encoder (M, D), each with the unpadding of its batch."""
    encoder_states, source = _embed(model.encoder, inputs, "")
    for layer in model.encoder.layers:
        encoder_states = _apply(layer, _encoder_layer, encoder_states, source=source)
    encoder_states = model.encoder.final_layer_norm(encoder_states)
    states, target = _embed(model.decoder, inputs, "decoder_")
    for layer in model.decoder.layers:
        states = _apply(layer, _decoder_layer, states, encoder_states, target=target, source=source)
    return model.decoder.final_layer_norm(states), target, encoder_states, source


def _embed(stack: Any, inputs: dict[str, Any], side: str) -> tuple[torch.Tensor, Unpadding]:
    """Return the first layer's input (M, D)."""
    names = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
    token_ids, embeds, mask, position_ids = (inputs.get(f"{side}{name}") for name in names)
    given: Any = embeds if token_ids is None else token_ids
    unpadding = Unpadding.of(mask, given)
    is_counted = position_ids is None
    if position_ids is None:
        position_ids = (unpadding.mask.long().cumsum(-1) - 1).clamp(min=0)
    position_ids = unpadding.unpad(position_ids.expand(unpadding.mask.shape))
    given = unpadding.unpad(given)
    embeds = given if token_ids is None else stack.embed_tokens(given)
    if is_counted and stack.config.position_encoding == "sinusoidal":  # a look-up is faster than sines for every token
        positions = stack.encode_positions(torch.arange(unpadding.max_length)).to(embeds)[position_ids]
    else:
        positions = stack.encode_positions(position_ids).to(embeds)
    return stack.dropout(embeds * stack.embed_scale + positions), unpadding


def _apply(
    layer: Any, function: Callable[..., torch.Tensor], *states: torch.Tensor, **where: Unpadding
) -> torch.Tensor:
    """Apply a layer, checkpointed where that is switched on."""
    compute = functools.partial(function, layer, **where)
    if layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(compute, *states)
    return compute(*states)


def _encoder_layer(layer: Any, states: torch.Tensor, source: Unpadding) -> torch.Tensor:
    attended = _attend(layer.self_attn, states, states, source, source)
    states = add_and_norm(layer.self_attn_layer_norm, layer.dropout, states, attended)
    return add_and_norm(layer.feed_forward_layer_norm, layer.dropout, states, layer.feed_forward(states))


def _decoder_layer(
    layer: Any, states: torch.Tensor, encoder_states: torch.Tensor, target: Unpadding, source: Unpadding
) -> torch.Tensor:
    attended = _attend(layer.self_attn, states, states, target, target)
    states = add_and_norm(layer.self_attn_layer_norm, layer.dropout, states, attended)
    attended = _attend(layer.encoder_attn, states, encoder_states, target, source)
    states = add_and_norm(layer.encoder_attn_layer_norm, layer.dropout, states, attended)
    return add_and_norm(layer.feed_forward_layer_norm, layer.dropout, states, layer.feed_forward(states))


def _attend(
    attention: Any, states: torch.Tensor, key_value_states: torch.Tensor, queries: Unpadding, keys: Unpadding
) -> torch.Tensor:
    """Compute what `VaswaniAttention` computes, for unpadded batches (M, D)."""
    d_k, d_v = attention.config.d_k, attention.config.d_v
    attended = attend_unpadded(
        attention.q_proj(states).unflatten(-1, (-1, d_k)),  # (M, H K) -> (M, H, K)
        attention.k_proj(key_value_states).unflatten(-1, (-1, d_k)),
        attention.v_proj(key_value_states).unflatten(-1, (-1, d_v)),
        queries,
        keys,
        attention.is_causal,
        attention.scaling,
        attention.config.attention_dropout if attention.training else 0.0,
    )
    return attention.out_proj(attended.flatten(-2))


def add_and_norm(
    norm: nn.LayerNorm, dropout: nn.Dropout, hidden_states: torch.Tensor, update: torch.Tensor
) -> torch.Tensor:
    """Residual connection with dropout and layer normalisation.

    Parameters
    ----------
    norm : nn.LayerNorm
        The layer normalisation.
    dropout : nn.Dropout
        The dropout on the sub-layer's output.
    hidden_states : torch.Tensor
        The sub-layer's input, of shape (tokens, d_model).
    update : torch.Tensor
        Its output, of the same shape.

    Returns
    -------
    torch.Tensor
        `norm(hidden_states + dropout(update))`.

    Notes
    -----
    Section 3.1. Float32 goes through the kernels, in one pass over memory each way.
    """
    if hidden_states.dtype != torch.float32 or library.load() is None:
        return norm(hidden_states + dropout(update))
    probability = dropout.p if dropout.training else 0.0
    return residual_norm(hidden_states, update, norm.weight, norm.bias, norm.eps, probability)


__all__ = ["add_and_norm", "training_step"]
