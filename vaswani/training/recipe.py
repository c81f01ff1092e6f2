"""Recipes: one run, from a corpus to a model folder, with its recipe, log and results beside it."""

import dataclasses
import difflib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoTokenizer, HfArgumentParser, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import IntervalStrategy
from transformers.utils import logging

from ..configuration_vaswani import VaswaniConfig
from ..data.bpe_dropout import respell
from ..data.corpora import clean, load_corpus, tokenize
from ..data.progress_bars import hidden_progress_bars
from ..generation_vaswani import paper_generation_config
from ..hub.loading import load_translator_parts
from ..hub.results import model_facts, recipe_facts, run_results, write_results
from ..modeling_vaswani import VaswaniForConditionalGeneration
from ..plotting.learning_curve import draw_learning_curve
from ..presets import preset
from ..tokenization_sides import TwoSidedTokenizer
from ..tokenization_vaswani import VaswaniTokenizer
from .arguments import VaswaniTrainingArguments
from .checkpoints import complete_checkpoints, replace_files, report_failed_write
from .folder_lock import FolderLock
from .progress import ProgressBar
from .schedule import peak_learning_rate
from .trainer import VaswaniTrainer

logger = logging.get_logger(__name__)

# Options that may not change when a run is resumed; of `train`, only the names of the files are compared.
_OF_A_RUN = (
    *("source_language", "target_language", "dataset_config", "model", "preset", "model_config", "tokenizer"),
    *("vocab_size", "max_length", "max_ratio", "drop_duplicates", "keep_empty", "bpe_dropout", "bpe_copies"),
    *("source_tokens", "target_tokens", "seed", "data_seed", "optim", "weight_decay", "adam_beta1", "adam_beta2"),
    *("adam_epsilon", "max_grad_norm", "learning_rate", "lr_scheduler_type", "warmup_steps"),
)
# With these schedules a resumed run may be longer, because no learning rate depends on the last update.
_ENDLESS_SCHEDULES = ("inverse_sqrt", "constant", "constant_with_warmup", "reduce_lr_on_plateau", "greedy")

RECIPE_FILE = "recipe.yaml"
LOG_FILE = "log.jsonl"
RECIPES = Path(__file__).parent / "recipes"
YOURS = "<yours>"  # in recipes of the package, a model that the user must name


@dataclass
class CorpusOptions:
    """Corpora, vocabulary and model of a run.

    Parameters
    ----------
    train : list[str]
        Corpus to train on: two aligned files, a .tsv or .jsonl file, a folder, or a name on the Hub.
    valid : list[str] | None, default=None
        Corpus to evaluate on, in the same forms.
    source_language : str, default="en"
        Key of the source in translations.
    target_language : str, default="de"
        Key of the target in translations.
    dataset_config : str | None, default=None
        Name of a configuration of the data set, such as "de-en".
    streaming : bool, default=False
        Read the corpus while training, for corpora larger than disk or memory.
    model : str | None, default=None
        Model to continue from, with its tokenizer: a folder, one of this package, or a Hub name; by default a new model
        is trained.
    preset : str, default="base"
        Name of the preset of a new model.
    model_config : str | None, default=None
        Fields of the model's configuration that differ, as a JSON object; with `model`, fields such as dropout.
    tokenizer : str | None, default=None
        Folder or Hub name of a tokenizer; by default one is learned from the corpus.
    vocab_size : int, default=37000
        Size of a learned vocabulary.
    max_length : int | None, default=None
        Drop pairs with a longer side, in tokens.
    max_ratio : float | None, default=None
        Drop pairs in which one side is more than this many times as long as the other.
    drop_duplicates : bool, default=False
        Drop pairs that occurred before.
    keep_empty : bool, default=False
        Keep pairs with an empty side, which are dropped otherwise.
    bpe_dropout : float | None, default=None
        BPE dropout: probability with which a merge is skipped in training, so that a word is segmented in many ways.
    bpe_copies : int, default=10
        With `bpe_dropout`, number of copies of the corpus that are segmented anew; an epoch has all of them.
    num_proc : int | None, default=None
        Number of processes that tokenise.
    resume : bool, default=False
        Resume from the last complete checkpoint of the output folder.
    """

    train: list[str] = field(metadata={"help": "Two aligned files, a .tsv or .jsonl file, a folder, or a Hub name."})
    valid: list[str] | None = field(default=None, metadata={"help": "Corpus to evaluate on, in the same forms."})
    source_language: str = field(default="en", metadata={"help": "Key of the source in translations."})
    target_language: str = field(default="de", metadata={"help": "Key of the target in translations."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a data set, such as de-en."})
    streaming: bool = field(default=False, metadata={"help": "Read the corpus while training."})
    model: str | None = field(default=None, metadata={"help": "Folder or name of a model to continue from."})
    preset: str = field(default="base", metadata={"help": "A new model: base, big, tiny, or a row of Table 3."})
    model_config: str | None = field(default=None, metadata={"help": "Fields of the model that differ, as JSON."})
    tokenizer: str | None = field(default=None, metadata={"help": "A tokenizer's folder or name (default: learn one)."})
    vocab_size: int = field(default=37_000, metadata={"help": "Size of a learned vocabulary."})
    max_length: int | None = field(default=None, metadata={"help": "Drop pairs with a longer side, in tokens."})
    max_ratio: float | None = field(
        default=None, metadata={"help": "Drop pairs with one side this many times as long."}
    )
    drop_duplicates: bool = field(default=False, metadata={"help": "Drop pairs that occurred before."})
    keep_empty: bool = field(default=False, metadata={"help": "Keep pairs with an empty side."})
    bpe_dropout: float | None = field(default=None, metadata={"help": "BPE dropout: probability of skipping a merge."})
    bpe_copies: int = field(default=10, metadata={"help": "With bpe_dropout, copies of the corpus in an epoch."})
    num_proc: int | None = field(default=None, metadata={"help": "Processes that tokenise."})
    resume: bool = field(default=False, metadata={"help": "Resume from the last complete checkpoint."})


def parse_recipe(words: Sequence[str]) -> tuple[CorpusOptions, VaswaniTrainingArguments]:
    """Read a recipe from a YAML file, from options, or from both, where options win.

    Parameters
    ----------
    words : Sequence[str]
        Words of a command line; the first may be the path of a `.yaml` file, or one of `recipe_names()`.

    Returns
    -------
    tuple[CorpusOptions, VaswaniTrainingArguments]
        Corpora and model of the run, and how it trains.

    Raises
    ------
    ValueError
        If an option or a key is unknown, with the one it resembles, or a value is impossible.
    """
    kinds: Any = [CorpusOptions, VaswaniTrainingArguments]
    first = f"The first word may be a recipe: the path of a .yaml file, or one of {', '.join(recipe_names())}."
    parser = HfArgumentParser(kinds, prog="vaswani train", description=first, allow_abbrev=False)
    parser.error = _raise  # type: ignore[assignment, method-assign]
    known = {action.dest for action in parser._actions}
    words = list(words)
    if words and not words[0].startswith("-"):
        words = [*_words_of_file(_recipe_file(words[0]), known), *words[1:]]
    for word in words:
        name = word.removeprefix("--").split("=")[0].replace("-", "_")
        if word.startswith("--") and name not in known and name.removeprefix("no_") not in known:
            raise ValueError(_unknown(name, known))
    options, arguments = parser.parse_args_into_dataclasses(words)
    if options.model == YOURS:
        raise ValueError("This recipe continues from another model: add --model with its folder or name.")
    return options, arguments


def recipe_names() -> list[str]:
    """List the recipes that come with the package.

    Returns
    -------
    list[str]
        Their names, each of which stands for a file.
    """
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def _recipe_file(name: str) -> Path:
    path = Path(name) if name.endswith((".yaml", ".yml")) else RECIPES / f"{name}.yaml"
    if path.is_file():
        return path
    names = ", ".join(recipe_names())
    raise ValueError(f"There is no recipe {name!r}: a recipe is the path of a .yaml file, or one of {names}.")


def _raise(message: str) -> None:
    raise ValueError(message)


def _words_of_file(path: Path, known: set[str]) -> list[str]:
    """Turn a recipe's entries into words of a command line, so that both are checked in the same way."""
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}.") from None
    if not isinstance(entries, dict):
        raise ValueError(f"{path} is not a recipe: it must hold options with their values.")
    words: list[str] = []
    for key, value in entries.items():
        if key not in known or key == "help":
            raise ValueError(_unknown(str(key), known))
        values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        if values and value not in (None, ""):
            words += [f"--{key}", *(str(entry) for entry in values)]
    return words


def _unknown(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"There is no option {name!r}" + (f": did you mean {close[0]!r}?" if close else ".")


def run_recipe(options: CorpusOptions, arguments: VaswaniTrainingArguments) -> VaswaniTrainer:
    """Train as a recipe says, from scratch or from another model, into a folder that the Auto classes load.

    Parameters
    ----------
    options : CorpusOptions
        Corpora and model of the run.
    arguments : VaswaniTrainingArguments
        How it trains; `output_dir` gets the model, the tokenizer, the recipe, the log, the learning curve and the
        results.

    Returns
    -------
    VaswaniTrainer
        The trainer, with its model and its log.

    Raises
    ------
    ValueError
        If the recipe does not fit together, before any work starts.
    BlockingIOError
        If another run holds the lock of the output folder.
    """
    with FolderLock(arguments) as lock:
        return _run_recipe(options, arguments, lock)


def _run_recipe(options: CorpusOptions, arguments: VaswaniTrainingArguments, lock: FolderLock) -> VaswaniTrainer:
    output = Path(str(arguments.output_dir))
    changes = _model_changes(options)
    if not 0 <= (options.bpe_dropout or 0) <= 1:
        raise ValueError(f"bpe_dropout={options.bpe_dropout} must be a number from 0 to 1.")
    if options.bpe_copies < 1:
        raise ValueError(f"bpe_copies={options.bpe_copies} must be a whole number of at least 1.")
    if options.bpe_dropout and options.streaming:
        raise ValueError("bpe_dropout needs a corpus that is not a stream: leave out streaming.")
    if complete_checkpoints(output) and not options.resume:
        raise ValueError(f"{output} has checkpoints already: add --resume to continue, or choose another output_dir.")
    if options.resume and not complete_checkpoints(output):
        logger.warning(f"{output} has no complete checkpoint: the run starts from the beginning.")
    elif options.resume:
        _check_same_run(output, _resolved(options, arguments))
    if options.valid is not None and arguments.eval_strategy == IntervalStrategy.NO:
        arguments.eval_strategy = IntervalStrategy.STEPS
        arguments.eval_steps = arguments.eval_steps or 1000
    if arguments.device.type == "cpu":
        arguments.dataloader_pin_memory = False  # torch warns that there is no device to pin for
    set_seed(arguments.seed)

    model, tokenizer = load_translator_parts(options.model, changes) if options.model else (None, None)
    train = _load(options.train, options, arguments, split="train", streaming=options.streaming)
    tokenizer = tokenizer or _tokenizer(train, options, output)
    if options.bpe_dropout and isinstance(tokenizer, TwoSidedTokenizer):
        raise ValueError(
            "bpe_dropout needs a tokenizer of this package, which a converted model has not: leave it out."
        )
    train = tokenize(train, tokenizer, options.num_proc)
    train = clean(train, options.max_length, options.max_ratio, options.drop_duplicates, not options.keep_empty)
    if not options.streaming and not len(train):
        raise ValueError("No pair of the corpus is left after cleaning.")
    if options.bpe_dropout:
        train = respell(train, tokenizer, options.bpe_dropout, options.bpe_copies, arguments.seed, options.num_proc)
    valid = None
    if options.valid is not None:
        valid = _load(options.valid, options, arguments, split="validation", streaming=False)
        valid = tokenize(valid, tokenizer, options.num_proc)

    if model is None:
        model = VaswaniForConditionalGeneration(preset(options.preset, vocab_size=len(tokenizer), **changes))
    trainer = VaswaniTrainer(model, arguments, train_dataset=train, eval_dataset=valid, processing_class=tokenizer)
    trainer.folder_lock = lock
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ProgressBar(trainer))
    trainer.add_callback(trainer.interruption)
    if arguments.should_save:
        unfinished = output / "_starting"
        shutil.rmtree(unfinished, ignore_errors=True)
        with report_failed_write("The recipe", unfinished, lambda: f"{output} is unchanged."):
            tokenizer.save_pretrained(unfinished)
            recipe = yaml.safe_dump(_resolved(options, arguments), sort_keys=False, allow_unicode=True)
            (unfinished / RECIPE_FILE).write_text(recipe, encoding="utf-8")
            replace_files(unfinished, output)
    try:
        with hidden_progress_bars():  # transformers would show one for every checkpoint
            trainer.train(resume_from_checkpoint=options.resume and bool(complete_checkpoints(output)))
            if arguments.should_save:
                draw_learning_curve(trainer.state.log_history, output / "learning_curve.png")
                log = "".join(f"{json.dumps(entry)}\n" for entry in trainer.state.log_history)
                (output / LOG_FILE).write_text(log, encoding="utf-8")
            if trainer.interruption.signal:
                update = trainer.state.global_step
                logger.warning(f"Stopped at update {update}. The same command with --resume continues.")
            else:
                with report_failed_write(
                    f"The model in {output}", None, lambda: "Its checkpoints are complete: --resume writes it again."
                ):
                    trainer.save_model()
                if arguments.should_save:
                    write_results(output, run_results(trainer, dataclasses.asdict(options)))
    finally:
        trainer.interruption.restore()
    return trainer


def describe_recipe(path: Path) -> dict[str, Any]:
    """Return what is known about a model before it is trained.

    Parameters
    ----------
    path : Path
        The recipe's file.

    Returns
    -------
    dict[str, Any]
        The entries `model` and `recipe` of its results, and `is_planned`.

    Raises
    ------
    ValueError
        If the recipe is not one that `run_recipe` would take.
    """
    options, arguments = parse_recipe([str(path), "--output_dir", str(path.parent)])
    if options.model is not None:
        raise ValueError(f"{path} continues from {options.model!r}: its model is known only after training.")
    config = preset(options.preset, vocab_size=options.vocab_size, **_model_changes(options))
    rate = arguments.learning_rate or peak_learning_rate(config.d_model, arguments.warmup_steps)
    recipe = {**dataclasses.asdict(options), **arguments.to_dict(), "learning_rate": rate}
    model = model_facts(config, paper_generation_config(config))
    return {"is_planned": True, "model": model, "recipe": recipe_facts(recipe)}


def _model_changes(options: CorpusOptions) -> dict[str, Any]:
    """Read the changes of the model configuration and check them, before any work starts."""
    try:
        changes = json.loads(options.model_config) if options.model_config else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"model_config={options.model_config!r} is not a JSON object: {error}.") from None
    if not isinstance(changes, dict):
        raise ValueError(f"model_config={options.model_config!r} is not a JSON object.")
    if unknown := changes.keys() - VaswaniConfig.__annotations__.keys():
        raise ValueError(f"model_config has unknown fields: {sorted(unknown)}.")
    if options.model is None:
        preset(options.preset, **changes)
    for name in ("preset", "tokenizer", "vocab_size"):
        if options.model is not None and getattr(options, name) != getattr(CorpusOptions, name):
            raise ValueError(f"model={options.model!r} has a shape and a tokenizer already: leave out {name}.")
    return changes


def _load(
    corpus: list[str], options: CorpusOptions, arguments: VaswaniTrainingArguments, split: str, streaming: bool
) -> Any:
    """Load a corpus; the first process of a machine prepares it for the others."""
    named = {"name": options.dataset_config} if options.dataset_config else {}
    keys = {"source_language": options.source_language, "target_language": options.target_language}
    paths: Any = corpus if len(corpus) != 1 else corpus[0]
    if len(corpus) == 1 and not os.path.isfile(corpus[0]):
        named["split"] = split
    with arguments.main_process_first(desc="loading the corpus"):
        return load_corpus(paths, **keys, streaming=streaming, **named)


def _tokenizer(corpus: Any, options: CorpusOptions, output: Path) -> Any:
    """Load the tokenizer that the recipe names or that an earlier part of the run learned, or learn one."""
    if options.tokenizer is not None:
        return AutoTokenizer.from_pretrained(options.tokenizer, trust_remote_code=False)
    if options.resume and (output / "tokenizer.json").is_file():
        return AutoTokenizer.from_pretrained(output, trust_remote_code=False)
    return VaswaniTokenizer.learn(corpus, options.vocab_size)


def _check_same_run(output: Path, resolved: dict[str, Any]) -> None:
    """Raise a ValueError if a resumed run would continue with other options than it began with."""
    if not (output / RECIPE_FILE).is_file():
        return
    begun = yaml.safe_load((output / RECIPE_FILE).read_text(encoding="utf-8"))
    end = () if resolved["lr_scheduler_type"] in _ENDLESS_SCHEDULES else ("max_steps", "num_train_epochs")
    changed = [name for name in (*_OF_A_RUN, *end) if begun.get(name, resolved[name]) != resolved[name]]
    before, now = ([Path(name).name for name in recipe["train"]] for recipe in (begun, resolved))
    changed += ["train"] * (before != now)
    if changed:
        was = ", ".join(f"{name}={begun[name]!r} (now {resolved[name]!r})" for name in changed)
        raise ValueError(f"{output} was begun with {was}: resume with the same, or choose another output_dir.")


def _resolved(options: CorpusOptions, arguments: VaswaniTrainingArguments) -> dict[str, Any]:
    """Return every option in a form for YAML, defaults included, without tokens."""
    resolved = {**dataclasses.asdict(options), **arguments.to_dict()}
    fields = (*dataclasses.fields(options), *dataclasses.fields(arguments))
    known = {entry.name for entry in fields if entry.init and not entry.name.endswith("_token")} - {"resume"}
    return json.loads(json.dumps({name: value for name, value in resolved.items() if name in known}, default=str))


__all__ = ["RECIPE_FILE", "CorpusOptions", "describe_recipe", "parse_recipe", "recipe_names", "run_recipe"]
