"""The model: the post-LN encoder-decoder of the paper, and its loss.

Dimension letters in shape comments: B sentences, S source length, T target length, L keys in reach of a query
(S, T, or T with the cached past), D d_model, F d_ff, H heads, K d_k, U d_v, V vocabulary.
"""

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.dynamic_module_utils import custom_object_save
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import (
    GENERATION_CONFIG_NAME,
    TransformersKwargs,
    cached_file,
    can_return_tuple,
    torch_compilable_check,
)
from transformers.utils.generic import is_flash_attention_requested, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_vaswani import VaswaniConfig
from .decoding_vaswani import can_bypass, encode_real_words, has_hooks
from .generation_vaswani import IGNORED, VaswaniGenerationMixin
from .native_vaswani import PackedStack, encode_natively, fits_kernels
from .packing_vaswani import Packing, add_and_norm, packed_attention, packed_loss

# Which class each Auto class loads from a folder that carries this code.
AUTO_MAP = {
    "AutoConfig": "configuration_vaswani.VaswaniConfig",
    "AutoModel": "modeling_vaswani.VaswaniModel",
    "AutoModelForSeq2SeqLM": "modeling_vaswani.VaswaniForConditionalGeneration",
}


def sinusoidal_positions(position_ids: torch.Tensor, d_model: int) -> torch.Tensor:
    """Encode positions as sines and cosines of geometrically spaced frequencies.

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
    """Count the real tokens before each token, so that padding on either side moves no position.

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
    """Sum the cross-entropy with smoothed targets over real tokens and divide it by their number.

    Parameters
    ----------
    logits : torch.Tensor
        Scores before the softmax, of shape (batch, length, vocabulary).
    labels : torch.Tensor
        Right words, of shape (batch, length); -100 where there is none.
    label_smoothing : float
        Probability that the target takes from the right word and gives, in equal parts, to the V - 1 others.
    num_items_in_batch : torch.Tensor | int | None, default=None
        Number to divide the sum by, where the batch is a part of a larger one. By default the number of real tokens.

    Returns
    -------
    torch.Tensor
        The loss, a scalar in float32.

    Notes
    -----
    Section 5.4, in the form of the authors' code. torch spreads its smoothing over all V words, the right one
    included; smoothing by eps V / (V - 1) there is smoothing by eps here.
    """
    vocab_size = logits.shape[-1]
    labels = labels.to(logits.device)
    total = nn.functional.cross_entropy(
        logits.float().reshape(-1, vocab_size),
        labels.reshape(-1),
        ignore_index=IGNORED,
        label_smoothing=label_smoothing * vocab_size / max(vocab_size - 1, 1),
        reduction="sum",
    )
    if num_items_in_batch is None:
        num_items_in_batch = (labels != IGNORED).sum().clamp(min=1)
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
    """Attend with every intermediate result in the open, as the formula has it.

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
        Added to the scores: 0 where a key may be seen, a very low number elsewhere.
    scaling : float
        Factor on the scores.
    dropout : float, default=0.0
        Dropout on the weights.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        Sums of shape (batch, queries, heads, d_v) and weights of shape (batch, heads, queries, keys).

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
    """Let each position of one sequence gather from the positions of another, or of its own.

    Parameters
    ----------
    config : VaswaniConfig
        Sets the width, the heads and the dropout on attention weights.
    layer_idx : int
        Rank of the layer in its stack; key-value caches are indexed by it.
    is_causal : bool, default=False
        Whether a position may see only itself and the ones before it.
    is_cross : bool, default=False
        Whether it asks another sequence.

    Notes
    -----
    Section 3.2.2. Dropout, residual and normalisation (section 3.1) belong to the sub-layer that calls this.

    The authors' code formed queries, keys and values by one matrix, or keys and values if queries come from elsewhere.
    Here they are separate, but begin as parts of it: `joint_fan_out` is its width, and sets how large weights begin.
    With the larger weights of matrices on their own the encoder's states become alike, and small models learn badly.
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
        packing: Packing | None = None,
        source_packing: Packing | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `hidden_states` to `key_value_states`, or to `hidden_states` itself.

        Parameters
        ----------
        hidden_states : torch.Tensor
            What asks, of shape (batch, queries, d_model).
        attention_mask : torch.Tensor | None, default=None
            Which keys a query may see, in the form that the attention back end takes.
        key_value_states : torch.Tensor | None, default=None
            What is asked, of shape (batch, keys, d_model): the encoder's output. None means self-attention.
        past_key_values : EncoderDecoderCache | None, default=None
            Keys and values of earlier steps; this call's are added to it.
        packing : Packing | None, default=None
            Where sentences are, if `hidden_states` is one row of words without padding.
        source_packing : Packing | None, default=None
            The same of `key_value_states`.
        **kwargs : Unpack[TransformersKwargs]
            Options of the attention back end.

        Returns
        -------
        tuple[torch.Tensor, torch.Tensor | None]
            The output, of shape (batch, queries, d_model), and the weights, of shape (batch, heads, queries, keys),
            where the back end gives them.
        """
        d_k, d_v = self.config.d_k, self.config.d_v
        query = self._split_heads(self.q_proj(hidden_states), d_k)  # (B, H, T, K)
        key, value = self._keys_and_values(hidden_states, key_value_states, past_key_values)
        dropout = self.config.attention_dropout if self.training else 0.0
        if packing is not None:
            own_or_source = packing if source_packing is None else source_packing
            attended = packed_attention(
                query, key, value, packing, own_or_source, self.is_causal, self.scaling, dropout
            )
            return self.out_proj(attended.flatten(-2)), None
        if d_k != d_v and is_flash_attention_requested(self.config):  # its kernels know only one width; zeros add none
            query, key, value = (nn.functional.pad(x, (0, max(d_k, d_v) - x.shape[-1])) for x in (query, key, value))

        attend: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention
        )
        attended, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=dropout,
            **kwargs,
        )
        return self.out_proj(attended[..., :d_v].flatten(-2)), weights  # (B, T, H, U) -> (B, T, D)

    def _keys_and_values(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None,
        past_key_values: EncoderDecoderCache | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys (B, H, L, K) and values (B, H, L, U), projected now or earlier."""
        is_cross_attention = key_value_states is not None
        cache: Any = None
        if past_key_values is not None:
            cross, own = past_key_values.cross_attention_cache, past_key_values.self_attention_cache
            cache = cross if is_cross_attention else own
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
    """Transform each position by itself, through a wider inner layer.

    Parameters
    ----------
    config : VaswaniConfig
        Sets the two widths, the non-linearity and the dropout after it.

    Notes
    -----
    Section 3.3, `max(0, x W1 + b1) W2 + b2`.
    """

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.d_model, config.d_ff)
        self.activation = ACT2FN[config.activation_function]
        self.dropout = nn.Dropout(config.activation_dropout)
        self.fc2 = nn.Linear(config.d_ff, config.d_model)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Transform the states of any number of positions.

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
    """Attend within the source, then transform each position.

    Parameters
    ----------
    config : VaswaniConfig
        Sets the dimensions and the dropouts.
    layer_idx : int
        Rank of the layer in the encoder.

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
        packing: Packing | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Apply the two sub-layers.

        Parameters
        ----------
        hidden_states : torch.Tensor
            Source states, of shape (batch, source, d_model).
        attention_mask : torch.Tensor | None, default=None
            Which source positions are real, in the form that the attention back end takes.
        packing : Packing | None, default=None
            Where sentences are, if `hidden_states` is one row of words without padding.
        **kwargs : Unpack[TransformersKwargs]
            Options of the attention back end.

        Returns
        -------
        torch.Tensor
            New source states of the same shape.
        """
        attended, _ = self.self_attn(hidden_states, attention_mask, packing=packing, **kwargs)
        hidden_states = add_and_norm(self.self_attn_layer_norm, self.dropout, hidden_states, attended, packing)
        transformed = self.feed_forward(hidden_states)
        return add_and_norm(self.feed_forward_layer_norm, self.dropout, hidden_states, transformed, packing)


class VaswaniDecoderLayer(GradientCheckpointingLayer):
    """Attend within the target so far, then to the source, then transform each position.

    Parameters
    ----------
    config : VaswaniConfig
        Sets the dimensions and the dropouts.
    layer_idx : int
        Rank of the layer in the decoder.

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
        self.feed_forward = VaswaniFeedForward(config)
        self.feed_forward_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        packing: Packing | None = None,
        source_packing: Packing | None = None,
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
            Which target positions a target position may see, in the form that the attention back end takes.
        encoder_attention_mask : torch.Tensor | None, default=None
            Which source positions are real, in the form that the attention back end takes.
        past_key_values : EncoderDecoderCache | None, default=None
            Keys and values of earlier steps.
        packing : Packing | None, default=None
            Where sentences are, if `hidden_states` is one row of words without padding.
        source_packing : Packing | None, default=None
            The same of `encoder_hidden_states`.
        **kwargs : Unpack[TransformersKwargs]
            Options of the attention back end.

        Returns
        -------
        torch.Tensor
            New target states of the same shape.
        """
        attended, _ = self.self_attn(
            hidden_states, attention_mask, past_key_values=past_key_values, packing=packing, **kwargs
        )
        hidden_states = add_and_norm(self.self_attn_layer_norm, self.dropout, hidden_states, attended, packing)
        attended, _ = self.encoder_attn(
            hidden_states,
            encoder_attention_mask,
            key_value_states=encoder_hidden_states,
            past_key_values=past_key_values,
            packing=packing,
            source_packing=source_packing,
            **kwargs,
        )
        hidden_states = add_and_norm(self.encoder_attn_layer_norm, self.dropout, hidden_states, attended, packing)
        transformed = self.feed_forward(hidden_states)
        return add_and_norm(self.feed_forward_layer_norm, self.dropout, hidden_states, transformed, packing)


@contextlib.contextmanager
def without_conversion() -> Iterator[None]:
    """Keep transformers from asking a service to convert a model."""
    switch = "DISABLE_SAFETENSORS_CONVERSION"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        yield
    finally:
        os.environ.pop(switch)
        if before is not None:
            os.environ[switch] = before


def _read_generation_config(name: Any, model: Any, options: dict[str, Any]) -> None:
    """Read the saved search again, if none seems to be loaded: transformers ignores one that it cannot read."""
    if not model.generation_config._from_model_config:
        return
    known = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")
    download = {key: options[key] for key in known if key in options}
    if has_file(name, GENERATION_CONFIG_NAME, **download):
        model.generation_config = GenerationConfig.from_pretrained(name, **download)


def has_file(name: str | os.PathLike[str], file: str, **options: Any) -> bool:
    """Tell whether a model has a file, and fetch it.

    Parameters
    ----------
    name : str | os.PathLike[str]
        Folder or Hub name of the model.
    file : str
        Name of the file.
    **options : Any
        Options of downloading.

    Returns
    -------
    bool
        Whether there is one.

    Raises
    ------
    OSError
        If the Hub does not tell, or does not give it.
    """
    try:
        cached_file(name, file, **options)
    except OSError as error:
        if "does not appear to have a file named" not in str(error):
            raise
        return False
    return True


class VaswaniPreTrainedModel(PreTrainedModel):
    """Tell transformers what the model can do and how its weights begin."""

    config: VaswaniConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["VaswaniEncoderLayer", "VaswaniDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    fast_paths = True  # whether inference may read weights instead of calling modules, where that is right

    def set_fast_paths(self, enabled: bool) -> None:
        """Let inference take its fast paths, or only `forward` of every module.

        Parameters
        ----------
        enabled : bool
            Whether the fast paths may be taken where they are right. They may at first.
        """
        for module in self.modules():
            if isinstance(module, VaswaniPreTrainedModel):
                module.fast_paths = enabled

    def may_take_fast_paths(self) -> bool:
        """Tell whether the weights may be read instead of calling their modules.

        Returns
        -------
        bool
            Whether fast paths are enabled, and nothing wraps a module or looks into the attention.
        """
        return self.fast_paths and self.config._attn_implementation in ("eager", "sdpa") and can_bypass(self)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise one module as the authors' code did: Glorot uniform, and embeddings with deviation D^-0.5."""
        if isinstance(module, nn.Embedding) or module is self.get_output_embeddings():
            init.normal_(module.weight, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.Linear):
            fan_out = getattr(module, "joint_fan_out", module.out_features)
            limit = math.sqrt(6 / (module.in_features + fan_out))
            init.uniform_(module.weight, -limit, limit)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *args: Any,
        use_safetensors: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load a model, from safetensors files and no others.

        Parameters
        ----------
        pretrained_model_name_or_path : str | os.PathLike[str] | None
            Folder or Hub name of the model.
        *args : Any
            Options of `PreTrainedModel.from_pretrained`.
        use_safetensors : bool | None, default=None
            None or True.
        **kwargs : Any
            Options of `PreTrainedModel.from_pretrained`.

        Returns
        -------
        Any
            The model.

        Raises
        ------
        ValueError
            If another format is asked for.
        OSError
            If there is no such model, or it has no safetensors files.

        Notes
        -----
        transformers would load pickled files too, and without safetensors it would send the model's name and the
        user's token to a service that converts it.
        """
        if use_safetensors is False:
            raise ValueError("use_safetensors=False: weights are loaded from safetensors files only.")
        name = pretrained_model_name_or_path
        try:
            with without_conversion():
                loaded = super().from_pretrained(name, *args, use_safetensors=True, **kwargs)
        except OSError as error:
            if "use_safetensors" not in str(error):
                raise
            raise OSError(f"{name} has no model.safetensors, and weights are loaded from no other format.") from None
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if name is not None and kwargs.get("generation_config") is None and model.can_generate():
            _read_generation_config(name, model, kwargs)
        return loaded

    @staticmethod
    def _load_pretrained_model(model: Any, state_dict: Any, checkpoint_files: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse what an index or an adapter names that is no safetensors file, before it is opened."""
        for file in checkpoint_files or ():
            if not str(file).endswith(".safetensors"):
                raise OSError(f"{file} is no safetensors file, and weights are loaded from no other format.")
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        *args: Any,
        include_code: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Save configuration and weights, and on request the code that loads them.

        Parameters
        ----------
        save_directory : str | os.PathLike[str]
            Folder to save to.
        is_main_process : bool, default=True
            Whether this process, of several that train together, is the one that writes.
        *args : Any
            Options of `PreTrainedModel.save_pretrained`.
        include_code : bool | None, default=None
            Whether the folder shall load with `trust_remote_code=True` where `vaswani` is not installed. By default
            if the model was loaded from such a folder, or saved to one before.
        **kwargs : Any
            Options of `PreTrainedModel.save_pretrained`.
        """
        if include_code is None:
            include_code = hasattr(self.config, "auto_map")
        if include_code:
            self.config.auto_map = dict(AUTO_MAP)
            if is_main_process:
                Path(save_directory).mkdir(parents=True, exist_ok=True)
                custom_object_save(self, save_directory)
        elif hasattr(self.config, "auto_map"):
            del self.config.auto_map
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Resize the target embedding too where it is a matrix of its own, which transformers does not know of."""
        resized = super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        decoder = getattr(self.base_model, "decoder", None)
        if decoder is not None and not self.config.tie_word_embeddings:
            size = resized.weight.shape[0]
            decoder.embed_tokens = self._get_resized_embeddings(decoder.embed_tokens, size, mean_resizing=mean_resizing)
        return resized


class VaswaniStack(VaswaniPreTrainedModel):
    """Embed words and positions: what encoder and decoder have in common.

    Parameters
    ----------
    config : VaswaniConfig
        Sets the vocabulary, the width, the kind of positions and the dropout.

    Notes
    -----
    Sections 3.4 and 3.5: embeddings times sqrt(d_model), plus positions, then dropout (section 5.4).
    """

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.embed_scale = math.sqrt(config.d_model)
        if config.position_encoding == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.gradient_checkpointing = False
        self.packed: PackedStack | None = None  # copies for the kernels, kept from one call to the next

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "packed": None}

    def encode_positions(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Look up or compute what marks a position.

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
            f"A sequence is longer than the {limit} learned positions of this model (max_position_embeddings). "
            "Shorten it, or use a model with sinusoidal positions, which have no limit.",
        )
        return self.embed_positions(position_ids)

    def _may_pack(self, attention_mask: torch.Tensor | None, options: Any) -> bool:
        """Tell whether padding may be left out: in training on a CPU, if nobody looks at the layers' states."""
        is_plain = self.fast_paths and self.training and self.config._attn_implementation in ("eager", "sdpa")
        if not is_plain or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return False
        if self.embed_tokens.weight.device.type != "cpu" or (attention_mask is not None and attention_mask.ndim != 2):
            return False
        return not self._records(options) and not has_hooks(self.layers)

    def _records(self, options: Any) -> bool:
        """Tell whether attentions or states of layers are asked for."""
        names = ("output_attentions", "output_hidden_states")
        return any(options.get(name, getattr(self.config, name, False)) for name in names)

    def _embed_packed(
        self,
        packing: Packing,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        position_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Return the first layer's input (1, M, D), real words only."""
        positions = packing.pack(position_ids.expand(packing.mask.shape))
        if inputs_embeds is None:
            return self._embed(self.embed_tokens(packing.pack(input_ids)), positions)
        return self._embed(packing.pack(inputs_embeds), positions)

    def _embed(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Return the first layer's input (B, T, D) for word embeddings (B, T, D) at positions (B or 1, T)."""
        positions = self.encode_positions(position_ids).to(inputs_embeds)
        return self.dropout(inputs_embeds * self.embed_scale + positions)


class VaswaniEncoder(VaswaniStack):
    """Read the source: embeddings, positions and `encoder_layers` layers.

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
        super().__init__(config)
        self.layers = nn.ModuleList(
            VaswaniEncoderLayer(config, layer_idx) for layer_idx in range(config.encoder_layers)
        )
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode source sentences.

        Parameters
        ----------
        input_ids : torch.Tensor | None, default=None
            Source words, of shape (batch, source).
        attention_mask : torch.Tensor | None, default=None
            1 for a real word, 0 for padding, on whichever side. None means that all are real.
        position_ids : torch.Tensor | None, default=None
            Positions, if not the count of real words before each word.
        inputs_embeds : torch.Tensor | None, default=None
            Rows of `embed_tokens`, unscaled, instead of `input_ids`.
        **kwargs : Unpack[TransformersKwargs]
            `output_attentions`, `output_hidden_states`, and options of the attention back end.

        Returns
        -------
        BaseModelOutput
            The last layer's states, of shape (batch, source, d_model), and what else was asked for.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give the source exactly once: as input_ids or as inputs_embeds.")
        words = input_ids if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            if attention_mask is not None and attention_mask.ndim == 2:
                position_ids = positions_of(attention_mask)
            else:
                position_ids = torch.arange(words.shape[1], device=words.device).unsqueeze(0)
        if self._may_pack(attention_mask, kwargs):
            packing = Packing.of(attention_mask, words)
            hidden_states = self._embed_packed(packing, input_ids, inputs_embeds, position_ids)
            for layer in self.layers:
                hidden_states = layer(hidden_states, packing=packing, **kwargs)
            return BaseModelOutput(last_hidden_state=packing.unpack(hidden_states))

        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        hidden_states = self._embed(inputs_embeds, position_ids)
        if self._may_read_weights(hidden_states, attention_mask, kwargs):
            encode = encode_natively if fits_kernels(self) else encode_real_words
            return BaseModelOutput(last_hidden_state=encode(self, hidden_states, attention_mask))
        visible = create_bidirectional_mask(
            config=self.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask
        )
        for layer in self.layers:
            hidden_states = layer(hidden_states, visible, **kwargs)
        return BaseModelOutput(last_hidden_state=hidden_states)

    def _may_read_weights(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, options: Any) -> bool:
        """Tell whether only real words need computing, from weights alone: in inference, if nobody looks inside."""
        if torch.is_grad_enabled() or attention_mask is None or attention_mask.ndim != 2 or attention_mask.is_cuda:
            return False
        if not len(hidden_states) or hidden_states.dtype != self.embed_tokens.weight.dtype:
            return False
        return not self._records(options) and self.may_take_fast_paths()


class VaswaniDecoder(VaswaniStack):
    """Write the target: embeddings, positions and `decoder_layers` layers.

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
        super().__init__(config)
        self.layers = nn.ModuleList(
            VaswaniDecoderLayer(config, layer_idx) for layer_idx in range(config.decoder_layers)
        )
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
        """Decode target sentences, whole or step by step.

        Parameters
        ----------
        input_ids : torch.Tensor | None, default=None
            Target words shifted right by one, of shape (batch, target): all, or those that the cache lacks.
        attention_mask : torch.Tensor | None, default=None
            1 for a real word, 0 for padding, over the cached words too. None means that all are real.
        position_ids : torch.Tensor | None, default=None
            Positions, if not the count of real words before each word.
        encoder_hidden_states : torch.Tensor | None, default=None
            The encoder's output, of shape (batch, source, d_model). Required.
        encoder_attention_mask : torch.Tensor | None, default=None
            1 for a real source word, 0 for padding.
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
            The last layer's states, of shape (batch, target, d_model), the cache, and what else was asked for.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give the target exactly once: as decoder_input_ids or as decoder_inputs_embeds.")
        if encoder_hidden_states is None:
            raise ValueError("The decoder needs encoder_hidden_states, the encoder's output.")
        words = input_ids if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None and not isinstance(past_key_values, EncoderDecoderCache):
            past_key_values = EncoderDecoderCache(past_key_values, DynamicCache(config=self.config))
        if position_ids is None:
            length = words.shape[1]
            if attention_mask is not None and attention_mask.ndim == 2:
                position_ids = positions_of(attention_mask)[:, -length:]
            else:
                past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
                position_ids = (torch.arange(length, device=words.device) + past_length).unsqueeze(0)
        is_source_packable = encoder_attention_mask is None or encoder_attention_mask.ndim == 2
        if past_key_values is None and is_source_packable and self._may_pack(attention_mask, kwargs):
            packing = Packing.of(attention_mask, words)
            source_packing = Packing.of(encoder_attention_mask, encoder_hidden_states)
            hidden_states = self._embed_packed(packing, input_ids, inputs_embeds, position_ids)
            encoded = source_packing.pack(encoder_hidden_states)
            for layer in self.layers:
                hidden_states = layer(hidden_states, encoded, packing=packing, source_packing=source_packing, **kwargs)
            return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=packing.unpack(hidden_states))

        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
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
            last_hidden_state=hidden_states, past_key_values=past_key_values
        )


class VaswaniModel(VaswaniPreTrainedModel):
    """Join encoder and decoder, without the projection to words.

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
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the source embedding, to which the other uses of the matrix are tied.

        Returns
        -------
        nn.Module
            The encoder's `embed_tokens`.
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
        if self.config.tie_word_embeddings:
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
            Source words, of shape (batch, source).
        attention_mask : torch.Tensor | None, default=None
            1 for a real source word, 0 for padding, on whichever side. None means that all are real.
        position_ids : torch.Tensor | None, default=None
            Source positions, if not the count of real words before each word.
        decoder_input_ids : torch.Tensor | None, default=None
            Target words shifted right by one, of shape (batch, target). By default the start symbol alone.
        decoder_attention_mask : torch.Tensor | None, default=None
            1 for a real target word, 0 for padding, over the cached words too. None means that all are real.
        decoder_position_ids : torch.Tensor | None, default=None
            Target positions, if not the count of real words before each word.
        encoder_outputs : BaseModelOutput | tuple[torch.Tensor, ...] | None, default=None
            What the encoder returned earlier for this source.
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


class TrainingOutput(Seq2SeqLMOutput):
    """What the model returns where its loss needs no logits: they are formed when somebody looks at them."""

    form_logits: Callable[[], torch.Tensor] | None = None

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "logits" and value is None and self.form_logits is not None:
            value = self.form_logits()
            self["logits"] = value
        return value

    def __getitem__(self, key: Any) -> Any:
        if key in (0, "loss"):
            return self.loss
        _ = self.logits
        return super().__getitem__(key)

    def to_tuple(self) -> tuple[Any, ...]:
        """Return everything that is there, in its order.

        Returns
        -------
        tuple[Any, ...]
            Loss, logits, and what else was asked for.
        """
        _ = self.logits
        order = [field.name for field in dataclasses.fields(self)]
        return tuple(self[name] for name in sorted(self.keys(), key=order.index))


class VaswaniForConditionalGeneration(VaswaniPreTrainedModel, VaswaniGenerationMixin):
    """Translate: the model with its projection to words, its loss, and `generate()`.

    Parameters
    ----------
    config : VaswaniConfig
        Configuration of the whole model.

    Notes
    -----
    Section 3.4: the projection is the embedding matrix, without scale and without bias.
    """

    _tied_weights_keys = {
        "model.decoder.embed_tokens.weight": "model.encoder.embed_tokens.weight",
        "lm_head.weight": "model.encoder.embed_tokens.weight",
    }
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(config)
        self.model = VaswaniModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

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
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Score the next word at every target position and, with `labels`, compute the loss.

        Parameters
        ----------
        input_ids : torch.Tensor | None, default=None
            Source words, of shape (batch, source).
        attention_mask : torch.Tensor | None, default=None
            1 for a real source word, 0 for padding, on whichever side. None means that all are real.
        position_ids : torch.Tensor | None, default=None
            Source positions, if not the count of real words before each word.
        decoder_input_ids : torch.Tensor | None, default=None
            Target words shifted right by one, of shape (batch, target). By default the labels shifted right or,
            without labels, the start symbol alone.
        decoder_attention_mask : torch.Tensor | None, default=None
            1 for a real target word, 0 for padding, over the cached words too. None means that all are real but,
            with labels, the padding before the first real word.
        decoder_position_ids : torch.Tensor | None, default=None
            Target positions, if not the count of real words before each word.
        encoder_outputs : BaseModelOutput | tuple[torch.Tensor, ...] | None, default=None
            What the encoder returned earlier for this source.
        past_key_values : Cache | None, default=None
            Keys and values of earlier steps.
        inputs_embeds : torch.Tensor | None, default=None
            Rows of the embedding, unscaled, instead of `input_ids`.
        decoder_inputs_embeds : torch.Tensor | None, default=None
            Rows of the embedding, unscaled, instead of `decoder_input_ids`.
        labels : torch.Tensor | None, default=None
            Right words, of shape (batch, target), not shifted; -100 where there is none.
        use_cache : bool | None, default=None
            Whether to return keys and values for the next step. By default as the configuration says, and never
            with labels.
        logits_to_keep : int | torch.Tensor, default=0
            Positions to score: the last so many, all for 0, or those that a tensor names.
        num_items_in_batch : torch.Tensor | int | None, default=None
            Number of target words over all devices and micro-batches of this step; the Trainer gives it. The loss is
            the sum over this batch divided by it, or by the batch's own number of target words.
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
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
            if decoder_attention_mask is None and decoder_input_ids is not None and past_key_values is None:
                decoder_attention_mask = self._mask_leading_padding(decoder_input_ids, labels)
                if self.model.decoder._may_pack(decoder_attention_mask, kwargs):  # what follows the last label is idle
                    decoder_attention_mask &= (labels != IGNORED).flip(-1).cumsum(-1).flip(-1) > 0

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
        states = outputs.last_hidden_state  # (B, T, D)
        smoothing = self.config.label_smoothing if self.training else 0.0
        others = {name: outputs[name] for name in outputs if name != "last_hidden_state"}
        if labels is not None and logits_to_keep == 0 and self._may_pack_loss():
            real = (labels != IGNORED).flatten().nonzero().squeeze(-1)
            count = len(real) if num_items_in_batch is None else num_items_in_batch
            rows, words = states.flatten(0, 1).index_select(0, real), labels.flatten()[real]
            scale = 1 / max(float(count), 1)
            output = TrainingOutput(loss=packed_loss(rows, self.lm_head.weight, words, smoothing, scale), **others)
            output.form_logits = functools.partial(self.lm_head, states)
            return output

        logits = self.lm_head(slice_logits_to_keep(states, logits_to_keep))  # (B, T, V)
        loss = None if labels is None else smoothed_cross_entropy(logits, labels, smoothing, num_items_in_batch)
        return Seq2SeqLMOutput(loss=loss, logits=logits, **others)

    def _may_pack_loss(self) -> bool:
        """Tell whether the loss may read the matrix of words: in training on a CPU, if nothing wraps it."""
        head: Any = self.lm_head
        if not (self.fast_paths and self.training) or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return False
        if type(head) is not nn.Linear or "forward" in vars(head) or has_hooks(head) or self._forward_pre_hooks:
            return False
        is_plain = type(head.weight) is nn.Parameter and head.weight.device.type == "cpu" and head.bias is None
        return is_plain and head.weight.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")

    def get_decoder_states(self, **inputs: Any) -> torch.Tensor:
        """Return the decoder's states before their projection to words.

        Parameters
        ----------
        **inputs : Any
            Inputs of the model.

        Returns
        -------
        torch.Tensor
            States of shape (batch, target, d_model).
        """
        return self.model(**inputs, use_cache=False).last_hidden_state

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Shift labels right by one position, with the start symbol before the first real one.

        Parameters
        ----------
        labels : torch.Tensor
            Right words, of shape (batch, target); -100 fills them up on either side.

        Returns
        -------
        torch.Tensor
            The decoder's input, of the same shape.

        Notes
        -----
        Section 3.1. Data collators call this by its name.
        """
        real = labels != IGNORED
        previous = nn.functional.pad(labels, (1, -1), value=IGNORED)
        shifted = previous.masked_fill(previous == IGNORED, self.config.pad_token_id)
        return shifted.masked_fill(real & (real.cumsum(-1) == 1), self.config.decoder_start_token_id)

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        decoder_attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Build the arguments of one decoding step.

        Parameters
        ----------
        input_ids : torch.Tensor
            Target words so far, of shape (batch, target).
        decoder_attention_mask : torch.Tensor | None, default=None
            1 for a real target word, 0 for the padding of prefixes of unequal length.
        **kwargs : Any
            What else `generate()` hands from step to step.

        Returns
        -------
        dict[str, Any]
            Keyword arguments of `forward`.

        Notes
        -----
        With a static cache, transformers turns the mask into one from which positions cannot be read any more, so
        they are read here.
        """
        if decoder_attention_mask is not None:
            kwargs.setdefault("decoder_position_ids", positions_of(decoder_attention_mask))
        return super().prepare_inputs_for_generation(input_ids, decoder_attention_mask=decoder_attention_mask, **kwargs)

    def _mask_leading_padding(self, decoder_input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mask the padding before a target; what follows it needs no mask, for nothing real looks ahead."""
        real = (labels != IGNORED) | (decoder_input_ids != self.config.pad_token_id)
        return real.cumsum(-1) > 0


__all__ = ["VaswaniForConditionalGeneration", "VaswaniModel", "VaswaniPreTrainedModel"]
