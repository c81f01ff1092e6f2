"""The paper's stacks in plain torch, with the names that the kernels read, and nothing of the package's own model."""

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, d_model: int, heads: int, d_k: int, d_v: int, bias: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(d_k=d_k, d_v=d_v)
        self.scaling = d_k**-0.5
        self.q_proj = nn.Linear(d_model, heads * d_k, bias=bias)
        self.k_proj = nn.Linear(d_model, heads * d_k, bias=bias)
        self.v_proj = nn.Linear(d_model, heads * d_v, bias=bias)
        self.out_proj = nn.Linear(heads * d_v, d_model, bias=bias)

    def forward(self, states: torch.Tensor, memory: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        query, key = (
            layer(rows).unflatten(-1, (-1, self.config.d_k)).transpose(-2, -3)
            for layer, rows in ((self.q_proj, states), (self.k_proj, memory))
        )
        value = self.v_proj(memory).unflatten(-1, (-1, self.config.d_v)).transpose(-2, -3)
        scores = (query @ key.mT * self.scaling).masked_fill(~visible, float("-inf"))
        return self.out_proj((scores.softmax(-1) @ value).transpose(-2, -3).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.activation: nn.Module = nn.ReLU()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.activation(self.fc1(states)))


class Layer(nn.Module):
    def __init__(self, d_model: int, heads: int, d_k: int, d_v: int, d_ff: int, bias: bool, is_decoder: bool) -> None:
        super().__init__()
        self.self_attn = Attention(d_model, heads, d_k, d_v, bias)
        self.self_attn_layer_norm = nn.LayerNorm(d_model, eps=1e-3)
        if is_decoder:
            self.encoder_attn = Attention(d_model, heads, d_k, d_v, bias)
            self.encoder_attn_layer_norm = nn.LayerNorm(d_model, eps=2e-3)
        self.feed_forward = FeedForward(d_model, d_ff)
        self.feed_forward_layer_norm = nn.LayerNorm(d_model, eps=3e-3)

    def forward(self, states: torch.Tensor, memory: Any, own: torch.Tensor, cross: Any) -> torch.Tensor:
        states = self.self_attn_layer_norm(states + self.self_attn(states, states, own))
        if memory is not None:
            states = self.encoder_attn_layer_norm(states + self.encoder_attn(states, memory, cross))
        return self.feed_forward_layer_norm(states + self.feed_forward(states))


class Stack(nn.Module):
    def __init__(self, embeddings: int, widths: list[int], d_model: int, *sizes: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(d_model, *sizes[:-2], d_ff, *sizes[-2:]) for d_ff in widths])
        self.embed_tokens = nn.Embedding(embeddings, d_model)
        self.final_layer_norm: nn.Module = nn.Identity()
        self.embed_scale = d_model**0.5
        self.d_model = d_model

    def encode_positions(self, positions: torch.Tensor) -> torch.Tensor:
        if (table := self._buffers.get("position_table")) is not None:
            return table[positions]
        angles = positions.unsqueeze(-1) * torch.arange(1, self.d_model + 1) * 0.1
        return angles.double().sin()


class Model(nn.Module):
    """An encoder, a decoder and an output embedding; layers differ in d_ff, scaling and eps."""

    def __init__(
        self,
        d_model: int = 16,
        heads: int = 2,
        d_k: int = 5,
        d_v: int = 7,
        widths: tuple[int, ...] = (33, 20),
        bias: bool = True,
        embeddings: int = 41,
        vocabulary: int = 41,
        output_bias: bool = False,
        activation: type[nn.Module] = nn.ReLU,
        positions: int | None = None,
        final_norm: bool = False,
    ) -> None:
        super().__init__()
        self.encoder = Stack(embeddings, list(widths), d_model, heads, d_k, d_v, bias, False)
        self.model = nn.Module()
        self.model.decoder = Stack(embeddings, list(widths), d_model, heads, d_k, d_v, bias, True)
        self.lm_head = nn.Linear(d_model, vocabulary, bias=output_bias)
        if final_norm:
            self.encoder.final_layer_norm = nn.LayerNorm(d_model, eps=4e-3)
            self.model.decoder.final_layer_norm = nn.LayerNorm(d_model, eps=5e-3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.4 * torch.randn_like(parameter))
        for number, layer in enumerate(self.model.decoder.layers):
            layer.self_attn.scaling *= 1 + number
            layer.encoder_attn.scaling *= 0.5 + number
            layer.feed_forward_layer_norm.eps *= 1 + 10 * number
        for layer in (*self.encoder.layers, *self.model.decoder.layers):
            layer.feed_forward.activation = activation()
        if positions is not None:
            self.model.decoder.register_buffer("position_table", torch.randn(positions, d_model))
        self.requires_grad_(False)

    def encode(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the encoder's output in double precision."""
        stack = copy.deepcopy(self.encoder).double()
        states = states.double()
        for layer in stack.layers:
            states = layer(states, None, mask.bool()[:, None, None, :], None)
        return stack.final_layer_norm(states)

    def logits(self, memory: torch.Tensor, mask: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (sequences, length, vocabulary) in double precision."""
        stack, head = copy.deepcopy(self.model.decoder).double(), copy.deepcopy(self.lm_head).double()
        length = tokens.shape[1]
        positions = stack.encode_positions(torch.arange(length)).float().double()
        states = stack.embed_tokens(tokens) * stack.embed_scale + positions
        own = torch.ones(length, length, dtype=torch.bool).tril()
        for layer in stack.layers:
            states = layer(states, memory.double(), own, mask.bool()[:, None, None, :])
        return head(stack.final_layer_norm(states))


def ragged_mask(*lengths: int) -> torch.Tensor:
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
