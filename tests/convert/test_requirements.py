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
        ({"activation_function": "swish"}, "activation_function='swish'; the peers can only have 'relu'"),
        ({"output_bias": True}, "output_bias=True; the peers can only have False"),
        ({"final_layer_norm": True}, "final_layer_norm=True; the peers can only have False"),
        ({"source_vocab_size": 53}, "source_vocab_size=53; the peers can only have None"),
        ({"d_ff_decoder": 24}, "d_ff_decoder=24; the peers can only have None"),
    ],
)
def test_what_peers_cannot_express_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refuse_what_peers_lack(tiny_config(**change))


def test_a_peer_may_have_more_fields_than_the_others() -> None:
    config = tiny_config(output_bias=True, d_ff_decoder=24)
    with pytest.raises(ValueError, match="d_ff_decoder"):
        refuse_what_peers_lack(config, ("output_bias",))
    refuse_what_peers_lack(config, ("output_bias", "d_ff_decoder"))
