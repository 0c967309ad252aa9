"""Chat templates by name; prompts themselves are compared with lm-eval's in test_sample_log.py."""

import pytest
from own_tasks import CHAT, SHORT, write_model
from transformers import AutoTokenizer

from hfpatch.errors import HfpatchError
from hfpatch.evaluation.prompting import template_arguments


def test_templates_by_name(tmp_path, tokenizer, support):
    write_model(tmp_path / "one", support.gpt2(), tokenizer, CHAT)
    write_model(tmp_path / "two", support.gpt2(), tokenizer, {"default": CHAT, "short": SHORT})
    one, two = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("one", "two"))
    assert template_arguments(one, False) is template_arguments(one, True) is None
    said = [{"role": "user", "content": "Hello"}]
    shown = [two.apply_chat_template(said, tokenize=False, **template_arguments(two, name)) for name in (True, "short")]
    assert shown == ["<user>Hello\n", "Hello/"]
    with pytest.raises(HfpatchError, match=r"no template 'shrt' .did you mean 'short'.*; there are default, short"):
        template_arguments(two, "shrt")
    with pytest.raises(HfpatchError, match="the tokenizer has one template; give no name"):
        template_arguments(one, "short")
    with pytest.raises(HfpatchError, match="has no chat template; leave it out"):
        template_arguments(tokenizer, True)
