"""Small random FSMT folders with the files that the models of WMT19 have on the Hub."""

import json
from pathlib import Path
from typing import Any

import torch
from sacremoses import MosesTokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import FSMTConfig, FSMTForConditionalGeneration

from tests.opus import sentences_of

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


def learn_merges(number: int = 300) -> tuple[list[tuple[str, str]], list[str]]:
    """Learn a byte-pair encoding of words that Moses splits, and return its merges and its symbols."""
    moses = MosesTokenizer("en")
    words = [moses.tokenize(line, aggressive_dash_splits=True, return_str=True) for line in sentences_of(200)]
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=number + 400, end_of_word_suffix="</w>", show_progress=False)
    tokenizer.train_from_iterator(words, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return [tuple(pair) for pair in model["merges"]], sorted(model["vocab"], key=model["vocab"].get)


def vocabularies(symbols: list[str], separate: bool) -> list[dict[str, int]]:
    """Return the vocabularies of source and target, which lack some symbols, as those of rare words are lacking."""
    sides = [[symbol for rank, symbol in enumerate(symbols) if rank % 19 != 5 + separate * side] for side in (0, 1)]
    if separate:
        sides[1] = sides[1][::-1][:-40]
    return [{token: index for index, token in enumerate([*SPECIAL, *side])} for side in sides]


def random_fsmt(seed: int = 0, **fields: Any) -> FSMTForConditionalGeneration:
    """Build a model whose weights are far from their start, so that biases and norms matter too."""
    torch.manual_seed(seed)
    model = FSMTForConditionalGeneration(FSMTConfig(**fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                parameter.add_(0.15 * torch.randn_like(parameter))
            if "embed_tokens" in name or "output_projection" in name:
                parameter[fields.get("pad_token_id", 1)] = 0
    return model


def fsmt_fields(source: int, target: int, **changes: Any) -> dict[str, Any]:
    """Return the fields of a tiny model's `config.json`."""
    fields = {
        "activation_dropout": 0.0,
        "activation_function": "relu",
        "architectures": ["FSMTForConditionalGeneration"],
        "attention_dropout": 0.1,
        "bad_words_ids": [[1]],
        "bos_token_id": 0,
        "d_model": 16,
        "decoder": {"bos_token_id": 2, "model_type": "fsmt_decoder", "vocab_size": target},
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 24,
        "decoder_layerdrop": 0,
        "decoder_layers": 2,
        "decoder_start_token_id": 2,
        "dropout": 0.2,
        "early_stopping": False,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "encoder_layerdrop": 0,
        "encoder_layers": 2,
        "eos_token_id": 2,
        "init_std": 0.02,
        "is_encoder_decoder": True,
        "langs": ["ru", "en"],
        "length_penalty": 1.15,
        "max_length": 200,
        "max_position_embeddings": 128,
        "model_type": "fsmt",
        "num_beams": 5,
        "num_hidden_layers": changes.get("encoder_layers", 2),
        "pad_token_id": 1,
        "scale_embedding": True,
        "src_vocab_size": source,
        "tgt_vocab_size": target,
        "tie_word_embeddings": False,
    }
    return {**fields, **changes}


def write_fsmt(
    folder: Path,
    separate: bool = True,
    pickled: bool = True,
    shared: bool = True,
    tables: bool = False,
    seed: int = 0,
    **changes: Any,
) -> FSMTForConditionalGeneration:
    """Write a folder as it is on the Hub, and return its model; `shared`: target and output are one matrix."""
    folder.mkdir(exist_ok=True, parents=True)
    merges, symbols = learn_merges()
    vocabs = vocabularies(symbols, separate)
    for name, vocab in zip(("vocab-src.json", "vocab-tgt.json"), vocabs, strict=True):
        (folder / name).write_text(json.dumps(vocab, ensure_ascii=False, indent=2), encoding="utf-8")
    lines = [f"{first} {second} {1000 - rank}\n" for rank, (first, second) in enumerate(merges)]
    (folder / "merges.txt").write_text("".join(lines), encoding="utf-8")
    options = {"langs": ["ru", "en"], "model_max_length": 100}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    fields = fsmt_fields(*map(len, vocabs), **changes)
    model = random_fsmt(seed, **{name: value for name, value in fields.items() if name in FSMT_FIELDS})
    decoder = model.model.decoder
    if shared and not fields["tie_word_embeddings"]:
        decoder.output_projection.weight.data = decoder.embed_tokens.weight.data.clone()
        if not separate:
            model.model.encoder.embed_tokens.weight.data = decoder.embed_tokens.weight.data.clone()
    (folder / "config.json").write_text(json.dumps(fields, indent=2))
    weights = {name: each for name, each in model.state_dict().items() if tables or "embed_positions" not in name}
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        model.save_pretrained(folder / "saved")
        (folder / "saved" / "model.safetensors").rename(folder / "model.safetensors")
        for file in (folder / "saved").iterdir():
            file.unlink()
        (folder / "saved").rmdir()
    (folder / "README.md").write_text("---\nlanguage:\n- ru\n- en\nlicense: apache-2.0\n---\n# FSMT\n")
    return model


FSMT_FIELDS = set(FSMTConfig.__annotations__) | {"num_beams", "length_penalty", "bad_words_ids"}
