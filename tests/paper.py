"""The paper in NumPy, line by line, in float64: what the model must agree with."""

import numpy as np

Weights = dict[str, np.ndarray]

ACTIVATIONS = {"relu": lambda x: np.maximum(0, x), "swish": lambda x: x / (1 + np.exp(-x))}


def positional_encoding(length: int, d_model: int) -> np.ndarray:
    encoding = np.zeros((length, d_model))
    for position in range(length):
        for i in range(d_model // 2):
            angle = position / 10000 ** (2 * i / d_model)
            encoding[position, 2 * i] = np.sin(angle)
            encoding[position, 2 * i + 1] = np.cos(angle)
    return encoding


def softmax(scores: np.ndarray) -> np.ndarray:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def layer_norm(x: np.ndarray, w: Weights, name: str, eps: float) -> np.ndarray:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def attention(x: np.ndarray, memory: np.ndarray, w: Weights, name: str, heads: int, causal: bool) -> np.ndarray:
    q, k, v = (linear(y, w, f"{name}.{p}_proj") for y, p in ((x, "q"), (memory, "k"), (memory, "v")))
    outputs = []
    for q_i, k_i, v_i in zip(*(np.split(y, heads, axis=-1) for y in (q, k, v)), strict=True):
        scores = q_i @ k_i.T / np.sqrt(q_i.shape[-1])
        if causal:
            scores = np.where(np.tri(len(x), len(memory), dtype=bool), scores, -np.inf)
        outputs.append(softmax(scores) @ v_i)
    return linear(np.concatenate(outputs, axis=-1), w, f"{name}.out_proj")


def feed_forward(x: np.ndarray, w: Weights, name: str, activation: str = "relu") -> np.ndarray:
    return linear(ACTIVATIONS[activation](linear(x, w, f"{name}.fc1")), w, f"{name}.fc2")


def embed(ids: np.ndarray, w: Weights, stack: str) -> np.ndarray:
    matrix = w[f"{stack}.embed_tokens.weight"]
    d_model = matrix.shape[1]
    table = w.get(f"{stack}.embed_positions.weight", w.get(f"{stack}.position_table"))
    positions = positional_encoding(len(ids), d_model) if table is None else table[: len(ids)]
    return matrix[ids] * np.sqrt(d_model) + positions


def final_norm(x: np.ndarray, w: Weights, stack: str, eps: float) -> np.ndarray:
    name = f"{stack}.final_layer_norm"
    return layer_norm(x, w, name, eps) if f"{name}.weight" in w else x


def logits(source: list[int], target: list[int], w: Weights, config: object) -> np.ndarray:
    """Score each next word after the start symbol and each word of `target`, for one sentence without padding."""
    heads, eps, activation = config.num_attention_heads, config.layer_norm_eps, config.activation_function
    x = embed(np.array(source), w, "model.encoder")
    for n in range(config.encoder_layers):
        layer = f"model.encoder.layers.{n}"
        attended = attention(x, x, w, f"{layer}.self_attn", heads, causal=False)
        x = layer_norm(x + attended, w, f"{layer}.self_attn_layer_norm", eps)
        transformed = feed_forward(x, w, f"{layer}.feed_forward", activation)
        x = layer_norm(x + transformed, w, f"{layer}.feed_forward_layer_norm", eps)
    memory = final_norm(x, w, "model.encoder", eps)
    x = embed(np.array([config.decoder_start_token_id, *target]), w, "model.decoder")
    for n in range(config.decoder_layers):
        layer = f"model.decoder.layers.{n}"
        attended = attention(x, x, w, f"{layer}.self_attn", heads, causal=True)
        x = layer_norm(x + attended, w, f"{layer}.self_attn_layer_norm", eps)
        attended = attention(x, memory, w, f"{layer}.encoder_attn", heads, causal=False)
        x = layer_norm(x + attended, w, f"{layer}.encoder_attn_layer_norm", eps)
        transformed = feed_forward(x, w, f"{layer}.feed_forward", activation)
        x = layer_norm(x + transformed, w, f"{layer}.feed_forward_layer_norm", eps)
    return linear(final_norm(x, w, "model.decoder", eps), w, "lm_head")


def smoothed_loss(scores: np.ndarray, words: list[int], eps: float) -> float:
    """Sum the cross-entropy against the target that gives 1 - eps to the right word and eps / (V - 1) to the others."""
    vocabulary = scores.shape[-1]
    total = 0.0
    for row, word in zip(scores, words, strict=True):
        target = np.full(vocabulary, eps / (vocabulary - 1))
        target[word] = 1 - eps
        total -= (target * np.log(softmax(row))).sum()
    return total
