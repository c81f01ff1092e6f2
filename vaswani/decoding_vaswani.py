"""Inference without detours: the encoder on real words only, the decoder on the beams of a sentence together.

Both compute what the model's own `forward` computes, from the same weights, without what inference does not need.
Dimension letters in shape comments: B sentences, S source length, M real source words of a batch, Q queries of a
sentence (the words of a prompt, or its beams), L keys in reach of a query, D d_model, F d_ff, H heads, K d_k, U d_v,
V vocabulary, P parts of a product that threads take side by side.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers.utils import output_capturing

# Rows that go through the decoder together: more are no faster, and need more memory.
ROWS_AT_A_TIME = 128
# Words whose maximum is taken first when the best words are looked for.
CHUNK_OF_WORDS = 64
# Keys for which the cache of a sentence has room at first; it doubles when it is full.
FIRST_CAPACITY = 128
# Up to so many heads of all sentences, torch's fused attention is faster than its three steps one by one.
FEW_HEADS = 16

# What a stack may be made of beside the classes of its own file.
_LEAVES = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout)
_FILES = ("torch.nn.modules.container", "torch.nn.modules.activation", "transformers.activations")


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
        in training, autocast, and while torch traces a graph. The hooks with which transformers records outputs are
        no obstacle: they are idle unless outputs are asked for.
    """
    if model.training or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    own_file = type(model).__module__
    for module in model.modules():
        is_known = type(module) in _LEAVES or type(module).__module__ in (own_file, *_FILES)
        if not is_known or "forward" in vars(module) or module._forward_pre_hooks:
            return False
        if any(hook.__module__ != output_capturing.__name__ for hook in module._forward_hooks.values()):
            return False
    weights = list(model.parameters())
    is_plain = all(type(weight) is nn.Parameter and weight.device.type == "cpu" for weight in weights)
    return is_plain and {weight.dtype for weight in weights} in ({torch.float32}, {torch.float64})


def encode_real_words(layers: nn.ModuleList, hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
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
    first: Any = layers[0]
    config = first.self_attn.config
    real = attention_mask.flatten().nonzero().squeeze(-1)  # (M)
    visible = attention_mask.bool()[:, None, None, :]  # (B, 1, 1, S)
    packed = hidden_states.flatten(0, 1)[real]  # (M, D)

    def heads_of(projected: torch.Tensor, width: int) -> torch.Tensor:
        padded = projected.new_zeros(attention_mask.numel(), projected.shape[-1])
        padded[real] = projected
        return padded.view(*attention_mask.shape, -1, width).transpose(1, 2)  # (B, H, S, K)

    layer: Any
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


class _LayerWeights:
    """The weights of one decoder layer, each in P parts that threads can take side by side.

    A part of the projections holds some of the heads, a part of the feed-forward layer some of its inner width; each
    part has its own share in the layer's output, and the shares are added up. The three projections of self-attention
    are one product; where d_k and d_v differ, zeros make them equal.
    """

    def __init__(self, layer: Any, parts: int) -> None:
        own, cross, feed_forward = layer.self_attn, layer.encoder_attn, layer.feed_forward
        projections, output = _widened_to_one(own)
        self.own_projections = _split_outputs(parts, *projections)
        self.own_output = _split_inputs(parts, output)
        self.source_query = _split_outputs(parts, cross.q_proj.weight)
        self.source_output = _split_inputs(parts, cross.out_proj.weight.t())
        self.inner = _split_outputs(parts, feed_forward.fc1.weight)
        self.outer = _split_inputs(parts, feed_forward.fc2.weight.t())


def _widened_to_one(attention: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the weights of self-attention, the last one transposed, with zeros that make d_k and d_v equal."""
    config = attention.config
    widest = max(config.d_k, config.d_v)

    def widened(rows: torch.Tensor, width: int) -> torch.Tensor:
        by_head = rows.unflatten(0, (config.num_attention_heads, width))  # (H, K, D)
        return nn.functional.pad(by_head, (0, 0, 0, widest - width)).flatten(0, 1)

    widths = (("q_proj", config.d_k), ("k_proj", config.d_k), ("v_proj", config.d_v))
    projections = [widened(getattr(attention, name).weight, width) for name, width in widths]
    return projections, widened(attention.out_proj.weight.t(), config.d_v)


def _split_outputs(parts: int, *weights: torch.Tensor) -> torch.Tensor:
    """Return weights with the same input as one product's (P, inputs, outputs / P), without P if it is 1."""
    split = torch.cat([weight.detach().unflatten(0, (parts, -1)) for weight in weights], dim=1)
    return split.mT.contiguous() if parts > 1 else split[0].t().contiguous()


def _split_inputs(parts: int, weight: torch.Tensor) -> torch.Tensor:
    """Return a transposed weight as (P, inputs / P, outputs), without P if it is 1."""
    weight = weight.detach().contiguous()
    return weight.unflatten(0, (parts, -1)) if parts > 1 else weight


class DecoderWeights:
    """Copies of a decoder's weights, transposed and split among threads, for products of few rows.

    Such products are up to twice as fast with them on a CPU. The copies stay with their model from one search to the
    next, as long as `fits` holds.

    Parameters
    ----------
    model : Any
        A `VaswaniForConditionalGeneration` of which `can_bypass` holds.
    parts : int
        Number of parts; it divides the number of heads and d_ff.
    """

    def __init__(self, model: Any, parts: int) -> None:
        self.parts = parts
        self.layers = [_LayerWeights(layer, parts) for layer in model.model.decoder.layers]
        words = model.lm_head.weight.detach()  # (V, D)
        words = nn.functional.pad(words, (0, 0, 0, -len(words) % parts))
        self.words = _split_outputs(parts, words)  # (P, D, V / P)
        self._state = self._state_of(model)

    @classmethod
    def of(cls, model: Any) -> "DecoderWeights":
        """Return the copies that a model keeps, made anew where its weights or the number of threads changed.

        Parameters
        ----------
        model : Any
            A `VaswaniForConditionalGeneration` of which `can_bypass` holds.

        Returns
        -------
        DecoderWeights
            The copies.
        """
        common = math.gcd(model.config.num_attention_heads, model.config.d_ff)
        parts = max(parts for parts in range(1, torch.get_num_threads() + 1) if common % parts == 0)
        kept = model.decoder_weights
        if kept is None or kept.parts != parts or not kept._fits(model):
            model.decoder_weights = kept = None  # free the old copies first
            model.decoder_weights = kept = cls(model, parts)
        return kept

    def _fits(self, model: Any) -> bool:
        marks, products = self._state_of(model)
        return marks == self._state[0] and torch.equal(products, self._state[1])

    @staticmethod
    def _state_of(model: Any) -> tuple[list[tuple[int, int]], torch.Tensor]:
        """Return what changes with the weights: torch's count of changes, and a product for those it does not see."""
        weights = [model.lm_head.weight.detach()]
        for layer in model.model.decoder.layers:
            own, cross, feed_forward = layer.self_attn, layer.encoder_attn, layer.feed_forward
            copied = (own.q_proj, own.k_proj, own.v_proj, own.out_proj, cross.q_proj, cross.out_proj)
            weights += [each.weight.detach() for each in (*copied, feed_forward.fc1, feed_forward.fc2)]
        marks = [(weight.data_ptr(), -1 if weight.is_inference() else weight._version) for weight in weights]
        probe = torch.arange(1, 1 + max(weight.shape[1] for weight in weights), dtype=weights[0].dtype).sin_()
        return marks, torch.cat([torch.mv(weight, probe[: weight.shape[1]]) for weight in weights])


class _Layer:
    """One decoder layer at work: its weights, and the keys and values of many sentences.

    The beams of a sentence share its source's keys and values. Those of the target stand where they were written;
    which of them a beam may see is the business of a mask, so nothing is ever reordered.
    """

    def __init__(
        self, layer: Any, weights: _LayerWeights, parts: int, encoded: torch.Tensor, real: torch.Tensor | None
    ) -> None:
        own, cross, feed_forward = layer.self_attn, layer.encoder_attn, layer.feed_forward
        config = own.config
        self.weights = weights
        self.parts = parts
        self.heads = config.num_attention_heads // parts  # of each part
        self.d_k = config.d_k
        self.width = max(config.d_k, config.d_v)
        self.scaling = own.scaling
        self.activation = feed_forward.activation
        self.own_bias = None
        if own.q_proj.bias is not None:
            fillers = [(self.width - width) for width in (config.d_k, config.d_k, config.d_v)]
            biases = [
                nn.functional.pad(each.bias.view(config.num_attention_heads, -1), (0, filler)).view(parts, 1, -1)
                for each, filler in zip((own.q_proj, own.k_proj, own.v_proj), fillers, strict=True)
            ]
            self.own_bias = torch.cat(biases, dim=-1)  # (P, 1, 3 K H / P)
        self.query_bias = None if cross.q_proj.bias is None else cross.q_proj.bias.view(parts, 1, -1)
        self.inner_bias = feed_forward.fc1.bias.view(parts, 1, -1)
        self.output_biases = [output.bias for output in (own.out_proj, cross.out_proj, feed_forward.fc2)]
        norms = (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.feed_forward_layer_norm)
        self.norms = [(norm.normalized_shape, norm.weight, norm.bias, norm.eps) for norm in norms]

        self.source_keys = self._project(cross.k_proj, config.d_k, encoded, real)  # (B, H, S, K)
        self.source_values = self._project(cross.v_proj, config.d_v, encoded, real)  # (B, H, S, U)
        self.cache = encoded.new_empty(2, len(encoded), parts * self.heads, 0, self.width)  # (2, B, H, L, K)

    @staticmethod
    def _project(projection: nn.Linear, width: int, encoded: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """Return (B, H, S, K) for encoder states (B, S, D), computed where they are real."""
        if real is None:
            projected = projection(encoded)
        else:
            projected = encoded.new_zeros(*encoded.shape[:2], projection.out_features)
            projected[real] = projection(encoded[real])
        return projected.unflatten(-1, (-1, width)).transpose(1, 2).contiguous()

    def make_room(self, capacity: int) -> None:
        old = self.cache
        self.cache = old.new_empty(*old.shape[:3], capacity, old.shape[-1])
        self.cache[..., : old.shape[3], :] = old

    def move(self, source: int, target: int) -> None:
        self.cache[:, target] = self.cache[:, source]
        self.source_keys[target] = self.source_keys[source]
        self.source_values[target] = self.source_values[source]

    def __call__(
        self, states: torch.Tensor, sentences: slice, visible: torch.Tensor, visible_source: torch.Tensor
    ) -> torch.Tensor:
        """Apply the layer to the states (B Q, D) of some sentences; the masks are (B, H or 1, Q, L or S)."""
        weights = self.weights
        queries, slots = visible.shape[2:]

        projected = self._product(states, weights.own_projections, self.own_bias)  # (P, B Q, 3 K H / P)
        projected = self._heads_of(projected, queries, 3, self.width)  # (3, B, H, Q, K)
        self.cache[:, sentences, :, slots - queries : slots] = projected[1:]
        keys, values = self.cache[:, sentences, :, :slots].unbind()  # (B, H, L, K)
        attended = self._attend(projected[0], keys, values, visible)
        states = self._add_and_normalise(states, attended, weights.own_output, 0)

        query = self._product(states, weights.source_query, self.query_bias)  # (P, B Q, K H / P)
        query = self._heads_of(query, queries, 1, self.d_k)[0]  # (B, H, Q, K)
        attended = self._attend(query, self.source_keys[sentences], self.source_values[sentences], visible_source)
        states = self._add_and_normalise(states, attended, weights.source_output, 1)

        inner = self._product(states, weights.inner, self.inner_bias)  # (P, B Q, F / P)
        inner = inner.relu_() if isinstance(self.activation, nn.ReLU) else self.activation(inner)
        return self._add_and_normalise(states, inner, weights.outer, 2)

    def _heads_of(self, projected: torch.Tensor, queries: int, kinds: int, width: int) -> torch.Tensor:
        """Return (kinds, B, H, Q, K) for the result (P, B Q, kinds K H / P) of a product."""
        if self.parts == 1:
            return projected.view(-1, queries, kinds, self.heads, width).permute(2, 0, 3, 1, 4)
        split = projected.view(self.parts, -1, queries, kinds, self.heads, width)
        return split.permute(3, 1, 0, 4, 2, 5).flatten(2, 3)

    def _product(self, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return (P, B Q, outputs / P) for states (B Q, D), without P if it is 1."""
        if self.parts == 1:
            return torch.mm(states, weight) if bias is None else torch.addmm(bias[0], states, weight)
        states = states.expand(self.parts, -1, -1)
        return torch.bmm(states, weight) if bias is None else torch.baddbmm(bias, states, weight)

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        """Return (P, B Q, U H / P), without P if it is 1, for queries (B, H, Q, K) and keys (B, H, L, K)."""
        sentences, heads, queries, _ = query.shape
        if sentences * heads <= FEW_HEADS:
            attended = nn.functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=visible, scale=self.scaling
            )  # (B, H, Q, U)
        else:
            query, keys, values = query.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1)  # (B H, ...)
            scores = torch.baddbmm(visible.flatten(0, 1), query, keys.mT, alpha=self.scaling)  # (B H, Q, L)
            attended = torch.bmm(scores.softmax(dim=-1), values).view(sentences, heads, queries, -1)
        if self.parts == 1:
            return attended.transpose(1, 2).reshape(sentences * queries, -1)
        attended = attended.unflatten(1, (self.parts, self.heads)).permute(1, 0, 3, 2, 4)
        return attended.reshape(self.parts, sentences * queries, -1)

    def _add_and_normalise(
        self, states: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, sub_layer: int
    ) -> torch.Tensor:
        """Return the norm of the states (B Q, D) plus the product of inputs (P, B Q, inputs / P)."""
        if self.parts == 1:
            total = torch.addmm(states, inputs, weight)
        else:
            total = torch.bmm(inputs, weight).sum(dim=0).add_(states)
        bias = self.output_biases[sub_layer]
        if bias is not None:
            total.add_(bias)
        return torch.layer_norm(total, *self.norms[sub_layer])


def largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the largest values of each row, as `torch.topk` does, faster where rows are long.

    Parameters
    ----------
    values : torch.Tensor
        Values of shape (rows, length).
    count : int
        How many to find for each row.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        The values, largest first, and their indices, both of shape (rows, count).

    Notes
    -----
    The largest values stand in the chunks with the largest maxima. Maxima of chunks are a vectorised pass over the
    row; what is left to be sorted is short.
    """
    chunks = values.shape[1] // CHUNK_OF_WORDS
    if chunks <= 2 * count:
        return values.topk(count)
    whole = values[:, : chunks * CHUNK_OF_WORDS].unflatten(1, (chunks, CHUNK_OF_WORDS))
    of_chunk = whole.amax(dim=-1).topk(count).indices  # (rows, count)
    candidates = whole.gather(1, of_chunk.unsqueeze(-1).expand(-1, -1, CHUNK_OF_WORDS)).flatten(1)
    indices = of_chunk.unsqueeze(-1) * CHUNK_OF_WORDS + torch.arange(CHUNK_OF_WORDS, device=values.device)
    indices = indices.flatten(1)
    if chunks * CHUNK_OF_WORDS < values.shape[1]:  # the values after the last whole chunk
        rest = torch.arange(chunks * CHUNK_OF_WORDS, values.shape[1], device=values.device)
        candidates = torch.cat((candidates, values[:, rest[0] :]), dim=1)
        indices = torch.cat((indices, rest.expand(len(values), -1)), dim=1)
    best, index = candidates.topk(count)
    return best, indices.gather(1, index)


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
        self._vocab_size = model.config.vocab_size
        self._weights = DecoderWeights.of(model)
        real = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
        self._layers = [
            _Layer(layer, weights, self._weights.parts, encoded, real)
            for layer, weights in zip(self._stack.layers, self._weights.layers, strict=True)
        ]
        self._heads = model.config.num_attention_heads
        source_visible = encoded.new_zeros(encoded.shape[:2])
        if real is not None:
            source_visible.masked_fill_(~real, torch.finfo(encoded.dtype).min)
        self._source_visible = source_visible[:, None, None].repeat(1, self._heads, 1, 1)  # (B, H, 1, S)
        self._logits = encoded.new_empty(0)
        self._own_visible = encoded.new_empty(0, 0)
        self._make_room(FIRST_CAPACITY)

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
        self._last_position = positions[:, -1:]  # (B, 1), or the one position that all sentences have
        if bool((self._last_position == self._last_position[0]).all()):
            self._last_position = self._last_position[:1]
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
        if self._own_visible.shape[:2] != (sentences, beams):
            own = torch.full((beams, beams), float("-inf"), dtype=self._visible.dtype).fill_diagonal_(0)
            self._own_visible = own.expand(sentences, -1, -1)
        inherited = self._visible[:sentences].gather(1, parents.unsqueeze(-1).expand(-1, -1, slots))
        self._visible = torch.cat((inherited, self._own_visible), dim=-1)  # (B, Q, L)
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
                if len(self._last_position) > 1:
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
            Scores before the softmax, of shape (rows, vocabulary), that last until the next step.
        """
        logits = self._form_logits(states)  # (P, B Q, V / P)
        return logits[0] if len(logits) == 1 else logits.transpose(0, 1).flatten(1)[:, : self._vocab_size]

    def best_words(self, states: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the most probable words without keeping the probabilities of the others.

        Parameters
        ----------
        states : torch.Tensor
            Decoder states, of shape (rows, d_model).
        count : int
            How many words to find for each row.

        Returns
        -------
        tuple[torch.Tensor, torch.Tensor]
            Logarithms of the probabilities, best first, and the words, both of shape (rows, count), or all words of
            a smaller vocabulary.

        Notes
        -----
        Logits are formed in a buffer that is used again and again, some rows at a time.
        """
        count = min(count, self._vocab_size)
        if len(states) <= ROWS_AT_A_TIME:
            return self._best_words(states, count)
        parts = [self._best_words(rows, count) for rows in states.split(ROWS_AT_A_TIME)]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _best_words(self, states: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._form_logits(states)  # (P, B Q, V / P)
        parts, rows, width = logits.shape
        best, words = largest(logits.view(-1, width), min(count, width))  # (P B Q, count)
        if parts > 1:
            words += torch.arange(0, parts * width, width).repeat_interleave(rows).unsqueeze(-1)
            best, words = (each.unflatten(0, (parts, rows)).transpose(0, 1).flatten(1) for each in (best, words))
            best, index = best.topk(count)
            words = words.gather(1, index)
        top = best[:, :1]
        total = logits.sub_(top).exp_().sum(dim=-1)  # (P, B Q)
        total = total[0] if parts == 1 else total.sum(dim=0)
        return best - (top + total.log_().unsqueeze(-1)), words

    def _form_logits(self, states: torch.Tensor) -> torch.Tensor:
        words, parts = self._weights.words, self._weights.parts
        rows, width = len(states), words.shape[-1]
        if self._logits.numel() < parts * rows * width:
            self._logits = states.new_empty(parts * rows * width)
        logits = self._logits[: parts * rows * width].view(parts, rows, width)
        if parts == 1:
            torch.mm(states, words, out=logits[0])
        else:
            torch.bmm(states.expand(parts, -1, -1), words, out=logits)
            logits[-1, :, self._vocab_size - (parts - 1) * width :] = float("-inf")  # what fills the last part up
        return logits

    def _decode(self, words: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        sentences, queries, slots = visible.shape
        if slots > self._capacity:
            self._make_room(max(2 * self._capacity, slots))
        words = nn.functional.embedding(words, self._stack.embed_tokens.weight)  # (B, Q, D)
        states = torch.add(self._encode(positions), words, alpha=self._stack.embed_scale)
        some = max(ROWS_AT_A_TIME // queries, 1)
        if sentences <= some:
            return self._decode_some(states, slice(0, sentences), visible)
        parts = [slice(first, min(first + some, sentences)) for first in range(0, sentences, some)]
        return torch.cat([self._decode_some(states[part], part, visible[part]) for part in parts])

    def _decode_some(self, states: torch.Tensor, sentences: slice, visible: torch.Tensor) -> torch.Tensor:
        shape = states.shape
        visible = visible.unsqueeze(1)  # (B, 1, Q, L)
        if len(states) * self._heads > FEW_HEADS:
            visible = visible.repeat(1, self._heads, 1, 1)  # (B, H, Q, L)
        visible_source = self._source_visible[sentences].expand(-1, -1, shape[1], -1)  # (B, H, Q, S)
        states = states.view(-1, shape[-1])  # (B Q, D)
        for layer in self._layers:
            states = layer(states, sentences, visible, visible_source)
        return states.view(shape)

    def _make_room(self, capacity: int) -> None:
        self._capacity = capacity
        for layer in self._layers:
            layer.make_room(capacity)
        if self._stack.config.position_encoding == "sinusoidal":
            self._sinusoids = self._stack.encode_positions(torch.arange(capacity)).to(self._source_visible.dtype)

    def _encode(self, positions: torch.Tensor) -> torch.Tensor:
        if self._stack.config.position_encoding == "sinusoidal":
            return nn.functional.embedding(positions, self._sinusoids)
        return self._stack.encode_positions(positions)
