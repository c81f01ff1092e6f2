"""Small folders with checkpoints as fairseq saves them, of the weights of FSMT models."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import FSMTForConditionalGeneration

from tests.fsmt import write_fsmt

FORMS = ("newest", "groups", "plain groups", "oldest")


def options_of(model: FSMTForConditionalGeneration, shared: str, **changes: Any) -> argparse.Namespace:
    """Return the options of a training, with some that a conversion does not need."""
    config = model.config
    options: dict[str, Any] = {
        "arch": "transformer_wmt_en_de",
        "activation_fn": config.activation_function,
        "adam_betas": "(0.9, 0.98)",
        "adaptive_softmax_cutoff": None,
        "attention_dropout": config.attention_dropout,
        "criterion": "label_smoothed_cross_entropy",
        "dropout": config.dropout,
        "lr": [0.0005],
        "max_source_positions": config.max_position_embeddings,
        "max_target_positions": config.max_position_embeddings,
        "share_all_embeddings": shared == "all",
        "share_decoder_input_output_embed": shared in ("all", "target"),
        "source_lang": "ru",
        "target_lang": "en",
        "task": "translation",
    }
    for side in ("encoder", "decoder"):
        options |= {
            f"{side}_attention_heads": getattr(config, f"{side}_attention_heads"),
            f"{side}_embed_dim": config.d_model,
            f"{side}_ffn_embed_dim": getattr(config, f"{side}_ffn_dim"),
            f"{side}_layers": getattr(config, f"{side}_layers"),
            f"{side}_learned_pos": False,
            f"{side}_normalize_before": False,
        }
    return argparse.Namespace(**{**options, **changes})


def weights_of(model: FSMTForConditionalGeneration, form: str, shared: str, learned: bool) -> dict[str, torch.Tensor]:
    """Return the weights by the names of fairseq: of its newest version, or of its oldest."""
    weights = {}
    for name, weight in model.state_dict().items():
        if "embed_positions" not in name or learned:
            weights[name.removeprefix("model.")] = weight.clone()
    if form == "oldest":
        if shared in ("all", "target"):
            del weights["decoder.output_projection.weight"]
        else:
            weights["decoder.embed_out"] = weights.pop("decoder.output_projection.weight")
        for name in [name for name in weights if "q_proj" in name]:
            three = [weights.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
            weights[name.replace("q_proj.", "in_proj_")] = torch.cat(three)
        numbers = {"encoder": "self_attn final", "decoder": "self_attn encoder_attn final"}
        for side, kinds in numbers.items():
            for number, kind in enumerate(kinds.split()):
                for name in [name for name in weights if f"{kind}_layer_norm" in name and name.startswith(side)]:
                    weights[name.replace(f"{kind}_layer_norm", f"layer_norms.{number}")] = weights.pop(name)
    for side in ("encoder", "decoder"):
        weights[f"{side}.version"] = torch.tensor([3.0])
        if not learned:
            weights[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
    return weights


def checkpoint_of(options: argparse.Namespace, weights: dict[str, torch.Tensor], form: str) -> dict[str, Any]:
    """Return what fairseq saves; the newer groups of options are Namespaces, or plain after `to_container`."""
    rest = {"optimizer_history": [{"num_updates": 7}], "extra_state": {"epoch": 3}, "last_optimizer_state": {}}
    if form in ("newest", "oldest"):
        return {"args": options, "model": weights, **rest}
    task = argparse.Namespace(_name="translation", source_lang=options.source_lang, target_lang=options.target_lang)
    groups = {"task": task, "model": options, "common": {"seed": 1}}
    if form == "plain groups":
        fields = vars(options)
        model: dict[str, Any] = {"_name": "transformer", "encoder": {}, "decoder": {}}
        for name, value in fields.items():
            side, _, rest_of_name = name.partition("_")
            if side in ("encoder", "decoder"):
                model[side][rest_of_name] = value
            elif name not in ("arch", "source_lang", "target_lang"):
                model[name] = value
        groups = {"task": vars(task), "model": model, "common": {"seed": 1}}
    return {"args": None, "cfg": groups, "model": weights, **rest}


def write_fairseq(
    folder: Path,
    separate: bool = True,
    shared: str = "target",
    form: str = "newest",
    learned: bool = False,
    codes: str = "#version: 0.2",
    name: str = "checkpoint_best.pt",
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> FSMTForConditionalGeneration:
    """Write a folder with a checkpoint, its dictionaries and byte pairs, and one of the same model as FSMT in it."""
    folder.mkdir(exist_ok=True, parents=True)
    original = folder / "fsmt"
    model = write_fsmt(original, separate=separate, shared=shared != "none", **changes)
    if learned:
        for stack in (model.model.encoder, model.model.decoder):
            stack.embed_positions.weight.data.normal_(generator=torch.Generator().manual_seed(5))
    for language, side in (("ru", "src"), ("en", "tgt")):
        vocab = json.loads((original / f"vocab-{side}.json").read_text())
        tokens = [token for token in vocab if token not in ("<s>", "<pad>", "</s>", "<unk>")]
        words = [token.removesuffix("</w>") if token.endswith("</w>") else f"{token}@@" for token in tokens]
        lines = [f"{word} {1000 - rank}\n" for rank, word in enumerate(words)]
        (folder / f"dict.{language}.txt").write_text("".join(lines), encoding="utf-8")
    merges = [line.split() for line in (original / "merges.txt").read_text(encoding="utf-8").splitlines()]
    lines = [f"{first} {second} {count}" if not codes else f"{first} {second}" for first, second, count in merges]
    (folder / "bpecodes").write_text("\n".join([codes] * bool(codes) + lines), encoding="utf-8")
    given = options_of(model, shared, encoder_learned_pos=learned, decoder_learned_pos=learned, **(options or {}))
    found = checkpoint_of(given, weights_of(model, form, shared, learned), form)
    torch.save(found, folder / name, _use_new_zipfile_serialization=form != "oldest")
    return model
