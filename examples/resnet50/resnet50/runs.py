"""Loads a trained network from a run's output folder, for eval.py, predict.py and export.py."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from jax_bnar.flax_layers import ResNet, fold_batch_norms
from resnet50 import checkpoints, config, inference, model
from resnet50.errors import UserError


@dataclasses.dataclass(frozen=True)
class Trained:
    """The network, its variables, and the pictures that it expects."""

    net: ResNet
    variables: dict[str, Any]
    model: config.Model
    source: config.Source
    data: config.Data
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    step: int

    def logits_function(self) -> inference.Logits:
        return inference.logits_function(self.net, self.mean, self.std)

    def folded(self) -> "Trained":
        """The same network with every BatchNorm folded into its convolution, which leaves a bias.

        Our kernel adds the bias, or plain XLA does if the BatchNorm is Flax's.
        """
        implementation = "xla" if self.model.norm == "flax" else None
        net, variables = fold_batch_norms(self.net, self.variables, implementation=implementation)
        return dataclasses.replace(self, net=net, variables=variables)


def load(
    path: pathlib.Path,
    step: int | None = None,
    norm: config.Norm | None = None,
    average: bool | None = None,
) -> Trained:
    """Reads the network from a checkpoint.

    Args:
        path: output folder of train.py.
        step: the checkpoint's step; None is the last one.
        norm: another BatchNorm than in training.
        average: load the moving average instead of the variables; None does so if there is one.

    Raises:
        UserError: there is no such checkpoint, or it cannot be read.
    """
    reader, step = checkpoints.open_for_reading(path, step)
    try:
        about = reader.about(step)
        if about is None:
            raise UserError(
                f"the checkpoint of step {step} in {path} cannot be read; choose another with"
                f" --step, from {reader.steps()}."
            )
        described, dataset = about["config"], about["dataset"]
        fields = config.model_from_json(described["model"])
        if norm is not None:
            fields = dataclasses.replace(fields, norm=norm)
        net = model.build(fields, len(dataset["classes"]))
        shape = tuple(dataset["image_shape"])
        images = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
        target = dict(jax.eval_shape(net.init, jax.random.key(0), images))
        has_average = described["training"]["ema_decay"] > 0
        if average and not has_average:
            raise UserError(f"{path} was trained without a moving average: leave out --average.")
        if has_average if average is None else average:
            variables = reader.variables(step, {"ema": target})["ema"]
        else:
            variables = reader.variables(step, target)
    finally:
        reader.close()
    images_folder = described["data"]["images"]
    data = config.Data(
        **{
            **described["data"],
            "images": None if images_folder is None else pathlib.Path(images_folder),
        }
    )
    return Trained(
        net=net,
        variables=variables,
        model=fields,
        source=described["source"],
        data=data,
        classes=tuple(dataset["classes"]),
        image_shape=shape,
        mean=tuple(dataset["mean"]),
        std=tuple(dataset["std"]),
        step=step,
    )
