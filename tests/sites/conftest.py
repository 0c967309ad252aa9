import pytest

from hfpatch.sites import family as registry


@pytest.fixture
def declarations(monkeypatch):
    """Let a test declare families that are forgotten again."""
    monkeypatch.setattr(registry, "DECLARED", dict(registry.DECLARED))
    monkeypatch.setattr(registry, "TOWERS", dict(registry.TOWERS))
