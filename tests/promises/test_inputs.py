"""``check`` on models of every kind: what they are given, what is compared, and that defects are seen."""

import json
from dataclasses import replace

import pytest
import torch
import transformers as t
from own_methods import defined, forgotten, leaking
from safetensors.torch import load_file, save_file
from torch import nn

import hfpatch
from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig
from hfpatch.__main__ import main
from hfpatch.promises import run
from hfpatch.promises.inputs import BATCH, FRAMES, LENGTH, example_inputs, forward, no_random_layers
from hfpatch.sites import survey
from hfpatch.surgery.model_class import load_model
from hfpatch.twins import random_model, shrink, twin

CAUSAL, CACHE, PADDING, REACHED, ARRIVES, FEATURES, NO_OP = (
    "causality", "generation with and without cache", "left padding", "gradients reach exactly the added tensors",
    "the content skip reaches the residual", "PEFT's features", "no-op at init",
)  # fmt: skip
SKIP = PreProjectionConfig(content_skip=True)
ENCODER, VISION = r".*encoder\..*self_attn", r".*vis(ion|ual).*attn"
KINDS = {  # class, type, target_modules, number of attentions, promises that do not apply
    "encoder": (t.BertModel, "bert", None, 2, {CAUSAL, CACHE}),
    "masked": (t.BertForMaskedLM, "bert", None, 2, {CAUSAL, CACHE}),
    "classifier": (t.BertForSequenceClassification, "bert", None, 2, {CAUSAL, CACHE, PADDING}),
    "vision": (t.ViTModel, "vit", None, 2, {CAUSAL, CACHE, PADDING}),
    "images": (t.ViTForImageClassification, "vit", None, 2, {CAUSAL, CACHE, PADDING}),
    "speech": (t.Wav2Vec2Model, "wav2vec2", None, 2, {CAUSAL, CACHE, PADDING}),
    "speech to text": (t.WhisperForConditionalGeneration, "whisper", None, 2, {PADDING}),
    "speech encoder": (t.WhisperModel, "whisper", ENCODER, 2, {CACHE, PADDING}),
    "decoder": (t.BartForConditionalGeneration, "bart", None, 2, {PADDING}),
    "both": (t.BartModel, "bart", r".*self_attn", 4, {CACHE, PADDING}),
    "two towers": (t.CLIPModel, "clip", None, 4, {CAUSAL, CACHE, PADDING}),
    "image and text": (t.LlavaForConditionalGeneration, "llava", None, 2, set()),
    "image tower": (t.LlavaForConditionalGeneration, "llava", VISION, 2, {PADDING}),
    "packed images": (t.Qwen2VLForConditionalGeneration, "qwen2_vl", VISION, 2, {PADDING}),
    "time series": (t.PatchTSTModel, "patchtst", None, 2, {CAUSAL, CACHE, PADDING}),
}

HEADED = {  # heads of models whose body is no module of its own
    "projected images": (t.CLIPVisionModelWithProjection, "clip_vision_model"),
    "image classes of two towers": (t.CLIPForImageClassification, "clip"),
}


def made(kind):
    cls, model_type, *_ = {**KINDS, **HEADED}[kind]
    return random_model(shrink(t.CONFIG_MAPPING[model_type]()), cls)


@pytest.fixture(autouse=True)
def quick(only):
    only(*(name for name, _ in run.PROMISES if name not in ("torch.compile", FEATURES)))


@pytest.mark.parametrize(
    ("kind", "method"),
    [(kind, SKIP) for kind in KINDS] + [(kind, NonlinearQueryConfig()) for kind in ("vision", "both")],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")
def test_the_promises_hold_on_models_of_every_kind(kind, method):
    *_, target, changed, absent = KINDS[kind]
    report = hfpatch.check(made(kind), replace(method, target_modules=target))
    assert report.passed, str(report)
    assert report.changed == changed
    measured = {verdict.promise: verdict.measured for verdict in report.verdicts}
    assert {name for name in (CAUSAL, CACHE, PADDING) if measured[name].startswith("does not apply")} == absent


SECTIONED = [
    "Cosmos3EdgeForConditionalGeneration", "Ernie4_5_VLMoeForConditionalGeneration", "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration", "GlmImageModel", "GlmOcrForConditionalGeneration",
    "PaddleOCRVLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
    "Qwen2_5OmniThinkerForConditionalGeneration",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("method", [SKIP, NonlinearQueryConfig()], ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("name", [name for name in SECTIONED if hasattr(t, name)])
def test_the_promises_hold_where_times_rows_and_columns_turn_some_frequencies_each(name, method):
    kind = getattr(t, name)
    report = hfpatch.check(twin(kind.config_class(), kind), method)
    assert report.passed, str(report)


@pytest.mark.parametrize("kind", ["encoder", "vision", "speech to text"])
def test_peft_s_features_are_tested_on_a_twin_of_the_class(kind, only):
    only(FEATURES)
    (verdict,) = hfpatch.check(made(kind)).verdicts
    assert verdict.holds, verdict.measured
    assert "on a tiny twin" in verdict.measured
    assert "not apply" not in verdict.measured
    assert "save and load" not in verdict.measured


def shapes(model, sites=()):
    return {name: (*value.shape,) for name, value in example_inputs(model, sites).items()}


def test_what_models_are_given():
    ids = (BATCH, LENGTH)
    assert shapes(made("encoder")) == shapes(made("image and text")) == {"input_ids": ids}
    assert shapes(made("decoder")) == {"input_ids": ids, "decoder_input_ids": ids}
    assert shapes(made("vision")) == {"pixel_values": (BATCH, 3, 32, 32)}
    assert shapes(made("speech to text")) == {"input_features": (BATCH, 16, 128), "decoder_input_ids": ids}
    assert shapes(made("two towers")) == {"input_ids": ids, "pixel_values": (BATCH, 3, 32, 32)}
    assert shapes(made("time series")) == {"past_values": (BATCH, 64, 1)}
    model = made("image tower")
    inputs = example_inputs(model, survey(model).others)
    assert inputs["input_ids"].shape == (BATCH, 16 + LENGTH)  # an image has 16 patches
    assert ((inputs["input_ids"] == model.config.image_token_index).sum(1) == 16).all()
    model = made("speech")
    assert model(**example_inputs(model, [])).last_hidden_state.shape == (BATCH, FRAMES, 64)


def test_what_is_compared():
    model, tokens = made("masked"), torch.arange(3, 9)[None]
    assert torch.equal(forward(model, {"input_ids": tokens}), model(tokens).logits)
    assert torch.equal(forward(model.bert, {"input_ids": tokens}), model.bert(tokens).last_hidden_state)
    model = made("two towers")
    inputs = example_inputs(model, [])
    out = model(**inputs)
    assert torch.equal(forward(model, inputs)[-BATCH * 64 :], out.image_embeds.flatten())
    assert forward(model, inputs).shape == (2 * BATCH * BATCH + 2 * BATCH * 64,)


def test_layers_left_out_at_random_are_no_missing_gradients(only):
    only(REACHED)
    model = made("speech")
    model.config.layerdrop, model.config.mask_time_prob = 0.999, 0.9
    with no_random_layers(model):
        assert model.config.layerdrop == 0
        assert not model.config.apply_spec_augment
    assert (model.config.layerdrop, model.config.apply_spec_augment) == (0.999, True)
    (verdict,) = hfpatch.check(model, SKIP).verdicts
    assert verdict.holds, verdict.measured


def test_an_attention_that_the_model_does_not_read_needs_no_gradient(only):
    """Llava reads its vision tower before the last block."""
    only(REACHED)
    (verdict,) = hfpatch.check(made("image tower"), replace(SKIP, target_modules=VISION)).verdicts
    assert "3 of 6 added tensors" in verdict.measured
    assert "nothing reads model.vision_tower.encoder.layers.1.self_attn" in verdict.measured


def broken(model, config):
    return {verdict.promise for verdict in hfpatch.check(model, config).verdicts if not verdict.holds}


@pytest.mark.parametrize("kind", ["decoder", "speech to text", "image and text"])
def test_a_method_that_sees_the_future_is_seen(kind, only):
    only(CAUSAL, CACHE, NO_OP)
    with forgotten():
        assert broken(made(kind), defined(query=leaking)()) == {CAUSAL, CACHE}


@pytest.mark.parametrize("kind", ["encoder", "vision", "speech", "time series"])
def test_a_skip_that_nothing_reads_is_seen(kind, monkeypatch, only):
    def elsewhere(model):
        surveyed = survey(model)
        for site in surveyed.sites:
            object.__setattr__(site, "exit", nn.Identity())
        return surveyed

    monkeypatch.setattr("hfpatch.tuners.model.survey", elsewhere)
    monkeypatch.setattr("hfpatch.promises.site.find_sites", lambda model: elsewhere(model).sites)
    only(ARRIVES, REACHED, NO_OP)
    assert broken(made(kind), SKIP) == {ARRIVES, REACHED}


def test_given_inputs_are_used(only):
    only(NO_OP)
    used = []
    model = made("vision")
    model.register_forward_pre_hook(lambda module, args, kwargs: used.append(kwargs["pixel_values"]), with_kwargs=True)
    pixels = torch.randn(3, 3, 32, 32)
    assert hfpatch.check(model, inputs={"pixel_values": pixels}).passed
    assert hfpatch.check(model, inputs=pixels).passed  # its first argument
    assert all(tensor is pixels for tensor in used)
    with pytest.raises(HfpatchError, match=r"ViTModel does not take them: .*image size"):
        hfpatch.check(model, inputs={"pixel_values": torch.randn(1, 3, 8, 8)})
    with pytest.raises(HfpatchError, match="each row of input_ids is one token repeated"):
        hfpatch.check(made("masked"), inputs=torch.full((2, 9), 5))


def test_inputs_that_cannot_be_made_are_one_line(monkeypatch):
    model = made("vision")
    monkeypatch.setattr(type(model), "forward", lambda self, pixel_values, secret: None)
    with pytest.raises(HfpatchError, match=r"no inputs for ViTModel: .*'secret'; call hfpatch.check.*inputs="):
        hfpatch.check(model)
    assert not hasattr(model, "peft_config")


@pytest.mark.parametrize("kind", ["encoder", "images", "speech to text", "image and text"])
def test_a_folder_is_loaded_as_the_class_that_it_was_saved_as(kind, tmp_path, capsys, only):
    only(NO_OP)
    made(kind).save_pretrained(tmp_path)
    assert hfpatch.check(str(tmp_path)).passed
    for option in ([], ["--config-only"]):
        assert main(["check", str(tmp_path), "--json", *option]) == 0
        written = json.loads(capsys.readouterr().out)
        assert [report["method"] for report in written["reports"]] == ["PreProjectionConfig", "NonlinearQueryConfig"]
        assert not written["refused"]


@pytest.mark.parametrize(
    ("kind", "lost", "refused"),
    [
        ("encoder", "encoder.layer.1.", True),
        ("encoder", "embeddings.", True),
        ("encoder", "pooler.", False),
        ("classifier", "bert.encoder.layer.1.attention.self.query.weight", True),
        ("classifier", "classifier.", False),
        ("speech to text", "model.encoder.layers.0.", True),
        ("two towers", "vision_model.embeddings.", True),
        ("speech", "masked_spec_embed", False),
        ("masked", "cls.predictions.transform.", True),
        ("projected images", "visual_projection.", True),
        ("image classes of two towers", "vision_model.encoder.layers.1.", True),
        ("image classes of two towers", "classifier.", False),
    ],
)
def test_all_weights_but_a_new_heads_must_be_in_the_files(kind, lost, refused, tmp_path):
    cls = {**KINDS, **HEADED}[kind][0]
    made(kind).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(lost)}
    assert len(kept) < len(tensors)
    save_file(kept, file, metadata={"format": "pt"})
    if not refused:
        assert type(load_model(str(tmp_path))) is cls
        return
    with pytest.raises(HfpatchError, match=rf"is no complete {cls.__name__}: .* such as {lost}"):
        load_model(str(tmp_path))


def test_a_folder_whose_inputs_cannot_be_made_is_one_line(tmp_path, capsys, monkeypatch):
    made("vision").save_pretrained(tmp_path)
    monkeypatch.setattr("hfpatch.promises.inputs.MEDIA", ())
    monkeypatch.setattr(t.ViTModel, "dummy_inputs", property(lambda self: {}))
    assert main(["check", str(tmp_path)]) == 2
    assert "no inputs for ViTModel" in capsys.readouterr().err
