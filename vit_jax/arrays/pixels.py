"""Units of pixels: mean and standard deviation (std) of each channel."""

Channels = tuple[float, ...]
# (mean, std) of each channel of pixels in [0, 1].
NONE = ((0.5,) * 3, (0.5,) * 3)  # normalizes pixels to [-1, 1]
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
MAX_CHANNELS = 16
