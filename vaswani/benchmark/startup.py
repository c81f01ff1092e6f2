"""The start: what an import of this package costs, and how long a fresh process takes to its first translation."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..data.grammar import Grammar
from ..data.progress_bars import hidden_progress_bars
from ..modeling_vaswani import VaswaniForConditionalGeneration
from ..presets import preset
from .report import aligned
from .workload import learn_tokenizer

# How many fresh processes are measured.
IMPORTS, STARTS = 10, 5
# Sentences that the tokenizer is learnt from; the first is translated.
SENTENCES = 1000

IMPORT = """
import json, time
from transformers import PreTrainedModel, GenerationMixin, PreTrainedTokenizerFast
cpu, wall = time.process_time(), time.perf_counter()
import vaswani
seconds = {"transformers": cpu, "cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
from vaswani import VaswaniForConditionalGeneration, VaswaniTokenizer
print(json.dumps({**seconds, "with_classes": time.process_time() - cpu}))
"""

# The command, with the imports that it makes anyway brought forward, so that they can be told apart.
START = """
import time
times = {"interpreter": time.perf_counter()}
import json, sys
sentence, folder, report = sys.argv[1:]
import torch
times["torch"] = time.perf_counter()
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationMixin, PreTrainedModel, PreTrainedTokenizerFast
times["transformers"] = time.perf_counter()
import vaswani.cli, vaswani.modeling_vaswani, vaswani.tokenization_vaswani
from vaswani.inference.translator import Translator
times["vaswani"] = time.perf_counter()
load = Translator.from_pretrained

def load_and_note(*arguments, **options):
    translator = load(*arguments, **options)
    times["loading"] = time.perf_counter()
    return translator

Translator.from_pretrained = load_and_note
vaswani.cli.main(["translate", sentence, "--model", folder])
sys.stdout.flush()
times["translation"] = time.perf_counter()
with open(report, "w") as file:
    json.dump(times, file)
"""

# What each stage is, in their order.
STAGES = {
    "interpreter": "Python itself, until the first line of the program",
    "torch": "import of torch",
    "transformers": "import of transformers: base classes and Auto classes",
    "vaswani": "import of vaswani: command line, model, tokenizer, translation",
    "loading": "model and tokenizer from their folder",
    "translation": "the first sentence, written",
}


def run_startup(imports: int = IMPORTS, starts: int = STARTS) -> dict[str, Any]:
    """Measure imports and starts, each time in a fresh process.

    Parameters
    ----------
    imports : int, default=IMPORTS
        How many imports.
    starts : int, default=STARTS
        How many times the command translates a sentence with a tiny model that was just saved.

    Returns
    -------
    dict[str, Any]
        Seconds of every round: under `import` those of the processor for transformers (`transformers`), for vaswani
        after it (`cpu`), and for that together with its model and tokenizer (`with_classes`), which are loaded when
        they are used; and those of the clock for vaswani (`wall`). Under `start`, those of each of `STAGES`.

    Notes
    -----
    A stage ends where the next one begins, and the first begins where this process starts the other: their sum is the
    time to the first translation. Random weights do not end their output, so it has all tokens that the paper's
    generation configuration allows, 50 more than its source.
    """
    measured: dict[str, Any] = {"import": [json.loads(_python(IMPORT)) for _ in range(imports)], "start": []}
    with tempfile.TemporaryDirectory() as folder:
        sentence = _save_tiny_model(folder)
        for _ in range(starts):
            measured["start"].append(_measure_start(sentence, folder))
    return {
        name: {key: [each[key] for each in rounds] for key in (rounds[0] if rounds else ())}
        for name, rounds in measured.items()
    }


def _python(code: str, *arguments: str) -> str:
    """Run code in a fresh process, with the packages that this one has, and return what it writes."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if finished.returncode != 0:
        last_lines = " ".join(finished.stderr.split("\n")[-3:])
        raise ChildProcessError(f"A fresh process ended with exit code {finished.returncode}: {last_lines}")
    return finished.stdout


def _save_tiny_model(folder: str) -> str:
    """Save a tiny model with random weights and its tokenizer; return a sentence to translate."""
    texts = [pair["en"] for pair in Grammar().corpus(SENTENCES)]
    tokenizer = learn_tokenizer("tiny", texts)
    tokenizer.save_pretrained(folder)
    with hidden_progress_bars():
        VaswaniForConditionalGeneration(preset("tiny", vocab_size=len(tokenizer))).save_pretrained(folder)
    return texts[0]


def _measure_start(sentence: str, folder: str) -> dict[str, float]:
    """Translate a sentence in a fresh process, and return the seconds of each stage."""
    report = Path(folder, "times.json")
    last = time.perf_counter()  # the clock of the whole machine, so that the other process has the same
    _python(START, sentence, folder, str(report))
    seconds = {}
    for stage, end in json.loads(report.read_text()).items():
        seconds[stage], last = end - last, end
    return seconds


def startup_table(measured: dict[str, Any]) -> list[str]:
    """Write imports and starts as a table.

    Parameters
    ----------
    measured : dict[str, Any]
        From `run_startup`.

    Returns
    -------
    list[str]
        Lines of text.
    """
    imports, stages = measured["import"], measured["start"]
    totals = [sum(rounds) for rounds in zip(*stages.values(), strict=True)]
    total = statistics.median(totals)
    rows = [["stage", "s", "share", "what"]]
    for stage, rounds in stages.items():
        median = statistics.median(rounds)
        rows.append([stage, f"{median:.3f}", f"{median / total:.0%}", STAGES[stage]])
    rows.append(["all", f"{total:.3f}", "", f"from the start of the process; {min(totals):.3f} to {max(totals):.3f}"])
    base, added, wall, classes = (1000 * statistics.median(rounds) for rounds in imports.values())
    return [
        f"`import vaswani` adds {added:.1f} ms of processor time ({wall:.1f} ms by the clock) to the {base:,.0f} ms of",
        f"transformers' base classes, {classes:.1f} ms where its model and tokenizer are used; median of "
        f"{len(imports['cpu'])} fresh processes",
        "",
        "From the start of a process to the first sentence of `vaswani translate` (tiny, one sentence):",
        *aligned(rows, [0, 3]),
        f"s: median of {len(totals)} fresh processes; share: of the median of all",
    ]


__all__ = ["STAGES", "run_startup", "startup_table"]
