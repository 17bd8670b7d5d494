"""Tests of distillation against torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_vit import SIZES, noise_params

from tests.objectives.tiny import KEY, inputs, labelled
from vit_jax.arrays import tree
from vit_jax.data.contract import Source
from vit_jax.errors import UserError
from vit_jax.models.vit import Model
from vit_jax.objectives.contract import Frozen, Setting
from vit_jax.objectives.distill import Objective
from vit_jax.objectives.mixing import DeviceAugment
from vit_jax.training import frozen

CLASSES = 7
STUDENT = Model(CLASSES, distilled=True, **SIZES)
TEACHER = Model(CLASSES, **SIZES | {'width': 24, 'depth': 1})
PARAMS, TAUGHT = (
  noise_params(STUDENT, (8, 8)),
  noise_params(TEACHER, (16, 16), 0.5),
)
MIX = DeviceAugment(CLASSES, mixup=0.8, cutmix=1.0, erasing=0.5)
INPUTS = inputs(labelled(6, (8, 8), CLASSES), frozen={'teacher': TAUGHT})


def objective(student=STUDENT, teacher=TEACHER, mix=MIX, **keys):
  """Returns an objective whose teacher is for images of twice the size."""
  opened = Frozen(teacher, (16, 16), lambda mesh: TAUGHT)
  setting = Setting(student, (8, 8), mix, open_frozen=lambda path: opened)
  made = Objective(setting, teacher='somewhere', **keys)
  assert made.frozen()['teacher'].judges_labels
  return made


def heads_of(params, images):
  """Returns the logits of both heads of the student, `[n, 2, k]`."""
  variables = {'params': params}
  found = STUDENT.apply(variables, images, method='predict', want=('heads',))
  return found['heads']


def taught_by(images):
  """Returns the teacher's logits, for images of twice the size."""
  large = jax.image.resize(images, (6, 16, 16, 3), 'bilinear')
  return jax.jit(TEACHER.apply)({'params': TAUGHT}, large)


def expected(kind, share, tau, smoothing, heads, taught, targets):
  """Computes equations 2 and 3 of DeiT in torch.

  Shapes: heads `[n, 2, k]`, taught `[n, k]`, targets `[n, k]`.
  """
  of_labels, of_teacher = heads[:, 0], heads[:, 1]
  smooth = targets * (1 - smoothing) + smoothing / CLASSES
  labels = -(smooth * F.log_softmax(of_labels, -1)).sum(-1).mean()
  if kind == 'hard':
    teacher = F.cross_entropy(of_teacher, taught.argmax(-1))
  else:
    teacher = tau**2 * F.kl_div(
      F.log_softmax(of_teacher / tau, -1),
      F.log_softmax(taught / tau, -1),
      reduction='batchmean',
      log_target=True,
    )
  loss = (1 - share) * labels + share * teacher
  loss.backward()
  return [float(value.detach()) for value in (loss, labels, teacher)]


@pytest.mark.slow
@pytest.mark.parametrize(
  'kind, share, tau, smoothing',
  [('hard', 0.5, 1.0, 0.1), ('soft', 0.1, 3.0, 0.0)],
)
def test_loss_and_gradients_equal_torch(kind, share, tau, smoothing):
  """Student and teacher get the same mixed and erased images."""
  made = objective(
    kind=kind, teacher_weight=share, temperature=tau, label_smoothing=smoothing
  )

  def loss_of(params, taught):  # as in the training step
    return made.loss(params, INPUTS._replace(frozen={'teacher': taught}))

  compiled = jax.jit(jax.value_and_grad(loss_of, (0, 1), has_aux=True))
  (loss, (metrics, _)), (grads, of_teacher) = compiled(PARAMS, TAUGHT)
  images, targets = MIX(INPUTS.batch, KEY)
  assert targets.shape == (6, CLASSES)
  heads, pull_back = jax.vjp(lambda p: heads_of(p, images), PARAMS)
  taught = taught_by(images)
  tensor = torch.tensor(np.asarray(heads), requires_grad=True)
  expected_loss, labels, teacher = expected(
    kind,
    share,
    tau,
    smoothing,
    tensor,
    torch.tensor(np.asarray(taught)),
    torch.tensor(np.asarray(targets)),
  )
  assert float(loss) == pytest.approx(expected_loss, rel=1e-5)
  assert float(metrics['label_loss']) == pytest.approx(labels, rel=1e-5)
  assert float(metrics['teacher_loss']) == pytest.approx(teacher, rel=1e-5)
  (known,) = pull_back(jnp.array(tensor.grad.numpy()))
  known = tree.flatten(known)
  for path, leaf in tree.flatten(grads).items():
    near = 1e-5 * max(1e-3, np.abs(known[path]).max())
    np.testing.assert_allclose(leaf, known[path], atol=near, err_msg=path)
  assert all(not leaf.any() for leaf in jax.tree.leaves(of_teacher))


@pytest.mark.slow
def test_agreement_uses_the_distillation_head():
  """The two heads of the student agree with the teacher at other rates."""
  made = objective(mix=DeviceAugment(CLASSES))
  _, (metrics, _) = jax.jit(made.loss)(PARAMS, INPUTS)
  images, _ = made.setting.mix(INPUTS.batch, KEY)
  classes, taught = (
    x.argmax(-1) for x in (heads_of(PARAMS, images), taught_by(images))
  )
  label_head, teacher_head = (classes == taught[:, None]).mean(0)
  assert label_head != teacher_head
  assert float(metrics['agreement']) == pytest.approx(float(teacher_head))


@pytest.mark.slow
def test_a_model_with_one_head_can_be_distilled():
  """It has no distillation token, as in Noisy Student or FunMatch."""
  plain = Model(CLASSES, **SIZES)
  params = noise_params(plain, (8, 8))
  made = objective(plain, kind='soft', teacher_weight=1.0, mix=DeviceAugment(7))
  loss, (metrics, _) = jax.jit(made.loss)(params, INPUTS)
  images, _ = made.setting.mix(INPUTS.batch, KEY)
  student = jax.jit(plain.apply)({'params': params}, images)
  logits, taught = (
    torch.tensor(np.asarray(x)) for x in (student, taught_by(images))
  )
  expected = F.kl_div(
    F.log_softmax(logits, -1), F.softmax(taught, -1), reduction='batchmean'
  )
  assert float(loss) == pytest.approx(float(expected), rel=1e-5)
  assert float(metrics['label_loss']) > 0


def test_a_teacher_must_have_the_classes_of_the_run():
  """Names and order are compared, unless there are no names."""

  class Pets(list, Source):
    name, num_classes, class_names = 'pets', 2, ['cat', 'dog']

  source = Pets()

  def check(names, judges_labels=True):
    each = Frozen(TEACHER, (8, 8), lambda mesh: None, names, judges_labels)
    frozen.check_classes({'teacher': each}, source)

  for fine in (('cat', 'dog'), ('cat', 'dog', 'cow'), (), ('0', '1')):
    check(fine)
  check(('dog', 'cat'), judges_labels=False)
  for wrong in (('dog', 'cat'), ('cat', 'cow')):
    with pytest.raises(UserError, match="'teacher'.*pets"):
      check(wrong)
