"""What converters require of a model: the error names the field, its value and what is allowed."""

import pytest

from tests.conftest import tiny_config
from vaswani.convert.requirements import refuse_what_peers_lack


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_k": 3}, "d_k=3; the peers can only have 8"),
        ({"position_encoding": "learned"}, "position_encoding='learned'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"eos_token_id": [1, 3]}, "eos_token_id"),
    ],
)
def test_what_peers_cannot_express_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refuse_what_peers_lack(tiny_config(**change))
