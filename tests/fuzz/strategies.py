"""Random configurations, batches, labels and generation options; most of them are fine, some are not."""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from tests.conftest import tiny_model

SEEDS = st.integers(0, 2**31 - 1)
ID_TYPES = st.sampled_from([torch.int64] * 6 + [torch.int32])
MASK_TYPES = st.sampled_from([torch.int64] * 4 + [torch.bool, torch.float32, torch.int32])
LAYOUTS = st.sampled_from(["plain"] * 4 + ["transposed", "strided", "offset"])
OUTSIDE = (-1, -100, 10**9, -(2**62), 2**62)


def mostly(common: st.SearchStrategy[Any], rare: st.SearchStrategy[Any], times: int = 9) -> st.SearchStrategy[Any]:
    """Draw from the second strategy once in so many times."""
    return st.integers(0, times).flatmap(lambda choice: rare if choice == times else common)


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the fields of a small model."""
    return {
        "vocab_size": draw(st.integers(5, 70)),
        "d_model": 2 * draw(st.integers(1, 12)),
        "d_ff": draw(st.integers(1, 40)),
        "num_attention_heads": draw(st.integers(1, 4)),
        "d_k": draw(st.integers(1, 9)),
        "d_v": draw(st.integers(1, 9)),
        "encoder_layers": draw(st.integers(1, 2)),
        "decoder_layers": draw(st.integers(1, 2)),
        "attention_bias": draw(st.booleans()),
        "final_layer_norm": draw(mostly(st.just(False), st.just(True), 2)),
        "tie_word_embeddings": draw(mostly(st.just(True), st.just(False), 3)),
        "position_encoding": draw(mostly(st.just("sinusoidal"), st.just("learned"), 4)),
        "max_position_embeddings": draw(st.integers(3, 40)),
        "activation_function": draw(mostly(st.just("relu"), st.sampled_from(["gelu", "silu"]))),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1, 0.5])),
        "layer_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
    }


def models(dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 5 + (torch.float64,)) -> st.SearchStrategy[Any]:
    """Draw a model with random weights, ready for evaluation."""

    def build(fields: dict[str, Any], seed: int, dtype: torch.dtype) -> Any:
        return tiny_model(seed, **fields).to(dtype)

    return st.builds(build, configurations(), SEEDS, st.sampled_from(dtypes))


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same numbers, otherwise in memory."""
    if layout == "transposed":
        return tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor
    if layout == "strided":
        wider = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
        wider[..., ::2] = tensor
        return wider[..., ::2]
    if layout == "offset":
        longer = tensor.new_zeros(tensor.numel() + 3)
        longer[3:] = tensor.flatten()
        return longer[3:].view(tensor.shape)
    return tensor


@st.composite
def masks(draw: st.DrawFn, rows: int, columns: int, sides: tuple[str, ...]) -> torch.Tensor:
    """Draw a mask of booleans: padding on either side, or anywhere, and rows without a token."""
    side = draw(st.sampled_from(sides))
    lengths = np.array(draw(st.lists(mostly(st.integers(1, 9), st.just(0), 30), min_size=rows, max_size=rows)), int)
    lengths = torch.from_numpy(lengths).clamp(max=columns).unsqueeze(-1)
    places = torch.arange(columns).expand(rows, columns)
    if side == "left":
        return places >= columns - lengths
    if side == "anywhere":
        generator = np.random.default_rng(draw(SEEDS))
        return torch.from_numpy(generator.random((rows, columns)) < 0.6).logical_or(places == columns - 1)
    return places < lengths


@st.composite
def token_ids(draw: st.DrawFn, rows: int, columns: int, vocab_size: int, is_wrong: bool = False) -> torch.Tensor:
    """Draw token ids, with one outside the vocabulary on request."""
    generator = np.random.default_rng(draw(SEEDS))
    ids = torch.from_numpy(generator.integers(0, vocab_size, (rows, columns)))
    if is_wrong and ids.numel():
        ids.view(-1)[draw(st.integers(0, ids.numel() - 1))] = draw(st.sampled_from([*OUTSIDE, vocab_size]))
    return ids


@st.composite
def batches(draw: st.DrawFn, vocab_size: int) -> dict[str, torch.Tensor]:
    """Draw the source of a batch: token ids and perhaps a mask, of several types and layouts."""
    rows = draw(mostly(st.integers(1, 5), st.just(0), 40))
    columns = draw(mostly(st.integers(1, 9), st.just(0), 40))
    is_wrong = draw(mostly(st.just(False), st.just(True), 30))
    ids = draw(token_ids(rows, columns, vocab_size, is_wrong))
    batch = {"input_ids": laid_out(ids if is_wrong else ids.to(draw(ID_TYPES)), draw(LAYOUTS))}
    if draw(mostly(st.just(True), st.just(False), 8)):
        shape = rows, columns
        if draw(mostly(st.just(False), st.just(True), 60)):
            shape = rows + 1, columns
        mask = draw(masks(*shape, ("right", "right", "left", "anywhere")))
        mask[:rows] |= (ids < 0) | (ids >= vocab_size)  # an unpadded batch does not have what is hidden
        batch["attention_mask"] = laid_out(mask.to(draw(MASK_TYPES)), draw(LAYOUTS))
    return batch


@st.composite
def labels(draw: st.DrawFn, rows: int, vocab_size: int) -> torch.Tensor:
    """Draw labels with -100 anywhere."""
    columns = draw(mostly(st.integers(1, 8), st.just(0), 40))
    ids = draw(token_ids(rows, columns, vocab_size, draw(mostly(st.just(False), st.just(True), 40))))
    ids = ids.masked_fill(~draw(masks(rows, columns, ("right", "right", "left", "anywhere"))), -100)
    return laid_out(ids, draw(LAYOUTS))


@st.composite
def prompts(draw: st.DrawFn, rows: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Draw how translations shall begin, padded on the left."""
    columns = draw(mostly(st.integers(1, 4), st.just(0), 30))
    ids = draw(token_ids(rows, columns, vocab_size, draw(mostly(st.just(False), st.just(True), 20))))
    prompt = {"decoder_input_ids": laid_out(ids, draw(LAYOUTS))}
    if draw(st.booleans()):
        side = draw(mostly(st.just("left"), st.just("right"), 20))
        mask = draw(masks(rows, columns, (side,))) | (ids < 0) | (ids >= vocab_size)
        mask = mask.to(draw(MASK_TYPES))
        prompt["decoder_attention_mask"] = laid_out(mask, draw(LAYOUTS))
    return prompt


@st.composite
def generation_options(draw: st.DrawFn, vocab_size: int) -> dict[str, Any]:
    """Draw arguments of `generate()`."""
    token = mostly(st.integers(0, vocab_size - 1), st.sampled_from([*OUTSIDE, vocab_size]), 12)
    limit = draw(st.sampled_from(["max_new_tokens", "max_length", "max_tokens_beyond_input"]))
    options: dict[str, Any] = {
        limit: draw(mostly(st.integers(1, 9), st.integers(-1, 0), 20)),
        "num_beams": draw(mostly(st.integers(1, 6), st.integers(-1, 0), 40)),
    }
    penalties = [0.6, 0.0, 1.0, -1.0, 5.0, 100.0, -100.0, 1e3, 1e6, 1e308, -1e308, float("inf"), float("nan")]
    rest = {
        "num_return_sequences": st.integers(0, 6),
        "length_penalty": st.sampled_from(penalties),
        "length_penalty_form": mostly(st.sampled_from(["gnmt", "power"]), st.just("other"), 20),
        "early_stopping": mostly(st.sampled_from([True, False, "never"]), st.just("x"), 20),
        "min_length": st.integers(0, 12),
        "min_new_tokens": st.integers(0, 12),
        "output_scores": st.booleans(),
        "output_logits": st.booleans(),
        "return_dict_in_generate": st.booleans(),
        "output_attentions": st.just(True),
        "output_hidden_states": st.just(True),
        "no_repeat_ngram_size": st.integers(0, 3),
        "bad_words_ids": st.lists(st.lists(token, min_size=1, max_size=2), max_size=2),
        "suppress_tokens": st.lists(token, min_size=1, max_size=3),
        "repetition_penalty": st.sampled_from([0.5, 1.5]),
        "forced_eos_token_id": token,
        "forced_bos_token_id": token,
        "pad_token_id": token,
        "eos_token_id": st.one_of(token, st.lists(token, max_size=3)),
        "decoder_start_token_id": token,
        "use_cache": st.booleans(),
        "renormalize_logits": st.booleans(),
    }
    for name in draw(st.lists(st.sampled_from(sorted(rest)), unique=True, max_size=5)):
        options[name] = draw(rest[name])
    return options
