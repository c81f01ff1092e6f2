"""The benchmark: peers compute the same function, agreement is demanded, and the command reports what it measures."""

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import tiny_model
from vaswani import VaswaniTokenizer, paper_generation_config, preset
from vaswani.beam_search_vaswani import gnmt_penalty
from vaswani.benchmark import command, measure, report
from vaswani.benchmark.measure import CellResult, Timing, Worker, measure_cell, peak_memory, ratio
from vaswani.benchmark.peers import ENGINES, EndAt, Marian, Vaswani, power_penalty
from vaswani.benchmark.profiling import KINDS, profile
from vaswani.benchmark.workload import (
    Cell,
    build_model,
    config_of,
    diversify,
    make_job,
    operations,
    tokenized_sentences,
)
from vaswani.kernels.library import load as kernels

needs_ctranslate2 = pytest.mark.skipif(
    importlib.util.find_spec("ctranslate2") is None, reason="CTranslate2 is not installed: pip install ctranslate2"
)
peers = pytest.mark.parametrize("peer", ["marian", pytest.param("ctranslate2", marks=needs_ctranslate2)])


def diverse_model(**changes: object):
    """Build a model with the paper's generation configuration whose outputs differ from source to source."""
    model = tiny_model(**{"vocab_size": 400, **changes})
    diversify(model)
    model.generation_config = paper_generation_config(model.config)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: VaswaniTokenizer) -> str:
    """Return a folder with such a model and a tokenizer."""
    path = tmp_path_factory.mktemp("benchmark")
    diverse_model(vocab_size=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def random_sequences(count: int = 24) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 10, (count,), generator=generator).tolist()
    return [[*torch.randint(3, 300, (length,), generator=generator).tolist(), 1] for length in lengths]


class LocalWorker:
    """Stand for a process: the engine is in this one."""

    def __init__(self, engine: str, model, engines=ENGINES) -> None:
        self.engine, self._engine = engine, engines[engine](model, threads=1)

    def ask(self, task, *arguments):
        return task(self._engine, *arguments)


def spoil(model):
    with torch.no_grad():
        model.model.decoder.layers[0].feed_forward.fc1.weight.neg_()
    return model


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rounds and the measurement of the peak take no time."""
    monkeypatch.setattr(measure, "ROUND_SECONDS", 0.0)
    monkeypatch.setattr(measure, "PEAK_WIDTH", 64)


def parse(*arguments: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args([str(argument) for argument in arguments])


@peers
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "output_bias": True, "activation_function": "swish"}])
@pytest.mark.parametrize(("lengths", "beams"), [("equal", 4), ("equal", 1), ("ragged", 4)])
def test_peers_with_the_converted_weights_translate_equally(
    peer: str, changes: dict[str, object], lengths: str, beams: int
) -> None:
    if lengths not in ENGINES[peer].lengths:
        pytest.skip(f"{peer} cannot force {lengths} lengths")
    model, job = diverse_model(**changes), make_job(random_sequences(), lengths, beams)
    ours, theirs = (measure.translate(ENGINES[name](model, 1), job) for name in ("vaswani", peer))
    assert measure.shared_outputs(theirs, ours) >= 0.95
    ends = int(lengths == "ragged")  # equal lengths leave no place for EOS
    assert [len(tokens) + ends for tokens in theirs] == job.targets
    assert len({tuple(tokens) for tokens in ours}) > 0.75 * len(ours)  # or agreement would mean nothing


def test_outputs_of_random_weights_tell_engines_apart() -> None:
    engine = Vaswani(build_model("tiny"), threads=1)
    sources = tokenized_sentences("tiny", None, 20)
    right = measure.translate(engine, make_job(sources, "equal"))
    shifted = measure.translate(engine, make_job([tokens[1:] + tokens[:1] for tokens in sources], "equal"))
    assert len({tuple(tokens) for tokens in right}) == 20
    assert measure.shared_outputs(shifted, right) < 0.2


def test_length_penalties_of_both_forms_grow_equally_at_the_mean_length() -> None:
    job = make_job([[3] * 10, [3] * 20], "free")
    paper, power = (lambda length: gnmt_penalty(length, 0.6)), (lambda length: length ** power_penalty(job))
    growths = [(form(15.001) / form(14.999) - 1) / 0.002 for form in (paper, power)]
    assert growths[0] == pytest.approx(growths[1], rel=1e-4)


@peers
def test_spoilt_weights_fail_the_check_and_are_not_timed(peer: str, folder: str, quick: None) -> None:
    sequences = random_sequences()
    cell = Cell(folder, 2, 1, "equal")
    ours = LocalWorker("vaswani", build_model(folder))
    right, wrong = (LocalWorker(peer, each) for each in (build_model(folder), spoil(build_model(folder))))

    result = measure_cell([ours, right, wrong], cell, sequences, peak=1e9, rounds=3)
    assert [len(timing.seconds) for timing in result.timings] == [3, 3, 0]
    assert result.timings[1].agreement >= 0.95
    assert result.timings[2].agreement < 0.95
    assert result.disagreeing == [result.timings[2]]
    message = report.complaint([result])
    assert message is not None
    assert "must agree for 95%" in message
    assert peer in message
    assert "outputs differ" in "\n".join(report.speed_table([result]))


def test_the_command_reports_first_and_then_fails_if_outputs_differ(
    folder: str, quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def spoilt_workers(engines, size, threads, task) -> Iterator[list[LocalWorker]]:
        yield [LocalWorker("vaswani", build_model(size)), LocalWorker("marian", spoil(build_model(size)))]

    monkeypatch.setattr(command, "start_workers", spoilt_workers)
    arguments = ["--model", folder, "--lengths", "equal", "--batch", 2, "--threads", 1, "--rounds", 1]
    with pytest.raises(ValueError, match=r"Outputs must agree for 95% of sequences .* marian agrees for \d+%"):
        command.run(parse(*arguments, "--peers", "marian", "--output", tmp_path / "speed.json"))
    assert "outputs differ" in capsys.readouterr().out
    [cell] = json.loads((tmp_path / "speed.json").read_text())["speed"]
    assert cell["engines"][1]["seconds"] == []
    assert "ratio" not in cell["engines"][1]


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"activation_function": "swish", "d_ff_decoder": 40}, None),
        ({"final_layer_norm": True}, "final_layer_norm=True"),
        ({"d_k": 5}, "d_k=5"),
    ],
)
def test_models_that_a_peer_cannot_have_are_refused_before_anything_is_measured(
    changes: dict[str, object], refused: str | None, monkeypatch: pytest.MonkeyPatch, folder: str, tmp_path: Path
) -> None:
    class MeasuringError(Exception):
        pass

    def start(*_: object) -> None:
        raise MeasuringError

    monkeypatch.setattr(command, "start_workers", start)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    diverse_model(**changes).save_pretrained(tmp_path)
    arguments = ["--model", tmp_path, "--batch", 2, "--threads", 1, "--task", "generation", "--peers", "marian"]
    with pytest.raises(ValueError if refused else MeasuringError, match=refused):
        command.run(parse(*arguments))


def test_a_forced_end_is_the_only_token_there_and_never_before() -> None:
    processor, scores = EndAt([2, 3], end=1), torch.zeros(4, 5)
    infinity = float("inf")
    early, end = [0, -infinity, 0, 0, 0], [-infinity, 0, -infinity, -infinity, -infinity]
    processed = processor(torch.zeros(4, 2, dtype=torch.long), scores.clone())
    torch.testing.assert_close(processed, torch.tensor([end, end, early, early]))
    processed = processor(torch.zeros(4, 3, dtype=torch.long), scores.clone())
    torch.testing.assert_close(processed, torch.tensor([end] * 4))


@pytest.mark.parametrize("source", [2, 5])
@pytest.mark.parametrize("target", [1, 3])
def test_operations_are_those_that_torch_counts(source: int, target: int) -> None:
    model = tiny_model(d_k=3, d_v=6, decoder_layers=3)
    model.set_attn_implementation("eager")
    model.set_fast_paths(False)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.full((1, source), 3), decoder_input_ids=torch.full((1, target), 3))
    config = model.config
    unseen = target * (target - 1) // 2  # torch forms the products with later tokens too
    of_unseen = 2 * unseen * config.decoder_layers * config.num_attention_heads * (config.d_k + config.d_v)
    assert operations(config, [source], [target], beams=1) == counter.get_total_flops() - of_unseen
    assert operations(config, [source] * 2, [target] * 2) == 2 * operations(config, [source], [target])


def test_random_models_are_always_the_same_and_as_the_paper_says() -> None:
    first, second = build_model("tiny"), build_model("tiny")
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)
    config = config_of("base")
    assert (config.d_model, config.vocab_size, config.layer_norm_eps, config.decoder_start_token_id) == (
        512,
        37000,
        1e-5,
        0,
    )
    assert config_of("tiny").vocab_size == preset("tiny").vocab_size == 10000


def test_sentences_are_those_of_a_file_in_tokens_learnt_from_it(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("".join(f"sentence number {number} {'and so on ' * (number % 7)}\n\n" for number in range(60)))
    sentences = tokenized_sentences("tiny", file, 50)
    assert len(sentences) == 50
    assert len({len(sentence) for sentence in sentences}) >= 5
    assert all(sentence[-1] == 1 and min(sentence) >= 0 and max(sentence) < 10000 for sentence in sentences)
    assert sentences == tokenized_sentences("tiny", file, 50)
    with pytest.raises(ValueError, match="has 60 sentences of at most 900 tokens; 64 are needed"):
        tokenized_sentences("tiny", file, 64)


def test_lengths_of_outputs_come_from_the_sources() -> None:
    sources = [[3] * 4, [3] * 8, [3] * 9]
    assert make_job(sources, "equal").targets == [7, 7, 7]
    assert make_job(sources, "ragged").targets == [4, 8, 9]
    assert make_job(sources, "free").targets == [54, 58, 59]


def test_the_ratio_is_the_median_over_rounds_of_the_same_moment() -> None:
    ours, theirs = Timing("vaswani", 1.0, [1.0, 2.0, 1.0, 4.0, 1.0]), Timing("marian", 1.0, [2.0, 6.0, 4.0, 4.0, 5.0])
    assert ratio(theirs, ours) == (2.0, 3.0, 4.0)
    assert ratio(Timing("marian", 1.0, [3.0]), Timing("vaswani", 1.0, [2.0])) == (1.5, 1.5, 1.5)


def test_the_table_is_aligned_and_names_who_is_left_out() -> None:
    timings = [Timing("vaswani", 1.0, [0.5, 0.5]), Timing("marian", 0.96, [1.0, 1.5])]
    result = CellResult(Cell("tiny", 16, 1, "ragged"), 100, 10**9, 4e9, timings, ["ctranslate2"])
    header, ours, theirs, *notes = report.speed_table([result])
    columns = ["tiny", "16", "1", "ragged", "4", "vaswani", "100%", "1.00", "1.00-1.00", "0.5000", "200", "50%"]
    assert ours.split() == columns
    assert theirs.split()[5:] == ["marian", "96%", "2.50", "2.25-2.75", "1.0000", "100", "25%"]
    assert len(header) == len(ours) == len(theirs)
    assert "ctranslate2 is left out of ragged lengths: it cannot force them" in notes


@pytest.mark.skipif(kernels() is None, reason="the kernels were not built")
def test_the_profile_divides_the_whole_time() -> None:
    engine = Vaswani(diverse_model(), 1)
    functions = [getattr(kernels(), kind) for kind in list(KINDS)[:-1]]
    for lengths, idle in (("equal", {"score_tokens", "top_k_rows"}), ("ragged", {"best_continuations"})):
        shares = profile(engine, make_job(random_sequences(4), lengths))
        assert list(shares) == list(KINDS)
        assert sum(shares.values()) == pytest.approx(1)
        assert {kind for kind, share in shares.items() if share == 0} == idle
    assert [getattr(kernels(), kind) for kind in list(KINDS)[:-1]] == functions


@pytest.mark.parametrize("may_reset", [True, False])
def test_peak_memory_sees_what_a_call_needs_for_a_moment(may_reset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Greedy(Marian):
        def prepare(self, job):
            return lambda: (torch.ones(len(job.sources) * 2**20).sum(), measure.time.sleep(0.05 if may_reset else 0))

    if not may_reset:
        forbidden = PermissionError("clear_refs")
        monkeypatch.setattr(measure.Path, "write_text", lambda *_: (_ for _ in ()).throw(forbidden))
    needed = peak_memory(Greedy(tiny_model(), 1), make_job([[3, 1]] * 64, "equal"))
    assert 200 * 2**20 < needed < 300 * 2**20  # 64 times 4 MiB


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", 0], "--rounds 0: it must be at least 1"),
        (["--batch", 4, -1], "--batch -1: it must be at least 1"),
        (["--threads", 10_000], "--threads 10000: it must be from 1 to"),
        (["--lengths", "free"], "--lengths free needs --model"),
        (["--model", "nowhere"], "--model nowhere: there is no model in this folder"),
        (["--model", "nowhere", "--size", "tiny"], "give one of them"),
        (["--sentences", "nowhere"], "--sentences nowhere: there is no such file"),
        (["--output", "nowhere/file"], "--output nowhere/file: there is no folder nowhere"),
        (["--profile", "--batch", 1, 2], "--profile shows one cell, but 2 are chosen"),
    ],
)
def test_bad_options_are_refused_in_one_line(arguments: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        command.run(parse(*arguments))
    assert "\n" not in str(error.value)


def test_the_cells_that_matter_are_chosen_without_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "usable_cores", lambda: 8)

    def chosen(*arguments: object) -> set[tuple[object, ...]]:
        return {tuple(vars(cell).values()) for cell in command._cells(parse(*arguments))}

    batches = {("base", 16), ("base", 64), ("tiny", 1), ("tiny", 16)}
    forced = {(*pair, threads, lengths, 4) for pair in batches for threads in (1, 2) for lengths in ("equal", "ragged")}
    assert chosen() == forced
    assert chosen("--memory") == {("base", 64, 1, "equal", 4)}
    assert chosen("--profile") == {("base", 16, 1, "equal", 4)}
    assert chosen("--model", "run", "--threads", 4) == {("run", 16, 4, "free", 4), ("run", 64, 4, "free", 4)}
    assert chosen("--profile", "--beams", 1) == {("base", 16, 1, "equal", 1)}


def test_a_peer_that_is_not_installed_is_named_and_no_error(
    folder: str, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def local_workers(engines, size, threads, task) -> Iterator[list[LocalWorker]]:
        yield [LocalWorker(engine, build_model(size)) for engine in engines]

    monkeypatch.setattr(command, "start_workers", local_workers)
    monkeypatch.setattr(ENGINES["ctranslate2"], "package", "a-package-that-does-not-exist")
    command.run(parse("--model", folder, "--lengths", "equal", "--batch", 1, "--threads", 1, "--rounds", 1))
    printed = capsys.readouterr().out
    assert "not installed, so not measured: ctranslate2" in printed
    assert [line.split()[5] for line in printed.splitlines() if " equal " in line] == ["vaswani", "marian"]


def test_importing_the_package_does_not_import_the_benchmark() -> None:
    code = "import sys, vaswani; assert not [name for name in sys.modules if name.startswith('vaswani.benchmark')]"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.process
def test_the_command_measures_in_processes_and_writes_everything_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "speed.json"
    arguments = ["--size", "tiny", "--batch", 2, "--threads", 1, "--rounds", 2, "--lengths", "equal", "ragged"]
    command.run(parse(*arguments, "--output", path))
    printed = capsys.readouterr().out
    assert "ratio: the engine's time / vaswani's time" in printed

    contents = json.loads(path.read_text())
    assert contents["machine"]["cpu"]
    assert contents["machine"]["cores"] >= 1
    assert contents["machine"]["load"] >= 0
    assert contents["machine"]["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    assert set(contents["machine"]["packages"]) == {"vaswani", "torch", "transformers", "ctranslate2"}
    cells = contents["speed"]
    assert [(cell["batch"], cell["threads"], cell["lengths"]) for cell in cells] == [(2, 1, "equal"), (2, 1, "ragged")]
    for cell in cells:
        assert cell["peak_operations_per_second"] > 1e8
        assert cell["words"] > 0
        for engine in cell["engines"]:
            assert engine["agreement"] >= 0.95
            assert len(engine["seconds"]) == 2
            assert engine["best_seconds"] == min(engine["seconds"])
            assert engine["words_per_second"] == pytest.approx(cell["words"] / min(engine["seconds"]))
            assert 0 < engine["share_of_peak"] < 1
            assert engine["ratio_quartiles"][0] <= engine["ratio"] <= engine["ratio_quartiles"][1]
    installed = [
        name for name, engine in ENGINES.items() if not engine.is_quantised and name not in contents["missing"]
    ]
    assert [engine["engine"] for engine in cells[0]["engines"]] == installed
    assert [engine["engine"] for engine in cells[1]["engines"]] == ["vaswani", "marian"]


@pytest.mark.process
def test_an_error_in_a_process_is_told(tmp_path: Path) -> None:
    with (
        Worker("vaswani", str(tmp_path), threads=1) as worker,
        pytest.raises(ChildProcessError, match="vaswani: OSError"),
    ):
        worker.wait()


@pytest.mark.process
def test_the_death_of_a_process_is_told(folder: str) -> None:
    with Worker("vaswani", folder, threads=1) as worker:
        worker.wait()
        worker._process.kill()
        worker._process.join()
        with pytest.raises(ChildProcessError, match="process of vaswani ended with exit code -9"):
            worker.ask(measure.peak_operations)
