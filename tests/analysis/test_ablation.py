import pytest
import torch
import torch.nn.functional as F
from families import make_model, make_tokens, perturb
from peft import LoraConfig
from transformers import AutoConfig

from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig, find_sites, patch
from hfpatch.analysis.ablation import ablate_layers, document_losses
from hfpatch.twins import twin

TARGETS = {"gpt_neox": ["query_key_value"], "gpt2": ["c_attn"], "llama": ["q_proj", "o_proj"]}


def stacked(case):
    parts = [PreProjectionConfig(content_skip=True), NonlinearQueryConfig()]
    model = patch(make_model(case), [*parts, LoraConfig(r=2, target_modules=TARGETS[case])])
    perturb(model)
    return model


def batches():
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, :4] = 0
    return [{"input_ids": make_tokens(3), "attention_mask": mask}]


@torch.no_grad()
def losses_by_hand(model):
    (batch,) = batches()
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    losses = []
    for row, start in zip(range(3), (0, 4, 0), strict=True):
        losses.append(float(F.cross_entropy(logits[row, start:-1], batch["input_ids"][row, start + 1 :])))
    return losses


@pytest.mark.parametrize("case", list(TARGETS))
def test_each_layers_ablation_is_the_model_with_that_layer_silenced_by_hand(case):
    model, twin = stacked(case), stacked(case)
    ablations = ablate_layers(model, lambda m: document_losses(m, batches()))
    assert [ablation.layer for ablation in ablations.without] == [0, 1, None]
    assert ablations.items == 3
    assert document_losses(twin, batches()) == pytest.approx(losses_by_hand(twin), rel=1e-6)
    whole = torch.tensor(losses_by_hand(twin)).double()
    assert ablations.score == pytest.approx(float(whole.mean()), rel=1e-6)
    for ablation in ablations.without:
        twin = stacked(case)
        for name, parameter in twin.named_parameters():  # what writes to the model's own numbers is set to zero
            ours = any(part in name for part in ("preproj_down", "preproj_skip", "norm_out", "lora_B"))
            if ours and (ablation.layer is None or f".{ablation.layer}." in name):
                parameter.data.zero_()
        values = torch.tensor(losses_by_hand(twin)).double()
        assert ablation.score == pytest.approx(float(values.mean()), rel=1e-6)
        assert ablation.change == pytest.approx(float((values - whole).mean()), abs=1e-6)
        assert ablation.error == pytest.approx(float((values - whole).std()) / 3**0.5, abs=1e-6)
    assert abs(ablations.without[-1].change) > 1e-4
    assert ablations.without[-1].score == pytest.approx(sum(losses_by_hand(make_model(case))) / 3, rel=1e-6)


def test_blocks_of_two_lists_are_not_taken_for_one():
    """HRM has two lists of blocks, so that every number occurs twice in the names of its modules."""
    model = patch(twin(AutoConfig.for_model("hrm_text")), PreProjectionConfig())
    ablations = ablate_layers(model, lambda m: [0.0, 1.0])
    assert [ablation.layer for ablation in ablations.without] == [site.layer for site in find_sites(model)] + [None]
    assert len(ablations.without) > 2


def test_flags_and_logits_are_left_as_they_were_also_where_a_score_fails():
    model, calls = stacked("gpt_neox"), []
    next(iter(p for n, p in model.named_parameters() if "preproj_up" in n)).requires_grad = False
    flags = {name: p.requires_grad for name, p in model.named_parameters()}

    def score(m):
        calls.append(losses_by_hand(m))
        if len(calls) == 6:
            raise RuntimeError("out of luck")
        return calls[-1]

    ablate_layers(model, score)  # whole, without one of two layers, without all
    with pytest.raises(RuntimeError):
        ablate_layers(model, score)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert losses_by_hand(model) == calls[0] == calls[4] != calls[5]


def test_a_plain_model_and_a_score_of_nothing_are_refused():
    with pytest.raises(HfpatchError, match="no adapters"):
        ablate_layers(make_model("llama"), lambda m: [0.0, 1.0])
    with pytest.raises(HfpatchError, match="1 numbers"):
        ablate_layers(stacked("llama"), lambda m: [0.0])
