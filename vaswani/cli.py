"""The command line: one function for each command of `vaswani`, and what they share."""

import argparse
import contextlib
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import vaswani

from .shipped import DEFAULT_MODEL


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name.

    Parameters
    ----------
    arguments : Sequence[str] | None, default=None
        Words after the program's name; by default those of the process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser("vaswani", description=vaswani.__doc__)
    parser.add_argument("--version", action="version", version=f"vaswani {vaswani.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)

    train = "train a model from a recipe: a name, a YAML file, options, or both; `vaswani train --help` lists them"
    commands.add_parser("train", help=train, add_help=False)

    average = commands.add_parser("average", help="average the last checkpoints of a run, or those that are named")
    average.add_argument("paths", nargs="+", type=Path, help="the run's folder, or folders of checkpoints")
    average.add_argument("--last", type=_positive, help="how many of a run (paper: 5, big 20; default: 5)")
    average.add_argument("--output", type=Path, required=True, help="folder for the averaged model; it must not exist")
    average.add_argument("--half", action="store_true", help="store weights in half precision; they load in single")
    average.set_defaults(run=_average)

    _add_translate(commands)
    _add_score(commands)
    _add_evaluate(commands)

    card = commands.add_parser("card", help="write a model's card, from its run's results and an about file")
    card.add_argument("folder", type=Path, help="the model's folder, or a folder with the recipe of one")
    card.add_argument("--about", type=Path, help="what only its author knows (default: the folder's about.yaml)")
    card.add_argument("--run", type=Path, dest="run_folder", help="the run's folder (default: this one or its parent)")
    card.add_argument("--overwrite", action="store_true", help="write a card that exists anew")
    card.set_defaults(run=_card)

    push = commands.add_parser("push", help="upload a model's folder to the Hub")
    push.add_argument("folder", type=Path, help="a folder with a model and its tokenizer, such as run/averaged")
    push.add_argument("name", help="name of the repository; it is made if there is none")
    push.add_argument("--revision", metavar="BRANCH", help="branch to upload to; it is made if there is none (main)")
    push.add_argument("--private", action="store_true", default=None, help="make the repository a private one")
    push.add_argument("--code", action="store_true", help="upload the code too, for trust_remote_code=True")
    push.add_argument("--message", help="what the commit says")
    push.set_defaults(run=_push)

    benchmark = commands.add_parser("benchmark", help="measure speed and memory beside other engines, same weights")
    if words[:1] == ["benchmark"]:  # its engines take a second to import
        from .benchmark.command import add_arguments

        add_arguments(benchmark)
    benchmark.set_defaults(run=_benchmark)

    demo = commands.add_parser("demo", help="learn to translate English into German, in three minutes on two cores")
    demo.add_argument("--output", type=Path, default="vaswani-demo", help="folder for the run (%(default)s)")
    demo.add_argument("--steps", type=_positive, default=500, help="updates to train for (default: %(default)s)")
    demo.set_defaults(run=_demo)

    options, rest = parser.parse_known_args(words)
    if options.command != "train":
        options = parser.parse_args(words)
    try:
        if options.command == "train":
            from .recipe import parse_recipe, run_recipe  # here and below: the Trainer takes seconds to import

            run_recipe(*parse_recipe(rest))
        else:
            options.run(options)
    except BrokenPipeError:  # nobody reads any more; what Python still holds back has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        parser.exit(1)
    except (ValueError, OSError) as error:
        parser.exit(2, f"vaswani {options.command}: {' '.join(str(error).split())}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"\nvaswani {options.command}: interrupted; what is written stays.\n")


def _average(options: argparse.Namespace) -> None:
    from .checkpoints import average_checkpoints, complete_checkpoints

    checkpoints, run = options.paths, options.paths[0]
    if len(checkpoints) == 1 and not (run / "trainer_state.json").is_file():
        checkpoints, last = complete_checkpoints(run), options.last or 5
        if len(checkpoints) < last:
            raise ValueError(f"{run} has {len(checkpoints)} complete checkpoints, not {last}.")
        checkpoints = checkpoints[-last:]
    elif options.last:
        raise ValueError("--last is for the folder of a run; checkpoints that are named are all averaged.")
    average_checkpoints(checkpoints, options.output, options.half)
    print(f"Averaged {', '.join(path.name for path in checkpoints)} into {options.output}")


def _card(options: argparse.Namespace) -> None:
    from .about import complete_card

    complete_card(options.folder, options.about, options.run_folder, options.overwrite)
    print(f"The card is {options.folder / 'README.md'}, its figures are in {options.folder / 'results.json'}")


def _push(options: argparse.Namespace) -> None:
    from transformers.utils import logging

    from .hub import push_folder

    logging.disable_progress_bar()
    target = {"revision": options.revision, "private": options.private}
    print(push_folder(options.folder, options.name, **target, include_code=options.code, message=options.message))


def _demo(options: argparse.Namespace) -> None:
    from .demo import run

    run(options.output, options.steps)


# --- translate


def _add_translate(commands: Any) -> None:
    command = commands.add_parser("translate", help="translate sentences, a file, or what another program writes")
    command.add_argument("sentences", nargs="*", metavar="SENTENCE", help="what to translate; before all options")
    _add_models(command)
    command.add_argument("--input", type=Path, help="file with a sentence in each line (default: standard input)")
    command.add_argument("--output", type=Path, help="file for the translations (default: standard output)")
    command.add_argument("--nbest", type=_positive, default=1, help="translations of each sentence (%(default)s)")
    command.add_argument("--json", action="store_true", help="write sources, translations and scores, as --nbest does")
    prefix = command.add_mutually_exclusive_group()
    prefix.add_argument("--prefix", metavar="TEXT", help="how every translation shall begin")
    prefix.add_argument("--prefix-file", type=Path, help="file with the beginning of a translation in each line")
    _add_search(command)
    long = "what becomes of longer sentences (%(default)s)"
    command.add_argument("--long-lines", choices=("refuse", "split"), default="refuse", help=long)
    existing = command.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="go on behind the complete lines of the output")
    existing.add_argument("--overwrite", action="store_true", help="begin an output that exists anew")
    command.add_argument("--interactive", action="store_true", help="translate line by line as you type; Ctrl-D ends")
    command.set_defaults(run=_translate)


def _translate(options: argparse.Namespace) -> None:
    from .sentences import open_output
    from .tokenization_vaswani import read_lines
    from .translation import write_translations

    interactive = _is_interactive(options)
    _check_files(options)
    translator = _translator(options, long_lines=options.long_lines, **_search(options))
    beams = translator.generation_config.num_beams or 1
    if options.nbest > beams:
        raise ValueError(f"--nbest {options.nbest} needs at least as many beams, but there are {beams}: add --beams.")
    form = {"nbest": options.nbest, "as_json": options.json or options.nbest > 1}
    if interactive:
        _converse(translator, options.prefix, form)
        return
    prefixes = read_lines(options.prefix_file) if options.prefix_file else options.prefix
    if not options.output:
        with _progress_bar(options) as bar:
            write_translations(translator, _windows(options), sys.stdout.buffer, prefixes, **form, progress=bar.update)
        return
    file, done = open_output(options.output, options.resume)
    with file, _progress_bar(options, done) as bar:
        write_translations(translator, _windows(options), file, prefixes, **form, done=done, progress=bar.update)


def _is_interactive(options: argparse.Namespace) -> bool:
    given = [name for name in ("sentences", "input", "output", "prefix_file") if getattr(options, name)]
    if options.interactive and given:
        raise ValueError(f"--interactive takes no {given[0].replace('_', '-')}.")
    return options.interactive or (not given and sys.stdin.isatty())


def _check_files(options: argparse.Namespace) -> None:
    """Find mistakes before a model is loaded."""
    from .sentences import check_output

    if options.sentences and options.input:
        raise ValueError("Give sentences or --input, not both.")
    if (options.resume or options.overwrite) and not options.output:
        raise ValueError("--resume and --overwrite need --output.")
    for path in (options.input, options.prefix_file):
        if path and not path.exists():
            raise FileNotFoundError(f"There is no file {path}.")
        if path and options.output and options.output.exists() and path.samefile(options.output):
            raise ValueError(f"{path} is read, so it cannot be the output.")
    if options.output and not (options.resume or options.overwrite):
        check_output(options.output, "add --resume to go on, --overwrite to begin anew, or choose another")


def _windows(options: argparse.Namespace) -> Iterator[list[str]]:
    """Read what to translate: in windows of one size, or if it goes from pipe to pipe, in windows of what is there."""
    from .sentences import read_arriving
    from .tokenization_vaswani import read_lines
    from .translation import windows_of

    if options.sentences:
        return windows_of(options.sentences)
    if options.input:
        return windows_of(read_lines(options.input))
    arriving = read_arriving(sys.stdin.buffer)
    return windows_of(itertools.chain.from_iterable(arriving)) if options.output else arriving


def _progress_bar(options: argparse.Namespace, done: int = 0) -> Any:
    """Return a bar on standard error, if that is a terminal and no translations are written between."""
    from tqdm.auto import tqdm

    is_shown = sys.stderr.isatty() and (options.output or not sys.stdout.isatty())
    total = len(options.sentences) or None
    if is_shown and options.input and options.input.is_file():
        with options.input.open("rb") as lines:
            total = sum(1 for _ in lines)
    return tqdm(initial=done, total=total, unit="line", dynamic_ncols=True, disable=not is_shown)


def _converse(translator: Any, prefix: str | None, form: dict[str, Any]) -> None:
    """Translate what is typed, line by line."""
    from .translation import write_translations

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (`input` edits lines with it)
    while True:
        try:
            write_translations(translator, [[input("> ")]], sys.stdout.buffer, prefix, **form)
        except EOFError:
            return
        except ValueError as error:
            print(error, file=sys.stderr)


# --- score and evaluate


def _add_score(commands: Any) -> None:
    command = commands.add_parser("score", help="tell how probable given translations are: score, log P and length")
    _add_models(command)
    command.add_argument("--source", type=Path, required=True, help="file with a sentence in each line")
    command.add_argument("--target", type=Path, required=True, help="file with their translations")
    command.add_argument("--json", action="store_true", help="write JSON")
    command.set_defaults(run=_score)


def _score(options: argparse.Namespace) -> None:
    from .sentences import read_aligned

    sources, targets = read_aligned([options.source, options.target])
    for score in _translator(options).score(zip(sources, targets, strict=True)):
        score = score._replace(score=round(score.score, 6), log_prob=round(score.log_prob, 6))
        print(json.dumps(score._asdict()) if options.json else "\t".join(map(str, score)))


def _add_evaluate(commands: Any) -> None:
    command = commands.add_parser("evaluate", help="score translations of a corpus: BLEU, chrF and the paper's BLEU")
    references = "files with right translations, a sentence in each line"
    command.add_argument("--reference", type=Path, nargs="+", required=True, help=references)
    command.add_argument("--hypothesis", type=Path, help="file with the translations to score")
    command.add_argument("--source", type=Path, help="file to translate with a model")
    _add_models(command)
    _add_search(command)
    command.add_argument("--target-language", default="de", help="code of the language (%(default)s)")
    command.add_argument("--tokenize", metavar="NAME", help="tokenizer of sacreBLEU (default: the language's)")
    command.add_argument("--output", type=Path, help="file for the results too; it must not exist")
    command.set_defaults(run=_evaluate)


def _benchmark(options: argparse.Namespace) -> None:
    from .benchmark.command import run

    run(options)


def _evaluate(options: argparse.Namespace) -> None:
    from .evaluation import evaluate_translations
    from .sentences import check_output, read_aligned

    if bool(options.hypothesis) == bool(options.source):
        raise ValueError("Give either --hypothesis, or --source and the model that translates it.")
    if options.hypothesis and (options.model or _search(options)):
        raise ValueError("--model, --beams and --length-penalty are for --source; --hypothesis is translated already.")
    if options.output:
        check_output(options.output, "choose another file")
    lines, *references = read_aligned([options.hypothesis or options.source, *options.reference])
    settings = {"target_language": options.target_language, "tokenize": options.tokenize}
    evaluate_translations(["."], ["."], **settings)  # a wrong setting is found before the work
    made_from: dict[str, Any] = {"references": [path.name for path in options.reference]}
    made_from |= {name: getattr(options, name).name for name in ("hypothesis", "source") if getattr(options, name)}
    if options.source:
        from .results import search_facts

        translator = _translator(options, **_search(options))
        made_from["search"] = search_facts(translator.generation_config)
        lines = [best.text for best, *_ in translator.translate(lines)]
    results = evaluate_translations(lines, list(zip(*references, strict=True)), **settings) | made_from
    text = json.dumps(results, indent=2, ensure_ascii=False)
    print(text)
    if options.output:
        options.output.write_text(f"{text}\n", encoding="utf-8")


# --- what the commands share


def _add_search(command: argparse.ArgumentParser) -> None:
    command.add_argument("--beams", type=_positive, help="beams of the search (default: the model's; paper: 4)")
    strength = "strength of the length penalty (default: the model's; paper: 0.6)"
    command.add_argument("--length-penalty", type=_penalty, help=strength)


def _search(options: argparse.Namespace) -> dict[str, Any]:
    given = {"num_beams": options.beams, "length_penalty": options.length_penalty}
    return {name: value for name, value in given.items() if value is not None}


def _add_models(command: argparse.ArgumentParser) -> None:
    models = f"folder or Hub name of the model; several decide together (default: {DEFAULT_MODEL}, of this package)"
    command.add_argument("--model", nargs="+", action="extend", metavar="FOLDER_OR_NAME", help=models)
    batch = "source tokens of a batch, padding included, times beams (default: 16384)"
    command.add_argument("--batch-tokens", type=_positive, help=batch)
    longest = "tokens that a sentence may have, its end symbol included (default: 512)"
    command.add_argument("--max-source-tokens", type=_positive, help=longest)
    command.add_argument("--device", help="where to work (default: cuda if there is one, or cpu)")
    command.add_argument("--int8", action="store_true", help="round weights to eight bits: faster on a CPU")


def _translator(options: argparse.Namespace, **changes: Any) -> Any:
    """Load the models, without bars and notes that only a programmer wants to see."""
    from transformers.utils import logging

    from .translation import Translator

    models = options.model or [DEFAULT_MODEL]
    for name in models:
        if " " in name and not Path(name).exists():
            raise ValueError(f"{name!r} is no model. Sentences stand before --model.")
    for name in ("batch_tokens", "max_source_tokens"):
        if getattr(options, name) is not None:
            changes[name] = getattr(options, name)
    logging.disable_progress_bar()
    try:
        return Translator.from_pretrained(models, options.device, options.int8, **changes)
    finally:
        logging.enable_progress_bar()


def _penalty(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not -100 <= number <= 100:
        raise argparse.ArgumentTypeError(f"must be a number from -100 to 100, not {text!r}")
    return number


def _positive(text: str) -> int:
    number = int(text) if text.lstrip("-").isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return number
