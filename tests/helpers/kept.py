"""What autograd keeps between a forward pass and its backward pass."""

import torch


def bytes_kept(model, forward):
    """Bytes of all tensors that a forward pass leaves for the backward pass, weights left out.

    Views of one storage count once, and whole: that is what stays allocated.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor, storage.nbytes()  # the tensor stays, so that no other gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(size for _, size in kept.values())
