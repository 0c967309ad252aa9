"""Turns what the docstrings have of Sphinx's markup into Markdown, before mkdocstrings renders them."""

import re

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):(?=`)")
MATH = re.compile(r"^\.\. math::\n", flags=re.MULTILINE)


class SphinxMarkup(griffe.Extension):
    """Formulas become indented blocks, and roles plain code."""

    def on_object(self, *, obj, **kwargs):
        """Rewrite one object's docstring."""
        if obj.docstring:
            obj.docstring.value = MATH.sub("\n", ROLE.sub("", obj.docstring.value))
