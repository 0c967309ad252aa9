import pytest
import torch
from training_blocks import make_blocks

from hfpatch.training.validation import mean_loss


def share(model, blocks, size, process, processes):
    """Return what one process adds, and in how many forward passes."""
    sums, passes = [], []
    handle = model.gpt_neox.register_forward_pre_hook(lambda *_: passes.append(1))
    mean_loss(
        model, blocks, batch_size=size, process=process, processes=processes,
        add_up=lambda value: (sums.append(value), value.clamp(min=1))[1],
    )  # fmt: skip
    handle.remove()
    return sums[0], len(passes)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize(("processes", "size"), [(2, 1), (2, 3), (3, 2), (5, 4)])
def test_processes_share_the_blocks_and_do_equally_many_passes(base, processes, size, layout):
    model, blocks = base(), make_blocks(layout=layout, documents=11)
    shares = [share(model, blocks, size, process, processes) for process in range(processes)]
    total = sum(value for value, _ in shares)
    assert len({passes for _, passes in shares}) == 1
    assert total[1] == blocks.count_predicted(range(len(blocks)))
    assert float(total[0] / total[1]) == pytest.approx(mean_loss(model, blocks, batch_size=len(blocks)), rel=1e-6)


def test_it_is_the_mean_over_lone_documents(base):
    model, blocks = base(), make_blocks(layout="padded", documents=9)
    total, count = 0.0, 0
    for row in range(len(blocks)):
        length = int(blocks[row]["attention_mask"].sum())
        ids = blocks[row]["input_ids"][:length]
        with torch.no_grad():
            scores = torch.log_softmax(model(ids[None]).logits[0].double(), dim=-1)
        total -= sum(scores[place - 1, ids[place]].item() for place in range(1, length))
        count += length - 1
    assert mean_loss(model, blocks, batch_size=4) == pytest.approx(total / count, rel=1e-6)
    assert not model.training


def test_a_failing_forward_pass_leaves_each_module_in_its_mode(base):
    model, blocks = base().train(), make_blocks(layout="padded", documents=2)
    model.get_output_embeddings().eval()
    before = [module.training for module in model.modules()]

    def fail(*_):
        raise RuntimeError("no memory")

    handle = model.gpt_neox.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no memory"):
        mean_loss(model, blocks, batch_size=1)
    handle.remove()
    assert [module.training for module in model.modules()] == before
