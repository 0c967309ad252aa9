"""The help of ``hfpatch`` itself and tab completion, without what typer imports for neither: Markdown, pydantic."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from typer import BadParameter
from typer.core import TyperArgument, TyperGroup, TyperOption

_HOME = re.compile(r"^(--[\w-]+=)?~(?=/|$)")

CommandLineError: type[Exception] = next(kind for kind in BadParameter.__mro__ if kind.__name__ == "ClickException")
"""The error that typer raises for a wrong command line; it has no public name."""


class Group(TyperGroup):
    """The commands, and a help text that takes half of the time of typer's own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words; in ``--out=~/runs`` shells leave the ``~``, which would become a folder of that name."""
        words = [_HOME.sub(lambda match: f"{match[1] or ''}{Path.home()}", word) for word in args]
        return list(super().parse_args(ctx, words))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the usage, the description, the options and the commands."""
        from rich.console import Console
        from rich.padding import Padding
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        console = Console(highlight=False)
        usage = Text.assemble(("Usage:", "yellow"), (f" {ctx.command_path} [OPTIONS] COMMAND [ARGS]...", "bold"))
        console.print(Padding(usage, 1), Padding(self.help or "", (0, 1, 1, 1)), sep="", end="")
        options = [record for record in (option.get_help_record(ctx) for option in self.get_params(ctx)) if record]
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        summaries = [(name, command.get_short_help_str(limit=1000)) for name, command in commands.items() if command]
        for title, rows in (("Options", options), ("Commands", summaries)):
            table = Table(box=None, show_header=False, expand=True, padding=(0, 1), pad_edge=False)
            table.add_column(style="bold cyan", no_wrap=True)
            table.add_column(ratio=1)
            for row in rows:
                table.add_row(*map(Text, row))
            console.print(Panel(table, title=title, title_align="left", border_style="dim"))


def prepare_completion() -> None:
    """Let this process answer a shell's request for completions and then end; values need no conversion."""
    from typer import _completion_classes

    _completion_classes.completion_init()
    _completion_classes._sanitize_help_text = lambda text: text  # rich is not needed: there is no markup
    for parameter in (TyperOption, TyperArgument):
        parameter.process_value = lambda self, ctx, value: value  # type: ignore[method-assign]  # replaced in this process only
