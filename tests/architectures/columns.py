"""Which output columns of a projection are the query's, computed from the sizes in the configuration.

Each formula is how transformers' modelling source splits the projection's output.
"""


def width_of(projection):
    """Return the number of output columns; a Conv1D's weight is (in, out)."""
    return getattr(projection, "nf", None) or projection.weight.shape[0]


def all_columns(projection, config):
    return list(range(width_of(projection)))


def groups(projection, *, count, length):
    """The first ``length`` columns of each of ``count`` equal groups."""
    width = width_of(projection) // count
    return [group * width + column for group in range(count) for column in range(length)]


def first(size_of):
    """[q all, k all, v all]"""
    return lambda projection, config: list(range(size_of(config)))


def per_head(heads_of):
    """For each head [q, k, v]"""

    def columns(projection, config):
        heads = heads_of(config)
        return groups(projection, count=heads, length=width_of(projection) // (3 * heads))

    return columns


def query_and_gate(projection, config):
    """For each head [q, gate]"""
    return groups(projection, count=config.num_attention_heads, length=config.head_dim)


def latent_query_and_gate(projection, config):
    """For each head [q, gate] of different widths"""
    length = config.qk_nope_head_dim + config.qk_rope_head_dim
    return groups(projection, count=config.num_attention_heads, length=length)


def codegen(projection, config):
    """4 groups of [q, v, k], each of a quarter of the heads"""
    return groups(projection, count=4, length=config.n_embd // 4)


def falcon_grouped(projection, config):
    """For each key/value head [its queries, k, v]"""
    size = config.hidden_size // config.num_attention_heads
    queries = config.num_attention_heads // config.num_kv_heads
    return groups(projection, count=config.num_kv_heads, length=queries * size)


def _phi_query_size(config):
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_attention_heads * size


def rest_of(query, width):
    """Return the columns of key and value in a projection of all three: in each group [its queries, k, v]."""
    starts = [column for column in query if column - 1 not in query]
    group = width // len(starts)
    half = (group - len(query) // len(starts)) // 2
    key = [start + group - 2 * half + column for start in starts for column in range(half)]
    return key, [column + half for column in key]


PER_HEAD = per_head(lambda config: config.num_attention_heads)

QUERY_COLUMNS = {
    **dict.fromkeys(["gpt2", "gpt-sw3", "openai-gpt", "gpt_bigcode"], first(lambda config: config.n_embd)),
    **dict.fromkeys(["mpt", "dbrx"], first(lambda config: config.d_model)),
    **dict.fromkeys(["phi3", "phi4_multimodal"], first(_phi_query_size)),
    **dict.fromkeys(["gpt_neox", "gpt_neox_japanese", "persimmon", "fuyu"], PER_HEAD),
    "gpt_bigcode/multi_head": per_head(lambda config: config.n_head),
    "bloom": per_head(lambda config: config.n_head),
    "falcon": first(lambda config: config.hidden_size),
    **dict.fromkeys(["falcon/per_head", "falcon/sequential"], PER_HEAD),
    **dict.fromkeys(["falcon/new_decoder", "falcon/new_decoder_one_norm"], falcon_grouped),
    "codegen": codegen,
    **dict.fromkeys(
        ["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text"],
        query_and_gate,
    ),
    "axk2": latent_query_and_gate,
}
