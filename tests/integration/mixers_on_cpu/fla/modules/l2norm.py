"""Vectors of length 1."""

from torch.nn.functional import normalize


def l2norm(x, eps=1e-6):
    return normalize(x, dim=-1, eps=eps)
