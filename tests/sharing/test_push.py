"""Pushing to a local stand-in of the hub's HTTP API."""

import functools
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import huggingface_hub
import pytest
import safetensors.torch
import torch
import yaml
from cli.conftest import refused
from families import make_model
from gguf_models import write_gguf
from huggingface_hub import HfApi, constants
from peft import get_peft_model
from reporting.conftest import example, write_run
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import hfpatch
from hfpatch import HfpatchError, sharing
from hfpatch.__main__ import main
from hfpatch.recipes.strict import write_yaml
from hfpatch.reporting import write_report
from hfpatch.sharing.contents import _is_limited, contents
from hfpatch.support.files import sha256_file
from hfpatch.surgery.bases import load_base
from hfpatch.surgery.manifest import FORMAT


def patch_folder(folder):
    """Write the files of a patch, whose base was a folder of some machine."""
    part = folder / "lora"
    part.mkdir(parents=True)
    base, fingerprint = "/home/someone/secret/my-base", {"dtypes": ["float32"], "exact": "f"}
    manifest = {
        "format": FORMAT,
        "base": {"name": base, "class": "GPT2LMHeadModel", "model_type": "gpt2", "fingerprint": fingerprint},
        "active": ["lora"],
        "adapters": [{"name": "lora", "method": "lora"}],
    }
    (part / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
    safetensors.torch.save_file({"layers.0.lora_B.weight": torch.ones(2, 2)}, part / "adapter_model.safetensors")
    manifest["adapters"][0]["sha256"] = sha256_file(part / "adapter_model.safetensors")
    (folder / "patch.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """Return a run folder with its report, which no test may change."""
    folder = write_run(tmp_path_factory.mktemp("reported") / "run", example())
    for seed in (0, 1):
        home = folder / "runs" / "lora" / f"seed-{seed}"
        patch_folder(home / "patch")
        (home / "checkpoints" / "step-1").mkdir(parents=True)
        (home / "checkpoints" / "step-1" / "state.bin").write_text("large")
        (home / "evaluations").mkdir()
        (home / "evaluations" / "tinyworld_cloze.jsonl").write_text('{"doc_id": 0, "target": "text of a data set"}\n')
    write_report(folder)
    return folder


@pytest.fixture
def run(reported, tmp_path):
    return shutil.copytree(reported, tmp_path / "run")


@pytest.mark.slow
def test_a_run_goes_in_one_commit_without_checkpoints_and_records(hub, run):
    command = [sys.executable, "-m", "hfpatch", "push", str(run), "--to", "me/run", "--private"]
    done = subprocess.run(command, capture_output=True, text=True, env=hub.environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"pushed: {hub.address}/me/run"
    created = next(json.loads(body) for _, path, body in hub.requests if path == "/api/repos/create")
    assert (created["name"], created.get("organization")) == ("run", "me")
    assert created.get("private") is True or created.get("visibility") == "private"
    files = hub.repositories["models", "me/run"]
    assert {"README.md", "results.json", "results.csv", "report.html", "report.md", "figures/differences.svg"} <= set(
        files
    )
    tensors = "runs/lora/seed-1/patch/lora/adapter_model.safetensors"
    assert files[tensors] == (run / tensors).read_bytes()
    assert not [path for path in files if "checkpoints" in path or "evaluations" in path]
    assert files["report.html"] == (run / "report.html").read_bytes()
    assert not [path for path, content in files.items() if b"/home/someone" in content]
    card = files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: peft\n")
    assert "pre_projection_skip" in card
    assert "+5.0 %" in card


@pytest.fixture
def reach(monkeypatch):
    """Let this process push to an address; a new one reads it from its environment."""

    def to(endpoint):
        api = functools.partial(HfApi, endpoint=endpoint, token="hf_none")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # files go by plain HTTP
        monkeypatch.setattr(sys.modules["hfpatch.sharing.push"], "HfApi", api)

    return to


def test_a_refusal_of_the_hub_is_one_line(hub, run, reach, capsys):
    hub.refusal = "you may not"
    reach(hub.address)
    message = refused(capsys, "push", run, "--to", "me/run")
    assert message.startswith("hfpatch: error: me/run: the hub refused the upload (")
    assert hub.requests


def test_a_public_repository_is_not_taken_for_a_private_push(hub, run, reach, capsys):
    reach(hub.address)
    assert main(["push", str(run), "--to", "me/new", "--private"]) == 0
    assert main(["push", str(run), "--to", "me/new", "--private"]) == 0
    assert main(["push", str(run), "--to", "me/old"]) == 0
    before = dict(hub.repositories["models", "me/old"])
    (run / "figures" / "new.svg").touch()
    capsys.readouterr()
    assert "me/old: exists and is public; make it private" in refused(
        capsys, "push", run, "--to", "me/old", "--private"
    )
    assert hub.repositories["models", "me/old"] == before


def test_a_push_replaces_the_one_before_and_keeps_files_of_others(hub, run, reach, capsys):
    """Scores of a model that is no longer there are gone, and so are its parts; what came by another commit stays."""
    reach(hub.address)
    shutil.copytree(run / "runs/lora/seed-0/patch", run / "runs/other/seed-0/patch")
    repository = "models", "me/patch"
    own = {".gitattributes": b"* text", ".eval_results/mine.yaml": b"[]", "figures/mine.png": b"png", "README.md": b"#"}
    earlier = [".eval_results/arc_easy.yaml", "other/adapter_model.safetensors", "runs/lora/seed-0/metrics.jsonl"]
    assert main(["push", str(run), "--to", "me/patch"]) == 0
    title = hub.titles[repository]["report.html"]
    files = {**dict.fromkeys(earlier, b"x"), ".gitattributes": b"by the hub, for large files"}
    hub.repositories[repository] |= {**own, **files}
    hub.titles[repository] |= {**dict.fromkeys(own, "Upload with hfpatch and hf"), **dict.fromkeys(files, title)}
    capsys.readouterr()
    assert main(["push", str(run), "--to", "me/patch", "--method", "lora"]) == 0
    shared = {*contents(run, method="lora", repo_id="me/patch")}
    assert {*hub.repositories[repository]} == {*shared, *own}
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("replaced")] == ["replaced a file of another commit: README.md"]
    assert {f"removed: {name}" for name in earlier} <= {*lines}
    assert "removed: runs/lora/seed-1/patch/patch.json" in lines
    assert not [line for line in lines if "mine" in line]


@pytest.mark.parametrize("call", ["create_repo", "list_repo_tree", "create_commit"])
def test_an_interrupted_push_says_what_is_on_the_hub(hub, run, reach, capsys, monkeypatch, call):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    reach(hub.address)
    monkeypatch.setattr(HfApi, call, interrupt)
    assert main(["push", str(run), "--to", "me/run"]) == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hfpatch: interrupted; the files go in one commit, so me/run has all of them or none")


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_no_network_is_one_line(run, reach, endpoint):
    reach(endpoint)
    with pytest.raises(HfpatchError, match=r"me/run: the hub refused the upload \(.*; check .* the network") as caught:
        sharing.push(run, "me/run")
    assert "\n" not in str(caught.value)


def test_paths_of_this_machine_are_cut_down_to_names(tmp_path):
    """Wherever a recipe may name one, and however YAML, JSON, HTML and LaTeX spell it in the report."""
    places = ["/home/some one/o'hara_1/büro & co", "/home/someone/data", "~/private/tasks", "/mnt/a disk/named so/run"]
    values = example()
    values["model"]["name"], values["data"]["source"] = places[:2]
    values["evaluation"]["include_path"] = places[2]
    values["provenance"]["command"] = f"hfpatch compare mine.yaml data_dir={places[1]} '--out={places[3]}'"
    values["warnings"] = [f"{places[1]}/train.txt: see https://example.org/some/page, 3/4 of it"]
    folder = write_run(tmp_path / "run", values)
    (folder / "recipe.yaml").write_text(write_yaml({"model": {"name": places[0]}, "data": {"source": places[1]}}))
    patch = patch_folder(folder / "runs" / "lora" / "seed-0" / "patch")
    write_report(folder)
    assert "someone/data" in (folder / "report.html").read_text()
    copied = shutil.copytree(patch, tmp_path / "copied")
    for files in (contents(copied), contents(patch), contents(folder, method="lora"), contents(folder)):
        texts = {name: file.read_bytes() if hasattr(file, "read_bytes") else file for name, file in files.items()}
        for name, text in texts.items():
            assert not [
                word for word in (b"some one", b"hara", b"someone", b"private/", b"disk", b"named so") if word in text
            ], name
    cut = {"model": {"name": "büro & co"}, "data": {"source": "data"}}
    assert yaml.safe_load(texts["recipe.yaml"]) == cut
    assert json.loads(texts["results.json"])["model"]["name"] == "büro & co"
    assert json.loads(texts["results.json"])["warnings"] == ["train.txt: see https://example.org/some/page, 3/4 of it"]


@pytest.mark.parametrize("base", ["org/model", "org/model/tiny.Q4_1.gguf"])
def test_a_base_in_a_relative_folder_is_none_of_the_hub(base, tmp_path, monkeypatch):
    """The folder of an organisation's model has the name of its repository; it is pushed from another folder."""
    monkeypatch.chdir(tmp_path)
    make_model("gpt2").save_pretrained("org/model")
    write_gguf(tmp_path / "org/model/tiny.Q4_1.gguf", "llama", "Q4_1")
    is_gguf = base.endswith("gguf")  # else without its tokenizer
    model = load_base(base).model if is_gguf else AutoModelForCausalLM.from_pretrained(base)
    hfpatch.save_patch(hfpatch.patch(model, hfpatch.PreProjectionConfig()), "patch")
    folders, values = [], example()
    for name, commit in (("local", None), ("hub", "a" * 40)):
        values["model"] |= {"name": "org/model", "revision": commit}
        folders.append(write_run(tmp_path / name, values))
    monkeypatch.chdir(tmp_path.parent)
    patch = contents(tmp_path / "patch")
    assert json.loads(patch["pre_projection/adapter_config.json"])["base_model_name_or_path"] == base.rpartition("/")[2]
    local, hub = (contents(folder)["README.md"].decode() for folder in folders)
    assert "base_model:" not in local
    assert "base_model: org/model" in hub


def test_results_in_a_folder_named_after_a_base_of_the_hub_are_not_the_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/model/checkpoint-1").mkdir(parents=True)
    model = make_model("gpt2")
    model.name_or_path = "org/model"
    hfpatch.save_patch(hfpatch.patch(model, hfpatch.PreProjectionConfig()), "patch")
    files = contents(tmp_path / "patch")
    assert "base_model: org/model" in files["README.md"].read_text()
    assert json.loads(files["patch.json"].read_text())["base"]["name"] == "org/model"
    config = json.loads(files["pre_projection/adapter_config.json"].read_text())
    assert config["base_model_name_or_path"] == "org/model"


def test_one_method_stands_at_the_top_ready_to_be_loaded(run):
    files = contents(run, method="lora", seed=1)
    assert {"patch.json", "README.md", "lora/adapter_model.safetensors", "report.html"} <= set(files)
    assert not [path for path in files if path.startswith("runs/")]
    assert json.loads(files["patch.json"])["base"]["name"] == "my-base"
    card = files["README.md"].read_text()
    assert "/home/someone" not in card
    for text in ("lora on my-base", "## Data", "42.0 %", "+1.5 [−2.6, 5.6] points", "Seed: 1"):
        assert text in card


def test_scores_on_data_sets_of_the_hub_are_in_its_form(tmp_path):
    folder = write_run(tmp_path / "run", json.loads(json.dumps(example()).replace("tinyworld_cloze", "arc_easy")))
    patch_folder(folder / "runs" / "lora" / "seed-1" / "patch")
    files = contents(folder, method="lora", repo_id="me/patch")
    assert [name for name in files if ".eval_results" in name] == [".eval_results/arc_easy.yaml"]
    patch_folder(folder / "runs" / "lora" / "seed-7" / "patch")  # trained, not yet scored
    patch_folder(folder / "runs" / "lora" / "seed-1 (copy)" / "patch")
    unscored = contents(folder, method="lora", seed=7, repo_id="me/patch")
    assert unscored.keys() >= {"patch.json", "results.json"}
    assert not [name for name in unscored if ".eval_results" in name]
    (entry,) = yaml.safe_load(files[".eval_results/arc_easy.yaml"])
    assert entry["dataset"] == {"id": "allenai/ai2_arc", "task_id": "arc_easy"}
    assert entry["value"] == 0.42
    assert entry["source"]["url"] == f"{constants.ENDPOINT}/me/patch/blob/main/report.md"
    assert entry["notes"] == "acc of lm-eval 0.4.13, task version 1, 0-shot, 400 documents, seed 1"
    if hasattr(huggingface_hub, "parse_eval_result_entries"):  # the hub's own reader
        (read,) = huggingface_hub.parse_eval_result_entries([entry])
        assert (read.dataset_id, read.value) == ("allenai/ai2_arc", 0.42)


def test_the_first_seed_is_the_lowest(run):
    runs = run / "runs" / "lora"
    for old, new in ((0, 10), (1, 2)):
        (runs / f"seed-{old}").rename(runs / f"seed-{new}")
    assert contents(run, method="lora") == contents(run, method="lora", seed=2)


def test_links_that_lead_out_of_the_folder_are_left_out(run, tmp_path, capsys):
    """Of a run and of a patch, files and folders; what a link inside names is shared."""
    patch = run / "runs" / "lora" / "seed-0" / "patch"
    before = {*contents(run)}, {*contents(patch)}
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "id_rsa").write_text("secret")
    for link in (patch / "notes.txt", patch / "lora" / "vocab.json", run / "figures" / "gain.svg"):
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(tmp_path / "secrets" / "id_rsa")
    (patch / "more").symlink_to(tmp_path / "secrets")
    (run / "results.csv").unlink()
    (run / "results.csv").symlink_to(tmp_path / "secrets" / "id_rsa")
    (patch / "again.json").symlink_to("patch.json")
    with pytest.warns(UserWarning, match="leads out of .*, so it is left out") as warned:
        shared = {*contents(run)}, {*contents(patch)}
    inside = patch.relative_to(run).as_posix()
    assert shared == (before[0] - {"results.csv"} | {f"{inside}/again.json"}, before[1] | {"again.json"})
    named = {str(warning.message).partition(": ")[0] for warning in warned}
    assert {str(patch / "notes.txt"), str(patch / "lora" / "vocab.json"), str(run / "results.csv")} <= named
    assert main(["push", str(patch), "--to", "me/patch", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "notes.txt" not in out
    assert f"hfpatch: warning: {patch / 'notes.txt'}: leads out of" in err


@pytest.mark.parametrize(
    ("kind", "options"), [("run", {}), ("run", {"method": "lora"}), ("patch", {}), ("tensors", {})]
)
def test_a_snapshot_in_the_cache_of_the_hub_is_refused(run, kind, options, tmp_path):
    """Its files are links to blobs beside it; a push of what is left would only remove what is in the repository."""
    blobs = run if kind == "run" else run / "runs" / "lora" / "seed-0" / "patch"
    for file in [path for path in blobs.rglob("*") if path.is_file()]:
        link = tmp_path / "snapshot" / file.relative_to(blobs)
        link.parent.mkdir(parents=True, exist_ok=True)
        if kind == "tensors" and file.suffix != ".safetensors":
            shutil.copy(file, link)
        else:
            link.symlink_to(file)
    with pytest.raises(HfpatchError, match=r"leads out of .* push a copy"):
        sharing.push(tmp_path / "snapshot", "me/patch", **options, dry_run=True)


def test_a_patch_alone_goes_whole(tmp_path):
    model = make_model("gpt2")
    hfpatch.patch(model, hfpatch.PreProjectionConfig())
    hfpatch.save_patch(model, tmp_path / "patch")
    files = contents(tmp_path / "patch")
    assert {path for path in files if "/" not in path} == {"patch.json", "README.md"}


def test_a_copy_of_a_pushed_patch_is_a_patch(run, tmp_path):
    """With the report of its run beside it; what was downloaded can be pushed again."""
    files = contents(run, method="lora") | {".eval_results/arc_easy.yaml": b"[]"}
    for name, file in files.items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(file if isinstance(file, bytes) else file.read_bytes())
    assert contents(tmp_path / "copy") == {name: tmp_path / "copy" / name for name in files}
    with pytest.raises(HfpatchError, match="leave them out"):
        contents(tmp_path / "copy", method="lora")


def test_what_trainer_resumes_from_is_left_out(tmp_path):
    """Its pickles name paths of this machine, and the optimiser's state is larger than the patch."""
    options = {"max_steps": 1, "save_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 8
    for wrap in (hfpatch.patch, get_peft_model):
        model = wrap(make_model("gpt2"), hfpatch.PreProjectionConfig())
        Trainer(model, TrainingArguments(tmp_path, **options), train_dataset=rows).train()
        checkpoint = tmp_path / "checkpoint-1"
        assert {"training_args.bin", "optimizer.pt"} <= {path.name for path in checkpoint.iterdir()}
        shared = {*contents(checkpoint)} - {"generation_config.json"}
        assert shared == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
        outer = shutil.copytree(checkpoint, tmp_path / wrap.__name__)  # as `Trainer.save_model` leaves it
        shutil.copytree(checkpoint, outer / "checkpoint-1")
        (outer / "checkpoint-2").mkdir()
        (outer / "checkpoint-2" / "adapter_config.json").write_text("{")  # as a job that was killed leaves one
        (outer / "runs").mkdir()
        (outer / "runs" / "events.out.tfevents.1.my-machine.2.0").touch()
        assert {*contents(outer)} - {"generation_config.json"} == shared
        (outer / "config.json").write_text("{}")
        assert {*contents(outer)} - {"generation_config.json", "model.safetensors"} == {*shared, "config.json"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "lorra"}, "did you mean 'lora'"),
        ({"method": "baseline"}, "no saved patch"),
        ({"method": "lora", "seed": 9}, "no patch of seed 9; it has seed-0, seed-1"),
        ({"seed": 1}, "--seed 1: is the seed of one method's patch"),
    ],
)
def test_what_is_not_there_is_named(run, options, message):
    with pytest.raises(HfpatchError, match=message):
        contents(run, **options)


@pytest.mark.parametrize("text", ['{"base": {"name": "/home/me/base"', '{"base":' * 100_000, "[]", '{"adapters": 3}'])
def test_a_damaged_patch_is_one_line(text, tmp_path, capsys):
    (tmp_path / "patch.json").write_text(text)
    assert "patch.json: " in refused(capsys, "push", tmp_path, "--to", "me/patch", "--dry-run")


@pytest.mark.parametrize("change", [lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:-1])])
@pytest.mark.parametrize("alone", [False, True])
def test_a_patch_that_could_not_be_loaded_is_one_line(alone, change, tmp_path, capsys):
    part = patch_folder(tmp_path) / "lora"
    change(part / "adapter_model.safetensors")
    folder = part if alone else tmp_path
    assert "adapter_model.safetensors: " in refused(capsys, "push", folder, "--to", "me/patch", "--dry-run")
    (part / "adapter_model.safetensors").unlink(missing_ok=True)
    (part / "adapter_model.bin").touch()  # as PEFT wrote them once
    assert {*contents(part)} == {"adapter_config.json", "adapter_model.bin"}


@pytest.mark.parametrize("change", [lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:-1])])
def test_a_model_that_is_not_whole_is_one_line(change, tmp_path, capsys):
    make_model("gpt2").save_pretrained(tmp_path, max_shard_size="20KB")
    file = min(tmp_path.glob("model-*.safetensors"))
    change(file)
    assert f"{file}: truncated or not safetensors (" in refused(capsys, "push", tmp_path, "--to", "me/a", "--dry-run")
    file.unlink(missing_ok=True)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": []}')
    assert "index.json: has no weight_map" in refused(capsys, "push", tmp_path, "--to", "me/a", "--dry-run")


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(HfpatchError, match=r"no finished .* runs/\*/seed-\*/patch and runs/\*/seed-\*/model\)"):
        contents(tmp_path)
    with pytest.raises(HfpatchError, match="leave them out"):
        contents(tmp_path, method="lora")


def test_a_dry_run_sends_nothing(capsys, run):
    assert main(["push", str(run), "--to", "me/run", "--dry-run"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "report.html" in out
    assert out[-1].endswith("files, not sent")


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
@pytest.mark.parametrize("repo", ["not a name", "a/b/c", "", "alone"])
def test_a_name_that_cannot_be_is_one_line(capsys, run, repo, options):
    assert f"error: {repo!r} is not a repository name" in refused(capsys, "push", run, "--to", repo, *options)


@pytest.mark.parametrize(
    ("evaluation", "expected"),
    [
        ({"tasks": ["page", "cloze"], "limit": None}, [False, False]),
        ({"tasks": ["page", "cloze"], "limit": 5}, [True, True]),
        ({"tasks": {"page": {"limit": 5}, "cloze": None}, "limit": None}, [True, False]),
        ({"tasks": {"a_group": {"limit": 5}, "cloze": None}, "limit": None}, [True, False]),
    ],
)
def test_a_part_of_a_set_is_called_so(evaluation, expected):
    results = SimpleNamespace(evaluation=evaluation)
    assert [_is_limited(results, task) for task in ("page", "cloze")] == expected
