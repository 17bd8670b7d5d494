"""Masked patch prediction, the paper's self-supervision: appendix B.1.2.

Arguments:
  data: jft, as in the paper, or i21k, the largest public dataset.
  target: mean_color, small_patch or pixels, see `objectives/masked_patch.py`.

Source: appendix B.1.2: ViT-B/16, batch size 4096, Adam with β1 0.9 and β2
0.999, base learning rate 2e-4, 10,000 warm-up steps, cosine decay, 1 M steps
(about 14 epochs of JFT). Half of the patches are corrupted: 80 % of these
become [mask], 10 % another patch, and 10 % remain unchanged.

Expected after fine-tuning on ImageNet (configs/finetune_imagenet.py): top-1 of
79.9 with mean_color, 2 % above training from scratch and 4 % below supervised
pre-training. The paper reports diminishing returns after 100,000 steps
(--config.total='100000 steps') and, without numbers, similar gains from
pre-training on ImageNet; 15 % corrupted patches were slightly worse few-shot.

Not in B.1.2, and the authors never released their code: the weight decay of
0.1 (that of all pre-training, section 4.1), the crops and flips (the authors
said later that they are the classifier's), the image from which another patch
is taken (here the same image), and the units of the regression (here [-1, 1]).

JFT-300M is not public; its configs are for `plan`, and for your own data with
--config.source.dataset. The paper's numbers are for JFT; i21k uses the same
recipe here.
"""

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg

DATA = {
  'jft': dict(
    dataset='jft300m', train=dict(split='train', num_examples=303_000_000)
  ),
  'i21k': dict(
    dataset='imagenet21k',
    train=dict(split='train[51200:]', num_examples=14_145_922),
  ),
}


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(argument, dict(data=DATA), data='jft', target='mean_color')
  config = ConfigDict()
  config.total = '1000000 steps'
  config.batch_size = 4096
  config.image_size = (224, 224)
  config.num_classes = 0

  config.source = dict(name='tfds', dataset=DATA[arg.data]['dataset'])
  config.train = DATA[arg.data]['train']
  config.augment = dict(crop='inception', min_area=0.05, flip=True)
  config.preprocess = dict(resize='central', central_fraction=0.875)

  config.model = dict(
    name='vit',
    variant='B/16',
    pool='token',
    dtype='bfloat16',
    unroll=12,
  )
  config.objective = dict(name='masked_patch', target=arg.target, corrupted=0.5)
  config.optimizer = dict(
    name='adam', b1=0.9, b2=0.999, weight_decay=0.1, decay_mask='all'
  )
  config.schedule = dict(base_lr=2e-4, warmup='10000 steps', decay='cosine')
  config.mesh = dict(data=-1, fsdp=1, model=1, zero1=True)

  config.evals = dict(
    fewshot=dict(
      name='fewshot',
      source=dict(name='tfds', dataset='imagenet2012'),
      train_split='train[:65000]',
      split='validation',
      shots=(5, 10),
      every='10 %',
    )
  )
  config.checkpoint = dict(every='2500 steps', keep=3)
  config.log = dict(every='50 steps')
  return complete(config)
