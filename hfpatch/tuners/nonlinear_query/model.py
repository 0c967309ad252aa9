"""The nonlinear-query tuner."""

from __future__ import annotations

from hfpatch.nn.anchors import require_square
from hfpatch.nn.nonlinear import bottleneck_rank
from hfpatch.sites import AttentionSite
from hfpatch.tuners.model import SurgeryTuner
from hfpatch.tuners.nonlinear_query.config import NonlinearQueryConfig
from hfpatch.tuners.nonlinear_query.layer import NonlinearQueryLayer


class NonlinearQueryModel(SurgeryTuner):
    """Injects anchored nonlinear queries into a causal language model. Source: arXiv 2603.13381."""

    prefix = "nonlinear_"
    tuner_layer_cls = NonlinearQueryLayer

    @staticmethod
    def refusal(site: AttentionSite, config: NonlinearQueryConfig) -> str | None:
        """Return why one of the targets cannot be made nonlinear at this site."""
        for target in config.targets:
            if target in site.refusals:
                return site.refusals[target]
            if target not in site.projections:
                return f"{type(site.attention).__name__} has no projection that computes the {target} alone"
        return None

    def check_site(self, site: AttentionSite, config: NonlinearQueryConfig) -> None:
        """Refuse an identity anchor where d_q differs from d, and a default rank where d is odd."""
        bottleneck_rank(site.hidden_size, config.rank)
        if config.anchor == "identity":
            for target in config.targets:
                require_square(site.hidden_size, site.projections[target].columns.size)
