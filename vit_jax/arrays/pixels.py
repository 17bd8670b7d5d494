"""Normalization of pixels by mean and standard deviation (std) of each channel.

A model receives (pixel - mean) / std, for pixels in [0, 1].
"""

Channels = tuple[float, ...]
# Pairs (mean, std). With NONE, the model receives pixels in [-1, 1], as models
# of this package do unless their config contains a mean and a std.
NONE = ((0.5,) * 3, (0.5,) * 3)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
MAX_CHANNELS = 16
