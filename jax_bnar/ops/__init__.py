"""Batch normalisation with the names, operands, results and attributes of other systems.

`fused_bn_add_activation` is Paddle's operator; `batch_norm_forward_training`,
`batch_norm_inference` and `batch_norm_training_backward` are those of oneDNN Graph. They run the
kernels of `jax_bnar.bn_add_relu` without the limits of the originals: they take every dtype, layout
and number of channels that the kernels take, on every platform. Where the systems differ from each
other (momentum, the running variance, the second saved statistic), each operator follows its own
system; the table in `docs/guide/other_systems.md` compares them.
"""

from jax_bnar._base.public_names import show_public_names as _show_public_names
from jax_bnar.ops.onednn import (
    ForwardTraining,
    TrainingBackward,
    batch_norm_forward_training,
    batch_norm_inference,
    batch_norm_training_backward,
)
from jax_bnar.ops.paddle import (
    FusedBnAddActivation,
    FusedBnAddActivationGrad,
    fused_bn_add_activation,
    fused_bn_add_activation_grad,
)

__all__ = [
    "ForwardTraining",
    "FusedBnAddActivation",
    "FusedBnAddActivationGrad",
    "TrainingBackward",
    "batch_norm_forward_training",
    "batch_norm_inference",
    "batch_norm_training_backward",
    "fused_bn_add_activation",
    "fused_bn_add_activation_grad",
]

_show_public_names(globals())
