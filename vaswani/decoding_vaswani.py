"""Inference without detours, in torch: the encoder on real words only, the beams of a sentence together.

Both compute what the model's own `forward` computes, from the same weights, without what inference does not need.
Dimension letters in shape comments: B sentences, S source length, M real source words of a batch, Q queries of a
sentence (the words of a prompt, or its beams), L keys in reach of a query, D d_model, F d_ff, H heads, K d_k, U d_v,
V vocabulary.
"""

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
        False where reading `.weight` would skip something: an adapter, a quantised layer other than of `is_int8`, a
        hook, a replaced or inherited `forward`, a weight that is sharded, in half precision or on another device than
        the CPU, dropout in training, autocast, and while torch traces a graph. The hooks with which transformers
        records outputs are no obstacle: they are idle unless outputs are asked for.
    """
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if model.training or is_traced or torch.is_autocast_enabled("cpu"):
        return False
    files = {type(model).__module__, *_FILES}
    precisions = set()
    for module in modules_of(model):
        is_known = type(module) in _LEAVES or type(module).__module__ in files
        if not is_known or "forward" in vars(module) or _is_watched(module):
            return False
        for weight in module._parameters.values():
            if weight is not None:
                if weight.device.type != "cpu" or not (type(weight) is nn.Parameter or is_int8(weight)):
                    return False
                precisions.add(weight.dtype)
    return precisions in ({torch.float32}, {torch.float64})


def is_int8(weight: torch.Tensor) -> bool:
    """Tell whether a weight was rounded to eight bits by torchao, for inputs that are rounded as they come.

    Parameters
    ----------
    weight : torch.Tensor
        The weight of a linear layer.

    Returns
    -------
    bool
        True for the tensors of `Int8DynamicActivationInt8WeightConfig` with a scale for each row of weights and of
        inputs, and no zero point.
    """
    if type(weight).__name__ != "Int8Tensor":
        return False
    rest: Any = weight
    inputs = rest.act_quant_kwargs
    if inputs is None or rest.act_quant_scale is not None or rest.act_pre_scale is not None:
        return False
    is_by_row = type(inputs.granularity).__name__ == "PerRow" and rest.scale.numel() == len(weight)
    is_symmetric = inputs.mapping_type.name == "SYMMETRIC" and (rest.zero_point is None or not rest.zero_point.any())
    return is_by_row and is_symmetric


def has_hooks(modules: nn.Module) -> bool:
    """Tell whether something watches modules.

    Parameters
    ----------
    modules : nn.Module
        A module with what it contains.

    Returns
    -------
    bool
        Whether there is a hook, other than those with which transformers records outputs that are asked for.
    """
    return any(map(_is_watched, modules_of(modules)))


def _is_watched(module: nn.Module) -> bool:
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks
    return any(hooks) and any(hook.__module__ != output_capturing.__name__ for some in hooks for hook in some.values())


def modules_of(model: nn.Module) -> list[nn.Module]:
    """List a module and all that it contains, in a tenth of the time of `model.modules()`.

    Parameters
    ----------
    model : nn.Module
        The module.

    Returns
    -------
    list[nn.Module]
        The modules; one that stands in two places is there twice.
    """
    modules = [model]
    for module in modules:
        modules.extend(child for child in module._modules.values() if child is not None)
    return modules


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    """List the parameters of a module and of all that it contains.

    Parameters
    ----------
    model : nn.Module
        The module.

    Returns
    -------
    list[torch.Tensor]
        The parameters; a shared one is there several times.
    """
    return [each for module in modules_of(model) for each in module._parameters.values() if each is not None]


def encode_real_words(stack: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Apply encoder layers to the real words of a padded batch, and only to them.

    Parameters
    ----------
    stack : Any
        An encoder of which `can_bypass` holds.
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
    config = stack.config
    real = attention_mask.flatten().nonzero().squeeze(-1)  # (M)
    visible = attention_mask.bool()[:, None, None, :]  # (B, 1, 1, S)
    packed = hidden_states.flatten(0, 1)[real]  # (M, D)

    def heads_of(projected: torch.Tensor, width: int) -> torch.Tensor:
        padded = projected.new_zeros(attention_mask.numel(), projected.shape[-1])
        padded[real] = projected
        return padded.view(*attention_mask.shape, -1, width).transpose(1, 2)  # (B, H, S, K)

    for layer in stack.layers:
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


class _Layer:
    """One decoder layer at work, with the keys and values of many sentences.

    The beams of a sentence share its source's keys and values. Those of the target stand where they were written;
    which of them a beam may see is the business of a mask, so nothing is ever reordered.
    """

    def __init__(self, layer: Any, encoded: torch.Tensor, real: torch.Tensor | None) -> None:
        own, cross = layer.self_attn, layer.encoder_attn
        self.layer = layer
        self.widths = own.config.d_k, own.config.d_v
        self.scaling = own.scaling
        self.source = [self._project(each, encoded, real) for each in (cross.k_proj, cross.v_proj)]  # (B, H, S, K)
        self.own = [encoded.new_empty(len(encoded), own.config.num_attention_heads, 0, width) for width in self.widths]

    def _project(self, projection: nn.Linear, encoded: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """Return (B, H, S, K) for encoder states (B, S, D), computed where they are real."""
        if real is None:
            projected = projection(encoded)
        else:
            projected = encoded.new_zeros(*encoded.shape[:2], projection.out_features)
            projected[real] = projection(encoded[real])
        heads = self.layer.self_attn.config.num_attention_heads
        return projected.unflatten(-1, (heads, -1)).transpose(1, 2).contiguous()

    def make_room(self, capacity: int) -> None:
        for index, old in enumerate(self.own):
            self.own[index] = old.new_empty(*old.shape[:2], capacity, old.shape[-1])
            self.own[index][:, :, : old.shape[2]] = old

    def move(self, source: int, target: int) -> None:
        for cache in (*self.own, *self.source):
            cache[target] = cache[source]

    def __call__(
        self, states: torch.Tensor, sentences: slice, visible: torch.Tensor, visible_source: torch.Tensor
    ) -> torch.Tensor:
        """Apply the layer to the states (B Q, D) of some sentences; the masks are (B, H, Q, L or S)."""
        layer, own, cross = self.layer, self.layer.self_attn, self.layer.encoder_attn
        queries, slots = visible.shape[2:]
        for cache, projection in zip(self.own, (own.k_proj, own.v_proj), strict=True):
            cache[sentences, :, slots - queries : slots] = self._heads_of(projection(states), queries)
        keys, values = (cache[sentences, :, :slots] for cache in self.own)  # (B, H, L, K)
        attended = self._attend(self._heads_of(own.q_proj(states), queries), keys, values, visible)
        states = layer.self_attn_layer_norm(states + own.out_proj(attended))

        keys, values = (cache[sentences] for cache in self.source)  # (B, H, S, K)
        attended = self._attend(self._heads_of(cross.q_proj(states), queries), keys, values, visible_source)
        states = layer.encoder_attn_layer_norm(states + cross.out_proj(attended))
        return layer.feed_forward_layer_norm(states + layer.feed_forward(states))

    def _heads_of(self, projected: torch.Tensor, queries: int) -> torch.Tensor:
        """Return (B, H, Q, K) for (B Q, H K)."""
        heads = self.layer.self_attn.config.num_attention_heads
        return projected.view(-1, queries, heads, projected.shape[-1] // heads).transpose(1, 2)

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        """Return (B Q, H U) for queries (B, H, Q, K) and keys (B, H, L, K); faster here than torch's fused function."""
        query, keys, of_heads = query.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1)  # (B H, ...)
        scores = torch.baddbmm(visible.flatten(0, 1), query, keys.mT, alpha=self.scaling)  # (B H, Q, L)
        attended = torch.bmm(scores.softmax(dim=-1), of_heads).unflatten(0, values.shape[:2])  # (B, H, Q, U)
        return attended.transpose(1, 2).flatten(0, 1).flatten(1)


def largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the largest values of each row, as `torch.topk` does, faster where rows are long.

    Parameters
    ----------
    values : torch.Tensor
        Values of shape (rows, length).
    count : int
        How many to find for each row; all of a shorter one.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        The values, largest first, and their indices, both of shape (rows, count).

    Notes
    -----
    The largest values stand in the chunks with the largest maxima. Maxima of chunks are a vectorised pass over the
    row; what is left to be sorted is short.
    """
    count = min(count, values.shape[1])
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


def best_of_beams(
    values: torch.Tensor, words: torch.Tensor, scores: torch.Tensor, count: int, banned: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the most probable continuations of each sentence among those of its beams.

    Parameters
    ----------
    values : torch.Tensor
        Log-probabilities of some words after each beam, of shape (sentences * beams, words); they are changed.
    words : torch.Tensor
        The words, of the same shape.
    scores : torch.Tensor
        Log-probability of each beam, in double precision, of shape (sentences, beams).
    count : int
        How many continuations to find for each sentence.
    banned : list[int]
        Words that none of them may have.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        Log-probability, beam and word, best first, each of shape (sentences, count); where there are no more, the
        log-probability is minus infinity.
    """
    for word in banned:
        values.masked_fill_(words == word, float("-inf"))
    per_beam = values.shape[-1]
    totals = (values.to(scores.dtype).view(*scores.shape, per_beam) + scores.unsqueeze(-1)).flatten(1)
    best, index = totals.topk(min(count, totals.shape[-1]))
    if best.shape[-1] < count:  # a small vocabulary
        missing = (0, count - best.shape[-1])
        best = nn.functional.pad(best, missing, value=float("-inf"))
        index = nn.functional.pad(index, missing)
    return best, index // per_beam, words.view(len(scores), -1).gather(1, index)


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

    is_fast = True

    def __init__(self, model: Any, encoded: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
        self._stack = model.model.decoder
        self._head = model.lm_head
        real = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
        self._layers = [_Layer(layer, encoded, real) for layer in self._stack.layers]
        self._heads = model.config.num_attention_heads
        source_visible = encoded.new_zeros(encoded.shape[:2])
        if real is not None:
            source_visible.masked_fill_(~real, torch.finfo(encoded.dtype).min)
        self._source_visible = source_visible[:, None, None].repeat(1, self._heads, 1, 1)  # (B, H, 1, S)
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
            Scores before the softmax, of shape (rows, vocabulary).
        """
        logits: torch.Tensor = self._head(states)
        return logits

    def best_continuations(
        self, states: torch.Tensor, scores: torch.Tensor, count: int, banned: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Find the most probable continuations of each sentence by one word.

        Parameters
        ----------
        states : torch.Tensor
            Decoder states, of shape (sentences * beams, d_model).
        scores : torch.Tensor
            Log-probability of each beam, in double precision, of shape (sentences, beams).
        count : int
            How many continuations to find for each sentence.
        banned : list[int]
            Words that none of them may have.

        Returns
        -------
        tuple[torch.Tensor, torch.Tensor, torch.Tensor]
            Log-probability, beam and word, best first, each of shape (sentences, count).

        Notes
        -----
        Logits are formed some rows at a time, and not kept.
        """
        parts = [self._best_words(rows, count + len(banned)) for rows in states.split(ROWS_AT_A_TIME)]
        values, words = (torch.cat(each) for each in zip(*parts, strict=True))
        return best_of_beams(values, words, scores, count, banned)

    def _best_words(self, states: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and words (rows, count) of the most probable words."""
        logits = self.logits(states)  # (B Q, V)
        best, words = largest(logits, count)
        top = best[:, :1]
        return best - top - logits.sub_(top).exp_().sum(dim=-1, keepdim=True).log_(), words

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
        visible = visible.unsqueeze(1).repeat(1, self._heads, 1, 1)  # (B, H, Q, L)
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
