"""The nonlinear-query tuner layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hfpatch.nn import activation, anchor_preserving, anchored, make_norm, nonlinear_map
from hfpatch.nn.columns import on_all_columns
from hfpatch.nn.nonlinear import bottleneck_rank, init_nonlinear
from hfpatch.sites import TARGETS, AttentionSite
from hfpatch.tuners.layer import SurgeryLayer
from hfpatch.tuners.nonlinear_query.config import NonlinearQueryConfig

PARTS = ("norm_in", "up", "down", "norm_out")


class NonlinearQueryLayer(SurgeryLayer):
    """Replaces the query columns of the projection's output by the anchored nonlinear query.

    The hook sits on the original projection, inside a LoRA layer if there is one: LoRA's own term is added to the
    nonlinear query, whichever of the two was injected first. It acts per token, before the split into heads and
    before any norm or rotation of the query. Several active adapters act one after the other, each anchored in what
    the one before it returned. In multi-head latent attention f reads what enters the attention, not the latent.
    """

    method = "nonlinear query"
    child_name = "hfpatch_query"
    adapter_layer_names = tuple(f"nonlinear_{target}_{part}" for target in TARGETS for part in PARTS)

    def register(self, site: AttentionSite) -> None:
        """Hook into the projections, and into what reads the hidden state where a projection reads an image of it."""
        self.columns = {target: projection.columns for target, projection in site.projections.items()}
        by_module: dict[nn.Module, list[str]] = {}
        for target, projection in site.projections.items():
            by_module.setdefault(site.projection_module(target), []).append(target)
            if projection.source is not None:
                self.before(site.inner_module(projection.source), NonlinearQueryLayer._keep_input, target)
        for module, targets in by_module.items():
            self.after(module, NonlinearQueryLayer._project, tuple(targets))

    def build(self, config: NonlinearQueryConfig, name: str) -> dict[str, nn.Module]:
        """Return the norms and matrices of f for every target."""
        modules: dict[str, nn.Module] = {}
        for target in config.targets:
            width = self.columns[target].size
            rank = bottleneck_rank(self.hidden_size, config.rank)
            up = nn.Linear(self.hidden_size, rank, bias=False)
            down = nn.Linear(rank, width, bias=False)
            norm_in = make_norm(config.input_norm, self.hidden_size)
            norm_out = make_norm(config.output_norm, width)
            at, silent = f"nonlinear_{target}", config.form == "preserving"
            init_nonlinear(up=up, down=down, norm_out=norm_out, silent=silent, seed=config.seed, name=f"{name}.{at}")
            parts = zip(PARTS, (norm_in, up, down, norm_out), strict=True)
            modules |= {f"{at}_{part}": module for part, module in parts}
        return modules

    def nonlinear(self, adapter_name: str, target: str, x: Tensor) -> Tensor:
        """Return f(x) ``(batch, seq, out)`` of one adapter for x ``(batch, seq, hidden)``."""
        name = f"nonlinear_{target}"
        return nonlinear_map(
            x,
            norm_in=self.held(f"{name}_norm_in")[adapter_name],
            up=self.linear(f"{name}_up", adapter_name),
            act=activation(self.configs[adapter_name].activation),
            down=self.linear(f"{name}_down", adapter_name),
            norm_out=self.held(f"{name}_norm_out")[adapter_name],
        )

    def query(self, adapter_name: str, target: str, x: Tensor, projected: Tensor) -> Tensor:
        """Return the anchored projection ``(batch, seq, out)`` for x and the pretrained x W ``(batch, seq, out)``."""
        config = self.configs[adapter_name]
        f = self.nonlinear(adapter_name, target, x)
        if config.form == "preserving":
            return anchor_preserving(projected, f)
        return anchored(x if config.anchor == "identity" else projected, f)

    def entered(self, target: str, x: Tensor) -> Tensor:
        """Return what f reads where a projection reads x: x, or the hidden state behind a low-rank image of it."""
        kept = self.look(target)
        return x if kept is None else kept

    def _keep_input(self, target: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.working_adapters():
            self.keep(target, args[0])

    def _project(
        self,
        targets: tuple[str, ...],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
    ) -> Tensor:
        entered = {target: self.entered(target, args[0]) for target in targets}
        for target in targets:
            self.take(target)

        def change(every: Tensor) -> Tensor:
            for target, x in entered.items():
                columns = self.columns[target]
                for name in self.working_adapters():
                    if target in self.configs[name].targets:
                        every = columns.write(every, self.query(name, target, x, columns.read(every)))
            return every

        return on_all_columns(module, output, change)
