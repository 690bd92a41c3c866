"""All training options, with their defaults for each source of pictures."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import tyro

Source = Literal["folder", "digits", "synthetic"]
Norm = Literal["fused", "flax"]
Padding = Literal["SAME", "torch"]
Platform = Literal["auto", "cpu", "gpu", "tpu"]

# Types of options that may be left out. Without these annotations, the help would call the value
# {None}|PATH and its default None.
OptionalPath = Annotated[
    pathlib.Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="(optional)")
]
OptionalInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(optional)")]
OptionalText = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="(optional)")]
OptionalBool = Annotated[
    bool | None, tyro.conf.arg(metavar="{True,False}", help_behavior_hint="(optional)")
]
OptionalNorm = Annotated[
    Norm | None, tyro.conf.arg(metavar="{fused,flax}", help_behavior_hint="(optional)")
]


@dataclasses.dataclass(frozen=True)
class Data:
    """Where pictures come from."""

    images: OptionalPath = None
    """Folder with train/<class>/*.jpg and val/<class>/*.jpg (only for the source "folder")."""
    image_size: int = 224
    """Height and width of the network's input (ignored for the digits, which are 8x8)."""
    workers: OptionalInt = None
    """Processes that decode pictures; 0 decodes in the training process. The default is all cores
    but one, at most 16, and 0 for digits and synthetic pictures."""
    synthetic_images: int = 1_281_167
    """Number of synthetic pictures in an epoch."""
    synthetic_classes: int = 1000
    """Number of classes of the synthetic pictures."""


@dataclasses.dataclass(frozen=True)
class Model:
    """The network: ResNet v1.5 with bottleneck blocks."""

    norm: Norm = "fused"
    """BatchNorm of the whole network: "fused" (jax_bnar, with the addition and the ReLU) or "flax"
    (flax.linen.BatchNorm, addition, ReLU). The variables are the same."""
    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)
    """Blocks in each stage; 3 4 6 3 is ResNet-50."""
    num_filters: int = 64
    """Channels of the first stage."""
    stem: Literal["imagenet", "small"] = "imagenet"
    """"imagenet" is a 7x7 convolution and max pool, "small" a 3x3 convolution for tiny pictures."""
    padding: Padding = "SAME"
    """Padding where the stride is 2: "SAME" pads more at the end, as in Flax's ResNet; "torch" pads
    equally on every side, which weights from PyTorch need."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the computation; parameters, statistics, loss and optimizer are float32."""
    bn_momentum: float = 0.9
    """Weight of the old value in the running statistics."""


@dataclasses.dataclass(frozen=True)
class Training:
    """The recipe; the defaults are those of NVIDIA's ResNet-50 v1.5 (90 epochs)."""

    epochs: float = 90.0
    """Passes over the training pictures."""
    batch_size: int = 256
    """Pictures per optimizer step, over all devices and micro-batches."""
    accumulate: int = 1
    """Micro-batches per step, to save memory. BatchNorm normalises each one separately."""
    remat: bool = False
    """Keep only the results of convolutions and the statistics for backward, and compute the rest
    again there: about a third less memory."""
    learning_rate: float = 0.256
    """Peak learning rate for a batch of 256; it is scaled with batch_size."""
    warmup_epochs: float = 8.0
    """Epochs of linear warmup, which is followed by cosine decay to 0."""
    momentum: float = 0.875
    """Momentum of SGD, with Nesterov's correction."""
    weight_decay: float = 2.0**-15
    """Weight decay of convolutions and the dense kernel; BatchNorm and biases have none."""
    label_smoothing: float = 0.1
    """Probability that the target distributes over all classes."""
    ema_decay: float = 0.0
    """Decay of a moving average of the variables, which is evaluated too (0: no average; 0.9999 is
    common)."""
    seed: int = 0
    """Seed of the initial variables, the order of the pictures and their augmentation."""
    init_from: OptionalPath = None
    """Start from the variables in this run's folder, or from torchvision's in a .safetensors, .pth
    or .pt file (with --padding torch); a head of another size is newly initialised."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Where and how the program runs, and what it writes."""

    output: pathlib.Path = pathlib.Path("runs/resnet50")
    """Folder for checkpoints, metrics.jsonl, TensorBoard events and profiles."""
    resume: bool = False
    """Continue from the last good checkpoint in the output folder, if there is one."""
    checkpoint_every: int = 1000
    """Steps between checkpoints (there is also one at the end, and on SIGTERM or Ctrl-C)."""
    keep_checkpoints: int = 3
    """Number of checkpoints to keep; older ones are deleted."""
    evaluate_every: float = 1.0
    """Epochs between evaluations (there is also one at the end)."""
    log_every: int = 50
    """Steps that a line of metrics averages over."""
    profile_at: OptionalInt = None
    """Step at which to start a profile for TensorBoard or Perfetto."""
    profile_steps: int = 5
    """Number of steps in the profile."""
    platform: Platform = "auto"
    """Platform to run on; "auto" uses JAX's default."""
    distributed: bool = False
    """Join the other processes of the job through jax.distributed."""
    coordinator: OptionalText = None
    """Address HOST:PORT of process 0. On clusters that JAX detects, this option and the next two
    are not needed."""
    num_processes: OptionalInt = None
    """Number of processes in the job."""
    process_id: OptionalInt = None
    """Index of this process."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Train ResNet-50."""

    source: tyro.conf.Fixed[Source] = "folder"
    data: Data = dataclasses.field(default_factory=Data)
    model: Model = dataclasses.field(default_factory=Model)
    training: Training = dataclasses.field(default_factory=Training)
    run: Run = dataclasses.field(default_factory=Run)


PRESETS: Final[dict[str, tuple[str, Config]]] = {
    "folder": (
        "Pictures in a folder: train/<class>/*.jpg and val/<class>/*.jpg, as in ImageNet.",
        Config(data=Data(images=tyro.MISSING)),
    ),
    "digits": (
        "scikit-learn's 1797 handwritten digits (8x8 pixels): real data without a download.",
        Config(
            source="digits",
            data=Data(image_size=8),
            model=Model(stage_sizes=(1, 1, 1), num_filters=16, stem="small", dtype="float32"),
            training=Training(
                epochs=20.0,
                batch_size=64,
                learning_rate=0.4,
                warmup_epochs=2.0,
                momentum=0.9,
                weight_decay=1e-4,
                label_smoothing=0.0,
            ),
            run=Run(output=pathlib.Path("runs/digits"), checkpoint_every=100, log_every=10),
        ),
    ),
    "synthetic": (
        "Noise with random labels, to measure throughput; there is nothing to learn.",
        Config(source="synthetic", run=Run(output=pathlib.Path("runs/synthetic"))),
    ),
}


def from_command_line(arguments: Sequence[str] | None = None) -> Config:
    """The configuration that the arguments describe; exits if they are invalid."""
    return tyro.extras.overridable_config_cli(
        PRESETS, args=arguments, config=(tyro.conf.OmitArgPrefixes,), prog="train.py"
    )


def to_json(config: Config) -> dict[str, Any]:
    """The configuration as plain values, for the checkpoint."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(v) for key, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        return str(value) if isinstance(value, pathlib.Path) else value

    return plain(dataclasses.asdict(config))


def model_from_json(fields: dict[str, Any]) -> Model:
    """The network that a checkpoint describes."""
    return Model(**{**fields, "stage_sizes": tuple(fields["stage_sizes"])})
