"""What every file that hfpatch generates is made of: the licence that covers it, and hfpatch's own modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator

LICENCE = """\
#
# SPDX-License-Identifier: MIT
# Copyright (c) 2026 the hfpatch authors
#
# Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
# documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
# rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
# persons to whom the Software is furnished to do so, subject to the following conditions: The above copyright notice
# and this permission notice shall be included in all copies or substantial portions of the Software.
#
# THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
# WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
# COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
# OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.

"""


def outside_imports(text: str) -> Iterator[str]:
    """Yield the import statements of a module that name other packages than hfpatch."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and _is_outside(node)):
            yield ast.unparse(node)


def _is_outside(node: ast.ImportFrom) -> bool:
    return node.module != "__future__" and not (node.module or "").startswith("hfpatch")


def body(text: str) -> str:
    """Return a module without its docstring and its imports."""
    lines = text.splitlines()
    for node in ast.parse(text).body:
        first = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.lineno == 1
        if first or isinstance(node, ast.Import | ast.ImportFrom):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = ""
    return "\n".join(lines).strip() + "\n\n"
