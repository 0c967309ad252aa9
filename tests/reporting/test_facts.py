from hfpatch.reporting.facts import environment_facts, protocol_facts, provenance_facts

EMPTY = {"schema": 2, "kind": "comparison", "name": ""}


def test_facts_have_the_numbers_and_leave_out_what_is_not_set(build, raw):
    raw["provenance"]["dirty"] = True
    protocol, facts = dict(protocol_facts(build(raw))), dict(provenance_facts(build(raw).provenance))
    assert "2,000 documents, 3,200 blocks, 409,600 tokens" in protocol["Data"]
    assert protocol["Batch plan, seed 1"].startswith("200 steps of 16 blocks")
    assert "limit" not in protocol["Evaluation"]
    assert facts["Commit"] != raw["provenance"]["commit"]
    assert facts["Wall time"] == "2 min 51 s"


def test_the_commit_of_the_runs_is_named_and_nothing_unknown(build, raw):
    for seed, run in raw["methods"]["lora"]["runs"].items():
        run["commit"] = ["a1", raw["provenance"]["commit"]][int(seed)]
    facts = environment_facts(build(raw))
    assert facts[1:3] == [("Commit", raw["provenance"]["commit"]), ("Commit of the runs", "a1")]
    assert provenance_facts(build(EMPTY).provenance) == [("Commit", "unknown")]
    assert [label for label, _ in protocol_facts(build(EMPTY))] == ["Protocol"]
