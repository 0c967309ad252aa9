"""A comparison of ten methods with both questions, costs, and every outcome."""

from reporting.conftest import comparison, example

TEXT, CLOZE = "tinyworld_text", "tinyworld_cloze"


def ten_methods():
    """Five methods and five LoRAs of their sizes; the margin is one per cent of 19, what is kept a point."""
    raw = example()
    raw["methods"] = {"baseline": raw["methods"]["baseline"]} | {
        name: raw["methods"]["lora"] | {"match": None, "parts": [{"type": kind}], "merges": kind == "lora"}
        | {"cost": {"steps_s": [1.0, 1.1, 1.2], "memory_bytes": 2**30, "shared": True}}
        for i in range(5)
        for name, kind in ((f"method_with_a_name_{i}", "pre_projection"), (f"lora_of_its_size_{i}", "lora"))
    }  # fmt: skip
    raw["comparisons"], raw["margin"] = [], {TEXT: 0.19, "accuracy": 0.01}
    for i, (difference, error, p) in enumerate(
        [(0.4, 0.01, 1e-6), (-0.4, 0.01, 1e-6), (0.1, 0.3, 0.7), (0.01, 0.01, 0.3), (0.3, 0.1, 0.04)]
    ):
        pair = f"method_with_a_name_{i}", f"lora_of_its_size_{i}"
        one = comparison(pair[0], TEXT, difference, 2 * error, "", reference=pair[1])
        raw["comparisons"].append(one | {"p": p, "errors": [[error / 2, 100], [error / 2, 4]]})
        for name in pair:
            for task in (TEXT, CLOZE):
                change = comparison(name, task, 0.02 * (-1) ** i, 0.01, "")
                raw["comparisons"].append(change | {"p": 1e-4, "errors": [[0.002, 100], [0.002, 4]]})
    names = [name for name in raw["methods"] if name != "baseline"]
    raw["questions"] = [
        {"question": "gain", "pairs": [[names[2 * i], names[2 * i + 1]] for i in range(5)], "on": [TEXT]},
        {"question": "keep", "pairs": [[name, "baseline"] for name in names], "on": [CLOZE]},
    ]
    return raw
