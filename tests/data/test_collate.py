import torch

from hfpatch.data.collate import collate


def row(**values):
    return {name: torch.tensor(value) for name, value in values.items()}


def test_rows_are_stacked_without_what_a_model_assumes_by_itself():
    batch = collate([row(input_ids=[1, 2], position_ids=[0, 0]), row(input_ids=[3, 4], position_ids=[0, 1])])
    assert batch["input_ids"].tolist() == [[1, 2], [3, 4]]
    assert batch["position_ids"].tolist() == [[0, 0], [0, 1]]
    assert set(collate([row(input_ids=[1, 2], position_ids=[0, 1])])) == {"input_ids"}
    assert set(collate([row(input_ids=[1, 2], attention_mask=[1, 1])])) == {"input_ids"}
    assert "attention_mask" in collate([row(input_ids=[1, 2], attention_mask=[1, 0])])
