"""Model cards: made from results alone, valid on the Hub, with code that runs, and no figure from elsewhere."""

import contextlib
import io
import json
import math
import re
import runpy
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from transformers import T5Config

from tests.conftest import recipe, tiny_model
from tests.numbers_corpus import number_corpus
from vaswani import VaswaniForConditionalGeneration, VaswaniTokenizer, paper_generation_config, preset
from vaswani.cli import main
from vaswani.hub.about import collect_results, read_about
from vaswani.hub.card import TEMPLATE, card_for_folder, make_card
from vaswani.hub.results import read_results
from vaswani.training.checkpoints import average_checkpoints
from vaswani.training.recipe import parse_recipe

ROOT = Path(__file__).parents[2]
CARDS = sorted(path.parent for path in (ROOT / "model_cards").glob("*/README.md"))
PLANNED = [folder for folder in CARDS if (folder / "recipe.yaml").is_file()]
TRAINED = [folder for folder in CARDS if folder not in PLANNED]

# Table 2 of the paper, and sections 5.1, 5.2, 5.4 and 6.1: BLEU, vocabulary, updates, dropout, averaged checkpoints.
PAPER = {
    "base-en-de": (27.3, 37_000, 100_000, 0.1, 5),
    "base-en-fr": (38.1, 32_000, 100_000, 0.1, 5),
    "big-en-de": (28.4, 37_000, 300_000, 0.3, 20),
    "big-en-fr": (41.8, 32_000, 300_000, 0.1, 20),
}
# Names of scores in results, and of their metrics on the Hub.
METRICS = {"bleu": "sacrebleu", "chrf": "chrf", "paper_bleu": "bleu"}

ABOUT = {
    "name": "Numbers, English to German",
    "summary": "Translates numbers.",
    "languages": ["en", "de"],
    "license": "cc-by-sa-4.0",
    "location": "somebody/numbers",
    "example": 'seven "hundred"',
    "data": [{"name": "Numbers", "id": "somebody/numbers", "license": "CC0", "attribution": "Made by hand"}],
    "intended_use": "To count.",
    "limits": ["Numbers only."],
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: VaswaniTokenizer) -> str:
    """Return a folder with a model that has the paper's search, and its tokenizer."""
    folder, model = tmp_path_factory.mktemp("model"), tiny_model(vocab_size=len(tokenizer))
    model.generation_config = paper_generation_config(model.config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def in_folders(folders: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("folder", folders, ids=[folder.name for folder in folders])


def code_blocks(card: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", card, re.DOTALL)


def printed_by(code: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    return printed.getvalue()


def measured_scores(results: dict) -> list[tuple[str, float, str]]:
    """Return test set, score and signature of everything that was measured."""
    return [
        (evaluation["name"], evaluation[name], evaluation[f"{name}_signature"])
        for evaluation in results.get("evaluations", [])
        for name in METRICS
    ]


def published_scores(results: dict) -> list[tuple[str, float, str]]:
    """Return test set, score and signature of everything that others published."""
    published = results["about"].get("published", {}).get("scores", [])
    return [(score["name"], score["bleu"], score["signature"]) for score in published]


# --- the cards of the repository


def test_there_is_a_card_for_each_model_of_the_paper_and_for_the_demo() -> None:
    assert [folder.name for folder in PLANNED] == sorted(PAPER)
    assert "demo" in [folder.name for folder in TRAINED]


@in_folders(CARDS)
def test_a_card_is_what_its_results_give(folder: Path) -> None:
    assert str(make_card(read_results(folder))).encode() == (folder / "README.md").read_bytes()


@in_folders(CARDS)
def test_the_metadata_of_a_card_are_those_of_its_results(folder: Path) -> None:
    results, data = read_results(folder), ModelCard.load(folder / "README.md").data
    about = results["about"]
    assert (data.library_name, data.pipeline_tag) == ("transformers", "translation")
    assert (data.language, data.license) == (about["languages"], about["license"])
    assert "vaswani" in data.tags
    assert data.model_name == about["name"]
    found = [(each.dataset_name, each.metric_value, each.metric_args["signature"]) for each in data.eval_results]
    measured = measured_scores(results)
    scores = measured or published_scores(results)
    assert found == [(name, round(value, 1), signature) for name, value, signature in scores]
    assert {each.source_url for each in data.eval_results} == {None if measured else about["published"]["url"]}
    assert all(each.task_type == "translation" and each.metric_name for each in data.eval_results)


@in_folders(CARDS)
def test_every_score_in_the_text_is_in_the_results(folder: Path) -> None:
    text = ModelCard.load(folder / "README.md").text
    section = "".join(re.findall(r"## (?:Results|Published results).*?(?=\n## )", text, re.DOTALL))
    assert section
    shown = [re.split(r" \| ", row.strip("| ")) for row in re.findall(r"^\| (?!test set).*", section, re.MULTILINE)]
    scores = [*measured_scores(results := read_results(folder)), *published_scores(results)]
    assert [(row[0], row[2]) for row in shown] == [(name, f"{value:.1f}") for name, value, _ in scores]
    assert all(signature in section for _, _, signature in scores)


@in_folders(CARDS)
def test_a_card_has_what_its_author_says_and_no_path_of_a_machine(folder: Path) -> None:
    card, about = (folder / "README.md").read_text(), read_about(folder / "about.yaml")
    licences = [entry["license"] for entry in about["data"]]
    assert all(text in card for text in (about["summary"], about["intended_use"], *about["limits"], *licences))
    for file in folder.iterdir():
        assert not re.search(rb'["\' ](/|~/)(home|root|tmp|work)', file.read_bytes()), file


@in_folders(PLANNED)
def test_a_planned_card_is_the_papers_model_and_recipe(folder: Path, tmp_path: Path) -> None:
    results = read_results(folder)
    for name in ("about.yaml", "recipe.yaml"):
        shutil.copy(folder / name, tmp_path)
    main(["card", str(tmp_path)])
    assert read_results(tmp_path) == results
    bleu, vocabulary, updates, dropout, averaged = PAPER[folder.name]
    model, options, published = results["model"], results["recipe"], results["about"]["published"]
    assert (published["scores"][0]["bleu"], published["updates"]) == (bleu, updates)
    assert (model["vocab_size"], model["dropout"], model["label_smoothing"]) == (vocabulary, dropout, 0.1)
    assert (options["max_steps"], options["average_last"], options["save_minutes"]) == (updates, averaged, 10)
    assert (options["source_tokens"], options["target_tokens"], options["warmup_steps"]) == (25_000, 25_000, 4000)
    assert options["learning_rate"] == pytest.approx(model["d_model"] ** -0.5 * 4000**-0.5)
    text = (folder / "README.md").read_text()
    assert "**The weights are not yet published.**" in text
    assert "These figures are from [Attention Is All You Need" in text


@pytest.mark.parametrize("size", ["base", "big"])
def test_the_recipe_of_a_planned_card_is_that_of_the_example(size: str) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "2_wmt14.py"))["RECIPES"][size]
    options, arguments = parse_recipe([str(ROOT / "model_cards" / f"{size}-en-de" / "recipe.yaml")])
    assert {name: getattr(arguments, name) for name in example} == example
    assert (options.preset, options.vocab_size, options.dataset_config) == (size, 37_000, "de-en")
    assert (options.train, options.valid) == (["wmt/wmt14"], ["wmt/wmt14"])


@in_folders(PLANNED)
def test_the_code_of_a_planned_card_builds_its_model(folder: Path) -> None:
    results, card = read_results(folder), (folder / "README.md").read_text()
    (code,) = code_blocks(card, "python")
    with torch.device("meta"):
        assert printed_by(code) == f"{results['model']['parameters']:,} parameters\n"
    assert "vaswani train recipe.yaml --output_dir run\n" in code_blocks(card, "bash")[1]


@in_folders(TRAINED)
def test_the_code_of_a_card_translates(folder: Path, model_folder: str, capsys: pytest.CaptureFixture) -> None:
    assert_code_translates((folder / "README.md").read_text(), model_folder, capsys)


def assert_code_translates(card: str, folder: str, capsys: pytest.CaptureFixture) -> None:
    """Run the code and the command of a card with another model in place of its own."""
    (code,) = code_blocks(card, "python")
    (place,) = set(re.findall(r"from_pretrained\((.*)\)", code))
    (translation,) = eval(printed_by(code.replace(place, repr(folder))))
    assert isinstance(translation, str)
    _, command = code_blocks(card, "bash")
    location = re.fullmatch(r'(?:vaswani\.model_folder\()?"(.*?)"\)?', place)[1]
    assert f"--model {location}\n" in command
    main(shlex.split(command.replace(f"--model {location}", f"--model {folder}"))[1:])
    assert capsys.readouterr().out == f"{translation}\n"


@in_folders(TRAINED)
def test_the_results_of_a_trained_model_have_what_was_measured(folder: Path) -> None:
    results, about = read_results(folder), read_about(folder / "about.yaml")
    for evaluation, entry in zip(results["evaluations"], about["evaluations"], strict=True):
        runs = evaluation.get("runs", [evaluation])
        for run, file in zip(runs, entry.get("files", [entry.get("file")]), strict=True):
            assert json.loads((folder / file).read_text()).items() <= run.items()
    measured = json.loads((folder / about["speed"]).read_text())
    for cell, source in zip(results["speed"]["cells"], measured["speed"], strict=True):
        assert source["engines"][0]["engine"] == "vaswani"
        assert cell["seconds"] == min(source["engines"][0]["seconds"])
    assert {"updates", "seconds", "loss", "hardware", "versions"} <= results["training"].keys()
    assert {"source_tokens", "target_tokens", "learning_rate", "seed"} <= results["recipe"].keys()


# --- from a run to a card


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for two updates by the command, average, and evaluate; return the run's folder."""
    folder = tmp_path_factory.mktemp("card")
    for language in ("en", "de"):
        text = "".join(f"{pair[language]}\n" for pair in number_corpus(200))
        (folder / f"train.{language}").write_text(text)
    train, run = [str(folder / f"train.{language}") for language in ("en", "de")], folder / "run"
    options = """
        --preset tiny --model_config {"d_model":16,"d_ff":32} --vocab_size 320 --max_ratio 3 --source_tokens 600
        --target_tokens 600 --max_steps 2 --warmup_steps 4 --seed 7 --logging_steps 1 --eval_steps 1
        --save_strategy steps --save_steps 1 --average_last 2 --report_to none --use_cpu --dataloader_pin_memory false
        --disable_tqdm true --hub_token hf_secret --output_dir
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
        main(["train", "--train", *train, "--valid", *train, *options.split(), str(run)])
    for language in ("en", "de"):
        lines = (folder / f"train.{language}").read_text().splitlines(keepends=True)
        (folder / f"test.{language}").write_text("".join(lines[:5]))
    model, source, reference = run / "averaged", folder / "test.en", folder / "test.de"
    words = ["--model", model, "--source", source, "--reference", reference, "--output", folder / "test.json"]
    main(["evaluate", *map(str, words)])
    return run


def write_about(folder: Path, **changes: object) -> Path:
    path = folder / "about.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in {**ABOUT, **changes}.items() if value is not None}))
    return path


def test_a_run_leaves_what_its_machine_knows(run: Path) -> None:
    results = read_results(run)
    model, training, options = results["model"], results["training"], results["recipe"]
    saved = VaswaniForConditionalGeneration.from_pretrained(run)
    assert (model["parameters"], model["vocab_size"]) == (saved.num_parameters(), 320)
    assert model["search"] == {"beams": 4, "length_penalty": 0.6}
    state = json.loads((run / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert training["updates"] == 2
    assert training["loss"] == [entry["loss"] for entry in state if "loss" in entry][-1]
    assert training["valid_loss"] == [entry["eval_loss"] for entry in state if "eval_loss" in entry][-1]
    assert training["valid_perplexity"] == pytest.approx(math.exp(training["valid_loss"]))
    assert training["seconds"] > 0
    assert training["hardware"]["kind"] == "core"
    assert training["versions"]["torch"] == torch.__version__
    assert options["train"] == ["train.en", "train.de"]
    assert options["learning_rate"] == pytest.approx((16 * 4) ** -0.5)
    assert (options["seed"], options["max_ratio"], options["preset"]) == (7, 3, "tiny")
    assert "hf_secret" not in (run / "results.json").read_text()
    assert str(run.parent) not in (run / "results.json").read_text()


def test_the_command_writes_the_card_of_a_run(run: Path, tmp_path, capsys: pytest.CaptureFixture) -> None:
    evaluation = {"name": "ten numbers", "file": str(run.parent / "test.json"), "dataset": "somebody/numbers"}
    about = write_about(tmp_path, evaluations=[{**evaluation, "split": "test"}])
    averaged, words = run / "averaged", ["card", str(run / "averaged"), "--about", str(about)]
    main(words)
    assert str(averaged / "README.md") in capsys.readouterr().out
    card, scores = ModelCard.load(averaged / "README.md"), json.loads((run.parent / "test.json").read_text())
    assert str(card) == str(make_card(read_results(averaged)))
    assert [(each.metric_type, each.metric_value) for each in card.data.eval_results] == [
        (metric, round(scores[name], 1)) for name, metric in METRICS.items()
    ]
    first = card.data.eval_results[0]
    assert (first.dataset_type, first.dataset_split) == ("somebody/numbers", "test")
    assert first.metric_args == {"signature": scores["bleu_signature"]}
    assert card.data.datasets == ["somebody/numbers"]
    for text in (
        "- ten numbers: 5 sentences, translated by beam search with 4 beams and the length penalty 0.6",
        "| Updates | 2, or ",
        "200 pairs, `train.en`, `train.de`",
        "one side more than 3 times as long as the other",
        "| Learning rate | rises over 4 updates to 0.125, then falls",
        "| Weights | the mean of 2 checkpoints, checkpoint-1 to checkpoint-2 |",
        "| Seed | 7 |",
        "Licence: CC0. Made by hand.",
    ):
        assert text in card.text
    assert_code_translates(str(card), str(averaged), capsys)

    with pytest.raises(SystemExit):
        main(words)
    assert "README.md exists already: add --overwrite" in capsys.readouterr().err
    write_about(tmp_path, name="Another")
    main([*words, "--overwrite"])
    again = ModelCard.load(averaged / "README.md")
    assert again.data.eval_results is None
    assert "# Another\n" in again.text
    assert "| Seed | 7 |" in again.text


def test_the_run_can_be_elsewhere(run: Path, tmp_path, capsys: pytest.CaptureFixture) -> None:
    average_checkpoints([run / "checkpoint-2"], tmp_path / "model")
    words = ["card", str(tmp_path / "model"), "--about", str(write_about(tmp_path)), "--overwrite"]
    main(words)
    assert "training" not in read_results(tmp_path / "model")
    main([*words, "--run", str(run)])
    results = read_results(tmp_path / "model")
    assert results["training"] == read_results(run)["training"]
    assert results["averaged"] == ["checkpoint-2"]
    with pytest.raises(SystemExit):
        main([*words, "--run", str(tmp_path)])
    assert "has no results.json: `vaswani train` leaves it" in capsys.readouterr().err


def test_seeds_are_averaged(run: Path, tmp_path) -> None:
    scores = json.loads((run.parent / "test.json").read_text())
    (tmp_path / "1.json").write_text(json.dumps({**scores, "bleu": 41.0, "chrf": 50.0}))
    (tmp_path / "2.json").write_text(json.dumps({**scores, "bleu": 42.5, "chrf": 53.0}))
    about = write_about(tmp_path, evaluations=[{"name": "numbers", "files": ["1.json", "2.json"]}])
    (found,) = collect_results(run, about)["evaluations"]
    assert (found["bleu"], found["chrf"], found["paper_bleu"]) == (41.75, 51.5, scores["paper_bleu"])
    assert [each["bleu"] for each in found["runs"]] == [41.0, 42.5]
    card = make_card(collect_results(run, about))
    assert [each.metric_value for each in card.data.eval_results] == [41.8, 51.5, round(scores["paper_bleu"], 1)]
    assert "length penalty 0.6; the mean of 2 seeds, BLEU 41.0, 42.5\n" in card.text
    (tmp_path / "2.json").write_text(json.dumps({**scores, "search": {"beams": 5, "length_penalty": 0.6}}))
    with pytest.raises(ValueError, match=r"2\.json and .*1\.json are of different evaluations: search differs"):
        collect_results(run, about)


@pytest.mark.process
def test_a_benchmark_gives_the_speed(run: Path, tmp_path) -> None:
    options = {"model": run / "averaged", "batch": 2, "threads": 1, "rounds": 1, "output": tmp_path / "speed.json"}
    main(["benchmark", "--peers", *(str(word) for name, value in options.items() for word in (f"--{name}", value))])
    results = collect_results(run / "averaged", write_about(tmp_path, speed="speed.json"))
    (cell,) = json.loads((tmp_path / "speed.json").read_text())["speed"]
    assert cell["size"] == "averaged"
    seconds = cell["engines"][0]["seconds"][0]
    assert f"| 2 | 1 | {2 / seconds:,.1f} | {cell['words'] / seconds:,.0f} |" in make_card(results).text
    assert str(tmp_path) not in json.dumps(results)


def test_a_file_that_was_not_measured_is_refused(run: Path, tmp_path) -> None:
    (tmp_path / "other.json").write_text('{"bleu": 30.0, "machine": {}, "speed": []}')
    for changes, message in (
        ({"evaluations": [{"name": "x", "file": "other.json"}]}, "has no evaluation: `vaswani evaluate --output`"),
        ({"speed": "other.json"}, "has no speed of a trained model: `vaswani benchmark --model --output` measures it"),
    ):
        with pytest.raises(ValueError, match=message):
            collect_results(run, write_about(tmp_path, **changes))


# --- folders without an about file


def test_a_folder_without_results_has_a_card(
    model_folder: str, saved_folder: str, capsys: pytest.CaptureFixture
) -> None:
    card = card_for_folder(Path(model_folder), "somebody/model")
    assert "# model\n" in card.text
    assert (card.data.library_name, card.data.eval_results, card.data.license) == ("transformers", None, None)
    assert "2 + 2 layers of width 16, 2 heads, inner width 32, one vocabulary of 400 pieces" in card.text
    assert re.findall("^## .*", card.text, re.MULTILINE) == ["## Use it"]
    assert_code_translates(str(card), model_folder, capsys)
    assert "arguments is beam search with 4 beams and the length penalty 0.6." in card.text
    assert "arguments is greedy search." in card_for_folder(Path(saved_folder)).text


def test_a_folder_of_a_run_has_a_card_with_the_runs_results(run: Path) -> None:
    assert "| Seed | 7 |" in card_for_folder(run).text
    assert "| Weights | those of the last update |" in card_for_folder(run).text
    assert "## Training" not in card_for_folder(run / "checkpoint-1").text


def test_a_card_for_another_place_keeps_the_rest(run: Path, tmp_path) -> None:
    average_checkpoints([run / "checkpoint-2"], tmp_path / "model")
    main(["card", str(tmp_path / "model"), "--about", str(write_about(tmp_path))])
    expected = (tmp_path / "model" / "README.md").read_text()
    for mark in ('from_pretrained("', "--model "):
        expected = expected.replace(f"{mark}somebody/numbers", f"{mark}another/place")
    assert str(card_for_folder(tmp_path / "model", "another/place")) == expected


def test_a_folder_without_a_model_of_ours_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"has no model: there is no config\.json"):
        card_for_folder(tmp_path)
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a model of type 't5'; it must be 'vaswani'"):
        card_for_folder(tmp_path)


# --- the trainer's card


def test_the_trainer_writes_our_card(pairs: Dataset, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = recipe(tmp_path / "run", pairs=pairs, max_steps=2, hub_model_id="somebody/numbers")
    trainer.train()
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "is_world_process_zero", lambda: False)
        trainer.create_model_card()
    assert not (tmp_path / "run" / "README.md").exists()
    trainer.create_model_card(
        language=["en", "de"],
        license="mit",
        tags="numbers",
        model_name="Numbers",
        finetuned_from="somebody/letters",
        dataset_tags=["somebody/data"],
        dataset=["The data", "More data"],
    )
    card = ModelCard.load(tmp_path / "run" / "README.md")
    assert (card.data.language, card.data.license, card.data.base_model) == (["en", "de"], "mit", "somebody/letters")
    assert (card.data.tags, card.data.datasets) == (["vaswani", "numbers"], ["somebody/data"])
    for text in ("# Numbers\n", 'from_pretrained("somebody/numbers")', "**The data**", "**More data**", "| Updates |"):
        assert text in card.text
    assert read_results(tmp_path / "run")["training"]["updates"] == 2
    trainer.create_model_card(license="apache-2.0")
    again = ModelCard.load(tmp_path / "run" / "README.md")
    assert (again.data.license, again.data.language) == ("apache-2.0", ["en", "de"])


def test_the_trainer_names_the_model_that_it_began_with(pairs: Dataset, saved_folder: str, tmp_path) -> None:
    model = VaswaniForConditionalGeneration.from_pretrained(saved_folder)
    trainer, _ = recipe(tmp_path / "run", model, pairs, max_steps=1)
    trainer.train()
    for name, expected in ((saved_folder, None), ("somebody/letters", "somebody/letters")):
        model.config.name_or_path = name
        trainer.create_model_card()
        assert ModelCard.load(tmp_path / "run" / "README.md").data.base_model == expected


def test_an_adapter_keeps_the_card_of_transformers(pairs: Dataset, tmp_path) -> None:
    adapted = get_peft_model(tiny_model(vocab_size=400), LoraConfig(target_modules=["q_proj"], r=2))
    trainer, _ = recipe(tmp_path / "run", adapted, pairs, max_steps=1)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(license="mit")
    card = ModelCard.load(tmp_path / "run" / "README.md")
    assert (card.data.library_name, card.data.license) == ("peft", "mit")


# --- what a card says


def results_of(**changes: object) -> dict:
    model = {"parameters": 5, "search": {"beams": 1, "length_penalty": None}, **vars(preset("tiny"))}
    return {"model": {**model, **changes}}


def test_a_small_model_with_learned_positions_is_described_as_such() -> None:
    text = make_card(results_of(position_encoding="learned", parameters=999_999)).text
    assert "learned positions, one vocabulary of 10,000 pieces, 999,999 parameters" in text


def test_a_model_of_the_package_is_loaded_by_its_name() -> None:
    card = str(make_card({"about": {"location": "tatoeba-en-de"}, "model": read_results(CARDS[-1])["model"]}))
    assert 'AutoModelForSeq2SeqLM.from_pretrained(vaswani.model_folder("tatoeba-en-de"))' in card
    assert "--model tatoeba-en-de\n" in card


def test_another_licence_has_a_name_and_a_link() -> None:
    about = {"license": "other", "license_name": "my-licence", "license_link": "https://example.com/licence"}
    card = ModelCard(str(make_card({**results_of(), "about": about})))
    assert {name: card.data[name] for name in about} == about
    assert "[my-licence](https://example.com/licence)" in card.text


def test_other_recipes_are_described_as_they_are(pairs: Dataset, tmp_path) -> None:
    options = {"lr_scheduler_type": "linear", "learning_rate": 1e-3, "weight_decay": 0.01, "max_grad_norm": 1.0}
    trainer, _ = recipe(tmp_path, pairs=pairs.to_iterable_dataset(), max_steps=1, **options, bf16=True)
    trainer.train()
    trainer.create_model_card()
    text = (tmp_path / "README.md").read_text()
    for part in (
        "AdamW, beta1 0.9, beta2 0.98, epsilon 1e-9, weight decay 0.01, gradients clipped to the norm 1 |",
        "rises over 4 updates to 0.001, then by the schedule linear |",
        "| Precision | bf16 |",
    ):
        assert part in text
    assert "| Corpus |" not in text


def test_the_template_is_installed_with_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert TEMPLATE.name in settings["tool"]["setuptools"]["package-data"]["vaswani.hub"]


# --- mistakes in an about file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"licence": "mit"}, "has the unknown key 'licence': its keys are name, summary, languages, license, lic"),
        ({"summary": None}, "lacks 'summary': its keys are"),
        ({"data": [{"name": "x"}]}, "data 1 lacks 'license': its keys are name, id?, url?, license, attribution?"),
        ({"data": [{"name": "x", "license": "y", "size": 3}]}, "data 1 has the unknown key 'size'"),
        ({"data": "WMT14"}, "data is 'WMT14'; it must be a list"),
        ({"limits": []}, "limits is []; it must be a list"),
        ({"languages": ["en", False]}, "languages 2 is False; it must be text"),
        ({"published": {"source": "x"}}, "published lacks 'url'"),
        ({"evaluations": ["test.json"]}, "evaluations 1 must hold keys with values: its keys are name, dataset?"),
        ({"evaluations": [{"name": "x"}]}, "evaluations 1 needs either file or files"),
        ({"evaluations": [{"name": "x", "file": "1", "files": ["2"]}]}, "evaluations 1 needs either file or files"),
        ({"license": "other"}, "the license 'other' needs license_name and license_link"),
    ],
)
def test_a_mistake_in_an_about_file_is_explained(changes: dict, message: str, tmp_path) -> None:
    path = write_about(tmp_path, **changes)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_about(path)
    assert str(error.value).startswith(str(path))


def test_what_is_no_about_file_is_explained(tmp_path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "about.yaml"
    for content, message in (("a: [", "is not valid YAML"), ("just text", "must hold keys with values: its keys are")):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_about(path)
    path.unlink()
    with pytest.raises(SystemExit):
        main(["card", str(tmp_path)])
    assert "about.yaml" in capsys.readouterr().err
