"""Small models of Hugging Face transformers, unmodified, with the library's own defaults: dropout, layerdrop, use_cache."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from judge import Case, case
from torch import Tensor
from transformers.models.blip.modeling_blip_text import BlipTextLMHeadModel

VOCAB, LENGTH, BATCH = 99, 10, 2
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SMALL = {"vocab_size": VOCAB, "max_position_embeddings": 32, **LAYERS}
GPT = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
CODER = {  # an encoder and a decoder, of BART's kind
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
    "d_model": 32,
}
BART = {"vocab_size": VOCAB, "max_position_embeddings": 32, **CODER}
IMAGE = {"image_size": 32, "patch_size": 8, **LAYERS}
AUDIO = {"vocab_size": 32, "conv_dim": (16,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, **LAYERS}
SERIES = {
    **CODER,
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 2,
    "num_static_categorical_features": 1,
    "cardinality": [3],
    "embedding_dimension": [2],
}


def classes(n: int, *shape: int) -> Tensor:
    return torch.randint(0, n, shape or (BATCH,))


def tokens(pad: int = 0, length: int = LENGTH) -> dict[str, Tensor]:
    """A batch of two sentences, the second of them shorter."""
    ids, mask = torch.randint(3, VOCAB, (BATCH, length)), torch.ones(BATCH, length, dtype=torch.long)
    ids[1, -3:], mask[1, -3:] = pad, 0
    return {"input_ids": ids, "attention_mask": mask}


def text(pad: int = 0, length: int = LENGTH) -> dict[str, Tensor]:
    """For a language model: the labels are the words themselves, without the padding."""
    made = tokens(pad, length)
    return {**made, "labels": made["input_ids"].masked_fill(made["attention_mask"] == 0, -100)}


def masked(pad: int = 0, length: int = LENGTH) -> dict[str, Tensor]:
    """For a masked language model: every third word is hidden, and is what to find."""
    made = text(pad, length)
    hidden = (torch.arange(length) % 3 == 1) & (made["attention_mask"] == 1)
    made["labels"].masked_fill_(~hidden, -100)
    return {**made, "input_ids": made["input_ids"].masked_fill(hidden, VOCAB - 1)}


def translation(pad: int = 0, length: int = LENGTH) -> dict[str, Tensor]:
    labels = classes(VOCAB, BATCH, 7)
    labels[1, -2:] = -100
    return {**tokens(pad, length), "labels": labels}


def image(size: int = 32) -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": classes(3)}


def audio(labels: Tensor) -> dict[str, Tensor]:
    return {"input_values": torch.randn(BATCH, 6400), "labels": labels}


def series() -> dict[str, Tensor]:
    past, future, features = 11, 4, 2  # the past: the context and the longest lag
    return {
        "past_values": torch.randn(BATCH, past),
        "past_time_features": torch.randn(BATCH, past, features),
        "past_observed_mask": torch.ones(BATCH, past),
        "static_categorical_features": classes(3, BATCH, 1),
        "future_values": torch.randn(BATCH, future),
        "future_time_features": torch.randn(BATCH, future, features),
    }


# ---- encoders of text


@case("hf/bert")
def bert() -> Case:
    return Case(hf.BertForMaskedLM(hf.BertConfig(**SMALL)), {**masked(), "token_type_ids": classes(2, BATCH, LENGTH)})


@case("hf/bert-hidden-states")
def bert_hidden_states() -> Case:
    return Case(hf.BertForMaskedLM(hf.BertConfig(**SMALL, output_hidden_states=True)), masked())


@case("hf/bert-sequence")
def bert_sequence() -> Case:
    return Case(hf.BertForSequenceClassification(hf.BertConfig(**SMALL, num_labels=3)), {**tokens(), "labels": classes(3)})


@case("hf/bert-token")
def bert_token() -> Case:
    inputs = tokens()
    labels = classes(5, BATCH, LENGTH).masked_fill(inputs["attention_mask"] == 0, -100)
    return Case(hf.BertForTokenClassification(hf.BertConfig(**SMALL, num_labels=5)), {**inputs, "labels": labels})


@case("hf/bert-qa")
def bert_qa() -> Case:
    answer = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([4, 3])}
    return Case(hf.BertForQuestionAnswering(hf.BertConfig(**SMALL)), {**tokens(), **answer})


@case("hf/roberta")
def roberta() -> Case:
    return Case(hf.RobertaForMaskedLM(hf.RobertaConfig(**SMALL)), masked(pad=1))


@case("hf/distilbert")
def distilbert() -> Case:
    config = hf.DistilBertConfig(vocab_size=VOCAB, max_position_embeddings=32, dim=32, n_layers=2, n_heads=4, hidden_dim=64)
    return Case(hf.DistilBertForMaskedLM(config), masked())


@case("hf/albert")
def albert() -> Case:
    return Case(hf.AlbertForMaskedLM(hf.AlbertConfig(**SMALL, embedding_size=16)), masked())


@case("hf/electra")
def electra() -> Case:
    labels = classes(2, BATCH, LENGTH)
    return Case(hf.ElectraForPreTraining(hf.ElectraConfig(**SMALL, embedding_size=16)), {**tokens(), "labels": labels})


@case("hf/deberta-v2")
def deberta_v2() -> Case:
    # as the published DeBERTa-v3 has it
    published = {"pos_att_type": ["p2c", "c2p"], "share_att_key": True, "norm_rel_ebd": "layer_norm", "type_vocab_size": 0}
    config = hf.DebertaV2Config(
        **SMALL, **published, relative_attention=True, position_buckets=8, max_relative_positions=-1, position_biased_input=False
    )
    return Case(hf.DebertaV2ForMaskedLM(config), masked())


@case("hf/mpnet")
def mpnet() -> Case:
    return Case(hf.MPNetForMaskedLM(hf.MPNetConfig(**SMALL)), masked(pad=1))


@case("hf/mobilebert")
def mobilebert() -> Case:
    config = hf.MobileBertConfig(**SMALL, embedding_size=16, intra_bottleneck_size=16)
    return Case(hf.MobileBertForMaskedLM(config), masked())


@case("hf/funnel")
def funnel() -> Case:
    config = hf.FunnelConfig(
        vocab_size=VOCAB, block_sizes=[1, 1], num_decoder_layers=1, d_model=32, n_head=4, d_head=8, d_inner=64
    )
    return Case(hf.FunnelForMaskedLM(config), masked(length=12))


@case("hf/xlnet")
def xlnet() -> Case:
    config = hf.XLNetConfig(vocab_size=VOCAB, d_model=32, n_layer=2, n_head=4, d_inner=64, pad_token_id=0)
    return Case(hf.XLNetLMHeadModel(config), masked())


# ---- decoders of text


@case("hf/gpt2")
def gpt2() -> Case:
    return Case(hf.GPT2LMHeadModel(hf.GPT2Config(**GPT, bos_token_id=1, eos_token_id=2)), text())


@case("hf/gpt_neo")
def gpt_neo() -> Case:
    shape = {"vocab_size": VOCAB, "max_position_embeddings": 32, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    config = hf.GPTNeoConfig(**shape, attention_types=[[["global", "local"], 1]], window_size=4, bos_token_id=1, eos_token_id=2)
    return Case(hf.GPTNeoForCausalLM(config), text())


@case("hf/gpt_neox")
def gpt_neox() -> Case:
    return Case(hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SMALL)), text())


@case("hf/gptj")
def gptj() -> Case:
    return Case(hf.GPTJForCausalLM(hf.GPTJConfig(**GPT, rotary_dim=4, bos_token_id=1, eos_token_id=2)), text())


@case("hf/opt")
def opt() -> Case:
    shape = {"vocab_size": VOCAB, "max_position_embeddings": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Case(hf.OPTForCausalLM(hf.OPTConfig(**shape, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64)), text(pad=1))


@case("hf/bloom")
def bloom() -> Case:
    return Case(hf.BloomForCausalLM(hf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)), text(pad=3))


@case("hf/llama")
def llama() -> Case:
    return Case(hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=2)), text())


@case("hf/mistral")
def mistral() -> Case:
    return Case(hf.MistralForCausalLM(hf.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=4)), text())


@case("hf/mixtral")
def mixtral() -> Case:
    return Case(hf.MixtralForCausalLM(hf.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)), text())


@case("hf/qwen2")
def qwen2() -> Case:
    return Case(hf.Qwen2ForCausalLM(hf.Qwen2Config(**SMALL, num_key_value_heads=2)), text())


@case("hf/qwen2_moe")
def qwen2_moe() -> Case:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32}
    return Case(hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**SMALL, **experts, num_key_value_heads=2)), text())


@case("hf/qwen3")
def qwen3() -> Case:
    return Case(hf.Qwen3ForCausalLM(hf.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8)), text())


@case("hf/gemma2")
def gemma2() -> Case:
    return Case(hf.Gemma2ForCausalLM(hf.Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=4)), text())


@case("hf/phi3")
def phi3() -> Case:
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return Case(hf.Phi3ForCausalLM(hf.Phi3Config(**SMALL, **special, num_key_value_heads=2)), text())


@case("hf/falcon")
def falcon() -> Case:
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Case(hf.FalconForCausalLM(hf.FalconConfig(**shape)), text())


@case("hf/mamba")
def mamba() -> Case:
    config = hf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8)
    return Case(hf.MambaForCausalLM(config), text())


# ---- from text to text


@case("hf/t5")
def t5() -> Case:
    return Case(hf.T5ForConditionalGeneration(hf.T5Config(**T5)), translation())


@case("hf/longt5")
def longt5() -> Case:
    return Case(hf.LongT5ForConditionalGeneration(hf.LongT5Config(**T5, local_radius=3)), translation(length=12))


@case("hf/bart")
def bart() -> Case:
    return Case(hf.BartForConditionalGeneration(hf.BartConfig(**BART)), translation(pad=1))


@case("hf/marian")
def marian() -> Case:
    special = {"pad_token_id": 98, "decoder_start_token_id": 98, "eos_token_id": 0, "forced_eos_token_id": 0}
    return Case(hf.MarianMTModel(hf.MarianConfig(**BART, **special)), translation(pad=98))


@case("hf/pegasus")
def pegasus() -> Case:
    return Case(hf.PegasusForConditionalGeneration(hf.PegasusConfig(**BART)), translation())


# ---- audio


@case("hf/whisper")
def whisper() -> Case:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = hf.WhisperConfig(
        **CODER, **special, vocab_size=VOCAB, num_mel_bins=16, max_source_positions=12, max_target_positions=16
    )
    inputs = {"input_features": torch.randn(BATCH, 16, 24), "labels": translation()["labels"]}
    return Case(hf.WhisperForConditionalGeneration(config), inputs)


@case("hf/wav2vec2-cls")
def wav2vec2_cls() -> Case:
    config = hf.Wav2Vec2Config(**AUDIO, classifier_proj_size=16, num_labels=3)
    return Case(hf.Wav2Vec2ForSequenceClassification(config), audio(classes(3)))


@case("hf/wav2vec2-ctc")
def wav2vec2_ctc() -> Case:
    return Case(hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**AUDIO)), audio(torch.randint(1, 32, (BATCH, 4))))


@case("hf/wav2vec2-cls-without-masks")
def wav2vec2_cls_without_masks() -> Case:
    """Its masks in time come from NumPy; without them it leaves layers out at random (layerdrop=0.1)."""
    config = hf.Wav2Vec2Config(**AUDIO, classifier_proj_size=16, num_labels=3, apply_spec_augment=False)
    return Case(hf.Wav2Vec2ForSequenceClassification(config), audio(classes(3)))


@case("hf/wav2vec2-ctc-without-masks")
def wav2vec2_ctc_without_masks() -> Case:
    config = hf.Wav2Vec2Config(**AUDIO, apply_spec_augment=False, layerdrop=0.3)
    return Case(hf.Wav2Vec2ForCTC(config), audio(torch.randint(1, 32, (BATCH, 4))))


@case("hf/hubert-without-masks")
def hubert_without_masks() -> Case:
    config = hf.HubertConfig(**AUDIO, apply_spec_augment=False, layerdrop=0.3)
    return Case(hf.HubertForCTC(config), audio(torch.randint(1, 32, (BATCH, 4))))


@case("hf/hubert")
def hubert() -> Case:
    return Case(hf.HubertForCTC(hf.HubertConfig(**AUDIO)), audio(torch.randint(1, 32, (BATCH, 4))))


# ---- images


@case("hf/vit")
def vit() -> Case:
    return Case(hf.ViTForImageClassification(hf.ViTConfig(**IMAGE, num_labels=3)), image())


@case("hf/deit")
def deit() -> Case:
    return Case(hf.DeiTForImageClassification(hf.DeiTConfig(**IMAGE, num_labels=3)), image())


@case("hf/beit")
def beit() -> Case:
    return Case(hf.BeitForImageClassification(hf.BeitConfig(**IMAGE, num_labels=3, use_relative_position_bias=True)), image())


@case("hf/dinov2")
def dinov2() -> Case:
    shape = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Case(hf.Dinov2ForImageClassification(hf.Dinov2Config(**shape, mlp_ratio=2, num_labels=3)), image())


@case("hf/swin")
def swin() -> Case:
    config = hf.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=3
    )
    return Case(hf.SwinForImageClassification(config), image())


@case("hf/convnext")
def convnext() -> Case:
    config = hf.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], num_labels=3)
    return Case(hf.ConvNextForImageClassification(config), image())


@case("hf/resnet")
def resnet() -> Case:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], num_labels=3)
    return Case(hf.ResNetForImageClassification(config), image())


@case("hf/mobilenet_v2")
def mobilenet_v2() -> Case:
    # 64 pixels: of 32, one would be left for the last batch norms
    return Case(hf.MobileNetV2ForImageClassification(hf.MobileNetV2Config(depth_multiplier=0.25, num_labels=3)), image(size=64))


@case("hf/segformer")
def segformer() -> Case:
    config = hf.SegformerConfig(
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
        num_labels=4,
    )
    return Case(hf.SegformerForSemanticSegmentation(config), {**image(), "labels": classes(4, BATCH, 32, 32)})


@case("hf/detr")
def detr() -> Case:
    backbone = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])
    config = hf.DetrConfig(**CODER, backbone_config=backbone, use_timm_backbone=False, num_queries=5, num_labels=3)
    labels = [
        {"class_labels": torch.tensor([0, 2]), "boxes": torch.tensor([[0.3, 0.3, 0.2, 0.4], [0.6, 0.7, 0.3, 0.2]])},
        {"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.4, 0.4]])},
    ]
    return Case(hf.DetrForObjectDetection(config), {**image(), "labels": labels})


# ---- images and text


def pair(inputs: dict[str, Tensor]) -> dict[str, Any]:
    return {**inputs, "pixel_values": torch.randn(BATCH, 3, 32, 32), "return_loss": True}


@case("hf/clip")
def clip() -> Case:
    inputs = tokens(pad=98)
    inputs["input_ids"][[0, 1], [-1, -4]] = 98  # a sentence ends with the token that also pads it
    config = hf.CLIPConfig(
        text_config={**SMALL, "bos_token_id": 1, "eos_token_id": 98, "pad_token_id": 98}, vision_config=IMAGE, projection_dim=16
    )
    return Case(hf.CLIPModel(config), pair(inputs))


@case("hf/siglip")
def siglip() -> Case:
    text_config = {**SMALL, "projection_size": 32, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 1}
    config = hf.SiglipConfig(text_config=text_config, vision_config=IMAGE)
    return Case(hf.SiglipModel(config), pair({"input_ids": tokens(pad=1)["input_ids"]}))


@case("hf/blip-text")
def blip_text() -> Case:
    special = {"bos_token_id": 1, "sep_token_id": 2, "eos_token_id": 2}
    config = hf.BlipTextConfig(**SMALL, **special, encoder_hidden_size=32)
    seen = {"encoder_hidden_states": torch.randn(BATCH, 5, 32), "encoder_attention_mask": torch.ones(BATCH, 5, dtype=torch.long)}
    return Case(BlipTextLMHeadModel(config), {**text(), **seen})


# ---- time series


@case("hf/time_series_transformer")
def time_series_transformer() -> Case:
    return Case(hf.TimeSeriesTransformerForPrediction(hf.TimeSeriesTransformerConfig(**SERIES)), series())


@case("hf/autoformer")
def autoformer() -> Case:
    return Case(hf.AutoformerForPrediction(hf.AutoformerConfig(**SERIES, label_length=4, moving_average=5)), series())


@case("hf/patchtst")
def patchtst() -> Case:
    shape = {"d_model": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
    config = hf.PatchTSTConfig(
        **shape, num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, prediction_length=4
    )
    inputs = {"past_values": torch.randn(BATCH, 16, 2), "future_values": torch.randn(BATCH, 4, 2)}
    return Case(hf.PatchTSTForPrediction(config), inputs)
