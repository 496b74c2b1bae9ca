"""``--spec layer_spec packed``: Megatron-LM's local layers with attention inside documents."""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from megatron_bfp.attention import with_document_attention


def packed(_):
    """The spec of a layer, whatever the model; Megatron-LM's own attention needs a GPU."""
    return with_document_attention(get_gpt_layer_local_spec(normalization="RMSNorm"), kernel="sdpa")
