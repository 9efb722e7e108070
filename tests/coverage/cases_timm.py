"""Image models of timm, without weights, on tiny images: 64 pixels where the model halves them five times, so that batch
normalisation still sees more than one pixel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from judge import Case, case
from torch import Tensor, nn
from torchvision_stub import torchvision_stub

with torchvision_stub():
    import timm
    from timm.models.densenet import DenseNet
    from timm.models.levit import Levit
    from timm.models.mlp_mixer import MlpMixer
    from timm.models.vgg import VGG

CLASSES = 10
FOUR = {"depths": (1, 1, 1, 1)}


def _images(model: nn.Module, size: int = 64, loss: Any = F.cross_entropy) -> Case:
    return Case(model=model, inputs=(torch.randn(2, 3, size, size),), targets=(torch.randint(CLASSES, (2,)),), loss=loss)


def _timm(name: str, **config: Any) -> nn.Module:
    return timm.create_model(name, pretrained=False, num_classes=CLASSES, **config)


@case("timm/resnet18")
def resnet18() -> Case:
    return _images(_timm("resnet18", channels=(16, 32, 48, 64), stem_width=16))


@case("timm/seresnext")
def seresnext() -> Case:
    small = {"layers": (1, 1, 1, 1), "channels": (16, 32, 48, 64), "cardinality": 8, "base_width": 8, "stem_width": 16}
    return _images(_timm("seresnext26t_32x4d", **small))


@case("timm/efficientnet_b0")
def efficientnet_b0() -> Case:
    return _images(_timm("efficientnet_b0", drop_path_rate=0.1))


@case("timm/mobilenetv3_small_050")
def mobilenetv3_small_050() -> Case:
    return _images(_timm("mobilenetv3_small_050"))


@case("timm/regnety_002")
def regnety_002() -> Case:
    return _images(_timm("regnety_002"))


@case("timm/densenet")
def densenet() -> Case:
    return _images(DenseNet(growth_rate=8, block_config=(2, 2, 2, 2), num_classes=CLASSES))


@case("timm/vgg_bn")
def vgg_bn() -> Case:
    channels = [16, "M", 16, "M", 32, 32, "M", 32, 32, "M"]
    return _images(VGG(channels, num_classes=CLASSES, mlp_ratio=1 / 32, norm_layer=nn.BatchNorm2d))


@case("timm/vit_tiny_patch16")
def vit_tiny_patch16() -> Case:
    return _images(_timm("vit_tiny_patch16_224", img_size=64, depth=3, drop_path_rate=0.1))


@case("timm/deit_tiny_distilled")
def deit_tiny_distilled() -> Case:
    def both(output: tuple[Tensor, Tensor], label: Tensor) -> Tensor:
        return (F.cross_entropy(output[0], label) + F.cross_entropy(output[1], label)) / 2

    model = _timm("deit_tiny_distilled_patch16_224", img_size=64, depth=3)
    model.set_distilled_training(True)
    return _images(model, loss=both)


@case("timm/swin_tiny")
def swin_tiny() -> Case:
    small = {"embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
    return _images(_timm("swin_tiny_patch4_window7_224", img_size=64, **small))


@case("timm/convnext_atto")
def convnext_atto() -> Case:
    return _images(_timm("convnext_atto", dims=(16, 32, 48, 64), drop_path_rate=0.1, **FOUR))


@case("timm/mixer")
def mixer() -> Case:
    return _images(MlpMixer(img_size=64, patch_size=16, embed_dim=64, num_blocks=3, num_classes=CLASSES))


@case("timm/levit")
def levit() -> Case:
    return _images(Levit(img_size=64, num_classes=CLASSES, embed_dim=(32, 48), key_dim=8, depth=(2, 2), num_heads=(2, 3)))


@case("timm/pvt_v2_b0")
def pvt_v2_b0() -> Case:
    return _images(_timm("pvt_v2_b0", embed_dims=(16, 32, 40, 64), **FOUR))


@case("timm/xcit_nano")
def xcit_nano() -> Case:
    return _images(_timm("xcit_nano_12_p16_224", img_size=64, embed_dim=64, depth=3))


@case("timm/coatnet")
def coatnet() -> Case:
    return _images(_timm("coatnet_nano_rw_224", img_size=64, embed_dim=(32, 32, 64, 64), stem_width=16, **FOUR))


@case("timm/maxvit")
def maxvit() -> Case:
    return _images(_timm("maxvit_pico_rw_256", img_size=64, embed_dim=(32, 32, 64, 64), stem_width=16, **FOUR))
