"""Inference without detours: the encoder on real words only, the decoder on the beams of a sentence together.

Both compute what the model's own `forward` computes, from the same weights, without what inference does not need.
Dimension letters in shape comments: B sentences, S source length, M real source words of a batch, Q queries of a
sentence (the words of a prompt, or its beams), L keys in reach of a query, D d_model, H heads, K d_k, U d_v,
V vocabulary, C words in a chunk of the vocabulary.
"""

from typing import Any

import torch
from torch import nn
from transformers.utils import output_capturing

# Rows whose logits are formed at a time, and words whose maximum is taken first when the best words are looked for.
ROWS_AT_A_TIME = 128
CHUNK_OF_WORDS = 64
# Keys for which the cache of a sentence has room at first; it doubles when it is full.
FIRST_CAPACITY = 128

_LEAVES = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout)


def can_bypass(model: nn.Module) -> bool:
    """Tell whether the modules of a stack or model may be read instead of called.

    Parameters
    ----------
    model : nn.Module
        The stack or model, made of the classes of one file and of torch's own layers.

    Returns
    -------
    bool
        False where reading `.weight` would skip something: an adapter, a quantised layer, a hook, a replaced or
        inherited `forward`, a weight that is sharded, in half precision or on another device than the CPU, dropout
        in training, autocast, and while torch traces a graph. The hooks with which transformers records outputs are no obstacle:
        they are idle unless outputs are asked for.
    """
    if model.training or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    own_file = type(model).__module__
    for module in model.modules():
        is_known = type(module) in _LEAVES or type(module).__module__ in (own_file, "torch.nn.modules.container")
        is_activation = not module._parameters and not module._modules
        if not (is_known or is_activation) or "forward" in vars(module) or module._forward_pre_hooks:
            return False
        if any(hook.__module__ != output_capturing.__name__ for hook in module._forward_hooks.values()):
            return False
    weights = list(model.parameters())
    is_plain = all(type(weight) is nn.Parameter and weight.device.type == "cpu" for weight in weights)
    return is_plain and {weight.dtype for weight in weights} in ({torch.float32}, {torch.float64})


def encode_real_words(
    layers: nn.ModuleList, hidden_states: torch.Tensor, attention_mask: torch.Tensor
) -> torch.Tensor:
    """Apply encoder layers to the real words of a padded batch, and only to them.

    Parameters
    ----------
    layers : nn.ModuleList
        The encoder's layers, of which `can_bypass` holds.
    hidden_states : torch.Tensor
        The first layer's input, of shape (batch, source, d_model).
    attention_mask : torch.Tensor
        1 for a real word, 0 for padding, of shape (batch, source).

    Returns
    -------
    torch.Tensor
        The last layer's output, of the same shape, zero at padding.

    Notes
    -----
    Products and norms see M rows instead of B S; only the attention itself is padded.
    """
    config: Any = layers[0].self_attn.config
    real = attention_mask.flatten().nonzero().squeeze(-1)  # (M)
    visible = attention_mask.bool()[:, None, None, :]  # (B, 1, 1, S)
    packed = hidden_states.flatten(0, 1)[real]  # (M, D)

    def heads_of(projected: torch.Tensor, width: int) -> torch.Tensor:
        padded = projected.new_zeros(attention_mask.numel(), projected.shape[-1])
        padded[real] = projected
        return padded.view(*attention_mask.shape, -1, width).transpose(1, 2)  # (B, H, S, K)

    for layer in layers:
        attention = layer.self_attn
        attended = nn.functional.scaled_dot_product_attention(
            heads_of(attention.q_proj(packed), config.d_k),
            heads_of(attention.k_proj(packed), config.d_k),
            heads_of(attention.v_proj(packed), config.d_v),
            attn_mask=visible,
            scale=attention.scaling,
        )  # (B, H, S, U)
        attended = attended.transpose(1, 2).flatten(2).flatten(0, 1)[real]  # (M, H U)
        packed = layer.self_attn_layer_norm(packed + attention.out_proj(attended))
        packed = layer.feed_forward_layer_norm(packed + layer.feed_forward(packed))

    padded = torch.zeros_like(hidden_states)
    padded.view(-1, padded.shape[-1])[real] = packed
    return padded


class _Product:
    """One product for linear layers with the same input, by a transposed copy of their weights.

    A product of few rows with a transposed weight is up to twice as fast on a CPU. The copy lives as long as one
    search, so that it cannot grow stale.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        self.weight = torch.cat([layer.weight.detach().t() for layer in layers], dim=1).contiguous()
        has_bias = layers[0].bias is not None
        self.bias = torch.cat([layer.bias.detach() for layer in layers]) if has_bias else None

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight if self.bias is None else torch.addmm(self.bias, inputs, self.weight)

    def added_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        total = torch.addmm(residual, inputs, self.weight)
        return total if self.bias is None else total.add_(self.bias)


class _Layer:
    """The weights of one decoder layer, and the keys and values that its two attentions gather from.

    The beams of a sentence share its source's keys and values. Those of the target stand where they were written;
    which of them a beam may see is the business of a mask, so nothing is ever reordered.
    """

    def __init__(self, layer: Any, encoded: torch.Tensor) -> None:
        config = layer.self_attn.config
        self.widths = config.d_k, config.d_k, config.d_v
        self.heads = config.num_attention_heads
        self.scaling = layer.self_attn.scaling
        own, cross, feed_forward = layer.self_attn, layer.encoder_attn, layer.feed_forward
        self.own_projections = _Product(own.q_proj, own.k_proj, own.v_proj)
        self.own_output = _Product(own.out_proj)
        self.own_norm = layer.self_attn_layer_norm
        self.source_query = _Product(cross.q_proj)
        self.source_output = _Product(cross.out_proj)
        self.source_norm = layer.encoder_attn_layer_norm
        self.inner = _Product(feed_forward.fc1)
        self.activation = feed_forward.activation
        self.outer = _Product(feed_forward.fc2)
        self.norm = layer.feed_forward_layer_norm

        self.source_keys = self._heads(cross.k_proj(encoded), config.d_k).contiguous()  # (B, H, S, K)
        self.source_values = self._heads(cross.v_proj(encoded), config.d_v).contiguous()  # (B, H, S, U)
        self.keys = encoded.new_empty(len(encoded), self.heads, 0, config.d_k)
        self.values = encoded.new_empty(len(encoded), self.heads, 0, config.d_v)

    def _heads(self, projected: torch.Tensor, width: int) -> torch.Tensor:
        return projected.unflatten(-1, (-1, width)).transpose(1, 2)  # (B, Q, H K) -> (B, H, Q, K)

    def make_room(self, capacity: int) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(*old.shape[:2], capacity, old.shape[-1])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def move(self, source: int, target: int) -> None:
        for cached in (self.keys, self.values, self.source_keys, self.source_values):
            cached[target] = cached[source]

    def __call__(
        self, states: torch.Tensor, sentences: int, visible: torch.Tensor, visible_source: torch.Tensor
    ) -> torch.Tensor:
        """Apply the layer to states (B Q, D); the masks are (B H, Q, L) and (B H, 1, S)."""
        queries, slots = visible.shape[1:]
        projected = self.own_projections(states).view(sentences, queries, -1)
        widths = [self.heads * width for width in self.widths]
        query, key, value = (
            self._heads(part, width)
            for part, width in zip(projected.split(widths, dim=-1), self.widths, strict=True)
        )
        self.keys[:sentences, :, slots - queries : slots] = key
        self.values[:sentences, :, slots - queries : slots] = value
        attended = self._attend(query, self.keys[:sentences, :, :slots], self.values[:sentences, :, :slots], visible)
        states = self._normalise(self.own_norm, self.own_output.added_to(states, attended))

        query = self._heads(self.source_query(states).view(sentences, queries, -1), self.widths[0])
        attended = self._attend(
            query, self.source_keys[:sentences], self.source_values[:sentences], visible_source
        )
        states = self._normalise(self.source_norm, self.source_output.added_to(states, attended))

        transformed = self.activation(self.inner(states))
        return self._normalise(self.norm, self.outer.added_to(states, transformed))

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        sentences, _, queries, _ = query.shape
        query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)  # (B H, ...)
        visible = visible.expand(-1, queries, -1)
        scores = torch.baddbmm(visible, query, key.transpose(1, 2), alpha=self.scaling)  # (B H, Q, L)
        attended = scores.softmax(dim=-1) @ value  # (B H, Q, U)
        return attended.unflatten(0, (sentences, -1)).transpose(1, 2).reshape(sentences * queries, -1)  # (B Q, H U)

    @staticmethod
    def _normalise(norm: nn.LayerNorm, states: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(states, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


class BeamDecoder:
    """Decode the beams of many sentences step by step; a sentence that is finished costs nothing any more.

    Parameters
    ----------
    model : Any
        A `VaswaniForConditionalGeneration` of which `can_bypass` holds.
    encoded : torch.Tensor
        The encoder's output, of shape (sentences, source, d_model).
    attention_mask : torch.Tensor | None
        1 for a real source word, 0 for padding, of shape (sentences, source). None means that all are real.

    Notes
    -----
    The queries of a sentence are rows of one attention: the words of its prompt first, its beams after that. Each
    step writes its keys into new slots, and a mask tells for each beam which slots hold its own ancestors.
    """

    can_drop = True

    def __init__(self, model: Any, encoded: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
        self._stack = model.model.decoder
        self._layers = [_Layer(layer, encoded) for layer in self._stack.layers]
        self._projection = _Product(model.lm_head)
        width = -(-model.config.vocab_size // CHUNK_OF_WORDS) * CHUNK_OF_WORDS
        self._logits = encoded.new_empty(ROWS_AT_A_TIME, width)
        self._make_room(FIRST_CAPACITY)

        source_visible = encoded.new_zeros(encoded.shape[:2])
        if attention_mask is not None:
            source_visible.masked_fill_(attention_mask == 0, torch.finfo(encoded.dtype).min)
        heads = model.config.num_attention_heads
        self._source_visible = source_visible[:, None, None].repeat(1, heads, 1, 1)  # (B, H, 1, S)

    def start(self, prompt: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Decode the prompt, once for all beams of a sentence.

        Parameters
        ----------
        prompt : torch.Tensor
            Start symbol and forced words, of shape (sentences, length).
        attention_mask : torch.Tensor
            1 for a real word, 0 for the padding before it, of the same shape.

        Returns
        -------
        torch.Tensor
            The states after the last word, of shape (sentences, d_model).
        """
        positions = (attention_mask.long().cumsum(-1) - 1).clamp_(min=0)
        self._last_position = positions[:, -1:]
        length = prompt.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        # Padding sees itself, for a softmax over nothing is undefined; nobody else sees it.
        allowed = causal & (attention_mask.bool()[:, None, :] | torch.eye(length, dtype=torch.bool))
        visible = torch.zeros(allowed.shape, dtype=self._source_visible.dtype).masked_fill_(~allowed, float("-inf"))
        self._visible = visible[:, -1:]  # (B, 1, L): what follows the prompt sees what the prompt's last word sees
        return self._decode(prompt, positions, visible)[:, -1]

    def advance(self, words: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """Append one word to each beam.

        Parameters
        ----------
        words : torch.Tensor
            The words, of shape (sentences, beams).
        parents : torch.Tensor
            Which beam of the last step each of them continues, of the same shape.

        Returns
        -------
        torch.Tensor
            The states after the words, of shape (sentences * beams, d_model).
        """
        sentences, beams = words.shape
        slots = self._visible.shape[-1]
        inherited = self._visible[:sentences].gather(1, parents.unsqueeze(-1).expand(-1, -1, slots))
        own = torch.full((beams, beams), float("-inf"), dtype=inherited.dtype).fill_diagonal_(0)
        self._visible = torch.cat((inherited, own.expand(sentences, -1, -1)), dim=-1)  # (B, Q, L)
        self._last_position = self._last_position[:sentences] + 1
        return self._decode(words, self._last_position, self._visible).flatten(0, 1)

    def keep(self, order: list[int]) -> None:
        """Drop finished sentences.

        Parameters
        ----------
        order : list[int]
            For each place that stays, the place of the sentence that shall stand there. Only sentences that change
            their place are copied.
        """
        for target, source in enumerate(order):
            if target != source:
                self._visible[target] = self._visible[source]
                self._last_position[target] = self._last_position[source]
                self._source_visible[target] = self._source_visible[source]
                for layer in self._layers:
                    layer.move(source, target)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Score every word.

        Parameters
        ----------
        states : torch.Tensor
            Decoder states, of shape (rows, d_model).

        Returns
        -------
        torch.Tensor
            Scores before the softmax, of shape (rows, vocabulary).
        """
        return self._projection(states)

    def best_words(self, states: torch.Tensor, count: int, banned: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the most probable words without keeping the probabilities of the others.

        Parameters
        ----------
        states : torch.Tensor
            Decoder states, of shape (rows, d_model).
        count : int
            How many words to find for each row.
        banned : list[int]
            Words that shall not be found; they still have their share of the probability.

        Returns
        -------
        tuple[torch.Tensor, torch.Tensor]
            Logarithms of the probabilities, best first, and the words, both of shape (rows, count).

        Notes
        -----
        Logits are formed in a buffer that is used again and again, some rows at a time.
        """
        parts = [self._best_words(rows, count, banned) for rows in states.split(ROWS_AT_A_TIME)]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _best_words(self, states: torch.Tensor, count: int, banned: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._form_logits(states)  # (B Q, V), filled up with -inf to whole chunks
        hidden = logits[:, banned]
        logits[:, banned] = float("-inf")

        chunks = logits.unflatten(-1, (-1, CHUNK_OF_WORDS))  # (B Q, V / C, C)
        peaks = chunks.amax(dim=-1)  # (B Q, V / C)
        # The best words stand in the chunks with the best peaks.
        of_chunk = peaks.topk(min(count, peaks.shape[-1])).indices  # (B Q, count)
        in_chunks = chunks.gather(1, of_chunk.unsqueeze(-1).expand(-1, -1, CHUNK_OF_WORDS)).flatten(1)
        best, index = in_chunks.topk(min(count, in_chunks.shape[-1]))
        words = of_chunk.gather(1, index // CHUNK_OF_WORDS) * CHUNK_OF_WORDS + index % CHUNK_OF_WORDS

        top = torch.cat((peaks, hidden), dim=-1).amax(dim=-1, keepdim=True)
        total = logits.sub_(top).exp_().sum(dim=-1, keepdim=True) + (hidden - top).exp_().sum(dim=-1, keepdim=True)
        return best - (top + total.log()), words

    def _form_logits(self, states: torch.Tensor) -> torch.Tensor:
        vocab_size = self._projection.weight.shape[1]
        logits = self._logits[: len(states)]
        torch.mm(states, self._projection.weight, out=logits[:, :vocab_size])
        logits[:, vocab_size:] = float("-inf")
        return logits

    def _decode(self, words: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        sentences, queries, slots = visible.shape
        if slots > self._capacity:
            self._make_room(max(2 * self._capacity, slots))
        heads = self._source_visible.shape[1]
        visible = visible.repeat_interleave(heads, dim=0)  # (B H, Q, L)
        visible_source = self._source_visible[:sentences].flatten(0, 1)  # (B H, 1, S)
        states = self._stack.embed_tokens(words) * self._stack.embed_scale + self._encode(positions)
        states = states.flatten(0, 1)  # (B Q, D)
        for layer in self._layers:
            states = layer(states, sentences, visible, visible_source)
        return states.unflatten(0, (sentences, queries))

    def _make_room(self, capacity: int) -> None:
        self._capacity = capacity
        for layer in self._layers:
            layer.make_room(capacity)
        if self._stack.config.position_encoding == "sinusoidal":
            self._sinusoids = self._stack.encode_positions(torch.arange(capacity)).to(self._logits.dtype)

    def _encode(self, positions: torch.Tensor) -> torch.Tensor:
        if self._stack.config.position_encoding == "sinusoidal":
            return self._sinusoids[positions]
        return self._stack.encode_positions(positions)
