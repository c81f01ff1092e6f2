"""What it costs to import the package, and that what it puts off still happens."""

import statistics

import pytest

from tests.test_auto import run
from vaswani.benchmark.startup import STAGES, run_startup, startup_table

BASE = "from transformers import PreTrainedModel, GenerationMixin, PreTrainedTokenizerFast"
AUTO = "from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline"
HEAVY = (
    *("transformers.pipelines", "transformers.trainer", "datasets", "evaluate", "matplotlib", "sacrebleu"),
    *("pandas", "pyarrow"),
)
REGISTERED = """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.pipelines import PIPELINE_REGISTRY
    assert "vaswani" in CONFIG_MAPPING
    assert AutoModel._model_mapping[CONFIG_MAPPING["vaswani"]].__name__ == "VaswaniModel"
    assert AutoModelForSeq2SeqLM._model_mapping[CONFIG_MAPPING["vaswani"]].__name__ == "VaswaniForConditionalGeneration"
    assert type(AutoTokenizer.from_pretrained(sys.argv[1])).__name__ == "VaswaniTokenizer"
    assert PIPELINE_REGISTRY.supported_tasks["vaswani-translation"]["impl"].__name__ == "VaswaniTranslationPipeline"
    answers = pipeline("vaswani-translation", model=sys.argv[1])(["seven", "one"], num_beams=1, max_new_tokens=3)
    assert [list(answer) for answer in answers] == [["translation_text"]] * 2
    print("all registered")
"""


@pytest.mark.process
def test_importing_vaswani_adds_less_than_50_milliseconds_to_transformers() -> None:
    code = f"import time\n{BASE}\nstart = time.process_time()\nimport vaswani\nprint(time.process_time() - start)"
    added = [float(run(code, OMP_NUM_THREADS="1").stdout) for _ in range(5)]
    assert statistics.median(added) < 0.05


@pytest.mark.process
@pytest.mark.parametrize("also", ["", "vaswani.VaswaniForConditionalGeneration, vaswani.VaswaniTokenizer"])
def test_importing_vaswani_loads_no_heavy_package(also: str) -> None:
    code = f"import vaswani, sys\n{also}\nprint([name for name in {HEAVY} if name in sys.modules])"
    assert run(code).stdout.strip() == "[]"


@pytest.mark.process
@pytest.mark.parametrize(
    "imports",
    [
        ["import vaswani", AUTO],
        [AUTO, "import vaswani"],
        ["import vaswani.inference.pipeline", AUTO],
        ["from transformers import pipeline", "import vaswani.inference.pipeline", AUTO],
        ["from vaswani import *", AUTO],
    ],
    ids=["first", "last", "pipeline first", "pipeline last", "all names"],
)
def test_everything_is_registered_in_whatever_order_modules_are_imported(imports: list[str], saved_folder: str) -> None:
    finished = run("\n".join([f"    {line}" for line in ("import sys", *imports)]) + REGISTERED, saved_folder)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == "all registered"
    assert "warn" not in finished.stderr.lower()


@pytest.mark.process
def test_a_pipeline_is_found_by_a_program_that_never_imports_vaswani(saved_folder: str) -> None:
    code = """
        import sys
        from transformers import pipeline
        assert "vaswani" not in sys.modules
        print(type(pipeline("vaswani-translation", model=sys.argv[1])).__name__)
    """
    finished = run(code, saved_folder)
    assert finished.stdout.strip() == "VaswaniTranslationPipeline", finished.stderr


def test_names_that_are_loaded_when_used_are_listed_and_others_are_refused() -> None:
    import vaswani

    assert set(vaswani.__all__) <= set(dir(vaswani))
    assert vaswani.Translator.__module__ == "vaswani.inference.translator"
    assert vaswani.training.__name__ == "vaswani.training"
    with pytest.raises(AttributeError, match=r"module 'vaswani' has no attribute 'nonsense'"):
        vaswani.nonsense  # noqa: B018


@pytest.mark.process
def test_the_start_is_measured_stage_by_stage() -> None:
    measured = run_startup(imports=1, starts=2)
    assert list(measured["start"]) == list(STAGES)
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in measured["start"].values())
    (added,), (with_classes,) = measured["import"]["cpu"], measured["import"]["with_classes"]
    assert 0 < added < with_classes
    table = "\n".join(startup_table(measured))
    assert all(f"\n{stage} " in table for stage in (*STAGES, "all"))


def test_the_table_of_a_start_has_medians_and_shares_of_the_whole() -> None:
    seconds = {stage: [1.0, 2.0, 9.0] for stage in STAGES}
    imports = {"transformers": [3.0], "cpu": [0.004], "wall": [0.005], "with_classes": [0.06]}
    table = startup_table({"import": imports, "start": seconds})
    assert table[0].startswith("`import vaswani` adds 4.0 ms of processor time (5.0 ms by the clock) to the 3,000 ms")
    rows = {line.split()[0]: line.split()[1:3] for line in table if line.split()}
    assert all(rows[stage] == ["2.000", "17%"] for stage in STAGES)
    assert rows["all"][0] == "12.000"
