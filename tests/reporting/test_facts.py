from hfpatch.reporting.facts import environment_facts, protocol_facts, provenance_facts

EMPTY = {"schema": 2, "kind": "comparison", "name": ""}


def test_the_protocol_names_model_data_plans_and_settings(results):
    facts = dict(protocol_facts(results))
    assert facts["Protocol"].startswith("as it should be")
    assert facts["Model"] == ("tinyworld/gpt-neox, gpt_neox, 1,000,000 parameters, float32, SHA-256 aaaaaaaaaaaaaaaa…")
    assert "2,000 documents, 3,200 blocks, 409,600 tokens, blocks of 128 tokens" in facts["Data"]
    assert facts["Batch plan, seed 1"] == "200 steps of 16 blocks, SHA-256 1111111111111111…"
    assert "seeds [0, 1], trainable_dtype float32" in facts["Training"]
    assert "limit" not in facts["Evaluation"]
    assert facts["Task tinyworld_text"] == "version 1, data SHA-256 dddddddddddddddd…"


def test_the_environment_names_command_commit_and_versions(build, raw):
    raw["provenance"]["dirty"] = True
    facts = dict(provenance_facts(build(raw).provenance))
    assert facts["Command"] == "hfpatch compare recipes/quickstart.yaml"
    assert facts["Commit"].endswith("8f901, with changes that were not committed")
    assert facts["Wall time"] == "2 min 51 s"
    assert facts["Device"] == "cpu, 2 threads"
    assert facts["Versions"].startswith("torch 2.13.0, transformers 5.23.0")


def test_the_commit_of_the_runs_is_named_where_results_were_made_at_another(build, raw):
    for seed, run in raw["methods"]["lora"]["runs"].items():
        run["commit"] = ["a1", raw["provenance"]["commit"]][int(seed)]
    facts = environment_facts(build(raw))
    assert facts[1:3] == [("Commit", raw["provenance"]["commit"]), ("Commit of the runs", "a1")]


def test_nothing_known_is_nothing_said_but_the_commit(build):
    assert provenance_facts(build(EMPTY).provenance) == [("Commit", "unknown")]
    assert [label for label, _ in protocol_facts(build(EMPTY))] == ["Protocol"]
