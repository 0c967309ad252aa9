from types import SimpleNamespace

import torch
from torch.nn.functional import log_softmax

from hfpatch.training.loss import token_loss


def test_against_the_formula():
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7)
    labels = torch.tensor([[3, 1, -100, 2, 6], [-100, -100, 4, -100, 0]])
    total = 0.0
    for row in range(2):
        for place in range(1, 5):
            if labels[row, place] != -100:
                total -= log_softmax(logits[row, place - 1].double(), dim=-1)[labels[row, place]].item()
    outputs = SimpleNamespace(logits=logits)
    torch.testing.assert_close(token_loss(outputs, labels).item(), total / 5, rtol=1e-6, atol=0)
    torch.testing.assert_close(token_loss(outputs, labels, num_items_in_batch=20).item(), total / 20, rtol=1e-6, atol=0)


def test_low_precision_logits_are_summed_in_float32():
    logits = torch.randn(1, 4, 5, dtype=torch.bfloat16)
    labels = torch.tensor([[0, 1, 2, 3]])
    loss = token_loss(SimpleNamespace(logits=logits), labels)
    assert loss.dtype is torch.float32
    assert loss == token_loss(SimpleNamespace(logits=logits.float()), labels)
