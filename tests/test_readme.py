"""The README: its code runs, and its commands are the ones that continuous integration runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.mark.process
def test_the_code_of_the_readme_runs_from_top_to_bottom(tmp_path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 4
    finished = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(tmp_path / "home")},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    printed = [line for line in finished.stdout.splitlines() if line.startswith("[")]
    assert printed == ["['Wo ist der Bahnhof?']", "['Guten Morgen.']"]
    assert (tmp_path / "greeter-with-code" / "modeling_vaswani.py").exists()


def test_the_readme_has_its_commands() -> None:
    commands = re.findall(r"```bash\n(.*?)\n```", README, re.DOTALL)
    assert commands == [
        'pip install -c constraints.txt . && vaswani translate "Where is the station?"',
        "vaswani train tatoeba --train train.en train.de --valid valid.en valid.de --seed 1 --output_dir run\n"
        "vaswani average run --last 5 --half --output half-way\n"
        "vaswani train tatoeba-further --model half-way --train train.en train.de --valid valid.en valid.de --seed 1 "
        "--output_dir further\n"
        "vaswani average further --last 5 --half --output translator\n"
        "vaswani evaluate --model translator --source test.en --reference test.de",
        "vaswani train multi30k --train train.lc.norm.tok.en train.lc.norm.tok.de --valid val.lc.norm.tok.en "
        "val.lc.norm.tok.de --seed 1 --resume --output_dir run\n"
        "vaswani evaluate --model run/averaged --source test_2016_flickr.lc.norm.tok.en --reference "
        "test_2016_flickr.lc.norm.tok.de --tokenize none --beams 5 --length-penalty 1.2\n"
        "vaswani train multi30k-raw --train train.en train.de --valid val.en val.de --seed 1 --resume "
        "--output_dir raw\n"
        "vaswani evaluate --model raw/averaged --source test_2016_flickr.en --reference test_2016_flickr.de "
        "--beams 5 --length-penalty 1.2",
        "for seed in 1 2; do\n"
        "  vaswani train multi30k-linear --train train.lc.norm.tok.en train.lc.norm.tok.de --valid val.lc.norm.tok.en "
        "val.lc.norm.tok.de --seed $seed --resume --output_dir linear-$seed\n"
        "  vaswani translate --model linear-$seed/averaged --input train.lc.norm.tok.en --output by-$seed.de --beams 5 "
        "--length-penalty 1.2 --resume\n"
        "done\n"
        "cat train.lc.norm.tok.en train.lc.norm.tok.en train.lc.norm.tok.en > three.en\n"
        "cat train.lc.norm.tok.de by-1.de by-2.de > three.de\n"
        "for seed in 1 2; do\n"
        "  vaswani train multi30k-distill --model linear-$seed/averaged --train three.en three.de --valid "
        "val.lc.norm.tok.en val.lc.norm.tok.de --seed $seed --resume --output_dir distilled-$seed\n"
        "  vaswani train multi30k-finish --model distilled-$seed/averaged --train three.en three.de --valid "
        "val.lc.norm.tok.en val.lc.norm.tok.de --seed $seed --resume --output_dir finished-$seed\n"
        "  vaswani evaluate --model finished-$seed/averaged --source test_2016_flickr.lc.norm.tok.en --reference "
        "test_2016_flickr.lc.norm.tok.de --tokenize none --beams 5 --length-penalty 1.2\n"
        "done",
        "pip install -c constraints.txt . && vaswani demo",
        'vaswani translate "The friendly singer had sent the bad hazelnut cake to the beautiful queen today." '
        "--model vaswani-demo/averaged\n"
        "vaswani translate --model run/averaged --input test.en --output test.de\n"
        "vaswani evaluate --hypothesis test.de --reference reference.de",
        "vaswani train --train train.en train.de --valid valid.en valid.de --preset base "
        "--average_last 5 --output_dir run",
        "vaswani benchmark --sentences test_2016_flickr.en --chart speed.png",
        "vaswani benchmark --task training --tokens 2000 --peers marian --sentences train.en --targets train.de "
        "--chart training.png",
        "vaswani card run/averaged --about about.yaml\nvaswani push run/averaged your-name/your-model",
        'vaswani translate "Good morning." --model your-name/your-model',
        'pip install -c constraints.txt -e ".[test]" && pytest',
    ]
