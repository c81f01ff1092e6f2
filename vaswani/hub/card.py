"""The card: what a stranger reads about a model, made from its results."""

import json
import shlex
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.constants import REPOCARD_NAME

from ..convert.writer import Writer
from ..convert.writing import writer_of
from .results import folder_results, read_results, write_results
from .shipped import model_names

TEMPLATE = Path(__file__).parent / "card_template.jinja"
EXAMPLE = "Good morning."

# Scores of an evaluation: their identifier and their name on the Hub.
METRICS = {
    "bleu": ("sacrebleu", "sacreBLEU"),
    "chrf": ("chrf", "chrF"),
    "paper_bleu": ("bleu", "BLEU as the paper's authors measured it"),
}


def make_card(results: dict[str, Any]) -> ModelCard:
    """Make a model card.

    Parameters
    ----------
    results : dict[str, Any]
        The entry `model`, and where they are known `about`, `conversion`, `export`, `training`, `recipe`, `averaged`,
        `evaluations` and `speed`.

    Returns
    -------
    ModelCard
        The card; the same for the same results. What is not known is left out.
    """
    conversion, model, recipe = results.get("conversion"), results["model"], results.get("recipe", {})
    about = {**(conversion["about"] if conversion else {}), **results.get("about", {})}
    name, published = about.get("name", "A translator"), about.get("published", {})
    export = results.get("export")
    writer = writer_of(export["kind"]) if export else None
    measured, stated = _measured_scores(results.get("evaluations", [])), _published_scores(published)
    scores = measured or stated  # of one test set, the metadata have figures from one source
    data = ModelCardData(
        language=about.get("languages"),
        license=about.get("license"),
        license_name=about.get("license_name"),
        license_link=about.get("license_link"),
        library_name=writer.library if writer else "transformers",
        pipeline_tag="translation",
        tags=[export["kind"] if export else "vaswani", *about.get("tags", [])],
        base_model=about.get("base_model"),
        datasets=[entry["id"] for entry in about.get("data", []) if "id" in entry] or None,
        metrics=list(dict.fromkeys(score.metric_type for score in scores)) or None,
        model_name=name if scores else None,
        eval_results=scores or None,
    )
    example, location = about.get("example", EXAMPLE), about.get("location", name)
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        is_planned=results.get("is_planned", False),
        summary=about.get("summary"),
        shape=_shape(model),
        base_model=about.get("base_model"),
        conversion=_conversion(conversion) if conversion else None,
        location=_location(location),
        example=_quoted(example),
        export=_export(export) if export else None,
        use=_use(writer, location, example) if writer else None,
        search=_search(model["search"]),
        preset={"name": recipe.get("preset"), "vocab_size": model["vocab_size"]},
        measured=[_score_row(score) for score in measured],
        notes=[*map(_evaluation_note, results.get("evaluations", [])), *_signature_notes(measured)],
        published=published and _published_texts(published, stated),
        speed=_speed_texts(results["speed"]) if "speed" in results else None,
        training=_training_rows(results) if recipe else None,
        data=about.get("data"),
        intended_use=about.get("intended_use"),
        limits=about.get("limits"),
        license=_licence(about),
    )


def card_for_folder(folder: Path, location: str | None = None) -> ModelCard:
    """Make the card of a model from what its folder has.

    Parameters
    ----------
    folder : Path
        The model's folder; its results are used if it has any.
    location : str | None, default=None
        The name by which the model shall be loaded, such as one on the Hub.

    Returns
    -------
    ModelCard
        The card.

    Raises
    ------
    ValueError
        If there is no model of ours in the folder.
    """
    results = read_results(folder) | folder_results(folder)
    about = {"name": (location or folder.resolve().name).rpartition("/")[2], **results.get("about", {})}
    return make_card({**results, "about": about | ({"location": location} if location else {})})


def write_card(folder: Path, results: dict[str, Any]) -> None:
    """Write results, and the card that is made from them, into a folder.

    Parameters
    ----------
    folder : Path
        The folder.
    results : dict[str, Any]
        The results.
    """
    card = make_card(results)
    write_results(folder, results)
    card.save(folder / REPOCARD_NAME)


def _quoted(text: str) -> dict[str, str]:
    """Return a text as Python and the shell write it."""
    return {"python": json.dumps(text, ensure_ascii=False), "shell": shlex.quote(text)}


def _location(location: str) -> dict[str, str]:
    """Return by what a model is loaded, as Python and the shell write it."""
    quoted = _quoted(location)
    is_shipped = location in model_names()
    return quoted | {"python": f"vaswani.model_folder({quoted['python']})"} if is_shipped else quoted


def _measured_scores(evaluations: list[dict[str, Any]]) -> list[EvalResult]:
    return [
        _score(evaluation, metric, evaluation[key], evaluation[f"{key}_signature"])
        for evaluation in evaluations
        for key, metric in METRICS.items()
    ]


def _published_scores(published: dict[str, Any]) -> list[EvalResult]:
    source = {"source_name": published.get("source"), "source_url": published.get("url")}
    return [
        _score(score, ("bleu", "BLEU"), score["bleu"], score["signature"], **source)
        for score in published.get("scores", [])
    ]


def _score(
    test_set: dict[str, Any], metric: tuple[str, str], value: float, signature: str, **source: Any
) -> EvalResult:
    return EvalResult(
        task_type="translation",
        task_name="Translation",
        dataset_type=test_set.get("dataset", test_set["name"]),
        dataset_name=test_set["name"],
        dataset_config=test_set.get("config"),
        dataset_split=test_set.get("split"),
        metric_type=metric[0],
        metric_name=metric[1],
        metric_value=round(value, 1),
        metric_args={"signature": signature},
        **source,
    )


def _score_row(score: EvalResult) -> list[Any]:
    return [score.dataset_name, score.metric_name, score.metric_value]


def _evaluation_note(evaluation: dict[str, Any]) -> str:
    search = f", translated by {_search(evaluation['search'])}" if "search" in evaluation else ""
    bleu = [f"{run['bleu']:.1f}" for run in evaluation.get("runs", [])]
    seeds = f"; the mean of {len(bleu)} seeds, BLEU {', '.join(bleu)}" if bleu else ""
    return f"{evaluation['name']}: {evaluation['sentences']:,} sentences{search}{seeds}"


def _signature_notes(scores: list[EvalResult]) -> list[str]:
    """Return each signature once; the same metric has the same one on most test sets."""
    notes = [f"{score.metric_name}: `{(score.metric_args or {})['signature']}`" for score in scores]
    return list(dict.fromkeys(notes))


def _shape(model: dict[str, Any]) -> str:
    layers = f"{model['encoder_layers']} + {model['decoder_layers']} layers of width {model['d_model']:,}"
    inner = f"{model['d_ff']:,}" + (f" and {model['d_ff_decoder']:,}" if model.get("d_ff_decoder") else "")
    heads = f"{model['num_attention_heads']} heads, inner width {inner}"
    kind = model["position_encoding"]
    positions = "" if kind == "sinusoidal" else f"{kind} positions, "
    vocabulary = f"one vocabulary of {model['vocab_size']:,} pieces"
    if model.get("source_vocab_size"):
        vocabulary = f"vocabularies of {model['source_vocab_size']:,} and {model['vocab_size']:,} pieces"
    return f"{layers}, {heads}, {positions}{vocabulary}, {_millions(model['parameters'])} parameters"


def _search(search: dict[str, Any]) -> str:
    if search["beams"] == 1:
        return "greedy search"
    return f"beam search with {search['beams']} beams and the length penalty {search['length_penalty']}"


def _published_texts(published: dict[str, Any], scores: list[EvalResult]) -> dict[str, Any]:
    work = f"{published['updates']:,} updates on {_millions(published['pairs'])} pairs"
    cost = f", {published['time']} on {published['hardware']}" if "time" in published else ""
    parameters = [f"parameters: {_millions(published['parameters'])}"] if "parameters" in published else []
    return {
        "source": published["source"],
        "url": published["url"],
        "rows": [_score_row(score) for score in scores],
        "notes": [
            *(f"{score['name']}: {score['signature']}" for score in published["scores"]),
            f"training: {work}{cost}",
            *parameters,
        ],
    }


def _licence(about: dict[str, Any]) -> str | None:
    if "license_link" in about:
        return f"[{about['license_name']}]({about['license_link']})"
    return about.get("license")


def _speed_texts(speed: dict[str, Any]) -> dict[str, Any]:
    """Return the texts about speed; a cell has batch, threads, sentences and tokens a second."""
    cells = [
        [
            f"{cell['batch']:,}",
            cell["threads"],
            f"{cell['batch'] / cell['seconds']:,.1f}",
            f"{cell['tokens'] / cell['seconds']:,.0f}",
        ]
        for cell in speed["cells"]
    ]
    return {
        "cpu": speed["cpu"],
        "versions": _versions(speed["versions"]),
        "length": f"{speed['source_tokens']:.1f}",
        "rounds": speed["rounds"],
        "cells": cells,
    }


def _training_rows(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what is known of the training as labels and texts."""
    model, recipe, training = results["model"], results["recipe"], results.get("training", {})
    rows = {
        "Corpus": _corpus(recipe, training),
        "Cleaning": _cleaning(recipe),
        "Began with": f"the weights and the vocabulary of `{recipe['model']}`" if "model" in recipe else None,
        "Vocabulary": _vocabulary(results)
        + (f", with BPE dropout {recipe['bpe_dropout']:g} in training" if recipe.get("bpe_dropout") else ""),
        "An update": f"up to {recipe['source_tokens']:,} source and {recipe['target_tokens']:,} target tokens, padding "
        "included, over all devices",
        "Updates": _updates(recipe, training),
        "Optimiser": _optimiser(recipe),
        "Learning rate": _learning_rate(recipe),
        "Dropout": _dropout(model),
        "Label smoothing": f"{model['label_smoothing']:g}",
        "Precision": next((name for name in ("bf16", "fp16") if recipe.get(name)), None),
        "Weights": _weights(results.get("averaged"), recipe, training),
        "Seed": str(recipe["seed"]),
        "Time": _time(training),
        "Last losses": _losses(training),
        "Software": _versions(training["versions"]) if training else None,
    }
    return [(label, text) for label, text in rows.items() if text]


def _vocabulary(results: dict[str, Any]) -> str:
    if "conversion" in results:
        return f"{results['model']['vocab_size']:,} pieces, those of the converted model"
    return f"{results['model']['vocab_size']:,} pieces, one joint byte-pair encoding"


def _conversion(conversion: dict[str, Any]) -> str:
    """Return what is known of a conversion, as a sentence."""
    check = conversion["check"]
    revision = f", revision {conversion['revision']}" if conversion["revision"] else ""
    origin = f"These weights were converted from {conversion['source']}{revision}, a model of type {conversion['kind']}"
    if not check["sentences"]:
        return f"{origin}, and not compared with it."
    return (
        f"{origin}: on {check['sentences']} sentences, {check['measure']} differed by at most "
        f"{check['largest_difference']:.1e}, and {check['equal_translations']} translations were equal."
    )


def _use(writer: Writer, location: str, example: str) -> dict[str, str]:
    """Return the code that uses what was exported."""
    code = writer.example.replace("{location}", _quoted(location)["python"])
    return {"language": writer.language, "code": code.replace("{example}", _quoted(example)["python"]).strip()}


def _export(export: dict[str, Any]) -> list[str]:
    """Return what is known of an export, as sentences."""
    check = export["check"]
    return [
        f"On {check['sentences']} sentences, {check['measure']} differed by at most {check['largest_difference']:.1e} "
        f"from those of the model, and {check['equal_translations']} translations were equal.",
        *export["notes"],
    ]


def _corpus(recipe: dict[str, Any], training: dict[str, Any]) -> str | None:
    names = [*recipe.get("train", []), *([recipe["dataset_config"]] if "dataset_config" in recipe else [])]
    pairs = f"{training['pairs']:,} pairs" if "pairs" in training else None
    return ", ".join(filter(None, [pairs, *(f"`{name}`" for name in names)])) or None


def _cleaning(recipe: dict[str, Any]) -> str | None:
    dropped = []
    if "max_length" in recipe:
        dropped.append(f"a side of more than {recipe['max_length']:,} tokens")
    if "max_ratio" in recipe:
        dropped.append(f"one side more than {recipe['max_ratio']:g} times as long as the other")
    if "drop_duplicates" in recipe:
        dropped.append("an earlier copy")
    return f"without pairs that have {', or '.join(dropped)}" if dropped else None


def _updates(recipe: dict[str, Any], training: dict[str, Any]) -> str:
    if "epochs" in training:
        return f"{training['updates']:,}, or {training['epochs']:.1f} epochs"
    return f"{recipe['max_steps']:,}"


def _optimiser(recipe: dict[str, Any]) -> str:
    if not recipe["optim"].startswith("adamw"):
        return recipe["optim"]
    decay, clipping = recipe.get("weight_decay"), recipe.get("max_grad_norm")
    more = [f"weight decay {decay:g}"] * bool(decay) + [f"gradients clipped to the norm {clipping:g}"] * bool(clipping)
    betas = f"beta1 {recipe['adam_beta1']:g}, beta2 {recipe['adam_beta2']:g}"
    epsilon = f"epsilon {recipe['adam_epsilon']:g}".replace("e-0", "e-")
    return ", ".join(["AdamW" if decay else "Adam", betas, epsilon, *more])


def _learning_rate(recipe: dict[str, Any]) -> str:
    warmup = recipe["warmup_steps"]  # below 1 it is a share of all updates
    length = f"{warmup:,.0f} updates" if warmup >= 1 else f"{warmup:.0%} of the updates"
    rise = f"rises over {length} to {recipe['learning_rate']:.3g}"
    if recipe["lr_scheduler_type"] == "inverse_sqrt":
        return f"{rise}, then falls with the square root of the update, by the paper's schedule"
    return f"{rise}, then by the schedule {recipe['lr_scheduler_type']}"


def _dropout(model: dict[str, Any]) -> str:
    more = [f"{kind} {model[f'{kind}_dropout']:g}" for kind in ("attention", "activation") if model[f"{kind}_dropout"]]
    return ", ".join([f"{model['dropout']:g}", *more])


def _weights(averaged: list[str] | None, recipe: dict[str, Any], training: dict[str, Any]) -> str:
    if averaged:
        return f"the mean of {len(averaged)} checkpoints, {averaged[0]} to {averaged[-1]}"
    if recipe.get("load_best_model_at_end"):
        return "those of the checkpoint that did best on the validation corpus"
    if training or not recipe.get("average_last"):
        return "those of the last update"
    interval = f", one every {recipe['save_minutes']:g} minutes" if recipe.get("save_minutes") else ""
    return f"the mean of the last {recipe['average_last']} checkpoints{interval}"


def _time(training: dict[str, Any]) -> str | None:
    if "seconds" not in training:
        return None
    hardware = training["hardware"]
    number = f"{hardware['number']} {hardware['kind']}{'s' * (hardware['number'] > 1)}"
    return f"{_duration(training['seconds'])} on {number} ({hardware['name']})"


def _losses(training: dict[str, Any]) -> str | None:
    losses = [f"training {training['loss']:.3f}, with smoothed targets"] if "loss" in training else []
    if "valid_loss" in training:
        losses.append(f"validation {training['valid_loss']:.3f}, a perplexity of {training['valid_perplexity']:.2f}")
    return "; ".join(losses) or None


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.1f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _millions(number: int) -> str:
    return f"{number / 1e6:.1f}".removesuffix(".0") + " million" if number >= 1e6 else f"{number:,}"


def _versions(versions: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


__all__ = ["card_for_folder", "make_card", "write_card"]
