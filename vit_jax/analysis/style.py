"""Colours and captions that all figures and HTML reports share."""

# The palette of Okabe and Ito, which colour-blind people can distinguish.
COLOURS = (
  '#0072B2',
  '#D55E00',
  '#009E73',
  '#CC79A7',
  '#E69F00',
  '#56B4E9',
  '#000000',
  '#F0E442',
)
# Captions of the figures of trained weights, by file name.
FIGURES = {
  'filters': 'Filters of the first layer (the paper’s Figure 7, left)',
  'positions': 'Similarity of position embeddings (Figure 7, centre)',
  'attention_distance': 'Attention distance (Figures 7, right, and 11)',
  'rollout': 'Attention rollout (Figures 6 and 14)',
  'heads': 'Single heads of the last layer',
  'components': 'Principal components of patch tokens (DINOv2, Figure 1)',
  'reconstructions': 'Masked patches and their predictions',
}
