"""What folding is for on GPUs, in the program that XLA compiles for one that is not there."""

import json

import gpu_compiler
import pytest

_COUNT = """
import json
import haiku as hk

def forward(x, is_training):
    return hk.nets.ResNet18(10)(x, is_training)

net = hk.without_apply_rng(hk.transform_with_state(forward))
x = jnp.ones((8, 64, 64, 3))
variables = jax.eval_shape(lambda key: net.init(key, x, True), jax.random.key(0))
variables = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), variables)
plain = lambda v, x: net.apply(*v, x, False)[0]
folded = jax_bnar.fold_batch_norms(plain, variables, x)
on_h200 = SingleDeviceSharding(h200s(1)[0])

def described(tree):
    describe = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=on_h200)
    return jax.tree.map(describe, tree)

def calls(function, weights):
    text = jax.jit(function).lower(described(weights), described(x)).compile().as_text()
    return {
        name: text.count(f'custom_call_target="__cudnn$conv{name}"')
        for name in ("Forward", "BiasActivationForward")
    }

print(json.dumps([calls(plain, variables), calls(folded.apply, folded.variables)]))
"""


@pytest.mark.slow
@pytest.mark.one_python
def test_convolutions_take_the_rest_of_the_block() -> None:
    """cuDNN adds the offset, and with it residual and ReLU, in the convolution itself."""
    gpu_compiler.require()
    plain, folded = json.loads(gpu_compiler.run_with_gpu_compiler(_COUNT, timeout=300))
    assert plain == {"Forward": 20, "BiasActivationForward": 0}
    assert folded == {"Forward": 0, "BiasActivationForward": 20}
