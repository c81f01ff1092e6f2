"""The benchmark of training: peers compute the same loss, batches are what they say, and the command draws a chart."""

import ctypes
import gc
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.benchmark.test_generation import LocalWorker, parse, spoil
from tests.conftest import ragged_batch, tiny_config, tiny_model
from vaswani import VaswaniTokenizer
from vaswani.benchmark import command, measure, report
from vaswani.benchmark.loops import LOOPS, LoopCell, LoopTime, loop_table, run_loop
from vaswani.benchmark.measure import measure_training_cell, peak_memory, shared_losses
from vaswani.benchmark.pairs import Pair, TrainingCell, TrainingJob, make_training_job, tokenized_pairs
from vaswani.benchmark.training_peers import TRAINERS, TorchTransformer
from vaswani.benchmark.workload import build_model, training_operations

CARRIED = [name for name, engine in TRAINERS.items() if engine.is_comparable and name != "vaswani"]


def random_pairs(count: int = 60, vocab_size: int = 41) -> list[Pair]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 12, (count, 2), generator=generator).tolist()
    sides = [[[*torch.randint(3, vocab_size, (n,), generator=generator).tolist(), 1] for n in pair] for pair in lengths]
    return [{"input_ids": source, "labels": target} for source, target in sides]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: VaswaniTokenizer) -> str:
    """Return a folder with a model that has dropout, and a tokenizer."""
    path = tmp_path_factory.mktemp("training")
    tiny_model(vocab_size=len(tokenizer), dropout=0.3, attention_dropout=0.2).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rounds and the measurement of the peak take no time."""
    monkeypatch.setattr(measure, "ROUND_SECONDS", 0.0)
    monkeypatch.setattr(measure, "PEAK_WIDTH", 64)


@pytest.mark.parametrize("changes", [{}, {"decoder_layers": 3}, {"layer_norm_eps": 0.1}])
def test_torchs_transformer_with_the_converted_weights_has_the_same_loss_and_gradient(
    changes: dict[str, object],
) -> None:
    model, batch = tiny_model(attention_bias=True, label_smoothing=0.0, **changes).train(), ragged_batch()
    theirs = TorchTransformer(model)
    for module in theirs.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    logits = theirs(
        batch["input_ids"], batch["attention_mask"], model.prepare_decoder_input_ids_from_labels(batch["labels"])
    )
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    ours = model(**batch).loss
    torch.testing.assert_close(loss, ours)
    loss.backward()
    ours.backward()
    norms = [
        torch.nn.utils.get_total_norm([parameter.grad for parameter in each.parameters()]) for each in (theirs, model)
    ]
    torch.testing.assert_close(*norms, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(
        theirs.embedding.weight.grad, model.get_input_embeddings().weight.grad, rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize("peer", CARRIED)
@pytest.mark.parametrize("kind", ["random", "budget"])
def test_losses_of_peers_with_the_converted_weights_agree_even_smoothed(peer: str, kind: str) -> None:
    model, job = tiny_model(), make_training_job(random_pairs(), kind, 60)
    ours, theirs = (TRAINERS[name](model, 1).losses(job.compared()) for name in ("vaswani", peer))
    assert theirs == pytest.approx(ours, rel=1e-5)
    assert len(set(ours)) == len(ours) > 3


def test_vaswanis_loss_in_the_benchmark_is_that_of_the_model() -> None:
    model, job = tiny_model(), make_training_job(random_pairs(), "random", 60)
    engine = TRAINERS["vaswani"](model, 1)
    model.train()
    for loss, batch in zip(engine.losses(job), engine._padded(job), strict=True):
        assert loss == pytest.approx(model(**batch).loss.item(), rel=1e-5)  # smoothed by 0.1, dropout 0 in this one


@pytest.mark.parametrize("name", TRAINERS)
def test_steps_drop_out_and_compute_gradients_but_leave_the_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_training_job(random_pairs(), "random", 60)
    engine = TRAINERS[name](tiny_model(dropout=0.3), 1)
    before = {key: weight.clone() for key, weight in engine.network.state_dict().items()}
    losses = engine.losses(job)
    assert engine.network.training
    [batch, *_] = engine._padded(job)
    assert engine._loss(batch).item() != engine._loss(batch).item()  # dropout is on again
    assert {getattr(module, attribute) for module, attribute in engine._dropouts} == {0.1}

    learnt = [parameter for parameter in engine.network.parameters() if parameter.requires_grad]
    gradients: list[bool] = []
    adam_step = engine._adam.step

    def step() -> None:
        gradients.append(all(parameter.grad is not None for parameter in learnt))
        adam_step()

    monkeypatch.setattr(engine._adam, "step", step)
    engine.prepare(job)()
    assert gradients == [True] * len(job.batches)
    moments = [state["exp_avg"].abs().sum() for state in engine._adam.state.values()]
    assert len(moments) == len(learnt)
    assert sum(moments) > 0
    assert all(parameter.grad is None for parameter in learnt)
    torch.testing.assert_close(dict(engine.network.state_dict()), before, rtol=0, atol=0)
    assert engine.losses(job) == losses


def test_torch_drops_out_only_what_the_paper_does() -> None:
    engine = TRAINERS["torch"](tiny_model(encoder_layers=2, decoder_layers=3), 1)
    assert len(engine._dropouts) == 1 + 2 * 2 + 3 * 3  # the embedding, and the output of every sub-layer


@pytest.mark.parametrize("name", TRAINERS)
def test_engines_have_the_same_dimensions(name: str) -> None:
    model = tiny_model()
    network = TRAINERS[name](model, 1).network
    ours, theirs = (sum(weight.numel() for weight in each.parameters() if weight.ndim > 1) for each in (model, network))
    positions = 2 * 1026 * model.config.d_model if name == "bart" else 0  # learnt, two of them offsets
    if name == "marian":  # its sines are parameters without gradient
        positions = 2 * 1024 * model.config.d_model
    assert theirs - positions == ours


@pytest.mark.parametrize("peer", CARRIED)
def test_spoilt_weights_fail_the_check_and_are_not_timed(peer: str, folder: str, quick: None) -> None:
    cell = TrainingCell(folder, 60, 1, "random")
    workers = [
        LocalWorker("vaswani", build_model(folder), TRAINERS),
        LocalWorker(peer, build_model(folder), TRAINERS),
        LocalWorker(peer, spoil(build_model(folder)), TRAINERS),
        LocalWorker("bart", build_model(folder), TRAINERS),
    ]
    result = measure_training_cell(workers, cell, random_pairs(), peak=1e9, rounds=3)
    assert [len(timing.seconds) for timing in result.timings] == [3, 3, 0, 3]
    assert result.timings[1].agreement == pytest.approx(1, abs=1e-4)
    assert result.timings[2].agreement is not None
    assert result.timings[2].agreement < 0.999
    assert result.timings[3].agreement is None
    message = report.complaint([result])
    assert message is not None
    assert f"Losses must agree for 99.9% before times are compared: {peer} agrees for" in message
    table = "\n".join(report.speed_table([result]))
    assert "losses differ" in table
    assert "not compared" in table


def test_a_wrong_engine_of_the_benchmarks_size_is_told_by_its_losses() -> None:
    job = make_training_job(tokenized_pairs("tiny", None, None), "random", 300)
    ours = TRAINERS["vaswani"](build_model("tiny"), 1).losses(job.compared())
    theirs = TRAINERS["torch"](spoil(build_model("tiny")), 1).losses(job.compared())
    assert shared_losses(ours, ours) == 1
    assert shared_losses(theirs, ours) < 0.995


def test_losses_are_compared_at_their_largest_difference() -> None:
    assert shared_losses([1.0, 2.0, 4.2], [1.0, 2.0, 4.0]) == pytest.approx(0.95)


def test_operations_of_a_step_are_those_counted_by_hand() -> None:
    config = tiny_config(
        vocab_size=7, d_model=4, d_ff=6, num_attention_heads=1, d_k=4, d_v=4, encoder_layers=1, decoder_layers=1
    )
    encoder = 3 * (4 * 4 * 4 + 2 * 4 * 6) + 3 * 3 * 8  # projections and feed-forward of 3 tokens, 3 x 3 pairs of tokens
    decoder = 2 * (4 * 4 * 4 + 2 * 4 * 6) + (1 + 2) * 8  # a token sees itself and those before
    source = 2 * (2 * 4 * 4) + 3 * (2 * 4 * 4) + 2 * 3 * 8  # query and output of 2 tokens, key and value of 3
    assert training_operations(config, [3], [2]) == 3 * 2 * (encoder + decoder + source + 2 * 4 * 7)


def test_operations_of_a_step_are_those_that_torch_counts() -> None:
    model = tiny_model(label_smoothing=0.0).train()
    model.set_attn_implementation("eager")
    model.set_fast_paths(False)
    config, source, target = model.config, 5, 3
    labels = torch.full((1, target), 3)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.full((1, source), 3), labels=labels).loss.backward()
    unseen = target * (target - 1) // 2  # torch forms the products with later tokens too
    of_unseen = 3 * 2 * unseen * config.decoder_layers * config.num_attention_heads * (config.d_k + config.d_v)
    assert training_operations(config, [source], [target]) == counter.get_total_flops() - of_unseen
    assert training_operations(config, [source] * 2, [target] * 2) == 2 * training_operations(
        config, [source], [target]
    )


def test_random_batches_have_the_tokens_and_are_always_the_same() -> None:
    pairs = tokenized_pairs("tiny", None, None)
    job = make_training_job(pairs, "random", 500)
    longest = max(len(pair["labels"]) for pair in pairs)
    assert len(job.batches) == 3
    for batch in job.batches:
        assert 500 <= sum(len(pair["labels"]) for pair in batch) < 500 + longest
    assert [pair for batch in job.batches for pair in batch] == pairs[: sum(map(len, job.batches))]
    assert job == make_training_job(tokenized_pairs("tiny", None, None), "random", 500)


def test_budget_batches_fit_with_their_padding_and_are_always_the_same() -> None:
    pairs = tokenized_pairs("tiny", None, None)
    job, random_job = (make_training_job(pairs, kind, 500) for kind in ("budget", "random"))

    def padding(batches: list[list[Pair]]) -> float:
        sides = [[len(pair[side]) for pair in batch] for batch in batches for side in ("input_ids", "labels")]
        return 1 - sum(map(sum, sides)) / sum(max(side) * len(side) for side in sides)

    for batch in job.batches:
        for side in ("input_ids", "labels"):
            assert max(len(pair[side]) for pair in batch) * len(batch) <= 500
        assert max(max(len(pair[side]) for pair in batch) * len(batch) for side in ("input_ids", "labels")) > 350
    assert padding(job.batches) < 0.5 * padding(random_job.batches)
    assert job == make_training_job(tokenized_pairs("tiny", None, None), "budget", 500)


def test_too_few_pairs_for_the_tokens_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"--tokens 400: the pairs, 60, make \d batches .*; 3 are needed"):
        make_training_job(random_pairs(), "random", 400)
    assert len(make_training_job(random_pairs(), "random", 100, count=1).batches) == 1


def test_a_job_has_its_lengths_and_the_batches_to_compare() -> None:
    pairs = random_pairs(30)
    job = TrainingJob([pairs[:25], pairs[25:]])
    assert job.smallest().batches == [pairs[:1]]
    assert job.compared().batches == [pairs[:25], *(pairs[start : start + 2] for start in range(0, 16, 2))]
    assert job.lengths() == ([len(pair["input_ids"]) for pair in pairs], [len(pair["labels"]) for pair in pairs])


def test_pairs_are_those_of_two_files(tmp_path: Path) -> None:
    sources, targets = tmp_path / "sources", tmp_path / "targets"
    numbers = range(50)
    sources.write_text("".join(f"number {n} it is\n" if n % 7 else "\n" for n in numbers))
    targets.write_text("".join(f"number {n} it is\n" for n in numbers))
    pairs = tokenized_pairs("tiny", sources, targets)
    assert len(pairs) == sum(1 for n in numbers if n % 7)
    assert all(pair["input_ids"] == pair["labels"] and pair["labels"][-1] == 1 for pair in pairs)
    targets.write_text("one line\n")
    with pytest.raises(ValueError, match="has 50 lines, but"):
        tokenized_pairs("tiny", sources, targets)


def test_memory_is_measured_for_a_step() -> None:
    model = tiny_model(vocab_size=20_000)
    job = make_training_job(random_pairs(400, vocab_size=400), "budget", 1000, count=1)
    logits = 4 * 20_000 * sum(len(pair["labels"]) for pair in job.batches[0])

    def peak(name: str) -> float:
        trainer = TRAINERS[name](model, 1)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what other tests left in this process would be taken again, unseen
        return peak_memory(trainer, job)

    ours, theirs = peak("vaswani"), peak("marian")
    assert theirs > 2 * logits
    assert 0 < ours < theirs / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", 0], "--tokens 0: it must be at least 1"),
        (["--task", "training", "--batch", 4], "--batch is for generation, but --task is training"),
        (["--task", "generation", "--tokens", 4], "--tokens is for training, but --task is generation"),
        (["--task", "training", "generation", "--profile"], "--profile shows generation only"),
        (["--targets", __file__], "--targets has the translations of --sentences: give both"),
        (["--task", "training", "--sentences", __file__], "training needs their translations too, --targets"),
        (["--sentences", __file__, "--targets", "nowhere"], "--targets nowhere: there is no such file"),
        (["--chart", "nowhere/a.png"], "--chart nowhere/a.png: there is no folder nowhere"),
        (["--chart", "a.svg"], r"--chart a.svg: the picture is a PNG, so the name must end with \.png"),
        (
            ["--chart", "a.png", "--memory"],
            "--chart draws speeds: give it without --memory, --profile, --startup, --growth and --loops",
        ),
        (["--size", "tiny", "--tokens", 10**6, "--threads", 1], "--tokens 1000000: the pairs, 5000, make 0 batches"),
    ],
)
def test_bad_options_are_refused_in_one_line(arguments: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        command.run(parse(*arguments))
    assert "\n" not in str(error.value)


def test_the_cells_that_matter_are_chosen_without_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "usable_cores", lambda: 8)

    def chosen(*arguments: object) -> set[tuple[object, ...]]:
        return {tuple(vars(cell).values()) for cell in command._training_cells(parse(*arguments))}

    kinds = ("random", "budget")
    sizes = ("base", "tiny")
    assert chosen() == {(size, 2000, threads, kind) for size in sizes for threads in (1, 2) for kind in kinds}
    assert chosen("--memory") == {("base", 8000, 1, "budget")}
    assert chosen("--size", "tiny", "--threads", 4, "--batches", "random", "--tokens", 9) == {("tiny", 9, 4, "random")}


@pytest.mark.parametrize(
    ("arguments", "tasks"),
    [
        ([], ["generation", "training"]),
        (["--size", "tiny", "--rounds", 1], ["generation", "training"]),
        (["--task", "training"], ["training"]),
        (["--task", "training", "generation"], ["generation", "training"]),
        (["--batch", 4], ["generation"]),
        (["--tokens", 100], ["training"]),
        (["--tokens", 100, "--lengths", "equal"], ["generation", "training"]),
        (["--sentences", "file"], ["generation"]),
        (["--sentences", "file", "--targets", "file"], ["training"]),
        (["--memory"], ["generation"]),
        (["--memory", "--task", "training"], ["training"]),
    ],
)
def test_options_choose_the_tasks(arguments: list[object], tasks: list[str]) -> None:
    assert command._tasks(parse(*arguments)) == tasks


def test_engines_are_those_that_can_do_the_task() -> None:
    options = parse()
    assert command._engines(options, "generation", []) == ["vaswani", "marian", "ctranslate2"]
    assert command._engines(options, "training", []) == ["vaswani", "marian", "bart", "torch"]
    assert command._engines(parse("--memory"), "training", []) == ["vaswani", "marian"]
    assert command._engines(parse("--peers", "torch"), "generation", []) == ["vaswani"]
    notes = report.task_headline("training", {"tiny": 3.0}, command.PEERS)
    assert "ctranslate2 is left out of training: it only translates" in notes
    notes = report.task_headline("generation", {"tiny": 3.0}, command.PEERS)
    assert [line.split()[0] for line in notes if "left out" in line] == ["bart", "torch"]


def read_png(path: Path) -> tuple[int, int, int]:
    """Return width, height and the number of colours of a picture."""
    from matplotlib import pyplot

    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    pixels = pyplot.imread(path)
    assert pixels.shape[:2] == (height, width)
    return width, height, len({tuple(pixel) for pixel in pixels[::3, ::3].reshape(-1, pixels.shape[2]).tolist()})


def test_the_command_measures_both_tasks_and_draws_them(
    folder: str, quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def local_workers(engines, size, threads, task) -> Iterator[list[LocalWorker]]:
        yield [LocalWorker(engine, build_model(size), measure.TASKS[task]) for engine in engines]

    monkeypatch.setattr(command, "start_workers", local_workers)
    arguments = ["--model", folder, "--lengths", "equal", "--batch", 2, "--threads", 1, "--rounds", 1, "--tokens", 200]
    arguments += ["--batches", "budget", "--peers", "marian", "torch"]
    command.run(parse(*arguments, "--output", tmp_path / "speed.json", "--chart", tmp_path / "speed.png"))
    printed = capsys.readouterr().out
    assert "torch is left out of generation: it has no beam search" in printed
    assert "tokens/s" in printed
    contents = json.loads((tmp_path / "speed.json").read_text())
    assert [engine["engine"] for engine in contents["speed"][0]["engines"]] == ["vaswani", "marian"]
    assert [engine["engine"] for engine in contents["training"][0]["engines"]] == ["vaswani", "marian", "torch"]
    assert read_png(tmp_path / "speed.png")[2] > 10


@pytest.mark.process
def test_the_command_measures_training_in_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--task", "training", "--size", "tiny", "--threads", 1, "--rounds", 1, "--tokens", 60]
    arguments += ["--batches", "random"]
    command.run(parse(*arguments, "--output", tmp_path / "speed.json", "--chart", tmp_path / "speed.png"))
    assert "ctranslate2 is left out of training" in capsys.readouterr().out
    contents = json.loads((tmp_path / "speed.json").read_text())
    assert contents["mean_pair_tokens"]["tiny"] > 10
    [cell] = contents["training"]
    assert (cell["size"], cell["tokens"], cell["threads"], cell["batches"]) == ("tiny", 60, 1, "random")
    assert [engine["engine"] for engine in cell["engines"]] == list(TRAINERS)
    for engine in cell["engines"]:
        assert (engine["agreement"] is None) == (engine["engine"] == "bart")
        assert len(engine["seconds"]) == 1
        assert engine["words_per_second"] == pytest.approx(cell["words"] / min(engine["seconds"]))
        assert engine["share_of_peak"] == pytest.approx(
            cell["operations"] / engine["best_seconds"] / cell["peak_operations_per_second"]
        )
    assert read_png(tmp_path / "speed.png")[2] > 10


# --- whole loops


def test_whole_loops_are_timed_and_their_overhead_is_the_time_outside_steps() -> None:
    pairs = [{"input_ids": [5] * n + [1], "labels": [6] * n + [1]} for n in (3, 4, 5, 6) * 30]
    for loop in LOOPS:
        timing = run_loop(loop, LoopCell("tiny", 60, 1), pairs)
        assert timing.tokens > 6 * 60
        assert 0 < timing.step_seconds < timing.seconds
        assert 0 < timing.overhead < 1


def test_the_table_of_loops_has_ratios_of_tokens_a_second() -> None:
    ours, theirs = LoopTime(2.0, 400, 1.5), LoopTime(4.0, 200, 3.9)
    times = {loop: [ours if loop == LOOPS[0] else theirs] for loop in LOOPS}
    header, first, second, *_ = loop_table([(LoopCell("tiny", 60, 1), times)])
    assert header.split() == ["size", "tokens", "threads", "loop", "ratio", "tokens/s", "overhead"]
    assert first.split()[-3:] == ["1.00", "200", "25.0%"]
    assert second.split()[-3:] == ["4.00", "50", "2.5%"]
