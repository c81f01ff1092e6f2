"""The conversion to CTranslate2: both models give each token of a target the same probability."""

from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_model
from vaswani.convert.ctranslate2 import to_ctranslate2

ctranslate2 = pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed: pip install ctranslate2")


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"decoder_layers": 3}, {"layer_norm_eps": 0.1}])
def test_ctranslate2_with_the_converted_weights_has_the_same_probabilities(
    changes: dict[str, object], tmp_path: Path
) -> None:
    model, generator = tiny_model(vocab_size=400, **changes), torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 10, (24,), generator=generator).tolist()
    sources = [[*torch.randint(3, 400, (length,), generator=generator).tolist(), 1] for length in lengths]
    targets = sources[::-1]
    to_ctranslate2(model, str(tmp_path))
    translator = ctranslate2.Translator(str(tmp_path), compute_type="float32", intra_threads=1)
    digits = [[[str(token) for token in tokens] for tokens in side] for side in (sources, targets)]
    results = translator.score_batch(digits[0], [tokens[:-1] for tokens in digits[1]])  # it adds EOS itself
    for source, target, result in zip(sources, targets, results, strict=True):
        ours = model.score(torch.tensor([target]), input_ids=torch.tensor([source])).token_log_probs[0]
        torch.testing.assert_close(torch.tensor(result.log_probs), ours, rtol=1e-4, atol=1e-4)
