"""What tests of the commands share."""

from hfpatch.__main__ import main

RECIPE = """\
name: small
data: {block_size: 32, max_documents: 60}
training: {steps: 3, warmup_steps: 1, batch_size: 2}
evaluation: {tasks: [tinyworld_cloze], limit: 4}
methods:
  baseline: []
  pre_projection:
    - type: pre_projection
"""


def refused(capsys, *arguments: object) -> str:
    """Run hfpatch, expect exit code 2 and exactly one line on standard error, and return that line."""
    assert main([str(argument) for argument in arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("hfpatch: error: ")]
    assert len(errors) == 1
    assert lines[-1] == errors[0]
    assert not any("Traceback" in line for line in lines)
    return errors[0]
