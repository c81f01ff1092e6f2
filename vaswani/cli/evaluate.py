"""`vaswani evaluate`: BLEU and chrF of translations."""

import argparse
import json
from pathlib import Path
from typing import Any

from .options import add_generation, add_models, generation_options, load_translator


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command.

    Parameters
    ----------
    command : argparse.ArgumentParser
        Parser of the command.
    """
    references = "files with reference translations, a sentence in each line"
    command.add_argument("--reference", type=Path, nargs="+", required=True, help=references)
    command.add_argument("--hypothesis", type=Path, help="file with the translations to score")
    command.add_argument("--source", type=Path, help="file to translate with a model")
    add_models(command)
    add_generation(command)
    command.add_argument("--target-language", default="de", help="code of the language (%(default)s)")
    command.add_argument("--tokenize", metavar="NAME", help="tokenizer of sacreBLEU (default: the language's)")
    command.add_argument("--output", type=Path, help="file for the results too; it must not exist")


def run(options: argparse.Namespace) -> None:
    """Score translations of a corpus.

    Parameters
    ----------
    options : argparse.Namespace
        Parsed arguments.
    """
    from ..data.text_files import check_output, read_aligned
    from ..inference.evaluation import evaluate_translations

    if bool(options.hypothesis) == bool(options.source):
        raise ValueError("Give either --hypothesis, or --source and the model that translates it.")
    if options.hypothesis and (options.model or generation_options(options)):
        raise ValueError("--model, --beams and --length-penalty are for --source; --hypothesis is already translated.")
    if options.output:
        check_output(options.output, "choose another file")
    lines, *references = read_aligned([options.hypothesis or options.source, *options.reference])
    settings = {"target_language": options.target_language, "tokenize": options.tokenize}
    evaluate_translations(["."], ["."], **settings)  # a wrong setting is found before the work
    made_from: dict[str, Any] = {"references": [path.name for path in options.reference]}
    made_from |= {name: getattr(options, name).name for name in ("hypothesis", "source") if getattr(options, name)}
    if options.source:
        from ..hub.results import search_facts

        translator = load_translator(options, **generation_options(options))
        made_from["search"] = search_facts(translator.generation_config)
        lines = [best.text for best, *_ in translator.translate(lines)]
    results = evaluate_translations(lines, list(zip(*references, strict=True)), **settings) | made_from
    text = json.dumps(results, indent=2, ensure_ascii=False)
    print(text)
    if options.output:
        options.output.write_text(f"{text}\n", encoding="utf-8")


__all__ = ["add_arguments", "run"]
