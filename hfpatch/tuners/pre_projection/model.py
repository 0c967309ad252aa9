"""The pre-projection tuner."""

from __future__ import annotations

from hfpatch.nn import inner_width
from hfpatch.sites import AttentionSite
from hfpatch.tuners.model import SurgeryTuner
from hfpatch.tuners.pre_projection.config import PreProjectionConfig
from hfpatch.tuners.pre_projection.layer import PreProjectionLayer


class PreProjectionModel(SurgeryTuner):
    """Injects pre-projections and content skips into a causal language model. Source: arXiv 2604.10791."""

    prefix = "preproj_"
    tuner_layer_cls = PreProjectionLayer

    @staticmethod
    def refusal(site: AttentionSite, config: PreProjectionConfig) -> str | None:
        """Return why the site takes no pre-projection, or no content skip where one is asked for."""
        skip = site.refusals.get("content_skip") if config.content_skip else None
        return site.refusals.get("pre_projection") or skip

    def check_site(self, site: AttentionSite, config: PreProjectionConfig) -> None:
        """Refuse an expansion that leaves no inner width."""
        if config.expansion:
            inner_width(site.hidden_size, config.expansion)
