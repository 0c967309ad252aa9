import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from training_blocks import make_blocks

from hfpatch.data.blocks import blocks_from_stream
from hfpatch.data.tokenizer import TokenStream
from hfpatch.recipes.data import DataSettings
from hfpatch.training.validation import document_losses, mean_loss, start_losses


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


SIZE = 8


def documents(count=13):
    generator = np.random.default_rng(3)
    return [generator.integers(1, 63, size=length) for length in generator.integers(2, 30, size=count)]


def held_out(layout, *, learned=False):
    texts, generator = documents(), np.random.default_rng(4)
    tokens, lengths = np.concatenate(texts).astype(np.uint16), np.array([len(text) for text in texts])
    mask = generator.random(len(tokens)) < 0.5 if learned else None
    settings = DataSettings(source="made-up", block_size=SIZE, layout=layout)
    blocks = blocks_from_stream(TokenStream(tokens, lengths, mask), settings, pad_token_id=0, with_owners=True)
    masks = np.split(mask, np.cumsum(lengths)[:-1]) if learned else [np.ones(len(text), bool) for text in texts]
    return blocks, masks


def losses_of(model, ids):
    """Return the loss of each token but the first, of a text by itself."""
    with torch.no_grad():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].double()
    return cross_entropy(logits[:-1], torch.from_numpy(ids.astype(np.int64))[1:], reduction="none").numpy()


def by_hand(model, layout, masks):
    """Return nats and tokens of each document, every stretch of it that is in a row run by itself."""
    texts, sums = documents(), np.zeros((13, 2))
    if layout == "stream":
        owners, flat = np.repeat(np.arange(13), [len(text) for text in texts]), np.concatenate(texts)
        for at in range(0, len(flat) - SIZE + 1, SIZE):
            for position, loss in enumerate(losses_of(model, flat[at : at + SIZE]), at + 1):
                sums[owners[position]] += loss, 1
        return sums
    for number, (ids, mask) in enumerate(zip(texts, masks, strict=True)):
        for at in range(0, SIZE if layout == "padded" or not mask.all() else len(ids), SIZE):
            wanted = mask[at : at + SIZE][1:]
            sums[number] += losses_of(model, ids[at : at + SIZE])[wanted].sum(), wanted.sum()
    return sums


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2"])
@pytest.mark.parametrize("layout", ["packed", "padded", "stream"])
def test_each_document_has_the_loss_of_its_tokens(base, layout, kind, processes):
    model, (blocks, masks) = base(kind), held_out(layout)
    assert max(map(len, documents())) > 3 * SIZE  # some are split over several rows
    shares = [
        document_losses(model, blocks, batch_size=2, process=process, processes=processes)
        for process in range(processes)
    ]
    expected = by_hand(model, layout, masks)
    np.testing.assert_allclose(sum(shares), expected, rtol=1e-5, atol=1e-5)
    total, count = expected.sum(axis=0)
    assert mean_loss(model, blocks, batch_size=3) == pytest.approx(total / count, rel=1e-6)
    assert count == blocks.count_predicted(range(len(blocks)))
    assert not model.training


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_only_learned_tokens_count(base, layout):
    with pytest.warns(UserWarning, match="left out"):
        blocks, masks = held_out(layout, learned=True)
    sums = document_losses(base(), blocks, batch_size=4)
    np.testing.assert_allclose(sums, by_hand(base(), layout, masks)[: len(sums)], rtol=1e-5, atol=1e-5)


def test_a_head_that_is_no_matrix_gives_the_same(base):
    model, (blocks, _) = base(), held_out("packed")
    expected = document_losses(model, blocks, batch_size=4)
    model.get_output_embeddings().register_forward_hook(lambda *_: None)  # so that logits are computed
    np.testing.assert_allclose(document_losses(model, blocks, batch_size=4), expected, rtol=1e-5)


def test_blocks_that_begin_inside_documents_are_scored_after_the_start_token(base):
    """The same losses as of each piece by itself, begun with the token; of those the first tokens apart."""
    model, texts, start = base(), documents(), 5
    tokens, lengths = np.concatenate(texts).astype(np.uint16), np.array([len(text) for text in texts])
    settings = DataSettings(source="made-up", block_size=SIZE)
    made = TokenStream(tokens, lengths)
    blocks = blocks_from_stream(made, settings, pad_token_id=0, start=[start], with_owners=True)
    sums, starts = np.zeros((13, 2)), np.zeros((2, 2))
    for number, ids in enumerate(texts):
        pieces = [ids[:SIZE], *(np.r_[start, ids[at : at + SIZE - 1]] for at in range(SIZE, len(ids), SIZE - 1))]
        for index, piece in enumerate(pieces):
            losses = losses_of(model, piece)[index > 0 :]  # neither the added token nor the next one is predicted
            sums[number] += losses.sum(), len(losses)
            starts[int(index > 0)] += losses.sum(), len(losses)  # fewer than 16 all
    np.testing.assert_allclose(document_losses(model, blocks, batch_size=4), sums, rtol=1e-5, atol=1e-5)
    shares = [start_losses(model, blocks, batch_size=4, process=process, processes=2) for process in range(2)]
    np.testing.assert_allclose(sum(shares), starts, rtol=1e-5, atol=1e-5)
    long = DataSettings(source="made-up", block_size=21)
    blocks = blocks_from_stream(made, long, pad_token_id=0, with_owners=True)
    firsts = [losses_of(model, ids[:21])[:16] for ids in texts]
    later = [losses_of(model, ids[21:])[:16] for ids in texts if len(ids) > 22]
    expected = [[sum(map(np.sum, rows)), sum(map(len, rows))] for rows in (firsts, later)]
    np.testing.assert_allclose(start_losses(model, blocks, batch_size=4), expected, rtol=1e-5, atol=1e-5)
    texts = documents(count=60)
    many = TokenStream(np.concatenate(texts).astype(np.uint16), np.array([len(text) for text in texts]))
    blocks = blocks_from_stream(many, settings, pad_token_id=0, start=[start], with_owners=True)
    counted = start_losses(model, blocks, batch_size=16)[:, 1].sum()
    assert counted == blocks.count_predicted(range(64)) < blocks.count_predicted(range(len(blocks)))
