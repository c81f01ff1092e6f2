"""How time and memory are measured against the length of sequences, the batch and the beam."""

import argparse
import json
import math
from pathlib import Path

import pytest

from vaswani.benchmark import command
from vaswani.benchmark.command import add_arguments, run
from vaswani.benchmark.growth import (
    LEAST_MEMORY,
    Series,
    _job,
    exponent,
    formula,
    growth_as_json,
    growth_table,
    run_growth,
)
from vaswani.benchmark.startup import STAGES
from vaswani.benchmark.workload import config_of
from vaswani.cli import main

VALUES = [16, 32, 64, 128]


def series(power: float, memory: int = 10 * LEAST_MEMORY) -> Series:
    seconds = [value**power for value in VALUES]
    operations = [formula(value, 128) for value in VALUES]
    return Series("generation", "words", "translation", VALUES, seconds, [memory] * 4, operations)


def test_the_exponent_is_the_power_of_the_last_two_points() -> None:
    assert exponent(VALUES, [7 * value**1.5 for value in VALUES]) == pytest.approx(1.5)
    assert exponent(VALUES, [1, 1, 1, 4]) == pytest.approx(2)
    assert math.isnan(exponent(VALUES, [1, 1, 0, 4]))


def test_the_formula_is_quadratic_for_long_sequences_and_linear_for_short_ones() -> None:
    assert formula(3, 5) == 9 * 5 + 3 * 25
    assert exponent([10**6, 10**7], [formula(n, 64) for n in (10**6, 10**7)]) == pytest.approx(2, abs=1e-3)
    assert exponent([1, 2], [formula(n, 10**6) for n in (1, 2)]) == pytest.approx(1, abs=1e-3)


def test_the_table_states_the_powers_and_where_memory_is_too_little_to_tell() -> None:
    table = growth_table([series(1.25), series(2, memory=LEAST_MEMORY - 1)])
    assert table[-2].endswith(
        "from 64 to 128 tokens, time grows with the power 1.25, memory with 0.00; "
        f"Table 1 grows with {exponent(VALUES, series(1).formula):.2f}"
    )
    assert "the power 2.00, memory is too little to tell;" in table[-1]
    first, second = json.loads(json.dumps(growth_as_json([series(1.25), series(2, memory=0)])))
    assert first["exponents"]["seconds"] == pytest.approx(1.25)
    assert first["exponents"]["memory"] == 0
    assert second["exponents"]["memory"] is None


def test_sequences_have_the_length_that_is_asked_for_and_a_short_warm_up() -> None:
    config = config_of("tiny")
    job = _job("generation", 40, 3, 8, config)
    assert [len(source) for source in job.sources] == job.targets == [40] * 3
    special = {config.pad_token_id, config.bos_token_id, config.eos_token_id, config.decoder_start_token_id}
    assert not special & {token for source in job.sources for token in source[:-1]}
    assert {source[-1] for source in job.sources} == {config.eos_token_id}
    assert job.beams == job.smallest().beams == 8
    assert len(job.smallest().sources) == 1
    assert len(job.smallest().sources[0]) == job.smallest().targets[0] == 4
    training = _job("training", 40, 3, 1, config)
    assert training.lengths() == ([40] * 3, [40] * 3)
    assert training.smallest().lengths() == ([4], [4])


@pytest.mark.process
def test_time_and_memory_are_measured_at_every_point() -> None:
    found = run_growth(lengths=[8, 256], batches=[1], beams=[2], rounds=1)
    assert [(each.task, each.quantity, each.values) for each in found] == [
        ("generation", "words", [8, 256]),
        ("generation", "batch", [1]),
        ("generation", "beam", [2]),
        ("training", "words", [8, 256]),
    ]
    for each in found:
        assert len(each.seconds) == len(each.memory) == len(each.formula) == len(each.values)
        assert min(each.seconds) > 0
    for each in (found[0], found[-1]):
        assert each.seconds[1] > 3 * each.seconds[0]
        assert each.memory[1] > each.memory[0]
    assert found[-1].memory[1] > LEAST_MEMORY


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--growth", "growth.svg"], r"--growth growth.svg: .* must end with .png"),
        (["--growth", "nowhere/growth.png"], r"--growth nowhere/growth.png: there is no folder nowhere"),
        (["--growth", "growth.png", "--size", "tiny", "base"], "--growth measures one model"),
        (["--startup", "--chart", "speed.png"], "--chart draws speeds"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments: list[str], message: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(ValueError, match=message):
        run(parser.parse_args(arguments))


def test_the_command_reports_draws_and_writes_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    imports = {"transformers": [3.0], "cpu": [0.004], "wall": [0.005], "with_classes": [0.06]}
    startup = {"import": imports, "start": {stage: [1.0] for stage in STAGES}}
    monkeypatch.setattr(command, "run_growth", lambda *_, **__: [series(1.25)])
    monkeypatch.setattr(command, "run_startup", lambda **_: startup)
    output, picture = tmp_path / "output.json", tmp_path / "growth.png"
    main(["benchmark", "--growth", str(picture), "--output", str(output)])
    assert json.loads(output.read_text())["growth"]["series"][0]["exponents"]["seconds"] == pytest.approx(1.25)
    assert picture.is_file()
    assert "time grows with the power 1.25" in capsys.readouterr().out
    main(["benchmark", "--startup", "--output", str(output)])
    assert json.loads(output.read_text())["startup"] == startup
    assert "`import vaswani` adds 4.0 ms" in capsys.readouterr().out
