"""Auto classes: after `import vaswani`, without it, and with the code that a folder carries."""

import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

import vaswani
from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniModel, VaswaniTokenizer

ROOT = Path(vaswani.__file__).parent.parent

LOAD_AND_PRINT = """
    from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer
    import json, sys, torch
    folder, options = sys.argv[1], json.loads(sys.argv[2])
    config = AutoConfig.from_pretrained(folder, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    base = AutoModel.from_pretrained(folder, **options)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, **options)
    encoded = tokenizer("three hundred and twelve", return_tensors="pt")
    base_output = base(**encoded).last_hidden_state.sum().item()
    print(json.dumps({
        "classes": [type(loaded).__name__ for loaded in (config, tokenizer, base, model)],
        "modules": sorted({type(loaded).__module__.split(".")[0] for loaded in (config, base, model)}),
        "ids": encoded["input_ids"][0].tolist(),
        "logits": model(**encoded).logits[0, 0].tolist(),
        "base": base_output,
        "imported": "vaswani" in sys.modules,
    }))
"""
OURS = ["VaswaniConfig", "VaswaniTokenizer", "VaswaniModel", "VaswaniForConditionalGeneration"]


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, away from the checkout, with nothing but what is installed."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", **environment},
        check=False,
    )


def load(folder: str, trust: bool = False, **environment: str) -> dict:
    finished = run(LOAD_AND_PRINT, folder, json.dumps({"trust_remote_code": True} if trust else {}), **environment)
    assert finished.returncode == 0, finished.stderr
    return {**json.loads(finished.stdout.splitlines()[-1]), "stderr": finished.stderr}


def logits_here(folder: str) -> list[float]:
    encoded = AutoTokenizer.from_pretrained(folder)("three hundred and twelve", return_tensors="pt")
    return AutoModelForSeq2SeqLM.from_pretrained(folder)(**encoded).logits[0, 0].tolist()


def test_the_auto_classes_know_the_model_and_say_nothing(saved_folder: str, capfd: pytest.CaptureFixture) -> None:
    assert type(AutoConfig.from_pretrained(saved_folder)) is VaswaniConfig
    assert type(AutoModel.from_pretrained(saved_folder)) is VaswaniModel
    assert type(AutoModelForSeq2SeqLM.from_pretrained(saved_folder)) is VaswaniForConditionalGeneration
    assert type(AutoTokenizer.from_pretrained(saved_folder)) is VaswaniTokenizer
    assert type(AutoConfig.for_model("vaswani")) is VaswaniConfig
    assert type(AutoModelForSeq2SeqLM.from_config(AutoConfig.from_pretrained(saved_folder))) is (
        VaswaniForConditionalGeneration
    )
    printed = capfd.readouterr()
    assert "warning" not in (printed.out + printed.err).lower()


def test_local_classes_win_over_code_in_the_folder(with_code_folder: str) -> None:
    for options in ({}, {"trust_remote_code": True}):
        assert type(AutoConfig.from_pretrained(with_code_folder, **options)) is VaswaniConfig
        assert type(AutoModel.from_pretrained(with_code_folder, **options)) is VaswaniModel
        model = AutoModelForSeq2SeqLM.from_pretrained(with_code_folder, **options)
        assert type(model) is VaswaniForConditionalGeneration
        assert type(AutoTokenizer.from_pretrained(with_code_folder, **options)) is VaswaniTokenizer


def test_a_folder_carries_code_on_request_and_passes_it_on(with_code_folder: str, saved_folder: str, tmp_path) -> None:
    code = {"configuration_vaswani.py", "modeling_vaswani.py"}
    assert code <= {path.name for path in Path(with_code_folder).iterdir()}
    assert not code & {path.name for path in Path(saved_folder).iterdir()}
    assert "auto_map" not in json.loads((Path(saved_folder) / "config.json").read_text())
    model = AutoModelForSeq2SeqLM.from_pretrained(with_code_folder)
    model.save_pretrained(tmp_path / "rank 1", is_main_process=False)
    assert not list((tmp_path / "rank 1").iterdir())
    model.save_pretrained(tmp_path / "again")
    assert code <= {path.name for path in (tmp_path / "again").iterdir()}
    AutoModelForSeq2SeqLM.from_pretrained(with_code_folder).save_pretrained(tmp_path / "plain", include_code=False)
    assert not code & {path.name for path in (tmp_path / "plain").iterdir()}
    assert "auto_map" not in json.loads((tmp_path / "plain" / "config.json").read_text())


@pytest.mark.process
def test_code_in_the_folder_loads_where_vaswani_cannot_be_imported(
    with_code_folder: str, without_vaswani: str, tmp_path
) -> None:
    loaded = load(with_code_folder, trust=True, PYTHONPATH=without_vaswani, HF_MODULES_CACHE=str(tmp_path))
    assert loaded["classes"] == [OURS[0], "TokenizersBackend", *OURS[2:]]
    assert loaded["modules"] == ["transformers_modules"]
    assert not loaded["imported"]
    assert loaded["logits"] == logits_here(with_code_folder)


@pytest.mark.process
def test_a_program_that_never_imports_vaswani_finds_it(saved_folder: str) -> None:
    loaded = load(saved_folder)
    assert loaded["classes"] == OURS
    assert loaded["modules"] == ["vaswani"]
    assert loaded["logits"] == logits_here(saved_folder)
    assert "warn" not in loaded["stderr"].lower()


@pytest.mark.process
def test_a_tokenizer_alone_is_found_too(tokenizer: VaswaniTokenizer, tmp_path) -> None:
    tokenizer.save_pretrained(tmp_path)
    code = "import sys, transformers as t; print(type(t.AutoTokenizer.from_pretrained(sys.argv[1])).__name__)"
    finished = run("import torch;" + code, str(tmp_path))
    assert finished.stdout.strip() == "VaswaniTokenizer", finished.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    "preamble",
    [
        "import torch",
        "import transformers",
        "from transformers import AutoConfig; import torch",
        "import torch, importlib.util; importlib.util.find_spec('transformers.models.auto.configuration_auto')",
    ],
)
def test_the_order_of_imports_does_not_matter_and_nothing_is_imported_early(preamble: str, saved_folder: str) -> None:
    code = f"""
        {preamble}
        import sys, torch
        assert not any(name == "vaswani" or name.startswith("vaswani.") for name in sys.modules)
        if {preamble == "import torch"}:
            assert "transformers" not in sys.modules
        from transformers import AutoConfig, AutoModelForSeq2SeqLM, BertConfig
        AutoConfig.for_model("bert")
        assert "vaswani" not in sys.modules
        print(type(AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])).__name__)
    """
    finished = run(code, saved_folder)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == "VaswaniForConditionalGeneration"


@pytest.mark.process
@pytest.mark.parametrize("names", ["MarianMTModel", "PreTrainedModel, BartModel", "Seq2SeqTrainer", "pipeline"])
def test_after_vaswani_every_class_of_transformers_can_be_the_first_that_is_imported(
    names: str, saved_folder: str
) -> None:
    code = f"""
        import sys, vaswani
        from transformers import {names}, AutoModelForSeq2SeqLM
        print(type(AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])).__name__)
    """
    finished = run(code, saved_folder)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == "VaswaniForConditionalGeneration"


@pytest.mark.process
@pytest.mark.parametrize("comes_first", [True, False])
def test_another_hook_that_asks_all_finders_does_not_make_ours_recur(comes_first: bool, saved_folder: str) -> None:
    code = """
        import sys, vaswani_autoload
        class Other:
            depth = most = 0
            def find_spec(self, name, *args):
                if name not in vaswani_autoload.TABLES:
                    return None
                Other.depth += 1
                Other.most = max(Other.depth, Other.most)
                try:
                    found = (finder.find_spec(name, *args) for finder in sys.meta_path if finder is not self)
                    return next((spec for spec in found if spec is not None), None)
                finally:
                    Other.depth -= 1
        if sys.argv[2] == "True":
            sys.meta_path.insert(0, Other())
        vaswani_autoload.install()
        if sys.argv[2] == "False":
            sys.meta_path.insert(0, Other())
        from transformers import AutoConfig
        print(Other.most, type(AutoConfig.from_pretrained(sys.argv[1])).__name__)
    """
    environment = {"PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    finished = run(code, saved_folder, str(comes_first), **environment)
    assert finished.returncode == 0, finished.stderr
    depth, name = finished.stdout.splitlines()[-1].split()
    assert name == "VaswaniConfig"
    assert int(depth) <= 3  # once itself, and once in the search of each of our two finders


@pytest.mark.process
def test_it_can_be_switched_off(saved_folder: str) -> None:
    code = "import sys, torch; from transformers import AutoConfig; AutoConfig.from_pretrained(sys.argv[1])"
    finished = run(code, saved_folder, VASWANI_AUTOLOAD="0")
    assert finished.returncode != 0
    assert "does not recognize this architecture" in finished.stderr


@pytest.mark.process
@pytest.mark.parametrize("fault", ["deleted", "raising"])
def test_a_fault_of_ours_leaves_transformers_as_it_is_without_us(
    fault: str, saved_folder: str, with_code_folder: str, tmp_path
) -> None:
    if fault == "raising":
        (tmp_path / "vaswani").mkdir()
        (tmp_path / "vaswani" / "__init__.py").write_text("raise RuntimeError('broken on purpose')")
        hide = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    else:
        hide = """import sys
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name == "vaswani":
                    raise ModuleNotFoundError("No module named 'vaswani'", name="vaswani")
        sys.meta_path.insert(0, Absent())"""
    code = f"""
        {hide}
        import torch
        from transformers import AutoConfig, AutoModelForSeq2SeqLM
        AutoConfig.for_model("bert")
        try:
            AutoConfig.from_pretrained(sys.argv[1])
        except ValueError as error:
            assert "does not recognize this architecture" in str(error)
        else:
            raise AssertionError
        print(type(AutoModelForSeq2SeqLM.from_pretrained(sys.argv[2], trust_remote_code=True)).__module__)
    """
    finished = run(code, saved_folder, with_code_folder, HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1].startswith("transformers_modules.")
    assert ("vaswani is installed but cannot be imported" in finished.stderr) == (fault == "raising")
    assert ("broken on purpose" in finished.stderr) == (fault == "raising")


@pytest.mark.process
def test_torch_works_where_transformers_is_absent() -> None:
    code = """
        import sys
        sys.modules["transformers"] = None
        import torch
        print(torch.ones(2).sum().item())
    """
    finished = run(code)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == "2.0"
    assert finished.stderr == ""


@pytest.mark.process
def test_the_lazy_entry_imports_only_what_is_loaded_anyway_and_costs_under_a_hundredth_of_importing_torch() -> None:
    code = """
        import os, sys, time
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        start = time.perf_counter()
        import torch
        torch_was_there = time.perf_counter()
        before = set(sys.modules)
        import vaswani_autoload
        vaswani_autoload.install()
        share = (time.perf_counter() - torch_was_there) / (torch_was_there - start)
        print(sorted(name for name in set(sys.modules) - before if not name.startswith("__editable__")), share)
    """
    printed = [run(code).stdout.strip() for _ in range(3)]
    assert all(line.startswith("['vaswani_autoload'] ") for line in printed), printed
    assert min(float(line.split()[-1]) for line in printed) < 0.01


# --- the public interface is a promise


def test_the_public_names_are_pinned() -> None:
    assert vaswani.__all__ == [
        "Translator",
        "VaswaniConfig",
        "VaswaniForConditionalGeneration",
        "VaswaniMarianTokenizer",
        "VaswaniModel",
        "VaswaniMosesTokenizer",
        "VaswaniPairTokenizer",
        "VaswaniPreTrainedModel",
        "VaswaniTokenizer",
        "VaswaniTrainer",
        "VaswaniTrainingArguments",
        "convert_model",
        "export_model",
        "model_folder",
        "model_names",
        "paper_generation_config",
        "preset",
        "preset_names",
    ]
    assert vaswani.__all__ == sorted(vaswani.__all__)
    assert all(hasattr(vaswani, name) for name in vaswani.__all__)


def test_the_package_shows_its_public_names_its_modules_and_nothing_else() -> None:
    modules = {module.name for module in pkgutil.iter_modules(vaswani.__path__)}
    for names in (dir(vaswani), vars(vaswani)):
        others = {name for name in names if not name.startswith("_")} - set(vaswani.__all__)
        assert others <= modules
    assert not {name for name in dir(vaswani) if re.match("_(?!_)", name)}
    assert {*vaswani.__all__, "__version__", "modeling_vaswani", "training"} <= set(dir(vaswani))


def test_the_arguments_of_forward_are_pinned() -> None:
    shared = (
        "input_ids attention_mask position_ids decoder_input_ids decoder_attention_mask decoder_position_ids "
        "encoder_outputs past_key_values inputs_embeds decoder_inputs_embeds"
    ).split()
    assert list(inspect.signature(VaswaniModel.forward).parameters) == ["self", *shared, "use_cache", "kwargs"]
    assert list(inspect.signature(VaswaniForConditionalGeneration.forward).parameters) == [
        *("self", *shared, "labels", "use_cache", "logits_to_keep", "num_items_in_batch", "kwargs")
    ]


@pytest.mark.process
def test_importing_vaswani_loads_nothing_that_a_model_does_not_need() -> None:
    code = """
        import sys
        import transformers.generation, transformers.modeling_utils
        from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast
        before = set(sys.modules)
        import vaswani
        print(*sorted({name.split(".")[0] for name in set(sys.modules) - before} - {"vaswani", "transformers"}))
    """
    finished = run(code)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == []


@pytest.mark.parametrize("name", [m.name for m in pkgutil.iter_modules(vaswani.__path__) if m.name[0] != "_"])
def test_public_functions_document_their_parameters(name: str) -> None:
    module = __import__(f"vaswani.{name}", fromlist=["_"])
    public = [getattr(module, n) for n in vars(module) if not n.startswith("_")]
    own = [thing for thing in public if getattr(thing, "__module__", None) == module.__name__]
    for thing in own:
        # a method that transformers documents already may be short
        inherited = {n for base in thing.__mro__[1:] for n in vars(base)} if inspect.isclass(thing) else set()
        methods = [method for n, method in vars(thing).items() if n not in inherited or n == "forward"]
        for function in methods if inspect.isclass(thing) else [thing]:
            if inspect.isfunction(function) and not function.__name__.startswith("_"):
                parameters = set(inspect.signature(function).parameters) - {"self", "cls"}
                assert function.__doc__, function
                assert not parameters or "Parameters\n" in function.__doc__, function


def test_code_for_the_hub_imports_only_what_transformers_needs() -> None:
    from transformers.dynamic_module_utils import get_imports, get_relative_imports

    generation = ("generation_checks", "search_rules", "beam_search", "generation")
    stages = ("configuration", "pretrained", "fast_paths", *generation, "modeling")
    closure = [f"{stage}_vaswani" for stage in stages]
    for name in closure:
        path = ROOT / "vaswani" / f"{name}.py"
        packages = set(get_imports(path)) - set(sys.stdlib_module_names)
        assert packages <= {"torch", "transformers", "huggingface_hub", "safetensors"}, path  # transformers needs both
        assert set(get_relative_imports(path)) <= set(closure)


def test_the_version_is_the_packages(tmp_path) -> None:
    from importlib.metadata import version

    assert vaswani.__version__ == version("vaswani")
