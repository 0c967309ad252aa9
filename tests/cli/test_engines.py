"""The options of commands whose runs are worked on at a time."""

import pytest

from hfpatch.cli.engines import EngineCommand


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["--ray"], ["--ray", "local"]),
        (["--ray", "r"], ["--ray", "local", "r"]),
        (["--ray", "training.steps=3"], ["--ray", "local", "training.steps=3"]),
        (["r", "--ray", "--resume"], ["r", "--ray", "local", "--resume"]),
        (["--ray", "auto", "a=b:1"], ["--ray", "auto", "a=b:1"]),
        (["--ray", "ray://head:10001"], ["--ray", "ray://head:10001"]),
        (["--ray", "10.0.0.1:6379"], ["--ray", "10.0.0.1:6379"]),
        (["r", "--ray", ""], ["r", "--ray", ""]),  # such as "$HEAD" where it is not set
        (["--ray", "", "r"], ["--ray", "", "r"]),
    ],
)
def test_ray_without_an_address_is_this_machine(words, arguments):
    command = EngineCommand("any", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    assert command.make_context("any", words).args == arguments
