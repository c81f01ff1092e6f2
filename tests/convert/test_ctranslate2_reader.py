"""Models of CTranslate2: converted ones give each token the same probability, and what is damaged is refused."""

import json
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests.opus import SCRIPTS, write_marian, write_tokenizers
from vaswani import VaswaniMarianTokenizer, convert_model
from vaswani.cli import main
from vaswani.convert import ctranslate2_reader
from vaswani.convert.ctranslate2_file import read_variables
from vaswani.convert.ctranslate2_original import CTranslate2Original
from vaswani.convert.ctranslate2_reader import from_ctranslate2
from vaswani.convert.reading import find_reader

ctranslate2 = pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed: pip install ctranslate2")

QUANTIZATIONS = (None, "float16", "bfloat16", "int16", "int8", "int8_float16", "int8_bfloat16", "int8_float32")


def to_their_folder(source: Path, folder: Path, quantization: str | None = None) -> Path:
    """Convert a Marian folder by CTranslate2's own converter, with the SentencePiece models beside the model."""
    converter = ctranslate2.converters.TransformersConverter(str(source), copy_files=["source.spm", "target.spm"])
    converter.convert(str(folder), quantization=quantization)
    return folder


@pytest.fixture(scope="module")
def marian_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("marian")
    write_marian(folder, d_model=32)
    return folder


@pytest.fixture(scope="module")
def their_folder(marian_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return to_their_folder(marian_folder, tmp_path_factory.mktemp("theirs") / "model")


@pytest.fixture
def copied(their_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(their_folder, tmp_path / "copied"))


def largest_difference(folder: Path, model: Any, tokenizer: Any) -> float:
    """Compare the probabilities of CTranslate2's own translations."""
    original = CTranslate2Original(folder, torch.float32)
    inputs = dict(tokenizer(SCRIPTS, return_tensors="pt", padding=True))
    with torch.no_grad():
        return original.difference(model, inputs, original.translate(inputs, 20))


def write_spec(
    folder: Path,
    change: Callable[[Any], None] = lambda spec: None,
    quantization: str | None = None,
    separate: bool = False,
    **options: Any,
) -> Path:
    """Write a random model through the classes of CTranslate2, without transformers."""
    folder.mkdir()
    sizes = write_tokenizers(folder, separate)
    for name in ("vocab.json", "target_vocab.json"):
        if (folder / name).is_file():
            vocab = json.loads((folder / name).read_text())
            (folder / name).unlink()
            (folder / name).with_suffix(".tokens").write_text(json.dumps(list(vocab)))
    vocabs = [json.loads((folder / "vocab.tokens").read_text())] * 2
    if separate:
        vocabs[1] = json.loads((folder / "target_vocab.tokens").read_text())
    specs = ctranslate2.specs
    options = {"num_layers": (2, 3), "num_heads": 2, "pre_norm": False, **options}
    spec = specs.TransformerSpec.from_config(**options)
    generator, d_model = np.random.default_rng(0), 16

    def array(*shape: int) -> np.ndarray:
        return generator.normal(0, 0.4, shape).astype(np.float32)

    def fill(linear: Any, rows: int, columns: int = d_model, bias: bool = True) -> None:
        linear.weight = array(rows, columns)
        if bias:
            linear.bias = array(rows)

    def fill_norm(norm: Any) -> None:
        norm.gamma, norm.beta = 1 + array(d_model), array(d_model)

    spec.encoder.embeddings[0].weight, spec.decoder.embeddings.weight = (array(size, d_model) for size in sizes)
    fill(spec.decoder.projection, sizes[1])
    for stack in (spec.encoder, spec.decoder):
        if hasattr(stack, "position_encodings"):
            stack.position_encodings.encodings = array(64, d_model)
        for name in ("layer_norm", "layernorm_embedding"):
            if hasattr(stack, name):
                fill_norm(getattr(stack, name))
        for layer in stack.layer:
            fill(layer.self_attention.linear[0], 3 * d_model)
            fill(layer.self_attention.linear[1], d_model, bias=False)
            fill_norm(layer.self_attention.layer_norm)
            for name in ("keys", "values"):
                if hasattr(layer.self_attention, f"relative_position_{name}"):
                    setattr(layer.self_attention, f"relative_position_{name}", array(9, d_model // 2))
            if hasattr(layer, "attention"):
                for linear, rows in zip(layer.attention.linear, (d_model, 2 * d_model, d_model), strict=True):
                    fill(linear, rows)
                fill_norm(layer.attention.layer_norm)
            width = 24 if stack is spec.encoder else 40
            fill(layer.ffn.linear_0, width)
            fill(layer.ffn.linear_1, d_model, width)
            if hasattr(layer.ffn, "linear_0_noact"):
                fill(layer.ffn.linear_0_noact, width)
            fill_norm(layer.ffn.layer_norm)
    spec.register_source_vocabulary(vocabs[0])
    spec.register_target_vocabulary(vocabs[1])
    spec.config.add_source_eos = True
    spec.config.decoder_start_token = "</s>"
    change(spec)
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(folder))
    return folder


# --- what is converted


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_converted_model_has_the_probabilities_and_translations_of_each_quantisation(
    quantization: str | None, marian_folder: Path, tmp_path: Path
) -> None:
    source = to_their_folder(marian_folder, tmp_path / "theirs", quantization)
    found = convert_model(source, tmp_path / "ours", SCRIPTS)["conversion"]
    check = found["check"]
    assert found["kind"] == "ctranslate2"
    assert check["measure"] == "log-probabilities of tokens"
    assert 0 < check["largest_difference"] < 1e-4
    assert check["equal_translations"] == check["equal_tokens"] == check["sentences"] == len(SCRIPTS)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours")
    assert model.config.tie_word_embeddings
    assert model.config.output_bias
    assert type(AutoTokenizer.from_pretrained(tmp_path / "ours")) is VaswaniMarianTokenizer


def test_a_model_in_single_precision_is_the_one_that_was_given_to_ctranslate2(
    marian_folder: Path, their_folder: Path
) -> None:
    direct, _ = find_reader(marian_folder).read(marian_folder)
    model, tokenizer = from_ctranslate2(their_folder)
    pad = model.config.pad_token_id
    for name, weight in direct.state_dict().items():
        found = model.state_dict()[name]
        if name == "lm_head.bias":  # the token that starts the decoder cannot be found here
            found, weight = found[:pad], weight[:pad]
        torch.testing.assert_close(found, weight, rtol=0, atol=0)
    assert model.config.position_encoding == "sinusoidal"
    assert model.config.decoder_start_token_id == pad == tokenizer.pad_token_id
    inputs = tokenizer(SCRIPTS, return_tensors="pt", padding=True)
    assert not (model.generate(**inputs, max_length=20)[:, 1:-1] == pad)[:, 0].any()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"separate": True},
        {"quantization": "int8"},
        {"activation": 2},
        {"activation": 1},
        {"activation": 4},
        {"num_heads": 4},
        {"change": lambda spec: setattr(spec.decoder, "start_from_zero_embedding", True)},
        {"change": lambda spec: setattr(spec.config, "layer_norm_epsilon", 0.1)},
        {"change": lambda spec: setattr(spec.config, "add_source_eos", False)},
        {"change": lambda spec: setattr(spec.decoder.projection, "weight", spec.decoder.embeddings.weight)},
        {"change": lambda spec: setattr(spec.encoder.embeddings[0], "weight", spec.decoder.embeddings.weight)},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_models_of_other_shapes_and_with_their_own_positions_have_equal_probabilities(
    options: dict[str, Any], tmp_path: Path
) -> None:
    source = write_spec(tmp_path / "theirs", **options)
    model, tokenizer = from_ctranslate2(source)
    assert model.config.position_encoding == "fixed"
    assert (model.config.encoder_layers, model.config.decoder_layers) == (2, 3)
    assert (model.config.d_ff, model.config.decoder_ffn_dim) == (24, 40)
    assert tokenizer.separate_vocabs == bool(options.get("separate"))
    assert largest_difference(source, model, tokenizer) < 1e-4


def test_a_vocabulary_in_lines_is_read_too(copied: Path, their_folder: Path) -> None:
    path = copied / "shared_vocabulary.json"
    path.with_suffix(".txt").write_text("\n".join(json.loads(path.read_text())) + "\n")
    path.unlink()
    found, wanted = from_ctranslate2(copied)[1], from_ctranslate2(their_folder)[1]
    assert found.get_vocab() == wanted.get_vocab()


# --- packages of Argos Translate


def test_a_package_is_converted_with_its_languages(copied: Path, tmp_path: Path) -> None:
    package = package_of(copied, tmp_path / "translate-zh_en-1_9")
    model, tokenizer = from_ctranslate2(package)
    assert tokenizer.init_kwargs["source_lang"] == "zh"
    assert tokenizer("Guten Tag")["input_ids"] == from_ctranslate2(copied)[1]("Guten Tag")["input_ids"]
    assert largest_difference(package, model, tokenizer) < 1e-4
    (package / "sentencepiece.model").rename(package / "bpe.model")
    with pytest.raises(ValueError, match=r"bpe.model has byte-pair encoding on the tokens of Moses"):
        from_ctranslate2(package)


def package_of(model: Path, package: Path) -> Path:
    """Make a package as Argos Translate installs it."""
    shutil.copytree(model, package / "model", ignore=shutil.ignore_patterns("*.spm"))
    shutil.copy(model / "source.spm", package / "sentencepiece.model")
    (package / "metadata.json").write_text(json.dumps({"from_code": "zh", "to_code": "en", "package_version": "1.9"}))
    return package


# --- what is refused


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pre_norm": True}, "normalis"),
        ({"with_relative_position": True}, "its positions are relative"),
        ({"ffn_glu": True}, r"its feed-forward sub-layers are gated \(GLU\)"),
        ({"layernorm_embedding": True}, "it normalises its embeddings"),
        ({"activation": 6, "change": lambda spec: setattr(spec.encoder, "scale_embeddings", False)}, "multiplies"),
        ({"change": lambda spec: setattr(spec.decoder, "scale_embeddings", 3.0)}, "embeddings by 3; only 4,"),
        ({"change": lambda spec: setattr(spec.decoder, "alibi", True)}, "it has ALiBi"),
        ({"change": lambda spec: setattr(spec.encoder.position_encodings, "encodings", "__optional")}, "no table of"),
        ({"change": lambda spec: setattr(spec.encoder, "num_heads", np.int16(4))}, "it has heads=4 in the encoder"),
        ({"change": lambda spec: setattr(spec.config, "add_source_bos", True)}, "add_source_bos=True; only false"),
        ({"change": lambda spec: setattr(spec.config, "decoder_start_token", "<s>")}, "has no '<s>'"),
        ({"change": lambda spec: setattr(spec.config, "unk_token", None)}, "unk_token=None; it must be a token"),
        ({"change": lambda spec: setattr(spec.config, "layer_norm_epsilon", "a")}, "layer_norm_eps='a'"),
        (
            {"change": lambda spec: setattr(spec.decoder, "scale_outputs", 2.0)},
            "not known, such as decoder/scale_outputs",
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused_with_the_reason(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    source = write_spec(tmp_path / "theirs", **options)
    with pytest.raises(ValueError, match=reason) as error:
        from_ctranslate2(source)
    assert "\n" not in str(error.value)
    assert str(source) in str(error.value)


# --- what is damaged


def test_a_file_that_is_cut_or_changed_anywhere_is_refused_in_one_line(copied: Path, tmp_path: Path) -> None:
    path = copied / "model.bin"
    whole = path.read_bytes()
    places = [*range(60), *random.Random(0).sample(range(len(whole)), 60)]
    for place in places:
        path.write_bytes(whole[:place])
        with pytest.raises(ValueError, match=r"is not a CTranslate2 model") as error:
            from_ctranslate2(copied)
        assert "\n" not in str(error.value)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match=r"1 bytes follow its end"):
        from_ctranslate2(copied)


def header(variables: int, architecture: bytes = b"TransformerSpec\0", layout: int = 6, revision: int = 7) -> bytes:
    return struct.pack("<IH", layout, len(architecture)) + architecture + struct.pack("<II", revision, variables)


def variable(name: bytes, shape: list[int], kind: int, data: bytes, size: int | None = None) -> bytes:
    head = struct.pack("<H", len(name) + 1) + name + b"\0" + struct.pack(f"<B{len(shape)}I", len(shape), *shape)
    return head + struct.pack("<BI", kind, len(data) if size is None else size) + data


ONE = variable(b"a", [2], 0, bytes(8))


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (header(0, layout=2**31), "begins with the number 2147483648"),
        (header(0, layout=5), "convert the original again with a newer version of CTranslate2"),
        (header(0, revision=3), "has the revision 3 of TransformerSpec; only 7 is known: convert the original again"),
        (header(0, revision=2**31), "has the revision 2147483648 of TransformerSpec; only 7 is known"),
        (header(0, b"WhisperSpec\0"), "has the architecture 'WhisperSpec'; only TransformerSpec is known"),
        (header(0, b"TransformerSpec"), "a name is not text with a zero byte at its end"),
        (header(0, b"\xff\xff\0"), "a name is not text with a zero byte at its end"),
        (header(2**31), "a number has 2 bytes, 0 are left"),
        (header(2**31) + ONE, "a number has 2 bytes, 0 are left"),
        (header(1) + ONE + struct.pack("<I", 2**31), "a number has 2 bytes, 0 are left"),
        (header(2) + ONE + ONE, "it has 'a' twice"),
        (header(1) + variable(b"a", [2**31, 2**31], 0, bytes(8)), r"its shape \(2147483648, 2147483648\) makes it"),
        (header(1) + variable(b"a", [2**29], 0, bytes(8), 2**31), "'a' has 2147483648 bytes, 8 are left"),
        (header(1) + variable(b"a", [0], 0, b""), r"'a' has 0 bytes; its shape \(0,\) makes it 0"),
        (header(1) + variable(b"a", [1] * 200, 0, bytes(4)), "'a' has 200 dimensions, at most 8 are possible"),
        (header(1) + variable(b"a", [8], 6, bytes(8)), "'a' has the type 6, known are 0 to 5"),
        (header(1) + variable(b"a", [8], 255, bytes(8)), "'a' has the type 255, known are 0 to 5"),
        (header(1) + ONE + struct.pack("<I", 1) + b"\2\0b\0\2\0c\0", "its alias 'b' of 'c' is not possible"),
        (header(1) + ONE + struct.pack("<I", 1) + b"\2\0a\0\2\0a\0", "its alias 'a' of 'a' is not possible"),
        (header(1) + ONE + struct.pack("<I", 0), "it has no encoder/pre_norm|pre-LN"),
        (b"PK\3\4" + bytes(100), "begins with the number"),
        (b"", "a number has 4 bytes, 0 are left"),
    ],
)
def test_impossible_numbers_are_refused_before_memory_is_taken(contents: bytes, reason: str, copied: Path) -> None:
    (copied / "model.bin").write_bytes(contents)
    with pytest.raises(ValueError, match=reason) as error:
        from_ctranslate2(copied)
    assert "\n" not in str(error.value)
    assert str(copied / "model.bin") in str(error.value)


def rewritten(folder: Path, changes: dict[str, torch.Tensor | None], aliases: dict[str, str] | None = None) -> None:
    """Write the file again, with other values for some names."""
    path = folder / "model.bin"
    found = read_variables(path)
    tensors = {name: tensor for name, tensor in {**found.tensors, **changes}.items() if tensor is not None}
    kinds = [torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16]
    parts = [header(len(tensors))]
    for name, tensor in tensors.items():
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        parts.append(variable(name.encode(), list(tensor.shape), kinds.index(tensor.dtype), data))
    aliases = found.aliases if aliases is None else aliases
    parts.append(struct.pack("<I", len(aliases)))
    for pair in aliases.items():
        parts += [struct.pack("<H", len(name) + 1) + name.encode() + b"\0" for name in pair]
    path.write_bytes(b"".join(parts))


EMBEDDING, GAMMA = "decoder/embeddings/weight", "encoder/layer_0/ffn/layer_norm/gamma"
FC1, PRODUCT = "encoder/layer_1/ffn/linear_0/weight", "decoder/layer_0/self_attention/linear_0/weight"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({GAMMA: None}, f"it has no {GAMMA}"),
        (
            {GAMMA: torch.ones(33)},
            r"feed_forward_layer_norm.weight has the shape \(33,\); the configuration makes it \(32,\)",
        ),
        ({GAMMA: torch.tensor(1.0)}, r"gamma has the shape \(\); it must have 1 dimensions"),
        ({GAMMA: torch.full((32,), float("nan"))}, f"{GAMMA} has values that are NaN or infinite"),
        ({GAMMA: torch.ones(32, dtype=torch.int8)}, f"{GAMMA} is of type torch.int8"),
        ({GAMMA: torch.ones(32, dtype=torch.int32)}, f"{GAMMA} is of type torch.int32"),
        ({FC1: torch.ones(32, 31)}, r"fc1.weight has the shape \(32, 31\)"),
        ({FC1: torch.ones(32, 32, dtype=torch.int8)}, f"{FC1} is quantised, but does not have the positive scales"),
        ({FC1: torch.ones(32, 32, dtype=torch.int8), f"{FC1}_scale": torch.ones(31)}, "does not have the positive"),
        ({FC1: torch.ones(32, 32, dtype=torch.int8), f"{FC1}_scale": torch.zeros(32)}, "does not have the positive"),
        ({FC1: torch.ones(32, 32, dtype=torch.int16), f"{FC1}_scale": torch.ones(32)}, "does not have the positive"),
        ({f"{FC1}_scale": torch.ones(32)}, f"{FC1} is of type torch.float32, which it cannot have here"),
        ({PRODUCT: torch.ones(95, 32)}, r"linear_0 has the shape \(95, 32\) and a bias of 96, which 3 projections"),
        ({EMBEDDING: torch.ones(7, 32)}, "embed_tokens.weight has 7 rows; the vocabulary has"),
        ({"encoder/num_heads": torch.tensor([2])}, r"encoder/num_heads has the shape \(1,\); it must be a single"),
        ({"encoder/num_heads": None}, "it has no encoder/num_heads"),
        ({f"{side}/num_heads": torch.tensor(0) for side in ("encoder", "decoder")}, "it has 0 heads"),
        ({f"{side}/num_heads": torch.tensor(5) for side in ("encoder", "decoder")}, "it has 5 heads and d_model=32"),
        ({f"{side}/num_heads": torch.tensor(float("nan")) for side in ("encoder", "decoder")}, "it has heads=nan"),
        ({f"{side}/activation": torch.tensor(99) for side in ("encoder", "decoder")}, "has the number 99, known are"),
        ({"encoder/scale_embeddings": torch.tensor(float("nan"))}, "it multiplies embeddings by nan"),
        ({"encoder/layer_7/x": torch.ones(2)}, "its layers encoder/layer_0 and so on have gaps"),
        ({"encoder/layer_-1/x": torch.ones(2)}, "its layers encoder/layer_0 and so on have gaps"),
        ({"something": torch.ones(2)}, "1 of its values are not known, such as something"),
        ({"decoder/position_encodings/encodings": torch.ones(9, 31)}, "have 31 features, not 32"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_values_of_other_shapes_and_types_are_refused_by_name(
    changes: dict[str, torch.Tensor | None], reason: str, copied: Path
) -> None:
    changes = {
        name: value.short() if value is not None and value.dtype == torch.int64 else value
        for name, value in changes.items()
    }
    rewritten(copied, changes)
    with pytest.raises(ValueError, match=reason) as error:
        from_ctranslate2(copied)
    assert "\n" not in str(error.value)


def test_aliases_cannot_stand_for_more_weights_than_the_file_explains(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = read_variables(copied / "model.bin")
    names = [name.removeprefix("encoder/layer_0/") for name in variables.tensors if name.startswith("encoder/layer_0/")]
    aliases = {f"encoder/layer_{rank}/{name}": f"encoder/layer_0/{name}" for rank in range(2, 40) for name in names}
    rewritten(copied, {}, {**variables.aliases, **aliases})
    assert from_ctranslate2(copied)[0].config.encoder_layers == 40
    monkeypatch.setattr(ctranslate2_reader, "MAX_MORE", 1000)
    with pytest.raises(ValueError, match=r"its \d+ stored values stand for \d+ weights, which is too many"):
        from_ctranslate2(copied)


@pytest.mark.parametrize(
    ("file", "contents", "reason"),
    [
        ("config.json", "[1]", "does not hold a JSON object"),
        ("shared_vocabulary.json", "{}", "is not a vocabulary: it must be a list of different tokens"),
        ("shared_vocabulary.json", '["a", 1]', "is not a vocabulary"),
        ("shared_vocabulary.json", '["a", "a"]', "is not a vocabulary"),
        ("shared_vocabulary.json", "[" * 100_000, "cannot be read"),
        ("shared_vocabulary.json", '["</s>", "<unk>"]', "rows; the vocabulary has 2 tokens"),
        ("shared_vocabulary.json", '["<unk>"]', "has no '</s>', its eos_token"),
        ("shared_vocabulary.json", None, "There is no vocabulary in"),
        ("model.bin", None, "There is no model.bin in"),
        ("source.spm", None, "There is no source.spm and target.spm in .*: copy them there from the original"),
        ("source.spm", "abc", "is not a SentencePiece model, or is damaged"),
    ],
)
def test_small_files_that_are_damaged_or_missing_are_named(
    file: str, contents: str | None, reason: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / file).unlink()
    if contents is not None:
        (copied / file).write_text(contents)
    with pytest.raises(ValueError, match=reason) as error:
        convert_model(copied, copied.parent / "out")
    assert "\n" not in str(error.value)
    with pytest.raises(SystemExit) as status:
        main(["convert", str(copied), str(copied.parent / "out")])
    assert status.value.code == 2
    printed = capsys.readouterr()
    assert re.search(reason, printed.err)
    assert not (copied.parent / "out").exists()


def test_files_behind_a_link_that_leads_outside_are_not_read(copied: Path, tmp_path: Path) -> None:
    (copied / "model.bin").rename(tmp_path / "elsewhere")
    (copied / "model.bin").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"model.bin leads to .*elsewhere, outside its folder"):
        from_ctranslate2(copied)
