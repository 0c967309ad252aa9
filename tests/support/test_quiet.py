"""Keeping messages for scripts out of the output."""

import logging
import os

import pytest
from families import make_model

from hfpatch import PreProjectionConfig, patch
from hfpatch.support.quiet import quiet_kernels, quiet_libraries
from hfpatch.surgery.peft_registration import _RegisteringLoader
from hfpatch.tuners import model as tuner_model


@pytest.fixture(autouse=True)
def _levels():
    """No levels are set, whatever an earlier test did."""
    loggers = [logging.getLogger(name) for name in ("bitsandbytes", "torchao", tuner_model.__name__)]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.NOTSET)
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


class Loader:
    """Imports PEFT as if a library of kernels spoke meanwhile, and fails."""

    def exec_module(self, module):
        for name, level in (("bitsandbytes.backends.cpu", "warning"), ("torchao", "warning"), ("peft", "warning")):
            getattr(logging.getLogger(name), level)("of %s", name)
        logging.getLogger("bitsandbytes").error("an error")
        raise ImportError("enough")


def test_what_libraries_say_of_their_kernels_while_peft_is_imported_is_kept_out(caplog):
    with pytest.raises(ImportError, match="enough"):
        _RegisteringLoader(Loader()).exec_module(logging)
    assert [record.getMessage() for record in caplog.records] == ["of peft", "an error"]
    logging.getLogger("bitsandbytes.cextension").warning("later")
    assert caplog.records[-1].getMessage() == "later"


def test_a_level_that_the_user_chose_stays(caplog):
    logging.getLogger("bitsandbytes").setLevel(logging.DEBUG)
    with quiet_kernels():
        logging.getLogger("bitsandbytes").warning("asked for")
    assert [record.getMessage() for record in caplog.records] == ["asked for"]


def test_commands_do_not_advise_on_sizes_that_a_recipe_chose(caplog, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(tuner_model, "_LARGE", 1)
    monkeypatch.setattr(tuner_model, "_LOGGED", set())
    quiet_libraries()
    patch(make_model("llama"), PreProjectionConfig(expansion=2.0))
    assert caplog.records == []
