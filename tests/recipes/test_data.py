import pytest

from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import DataSettings


def test_bounds():
    assert DataSettings(held_out=0) == DataSettings()
    bad = [{"held_out": -1}, {"min_characters": -1}, {"max_documents": 0}, {"sauce": "x"}]
    for settings in [*bad, {"block_size": 1}, {"block_size": 10**9}]:
        with pytest.raises(HfpatchError):
            DataSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"config": "de"}, "data.config applies to hub data sets, and tinyworld/shifted is embedded"),
        ({"revision": "v2"}, "data.revision applies to hub data sets"),
        ({"streaming": True, "max_documents": 5}, "data.streaming applies to hub data sets"),
        ({"text_column": "story"}, "data.text_column: tinyworld/shifted is embedded in hfpatch and has no columns"),
        ({"max_documents": 10**9}, "data.max_documents is 1000000000, and of tinyworld/shifted"),
        ({"chat_template": "none.jinja"}, "data.chat_template applies to conversations"),
        ({"chat_template": "none.jinja", "source": "a.txt"}, "data.chat_template applies to conversations"),
        ({"chat_template": "none.jinja", "mixture": [{"source": "a"}, {"source": "b"}]}, "applies to conversations"),
        (
            {"mixture": [{"source": "a"}, {"source": "tinyworld/base", "config": "de"}]},
            "data.config applies to hub data sets",
        ),
        ({"append_eos": False, "source": "a.jsonl", "format": "messages"}, "data.append_eos applies to texts"),
    ],
)
def test_keys_without_an_effect_are_refused(settings, message):
    with pytest.raises(HfpatchError, match=message):
        DataSettings(**settings)


def test_the_template_of_a_mixture_is_that_of_its_conversations_and_the_end_that_of_its_texts():
    mixture = [{"source": "a.txt"}, {"source": "b.jsonl", "format": "messages"}]
    parts = DataSettings(chat_template="chat.jinja", append_eos=False, mixture=mixture).parts()
    assert [part.chat_template for part in parts] == [None, "chat.jinja"]
    assert [part.append_eos for part in parts] == [False, True]


def test_overrides_that_a_token_file_needs_are_accepted_by_it():
    chosen = DataSettings(
        source="owner/set", config="c", split="all", max_documents=9, streaming=True, append_eos=False
    )
    overrides = chosen.reset_text()
    assert set(overrides) == {
        "data.config=null", 'data.split="train"', "data.max_documents=null", "data.streaming=false",
        "data.append_eos=true",
    }  # fmt: skip
    assert DataSettings(source="owner/set").reset_text() == []
