import re

from reporting.study_example import study

from hfpatch.reporting.citations import citation_section
from hfpatch.results.comparison import ComparisonResults


def keys(*results):
    return re.findall(r"@misc\{(\w+),", citation_section(results).blocks[-1].text)


def test_it_names_the_sources_of_what_ran_once_each(results, raw):
    assert keys(results) == ["hfpatch", "shinde2026preprojection", "hu2021lora", "lmeval"]
    assert keys(results, results) == keys(results)
    raw["methods"]["lora"]["parts"] = [{"type": "nonlinear_query"}, {"type": "vera"}, {"type": "query_temperature"}]
    changed = ComparisonResults.model_validate(raw)
    assert keys(changed)[2:] == ["karbevski2026nonlinear", "peft", "lmeval"]
    sources = ["hfpatch", "karbevski2026nonlinear", "karbevski2025keyvalue"]
    assert keys(ComparisonResults.model_validate(study())) == sources


def test_the_text_is_bibtex(results):
    text = citation_section([results]).blocks[-1].text
    assert text.count("{") == text.count("}")
    for entry in text.strip().split("\n\n"):
        assert re.fullmatch(r"@misc\{\w+,\n(  \w+ = \{.*\},\n)+\}", entry), entry
    assert "note = {commit c95d4b4a1b2c}" in text
