"""What tests of generation share: small models whose hypotheses end in every way, batches, and their translations."""

import pytest
import torch
from transformers import LogitsProcessor

from tests.conftest import tiny_model
from tests.search import Translation
from vaswani import VaswaniForConditionalGeneration, paper_generation_config
from vaswani.kernels import library

WORDS = 12
PATHS = ("kernels", "torch", "plain")


def lively_model(seed: int = 0, vocab_size: int = WORDS, **changes: object) -> VaswaniForConditionalGeneration:
    """Build a random model, sure enough of its tokens for hypotheses of all lengths."""
    model = tiny_model(seed, vocab_size=vocab_size, **changes).double()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model.generation_config = paper_generation_config(model.config)
    return model


def take(model: VaswaniForConditionalGeneration, path: str) -> None:
    """Let a model decode through the kernels, through torch on its weights, or through `forward` of every module."""
    if path == "kernels" and library.load() is None:
        pytest.skip("the kernels were not built")
    model.to(torch.float32 if path == "kernels" else torch.float64)  # kernels have single precision only
    model.set_fast_paths(path != "plain")


def sources(seed: int = 0, count: int = 6) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
    return [[*torch.randint(3, WORDS, (length,), generator=generator).tolist(), 1] for length in lengths]


def padded(rows: list[list[int]], side: str = "right") -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    filled = [(row + [0] * (width - len(row)), [1] * len(row) + [0] * (width - len(row))) for row in rows]
    if side == "left":
        filled = [([0] * (width - len(row)) + row, [0] * (width - len(row)) + [1] * len(row)) for row in rows]
    words, masks = zip(*filled, strict=True)
    return {"input_ids": torch.tensor(words), "attention_mask": torch.tensor(masks)}


def search(model, rows: list[list[int]], side: str = "right", **options: object) -> list[list[Translation]]:
    """Translate through `generate()`, and return the token ids and scores of each sequence."""
    output = model.generate(**padded(rows, side), return_dict_in_generate=True, **options)
    words = output.sequences[:, 1:].tolist()
    translations = [
        Translation(tuple(row[: row.index(1) + 1] if 1 in row else [w for w in row if w != 0]), 0.0, score)
        for row, score in zip(words, output.sequences_scores.tolist(), strict=True)
    ]
    wanted = len(words) // len(rows)
    return [translations[i : i + wanted] for i in range(0, len(translations), wanted)]


def assert_same_translations(found: list[Translation], expected: list[Translation]) -> None:
    assert [t.words for t in found] == [t.words for t in expected]
    assert [t.score for t in found] == pytest.approx([t.score for t in expected], rel=1e-5)


class EndAt(LogitsProcessor):
    """Force each sequence to end at a length of its own, found by its place in the batch."""

    def __init__(self, lengths: list[int], beams: int = 4) -> None:
        self.lengths = torch.tensor(lengths).repeat_interleave(beams)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ends_now = self.lengths == input_ids.shape[1]
        scores[~ends_now, 1] = float("-inf")
        scores[ends_now, 2:] = float("-inf")
        return scores
