import pytest
from torch import nn

from hfpatch.support.modes import evaluating


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
