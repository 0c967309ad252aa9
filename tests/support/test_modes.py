import pytest
from torch import nn

from hfpatch.support.modes import evaluating, replaced


def test_each_module_is_in_its_own_mode_again():
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout().eval(), nn.Linear(2, 2)))
    before = [module.training for module in model.modules()]
    assert not all(before)
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before
    with pytest.raises(KeyError), evaluating(model):
        raise KeyError
    assert [module.training for module in model.modules()] == before
    with evaluating(model.eval()):
        pass
    assert not any(module.training for module in model.modules())


def test_attributes_are_those_of_the_object_or_its_class_again():
    module = nn.Linear(2, 2)
    module.own = 1
    with replaced(module, forward=len, own=2):
        with replaced(module, forward=str):
            assert module.forward is str
        assert (module.forward, module.own) == (len, 2)
    with pytest.raises(KeyError), replaced(module, forward=len):
        raise KeyError
    assert module.own == 1
    assert "forward" not in vars(module)
