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

    def check_site(self, site: AttentionSite, config: NonlinearQueryConfig) -> None:
        """Refuse an identity anchor where d_q differs from d, and a default rank where d is odd."""
        bottleneck_rank(site.hidden_size, config.rank)
        if config.anchor == "identity":
            for target in config.targets:
                require_square(site.hidden_size, site.projections[target].columns.size)
