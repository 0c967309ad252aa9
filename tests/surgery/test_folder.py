import hashlib
import json
import shutil
import warnings
from itertools import cycle

import pytest
import safetensors.torch
import torch
from damage import WRONG, damaged, places
from families import logits_of, make_model, make_tokens, perturb
from peft import IA3Config, LNTuningConfig, LoraConfig, PeftConfig, PeftModel

import hfpatch
from hfpatch import CanonConfig, HfpatchError, LoReFTConfig, NonlinearQueryConfig, PreProjectionConfig
from hfpatch.surgery.budget import attention_modules
from hfpatch.tuners.adapters import activate_adapters, active_adapters, stack

PARTS = ("pre_projection", "lora", "nonlinear_query")
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def parts(model):
    return [
        PreProjectionConfig(gated=True, content_skip=True),
        LoraConfig(r=2, target_modules=attention_modules(model)),
        NonlinearQueryConfig(rank=3),
    ]


def patched(case="llama", dtype=torch.float32):
    model = make_model(case, dtype)
    hfpatch.patch(model, parts(model))
    perturb(model, std=0.2)
    return model


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return hfpatch.save_patch(patched(), tmp_path_factory.mktemp("saved") / "patch")


@pytest.fixture
def folder(written, tmp_path):
    """A saved patch that a test may spoil."""
    return shutil.copytree(written, tmp_path / "patch")


def refused(folder, message, model=None, **options):
    """Check that loading is refused with one line, and that the model is left as it was."""
    model = model or make_model("llama")
    names, before = list(model.state_dict()), logits_of(model, make_tokens())
    with pytest.raises(HfpatchError, match=message):
        hfpatch.load_patch(model, folder, **options)
    assert list(model.state_dict()) == names
    assert torch.equal(logits_of(model, make_tokens()), before)
    assert not stack(model)
    assert all(p.requires_grad for p in model.parameters())


def edit(path, **changes):
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps(content))


def test_what_is_written(written):
    files = {str(file.relative_to(written)) for file in written.rglob("*") if file.is_file()}
    assert files == {"patch.json", "README.md", *(f"{n}/{f}" for n in PARTS for f in (TENSORS, CONFIG, "README.md"))}
    manifest = json.loads((written / "patch.json").read_text())
    assert [adapter["name"] for adapter in manifest["adapters"]] == [*PARTS]
    card = (written / "README.md").read_text()
    for word in ("library_name: peft", "load_patch", *PARTS):
        assert word in card
    assert list(written.parent.iterdir()) == [written]  # no temporary file remains


def test_the_manifest_names_its_version_and_no_path_of_the_base(tmp_path):
    model = patched()
    model.name_or_path = str(tmp_path / "my-base")
    (tmp_path / "my-base").mkdir()
    (tmp_path / "my-base" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    text = (hfpatch.save_patch(model, tmp_path / "a") / "patch.json").read_text()
    assert str(tmp_path) not in text
    manifest = json.loads(text)
    assert manifest["hfpatch"] == hfpatch.__version__
    assert (manifest["base"]["name"], manifest["base"]["licence"]) == ("my-base", "apache-2.0")
    assert "apache-2.0" in (tmp_path / "a" / "README.md").read_text()


@pytest.mark.parametrize("name", PARTS)
def test_each_part_is_a_valid_adapter_of_peft(written, name):
    model = patched()
    model.set_adapter(name)
    tokens = make_tokens()
    by_peft = PeftModel.from_pretrained(make_model("llama"), written / name)
    assert torch.equal(logits_of(by_peft, tokens), logits_of(model, tokens))
    by_us = hfpatch.load_patch(make_model("llama"), written / name)
    assert torch.equal(logits_of(by_us, tokens), logits_of(model, tokens))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("alone", ["lora", "ia3"])
def test_parts_that_nest_on_one_module_load_alone_too(order, alone, tmp_path):
    model, tokens = make_model("llama"), make_tokens()
    targets = attention_modules(model)
    configs = [LoraConfig(r=2, target_modules=targets), IA3Config(target_modules=targets, feedforward_modules=[])]
    hfpatch.patch(model, configs[::order])
    perturb(model, std=0.2)
    hfpatch.save_patch(model, tmp_path / "patch")
    model.set_adapter(alone)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*[Mm]issing.*keys.*")
        again = PeftModel.from_pretrained(make_model("llama"), tmp_path / "patch" / alone)
    assert torch.equal(logits_of(again, tokens), logits_of(model, tokens))


@pytest.mark.parametrize("names", [["a", "ab", "b"], ["up", "down", "weight_"], ["lora", "preproj_x", "nonlinear_y"]])
def test_names_that_contain_one_another(names, tmp_path):
    model, tokens = make_model("gpt2"), make_tokens()
    hfpatch.patch(model, parts(model), names=names)
    perturb(model, std=0.2)
    fresh = hfpatch.load_patch(make_model("gpt2"), hfpatch.save_patch(model, tmp_path / "patch"))
    assert torch.equal(logits_of(fresh, tokens), logits_of(model, tokens))
    assert list(stack(fresh)) == names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_keep_the_dtype_in_which_they_were_saved(dtype, tmp_path):
    model = patched("gpt_neox", torch.bfloat16)
    for p in model.parameters():
        p.data = p.data.to(dtype if p.requires_grad else torch.bfloat16)
    fresh = hfpatch.load_patch(make_model("gpt_neox", torch.bfloat16), hfpatch.save_patch(model, tmp_path / "p"))
    state = dict(model.named_parameters())
    for name, p in fresh.named_parameters():
        assert p.dtype == state[name].dtype
        assert torch.equal(p, state[name])
        assert not p.requires_grad, name


@pytest.mark.parametrize("kind", [LoraConfig, IA3Config])
def test_what_peft_keeps_as_a_set_is_written_in_order(tmp_path, kind):
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    extra = {"feedforward_modules": names[4:]} if kind is IA3Config else {}
    model = hfpatch.patch(make_model("llama"), kind(target_modules=names, **extra))
    (part,) = hfpatch.save_patch(model, tmp_path / "patch").glob(f"*/{CONFIG}")
    written = json.loads(part.read_text())
    assert written["target_modules"] == sorted(names)
    assert not extra or written["feedforward_modules"] == sorted(names[4:])


@pytest.mark.parametrize("name", ["notes.txt", "lora/notes.txt", "runs/adapter_config.json", ".git/config", "link"])
def test_files_of_others_in_a_patch_are_not_removed(folder, tmp_path, name):
    (folder / name).parent.mkdir(exist_ok=True)
    if name == "link":
        (tmp_path / "elsewhere").mkdir()
        (folder / name).symlink_to(tmp_path / "elsewhere")
    else:
        (folder / name).write_text("x")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(HfpatchError, match=f"patch: contains {name}, which is not of a patch"):
        hfpatch.save_patch(patched(), folder)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_is_no_patch_is_not_replaced(tmp_path):
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(HfpatchError, match="contains files of something other than a patch"):
        hfpatch.save_patch(patched(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    (tmp_path / "empty").mkdir()
    assert (hfpatch.save_patch(patched(), tmp_path / "empty") / "patch.json").is_file()


@pytest.mark.parametrize("where", ["there", "link to it", "link to a new one"])
def test_an_existing_patch_is_replaced_as_a_whole_and_a_link_is_followed(folder, tmp_path, where):
    target = tmp_path / "disk" / "patch" if where == "link to a new one" else folder
    (tmp_path / "link").symlink_to(target)
    model = hfpatch.patch(make_model("llama"), PreProjectionConfig())
    hfpatch.save_patch(model, folder if where == "there" else tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert {path.name for path in target.iterdir()} == {"patch.json", "README.md", "pre_projection"}


def test_a_model_without_adapters_is_not_saved_and_a_patched_one_takes_no_second(tmp_path, written):
    with pytest.raises(HfpatchError, match=r"no adapters to save; call hfpatch.patch"):
        hfpatch.save_patch(make_model("llama"), tmp_path / "patch")
    assert not list(tmp_path.iterdir())
    with pytest.raises(HfpatchError, match="has adapters already"):
        hfpatch.load_patch(patched(), written)


@pytest.mark.parametrize("change", ["value", "family"])
def test_another_base_is_refused_unless_allowed(folder, change):
    model = make_model("llama" if change == "value" else "mistral")
    if change == "value":
        model.model.layers[1].mlp.down_proj.weight.data.add_(0.1)
    refused(folder, "made for another base, 'LlamaForCausalLM'.*allow_other_base=True, or --allow-other-base", model)
    hfpatch.load_patch(model, folder, allow_other_base=True)
    assert len(stack(model)) == 3


def test_a_base_of_other_sizes_is_refused(folder):
    refused(folder, "names no attention of this model", make_model("gpt2"), allow_other_base=True)


def write(file, text):
    return lambda folder: (folder / file).write_text(text)


def change(file, **values):
    return lambda folder: edit(folder / file, **values)


def call_the_second(name):
    def rename(folder):
        adapters = json.loads((folder / "patch.json").read_text())["adapters"]
        adapters[1]["name"] = name
        edit(folder / "patch.json", adapters=adapters)

    return rename


def cut_to(kept):
    def cut(folder):
        path = folder / "pre_projection" / TENSORS
        path.write_bytes(path.read_bytes()[:kept])

    return cut


def tensors_of(part, act):
    """Change the tensors of a part, and what patch.json says of them."""

    def edit_tensors(folder):
        path, manifest = folder / part / TENSORS, json.loads((folder / "patch.json").read_text())
        tensors = safetensors.torch.load_file(path)
        act(tensors)
        safetensors.torch.save_file(tensors, path)
        changed = next(adapter for adapter in manifest["adapters"] if adapter["name"] == part)
        changed["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        edit(folder / "patch.json", **manifest)

    return edit_tensors


def remove(name):
    def removed(folder):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return removed


MANIFEST, PRE, LORA = r"patch\.json: not a patch manifest", f"pre_projection/{CONFIG}", f"lora/{CONFIG}"
EMPTY = ("[]", "{}", '{"format": 2, "base": {}, "adapters": []}', '{"format": 2, "base": 1, "adapters": [1]}', "null")
NO_CONFIG = ("{", '{"peft_type": "NO_SUCH"}', "{}", '{"peft_type": "PRE_PROJECTION", "expansion": -1}', "[]")
DAMAGE = [
    (remove("."), r"no patch here \(patch.json or adapter_config.json is missing\)"),
    (remove("patch.json"), r"no patch here .*; those of a run are runs/\*/seed-\*/patch"),
    *((write("patch.json", text), r"patch\.json: cannot be read as JSON") for text in ("{", "\x00", "not json")),
    *((write("patch.json", text), rf"{MANIFEST}|patch\.json: is not a JSON object") for text in EMPTY),
    *((change("patch.json", active=wrong), MANIFEST) for wrong in (["nobody"], 1, [[]])),
    *(
        (change("patch.json", **{key: wrong}), MANIFEST)
        for key, wrong in (("adapters", []), ("base", {}), ("base", "x"))
    ),
    *((change("patch.json", format=n), rf"patch\.json: format {n!r} is not 2") for n in (1, 3, "2", None)),
    *((call_the_second(name), ".") for name in ("../lora", "/tmp/lora", "lora/../lora")),
    (
        lambda folder: shutil.copytree(folder / "lora", folder / "nonlinear_query", dirs_exist_ok=True),
        "nonlinear_query: contains a lora adapter where patch.json says nonlinear_query",
    ),
    *((remove(f"lora/{name}"), rf"lora/{name}: missing") for name in (CONFIG, TENSORS)),
    (remove("lora"), f"{LORA}: missing"),
    *((write(PRE, text), rf"{PRE}: ") for text in NO_CONFIG),
    (change(LORA, alpha_pattern=None), "lora: PEFT cannot use this configuration .*'keys'"),
    (change(LORA, exclude_modules=True), r"lora: PEFT cannot use this configuration \(TypeError"),
    (change(PRE, dropout=10**400), "dropout=.* must be of type finite float"),
    *((cut_to(kept), rf"pre_projection/{TENSORS}: truncated") for kept in (0, 7, 100, 2000)),
    (tensors_of("pre_projection", lambda t: t.pop(min(t))), r"tensor 'base_model\.model\.model\.layers\.0.*' is"),
    (tensors_of("lora", lambda t: [t.pop(key) for key in sorted(t)[:3]]), r"is missing \(and 2 more\)"),
    (
        tensors_of("nonlinear_query", lambda t: t.update({"base_model.model.extra": torch.zeros(2)})),
        r"tensor 'base_model\.model\.extra' is unexpected",
    ),
    (tensors_of("pre_projection", lambda t: t.update({min(t): torch.zeros(3, *t[min(t)].shape)})), "has another shape"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_folder_is_refused_in_one_line(folder, damage, message):
    damage(folder)
    refused(folder, message)


def test_tensors_that_are_not_those_that_were_saved(folder):
    path = folder / "lora" / TENSORS
    tensors = safetensors.torch.load_file(path)
    tensors[min(tensors)] += 1
    safetensors.torch.save_file(tensors, path)
    refused(folder, rf"lora/{TENSORS}: is not the file that patch.json names")
    assert len(stack(hfpatch.load_patch(make_model("llama"), folder / "lora"))) == 1


def with_copies(model):
    """Parts some of whose modules, the copy and the norms, compute with one adapter alone."""
    copied = LoraConfig(r=2, modules_to_save=["embed_tokens"], target_modules=["q_proj"])
    return [copied, PreProjectionConfig(content_skip=True), LNTuningConfig(target_modules=["input_layernorm"])]


@pytest.mark.parametrize(
    ("make", "active"),
    [
        *((parts, active) for active in ([*PARTS], ["lora"], ["nonlinear_query", "pre_projection"], [])),
        *((with_copies, active) for active in (["lora", "pre_projection"], ["pre_projection", "lora"], ["ln_tuning"])),
        (with_copies, []),
    ],
)
def test_the_same_adapters_are_active_afterwards(make, active, tmp_path):
    model, tokens = make_model("llama"), make_tokens()
    hfpatch.patch(model, make(model))
    perturb(model, std=0.2)
    activate_adapters(model, active)
    fresh = hfpatch.load_patch(make_model("llama"), hfpatch.save_patch(model, tmp_path / "p"), trainable=True)
    assert torch.equal(logits_of(fresh, tokens), logits_of(model, tokens))
    assert active_adapters(fresh) == fresh.active_adapters() == active
    flags = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name, p in fresh.named_parameters() if p.requires_grad} == flags
    assert bool(flags) == bool(active)
    hfpatch.save_patch(fresh, tmp_path / "q")  # its manifest has the hash of every file of tensors
    assert (tmp_path / "p" / "patch.json").read_text() == (tmp_path / "q" / "patch.json").read_text()


def deleted_and_added(model, tmp_path):
    """Another kind acts before the one that was there first."""
    model.add_adapter(PreProjectionConfig(), "first")
    model.add_adapter(CanonConfig(), "second")
    model.delete_adapter("first")
    model.add_adapter(PreProjectionConfig(), "third")
    model.set_adapter(["second", "third"])


def deleted_the_first(model, tmp_path):
    """Its kind acts before one that was injected before the others of its kind."""
    hfpatch.patch(model, [PreProjectionConfig(), LoraConfig(target_modules=["q_proj"]), CanonConfig()])
    model.add_adapter(PreProjectionConfig(), "last")
    model.delete_adapter("pre_projection")
    model.set_adapter(["lora", "canon", "last"])


def deleted_and_none_is_active(model, tmp_path):
    hfpatch.patch(model, [LoReFTConfig(layers_to_transform=[0]), NonlinearQueryConfig(rank=3)])
    model.set_adapter("loreft")
    model.delete_adapter("loreft")
    model.save_pretrained(tmp_path / "saved")
    hfpatch.load_patch(make_model("llama"), tmp_path / "saved")


def loaded_by_transformers(model, tmp_path):
    """It activates the new adapter in the layers of its own kind alone."""
    model.add_adapter(LoReFTConfig(), "first")
    model.add_adapter(NonlinearQueryConfig(rank=3), "second")
    model.save_pretrained(tmp_path / "second")
    model.load_adapter(tmp_path / "second", adapter_name="third")


def refused_by_hfpatch(model, tmp_path):
    """Its name can be given again."""
    model.add_adapter(LoraConfig(target_modules=["q_proj"]), "first")
    with pytest.raises(HfpatchError):
        model.add_adapter(PreProjectionConfig(layers_to_transform=[7]), "second")
    model.add_adapter(PreProjectionConfig(), "second")
    with pytest.raises(HfpatchError):
        model.add_adapter(PreProjectionConfig(layers_to_transform=[7]), "third")


def refused_by_peft(model, tmp_path):
    """It leaves the configuration on the model."""
    model.add_adapter(PreProjectionConfig(), "first")
    with pytest.raises(ValueError, match="nothing"):
        model.add_adapter(LoraConfig(target_modules=["nothing"]), "second")


HISTORIES = [
    deleted_and_added,
    deleted_the_first,
    deleted_and_none_is_active,
    loaded_by_transformers,
    refused_by_hfpatch,
    refused_by_peft,
]


@pytest.mark.parametrize("history", HISTORIES)
def test_a_model_with_a_history_is_saved_as_it_computes(history, tmp_path):
    model = make_model("llama")
    history(model, tmp_path)
    perturb(model, std=0.2)
    fresh = hfpatch.load_patch(make_model("llama"), hfpatch.save_patch(model, tmp_path / "p"))
    assert torch.equal(logits_of(fresh, make_tokens()), logits_of(model, make_tokens()))


def test_an_order_that_no_stack_has_is_refused(tmp_path):
    first = PreProjectionConfig(layers_to_transform=[0])
    model = hfpatch.patch(make_model("llama"), [first, CanonConfig(), PreProjectionConfig()])
    hfpatch.save_patch(model, tmp_path / "p")
    model.delete_adapter("pre_projection")
    with pytest.raises(HfpatchError, match="canon and pre_projection_2 act in different orders"):
        hfpatch.save_patch(model, tmp_path / "q")
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("file", ["patch.json", *(f"{part}/{CONFIG}" for part in PARTS)])
def test_one_wrong_value_is_loaded_or_refused_in_one_line(folder, file):
    raw, model, values, messages = json.loads((folder / file).read_text()), make_model("llama"), cycle(WRONG), []
    for path, wrong in zip(places(raw), values):  # noqa: B905 without end
        (folder / file).write_text(json.dumps(damaged(raw, path, wrong)))
        try:
            hfpatch.unpatch(hfpatch.load_patch(model, folder))
        except HfpatchError as error:
            messages.append(str(error))
        except Exception as error:
            raise AssertionError(f"{path} is {wrong!r}") from error
        assert not stack(model)
    assert len(messages) > 5


def test_peft_does_not_try_a_wrong_part_of_a_configuration_again_and_again(folder, monkeypatch):
    """Without end: where a library had raised Python's limit of recursion, the process crashed."""
    edit(folder / f"lora/{CONFIG}", monteclora_config={"x": 1})
    real = PeftConfig.from_peft_type.__func__

    def asked(cls, **values):
        return pytest.fail("PEFT was asked") if values.get("monteclora_config") else real(cls, **values)

    monkeypatch.setattr(PeftConfig, "from_peft_type", classmethod(asked))
    refused(folder, "not an adapter configuration .*unexpected keyword argument 'x'")


@pytest.mark.parametrize("name", ["models/\udc80", None])
def test_a_base_without_a_name_or_with_one_that_is_not_utf8(tmp_path, name):
    model = patched()
    model.config._name_or_path = model.name_or_path = name
    hfpatch.load_patch(make_model("llama"), hfpatch.save_patch(model, tmp_path / "p"))


def test_an_unknown_option_in_a_config_is_not_ignored_silently(folder):
    edit(folder / "pre_projection" / CONFIG, gatedd=True)
    with pytest.warns(UserWarning, match="gatedd"):
        hfpatch.load_patch(make_model("llama"), folder)


class Trap:
    """Unpickling this would write a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("name", ["beside", "alone", "as safetensors"])
def test_a_pickle_is_never_loaded(folder, tmp_path, name):
    part = folder / "lora"
    torch.save(Trap(tmp_path / "sprung"), part / (TENSORS if name == "as safetensors" else "adapter_model.bin"))
    if name == "beside":  # good tensors
        assert len(stack(hfpatch.load_patch(make_model("llama"), folder))) == 3
    elif name == "alone":
        (part / TENSORS).unlink()
        refused(folder, r"only a pickle \(adapter_model.bin\), which is never loaded")
    else:
        refused(folder, "truncated or not safetensors")
    assert not (tmp_path / "sprung").exists()


def full(*args, **kwargs):
    raise safetensors.SafetensorError("Error while serializing: IoError(No space left on device (os error 28))")


def test_disk_full_leaves_the_patch_that_was_there(folder, tmp_path, monkeypatch):
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    model = patched()
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(HfpatchError, match=r"patch: cannot be written .*No space left on device"):
        hfpatch.save_patch(model, folder)
    monkeypatch.undo()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
