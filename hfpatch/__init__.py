"""hfpatch: model surgery on the attention branch of Hugging Face causal language models."""
