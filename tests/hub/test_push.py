"""The Hub: push and pull over real HTTP, by LFS and by Xet, what goes wrong, and that loading is safe."""

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests.hub.loopback import OWNER, Hub, Repository
from tests.numbers_corpus import number_corpus
from vaswani import paper_generation_config

pytestmark = pytest.mark.process

# What a process prints that loads a model by its name: equal lines mean bit-equal weights.
LOAD = """
    import hashlib, json, sys
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    options = json.loads(sys.argv[2])
    model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], **options)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], **options)
    encoded = tokenizer("three hundred and twelve", return_tensors="pt")
    weights = b"".join(value.numpy().tobytes() for _, value in sorted(model.state_dict().items()))
    print(json.dumps({
        "module": type(model).__module__.split(".")[0],
        "weights": hashlib.sha256(weights).hexdigest(),
        "beams": model.generation_config.num_beams,
        "penalty": model.generation_config.length_penalty_form,
        "ids": encoded["input_ids"][0].tolist(),
        "output": model.generate(**encoded, max_new_tokens=8)[0].tolist(),
    }))
"""

# What a process does that runs one piece of code after the other, so that each need not import everything again.
SERVE = """
    import json, os, sys, traceback
    replies = os.fdopen(os.dup(1), "w")
    for request in map(json.loads, sys.stdin):
        os.environ.pop("HF_TOKEN", None)
        os.environ.update(request["environment"])
        for descriptor, path in enumerate(request["files"], start=1):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, descriptor)
            os.close(file)
        sys.argv, status = ["-c", *request["arguments"]], 0
        try:
            exec(request["code"], {"__name__": "__main__"})
        except SystemExit as end:
            status = end.code or 0
        except Exception:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        print(status, file=replies, flush=True)
"""


class Machine:
    """A machine of somebody's: its own cache, and one way to move large files. Its process begins when it is used."""

    def __init__(self, hub: Hub, home: Path, way: str = "lfs", **environment: str) -> None:
        self.home = home
        self.process: subprocess.Popen[str] | None = None
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "0" if way == "xet" else "1",
            "PYTHONPATH": "",
            "OMP_NUM_THREADS": "1",
            **environment,
        }

    def run(self, code: str, *arguments: object, token: str | None = "hf_owner") -> subprocess.CompletedProcess[str]:
        if self.process is None:
            words = [sys.executable, "-c", textwrap.dedent(SERVE)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.process = subprocess.Popen(words, **pipes, text=True, cwd="/", env=self.environment)
            self.home.mkdir(parents=True, exist_ok=True)
        files = [self.home / "stdout", self.home / "stderr"]
        request = {
            "code": textwrap.dedent(code),
            "arguments": [str(argument) for argument in arguments],
            "environment": {"HF_TOKEN": token} if token else {},
            "files": [str(file) for file in files],
        }
        print(json.dumps(request), file=self.process.stdin, flush=True)
        status = int(self.process.stdout.readline())
        return subprocess.CompletedProcess(arguments, status, *(file.read_text() for file in files))

    def succeed(self, code: str, *arguments: object) -> str:
        finished = self.run(code, *arguments)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    def command(self, *words: object, token: str | None = "hf_owner") -> subprocess.CompletedProcess[str]:
        """Run a command of `vaswani`."""
        return self.run("import sys; from vaswani.cli import main; main(sys.argv[1:])", *words, token=token)

    def load(self, name: str, **options: object) -> dict:
        return json.loads(self.succeed(LOAD, name, json.dumps(options)).splitlines()[-1])

    def stop(self) -> None:
        if self.process is not None:
            self.process.communicate()


@pytest.fixture(scope="module")
def running_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with Hub(tmp_path_factory.mktemp("hub")).run() as hub:
        yield hub


@pytest.fixture
def hub(running_hub: Hub) -> Iterator[Hub]:
    running_hub.requests.clear()
    running_hub.faults.clear()
    yield running_hub
    assert not running_hub.crashes


class Machines:
    """The machines of a module's tests: one for each purpose and way."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        self.hub, self.folder = hub, folder
        self.running: dict[tuple[str, str], Machine] = {}

    def __call__(self, purpose: str, way: str = "lfs", home: Path | None = None, **environment: str) -> Machine:
        key = (purpose, way)
        if key not in self.running:
            self.running[key] = Machine(self.hub, home or self.folder / f"{purpose}-{way}", way, **environment)
        return self.running[key]


@pytest.fixture(scope="module")
def machines(running_hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    made = Machines(running_hub, tmp_path_factory.mktemp("machines"))
    yield made
    for machine in made.running.values():
        machine.stop()


@pytest.fixture
def author(machines: Machines) -> Machine:
    return machines("author")


@pytest.fixture
def user(machines: Machines) -> Machine:
    return machines("user")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of a repository that no other test has."""
    return f"{OWNER}/" + re.sub(r"\W+", "-", request.node.name.removeprefix("test_"))[:80].strip("-")


@pytest.fixture(scope="module")
def trained_folder(saved_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder as a trained model has it, with the paper's search."""
    folder = tmp_path_factory.mktemp("trained")
    model = AutoModelForSeq2SeqLM.from_pretrained(saved_folder)
    model.generation_config = paper_generation_config(model.config)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(saved_folder).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def pushed(name: str, author: Machine, trained_folder: str) -> str:
    """Push the trained folder, and return the name of its repository."""
    push(author, trained_folder, name)
    return name


def push(author: Machine, folder: str | Path, name: str, *options: str) -> str:
    finished = author.command("push", folder, name, *options)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


# --- there and back


@pytest.mark.parametrize("way", ["lfs", "xet"])
def test_push_from_python_and_pull_by_name_revision_and_from_the_cache(
    way: str, hub: Hub, machines: Machines, name: str, trained_folder: str
) -> None:
    pushing = """
        import sys, torch
        from pathlib import Path
        from huggingface_hub import HfApi
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
        from vaswani.hub.card import card_for_folder
        folder, name = sys.argv[1:]
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
        model.push_to_hub(name, private=True)
        AutoTokenizer.from_pretrained(folder).push_to_hub(name)
        card_for_folder(Path(folder), name).push_to_hub(name)
        print(HfApi().model_info(name).sha)
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        model.push_to_hub(name)
    """
    first = machines("author", way).succeed(pushing, trained_folder, name).split()[-1]
    uploads = {"lfs": "PUT /storage/", "xet": f"GET /api/models/{name}/xet-write-token/main"}
    ways = [each for each, path in uploads.items() if any(asked.startswith(path) for asked in hub.requests)]
    assert ways == [way]
    assert hub.repositories[name].private
    card = ModelCard(hub.read(name, "README.md").decode())
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "translation")
    assert f'from_pretrained("{name}")' in card.text

    user = machines("user", way)
    expected = user.load(trained_folder)
    assert (expected["beams"], expected["penalty"]) == (4, "gnmt")
    changed = user.load(name)
    assert changed["weights"] != expected["weights"]
    assert user.load(name, revision=first) == expected
    nowhere = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    offline = machines("offline", way, home=user.home, **nowhere)
    assert offline.load(name, revision=first) == expected
    assert offline.load(name) == changed


@pytest.mark.parametrize("way", ["lfs", "xet"])
@pytest.mark.parametrize("trainer", ["transformers.Seq2SeqTrainer", "vaswani.training.VaswaniTrainer"])
def test_trainers_push_while_they_train(
    trainer: str, way: str, hub: Hub, machines: Machines, name: str, trained_folder: str, tmp_path: Path
) -> None:
    author, user = machines("author", way), machines("user", way)
    training = """
        import importlib, sys
        from datasets import Dataset
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq
        folder, output, name, trainer = sys.argv[1:]
        module, _, kind = trainer.rpartition(".")
        module = importlib.import_module(module)
        Trainer, Arguments = getattr(module, kind), getattr(module, kind[:-2] + "ingArguments")
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
        pairs = Dataset.from_dict({"en": ["three", "twelve"] * 20, "de": ["drei", "zwölf"] * 20})
        pairs = pairs.map(lambda pair: tokenizer(pair["en"], text_target=pair["de"]), remove_columns=["en", "de"])
        arguments = Arguments(
            output, max_steps=4, save_strategy="steps", save_steps=2, learning_rate=1e-3, report_to="none",
            use_cpu=True, push_to_hub=True, hub_model_id=name, disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        collator = DataCollatorForSeq2Seq(tokenizer, model)
        trainer = Trainer(
            model, arguments, train_dataset=pairs, data_collator=collator, processing_class=tokenizer
        )
        trainer.train()
        trainer.push_to_hub()
    """
    author.succeed(training, trained_folder, tmp_path / "run", name, trainer)
    commits = list(hub.repositories[name].commits.values())
    messages = {message for message, _ in commits}
    assert {"Training in progress, step 2", "End of training"} <= messages  # step 4 is left out while step 2 goes up
    for message, files in commits[1:]:
        assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= files.keys(), message
        assert not [path for path in files if "checkpoint" in path], message
    assert user.load(name) == user.load(str(tmp_path / "run"))
    card = ModelCard(hub.read(name, "README.md").decode())
    assert card.data.library_name == "transformers"


@pytest.mark.parametrize("way", ["lfs", "xet"])
def test_push_command_publishes_what_a_stranger_needs(
    way: str, hub: Hub, machines: Machines, name: str, trained_folder: str, tmp_path: Path
) -> None:
    folder = copied(trained_folder, tmp_path / "run")
    private_files = ("training_args.bin", "trainer_state.json", "checkpoint-2/optimizer.pt", "key.json", "harm.py")
    for private in private_files:
        (folder / private).parent.mkdir(exist_ok=True)
        (folder / private).write_text("of no use to others")
    options = ("--revision", "v1", "--private", "--message", "First try")
    printed = push(machines("author", way), folder, name, *options)
    assert printed.startswith(f"{hub.url}/{name}/commit/")
    published = {path.name for path in Path(trained_folder).iterdir()} | {"README.md", ".gitattributes"}
    assert hub.files(name, "v1").keys() == published
    assert hub.files(name, "main").keys() == {".gitattributes"}
    assert hub.repositories[name].private
    assert list(hub.repositories[name].commits.values())[-1][0] == "First try"
    user = machines("user", way)
    assert user.load(name, revision="v1") == user.load(trained_folder)


def test_push_of_another_form_leaves_no_old_weights(
    hub: Hub, pushed: str, author: Machine, user: Machine, trained_folder: str, tmp_path: Path
) -> None:
    shards = copied(trained_folder, tmp_path / "shards")
    shift_weights(shards, 5)
    model = AutoModelForSeq2SeqLM.from_pretrained(shards)
    (shards / "model.safetensors").unlink()
    model.save_pretrained(shards, max_shard_size="30KB")
    push(author, shards, pushed)
    assert "model.safetensors" not in hub.files(pushed)
    assert user.load(pushed) == user.load(str(shards)) != user.load(trained_folder)
    push(author, trained_folder, pushed, "--code")
    assert not [path for path in hub.files(pushed) if path.startswith("model-") or "index" in path]
    assert user.load(pushed) == user.load(trained_folder)


def test_a_card_that_was_made_here_gets_the_name_that_the_model_has_now(
    hub: Hub, name: str, author: Machine, trained_folder: str, tmp_path: Path
) -> None:
    folder, about = copied(trained_folder, tmp_path / "model"), tmp_path / "about.yaml"
    facts = {"name": "A name for people", "summary": "It translates.", "languages": ["en", "de"], "license": "mit"}
    facts |= {"data": [{"name": "numbers", "license": "mit"}], "intended_use": "Tests.", "limits": ["All."]}
    about.write_text(json.dumps(facts))
    assert author.command("card", folder, "--about", about).returncode == 0
    assert f'from_pretrained("{folder.name}")' in (folder / "README.md").read_text()
    push(author, folder, name)
    assert f'from_pretrained("{name}")' in hub.read(name, "README.md").decode()
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# My own words\n")
    push(author, folder, name)
    assert "My own words" in hub.read(name, "README.md").decode()


def test_translate_command_takes_a_name(pushed: str, user: Machine, trained_folder: str) -> None:
    outputs = [user.command("translate", "three hundred", "--model", place) for place in (pushed, trained_folder)]
    assert outputs[0].returncode == 0, outputs[0].stderr
    assert outputs[0].stdout == outputs[1].stdout
    assert outputs[0].stdout.strip()


def test_example_pulls_fine_tunes_and_pushes_back(
    hub: Hub, pushed: str, author: Machine, user: Machine, trained_folder: str, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.tsv"
    corpus.write_text("".join(f"{pair['en']}\t{pair['de']}\n" for pair in number_corpus(300)))
    script, tuned = Path(__file__).parents[2] / "examples" / "5_pull_and_push.py", f"{pushed}-tuned"
    words = [pushed, corpus, tuned, "--license", "cc-by-4.0", "--output", tmp_path / "run", "--updates", 5]
    running = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    printed = author.succeed(running, script, *words, "--learning_rate", 0.005)
    before, after = (float(word) for word in printed.split("held-out tenth:")[1].split() if word[0].isdigit())
    assert after < before
    assert printed.count("->") == 3
    assert user.load(tuned)["weights"] != user.load(pushed)["weights"]
    card = ModelCard(hub.read(tuned, "README.md").decode())
    assert (card.data.base_model, card.data.license, card.data.language) == (pushed, "cc-by-4.0", ["en", "de"])


def copied(folder: str, to: Path) -> Path:
    to.mkdir()
    for path in Path(folder).iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


# --- what goes wrong


def refusal(finished: subprocess.CompletedProcess[str]) -> str:
    """Return the one line with which a command ends that could not do its work."""
    assert finished.returncode == 2, (finished.stdout, finished.stderr)
    assert "Traceback" not in finished.stderr
    assert finished.stdout == ""
    return finished.stderr.splitlines()[-1]


def test_incomplete_folders_and_impossible_names_are_refused_before_anything_is_sent(
    hub: Hub, author: Machine, name: str, trained_folder: str, tmp_path: Path
) -> None:
    cut = copied(trained_folder, tmp_path / "cut")
    assert "is not a name of a repository" in refusal(author.command("push", cut, "a/b/c"))
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-10])
    assert "is damaged: Error while deserializing header" in refusal(author.command("push", cut, name))
    (cut / "tokenizer.json").unlink()
    assert "it has no tokenizer.json." in refusal(author.command("push", cut, name))
    (cut / "tokenizer.json").write_text("{}")
    (cut / "config.json").write_text(json.dumps({"model_type": "marian"}))
    assert "it is a model of type 'marian', not 'vaswani'" in refusal(author.command("push", cut, name))
    missing = copied(trained_folder, tmp_path / "missing")
    weights = load_file(missing / "model.safetensors")
    del weights["model.encoder.layers.0.self_attn_layer_norm.weight"]
    save_file(weights, missing / "model.safetensors", metadata={"format": "pt"})
    assert "1 of its weights are missing" in refusal(author.command("push", missing, name))
    for index in ("[]", "{}", '{"weight_map": {"x": 1}}'):
        (cut / "model.safetensors").unlink(missing_ok=True)
        (cut / "model.safetensors.index.json").write_text(index)
        assert "model.safetensors.index.json" in refusal(author.command("push", cut, name))
    broken = copied(trained_folder, tmp_path / "broken")
    (broken / "README.md").write_text("---\na: [\n---\n")
    assert "README.md is not a valid card" in refusal(author.command("push", broken, name))
    assert "There is no folder" in refusal(author.command("push", tmp_path / "nowhere", name))
    assert not [asked for asked in hub.requests if asked.startswith("POST")]


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (None, "(401); log in with `hf auth login`, or set HF_TOKEN."),
        ("hf_wrong", "Invalid credentials in Authorization header (401); log in with"),
        ("hf_reader", "(403); the token needs the right to do this."),
        ("hf_stranger", "(403); the token needs the right to do this."),
    ],
)
def test_pushing_without_permission_says_so(
    token: str | None, message: str, hub: Hub, author: Machine, name: str, trained_folder: str
) -> None:
    assert message in refusal(author.command("push", trained_folder, name, token=token))
    assert name not in hub.repositories


def test_pulling_what_is_not_there_says_so(hub: Hub, pushed: str, user: Machine) -> None:
    def translate(name: str) -> str:
        return refusal(user.command("translate", "three", "--model", name, token="hf_stranger"))

    hub.repositories[f"{OWNER}/empty"] = Repository(private=False)
    hub.repositories[f"{OWNER}/empty"].commit("main", "initial commit", {})
    hub.repositories[f"{OWNER}/secret"] = Repository(private=True)
    for name in ("nothing", "secret"):
        assert f"{OWNER}/{name} is not a local folder and is not a valid model identifier" in translate(
            f"{OWNER}/{name}"
        )
    assert f"Unrecognized model in {OWNER}/empty. Should have a `model_type` key" in translate(f"{OWNER}/empty")
    finished = user.run(LOAD, pushed, json.dumps({"revision": "v9"}))
    assert "v9 is not a valid git identifier" in finished.stderr.splitlines()[-1]


@pytest.mark.slow  # the client tries again for most of a minute
def test_a_hub_that_is_out_of_order_is_named(hub: Hub, pushed: str, user: Machine) -> None:
    for method in ("GET", "HEAD"):
        hub.fail(method, "/resolve/", status=503, times=99)
    said = refusal(user.command("translate", "three", "--model", pushed))
    assert f"We couldn't connect to '{hub.url}'" in said


@pytest.mark.parametrize("after", [0, 40_000])
def test_uploads_that_are_cut_once_succeed(
    after: int, hub: Hub, author: Machine, user: Machine, name: str, trained_folder: str, tmp_path: Path
) -> None:
    folder = copied(trained_folder, tmp_path / "changed")
    shift_weights(folder, after + 1)  # or the hub has this content already
    hub.fail("PUT", "/storage/", after=after)
    push(author, folder, name)
    assert sum(asked.startswith("PUT /storage") for asked in hub.requests) == 2
    assert user.load(name) == user.load(str(folder))


def shift_weights(folder: Path, number: float) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.encoder.layers.0.self_attn_layer_norm.weight"] += number
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        ("lfs", ("PUT", "/storage/", None)),
        ("lfs", ("PUT", "/storage/", 403)),
        ("lfs", ("POST", "/verify", 400)),
        ("xet", ("GET", "xet-write-token", 403)),
        ("lfs", ("POST", "/commit/", None)),
        ("xet", ("POST", "/commit/", 500)),
    ],
)
def test_uploads_that_fail_change_nothing(
    way: str, fault: tuple, hub: Hub, machines: Machines, name: str, trained_folder: str, tmp_path: Path
) -> None:
    author, user, folder = machines("author", way), machines("user", way), copied(trained_folder, tmp_path / "changed")
    method, path, status = fault
    shift_weights(folder, sum(map(ord, name)))
    hub.fail(method, path, status=status, after=100, times=99)
    assert refusal(author.command("push", folder, name)).startswith("vaswani push: The ")
    assert hub.files(name).keys() == {".gitattributes"}
    hub.faults.clear()
    push(author, folder, name)
    assert user.load(name) == user.load(str(folder))


def test_downloads_that_are_cut_go_on_where_they_were(
    hub: Hub, pushed: str, user: Machine, trained_folder: str
) -> None:
    hub.fail("GET", "/storage/", after=30_000, times=2)
    assert user.load(pushed) == user.load(trained_folder)
    assert sum(asked.startswith("GET /storage") for asked in hub.requests) == 3


def test_downloads_that_fail_leave_nothing_that_loads(
    hub: Hub, pushed: str, user: Machine, machines: Machines, trained_folder: str
) -> None:
    hub.fail("GET", "/storage/", after=30_000)
    hub.fail("GET", "/storage/", status=500, times=99)
    assert pushed in refusal(user.command("translate", "three", "--model", pushed))
    hub.faults.clear()
    offline = machines("offline", home=user.home, HF_HUB_OFFLINE="1").run(LOAD, pushed, "{}")
    assert offline.returncode == 1
    assert offline.stderr.splitlines()[-1].startswith("OSError: ")
    assert user.load(pushed) == user.load(trained_folder)


def test_half_of_a_chunk_of_xet_is_not_loaded(
    hub: Hub, machines: Machines, name: str, trained_folder: str, tmp_path: Path
) -> None:
    folder, before = copied(trained_folder, tmp_path / "changed"), set(chunks_of(hub))
    shift_weights(folder, 77)
    push(machines("author", "xet"), folder, name)
    for chunks in set(chunks_of(hub)) - before:
        whole = chunks.read_bytes()
        chunks.chmod(0o644)
        chunks.write_bytes(whole[: len(whole) // 2])
    user = machines("user", "xet")
    assert refusal(user.command("translate", "three", "--model", name))
    chunks.write_bytes(whole)
    assert user.load(name) == user.load(str(folder))


def chunks_of(hub: Hub) -> list[Path]:
    return [path for path in (hub.folder / "cas").rglob("xorbs/default.*") if path.suffix != ".tagset"]


# --- code in the repository


@pytest.mark.parametrize("way", ["lfs", "xet"])
def test_code_in_the_repository_serves_where_vaswani_is_not_installed(
    way: str, hub: Hub, name: str, machines: Machines, trained_folder: str, without_vaswani: str
) -> None:
    user = machines("user", way)
    push(machines("author", way), trained_folder, name, "--code")
    assert "modeling_vaswani.py" in hub.files(name)
    assert "auto_map" not in json.loads((Path(trained_folder) / "config.json").read_text())
    expected = user.load(trained_folder)
    without = machines("without", way, PYTHONPATH=without_vaswani)
    assert without.load(name, trust_remote_code=True) == {**expected, "module": "transformers_modules"}
    offline = machines("without-offline", way, home=without.home, PYTHONPATH=without_vaswani, HF_HUB_OFFLINE="1")
    assert offline.load(name, trust_remote_code=True) == {**expected, "module": "transformers_modules"}
    assert user.load(name, trust_remote_code=True) == user.load(name) == {**expected, "module": "vaswani"}


# --- repositories that mean harm


class Trace:
    """What leaves a folder behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickles_are_not_opened(hub: Hub, pushed: str, user: Machine, trained_folder: str, tmp_path: Path) -> None:
    trace, file = tmp_path / "trace", tmp_path / "weights.bin"
    torch.save({"lm_head.weight": Trace(trace)}, file)
    torch.load(file, weights_only=False)
    trace.rmdir()  # so the file does harm when it is opened
    pickles = ("pytorch_model.bin", "model.pt", "training_args.bin", "adapter_model.bin", "vocab.pkl")
    for path in pickles:
        hub.plant(pushed, path, file.read_bytes())
    assert user.load(pushed) == user.load(trained_folder)
    files = {path: stored for path, stored in hub.files(pushed).items() if path != "model.safetensors"}
    hub.repositories[pushed].commit("main", "Take the weights away", files)
    said = refusal(user.command("translate", "three", "--model", pushed))
    assert f"{pushed} has no model.safetensors, and weights are not loaded from other formats." in said
    wanted = user.run(LOAD, pushed, json.dumps({"use_safetensors": False}))
    assert "ValueError: use_safetensors=False" in wanted.stderr
    assert not trace.exists()
    assert not [asked for asked in hub.requests if asked.endswith(pickles)]
    unknown = {asked for asked in hub.requests if "/resolve/" not in asked and "/storage/" not in asked}
    assert not [asked for asked in unknown if "discussions" in asked or "commits" in asked]  # nobody shall convert it


def test_pickles_that_an_index_or_an_adapter_names_are_not_opened(
    hub: Hub, pushed: str, user: Machine, tmp_path: Path
) -> None:
    weights = hub.folder / "lfs" / hub.files(pushed)["model.safetensors"].oid
    torch.save(load_file(weights), tmp_path / "weights.bin")
    pickled = (tmp_path / "weights.bin").read_bytes()
    files = dict(hub.files(pushed))
    adapter = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "base_model_name_or_path": pushed}
    hub.plant(pushed, "adapter_config.json", json.dumps(adapter).encode())
    hub.plant(pushed, "adapter_model.bin", pickled)
    assert "weights are not loaded from other formats" in refusal(user.command("translate", "three", "--model", pushed))
    del files["model.safetensors"]
    hub.repositories[pushed].commit("main", "Take the weights away", files)
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(weights), "weights.bin")}
    hub.plant(pushed, "model.safetensors.index.json", json.dumps(index).encode())
    hub.plant(pushed, "weights.bin", pickled)
    assert "weights are not loaded from other formats" in refusal(user.command("translate", "three", "--model", pushed))
    hub.plant(pushed, "config.json", json.dumps({"model_type": "marian"}).encode())
    hub.plant(pushed, "pytorch_model.bin", pickled)
    named = "names weights.bin, which is not a safetensors file: it is not opened"
    assert named in refusal(user.command("translate", "three", "--model", pushed))
    hub.plant(pushed, "config.json", json.dumps({"model_type": "t5"}).encode())
    assert "it is a model of type 't5'" in refusal(user.command("translate", "three", "--model", pushed))
    assert not [asked for asked in hub.requests if asked.endswith("pytorch_model.bin")]


BROKEN = {
    "config.json": ["[]", "{", '{"model_type": "vaswani", "d_model": "16"}', '{"model_type": "vaswani"}'],
    "model.safetensors": ["", "garbage", "\x08\0\0\0\0\0\0\0{}      "],
    "generation_config.json": ["[]", "{", '{"num_beams": "four"}', '{"max_tokens_beyond_input": 1000000000000}'],
    "tokenizer.json": ["[]", "{}", "{"],
    "tokenizer_config.json": ["[]", "{"],
}


@pytest.mark.parametrize(("path", "content"), [(path, content) for path in BROKEN for content in BROKEN[path]])
def test_broken_repositories_are_named(path: str, content: str, hub: Hub, pushed: str, user: Machine) -> None:
    hub.plant(pushed, path, content.encode())
    said = refusal(user.command("translate", "three", "--model", pushed))
    assert pushed in said


@pytest.mark.parametrize("path", ["generation_config.json", "tokenizer_config.json", "config.json"])
def test_files_that_the_hub_refuses_are_missed(path: str, hub: Hub, pushed: str, user: Machine) -> None:
    for method in ("HEAD", "GET"):
        hub.fail(method, f"/resolve/.*/{path}$", status=403, times=99)
    assert pushed in refusal(user.command("translate", "three", "--model", pushed))
    hub.faults.clear()
    assert user.command("translate", "three", "--model", pushed).returncode == 0


def test_text_that_says_yes_trusts_nobody(hub: Hub, pushed: str, machines: Machines, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    config = {"model_type": "unheard-of", "auto_map": {"AutoConfig": "harm.Config"}}
    hub.plant(pushed, "config.json", json.dumps(config).encode())
    hub.plant(pushed, "harm.py", f"import os\nos.mkdir({str(trace)!r})\n".encode())
    answering = """
        import io, sys
        sys.stdin = io.TextIOWrapper(io.BytesIO(b"y\\n" * 9))
        from vaswani.cli import main
        main(["translate", "--model", sys.argv[1]])
    """
    assert pushed in refusal(machines("trusting").run(answering, pushed))
    assert not trace.exists()


def test_code_does_not_run_unless_it_is_trusted(
    hub: Hub, pushed: str, user: Machine, machines: Machines, trained_folder: str, without_vaswani: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    config = json.loads(hub.read(pushed, "config.json"))
    config["auto_map"] = {
        "AutoConfig": "harm.VaswaniConfig",
        "AutoModelForSeq2SeqLM": "harm.VaswaniForConditionalGeneration",
    }
    tokenizer = json.loads(hub.read(pushed, "tokenizer_config.json"))
    tokenizer["auto_map"] = {"AutoTokenizer": [None, "harm.VaswaniTokenizer"]}
    hub.plant(pushed, "config.json", json.dumps(config).encode())
    hub.plant(pushed, "tokenizer_config.json", json.dumps(tokenizer).encode())
    for path in ("harm.py", "modeling_vaswani.py", "custom_generate/generate.py"):
        hub.plant(pushed, path, f"import os\nos.mkdir({str(trace)!r})\n".encode())
    without = machines("without", PYTHONPATH=without_vaswani)
    assert user.load(pushed) == user.load(trained_folder)
    assert "trust_remote_code=True" in without.run(LOAD, pushed, "{}").stderr
    assert not trace.exists()
    without.run(LOAD, pushed, json.dumps({"trust_remote_code": True}))
    assert trace.exists()  # so it was there to be run
