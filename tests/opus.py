"""Small random Marian folders with the files that OPUS-MT models have on the Hub, and text in many scripts."""

import io
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import MarianConfig, MarianMTModel

# Latin, Cyrillic, Greek, Arabic, Hebrew, Devanagari, Thai, Chinese, Japanese and Korean.
SCRIPTS = [
    "The quick brown fox jumps over the lazy dog, and it costs 3.50 today.",
    "Größe übermäßig; naïve façade, Việt Nam điều đó, Čeština příliš žluťoučký kůň.",
    "Завтра будет дождь, а сегодня хорошая погода. Ёлка и йод.",
    "Καλημέρα κόσμε, τι κάνεις σήμερα; Ὅμηρος ἄνδρα μοι ἔννεπε.",
    "مرحبا بالعالم، كيف حالك اليوم؟ السَّلامُ عليكم ورحمة الله.",
    "שלום עולם, מה שלומך היום? בְּרֵאשִׁית בָּרָא אֱלֹהִים.",
    "नमस्ते दुनिया, आप कैसे हैं? क़िला और ज़मीन की बातें।",
    "สวัสดีชาวโลก วันนี้เป็นอย่างไรบ้าง น้ำแข็งละลายแล้ว",
    "你好，世界！今天的天气怎么样？我们明天去北京。",
    "こんにちは世界。ガラスのボトルとパンを買いました。",
    "안녕하세요 세계, 오늘 기분이 어때요? 내일은 비가 올 것입니다.",
]
TAGS = (">>deu<<", ">>fra<<")


def train_sentencepiece(sentences: list[str], size: int, **options: Any) -> bytes:
    """Learn a SentencePiece model as OPUS-MT has them: Unigram, nmt_nfkc."""
    import sentencepiece

    model = io.BytesIO()
    options = {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc", **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        vocab_size=size,
        hard_vocab_limit=False,
        character_coverage=0.999,
        minloglevel=3,
        **options,
    )
    return model.getvalue()


def pieces_of(model: bytes) -> list[str]:
    """Return the normal pieces of a SentencePiece model."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(index) for index in range(3, len(processor))]


def sentences_of(words: int = 600, seed: int = 0) -> list[str]:
    """Make sentences of the words of all scripts."""
    generator = random.Random(seed)
    known = [word for line in SCRIPTS for word in line.split()]
    return [*SCRIPTS * 3, *(" ".join(generator.choices(known, k=6)) for _ in range(words))]


def write_tokenizers(folder: Path, separate: bool = False) -> tuple[int, int]:
    """Write source.spm, target.spm and the vocabularies; return the sizes of source and target vocabulary."""
    models = [train_sentencepiece(sentences_of(seed=seed), size) for seed, size in ((0, 420), (1, 360))]
    sides = [pieces_of(model) for model in models]
    # The vocabulary lacks some pieces, as those of the Hub do, which were made from the training data.
    sides = [[piece for rank, piece in enumerate(side) if rank % 23 != 7] for side in sides]
    if not separate:
        sides = [list(dict.fromkeys([*sides[0], *sides[1]]))]
    vocabs = [["</s>", "<unk>", *TAGS, *side, "<pad>"] for side in sides]
    if separate:  # the id of <pad> is the last one of the source's vocabulary, so the target's is longer here
        filler = [f"filler{index}" for index in range(len(vocabs[0]) - len(vocabs[1]) + 40)]
        vocabs[1] = [*vocabs[1][:-1], *filler, "<pad>"]
    for name, model in zip(("source.spm", "target.spm"), models, strict=True):
        (folder / name).write_bytes(model)
    for name, vocab in zip(("vocab.json", "target_vocab.json"), vocabs, strict=False):
        text = json.dumps({token: index for index, token in enumerate(vocab)}, indent=2, ensure_ascii=False)
        (folder / name).write_text(text, encoding="utf-8")
    options = {"source_lang": "en", "target_lang": "de", "model_max_length": 512, "separate_vocabs": separate}
    options |= {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>", "tokenizer_class": "MarianTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return len(vocabs[0]), len(vocabs[-1])


def config_fields(source: int, target: int, separate: bool = False, **changes: Any) -> dict[str, Any]:
    """Return the fields of a tiny model's `config.json`, with the older ones that the Hub's have."""
    fields = {
        "_name_or_path": "/tmp/Helsinki-NLP/opus-mt-en-de",
        "_num_labels": 3,
        "activation_dropout": 0.0,
        "activation_function": "swish",
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "architectures": ["MarianMTModel"],
        "attention_dropout": 0.0,
        "bad_words_ids": [[source - 1]],
        "bos_token_id": 0,
        "classif_dropout": 0.0,
        "classifier_dropout": 0.0,
        "d_model": 16,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 32,
        "decoder_layerdrop": 0.0,
        "decoder_layers": 2,
        "decoder_start_token_id": source - 1,
        "dropout": 0.1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "encoder_layerdrop": 0.0,
        "encoder_layers": 2,
        "eos_token_id": 0,
        "extra_pos_embeddings": source,
        "forced_eos_token_id": 0,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
        "init_std": 0.02,
        "is_encoder_decoder": True,
        "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
        "max_length": 512,
        "max_position_embeddings": 512,
        "model_type": "marian",
        "normalize_before": False,
        "normalize_embedding": False,
        "num_beams": 4,
        "num_hidden_layers": changes.get("encoder_layers", 2),
        "pad_token_id": source - 1,
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": not separate,
        "static_position_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": source,
        "decoder_vocab_size": target,
    }
    return {**fields, **changes}


def random_marian(seed: int = 0, bias: bool = True, **fields: Any) -> MarianMTModel:
    """Build a MarianMTModel whose weights are far from their start, so that biases and norms matter too."""
    torch.manual_seed(seed)
    model = MarianMTModel(MarianConfig(**fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                parameter.add_(0.15 * torch.randn_like(parameter))
        for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens"):
            embedding = model.model.get_submodule(name) if name != "shared" or hasattr(model.model, "shared") else None
            if embedding is not None and fields["pad_token_id"] < len(embedding.weight):
                embedding.weight[fields["pad_token_id"]] = 0
        if bias:
            model.final_logits_bias.copy_(0.5 * torch.randn_like(model.final_logits_bias))
    return model


def write_marian(
    folder: Path, separate: bool = False, pickled: bool = True, bias: bool = True, seed: int = 0, **changes: Any
) -> MarianMTModel:
    """Write a folder as it is on the Hub, and return its model."""
    folder.mkdir(exist_ok=True, parents=True)
    sizes = write_tokenizers(folder, separate)
    return write_model(folder, sizes, separate, pickled, bias, seed, **changes)


def write_model(
    folder: Path, sizes: tuple[int, int], separate: bool, pickled: bool, bias: bool, seed: int = 0, **changes: Any
) -> MarianMTModel:
    """Write configuration, generation configuration, weights and card."""
    fields = config_fields(*sizes, separate, **changes)
    model = random_marian(seed, bias, **{name: value for name, value in fields.items() if name in MARIAN_FIELDS})
    (folder / "config.json").write_text(json.dumps(fields, indent=2))
    if pickled:  # as the first conversions were saved, with the tables of positions
        torch.save(dict(model.state_dict()), folder / "pytorch_model.bin")
    else:
        model.save_pretrained(folder / "saved")
        (folder / "saved" / "model.safetensors").rename(folder / "model.safetensors")
        for file in (folder / "saved").iterdir():
            file.unlink()
        (folder / "saved").rmdir()
        generation = {
            "bad_words_ids": [[sizes[0] - 1]],
            "bos_token_id": 0,
            "decoder_start_token_id": sizes[0] - 1,
            "eos_token_id": 0,
            "forced_eos_token_id": 0,
            "max_length": 512,
            "num_beams": 4,
            "pad_token_id": sizes[0] - 1,
            "renormalize_logits": True,
            "transformers_version": "4.32.0.dev0",
        }
        (folder / "generation_config.json").write_text(json.dumps(generation))
    card = "---\nlanguage:\n- en\n- de\nlicense: cc-by-4.0\ntags:\n- translation\n---\n# OPUS-MT\n"
    (folder / "README.md").write_text(card)
    return model


MARIAN_FIELDS = set(MarianConfig.__annotations__) - {"is_decoder"}
