"""The demo: from nothing to a translator of English into German, in three minutes on two cores, offline."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from .data.grammar import Grammar
from .hub.about import ABOUT_FILE, complete_card
from .hub.results import search_facts
from .inference.evaluation import evaluate_translations
from .inference.translator import Translator
from .training.arguments import VaswaniTrainingArguments
from .training.recipe import CorpusOptions, run_recipe

TRAINING_PAIRS, HELD_OUT_PAIRS = 20_000, 300
MODEL = {"d_ff": 512, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.1}

EVALUATION_FILE = "evaluation.json"
ABOUT = {
    "name": "The vaswani demo, English to German",
    "summary": "A toy that `vaswani demo` trains from nothing in a few minutes on a CPU: it translates the English "
    "sentences of a small grammar into German, with its cases, compounds and verbs at the end of the clause.",
    "languages": ["en", "de"],
    "license": "apache-2.0",
    "example": "The friendly singer had sent the bad hazelnut cake to the beautiful queen today.",
    "data": [
        {
            "name": "Sentences of the demo's grammar",
            "license": "Apache-2.0",
            "attribution": "The program makes them itself, in `vaswani/data/grammar.py`; nothing is downloaded",
        }
    ],
    "intended_use": "To see that the package works, and to try its commands with a real model: training, averaging, "
    "translation and evaluation.",
    "limits": [
        "It knows the words and the sentences of its grammar only. Other English comes out as nonsense.",
        "Its scores say that it learned the grammar, and nothing about the translation of real text.",
        "The held-out sentences are new to the model, but made of the same words by the same rules. They are the "
        "validation corpus too; nothing was chosen by them.",
    ],
    "evaluations": [{"name": "held-out sentences of the grammar", "file": EVALUATION_FILE}],
}


def run(output: Path = Path("vaswani-demo"), steps: int = 500) -> dict[str, float]:
    """Make a corpus, train a model on it with the paper's recipe scaled down, and translate what it has not seen.

    Parameters
    ----------
    output : Path, default=Path("vaswani-demo")
        Folder for corpus and run; it must not exist. The model is in its folder `averaged`, with its card.
    steps : int, default=500
        Updates to train for.

    Returns
    -------
    dict[str, float]
        BLEU of the model, its share of exact matches, and BLEU of replacing each word by its most frequent
        translation.

    Raises
    ------
    FileExistsError
        If the folder exists.
    SystemExit
        If a signal stopped the training, with the status that `vaswani train` would have.
    """
    if output.exists():
        raise FileExistsError(f"{output} exists already: delete it, or choose another folder with --output.")
    pairs = Grammar().corpus(TRAINING_PAIRS + HELD_OUT_PAIRS)
    training, held_out = pairs[:TRAINING_PAIRS], pairs[TRAINING_PAIRS:]
    words = {word.strip(".,") for pair in training for sentence in pair.values() for word in sentence.split()}
    print(f"{len(training):,} pairs of sentences with {len(words):,} different words; {len(held_out)} held out")

    output.mkdir(parents=True, exist_ok=True)
    train_file, valid_file = output / "train.jsonl", output / "valid.jsonl"
    for path, part in ((train_file, training), (valid_file, held_out)):
        path.write_text("".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in part), encoding="utf-8")
    options = CorpusOptions(
        train=[str(train_file)], valid=[str(valid_file)], preset="tiny", model_config=json.dumps(MODEL), vocab_size=1000
    )
    interval = max(steps // 20, 1)
    arguments = VaswaniTrainingArguments(
        str(output),
        max_steps=steps,
        warmup_steps=max(steps // 4, 1),
        learning_rate=3e-3,
        source_tokens=3000,
        target_tokens=3000,
        save_minutes=0,
        save_strategy="steps",
        save_steps=interval,
        save_total_limit=5,
        average_last=5,
        logging_steps=interval,
        eval_strategy="steps",
        eval_steps=max(steps // 4, 1),
        per_device_eval_batch_size=100,
        report_to="none",
        use_cpu=True,
        seed=1,
    )
    trainer = run_recipe(options, arguments)
    if trainer.interruption.signal:
        raise SystemExit(128 + trainer.interruption.signal)

    translator = Translator.from_pretrained(output / "averaged", device="cpu")
    translations = [best.text for best, *_ in translator.translate(pair["en"] for pair in held_out)]
    references = [pair["de"] for pair in held_out]
    substituted = _substitute([pair["en"] for pair in held_out], training)
    for index in range(3):
        print(f"\n  source       {held_out[index]['en']}")
        print(f"  reference    {references[index]}")
        print(f"  translation  {translations[index]}")
    exact = sum(map(str.__eq__, translations, references)) / len(references)
    scores = evaluate_translations(translations, references)
    _write_card(output / "averaged", {**scores, "search": search_facts(translator.generation_config)})
    results = {
        "bleu": scores["bleu"],
        "exact": exact,
        "substitution_bleu": evaluate_translations(substituted, references)["bleu"],
    }
    print(f"\nsacreBLEU {results['bleu']:.1f}, {exact:.1%} exact matches, on {len(references)} unseen sentences")
    print(f"sacreBLEU {results['substitution_bleu']:.1f} for each word by its most frequent translation")
    print(f"The model is in {output / 'averaged'}: AutoModelForSeq2SeqLM.from_pretrained loads it.")
    return results


def _write_card(folder: Path, evaluation: dict[str, Any]) -> None:
    """Leave what `vaswani card` needs in the model's folder, and the card."""
    about = {**ABOUT, "location": f"./{folder.parent.name}/{folder.name}"}
    (folder / EVALUATION_FILE).write_text(json.dumps(evaluation, indent=2) + "\n", encoding="utf-8")
    text = yaml.safe_dump(about, sort_keys=False, allow_unicode=True, width=120)
    (folder / ABOUT_FILE).write_text(text, encoding="utf-8")
    complete_card(folder)


def _substitute(sentences: list[str], training: list[dict[str, str]]) -> list[str]:
    """Replace each word by the one that it shares most sentences with, for how frequent both are."""
    sources, targets, together = Counter[str](), Counter[str](), Counter[tuple[str, str]]()
    for pair in training:
        source_words, target_words = set(pair["en"].split()), set(pair["de"].split())
        sources.update(source_words)
        targets.update(target_words)
        together.update((source, target) for source in source_words for target in target_words)
    best: dict[str, tuple[float, str]] = {}
    for (source, target), count in together.items():
        candidate = (2 * count / (sources[source] + targets[target]), target)
        best[source] = max(best.get(source, candidate), candidate)
    unknown: Any = (0.0, "")
    return [" ".join(best.get(word, unknown)[1] for word in sentence.split()) for sentence in sentences]


__all__ = ["run"]
