"""The requirements: what a model must be for other libraries to express it."""

from collections.abc import Collection

from ..configuration_vaswani import VaswaniConfig

# Length of the peers' tables of positions.
POSITIONS = 1024


def refuse_what_peers_lack(config: VaswaniConfig, except_for: Collection[str] = ()) -> None:
    """Raise an error for a model that the peers cannot express.

    Parameters
    ----------
    config : VaswaniConfig
        Configuration of the model.
    except_for : Collection[str], default=()
        Fields that this peer can have with other values too.

    Raises
    ------
    ValueError
        Naming the field, its value and what the peers have.
    """
    head = config.d_model // config.num_attention_heads
    needed = {
        "d_k": head,
        "d_v": head,
        "position_encoding": "sinusoidal",
        "activation_function": "relu",
        "tie_word_embeddings": True,
        "output_bias": False,
        "final_layer_norm": False,
        "source_vocab_size": None,
        "d_ff_decoder": None,
        "eos_token_id": config.eos_token_id if isinstance(config.eos_token_id, int) else "a single number",
    }
    for name, value in needed.items():
        if name not in except_for and getattr(config, name) != value:
            raise ValueError(f"The model has {name}={getattr(config, name)!r}; the peers can only have {value!r}.")


__all__ = ["POSITIONS", "refuse_what_peers_lack"]
