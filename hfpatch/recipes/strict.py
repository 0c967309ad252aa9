"""Reading YAML strictly: every mistake is one line with the file, the key, the value and the allowed values."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from hfpatch.errors import HfpatchError, nearest
from hfpatch.recipes.code import leaves, refuse_code
from hfpatch.support.folders import recipes_dir

Model = TypeVar("Model", bound=BaseModel)
AnySection = TypeVar("AnySection", bound="Section")

Dtype = Literal["float32", "bfloat16", "float16"]

MOST_SEEDS = 1000
"""Of a recipe, and of what is planned for one."""
RATES = ("lr", "learning_rate")
NO_OWN_RATE = (
    "; a method has no rate of its own: tuning: finds each method's best, training.learning_rates gives a group of "
    "tensors (lora, skip, query, ...) its own"
)
"""The hint where one of :data:`RATES` is given in a method."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def expand(path: str) -> str:
    """Return a path with ``$NAME`` and ``${NAME}`` replaced by environment variables, and a leading ``~`` by the home.

    Raises:
        ValueError: if there is no such variable.
    """
    for name in (match[1] or match[2] for match in _VARIABLE.finditer(path)):
        if name not in os.environ:
            raise ValueError(f"{path!r}: the environment variable {name} is not set{nearest(name, os.environ)}")
    expanded = _VARIABLE.sub(lambda match: os.environ[match[1] or match[2]], path)
    return os.path.expanduser(expanded) if expanded.startswith("~") else expanded  # noqa: PTH111  text, not a path


def _listed(value: object) -> object:
    """Return the seeds 0 to N - 1 for a number N; a list as a tuple, which is what strict fields take from Python."""
    if type(value) is int and not 0 < value <= MOST_SEEDS:
        raise ValueError(f"must be a list of seeds, or how many from 1 to {MOST_SEEDS}, not {value}")
    if type(value) is int:
        return tuple(range(value))
    return tuple(value) if isinstance(value, list) else value


Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""A seed, as NumPy takes them."""
_Seeds = Annotated[int, Field(ge=1, le=MOST_SEEDS)] | Annotated[list[Seed], Field(min_length=1)]
Seeds = Annotated[tuple[Seed, ...], Field(min_length=1), BeforeValidator(_listed, json_schema_input_type=_Seeds)]
"""Seeds, or their number."""
PathText = Annotated[str, AfterValidator(expand)]
"""A path, or a name that may be one; environment variables are replaced as the recipe is read."""
ExpandedPath = Annotated[Path, BeforeValidator(lambda value: expand(value) if isinstance(value, str) else value)]
"""A path whose environment variables are replaced."""


class Section(BaseModel):
    """A section of a recipe. An unknown key is an error, and a section never changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    instead_of: ClassVar[Mapping[str, str]] = {}
    """Keys that replace each other: an override of one removes the other."""

    def __init__(self, **values: Any) -> None:
        """Check the values, as those of a recipe are checked.

        Raises:
            HfpatchError: at the first mistake.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise HfpatchError(f"{type(self).__name__}: {explain(error, type(self))}") from None

    # Else pydantic would call this method for each section of a recipe, whose mistakes name the recipe's keys.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # pydantic's own mark

    def replaced(self: AnySection, changes: Mapping[str, Any]) -> AnySection:
        """Return the section with other values, checked as when it was read; a mapping changes a section within it.

        Raises:
            ValidationError: at values of the wrong type, or that contradict each other.
        """
        return type(self).model_validate(self._with(changes), strict=True)

    def _with(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.model_fields_set}
        for key, value in changes.items():
            inner = getattr(self, key)
            values[key] = inner._with(value) if isinstance(inner, Section) and isinstance(value, Mapping) else value
        return values

    def changed(self, names: Iterable[str]) -> list[str]:
        """Return which of these settings are not at their defaults."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

    def to_yaml(self) -> str:
        """Return YAML that is read back as an equal section."""
        return write_yaml(self.model_dump(mode="json"))


_FLOAT = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$|^[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)$")

_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character; also a byte of a command line that is not UTF-8
_TEXT, _MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"

_WORDING = {
    "Input should be": "must be",
    "a valid array": "a list",
    "an object": "a mapping",
    "a valid integer": "an integer",
    "a valid ": "a ",
}
_AMOUNT = re.compile(r"^\w+ should have (at (?:least|most) \d+ items?) after validation, not \d+$")


class _Loader(yaml.SafeLoader):
    """YAML in which ``1e-5`` is a number, a date and the key ``on`` are text, and a key given twice is an error.

    Aliases are refused: a few lines of them can stand for any number of values.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # in the stubs of PyYAML
            raise yaml.composer.ComposerError(None, None, "aliases are not read; write what it stands for", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            problem = None
            if not isinstance(key, yaml.ScalarNode):
                problem = "a key is a list or a mapping; put text that begins with { or [ in quotes"
            elif key.value in keys:
                problem = f"the key {key.value!r} is given twice"
            elif key.value == "on":  # a key of questions, which YAML 1.1 reads as true
                key.tag = _TEXT
            elif key.tag == _MERGE:
                problem = "merge keys (<<) are not read; write the keys themselves"
            elif key.tag != _TEXT:
                problem = f"the key {key.value!r} is not text; put it in quotes"
            if problem is not None:
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes YAML that ``_Loader``, and a reader of YAML 1.1 with its dates, read back unchanged."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
    for first, pairs in _Loader.yaml_implicit_resolvers.items()
}
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def load_as(
    path: Path | str,
    overrides: Sequence[str],
    model: type[Model],
    *,
    trust_code: bool,
    rearranged: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Model:
    """Read a recipe of the kind that ``model`` describes; otherwise as `hfpatch.recipes.comparison.load_recipe`.

    ``rearranged`` brings the values of file and overrides into the model's layout, or raises ValueError.
    """
    file = find_recipe(Path(path))
    values = read_yaml(file)
    for override in overrides:
        put_override(values, override, model)
    source = f"{file} with {' '.join(overrides)}" if overrides else str(file)
    try:
        values = rearranged(values)
    except ValueError as error:
        raise HfpatchError(f"{source}: {error}") from None
    recipe = validate(values, model, source)
    if not trust_code:
        refuse_code(recipe.model_dump(mode="json"), [read_override(override)[0] for override in overrides], str(file))
    return recipe


def find_recipe(path: Path) -> Path:
    """Return the file of a recipe given by path or by the bare name of one that comes with hfpatch."""
    if len(path.parts) > 1 or path.is_file():
        return path
    ours = recipes_dir() / (path.name if path.suffix in {".yaml", ".yml"} else f"{path.name}.yaml")
    if ours.is_file():  # also where there is a folder of that name, such as an earlier run's
        return ours
    if path.exists():
        return path
    names = sorted(file.stem for file in recipes_dir().glob("*.yaml"))
    raise HfpatchError(
        f"{path}: no such file, and no recipe of that name{nearest(path.stem, names)}; there are {', '.join(names)}"
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping.

    Raises:
        HfpatchError: if the file is missing, a folder, unreadable, not UTF-8, not YAML, empty or not a mapping.
    """
    if path.is_dir():
        raise HfpatchError(f"{path}: is a folder; give the YAML file itself")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise HfpatchError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise HfpatchError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise HfpatchError(f"{path}: cannot be read ({error.strerror})") from None
    value = _parse(text, str(path))
    if value is None:
        raise HfpatchError(f"{path}: is empty; must be a mapping of keys to values")
    if not isinstance(value, dict):
        raise HfpatchError(f"{path}: contains a {_kind_of(value)}; must be a mapping of keys to values")
    return value


def write_yaml(value: Mapping[str, Any]) -> str:
    """Return YAML text that `read_yaml` reads back as an equal mapping."""
    text: str = yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, width=120)
    return text


def shown(value: object) -> str:
    """Return a value in a message as YAML spells it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def read_override(override: str) -> tuple[str, object]:
    """Return the key and the value of ``key=value``, the value read as YAML.

    Raises:
        HfpatchError: if it has no ``=`` or no key, or the value is not valid YAML.
    """
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise HfpatchError(f"override {override!r}: write it as key=value, such as training.steps=60")
    return key.strip(), _parse(text, f"override {override!r}")


def validate(values: Mapping[str, Any], model: type[Model], source: str) -> Model:
    """Return ``values`` as a ``model``, with no conversion between types.

    Raises:
        HfpatchError: at the first mistake: an unknown key, a wrong type or value, a contradiction.
    """
    for key, value in leaves(values):
        if isinstance(value, float) and not math.isfinite(value):
            raise HfpatchError(f"{source}: {key} is {value}; must be a finite number")
        if isinstance(value, str) and _SURROGATE.search(value):
            raise HfpatchError(f"{source}: {key} is {value!r}; must be Unicode text")
        if value is not None and not isinstance(value, str | int | float):  # a set or bytes of YAML
            raise HfpatchError(f"{source}: {key} is {value!r}; must be text, a number, true, false or null")
    try:
        return model.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise HfpatchError(f"{source}: {explain(error, model)}") from None


def _parse(text: str, source: str) -> object:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}" if mark else ""
        raise HfpatchError(f"{source}: not valid YAML{where} ({error.problem})") from None
    except RecursionError:
        raise HfpatchError(f"{source}: not valid YAML (nested too deeply)") from None
    except (yaml.YAMLError, ValueError) as error:
        raise HfpatchError(f"{source}: not valid YAML ({str(error).splitlines()[0]})") from None


def put_override(values: dict[str, Any], override: str, model: type[BaseModel]) -> None:
    """Set the value of ``key=value`` under its dotted key; below a mapping with free keys or a list any key goes."""
    path, value = read_override(override)
    keys = path.split(".")
    section: type[BaseModel] | None = model
    container: Any = values
    is_free = False  # whether the container is a mapping with free keys, from which null removes an entry
    for depth, key in enumerate(keys):
        where, is_last = f"override {override!r}", depth == len(keys) - 1
        at: Any = key
        fields = {} if section is None or is_free or isinstance(container, list) else section.model_fields
        if fields and key not in fields:
            name = ".".join(keys[: depth + 1])
            raise HfpatchError(f"{where}: unknown key {name!r}{_meant(key, section, model)}")
        if isinstance(container, list):
            if not key.isdecimal() or int(key) >= len(container):
                hint = NO_OWN_RATE if key in RATES else ""
                raise HfpatchError(f"{where}: {key!r} is not an index of a list of {len(container)} items{hint}")
            at = int(key)
        elif not isinstance(container, dict):
            raise HfpatchError(f"{where}: {key!r} is below a {_kind_of(container)}, which has no keys")
        elif fields and container.get(key) is None:
            container[key] = {}
        elif key not in container and (not is_last or (is_free and value is None)):
            outer = ".".join(keys[:depth])
            add = "" if is_last else f"; to add it, write {outer}.{key}={{{keys[depth + 1]}: ...}}"
            raise HfpatchError(f"{where}: there is no {key!r} in {outer}{nearest(key, container)}{add}")
        if is_last and is_free and value is None:
            del container[at]
        elif is_last:
            container[at] = value
            if fields and value is not None:
                container.pop(getattr(section, "instead_of", {}).get(key), None)
        else:
            container, is_free = container[at], False
            if section is not None and fields:  # otherwise that of the items of a list or a mapping
                is_mapping = get_origin(fields[key].annotation) is dict
                section = section_of(section, key)
                is_free = isinstance(container, dict) and (section is None or is_mapping)


def section_of(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """Return the section class of a field, or of the items of its list or mapping; None where it is neither."""
    annotation = model.model_fields[key].annotation
    options = [annotation, *get_args(annotation)]
    options += [get_args(option)[0] for option in options if get_origin(option) is Annotated]
    options += [item for option in options if get_origin(option) is tuple for item in get_args(option)]
    return next((kind for kind in options if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the first mistake, an unknown key before others, in one line with the number of the rest."""
    mistakes = error.errors(include_url=False)
    inside = {mistake["loc"][:end] for mistake in mistakes for end in range(len(mistake["loc"]))}
    # of a list with a wrong item pydantic says, too, that the right ones are too few
    mistakes = [mistake for mistake in mistakes if mistake["type"] != "too_short" or mistake["loc"] not in inside]
    mistakes.sort(key=lambda mistake: mistake["type"] != "extra_forbidden")
    first = mistakes[0]
    others = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
    path = ".".join(str(part) for part in first["loc"] if not str(part).startswith("<"))  # such is a kind of value
    if first["type"] == "extra_forbidden":
        section: type[BaseModel] | None = model  # the section that the key is in; None where it is in none
        for part in first["loc"][:-1]:
            if isinstance(part, str) and not part.startswith("<"):
                section = section_of(section, part) if section is not None and part in section.model_fields else None
        return f"unknown key {path!r}{_meant(str(first['loc'][-1]), section, model)}{others}"
    if first["type"] == "missing":
        return f"{path} is missing{others}"
    message = first["msg"].removeprefix("Value error, ")
    message = _AMOUNT.sub(r"must have \1", message)
    for theirs, ours in _WORDING.items():
        message = message.replace(theirs, ours)
    if first["loc"][-1:] == ("[key]",):  # of a mapping whose possible keys the message lists
        hint = nearest(first["input"], re.findall("'([^']*)'", message))
        return f"unknown key {path.removesuffix('.[key]')!r}{hint}; {message}{others}"
    if first["type"] == "value_error":  # which may name the key itself
        return f"{path + ': ' if path and not message.startswith(path) else ''}{message}{others}"
    shown = json.dumps(first["input"], ensure_ascii=False)
    return f"{path} is {shown if len(shown) <= 60 else f'{shown[:57]}...'}; {message}{others}"


def _meant(key: str, inner_model: type[BaseModel] | None, model: type[BaseModel]) -> str:
    """Return `` (did you mean ...?)`` for an unknown key: a similar one there, or the same name elsewhere."""
    near = list(inner_model.model_fields) if inner_model is not None else []
    sections = [("", model)]  # every section by the prefix of its keys, outer ones first
    for prefix, outer in sections:
        inner = ((name, section_of(outer, name)) for name in outer.model_fields)
        sections += [(f"{prefix}{name}.", section) for name, section in inner if section is not None]
    path = next((f"{prefix}{key}" for prefix, section in sections if key in section.model_fields), None)
    if path is None or nearest(key, near, cutoff=0.75):
        return nearest(key, near)
    return f" (did you mean {path!r}?)"


def _kind_of(value: object) -> str:
    names = {dict: "mapping", list: "list", str: "text", bool: "truth value", int: "number", float: "number"}
    return names.get(type(value), type(value).__name__)


def check_names(*names: str) -> None:
    """Refuse names that cannot name a folder."""
    if wrong := [name for name in names if not _FILE_NAME.fullmatch(name)]:
        raise HfpatchError(f"the name {wrong[0]!r} becomes a folder; use letters, digits, '_', '-' and '.' only")


def check_once(key: str, values: Sequence[Any]) -> None:
    """Refuse a list that holds a value twice."""
    if twice := [value for value in values if values.count(value) > 1]:
        raise HfpatchError(f"{key} lists {twice[0]!r} twice; name each once")


def check_among(key: str, names: Iterable[str], choices: Sequence[str], what: str) -> None:
    """Refuse a list of names that holds another one than those of ``what``."""
    if wrong := next((name for name in names if name not in choices), None):
        raise HfpatchError(f"{key} names {wrong!r}, which is not among {what}{nearest(wrong, choices)}")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
