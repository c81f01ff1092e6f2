"""The model: the post-LN encoder-decoder of the paper, and its loss.

Dimension letters in shape comments: B batch, S source length, T target length, L keys in reach of a query
(S, T, or T with the cached past), D d_model, F d_ff, H heads, K d_k, U d_v, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple, torch_compilable_check
from transformers.utils.generic import is_flash_attention_requested, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_vaswani import IGNORE_INDEX, VaswaniConfig
from .fast_paths_vaswani import fast_encoding, fast_training_step
from .generation_vaswani import VaswaniGenerationMixin
from .pretrained_vaswani import VaswaniPreTrainedModel


def sinusoidal_positions(position_ids: torch.Tensor, d_model: int) -> torch.Tensor:
    """Sinusoidal position encoding: sines and cosines of geometrically spaced frequencies.

    Parameters
    ----------
    position_ids : torch.Tensor
        Positions, counted from 0, of any shape.
    d_model : int
        Width of the encoding; even.

    Returns
    -------
    torch.Tensor
        The encoding in float64, of shape (*position_ids.shape, d_model): sine at each even index, cosine of the
        same angle at the odd index after it.

    Notes
    -----
    Section 3.5. Nothing is stored, so there is no length limit and no buffer that loading, casting or moving could
    spoil. An angle in float32 would be off by 8e-3 at position 100,000, hence float64 until the very end; Apple's
    GPUs lack it, and for them the angles are formed on the CPU.
    """
    device = torch.device("cpu") if position_ids.device.type == "mps" else position_ids.device
    even = torch.arange(0, d_model, 2, dtype=torch.float64, device=device)
    angles = position_ids.to(device, torch.float64).unsqueeze(-1) * 10000.0 ** (-even / d_model)  # (..., D/2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)  # (..., D)


def positions_of(attention_mask: torch.Tensor) -> torch.Tensor:
    """Derive position ids from an attention mask, so that padding on either side moves no position.

    Parameters
    ----------
    attention_mask : torch.Tensor
        1 for a real token, 0 for padding, of shape (batch, length).

    Returns
    -------
    torch.Tensor
        Positions of the same shape, 0 for padding before the first real token.
    """
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def smoothed_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Label-smoothed cross-entropy: the sum over real target tokens, divided by their number.

    Parameters
    ----------
    logits : torch.Tensor
        Scores before the softmax, of shape (batch, length, vocabulary).
    labels : torch.Tensor
        Target token ids, of shape (batch, length); -100 is ignored.
    label_smoothing : float
        Probability that the target distribution takes from the label and gives, in equal parts, to the V - 1 other
        tokens.
    num_items_in_batch : torch.Tensor | int | None, default=None
        Number to divide the sum by, where the batch is a part of a larger one. By default the number of real tokens.

    Returns
    -------
    torch.Tensor
        The loss, a scalar in float32.

    Notes
    -----
    Section 5.4, in the form of the authors' code. torch spreads its smoothing over all V tokens, the label
    included; smoothing by eps V / (V - 1) there is smoothing by eps here.
    """
    vocab_size = logits.shape[-1]
    labels = labels.to(logits.device)
    total = nn.functional.cross_entropy(
        logits.float().reshape(-1, vocab_size),
        labels.reshape(-1),
        ignore_index=IGNORE_INDEX,
        label_smoothing=label_smoothing * vocab_size / max(vocab_size - 1, 1),
        reduction="sum",
    )
    if num_items_in_batch is None:
        num_items_in_batch = (labels != IGNORE_INDEX).sum().clamp(min=1)
    elif isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot-product attention, written as the formula has it.

    Parameters
    ----------
    module : nn.Module
        The attention sub-layer; its mode decides on dropout.
    query : torch.Tensor
        Queries, of shape (batch, heads, queries, d_k).
    key : torch.Tensor
        Keys, of shape (batch, heads, keys, d_k).
    value : torch.Tensor
        Values, of shape (batch, heads, keys, d_v).
    attention_mask : torch.Tensor | None
        Added to the scores: 0 where a key may be attended to, a very low number elsewhere.
    scaling : float
        Factor on the scores.
    dropout : float, default=0.0
        Dropout on the weights.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        Outputs of shape (batch, queries, heads, d_v) and weights of shape (batch, heads, queries, keys).

    Notes
    -----
    Section 3.2.1, `softmax(Q K^T / sqrt(d_k)) V`.
    """
    scores = query @ key.transpose(-2, -1) * scaling  # (B, H, T, L)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.dropout(scores.softmax(dim=-1), p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights  # (B, T, H, U), (B, H, T, L)


class VaswaniAttention(nn.Module):
    """Multi-head attention: self-attention, or cross-attention to another sequence.

    Parameters
    ----------
    config : VaswaniConfig
        Sets the width, the heads and the dropout on attention weights.
    layer_idx : int
        Index of the layer in its stack, and in key-value caches.
    is_causal : bool, default=False
        Whether a position attends only to itself and to earlier ones.
    is_cross : bool, default=False
        Whether keys and values come from another sequence.

    Notes
    -----
    Section 3.2.2. Dropout, residual and normalisation (section 3.1) belong to the sub-layer that calls this.

    The authors' code projects to queries, keys and values by one matrix, and in cross-attention to keys and values.
    Here the projections are separate, but initialised as parts of that matrix: `joint_fan_out` is its width. With the
    larger initial weights of separate matrices the encoder's states become alike, and small models learn badly.
    """

    def __init__(self, config: VaswaniConfig, layer_idx: int, is_causal: bool = False, is_cross: bool = False) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.scaling = config.d_k**-0.5

        heads, bias = config.num_attention_heads, config.attention_bias
        self.q_proj = nn.Linear(config.d_model, heads * config.d_k, bias=bias)
        self.k_proj = nn.Linear(config.d_model, heads * config.d_k, bias=bias)
        self.v_proj = nn.Linear(config.d_model, heads * config.d_v, bias=bias)
        self.out_proj = nn.Linear(heads * config.d_v, config.d_model, bias=bias)

        joint = [self.k_proj, self.v_proj] if is_cross else [self.q_proj, self.k_proj, self.v_proj]
        for projection in joint:
            projection.joint_fan_out = sum(part.out_features for part in joint)  # type: ignore[assignment]

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `hidden_states` to `key_value_states`, or to `hidden_states` itself.

        Parameters
        ----------
        hidden_states : torch.Tensor
            States projected to queries, of shape (batch, queries, d_model).
        attention_mask : torch.Tensor | None, default=None
            Which keys a query may attend to, in the form that the attention back end takes.
        key_value_states : torch.Tensor | None, default=None
            States projected to keys and values, of shape (batch, keys, d_model): the encoder's output. None means
            self-attention.
        past_key_values : EncoderDecoderCache | None, default=None
            Key-value cache of earlier steps, which this call extends.
        **kwargs : Unpack[TransformersKwargs]
            Options of the attention back end.

        Returns
        -------
        tuple[torch.Tensor, torch.Tensor | None]
            The output, of shape (batch, queries, d_model), and the weights, of shape (batch, heads, queries, keys),
            where the back end returns them.
        """
        d_k, d_v = self.config.d_k, self.config.d_v
        query = self._split_heads(self.q_proj(hidden_states), d_k)  # (B, H, T, K)
        key, value = self._keys_and_values(hidden_states, key_value_states, past_key_values)
        dropout = self.config.attention_dropout if self.training else 0.0
        # Flash attention takes one head width; zeros change nothing.
        if d_k != d_v and is_flash_attention_requested(self.config):
            query, key, value = (nn.functional.pad(x, (0, max(d_k, d_v) - x.shape[-1])) for x in (query, key, value))

        attend: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention
        )
        attended, weights = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout, **kwargs
        )
        return self.out_proj(attended[..., :d_v].flatten(-2)), weights  # (B, T, H, U) -> (B, T, D)

    def _keys_and_values(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None,
        past_key_values: EncoderDecoderCache | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys (B, H, L, K) and values (B, H, L, U), projected now or cached."""
        is_cross_attention = key_value_states is not None
        cache: Any = None
        if past_key_values is not None:
            cross, causal = past_key_values.cross_attention_cache, past_key_values.self_attention_cache
            cache = cross if is_cross_attention else causal
            if is_cross_attention and past_key_values.is_updated.get(self.layer_idx):
                return cache.layers[self.layer_idx].keys, cache.layers[self.layer_idx].values

        source = key_value_states if is_cross_attention else hidden_states
        key = self._split_heads(self.k_proj(source), self.config.d_k)
        value = self._split_heads(self.v_proj(source), self.config.d_v)
        if past_key_values is not None:
            key, value = cache.update(key, value, self.layer_idx)
            if is_cross_attention:
                past_key_values.is_updated[self.layer_idx] = True
        return key, value

    @staticmethod
    def _split_heads(projected: torch.Tensor, head_width: int) -> torch.Tensor:
        # The number of heads is left open: under tensor parallelism each process holds only some of them.
        return projected.unflatten(-1, (-1, head_width)).transpose(1, 2)  # (B, L, H K) -> (B, H, L, K)


class VaswaniFeedForward(nn.Module):
    """Position-wise feed-forward network: two linear layers with an activation between them.

    Parameters
    ----------
    config : VaswaniConfig
        Sets the two widths, the activation and the dropout after it.
    is_decoder : bool, default=False
        Whether the decoder's width between the two layers applies, where it has another one.

    Notes
    -----
    Section 3.3, `max(0, x W1 + b1) W2 + b2`.
    """

    def __init__(self, config: VaswaniConfig, is_decoder: bool = False) -> None:
        super().__init__()
        d_ff = config.decoder_ffn_dim if is_decoder else config.d_ff
        self.fc1 = nn.Linear(config.d_model, d_ff)
        self.activation = ACT2FN[config.activation_function]
        self.dropout = nn.Dropout(config.activation_dropout)
        self.fc2 = nn.Linear(d_ff, config.d_model)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Apply the network to any number of positions.

        Parameters
        ----------
        hidden_states : torch.Tensor
            States, of shape (..., d_model).

        Returns
        -------
        torch.Tensor
            New states of the same shape.
        """
        return self.fc2(self.dropout(self.activation(self.fc1(hidden_states))))  # (..., D) -> (..., F) -> (..., D)


class VaswaniEncoderLayer(GradientCheckpointingLayer):
    """Encoder layer: self-attention, then feed-forward, each with residual connection and post-LN.

    Parameters
    ----------
    config : VaswaniConfig
        Sets the dimensions and the dropouts.
    layer_idx : int
        Index of the layer in the encoder.

    Notes
    -----
    Section 3.1: each sub-layer's output is `LayerNorm(x + Dropout(Sublayer(x)))`.
    """

    def __init__(self, config: VaswaniConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = VaswaniAttention(config, layer_idx)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.feed_forward = VaswaniFeedForward(config)
        self.feed_forward_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Apply the two sub-layers.

        Parameters
        ----------
        hidden_states : torch.Tensor
            Source states, of shape (batch, source, d_model).
        attention_mask : torch.Tensor | None, default=None
            Which source positions are real, in the form that the attention back end takes.
        **kwargs : Unpack[TransformersKwargs]
            Options of the attention back end.

        Returns
        -------
        torch.Tensor
            New source states of the same shape.
        """
        attended, _ = self.self_attn(hidden_states, attention_mask, **kwargs)
        hidden_states = self.self_attn_layer_norm(hidden_states + self.dropout(attended))

        transformed = self.feed_forward(hidden_states)
        return self.feed_forward_layer_norm(hidden_states + self.dropout(transformed))


class VaswaniDecoderLayer(GradientCheckpointingLayer):
    """Decoder layer: causal self-attention, cross-attention, then feed-forward, each with residual and post-LN.

    Parameters
    ----------
    config : VaswaniConfig
        Sets the dimensions and the dropouts.
    layer_idx : int
        Index of the layer in the decoder.

    Notes
    -----
    Section 3.1: each sub-layer's output is `LayerNorm(x + Dropout(Sublayer(x)))`.
    """

    def __init__(self, config: VaswaniConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = VaswaniAttention(config, layer_idx, is_causal=True)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.encoder_attn = VaswaniAttention(config, layer_idx, is_cross=True)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.feed_forward = VaswaniFeedForward(config, is_decoder=True)
        self.feed_forward_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Apply the three sub-layers.

        Parameters
        ----------
        hidden_states : torch.Tensor
            Target states, of shape (batch, target, d_model).
        encoder_hidden_states : torch.Tensor
            The encoder's output, of shape (batch, source, d_model).
        attention_mask : torch.Tensor | None, default=None
            Which target positions a target position may attend to, in the form that the attention back end takes.
        encoder_attention_mask : torch.Tensor | None, default=None
            Which source positions are real, in the form that the attention back end takes.
        past_key_values : EncoderDecoderCache | None, default=None
            Keys and values of earlier steps.
        **kwargs : Unpack[TransformersKwargs]
            Options of the attention back end.

        Returns
        -------
        torch.Tensor
            New target states of the same shape.
        """
        attended, _ = self.self_attn(hidden_states, attention_mask, past_key_values=past_key_values, **kwargs)
        hidden_states = self.self_attn_layer_norm(hidden_states + self.dropout(attended))

        attended, _ = self.encoder_attn(
            hidden_states,
            encoder_attention_mask,
            key_value_states=encoder_hidden_states,
            past_key_values=past_key_values,
            **kwargs,
        )
        hidden_states = self.encoder_attn_layer_norm(hidden_states + self.dropout(attended))

        transformed = self.feed_forward(hidden_states)
        return self.feed_forward_layer_norm(hidden_states + self.dropout(transformed))


class VaswaniStack(VaswaniPreTrainedModel):
    """Base class of encoder and decoder: token embedding plus position encoding.

    Parameters
    ----------
    config : VaswaniConfig
        Sets the width, the kind of positions and the dropout.
    vocab_size : int
        Entries of this side's vocabulary.

    Notes
    -----
    Sections 3.4 and 3.5: embeddings times sqrt(d_model), plus positions, then dropout (section 5.4).
    """

    def __init__(self, config: VaswaniConfig, vocab_size: int) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model)
        self.embed_scale = math.sqrt(config.d_model)
        if config.position_encoding == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.d_model)
        elif config.position_encoding == "fixed":
            self.register_buffer("position_table", torch.empty(config.max_position_embeddings, config.d_model))
        self.dropout = nn.Dropout(config.dropout)
        self.final_layer_norm: nn.Module = nn.Identity()  # a layer of the paper ends with its own
        if config.final_layer_norm:
            self.final_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False

    def encode_positions(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Compute or look up position encodings.

        Parameters
        ----------
        position_ids : torch.Tensor
            Positions, counted from 0, of any shape.

        Returns
        -------
        torch.Tensor
            Encodings of shape (*position_ids.shape, d_model).
        """
        if self.config.position_encoding == "sinusoidal":
            return sinusoidal_positions(position_ids, self.config.d_model)
        limit = self.config.max_position_embeddings
        torch_compilable_check(
            (position_ids < limit).all(),
            f"A sequence is longer than the {limit} positions in this model's table (max_position_embeddings). "
            "Shorten it, or use a model with sinusoidal positions, which have no limit.",
        )
        if self.config.position_encoding == "learned":
            return self.embed_positions(position_ids)
        return nn.functional.embedding(position_ids, self.position_table)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise one module; a table of fixed positions has the sinusoids at first."""
        super()._init_weights(module)
        if module is self and self.config.position_encoding == "fixed":
            positions = torch.arange(self.config.max_position_embeddings)
            init.copy_(self.position_table, sinusoidal_positions(positions, self.config.d_model))

    def _embed(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Return the first layer's input (B, T, D) for token embeddings (B, T, D) at positions (B or 1, T)."""
        positions = self.encode_positions(position_ids).to(inputs_embeds)
        return self.dropout(inputs_embeds * self.embed_scale + positions)


class VaswaniEncoder(VaswaniStack):
    """Encoder: embeddings, positions and `encoder_layers` layers.

    Parameters
    ----------
    config : VaswaniConfig
        Configuration of the whole model.
    """

    _can_record_outputs = {"hidden_states": VaswaniEncoderLayer, "attentions": VaswaniAttention}
    _tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.out_proj": "rowwise",
        "layers.*.feed_forward.fc1": "colwise",
        "layers.*.feed_forward.fc2": "rowwise",
    }
    _fsdp_plan = {"layers.*": "free_full_weight"}

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config, config.source_vocab_size or config.vocab_size)
        self.layers = nn.ModuleList(VaswaniEncoderLayer(config, idx) for idx in range(config.encoder_layers))
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @fast_encoding
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode source sequences.

        Parameters
        ----------
        input_ids : torch.Tensor | None, default=None
            Source token ids, of shape (batch, source).
        attention_mask : torch.Tensor | None, default=None
            1 for a real token, 0 for padding, on either side. None means that all are real.
        position_ids : torch.Tensor | None, default=None
            Positions, if not the count of real tokens before each token.
        inputs_embeds : torch.Tensor | None, default=None
            Rows of `embed_tokens`, unscaled, instead of `input_ids`.
        **kwargs : Unpack[TransformersKwargs]
            `output_attentions`, `output_hidden_states`, and options of the attention back end.

        Returns
        -------
        BaseModelOutput
            The last layer's states, of shape (batch, source, d_model), and what else was requested.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give the source exactly once: as input_ids or as inputs_embeds.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if position_ids is None:
            if attention_mask is not None and attention_mask.ndim == 2:
                position_ids = positions_of(attention_mask)
            else:
                position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device).unsqueeze(0)
        hidden_states = self._embed(inputs_embeds, position_ids)
        visible = create_bidirectional_mask(
            config=self.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask
        )
        for layer in self.layers:
            hidden_states = layer(hidden_states, visible, **kwargs)
        return BaseModelOutput(last_hidden_state=self.final_layer_norm(hidden_states))


class VaswaniDecoder(VaswaniStack):
    """Decoder: embeddings, positions and `decoder_layers` layers.

    Parameters
    ----------
    config : VaswaniConfig
        Configuration of the whole model.
    """

    _can_record_outputs = {
        "hidden_states": VaswaniDecoderLayer,
        "attentions": OutputRecorder(VaswaniAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(VaswaniAttention, index=1, layer_name="encoder_attn"),
    }
    _tp_plan = {
        **VaswaniEncoder._tp_plan,
        "layers.*.encoder_attn.q_proj": "colwise",
        "layers.*.encoder_attn.k_proj": "colwise",
        "layers.*.encoder_attn.v_proj": "colwise",
        "layers.*.encoder_attn.out_proj": "rowwise",
    }
    _fsdp_plan = {"layers.*": "free_full_weight"}

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config, config.vocab_size)
        self.layers = nn.ModuleList(VaswaniDecoderLayer(config, idx) for idx in range(config.decoder_layers))
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode target sequences, whole or step by step.

        Parameters
        ----------
        input_ids : torch.Tensor | None, default=None
            Target token ids shifted right by one, of shape (batch, target): all, or those that the cache lacks.
        attention_mask : torch.Tensor | None, default=None
            1 for a real token, 0 for padding, over the cached tokens too. None means that all are real.
        position_ids : torch.Tensor | None, default=None
            Positions, if not the count of real tokens before each token.
        encoder_hidden_states : torch.Tensor | None, default=None
            The encoder's output, of shape (batch, source, d_model). Required.
        encoder_attention_mask : torch.Tensor | None, default=None
            1 for a real source token, 0 for padding.
        past_key_values : Cache | None, default=None
            Keys and values of earlier steps.
        inputs_embeds : torch.Tensor | None, default=None
            Rows of `embed_tokens`, unscaled, instead of `input_ids`.
        use_cache : bool | None, default=None
            Whether to return keys and values for the next step. By default as the configuration says.
        **kwargs : Unpack[TransformersKwargs]
            `output_attentions`, `output_hidden_states`, and options of the attention back end.

        Returns
        -------
        BaseModelOutputWithPastAndCrossAttentions
            The last layer's states, of shape (batch, target, d_model), the cache, and what else was requested.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give the target exactly once: as decoder_input_ids or as decoder_inputs_embeds.")
        if encoder_hidden_states is None:
            raise ValueError("The decoder needs encoder_hidden_states, the encoder's output.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None and not isinstance(past_key_values, EncoderDecoderCache):
            past_key_values = EncoderDecoderCache(past_key_values, DynamicCache(config=self.config))
        if position_ids is None:
            length = inputs_embeds.shape[1]
            if attention_mask is not None and attention_mask.ndim == 2:
                position_ids = positions_of(attention_mask)[:, -length:]
            else:
                past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
                position_ids = (torch.arange(length, device=inputs_embeds.device) + past_length).unsqueeze(0)
        hidden_states = self._embed(inputs_embeds, position_ids)
        visible = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=None if past_key_values is None else past_key_values.self_attention_cache,
        )
        visible_source = create_bidirectional_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=encoder_attention_mask,
            encoder_hidden_states=encoder_hidden_states,
        )
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                encoder_hidden_states,
                attention_mask=visible,
                encoder_attention_mask=visible_source,
                past_key_values=past_key_values,
                **kwargs,
            )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.final_layer_norm(hidden_states), past_key_values=past_key_values
        )


class VaswaniModel(VaswaniPreTrainedModel):
    """Encoder-decoder without a language-model head.

    Parameters
    ----------
    config : VaswaniConfig
        Configuration of the whole model.
    """

    _tied_weights_keys = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config)
        self.encoder = VaswaniEncoder(config)
        self.decoder = VaswaniDecoder(config)
        if config.source_vocab_size is not None:
            self._tied_weights_keys = {}
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the source embedding, to which target embedding and head are tied by default.

        Returns
        -------
        nn.Module
            The encoder's `embed_tokens`; with a source vocabulary of its own, nothing is tied to it.
        """
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the embedding of the encoder and, where they are tied, of the decoder.

        Parameters
        ----------
        value : nn.Embedding
            The new embedding.
        """
        self.encoder.embed_tokens = value
        if self.config.tie_word_embeddings and self.config.source_vocab_size is None:
            self.decoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[torch.Tensor, ...] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encode the source, unless that is done, and decode the target.

        Parameters
        ----------
        input_ids : torch.Tensor | None, default=None
            Source token ids, of shape (batch, source).
        attention_mask : torch.Tensor | None, default=None
            1 for a real source token, 0 for padding, on either side. None means that all are real.
        position_ids : torch.Tensor | None, default=None
            Source positions, if not the count of real tokens before each token.
        decoder_input_ids : torch.Tensor | None, default=None
            Target token ids shifted right by one, of shape (batch, target). By default the start token alone.
        decoder_attention_mask : torch.Tensor | None, default=None
            1 for a real target token, 0 for padding, over the cached tokens too. None means that all are real.
        decoder_position_ids : torch.Tensor | None, default=None
            Target positions, if not the count of real tokens before each token.
        encoder_outputs : BaseModelOutput | tuple[torch.Tensor, ...] | None, default=None
            The encoder's output for this source, if it was computed before.
        past_key_values : Cache | None, default=None
            Keys and values of earlier steps.
        inputs_embeds : torch.Tensor | None, default=None
            Rows of the embedding, unscaled, instead of `input_ids`.
        decoder_inputs_embeds : torch.Tensor | None, default=None
            Rows of the embedding, unscaled, instead of `decoder_input_ids`.
        use_cache : bool | None, default=None
            Whether to return keys and values for the next step. By default as the configuration says.
        **kwargs : Unpack[TransformersKwargs]
            `output_attentions`, `output_hidden_states`, and options of the attention back end.

        Returns
        -------
        Seq2SeqModelOutput
            The decoder's states, of shape (batch, target, d_model), the cache, and the encoder's output.
        """
        if encoder_outputs is None:
            if attention_mask is not None and attention_mask.ndim != 2:
                raise ValueError(
                    f"attention_mask has shape {tuple(attention_mask.shape)}; it must be (batch, source), because "
                    "cross-attention reads it too. For another mask call the encoder, and give encoder_outputs."
                )
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                **kwargs,
            )
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        encoder_hidden_states = encoder_outputs.last_hidden_state

        if decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = torch.full(
                (encoder_hidden_states.shape[0], 1),
                self.config.decoder_start_token_id,
                device=encoder_hidden_states.device,
            )
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            position_ids=decoder_position_ids,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_hidden_states,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


class VaswaniForConditionalGeneration(VaswaniPreTrainedModel, VaswaniGenerationMixin):
    """Encoder-decoder with a language-model head, its loss, and `generate()`.

    Parameters
    ----------
    config : VaswaniConfig
        Configuration of the whole model.

    Notes
    -----
    Section 3.4: the head is the embedding matrix, without scale and, unless `output_bias` asks for it, without bias.
    """

    _tied_weights_keys = {
        "model.decoder.embed_tokens.weight": "model.encoder.embed_tokens.weight",
        "lm_head.weight": "model.encoder.embed_tokens.weight",
    }
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config)
        self.model = VaswaniModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=config.output_bias)
        if config.source_vocab_size is not None:
            self._tied_weights_keys = {"lm_head.weight": "model.decoder.embed_tokens.weight"}
        self.post_init()

    @can_return_tuple
    @fast_training_step
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[torch.Tensor, ...] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Compute the logits of the next token at every target position and, with `labels`, the loss.

        Parameters
        ----------
        input_ids : torch.Tensor | None, default=None
            Source token ids, of shape (batch, source).
        attention_mask : torch.Tensor | None, default=None
            1 for a real source token, 0 for padding, on either side. None means that all are real.
        position_ids : torch.Tensor | None, default=None
            Source positions, if not the count of real tokens before each token.
        decoder_input_ids : torch.Tensor | None, default=None
            Target token ids shifted right by one, of shape (batch, target). By default the labels shifted right or,
            without labels, the start token alone.
        decoder_attention_mask : torch.Tensor | None, default=None
            1 for a real target token, 0 for padding, over the cached tokens too. None means that all are real but,
            with labels, the padding before the first real token.
        decoder_position_ids : torch.Tensor | None, default=None
            Target positions, if not the count of real tokens before each token.
        encoder_outputs : BaseModelOutput | tuple[torch.Tensor, ...] | None, default=None
            The encoder's output for this source, if it was computed before.
        past_key_values : Cache | None, default=None
            Keys and values of earlier steps.
        inputs_embeds : torch.Tensor | None, default=None
            Rows of the embedding, unscaled, instead of `input_ids`.
        decoder_inputs_embeds : torch.Tensor | None, default=None
            Rows of the embedding, unscaled, instead of `decoder_input_ids`.
        labels : torch.Tensor | None, default=None
            Target token ids, of shape (batch, target), not shifted; -100 is ignored.
        use_cache : bool | None, default=None
            Whether to return keys and values for the next step. By default as the configuration says, and never
            with labels.
        logits_to_keep : int | torch.Tensor, default=0
            Positions whose logits are computed: the last so many, all for 0, or those that a tensor names.
        num_items_in_batch : torch.Tensor | int | None, default=None
            Number of target tokens over all devices and micro-batches of this step; the Trainer gives it. The loss is
            the sum over this batch divided by it, or by the batch's own number of target tokens.
        **kwargs : Unpack[TransformersKwargs]
            `output_attentions`, `output_hidden_states`, and options of the attention back end.

        Returns
        -------
        Seq2SeqLMOutput
            The loss, the logits of shape (batch, target, vocabulary), the cache, and the encoder's output.

        Notes
        -----
        The loss is smoothed in training mode only, so that in evaluation mode exp(loss) is the perplexity.
        """
        if labels is not None:
            use_cache = False
            decoder_input_ids, decoder_attention_mask = self.prepare_targets(
                labels, decoder_input_ids, decoder_inputs_embeds, decoder_attention_mask, past_key_values
            )
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            decoder_position_ids=decoder_position_ids,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))  # (B, T, V)
        loss = None
        if labels is not None:
            label_smoothing = self.config.label_smoothing if self.training else 0.0
            loss = smoothed_cross_entropy(logits, labels, label_smoothing, num_items_in_batch)
        others = {name: outputs[name] for name in outputs if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **others)

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Shift labels right by one position, with the start token before the first real one.

        Parameters
        ----------
        labels : torch.Tensor
            Target token ids, of shape (batch, target); padded with -100 on either side.

        Returns
        -------
        torch.Tensor
            The decoder's input, of the same shape.

        Notes
        -----
        Section 3.1. Data collators call this by its name.
        """
        real = labels != IGNORE_INDEX
        previous = nn.functional.pad(labels, (1, -1), value=IGNORE_INDEX)
        shifted = previous.masked_fill(previous == IGNORE_INDEX, self.config.pad_token_id)
        return shifted.masked_fill(real & (real.cumsum(-1) == 1), self.config.decoder_start_token_id)

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        decoder_attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepare the inputs of one decoding step.

        Parameters
        ----------
        input_ids : torch.Tensor
            Target token ids so far, of shape (batch, target).
        decoder_attention_mask : torch.Tensor | None, default=None
            1 for a real target token, 0 for the padding of prefixes of unequal length.
        **kwargs : Any
            Further arguments that `generate()` passes from step to step.

        Returns
        -------
        dict[str, Any]
            Keyword arguments of `forward`.

        Notes
        -----
        With a static cache, transformers turns the mask into one from which positions cannot be derived any more, so
        they are computed here.
        """
        if decoder_attention_mask is not None:
            kwargs.setdefault("decoder_position_ids", positions_of(decoder_attention_mask))
        return super().prepare_inputs_for_generation(input_ids, decoder_attention_mask=decoder_attention_mask, **kwargs)

    def prepare_targets(
        self,
        labels: torch.Tensor,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Derive what is not given of the decoder's input from the labels.

        Parameters
        ----------
        labels : torch.Tensor
            Target token ids, of shape (batch, target); -100 is ignored.
        decoder_input_ids : torch.Tensor | None, default=None
            The decoder's input, if not the labels shifted right.
        decoder_inputs_embeds : torch.Tensor | None, default=None
            Rows of the embedding instead.
        decoder_attention_mask : torch.Tensor | None, default=None
            1 for a real target token, 0 for padding.
        past_key_values : Cache | None, default=None
            Keys and values of earlier steps.

        Returns
        -------
        tuple[torch.Tensor | None, torch.Tensor | None]
            `decoder_input_ids` and `decoder_attention_mask`. The mask hides padding before a target; padding after it
            needs no mask, because no real position looks ahead.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if decoder_attention_mask is None and decoder_input_ids is not None and past_key_values is None:
            is_real = (labels != IGNORE_INDEX) | (decoder_input_ids != self.config.pad_token_id)
            decoder_attention_mask = is_real.cumsum(-1) > 0
        return decoder_input_ids, decoder_attention_mask


__all__ = ["VaswaniForConditionalGeneration", "VaswaniModel", "VaswaniPreTrainedModel"]
