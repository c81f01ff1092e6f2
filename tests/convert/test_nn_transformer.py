"""State dicts around `torch.nn.Transformer`: the same logits, searches and gradients; what is wrong is named."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests.nn_transformer import BOS, EOS, PAD, SOURCE, TABLES, TARGET, TEXTS, Seq2Seq, write_folder
from tests.search import beam_search
from vaswani import Translator, VaswaniForConditionalGeneration, VaswaniPairTokenizer, convert_model
from vaswani.cli import main
from vaswani.convert import nn_transformer
from vaswani.convert.nn_transformer import from_nn_transformer
from vaswani.convert.nn_transformer_description import Description
from vaswani.convert.nn_transformer_original import NNTransformerOriginal
from vaswani.fast_paths_vaswani import explain
from vaswani.hub.check import check_model
from vaswani.kernels import library

ONE = (len(SOURCE), len(SOURCE))
ONE_VOCABULARY = {"target_vocabulary": "source.json"}
ONE_NAME = {"target_embedding": "source.weight", **ONE_VOCABULARY}
# Options of the model, and what its description says of them.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "GELU": ({"activation": "gelu"}, {"activation": "gelu"}),
    "no biases": ({"bias": False, "output_bias": False}, {}),
    "another epsilon": ({"layer_norm_eps": 0.1}, {"layer_norm_eps": 0.1}),
    "embeddings without scale": ({"scaled": False}, {"scale_embeddings": False}),
    "fixed positions": ({"table": "fixed"}, {"position_encoding": "fixed", **TABLES}),
    "learned positions": ({"table": "learned"}, {"position_encoding": "learned", **TABLES}),
    "one vocabulary": ({"sizes": ONE}, ONE_VOCABULARY),
    "one embedding": ({"sizes": ONE, "is_shared": True}, ONE_NAME),
    "all tied": ({"sizes": ONE, "is_shared": True, "is_tied": True}, ONE_VOCABULARY),
    "target tied": ({"is_tied": True, "output_bias": False}, {}),
    "tied, without scale": (
        {"sizes": ONE, "is_shared": True, "is_tied": True, "scaled": False},
        {**ONE_VOCABULARY, "scale_embeddings": False},
    ),
    "safetensors": ({}, {"weights": "model.safetensors"}),
    "an entry of the file": ({}, {"state_dict": "model"}),
}


def model_of(seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> Seq2Seq:
    torch.manual_seed(seed)
    return Seq2Seq(**options).to(dtype).eval()


def batch_of(vocab_size: int = len(TARGET)) -> dict[str, torch.Tensor]:
    """Three pairs of unequal length, padded on the right."""
    generator = torch.Generator().manual_seed(1)
    lengths, target_lengths = torch.tensor([9, 4, 6]), torch.tensor([5, 8, 1])
    source = torch.randint(4, len(SOURCE), (3, 9), generator=generator)
    target = torch.randint(4, vocab_size, (3, 8), generator=generator)
    target[:, 0] = BOS
    source[torch.arange(9) >= lengths[:, None]] = PAD
    target[torch.arange(8) >= target_lengths[:, None]] = PAD
    return {"source": source, "target": target}


def logits_of(model: VaswaniForConditionalGeneration, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    mask = (batch["source"] != PAD).long()
    return model(input_ids=batch["source"], attention_mask=mask, decoder_input_ids=batch["target"]).logits


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_nn_transformer_with_padding(
    name: str, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    options, changes = CASES[name]
    theirs = model_of(dtype=dtype, **options)
    ours, _ = from_nn_transformer(write_folder(tmp_path, theirs, **changes))
    assert ours.dtype == dtype
    batch = batch_of(ours.config.vocab_size)
    real = batch["target"] != PAD
    with torch.no_grad():
        expected = theirs(batch["source"], batch["target"])[real]
        assert_close(logits_of(ours, batch)[real], expected, rtol=0, atol=tolerance * expected.abs().max().item())
        original = NNTransformerOriginal(tmp_path, dtype)
        mask = (batch["source"] != PAD).long()
        assert_close(original.logits(batch["source"], mask, batch["target"])[real], expected)


def test_the_configuration_is_what_the_weights_and_the_description_say(tmp_path: Path) -> None:
    def config_of(name: str) -> Any:
        options, changes = CASES[name]
        return from_nn_transformer(write_folder(tmp_path / name, model_of(**options), **changes))[0].config

    config = config_of("plain")
    sizes = config.d_model, config.d_ff, config.d_k, config.num_attention_heads, config.encoder_layers
    assert (*sizes, config.decoder_layers) == (24, 40, 6, 4, 2, 3)
    assert (config.source_vocab_size, config.vocab_size) == (len(SOURCE), len(TARGET))
    assert (config.final_layer_norm, config.output_bias, config.attention_bias) == (True, True, True)
    assert (config.pad_token_id, config.decoder_start_token_id, config.eos_token_id) == (PAD, BOS, EOS)
    assert config.tie_word_embeddings is False
    assert config_of("one vocabulary").source_vocab_size is None
    assert config_of("all tied").tie_word_embeddings is True
    assert config_of("all tied").source_vocab_size is None
    assert config_of("target tied").source_vocab_size == len(SOURCE)
    assert config_of("no biases").attention_bias is False
    assert config_of("no biases").output_bias is False
    assert (config_of("fixed positions").position_encoding, config_of("learned positions").position_encoding) == (
        "fixed",
        "learned",
    )
    assert config_of("learned positions").max_position_embeddings == 70


def test_stacks_without_final_norms_are_converted_and_one_alone_is_not(tmp_path: Path) -> None:
    theirs = model_of()
    theirs.transformer.encoder.norm = theirs.transformer.decoder.norm = None
    ours, _ = from_nn_transformer(write_folder(tmp_path / "none", theirs))
    assert ours.config.final_layer_norm is False
    batch = batch_of()
    real = batch["target"] != PAD
    with torch.no_grad():
        expected = theirs(batch["source"], batch["target"])[real]
        assert_close(logits_of(ours, batch)[real], expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    theirs.transformer.encoder.norm = nn.LayerNorm(24)
    with pytest.raises(ValueError, match=r"The weight transformer.decoder.norm.weight is missing"):
        from_nn_transformer(write_folder(tmp_path / "one", theirs))


def test_searches_find_what_plain_loops_over_nn_transformer_find(tmp_path: Path) -> None:
    theirs = model_of(3)
    ours, tokenizer = from_nn_transformer(write_folder(tmp_path, theirs))
    original = NNTransformerOriginal(tmp_path, torch.float32)
    if library.load() is not None:
        assert set(explain(ours).values()) == {"kernels"}
    inputs = dict(tokenizer(TEXTS, padding=True, return_tensors="pt"))
    greedy = ours.generate(**inputs, max_length=12)
    assert greedy.tolist() == original.translate(inputs, 12).tolist()
    search = {"num_beams": 3, "length_penalty": 0.6, "length_penalty_form": "gnmt", "early_stopping": "never"}
    found = ours.generate(**inputs, max_length=9, **search)
    for text, row in zip(TEXTS, found.tolist(), strict=True):
        source = torch.tensor([tokenizer(text)["input_ids"]])

        def next_words(beginnings: list[list[int]], source: torch.Tensor = source) -> list[list[float]]:
            targets = torch.tensor([[BOS, *words] for words in beginnings])
            with torch.no_grad():
                logits = theirs(source.expand(len(targets), -1), targets)
            return logits[:, -1].double().log_softmax(-1).tolist()

        (best,) = beam_search(next_words, 8, beams=3, ends=(EOS,), never=(PAD, BOS))
        assert [token for token in row[1:] if token != PAD] == list(best.words)


def test_a_training_step_has_the_loss_and_the_gradients_of_nn_transformer(tmp_path: Path) -> None:
    theirs = model_of(dtype=torch.float64).train()
    ours, _ = from_nn_transformer(write_folder(tmp_path, theirs))
    ours.config.label_smoothing = 0.0
    batch = batch_of()
    labels = batch["target"][:, 1:].masked_fill(batch["target"][:, 1:] == PAD, -100)
    logits = theirs(batch["source"], batch["target"][:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    mask = (batch["source"] != PAD).long()
    for fast in (True, False):
        ours.train().zero_grad()
        ours.set_fast_paths(fast)
        ours(input_ids=batch["source"], attention_mask=mask, labels=labels).loss.backward()
        attention = ours.model.decoder.layers[1].encoder_attn
        joint = torch.cat([getattr(attention, f"{name}_proj").weight.grad for name in "qkv"])
        assert_close(joint, theirs.transformer.decoder.layers[1].multihead_attn.in_proj_weight.grad)
        assert_close(ours.model.encoder.final_layer_norm.weight.grad, theirs.transformer.encoder.norm.weight.grad)
        assert_close(ours.model.decoder.final_layer_norm.bias.grad, theirs.transformer.decoder.norm.bias.grad)
        assert_close(ours.model.encoder.embed_tokens.weight.grad, theirs.source.weight.grad)


def test_single_precision_trains_through_the_kernels_as_without_them(tmp_path: Path) -> None:
    ours, _ = from_nn_transformer(write_folder(tmp_path, model_of()))
    batch = batch_of()
    labels = batch["target"].masked_fill(batch["target"] == PAD, -100)
    gradients = []
    for fast in (True, False):
        ours.train().zero_grad()
        ours.set_fast_paths(fast)
        ours(input_ids=batch["source"], attention_mask=(batch["source"] != PAD).long(), labels=labels).loss.backward()
        gradients.append({name: each.grad.clone() for name, each in ours.named_parameters()})
    assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "fixed positions", "tied, without scale"])
def test_a_converted_folder_loads_with_the_auto_classes_and_translates_like_the_original(
    name: str, tmp_path: Path
) -> None:
    options, changes = CASES[name]
    source = write_folder(tmp_path / "source", model_of(2, **options), source_lang="en", target_lang="ru", **changes)
    results = convert_model(source, tmp_path / "folder", TEXTS)["conversion"]
    assert results["kind"] == "torch.nn.Transformer"
    assert results["about"] == {"languages": ["en", "ru"]}
    assert results["check"]["equal_translations"] == results["check"]["sentences"] == len(TEXTS)
    assert results["check"]["largest_difference"] < 1e-4
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "folder")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert (type(model), type(tokenizer)) == (VaswaniForConditionalGeneration, VaswaniPairTokenizer)
    original = NNTransformerOriginal(source, torch.float32)
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    wanted = tokenizer.batch_decode(original.translate(inputs, 20), skip_special_tokens=True)
    translator = Translator.from_pretrained(tmp_path / "folder", max_length=20)
    assert [found[0].text for found in translator.translate(TEXTS)] == wanted
    assert all(check.passed for check in check_model(tmp_path / "folder")), check_model(tmp_path / "folder")


def test_a_table_that_is_shorter_than_the_check_is_read_to_its_end(tmp_path: Path) -> None:
    theirs = model_of(table="fixed")
    theirs.positions = theirs.positions[:, :11]
    source = write_folder(tmp_path / "source", theirs, position_encoding="fixed", **TABLES)
    check = convert_model(source, tmp_path / "folder")["conversion"]["check"]
    assert check["equal_translations"] == check["sentences"] == 8
    assert AutoTokenizer.from_pretrained(tmp_path / "folder").model_max_length == 11


def test_the_check_notices_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nn_transformer.PARTS, "self_attn_layer_norm", ("norm2", "norm1"))
    monkeypatch.setitem(nn_transformer.PARTS, "feed_forward_layer_norm", ("norm1", "norm3"))
    with pytest.raises(ValueError, match=r"logits .*differ from the original's by .*: it was not written"):
        convert_model(write_folder(tmp_path / "source", model_of()), tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_pipeline_of_tokenizers_is_taken_as_it_is(tmp_path: Path) -> None:
    vocab = {token: index for index, token in enumerate([*SOURCE[:4], "hello", "there", "."])}
    pipeline = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    pipeline.pre_tokenizer = pre_tokenizers.Whitespace()
    pipeline.decoder = decoders.Fuse()
    folder = write_folder(
        tmp_path,
        model_of(sizes=(7, 7)),
        source_vocabulary="tokenizer.json",
        target_vocabulary="tokenizer.json",
        split=None,
        source_begins_with_bos=True,
    )
    pipeline.save(str(folder / "tokenizer.json"))
    model, tokenizer = from_nn_transformer(folder)
    assert model.config.source_vocab_size is None
    assert tokenizer("hello there.")["input_ids"] == [BOS, 4, 5, 6, EOS]
    assert tokenizer(text_target="hello there.")["input_ids"] == [4, 5, 6, EOS]
    assert tokenizer.decode([4, 5, 6, EOS], skip_special_tokens=True) == "hellothere."


def test_the_example_of_the_documentation_is_converted_and_every_field_is_explained(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "converting.md").read_text()
    (example,) = (block for block in re.findall(r"```json\n(.*?)\n```", page, re.DOTALL) if "nhead" in block)
    theirs = model_of(table="fixed", d_model=32, nhead=8)
    names = {"source.": "src_tok_emb.embedding.", "target.": "tgt_tok_emb.embedding."}
    names["positions"] = "positional_encoding.pos_embedding"
    state = {}
    for name, weight in theirs.state_dict().items():
        known = next((each for each in names if name.startswith(each)), "")
        state[name.replace(known, names.get(known, ""), 1)] = weight
    torch.save({"model_state_dict": state, "epoch": 9}, tmp_path / "checkpoint.pt")
    (tmp_path / "nn_transformer.json").write_text(example)
    (tmp_path / "source.json").write_text(json.dumps(SOURCE))
    (tmp_path / "target.json").write_text(json.dumps(TARGET))
    ours, tokenizer = from_nn_transformer(tmp_path)
    batch = batch_of()
    real = batch["target"] != PAD
    with torch.no_grad():
        expected = theirs(batch["source"], batch["target"])[real]
        assert_close(logits_of(ours, batch)[real], expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    assert tokenizer("a")["input_ids"] == [BOS, 4, EOS]
    rows = re.findall(r"^\| (`.*?) \|", page.split("### torch.nn.Transformer")[1].split("\n## ")[0], re.MULTILINE)
    explained = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(explained) == sorted(field.name for field in dataclasses.fields(Description))


# --- what is wrong


def error_of(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Convert by the command, and return its one line."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit) as end:
        main(["convert", str(folder), str(tmp_path / "out")])
    line = capsys.readouterr().err
    assert (end.value.code, len(line.splitlines())) == (2, 1), line
    assert sorted(tmp_path.iterdir()) == before
    return line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"norm_first": True},
            r"norm_first=true: it normalises the input of each sub-layer, not the output \(pre-LN\)",
        ),
        ({"norm_first": None, "nhead": None}, r"nn_transformer.json does not say nhead, norm_first"),
        ({"heads": 4}, r"unknown field 'heads'; the fields are weights, nhead, norm_first"),
        ({"nhead": "3"}, r"nhead='3'; it must be of type int"),
        ({"nhead": True}, r"nhead=True; it must be of type int"),
        ({"nhead": 5}, r"nhead=5; it must divide the width 24"),
        ({"nhead": 0}, r"nhead=0; it must divide the width 24"),
        ({"activation": "swish"}, r"activation='swish'; it must be one of \"relu\", \"gelu\""),
        ({"position_encoding": "none"}, r"position_encoding='none'; it must be one of \"sinusoidal\", \"fixed\""),
        ({"position_encoding": "fixed"}, r"position_encoding='fixed': source_positions must name the table"),
        ({"source_positions": "x"}, r"position_encoding='sinusoidal': source_positions must be left out"),
        ({"source_embedding": "embed.weight"}, r"names embed.weight, and the state dict has no such weight"),
        ({"output": "head"}, r"names head.weight, and the state dict has no such weight"),
        ({"transformer": "model"}, r"no weight model.encoder.layers.0: .* must name the torch.nn.Transformer"),
        ({"state_dict": "ema", "weights": "model.safetensors"}, r"has no weights 'ema'; its entries are"),
        ({"weights": "other.pt"}, r"There is no other.pt in"),
        ({"weights": "../model.pt"}, r"outside its folder|There is no"),
        ({"source_vocabulary": "none.txt"}, r"names none.txt, and .* has no such file"),
        ({"source_vocabulary": "target.txt"}, r"target.txt has the token id 40; the model has 35 tokens"),
        ({"split": None}, r"must say whether to split text into \"characters\" or \"words\""),
        ({"pad_token": "[PAD]"}, r"source.json has no token '\[PAD\]': .* must name another pad_token"),
        ({"layer_norm_eps": -1.0}, r"layer_norm_eps=-1.0; it must be a number above 0"),
        ({"dropout": 2}, r"dropout=2.0; it must be a number from 0 to 1"),
    ],
)
def test_a_wrong_description_is_one_line_that_says_what_is_allowed(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "source", model_of(), **changes)
    assert re.search(message, error_of(folder, tmp_path, capsys))


def test_a_description_that_is_missing_or_no_object_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "source", model_of())
    (folder / "nn_transformer.json").write_text("[]")
    assert "does not hold a JSON object" in error_of(folder, tmp_path, capsys)
    (folder / "nn_transformer.json").write_text("{")
    assert "is not a JSON file" in error_of(folder, tmp_path, capsys)
    (folder / "nn_transformer.json").unlink()
    assert "has no model that is recognised" in error_of(folder, tmp_path, capsys)


def without(name: str) -> Any:
    return lambda state: state.pop(name)


def changed(name: str, change: Any) -> Any:
    return lambda state: state.update({name: change(state[name])})


LAYER = "transformer.encoder.layers.1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without(f"{LAYER}.self_attn.in_proj_weight"),
            rf"The weight {LAYER}.self_attn.in_proj_weight \(queries\) is mi",
        ),
        (without(f"{LAYER}.norm2.bias"), rf"The weight {LAYER}.norm2.bias is missing"),
        (without("transformer.encoder.layers.0.linear1.weight"), r"layers.0.linear1.weight is missing"),
        (lambda state: state.update(extra=torch.zeros(3)), r"1 weights are not those of .*, such as extra"),
        (changed(f"{LAYER}.linear2.bias", lambda w: w[:5]), rf"The weight {LAYER}.linear2.bias has the shape \(5,\)"),
        (changed(f"{LAYER}.self_attn.in_proj_bias", lambda w: w[:70]), r"\(70,\); it must have three equal parts"),
        (changed(f"{LAYER}.linear2.bias", lambda w: w * math.nan), rf"{LAYER}.linear2.bias of .* NaN or infinite"),
        (changed("source.weight", lambda w: w[0]), r"source.weight has the shape \(24,\); it must be a matrix"),
        (
            changed("source.weight", lambda w: w[:, :9]),
            r"source.weight has the shape \(35, 9\); the width of target.weight is 24",
        ),
        (changed("generator.bias", lambda w: w.long()), r"generator.bias of .* is of type torch.int64"),
    ],
)
def test_a_wrong_state_dict_is_one_line(
    change: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "source", model_of())
    state = torch.load(folder / "model.pt")
    change(state)
    torch.save(state, folder / "model.pt")
    assert re.search(message, error_of(folder, tmp_path, capsys))


def test_tables_of_unequal_length_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = model_of(table="fixed")
    theirs.register_buffer("others", torch.randn(30, 24))
    tables = {"source_positions": "positions", "target_positions": "others", "position_encoding": "fixed"}
    folder = write_folder(tmp_path / "source", theirs, **tables)
    assert "tables of positions have 70 and 30 rows" in error_of(folder, tmp_path, capsys)


class Running:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("it_was_run"),)


def test_files_that_are_cut_or_want_to_run_code_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_folder(tmp_path / "source", model_of())
    whole = (folder / "model.pt").read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 100):
        (folder / "model.pt").write_bytes(whole[:size])
        assert "model.pt cannot be read" in error_of(folder, tmp_path, capsys)
    torch.save({"weight": Running()}, folder / "model.pt")
    assert "which may be code" in error_of(folder, tmp_path, capsys)
    torch.save([torch.zeros(3)], folder / "model.pt")
    assert "holds a list, not weights by name" in error_of(folder, tmp_path, capsys)
    torch.save({"model": model_of().state_dict(), "epoch": 3}, folder / "model.pt")
    assert re.search(r"The weight model of .* is of type OrderedDict", error_of(folder, tmp_path, capsys))
    assert not (tmp_path / "it_was_run").exists()
    safe = write_folder(tmp_path / "safe", model_of(), weights="model.safetensors")
    (safe / "model.safetensors").write_bytes((safe / "model.safetensors").read_bytes()[:1000])
    assert "model.safetensors cannot be read" in error_of(safe, tmp_path, capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('["<unk>", "<pad>", "<bos>", "<eos>", "a", "a"]', "each of them once"),
        ('["<unk>", 7]', "it must have tokens"),
        ('{"<unk>": 0, "<pad>": 0}', "each token must have an id of its own"),
        ('{"<unk>": "0"}', "each token must have an id of its own"),
        ("[]", "it must have tokens"),
        ("{", "is not a JSON file"),
        ('{"model": 3}', "split and lowercase are for lists of tokens"),
        ('{"model": {"type": "Unigram"}}', "is not a tokenizer.json"),
        (json.dumps(["<unk>", "<bos>", "<pad>", "<eos>", *SOURCE[4:]]), "'<pad>' has the ids 2 and 1"),
    ],
)
def test_a_wrong_vocabulary_is_one_line(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = None if "Unigram" in content else "characters"
    folder = write_folder(tmp_path / "source", model_of(), split=split)
    (folder / "source.json").write_text(content)
    assert message in error_of(folder, tmp_path, capsys)
