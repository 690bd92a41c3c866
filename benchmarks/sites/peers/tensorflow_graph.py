"""TensorFlow in a tf.function: `tf.compat.v1.nn.fused_batch_norm`, an addition and a ReLU, NHWC.

In float32 the operator runs oneDNN's BatchNorm, in 16-bit types only where oneDNN has it;
otherwise it runs on Eigen. The parameters stay float32.
"""

from typing import Any

from benchmarks.sites.peers import Step, _tf
from benchmarks.sites.peers._tf import tf
from benchmarks.sites.problem import EPSILON, MOMENTUM, RUNNING_MEAN, RUNNING_VAR, Problem


def build(problem: Problem) -> Step:
    channels = (problem.site.channels,)
    scale, bias = tf.Variable(problem.scale), tf.Variable(problem.bias)
    mean = tf.Variable(tf.fill(channels, RUNNING_MEAN))
    var = tf.Variable(tf.fill(channels, RUNNING_VAR))

    def forward(x: Any, z: Any) -> Any:
        y, new_mean, new_var = tf.compat.v1.nn.fused_batch_norm(
            x,
            scale,
            bias,
            mean,
            var,
            epsilon=EPSILON,
            data_format="NHWC",
            is_training=True,
            exponential_avg_factor=1 - MOMENTUM,
        )
        mean.assign(new_mean)
        var.assign(new_var)
        if z is not None:
            y = y + z
        return y if problem.site.form == "batch_norm" else tf.nn.relu(y)

    return _tf.make_step(problem, forward, [scale, bias], [mean, var], unbiased=True)
