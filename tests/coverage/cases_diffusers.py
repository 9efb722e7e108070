"""Denoisers and autoencoders of diffusers, with a few channels each: the loss is the squared error to the noise or the image."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    DiTTransformer2DModel,
    PriorTransformer,
    UNet1DModel,
    UNet2DConditionModel,
    UNet2DModel,
    VQModel,
)
from judge import Case, case
from torch import Tensor, nn

CONDITIONED = {
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "cross_attention_dim": 32,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
}
UPWARDS = {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}


def _sample(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output.sample, target)


def _noise(model: nn.Module, *shape: int, more: tuple[Tensor, ...] = ()) -> Case:
    inputs = (torch.randn(2, *shape), torch.tensor([3, 700]), *more)
    return Case(model=model, inputs=inputs, targets=(torch.randn(2, *shape),), loss=_sample)


@case("diffusers/unet2d")
def unet2d() -> Case:
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    small = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8, "sample_size": 16}
    return _noise(UNet2DModel(**small, **blocks), 3, 16, 16)


@case("diffusers/unet2d_condition")
def unet2d_condition() -> Case:
    return _noise(UNet2DConditionModel(sample_size=16, **CONDITIONED, **UPWARDS), 4, 16, 16, more=(torch.randn(2, 6, 32),))


class Controlled(nn.Module):
    """As one trains a ControlNet: beside a frozen denoiser, from convolutions that start at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet2DConditionModel(sample_size=16, **CONDITIONED, **UPWARDS).requires_grad_(False)
        self.control = ControlNetModel(conditioning_embedding_out_channels=(8, 16, 16, 16), **CONDITIONED)

    def forward(self, sample: Tensor, time: Tensor, text: Tensor, hint: Tensor) -> Any:
        control = self.control(sample, time, text, hint)
        down, mid = control.down_block_res_samples, control.mid_block_res_sample
        return self.unet(sample, time, text, down_block_additional_residuals=down, mid_block_additional_residual=mid)


@case("diffusers/controlnet")
def controlnet() -> Case:
    return _noise(Controlled(), 4, 8, 8, more=(torch.randn(2, 6, 32), torch.rand(2, 3, 64, 64)))


@case("diffusers/dit")
def dit() -> Case:
    small = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "num_embeds_ada_norm": 10, "sample_size": 16}
    return _noise(DiTTransformer2DModel(**small), 4, 16, 16, more=(torch.tensor([1, 7]),))


@case("diffusers/unet1d")
def unet1d() -> Case:
    made = _noise(UNet1DModel(sample_size=64, extra_in_channels=64), 2, 64)
    made.inputs = (made.inputs[0], torch.tensor([0.1, 0.7]))  # its time runs from 0 to 1
    made.optimizer = lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9)
    return made


@case("diffusers/prior_transformer")
def prior_transformer() -> Case:
    def loss(output: Any, target: Tensor) -> Tensor:
        return F.mse_loss(output.predicted_image_embedding, target)

    small = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "embedding_dim": 24, "num_embeddings": 6}
    inputs = (torch.randn(2, 24), torch.tensor([3, 700]), torch.randn(2, 24), torch.randn(2, 6, 24))
    return Case(model=PriorTransformer(**small), inputs=inputs, targets=(torch.randn(2, 24),), loss=loss)


@case("diffusers/autoencoder_kl")
def autoencoder_kl() -> Case:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    image = torch.rand(2, 3, 32, 32)
    model = AutoencoderKL(block_out_channels=(16, 32), norm_num_groups=8, **blocks)
    return Case(model=model, inputs=(image,), targets=(image.clone(),), loss=_sample)


@case("diffusers/vq_model")
def vq_model() -> Case:
    def loss(output: Any, target: Tensor) -> Tensor:
        return F.mse_loss(output.sample, target) + output.commit_loss

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    image = torch.rand(2, 3, 32, 32)
    model = VQModel(block_out_channels=(16, 32), norm_num_groups=8, num_vq_embeddings=32, **blocks)
    return Case(model=model, inputs=(image,), targets=(image.clone(),), loss=loss)
