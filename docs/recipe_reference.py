"""Writes the reference of the keys of recipes, their JSON schemas for editors, that of results.json, and the commands'.

``make reference`` runs it. All is made from what the program itself reads: the pydantic models of recipes with the
docstrings of their attributes, the fields of the configuration classes, and the command line.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import json
import re
import sys
import textwrap
from pathlib import Path

import typer
from peft import PeftConfig

import hfpatch.results
from hfpatch import methods
from hfpatch.cli.app import app
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.models import ScratchSettings
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.recipes.sizes import SIZES
from hfpatch.surgery.methods import method_classes
from hfpatch.tuners.config import MethodConfig

ROOT = Path(__file__).parents[1]
KINDS = {"comparison": Recipe, "pretraining": StudyRecipe}
_OWN = {config.spec.name: config for config in (getattr(methods, name) for name in methods.__all__)}
_FIRST = ("pre_projection", "nonlinear_query", "query_temperature")
CONFIGS = {name: _OWN[name] for name in (*_FIRST, *sorted(_OWN.keys() - {*_FIRST}))}
NOT_CHOSEN = ("target_modules",)  # filled in at injection
JSON_TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string", "Literal": "string"}
JSON_TYPES |= {"None": "null", "dict": "object"} | dict.fromkeys(("list", "tuple", "set"), "array")
DRAFT = "https://json-schema.org/draft/2020-12/schema"
PART = {
    "type": "Which method: one of hfpatch's own or one of PEFT's, in lower case, or package.module:Class.",
    "label": "What tables and figures call the method; in its first part.",
    "match": "What the size is solved for: a method's parameter count, a number, or a share of the base's (0.1%).",
    "budgets": "The method's own budgets, in the part whose size is solved for; [] leaves it at its default size.",
    "target_modules": "LoRA and others of PEFT: attention, mlp, all-linear, or a list of names of modules.",
}


def plain(text):
    """Return a docstring as one paragraph of Markdown, with YAML's word for None."""
    return re.sub(r"\bNone\b", "null", " ".join(text.replace("``", "`").split()))


@functools.cache
def attribute_docs(model):
    """Return what a class and its bases say below each of their attributes."""
    found = {}
    for kind in reversed([each for each in model.__mro__ if each.__module__.startswith("hfpatch.")]):
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[field.target.id] = plain(text.value.value)
    return found


def sections(model):
    """Return every section class that a recipe is made of, by name, the recipe itself first."""
    found = {model.__name__: model}
    for field in model.model_fields.values():
        for kind in re.findall(r"hfpatch[\w.]+", str(field.annotation)):
            module, _, name = kind.rpartition(".")
            inner = getattr(sys.modules.get(module), name, None)
            if hasattr(inner, "model_fields"):
                found |= sections(inner)
    return found


def described(schema, model):
    """Put each attribute's docstring beside its key, and take away the titles that pydantic makes up."""
    for key, value in schema["properties"].items():
        value.pop("title", None)
        value["description"] = attribute_docs(model)[key]
    schema["description"] = plain(inspect.getdoc(model))
    return schema


def part_schema():
    """Return the schema of one part of a method; the options of hfpatch's own methods are checked."""
    rules = []
    for name, config in CONFIGS.items():
        size = {"match": {}, "budgets": {}} if name in SIZES else {}
        keys = {
            key: {"type": types, "description": text, "default": default}
            for key, types, text, default in rows_of(options_of(config))
        }
        is_it = {"properties": {"type": {"const": name}}, "required": ["type"]}
        then = {"properties": {"type": {}, "label": {}, **size, **keys}, "additionalProperties": False}
        rules.append({"if": is_it, "then": then})
    properties = {key: {"description": text} for key, text in PART.items()}
    own = {"type": "string", "pattern": "^[\\w.]+:\\w+$"}
    properties["type"]["anyOf"] = [{"enum": list(method_classes())}, own]
    return {"type": "object", "properties": properties, "required": ["type"], "allOf": rules}


def options_of(config):
    """Return the fields that a configuration class of hfpatch has beyond PEFT's, by name; those of all methods last."""
    shared = {field.name for field in dataclasses.fields(MethodConfig)}
    inherited = {field.name for field in dataclasses.fields(PeftConfig)}
    left_out = inherited | {*NOT_CHOSEN}
    fields = [field for field in dataclasses.fields(config) if field.name not in left_out]
    return {field.name: field for field in sorted(fields, key=lambda field: field.name in shared)}


def rows_of(options):
    """Return key, JSON types, help and default of each option."""
    for key, option in options.items():
        types = [name.split("[")[0].strip() for name in option.type.split("|")]
        default = list(option.default) if isinstance(option.default, tuple) else option.default
        yield key, [JSON_TYPES[name] for name in types], plain(option.metadata["help"]), default


def json_schema(kind):
    """Return the JSON schema of one kind of recipe."""
    model = KINDS[kind]
    schema = model.model_json_schema()
    classes = sections(model)
    for name, inner in schema.get("$defs", {}).items():
        described(inner, classes[name])
    described(schema, model)
    if kind == "comparison":
        schema["$defs"]["Part"] = part_schema()
        schema["properties"]["methods"]["additionalProperties"]["items"] = {"$ref": "#/$defs/Part"}
    else:
        own = ScratchSettings.model_json_schema()
        for name, inner in own.pop("$defs").items():
            schema["$defs"][name] = described(inner, sections(ScratchSettings)[name])
        schema["properties"]["architecture"] |= {"properties": described(own, ScratchSettings)["properties"]}
    return {"$schema": DRAFT, **schema, "title": f"hfpatch recipe: {kind}"}


def type_text(value, sections=None):
    """Return what a key takes, in words; ``sections`` has the heading of each section by its class."""
    if choices := value.get("anyOf") or value.get("oneOf"):
        return " or ".join(type_text(each, sections) for each in choices)
    if "enum" in value or "const" in value:
        return ", ".join(f"`{each}`" for each in value.get("enum", [value.get("const")]))
    if "$ref" in value:
        return f"[section](#{anchor((sections or {}).get(class_of(value), 'parts-of-methods'))})"
    limits = [f"{sign} {value[key]}" for key, sign in LIMITS.items() if key in value]
    kind = WORDS.get(value.get("type"), value.get("type", "any value"))
    items, values = value.get("items"), value.get("additionalProperties")
    if kind == "list" and items:
        kind = f"list of {type_text(items, sections)}"
    if kind == "mapping" and isinstance(values, dict):
        kind = f"mapping of names to {type_text(values, sections)}"
    return " ".join([kind, *limits])


def class_of(value):
    """Return the class that a key refers to, or None."""
    return next(
        (
            each["$ref"].rpartition("/")[2]
            for each in [value, *value.get("anyOf", []), *value.get("oneOf", [])]
            if "$ref" in each
        ),
        None,
    )


def anchor(heading):
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


WORDS = {"array": "list", "object": "mapping", "string": "text", "boolean": "true or false"}
KEYS = "| key | takes | default | |\n|---|---|---|---|"
REPEATED = 5  # rows
LIMITS = {"exclusiveMinimum": "above", "minimum": "from", "exclusiveMaximum": "below", "maximum": "up to"}


def cell(text):
    """Return text with the bars escaped that would end a cell."""
    return text.replace("|", "\\|")


def table(heading, head, rows, shown):
    """Return a table; rows that an earlier one has too are left out, where they are several, and their keys listed.

    Args:
        heading: of the table's section.
        head: its first two lines.
        rows: its other lines by key.
        shown: the rows of earlier tables by heading; these are added.
    """
    same = {other: [key for key in rows if earlier.get(key) == rows[key]] for other, earlier in shown.items()}
    nearest = max(same, key=lambda other: len(same[other]), default=None)
    shown[heading] = rows
    left_out = same[nearest] if nearest and len(same[nearest]) >= REPEATED else []
    lines = [row for key, row in rows.items() if key not in left_out]
    parts = ["\n".join([head, *lines])] if lines else []
    if left_out:
        keys = ", ".join(key if key.startswith("`") else f"`{key}`" for key in left_out)
        parts.append(f"As in [{nearest}](#{anchor(nearest)}): {keys}.")
    return "\n\n".join(parts)


def rows_of_section(schema, headings):
    """Return a line for each of a section's keys."""
    rows = {}
    for key, value in schema["properties"].items():
        default = ""
        if key in schema.get("required", ()):
            default = "**required**"
        elif "default" in value and not isinstance(value["default"], dict):
            default = f"`{json.dumps(value['default'], ensure_ascii=False)}`"
        cells = type_text(value, headings), default, value["description"]
        rows[key] = f"| `{key}` | {' | '.join(map(cell, cells))} |"
    return rows


def inner_sections(schema, prefix=""):
    """Yield dotted name, class (None where the keys are free besides those shown) and schema of every section below."""
    for key, value in schema["properties"].items():
        mapping = next((each for each in value.get("oneOf", []) if "additionalProperties" in each), value)
        inner = {"NAME": mapping.get("additionalProperties"), "N": value.get("items")}
        if class_of(value) or "properties" in value:
            yield f"{prefix}{key}", class_of(value), value
        for name, each in inner.items():
            if isinstance(each, dict) and class_of(each):
                yield f"{prefix}{key}.{name}", class_of(each), each


def kind_page(kind, headings, shown):
    """Return the part of the page that one kind of recipe has.

    Args:
        kind: of recipe.
        headings: those of the sections before by class; this kind's are added.
        shown: their rows by heading, likewise.
    """
    schema, title = json_schema(kind), kind.capitalize()
    todo, new = list(inner_sections(schema)), []
    for name, reference, value in todo:
        heading = f"{title}: `{name}`"
        inner = schema["$defs"][reference] if reference else value
        if (reference or inner["description"]) not in headings:
            headings[reference or inner["description"]] = heading
            free = "" if reference else " All other keys are those of its configuration class."
            new.append((heading, inner, free))
            todo += inner_sections(inner, f"{name}.")
    file = f"[{kind}.json](../../recipes/schema/{kind}.json)"
    intro = f"{schema['description']} JSON schema: {file}."
    lines = [f"## {title}", "", intro, "", table(title, KEYS, rows_of_section(schema, headings), shown)]
    for heading, inner, free in new:
        rows = rows_of_section(inner, headings)
        lines += ["", f"### {heading}", "", inner["description"] + free, "", table(heading, KEYS, rows, shown)]
    return lines


def parts_page():
    """Return the part of the page that says which options the parts of methods have."""
    lines = ["## Parts of methods", "", "Each method is a list of parts.", "", "| key | |", "|---|---|"]
    lines += [f"| `{key}` | {text} |" for key, text in PART.items()]
    lines += ["", "All other keys are the options of a part's type. Every type of hfpatch's own has these:", ""]
    shared = options_of(MethodConfig)
    lines += options_table(shared)
    for name, config in CONFIGS.items():
        lines += ["", f"### `type: {name}`", "", f"[`{config.__name__}`](api.md#hfpatch.{config.__name__}) in Python."]
        if own := {key: option for key, option in options_of(config).items() if key not in shared}:
            lines += ["", *options_table(own)]
    lines += ["", "### Other types", "", "The options of PEFT's configuration of that name, such as `LoraConfig`'s for"]
    return [*lines, "`type: lora`. [PEFT's methods](../peft-methods.md) lists the types, and what `match` solves for."]


def options_table(options):
    """Return the lines of a table of options."""
    lines = ["| option | takes | default | |", "|---|---|---|---|"]
    for key, names, text, default in rows_of(options):
        takes = " or ".join(type_text({"type": each}) for each in names)
        lines.append(f"| `{key}` | {takes} | `{json.dumps(default)}` | {cell(text)} |")
    return lines


KEYS_HEADER = """# Keys of recipes

Every key that a recipe may have. `make reference` writes this page and the JSON schemas from the classes that read
recipes; a test compares them. [Recipes](../recipes.md) shows how to write one.

Editors with a YAML language server complete and check a recipe whose first line names its schema. The recipes that come
with hfpatch do so by a relative path; in a file of your own:

    # yaml-language-server: $schema=https://hfpatch.github.io/hfpatch/schema/comparison.json
"""


def keys_page():
    """Return the page of all keys."""
    lines, headings, shown = KEYS_HEADER.splitlines(), {}, {}
    for kind in KINDS:
        lines += ["", *kind_page(kind, headings, shown)]
        lines += ["", *parts_page()] if kind == "comparison" else []
    return "\n".join(lines) + "\n"


COMMANDS_HEADER = """# Commands

Every command and option; `hfpatch COMMAND --help` prints its own. `make reference` writes this page from the command
line itself; a test compares them. `hfpatch --version` prints the version, and `hfpatch --install-completion` lets bash,
zsh, fish or PowerShell complete commands and options.
"""


def commands_page():
    """Return the page of all commands."""
    group = typer.main.get_command(app)
    lines, shown = COMMANDS_HEADER.splitlines(), {}
    for name, command in group.commands.items():
        text = inspect.cleandoc(command.help).replace("``", "`")
        text = re.sub(r"^Example: (.*)$", r"    \1", text, flags=re.MULTILINE)
        rows = {}
        for option in command.params:
            names = ", ".join(f"`{each}`" for each in [*option.opts, *option.secondary_opts])
            is_argument = option.param_type_name == "argument"
            key = f"`{option.metavar or option.name.upper()}`" if is_argument else names
            default = option.opts[0] if option.default is True else option.default
            value = "" if default in (None, False) else f"`{default}`"
            default = "**required**" if option.required else value
            rows[key] = f"| {cell(key)} | {default} | {cell(plain(option.help or ''))} |"
        heading = f"hfpatch {name}"
        lines += ["", f"## {heading}", "", text]
        lines += ["", table(heading, "| | default | |\n|---|---|---|", rows, shown)] if rows else []
    return "\n".join(lines) + "\n"


@functools.cache
def files():
    """Return the text of every generated file, by its path."""
    pages = {ROOT / "docs/reference/keys.md": keys_page(), ROOT / "docs/reference/commands.md": commands_page()}
    schemas = {ROOT / f"recipes/schema/{kind}.json": json.dumps(json_schema(kind), indent=1) + "\n" for kind in KINDS}
    results = {ROOT / "docs/results.schema.json": json.dumps(hfpatch.results.json_schema(), indent=1) + "\n"}
    return pages | schemas | results


def main():
    """Write all files."""
    for file, text in files().items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
