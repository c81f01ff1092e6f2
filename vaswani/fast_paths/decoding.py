"""Fast decoders, in torch and through the kernels: the beams of a sequence together, caches that are never reordered.

Dimension letters in shape comments: B batch, S source length, Q queries of a sequence (the tokens of a prompt, or its
beams), L keys in reach of a query, D d_model, H heads, K d_k, U d_v, V vocabulary.
"""

from typing import Any

import torch
from torch import nn

from ..beam_search_vaswani import StepDecoder, best_of_beams
from ..kernels.decoder import KernelDecoder
from ..kernels.ranking import top_k_rows

# Rows that go through the decoder together: more are not faster, and need more memory.
ROWS_AT_A_TIME = 128
# Scores whose maximum is taken first when the largest are looked for.
CHUNK = 64
# Keys for which the cache of a sequence has space at first; it doubles when it is full.
FIRST_CAPACITY = 128


class _Layer:
    """One decoder layer, with the keys and values of a batch.

    The beams of a sequence share the keys and values of its source. Those of the target stay where they were written;
    a mask says which of them a beam may attend to, so nothing is ever reordered.
    """

    def __init__(self, layer: Any, encoded: torch.Tensor, real: torch.Tensor | None) -> None:
        causal, cross = layer.self_attn, layer.encoder_attn
        self.layer = layer
        self.heads = causal.q_proj.weight.shape[0] // causal.config.d_k
        widths = causal.config.d_k, causal.config.d_v
        self.cross_cache = [
            self._project(each, encoded, real, width)
            for each, width in zip((cross.k_proj, cross.v_proj), widths, strict=True)
        ]  # (B, H, S, K)
        self.self_cache = [encoded.new_empty(len(encoded), self.heads, 0, width) for width in widths]  # (B, H, L, K)

    @staticmethod
    def _project(projection: nn.Linear, encoded: torch.Tensor, real: torch.Tensor | None, width: int) -> torch.Tensor:
        """Return (B, H, S, K) for encoder states (B, S, D), computed where they are real."""
        if real is None:
            projected = projection(encoded)
        else:
            projected = encoded.new_zeros(*encoded.shape[:2], projection.weight.shape[0])
            projected[real] = projection(encoded[real])
        return projected.unflatten(-1, (-1, width)).transpose(1, 2).contiguous()

    def grow(self, capacity: int) -> None:
        for index, old in enumerate(self.self_cache):
            self.self_cache[index] = old.new_empty(*old.shape[:2], capacity, old.shape[-1])
            self.self_cache[index][:, :, : old.shape[2]] = old

    def move(self, source: int, target: int) -> None:
        for cache in (*self.self_cache, *self.cross_cache):
            cache[target] = cache[source]

    def __call__(
        self, states: torch.Tensor, sequences: slice, visible: torch.Tensor, visible_source: torch.Tensor
    ) -> torch.Tensor:
        """Apply the layer to the states (B Q, D) of some sequences; the masks are (B, H, Q, L or S)."""
        layer, causal, cross = self.layer, self.layer.self_attn, self.layer.encoder_attn
        queries, slots = visible.shape[2:]
        for cache, projection in zip(self.self_cache, (causal.k_proj, causal.v_proj), strict=True):
            cache[sequences, :, slots - queries : slots] = self._heads_of(projection(states), queries)
        keys, values = (cache[sequences, :, :slots] for cache in self.self_cache)  # (B, H, L, K)
        attended = self._attend(self._heads_of(causal.q_proj(states), queries), keys, values, visible, causal.scaling)
        states = layer.self_attn_layer_norm(states + causal.out_proj(attended))

        keys, values = (cache[sequences] for cache in self.cross_cache)  # (B, H, S, K)
        attended = self._attend(
            self._heads_of(cross.q_proj(states), queries), keys, values, visible_source, cross.scaling
        )
        states = layer.encoder_attn_layer_norm(states + cross.out_proj(attended))
        return layer.feed_forward_layer_norm(states + layer.feed_forward(states))

    def _heads_of(self, projected: torch.Tensor, queries: int) -> torch.Tensor:
        """Return (B, H, Q, K) for (B Q, H K)."""
        return projected.view(-1, queries, self.heads, projected.shape[-1] // self.heads).transpose(1, 2)

    @staticmethod
    def _attend(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Return (B Q, H U) for queries (B, H, Q, K) and keys (B, H, L, K); faster here than torch's fused function."""
        query, keys, of_heads = query.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1)  # (B H, ...)
        scores = torch.baddbmm(visible.flatten(0, 1), query, keys.mT, alpha=scaling)  # (B H, Q, L)
        attended = torch.bmm(scores.softmax(dim=-1), of_heads).unflatten(0, values.shape[:2])  # (B, H, Q, U)
        return attended.transpose(1, 2).flatten(0, 1).flatten(1)


def largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the largest values of each row, as `torch.topk` does; faster for long rows.

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
    chunks = values.shape[1] // CHUNK
    if chunks <= 2 * count:
        return values.topk(count)
    whole = values[:, : chunks * CHUNK].unflatten(1, (chunks, CHUNK))
    of_chunk = whole.amax(dim=-1).topk(count).indices  # (rows, count)
    candidates = whole.gather(1, of_chunk.unsqueeze(-1).expand(-1, -1, CHUNK)).flatten(1)
    indices = of_chunk.unsqueeze(-1) * CHUNK + torch.arange(CHUNK, device=values.device)
    indices = indices.flatten(1)
    if chunks * CHUNK < values.shape[1]:  # the values after the last whole chunk
        rest = torch.arange(chunks * CHUNK, values.shape[1], device=values.device)
        candidates = torch.cat((candidates, values[:, rest[0] :]), dim=1)
        indices = torch.cat((indices, rest.expand(len(values), -1)), dim=1)
    best, index = candidates.topk(count)
    return best, indices.gather(1, index)


class BeamDecoder(StepDecoder):
    """Take decoding steps in torch; a finished sequence costs nothing any more.

    Parameters
    ----------
    model : Any
        A `VaswaniForConditionalGeneration` for which the door chose this path.
    encoded : torch.Tensor
        The encoder's output, of shape (batch, source, d_model).
    attention_mask : torch.Tensor | None
        1 for a real source token, 0 for padding, of shape (batch, source). None means that all are real.

    Notes
    -----
    The queries of a sequence are rows of one attention: the tokens of its prompt first, its beams after that. Each step
    writes its keys into new slots, and a mask tells for each beam which slots hold its own ancestors.
    """

    drops_finished = True

    def __init__(self, model: Any, encoded: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
        self._stack = model.model.decoder
        self._head = model.lm_head
        real = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
        self._layers = [_Layer(layer, encoded, real) for layer in self._stack.layers]
        self._heads = self._layers[0].heads
        source_visible = encoded.new_zeros(encoded.shape[:2])
        if real is not None:
            source_visible.masked_fill_(~real, torch.finfo(encoded.dtype).min)
        self._source_visible = source_visible[:, None, None].repeat(1, self._heads, 1, 1)  # (B, H, 1, S)
        self._itself_visible = encoded.new_empty(0, 0)
        self._grow(FIRST_CAPACITY)

    def start(self, prompt: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Decode the prompts, once for all beams of a sequence.

        Parameters
        ----------
        prompt : torch.Tensor
            Start token and forced tokens, of shape (batch, length).
        attention_mask : torch.Tensor
            1 for a real token, 0 for the padding before it, of the same shape.

        Returns
        -------
        torch.Tensor
            The states after the last token, of shape (batch, d_model).
        """
        positions = (attention_mask.long().cumsum(-1) - 1).clamp_(min=0)
        self._last_position = positions[:, -1:]  # (B, 1), or the one position that all sequences have
        if bool((self._last_position == self._last_position[0]).all()):
            self._last_position = self._last_position[:1]
        length = prompt.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        # Padding attends to itself, because a softmax over nothing is undefined; nothing else attends to it.
        allowed = causal & (attention_mask.bool()[:, None, :] | torch.eye(length, dtype=torch.bool))
        visible = torch.zeros(allowed.shape, dtype=self._source_visible.dtype).masked_fill_(~allowed, float("-inf"))
        self._visible = visible[:, -1:]  # (B, 1, L): what follows the prompt attends to what its last token attends to
        return self._decode(prompt, positions, visible)[:, -1]

    def advance(self, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """Append one token to each beam.

        Parameters
        ----------
        tokens : torch.Tensor
            Token ids, of shape (batch, beams).
        parents : torch.Tensor
            Which beam of the last step each of them continues, of the same shape.

        Returns
        -------
        torch.Tensor
            The states after the tokens, of shape (batch * beams, d_model).
        """
        batch, beams = tokens.shape
        slots = self._visible.shape[-1]
        if self._itself_visible.shape[:2] != (batch, beams):
            itself = torch.full((beams, beams), float("-inf"), dtype=self._visible.dtype).fill_diagonal_(0)
            self._itself_visible = itself.expand(batch, -1, -1)
        inherited = self._visible[:batch].gather(1, parents.unsqueeze(-1).expand(-1, -1, slots))
        self._visible = torch.cat((inherited, self._itself_visible), dim=-1)  # (B, Q, L)
        self._last_position = self._last_position[:batch] + 1
        return self._decode(tokens, self._last_position, self._visible).flatten(0, 1)

    def keep(self, order: list[int]) -> None:
        """Drop finished sequences.

        Parameters
        ----------
        order : list[int]
            For each place that stays, the place of the sequence that shall stand there. Only sequences that change
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
        """Compute the logits of the next token.

        Parameters
        ----------
        states : torch.Tensor
            Decoder states, of shape (rows, d_model).

        Returns
        -------
        torch.Tensor
            Logits of shape (rows, vocabulary).
        """
        logits: torch.Tensor = self._head(states)
        return logits

    def top_k(
        self, scores: torch.Tensor, count: int, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the largest scores of each row, or of some rows.

        Parameters
        ----------
        scores : torch.Tensor
            Scores of shape (any, vocabulary).
        count : int
            How many to find for each row; all of a shorter one.
        rows : torch.Tensor | None, default=None
            Which rows. None means all.

        Returns
        -------
        tuple[torch.Tensor, torch.Tensor]
            The scores, largest first, and their columns, both of shape (rows, count).
        """
        return largest(scores if rows is None else scores.index_select(0, rows), count)

    def best_continuations(
        self, states: torch.Tensor, scores: torch.Tensor, count: int, banned: list[int], renormalise: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Find the most probable continuations of each sequence by one token.

        Parameters
        ----------
        states : torch.Tensor
            Decoder states, of shape (batch * beams, d_model).
        scores : torch.Tensor
            Log-probability of each beam, in double precision, of shape (batch, beams).
        count : int
            How many continuations to find for each sequence.
        banned : list[int]
            Tokens that none of them may have.
        renormalise : bool, default=False
            Whether the probabilities of the other tokens shall add up to 1.

        Returns
        -------
        tuple[torch.Tensor, torch.Tensor, torch.Tensor]
            Log-probability, beam and token, best first, each of shape (batch, count).

        Notes
        -----
        Logits are formed some rows at a time, and not kept.
        """
        left_out = banned if renormalise else []
        parts = [self._best_tokens(rows, count + len(banned), left_out) for rows in states.split(ROWS_AT_A_TIME)]
        values, tokens = (torch.cat(each) for each in zip(*parts, strict=True))
        return best_of_beams(values, tokens, scores, count, banned)

    def _best_tokens(self, states: torch.Tensor, count: int, left_out: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and ids (rows, count) of the most probable tokens."""
        logits = self.logits(states)  # (B Q, V)
        if left_out:
            logits[:, left_out] = float("-inf")
        best, tokens = largest(logits, count)
        top = best[:, :1]
        return best - top - logits.sub_(top).exp_().sum(dim=-1, keepdim=True).log_(), tokens

    def _decode(self, tokens: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        batch, queries, slots = visible.shape
        if slots > self._capacity:
            self._grow(max(2 * self._capacity, slots))
        embeds = nn.functional.embedding(tokens, self._stack.embed_tokens.weight)  # (B, Q, D)
        states = torch.add(self._encode(positions), embeds, alpha=self._stack.embed_scale)
        some = max(ROWS_AT_A_TIME // queries, 1)
        if batch <= some:
            return self._decode_some(states, slice(0, batch), visible)
        parts = [slice(first, min(first + some, batch)) for first in range(0, batch, some)]
        return torch.cat([self._decode_some(states[part], part, visible[part]) for part in parts])

    def _decode_some(self, states: torch.Tensor, sequences: slice, visible: torch.Tensor) -> torch.Tensor:
        shape = states.shape
        visible = visible.unsqueeze(1).repeat(1, self._heads, 1, 1)  # (B, H, Q, L)
        visible_source = self._source_visible[sequences].expand(-1, -1, shape[1], -1)  # (B, H, Q, S)
        states = states.view(-1, shape[-1])  # (B Q, D)
        for layer in self._layers:
            states = layer(states, sequences, visible, visible_source)
        return self._stack.final_layer_norm(states).view(shape)

    def _grow(self, capacity: int) -> None:
        self._capacity = capacity
        for layer in self._layers:
            layer.grow(capacity)
        if self._stack.config.position_encoding == "sinusoidal":
            self._sinusoids = self._stack.encode_positions(torch.arange(capacity)).to(self._source_visible.dtype)

    def _encode(self, positions: torch.Tensor) -> torch.Tensor:
        if self._stack.config.position_encoding == "sinusoidal":
            return nn.functional.embedding(positions, self._sinusoids)
        return self._stack.encode_positions(positions)


class KernelStepDecoder(KernelDecoder, StepDecoder):
    """Take decoding steps through the kernels; a finished sequence costs nothing any more."""

    drops_finished = True

    def top_k(
        self, scores: torch.Tensor, count: int, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the largest scores of each row, or of some rows.

        Parameters
        ----------
        scores : torch.Tensor
            Scores of shape (any, vocabulary).
        count : int
            How many to find for each row; all of a shorter one.
        rows : torch.Tensor | None, default=None
            Which rows. None means all.

        Returns
        -------
        tuple[torch.Tensor, torch.Tensor]
            The scores, largest first, and their columns, both of shape (rows, count).
        """
        if type(scores) is not torch.Tensor or scores.dtype != torch.float32 or not scores.is_cpu:
            return super().top_k(scores, count, rows)
        return top_k_rows(scores, torch.arange(len(scores)) if rows is None else rows, count)


__all__ = ["BeamDecoder", "KernelStepDecoder", "largest"]
