"""Encoders, vision, speech and time series: what hfpatch computes is the formula at the places written down by hand."""

import pytest
import torch
from architectures import table
from architectures.formulas import nonlinear, on_output, pre_projected, tensors_of, with_first
from architectures.others import TOWERS, make, outputs, paths
from families import close, perturb
from transformers import CONFIG_MAPPING

import hfpatch
from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig

OLDER = [pytest.mark.skip(reason="this version of transformers has no such type")]
CASES = [
    pytest.param(kind, tower, id=f"{kind}-{i}", marks=[] if kind in CONFIG_MAPPING else OLDER)
    for kind in TOWERS
    for i, tower in enumerate(TOWERS[kind])
]


def naming(tower):
    return {"target_modules": tower.attention.replace(".", r"\.").replace("{}", r"\d+")} if tower.named else {}


def entering(model, tower, attention, change):
    """Make the attention receive ``change(x)`` instead of x; return the list of what it received."""
    received, module = [], model.get_submodule(attention)

    def enter(module, args, kwargs):
        if isinstance(tower.argument, int):
            received.append(change(args[tower.argument]))
            return (received[-1], *args[1:]), kwargs
        received.append(change(kwargs[tower.argument]))
        return args, {**kwargs, tower.argument: received[-1]}

    if tower.inside:
        for name in tower.inside:
            module.get_submodule(name).register_forward_pre_hook(
                lambda module, args: (received.append(change(args[0])), received[-1])[1:]
            )
    else:
        module.register_forward_pre_hook(enter, with_kwargs=True)
    return received


def patched(kind, tower, config):
    """Return a patched model off its initial values, its tensors by attention, and the plain outputs."""
    plain = outputs(make(kind), tower)
    model = hfpatch.patch(make(kind), config, names=["a"])
    assert torch.equal(outputs(model, tower), plain), "changes at init"
    perturb(model, std=0.1)
    method = "preproj" if isinstance(config, PreProjectionConfig) else "nonlinear_query"
    return model, tensors_of(model, method, "a"), plain


@pytest.mark.parametrize(("kind", "tower"), CASES)
def test_the_pre_projection_and_the_skip(kind, tower, tmp_path):
    model, tensors, plain = patched(kind, tower, PreProjectionConfig(content_skip=True, expansion=0.5, **naming(tower)))
    expected = make(kind)
    others = [path for part in TOWERS[kind] for path in paths(model, part)]
    assert sorted(tensors) == sorted(path for path, _ in (paths(model, tower) if tower.named else others))
    for other in [tower] if tower.named else TOWERS[kind]:
        for attention, exit_ in paths(model, other):
            weights = tensors[attention]
            received = entering(expected, other, attention, lambda x, weights=weights: pre_projected(x, weights))

            def add(output, weights=weights, received=received, factor=other.factor):
                if not received:  # a module that also ends another branch
                    return output
                return with_first(output, lambda branch: branch + received.pop() @ weights["skip"].T / factor)

            expected.get_submodule(exit_).register_forward_hook(lambda module, args, output, add=add: add(output))
    computed = outputs(model, tower)
    assert not close(computed, plain)
    assert close(computed, outputs(expected, tower))
    hfpatch.save_patch(model, tmp_path / "patch")
    assert torch.equal(outputs(hfpatch.load_patch(make(kind), tmp_path / "patch"), tower), computed)
    assert torch.equal(outputs(hfpatch.unpatch(model), tower), plain)


@pytest.mark.parametrize(("kind", "tower"), CASES)
def test_the_nonlinear_query(kind, tower):
    if tower.query is None:
        with pytest.raises(HfpatchError, match=r"^[^\n]+: the scores of relative positions"):
            hfpatch.patch(make(kind), NonlinearQueryConfig(**naming(tower)))
        return
    model, tensors, plain = patched(kind, tower, NonlinearQueryConfig(rank=8, **naming(tower)))
    expected = make(kind)
    for other in [tower] if tower.named else TOWERS[kind]:
        for attention, _ in paths(model, other):
            weights, received = tensors[attention], entering(expected, other, attention, lambda x: x)

            def anchored(out, weights=weights, received=received, third=other.third):
                width = out.shape[-1] // 3 if third else out.shape[-1]
                query = (2 * out[..., :width] + nonlinear(received[-1], weights)) / 2
                return torch.cat([query, out[..., width:]], dim=-1)

            on_output(expected, f"{attention}.{other.query}", anchored)
    output = outputs(model, tower)
    assert not close(output, plain)
    assert close(output, outputs(expected, tower))


def test_the_page_has_every_type_that_is_tested():
    assert {name for names in table.KINDS.values() for name in names} == set(TOWERS)
    assert table.other_section() in table.FILE.read_text(encoding="utf-8")


def test_a_changed_switch_is_read_again():
    model = make("esmc")
    assert hfpatch.find_sites(model)[0].exit_factor == pytest.approx((2 / 36) ** -0.5)
    model.layers[0].scaling_factor = 0.5
    assert [site.exit_factor for site in hfpatch.find_sites(model)] == pytest.approx([2, (2 / 36) ** -0.5])
