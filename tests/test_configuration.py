"""The configuration: defaults of the base model, and errors that name field, value and what is allowed."""

import json
import re

import pytest
from transformers import AutoConfig, AutoModel, AutoTokenizer

from tests.conftest import SHAPES, tiny_model
from vaswani import VaswaniConfig

BASE = {
    "vocab_size": 37000,
    "d_model": 512,
    "d_ff": 2048,
    "d_k": 64,
    "d_v": 64,
    "num_attention_heads": 8,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "label_smoothing": 0.1,
    "position_encoding": "sinusoidal",
    "max_position_embeddings": 1024,
    "activation_function": "relu",
    "attention_bias": False,
    "layer_norm_eps": 1e-6,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "decoder_start_token_id": 2,
    "tie_word_embeddings": True,
}


def test_the_defaults_are_the_papers_base_model() -> None:
    config = VaswaniConfig()
    assert {name: getattr(config, name) for name in BASE} == BASE
    assert config.model_type == "vaswani"
    assert config.is_encoder_decoder


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("vocab_size", 0, "at least 1"),
        ("d_model", -512, "at least 1"),
        ("d_model", 511, "even"),
        ("d_ff", 0, "at least 1"),
        ("d_k", 0, "at least 1"),
        ("d_v", -1, "at least 1"),
        ("num_attention_heads", 0, "at least 1"),
        ("encoder_layers", 0, "at least 1"),
        ("decoder_layers", -6, "at least 1"),
        ("max_position_embeddings", 0, "at least 1"),
        ("vocab_size", 10**9, "at most 10000000"),
        ("d_model", 10**9, "at most 65536"),
        ("d_ff", 10**9, "at most 1000000"),
        ("d_k", 10**9, "at most 65536"),
        ("d_v", 10**9, "at most 65536"),
        ("num_attention_heads", 10**9, "at most 4096"),
        ("encoder_layers", 10**9, "at most 1000"),
        ("decoder_layers", 1001, "at most 1000"),
        ("max_position_embeddings", 10**12, "at most 10000000"),
        ("dropout", 1.5, "from 0 to 1"),
        ("dropout", float("nan"), "from 0 to 1"),
        ("attention_dropout", -0.1, "from 0 to 1"),
        ("activation_dropout", 2, "from 0 to 1"),
        ("label_smoothing", 1.1, "from 0 to 1"),
        ("label_smoothing", 1, "at most 0.99"),
        ("layer_norm_eps", 0.0, "above 0"),
        ("layer_norm_eps", 0, "above 0"),
        ("layer_norm_eps", float("inf"), "above 0"),
        ("position_encoding", "rotary", "'sinusoidal', 'learned'"),
        ("activation_function", "rellu", "'relu'"),
        ("pad_token_id", -1, "from 0 to 36999"),
        ("eos_token_id", 37000, "from 0 to 36999"),
        ("eos_token_id", [1, 37000], "from 0 to 36999"),
        ("bos_token_id", 99999, "from 0 to 36999"),
        ("decoder_start_token_id", -2, "from 0 to 36999"),
        ("is_encoder_decoder", False, "True"),
        ("vocab_size", 1.5, "of type int"),
        ("d_model", "512", "of type int"),
        ("encoder_layers", None, "of type int"),
        ("decoder_layers", [[6]], "of type int"),
        ("d_ff", True, "of type int"),
    ],
)
def test_a_nonsensical_value_is_an_error_that_names_field_value_and_what_is_allowed(
    field: str, value: object, allowed: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{field}={value!r}")) as error:
        VaswaniConfig(**{field: value})
    assert allowed in str(error.value)


def test_an_error_about_a_long_value_is_short() -> None:
    for field in ("vocab_size", "position_encoding"):
        with pytest.raises(ValueError, match=f"{field}='x") as error:
            VaswaniConfig(**{field: "x" * 100_000})
        assert len(str(error.value)) < 300


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_the_parameters_are_counted_without_a_model(changes: dict) -> None:
    model = tiny_model(**changes)
    tables = [buffer for name, buffer in model.named_buffers() if name.endswith("position_table")]
    counted = model.num_parameters() + sum(table.numel() for table in tables)
    assert model.config._number_of_parameters() == counted


def test_sizes_that_are_allowed_one_by_one_may_make_too_large_a_model() -> None:
    with pytest.raises(ValueError, match=r"encoder_layers=1000.*parameters; there must be at most 10000000000"):
        VaswaniConfig(d_model=8192, d_ff=32768, encoder_layers=1000, decoder_layers=1000)
    with pytest.raises(ValueError, match="max_position_embeddings=10000000"):
        VaswaniConfig(position_encoding="learned", max_position_embeddings=10_000_000)


def test_a_file_with_a_billion_layers_is_refused_before_anything_is_built(tmp_path) -> None:
    VaswaniConfig().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"encoder_layers": 10**9}))
    for loader in (VaswaniConfig, AutoConfig, AutoModel):
        with pytest.raises(ValueError, match=r"encoder_layers=1000000000; it must be at most 1000"):
            loader.from_pretrained(tmp_path)


def test_an_odd_width_is_fine_with_learned_positions() -> None:
    assert VaswaniConfig(d_model=511, position_encoding="learned").d_model == 511


def test_a_generic_name_is_checked_like_the_field_it_stands_for() -> None:
    with pytest.raises(ValueError, match="d_model=33"):
        VaswaniConfig(hidden_size=33)


def test_an_override_on_loading_is_checked_too(tmp_path) -> None:
    VaswaniConfig().save_pretrained(tmp_path)
    assert VaswaniConfig.from_pretrained(tmp_path, dropout=0.3).dropout == 0.3
    with pytest.raises(ValueError, match="dropout=3"):
        VaswaniConfig.from_pretrained(tmp_path, dropout=3)


@pytest.mark.parametrize(
    ("misspelt", "field"),
    [
        ("droput", "dropout"),
        ("dmodel", "d_model"),
        ("D_FF", "d_ff"),
        ("dk", "d_k"),
        ("num_encoder_layers", "encoder_layers"),
        ("label_smoothing_factor", "label_smoothing"),
        ("attn_dropout", "attention_dropout"),
        ("layer_norm_epsilon", "layer_norm_eps"),
        ("vocabulary_size", "vocab_size"),
        ("hiden_size", "hidden_size"),
    ],
)
def test_a_keyword_that_is_nearly_a_field_is_refused_with_that_field(misspelt: str, field: str, tmp_path) -> None:
    with pytest.raises(ValueError, match=f"no field '{misspelt}': did you mean '{field}'"):
        VaswaniConfig(**{misspelt: 1})
    VaswaniConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"did you mean '{field}'"):
        VaswaniConfig.from_pretrained(tmp_path, **{misspelt: 1})


def test_other_unknown_keywords_are_kept_and_saved(tmp_path) -> None:
    config = VaswaniConfig(language_pair="en-de", sep_token_id=5, num_labels=3)
    config.save_pretrained(tmp_path)
    loaded = VaswaniConfig.from_pretrained(tmp_path)
    assert (loaded.language_pair, loaded.sep_token_id, loaded.num_labels) == ("en-de", 5, 3)


def test_names_of_other_models_and_of_tokenizers_are_no_misspelt_fields(saved_folder: str, caplog) -> None:
    config = VaswaniConfig(encoder_layerdrop=0.1, tie_encoder_decoder=True, unk_token_id=3)
    assert config.encoder_layerdrop == 0.1
    AutoTokenizer.from_pretrained(saved_folder, pad_token="<pad>", eos_token="</s>", bos_token="<s>")
    assert caplog.text == ""


def test_every_unknown_key_of_a_file_is_kept(tmp_path) -> None:
    VaswaniConfig().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "droput": 0.5}))
    assert VaswaniConfig.from_pretrained(tmp_path).droput == 0.5
    assert VaswaniConfig.from_json_file(path).droput == 0.5
    VaswaniConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert json.loads(path.read_text())["droput"] == 0.5


def test_generic_names_read_and_write_the_papers_fields() -> None:
    config = VaswaniConfig(hidden_size=256, num_hidden_layers=3)
    assert (config.d_model, config.encoder_layers) == (256, 3)
    config.intermediate_size = 99
    assert config.d_ff == config.encoder_ffn_dim == config.decoder_ffn_dim == 99
    assert config.encoder_attention_heads == config.decoder_attention_heads == config.num_attention_heads == 8
    assert config.hidden_act == "relu"


def test_a_cache_is_sized_by_the_decoders_depth() -> None:
    text_config = VaswaniConfig(encoder_layers=2, decoder_layers=5).get_text_config(decoder=True)
    assert text_config.num_hidden_layers == 5


def test_one_head_width_is_refused_where_d_k_and_d_v_differ() -> None:
    assert VaswaniConfig().head_dim == 64
    config = VaswaniConfig(head_dim=32)
    assert (config.d_k, config.d_v) == (32, 32)
    with pytest.raises(ValueError, match="d_k=16 and d_v=64 differ"):
        _ = VaswaniConfig(d_k=16).head_dim


def test_a_saved_configuration_comes_back_equal(tmp_path) -> None:
    config = VaswaniConfig(d_k=16, decoder_layers=2, eos_token_id=[1, 5], position_encoding="learned")
    config.save_pretrained(tmp_path)
    assert VaswaniConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_a_file_does_not_decide_on_the_attention_that_is_run(tmp_path) -> None:
    VaswaniConfig().save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    for name in ("attn_implementation", "_attn_implementation"):
        (tmp_path / "config.json").write_text(json.dumps({**fields, name: "somebody/kernels"}))
        assert VaswaniConfig.from_pretrained(tmp_path)._attn_implementation is None
    chosen = VaswaniConfig.from_pretrained(tmp_path, attn_implementation="eager")
    assert chosen._attn_implementation == "eager"
