"""The results: what a run and its model are, in figures from which the model card is made."""

import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from ..configuration_vaswani import VaswaniConfig
from ..data.text_files import read_object
from ..modeling_vaswani import VaswaniForConditionalGeneration

RESULTS_FILE = "results.json"
PACKAGES = ("vaswani", "torch", "transformers")

# Fields of the configuration and options of the recipe that a reader wants to know. No other option is taken over: some
# are secrets, some are paths.
SHAPE = (
    *("vocab_size", "d_model", "d_ff", "num_attention_heads", "d_k", "d_v", "encoder_layers", "decoder_layers"),
    *("position_encoding", "dropout", "attention_dropout", "activation_dropout", "label_smoothing"),
)
OPTIONAL_SHAPE = ("source_vocab_size", "d_ff_decoder")
CORPORA = ("train", "valid")
RECIPE = (
    *(*CORPORA, "dataset_config", "source_language", "target_language", "model", "preset"),
    *("max_length", "max_ratio", "drop_duplicates", "bpe_dropout", "source_tokens", "target_tokens", "max_steps"),
    *("optim", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm"),
    *("lr_scheduler_type", "learning_rate", "warmup_steps", "bf16", "fp16"),
    *("save_minutes", "average_last", "load_best_model_at_end", "seed"),
)


def cpu_name() -> str:
    """Return the name of the processor.

    Returns
    -------
    str
        Its model, or where the system does not tell it, its architecture.
    """
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Count the cores that this process may use.

    Returns
    -------
    int
        Their number.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def package_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Return the versions of packages.

    Parameters
    ----------
    packages : Sequence[str], default=PACKAGES
        Their names.

    Returns
    -------
    dict[str, str | None]
        Version of each; None for those that are not installed.
    """
    versions: dict[str, str | None] = dict.fromkeys(packages)
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def last_logged(log_history: Sequence[dict[str, Any]], name: str) -> Any:
    """Return the last value of a figure in a trainer's log.

    Parameters
    ----------
    log_history : Sequence[dict[str, Any]]
        The log.
    name : str
        Name of the figure.

    Returns
    -------
    Any
        The value; None if there is none.
    """
    return next((entry[name] for entry in reversed(log_history) if name in entry), None)


def search_facts(config: GenerationConfig) -> dict[str, Any]:
    """Tell how translations are searched for.

    Parameters
    ----------
    config : GenerationConfig
        The generation configuration.

    Returns
    -------
    dict[str, Any]
        Beams and length penalty.
    """
    return {"beams": config.num_beams or 1, "length_penalty": config.length_penalty}


def model_facts(config: VaswaniConfig, generation_config: GenerationConfig) -> dict[str, Any]:
    """Tell what a model is.

    Parameters
    ----------
    config : VaswaniConfig
        The configuration.
    generation_config : GenerationConfig
        The generation configuration.

    Returns
    -------
    dict[str, Any]
        Number of parameters, shape, dropout and smoothing, and search.
    """
    with torch.device("meta"):
        parameters = VaswaniForConditionalGeneration(config).num_parameters()
    shape = {name: getattr(config, name) for name in SHAPE}
    shape |= {name: value for name in OPTIONAL_SHAPE if (value := getattr(config, name)) is not None}
    return {"parameters": parameters, **shape, "search": search_facts(generation_config)}


def training_facts(trainer: Any, copies: int = 1) -> dict[str, Any]:
    """Tell how a run went.

    Parameters
    ----------
    trainer : Any
        The trainer, after training.
    copies : int, default=1
        How often each pair stands in the trainer's corpus, in other spellings.

    Returns
    -------
    dict[str, Any]
        Updates, epochs, pairs, seconds over all parts of a resumed run, last losses, hardware and versions.
    """
    log, pairs = trainer.state.log_history, trainer.train_dataset
    valid_loss = last_logged(log, "eval_loss")
    facts = {
        "updates": trainer.state.global_step,
        "epochs": trainer.state.epoch and copies * trainer.state.epoch,
        "pairs": len(pairs) // copies if hasattr(pairs, "__len__") else None,
        "seconds": last_logged(log, "seconds"),
        "loss": last_logged(log, "loss"),
        "valid_loss": valid_loss,
        "valid_perplexity": None if valid_loss is None else math.exp(valid_loss),
        "hardware": _hardware(trainer.args),
        "versions": package_versions(),
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def _hardware(args: Any) -> dict[str, Any]:
    if args.device.type == "cpu":
        threads = args.world_size * torch.get_num_threads()
        return {"name": cpu_name(), "kind": "core", "number": min(usable_cores(), threads)}
    is_cuda = args.device.type == "cuda"
    name = torch.cuda.get_device_name(args.device) if is_cuda else args.device.type
    return {"name": name, "kind": "GPU", "number": args.world_size * max(args.n_gpu, 1)}


def recipe_facts(options: dict[str, Any]) -> dict[str, Any]:
    """Choose what a reader wants to know of a recipe.

    Parameters
    ----------
    options : dict[str, Any]
        All options of the run, by name; the learning rate is its peak.

    Returns
    -------
    dict[str, Any]
        The options that matter, without the folders of corpora and models.
    """
    facts = {name: options[name] for name in RECIPE if options.get(name) is not None and options[name] is not False}
    for name in CORPORA:
        if name in facts:
            facts[name] = [_without_folder(path) for path in facts[name]]
    if "model" in facts:
        facts.pop("preset", None)  # the shape is that model's
        facts["model"] = _without_folder(facts["model"])
    return facts


def _without_folder(path: str) -> str:
    return Path(path).resolve().name if Path(path).exists() else path


def run_results(trainer: Any, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Gather what is known at the end of a run.

    Parameters
    ----------
    trainer : Any
        The trainer, with a model of ours.
    options : dict[str, Any] | None, default=None
        Options of the recipe that are not the trainer's.

    Returns
    -------
    dict[str, Any]
        The entries `model`, `training` and `recipe`, in a form for JSON, and `conversion` if it began with a converted
        model.
    """
    options = options or {}
    loaded_from = Path(str(trainer.model.config.name_or_path))
    began = read_results(loaded_from) if loaded_from.is_dir() else {}
    return {
        **({"conversion": began["conversion"]} if "conversion" in began else {}),
        "model": model_facts(trainer.model.config, trainer.model.generation_config),
        "training": training_facts(trainer, copies=options["bpe_copies"] if options.get("bpe_dropout") else 1),
        "recipe": recipe_facts({**options, **trainer.args.to_dict()}),
    }


def folder_results(folder: Path, run: Path | None = None) -> dict[str, Any]:
    """Gather what is known of the model in a folder.

    Parameters
    ----------
    folder : Path
        The model's folder.
    run : Path | None, default=None
        The folder of the run that made it; by default the same, or for an average the one around it.

    Returns
    -------
    dict[str, Any]
        The entry `model`, where the run left them `training`, `recipe` and `conversion`, and for an average `averaged`,
        the names of its checkpoints.

    Raises
    ------
    ValueError
        If there is no model of ours in the folder, or no results in the run's.
    """
    if not (folder / CONFIG_NAME).is_file():
        raise ValueError(f"{folder} has no model: there is no {CONFIG_NAME}.")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if not isinstance(config, VaswaniConfig):
        raise ValueError(f"{folder} has a model of type {config.model_type!r}; it must be 'vaswani'.")
    has_search = (folder / GENERATION_CONFIG_NAME).is_file()
    search = GenerationConfig.from_pretrained(folder) if has_search else GenerationConfig()
    if run is not None and not (run / RESULTS_FILE).is_file():
        raise ValueError(f"{run} has no {RESULTS_FILE}: `vaswani train` leaves it when a run ends.")
    own = read_results(folder)
    average = {"averaged": own["averaged"]} if "averaged" in own else {}
    places = [run] if run else [folder, folder.resolve().parent] if average else [folder]
    of_run = next((found for found in map(read_results, places) if "training" in found), {})
    of_run = {name: of_run[name] for name in ("training", "recipe", "conversion") if name in of_run}
    if "conversion" in own:
        of_run["conversion"] = own["conversion"]
    return {"model": model_facts(config, search), **of_run, **average}


def read_results(folder: Path) -> dict[str, Any]:
    """Read the results that a folder has.

    Parameters
    ----------
    folder : Path
        The folder.

    Returns
    -------
    dict[str, Any]
        The results; nothing if there is no file.
    """
    path = folder / RESULTS_FILE
    return read_object(path) if path.is_file() else {}


def write_results(folder: Path, results: dict[str, Any]) -> None:
    """Write results into a folder.

    Parameters
    ----------
    folder : Path
        The folder.
    results : dict[str, Any]
        The results.
    """
    text = json.dumps(results, indent=2, ensure_ascii=False)
    (folder / RESULTS_FILE).write_text(f"{text}\n", encoding="utf-8")


__all__ = [
    "RESULTS_FILE",
    "cpu_name",
    "folder_results",
    "last_logged",
    "model_facts",
    "package_versions",
    "read_results",
    "recipe_facts",
    "run_results",
    "search_facts",
    "training_facts",
    "usable_cores",
    "write_results",
]
