"""Patching models whose blocks are not all alike: hybrids, several stacks, and tied blocks."""

import pytest
from families import unchanged
from transformers import HrmTextConfig, JambaConfig, Zamba2Config, ZambaConfig

from hfpatch import HfpatchError, PreProjectionConfig, find_sites, patch, patch_summary
from hfpatch.twins import twin


def hybrid():
    return twin(JambaConfig())


def test_blocks_without_attention_are_left_out_and_counted():
    summary = patch_summary(patch(hybrid(), PreProjectionConfig()))
    assert list(summary.per_layer) == [1]
    assert summary.skipped == {0: "JambaMambaDecoderLayer without softmax attention"}
    assert "left out: 1 (0): JambaMambaDecoderLayer without softmax attention" in str(summary)


def test_a_layer_without_attention_cannot_be_chosen_and_the_model_stays():
    model = hybrid()
    message = "layer 0 cannot be changed: JambaMambaDecoderLayer without softmax"
    with unchanged(model), pytest.raises(HfpatchError, match=message):
        patch(model, PreProjectionConfig(layers_to_transform=[0, 1]))


def test_layers_of_several_lists_are_counted_one_after_the_other():
    model = patch(twin(HrmTextConfig()), PreProjectionConfig())
    counts = patch_summary(model).per_layer
    assert list(counts) == list(range(len(find_sites(model))))
    assert len(set(counts.values())) == 1
    seeds = {p.flatten()[0].item() for n, p in model.named_parameters() if "preproj_up" in n}
    assert len(seeds) == len(counts)


@pytest.mark.parametrize("kind", [ZambaConfig, Zamba2Config])
def test_modules_added_to_tied_blocks_stay_apart(kind):
    model = patch(twin(kind()), PreProjectionConfig())
    added = {n: p for n, p in model.named_parameters() if "preproj_" in n}
    model.tie_weights()
    assert {n: p for n, p in model.named_parameters() if "preproj_" in n}.keys() == added.keys()
    assert all(dict(model.named_parameters())[n] is p for n, p in added.items())
