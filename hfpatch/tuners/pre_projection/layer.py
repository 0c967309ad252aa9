"""The pre-projection tuner layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hfpatch.nn import ContentSkip, PreProjection, activation, pre_project
from hfpatch.nn.skip import add_skip
from hfpatch.sites import AttentionSite
from hfpatch.tuners.hidden_state import hidden_argument, replace_first, replace_hidden
from hfpatch.tuners.layer import SurgeryLayer
from hfpatch.tuners.pre_projection.config import PreProjectionConfig


class PreProjectionLayer(SurgeryLayer):
    """Replaces the hidden state that enters the attention by x~, and adds x~ W_skip where the branch ends.

    Several active adapters act one after the other; each one's skip reads the final x~. Where several modules read the
    hidden state, each is given x~.
    """

    method = "pre-projection"
    child_name = "hfpatch_pre_projection"
    adapter_layer_names = ("preproj_up", "preproj_gate", "preproj_down", "preproj_skip")

    def register(self, site: AttentionSite) -> None:
        """Hook into what reads the hidden state, or computes it, and into the module where the branch ends."""
        self.exit_factor = site.exit_factor
        if site.norm is None:
            for entry in site.entries:
                self.before(entry, PreProjectionLayer._replace_input)
        else:
            self.after(site.norm, PreProjectionLayer._replace_output)
        outside = site.exit is not site.attention
        if outside:
            self.after(site.entries[0], PreProjectionLayer._keep_input)
        self.after(site.exit, PreProjectionLayer._add_skip, outside)

    def build(self, config: PreProjectionConfig, name: str) -> dict[str, nn.Module]:
        """Return W_up and W_down, unless the skip is alone, and where asked for W_gate and W_skip."""
        drawn: dict[str, Any] = {"init": config.init, "seed": config.seed, "name": f"{name}.preproj"}
        modules: dict[str, nn.Module] = {}
        if config.expansion:
            pre = PreProjection(hidden_size=self.hidden_size, expansion=config.expansion, gated=config.gated, **drawn)
            modules |= {"preproj_up": pre.up, "preproj_down": pre.down}
            modules |= {} if pre.gate is None else {"preproj_gate": pre.gate}
        if config.content_skip:
            modules["preproj_skip"] = ContentSkip(hidden_size=self.hidden_size, **drawn).skip
        return modules

    def moving_adapters(self) -> list[str]:
        """Return the working adapters that have a pre-projection, and not the skip alone."""
        return [name for name in self.working_adapters() if self.configs[name].expansion]

    def project(self, x: Tensor) -> Tensor:
        """Map x to x~, both ``(batch, seq, hidden)``, through every working adapter."""
        for name in self.moving_adapters():
            config = self.configs[name]
            x = pre_project(
                x,
                up=self.linear("preproj_up", name),
                down=self.linear("preproj_down", name),
                gate=self.linear("preproj_gate", name) if config.gated else None,
                act=activation(config.activation),
                dropout=config.dropout,
                training=self.training,
            )
        return x

    @torch.no_grad()
    def linear_map(self) -> Tensor:
        """Return the M of x~ = x M (row vectors) of the working adapters, fp64 ``(hidden, hidden)``; linear ones alone.

        One adapter has M = 1 + W_up W_down.
        """
        result = torch.eye(self.hidden_size, dtype=torch.float64, device=self._device())
        for name in self.moving_adapters():
            up, down = (self.linear(f"preproj_{kind}", name).weight.double() for kind in ("up", "down"))
            result = result + (result @ up.T) @ down.T
        return result

    @property
    def is_linear(self) -> bool:
        """Whether x~ is a matrix product of x."""
        return all(self.configs[name].is_linear for name in self.working_adapters())

    def skip(self, branch: Tensor, x: Tensor) -> Tensor:
        """Return ``branch`` plus x~ W_skip of every working adapter that has one; all ``(batch, seq, hidden)``.

        What the block multiplies the branch with afterwards is undone, so that x~ W_skip reaches the residual stream.
        """
        for name in self.working_adapters():
            if self.configs[name].content_skip:
                branch = add_skip(branch, x, self.linear("preproj_skip", name), factor=self.exit_factor)
        return branch

    def _replace_input(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self.moving_adapters():
            return None
        return replace_hidden(module, args, kwargs, self.project(hidden_argument(args, kwargs)))

    def _replace_output(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        return self.project(output)

    def _keep_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._has_skip():
            self.keep("x", hidden_argument(args, kwargs))

    def _add_skip(
        self, outside: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        if not self._has_skip():
            return output
        # x~: a forward hook sees the arguments that the pre-hook replaced
        x = self.take("x") if outside else hidden_argument(args, kwargs)
        return output if x is None else replace_first(output, lambda branch: self.skip(branch, x))

    def _has_skip(self) -> bool:
        return any(self.configs[name].content_skip for name in self.working_adapters())
