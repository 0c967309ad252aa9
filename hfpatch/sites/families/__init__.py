"""One small declaration for each family of architectures; importing this package registers them."""

from hfpatch.sites.families import bloom, falcon, gpt2, gpt_neox, gptj, llama, opt, phi3

__all__ = ["bloom", "falcon", "gpt2", "gpt_neox", "gptj", "llama", "opt", "phi3"]
