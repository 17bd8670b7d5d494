"""Arithmetic of a Vision Transformer, and what a chip can do at most."""

# Peak dense bf16 FLOP/s of one JAX device, by `device.device_kind`. A v2 or v3
# chip is two devices (cores); later TPU chips are one. Public vendor figures.
_PEAK_FLOPS = {
  'TPU v2': 23e12,
  'TPU v3': 61.5e12,
  'TPU v4': 275e12,
  'TPU v4 lite': 137e12,
  'TPU v5 lite': 197e12,
  'TPU v5e': 197e12,
  'TPU v5': 459e12,
  'TPU v5p': 459e12,
  'TPU v6 lite': 918e12,
  'TPU v6e': 918e12,
  'NVIDIA A100': 312e12,
  'NVIDIA H100 PCIe': 756e12,
  'NVIDIA H100': 989e12,
  'NVIDIA H200': 989e12,
}


def peak_flops(device_kind: str) -> float | None:
  """Peak bf16 FLOP/s of a device, None if unknown (a CPU, say)."""
  if device_kind in _PEAK_FLOPS:
    return _PEAK_FLOPS[device_kind]
  prefixes = [kind for kind in _PEAK_FLOPS if device_kind.startswith(kind)]
  gpu = [kind for kind in prefixes if kind.startswith('NVIDIA')]
  return _PEAK_FLOPS[max(gpu, key=len)] if gpu else None


def vit_forward(
  *,
  num_tokens: int,
  num_patches: int,
  patch_size: int,
  width: int,
  depth: int,
  mlp_dim: int,
  num_classes: int,
  pre_logits: bool,
  map_pooling: bool = False,
) -> int:
  """Matrix FLOPs of one image's forward pass (2 for each multiply-add).

  Soft-max, norms and element-wise work are not counted, as is usual for MFU;
  a training step counts as three forward passes.

  Args:
    num_tokens: length of the sequence in the encoder, class token included.
    num_patches: patches embedded.
    patch_size: side of a patch in pixels (3 channels).
    width: of the residual stream.
    depth: number of layers.
    mlp_dim: hidden units of the MLP.
    num_classes: outputs of the head, 0 for no head.
    pre_logits: whether a dense layer of `width` precedes the head.
    map_pooling: whether one query attends to all tokens, with an MLP after.
  """
  projections = 4 * num_tokens * width**2
  attention = 2 * num_tokens**2 * width
  mlp = 2 * num_tokens * width * mlp_dim
  embedding = num_patches * 3 * patch_size**2 * width
  top = width * num_classes + (width**2 if pre_logits else 0)
  if map_pooling:  # keys and values of all tokens; one query, output and MLP
    top += 2 * num_tokens * width**2 + 2 * width**2
    top += 2 * num_tokens * width + 2 * width * mlp_dim
  return 2 * (depth * (projections + attention + mlp) + embedding + top)
