"""A JSON value in which one value is missing or another."""

import copy

MISSING = object()
WRONG = (MISSING, None, -1, 1e308, 10**400, float("nan"), "x", [], {"x": 1}, True, 0.5)


def places(value, path=()):
    """Yield the path of each value but the whole, of a list's only those of its first item."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def damaged(raw, path, wrong):
    """Return a copy with another value at a path, which shares what is beside it."""
    whole = inside = copy.copy(raw)
    for key in path[:-1]:
        inside[key] = copy.copy(inside[key])
        inside = inside[key]
    if wrong is MISSING:
        del inside[path[-1]]
    else:
        inside[path[-1]] = wrong
    return whole
